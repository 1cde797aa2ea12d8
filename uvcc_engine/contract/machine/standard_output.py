"""Standard output of a command: any text fits it, and what can no longer be written to it is told, not thrown."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from types import NoneType
from typing import Final

from uvcc_engine.contract.errors import UvccError

_HINT: Final = "free space there, or send it elsewhere"


class _Output(io.TextIOWrapper):
    """Standard output that remembers what kept it from being written: such an error is told apart from a file's."""

    lost: OSError | None = None

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as e:
            self.lost = e
            raise

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as e:
            self.lost = e
            raise


class _Closed(_Output):
    """What stands for a stream that was closed before this process began: nothing that it takes is ever read.

    A write is no error, so that an action is done to its end; that something was lost is told then.
    """

    def write(self, text: str, /) -> int:
        if text:
            self.lost = OSError(errno.EBADF, "it was closed before this command began")
        return len(text)


def guarded(run: Callable[[], int]) -> int:
    """The exit code of ``run``, a command. One whose reader leaves (``... | head``) ends there, in silence, with 1: of
    many a command 0 is a verdict, which it has not come to.

    Raises UvccError where standard output cannot be written otherwise: its disk is full, say, or it was closed before
    and something was to be said. What lies in the buffer is written here: at the interpreter's exit nobody could tell
    it any more.
    """
    out = _taken()
    if out is None:
        return run()
    code = 1
    try:
        try:
            code = run()
        finally:  # also when --help has ended it
            out.flush()
            if isinstance(out, _Closed) and out.lost and isinstance(sys.exception(), SystemExit | NoneType):
                raise out.lost
    except OSError as e:
        if e is not out.lost:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # where the rest goes
        if isinstance(e, BrokenPipeError):
            return code
        hint = "send it to a file, or to /dev/null" if isinstance(out, _Closed) else _HINT
        raise UvccError(f"cannot write standard output: {e.strerror}", hint) from e
    return code


def _taken() -> _Output | None:
    """Standard output in a form of our own; None where something else stands in its place, as in a test.

    A character that its encoding lacks is written as an escape, as to standard error: a name from elsewhere ends no
    command. Standard error that was closed before this process began takes everything and keeps nothing.
    """
    closed = None
    if sys.stdout is None:  # here first: of the two the file with the lower number is standard output's
        sys.stdout = closed = _Closed(open(os.devnull, "wb"), "utf-8")  # noqa: SIM115  (for as long as the process lives)
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if closed is not None:
        return closed
    old = sys.stdout
    if type(old) is not io.TextIOWrapper or old is not sys.__stdout__:
        return None
    sys.stdout = out = _Output(
        old.buffer, old.encoding, "backslashreplace", line_buffering=old.line_buffering, write_through=old.write_through
    )
    return out
