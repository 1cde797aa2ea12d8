"""Reading what an auditor was handed: regular files only, at most so many bytes, JSON of bounded depth and density.

Whoever made a bundle chose its file types, sizes and contents. Nothing here waits for a FIFO, follows a link out of the
folder under audit, reads more than a stated bound, or lets a parser's own exceptions past: whatever is not as it must
be is an UnreadableError that names the file.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.parsing.canonical import canonical

KIB: Final = 1024
MIB: Final = 1024 * 1024
SMALL: Final = MIB  # a policy's signatures, a result, a list of signers
LARGEST: Final = 2048 * MIB  # nothing that is read as a whole or searched may be larger, whoever signed it
DEPTH: Final = 64
OLD: Final = "verify it with the release that wrote it; a run that began with that one is begun anew"
# JSON of evidence is hashes and signatures: far fewer than one comma or bracket in so many bytes, once short texts are
# allowed for. Without the bound, a file of "[[],[],..." takes twenty times its size in memory.
_BYTES_PER_TOKEN: Final = 16
_FREE_TOKENS: Final = 50_000
_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
MARKS: Final = re.compile(rb"[\[\]{}]|" + _STRING.pattern, re.DOTALL)
"""What structures JSON: a bracket, or a whole string (which may hold brackets)."""
_NO_BRACKET: Final = bytes(b for b in range(256) if b not in b"[]{}")
_FLAGS: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


def open_regular(path: Path, most: int = LARGEST, *, named: bool = False) -> io.BufferedReader:
    """Open a regular file of at most ``most`` bytes. Raises UnreadableError for anything else.

    A link is refused, unless the caller of the program ``named`` the path, who may keep files where he likes.
    """
    try:
        fd = os.open(path, _FLAGS if named else _FLAGS | os.O_NOFOLLOW)
    except (OSError, ValueError) as e:
        if not named and path.is_symlink():
            raise UnreadableError(f"{shown(path)} is a link", "put the file itself there") from e
        raise UnreadableError(f"cannot read {shown(path)}: {reason(e)}", "is it there, and yours to read?") from e
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise UnreadableError(f"{shown(path)} is {_kind(found.st_mode)}, not a file", "name a regular file")
        if found.st_size > most:
            raise UnreadableError(f"{shown(path)} has {found.st_size} bytes; at most {most} can belong there")
        return open(fd, "rb")
    except UnreadableError:
        os.close(fd)
        raise


def read_file(path: Path, most: int = SMALL, *, named: bool = False) -> bytes:
    """The bytes of a regular file of at most ``most`` bytes. Raises UnreadableError."""
    with open_regular(path, most, named=named) as file:
        try:
            data = file.read(most + 1)
        except (OSError, MemoryError) as e:
            raise UnreadableError(f"cannot read {shown(path)}: {reason(e)}", "fetch it again") from e
    if len(data) > most:
        raise UnreadableError(f"{shown(path)} grows beyond {most} bytes while it is read")
    return data


def read_text(path: Path, most: int = SMALL, *, named: bool = False) -> str:
    """The text of a regular UTF-8 file of at most ``most`` bytes. Raises UnreadableError."""
    try:
        return read_file(path, most, named=named).decode()
    except UnicodeDecodeError as e:
        raise UnreadableError(f"{shown(path)} is not UTF-8 text: {e.reason} at byte {e.start}") from e


def read_json(path: Path, most: int = SMALL, *, named: bool = False) -> Any:
    """The value of a JSON file, see :func:`parse_json`."""
    return parse_json(read_file(path, most, named=named), str(path))


def lines(path: Path, most: int) -> Iterator[bytes]:
    """The lines of a file, each without its newline, one at a time. Raises UnreadableError for a last one cut short."""
    with open_regular(path, most) as file:
        try:
            while line := file.readline(most):
                if not line.endswith(b"\n"):
                    raise UnreadableError(f"{shown(path)} is cut short", "fetch it again")
                yield line[:-1]
        except OSError as e:
            raise UnreadableError(f"cannot read {shown(path)}: {reason(e)}", "fetch it again") from e


# ---- JSON ----------------------------------------------------------------------------------------------------------


def parse_json(data: bytes, what: str) -> Any:
    """A JSON value of bounded depth and density, without duplicate keys, lone surrogates or odd numbers.

    Raises UnreadableError naming ``what``.
    """
    check_shape(data, what)
    try:
        value = json.loads(
            data.decode(),
            parse_constant=_refuse,
            parse_int=_whole,
            parse_float=_finite,
            object_pairs_hook=_object,
        )
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate cannot be written
    except (ValueError, RecursionError, MemoryError) as e:
        raise UnreadableError(f"{shown(what)} is not JSON: {reason(e)}", "fetch it again") from e
    return value


def parse_canonical(data: bytes, what: str) -> Any:
    """Read JSON that must be canonical (a final newline is allowed). Raises UnreadableError, naming ``what``.

    Whatever reads differently from how it is spelled (duplicate keys, spaces, other number forms) is refused.
    """
    body = data[:-1] if data.endswith(b"\n") else data
    value = parse_json(body, what)
    try:
        same = canonical(value) == body
    except (ValueError, RecursionError, MemoryError, ConfigError) as e:
        raise UnreadableError(f"{what} is not JSON: {reason(e)}", "fetch it again") from e
    if not same:
        raise UnreadableError(f"{what} is not canonical JSON (RFC 8785)", "it was changed, or written by another tool")
    return value


def check_shape(data: bytes, what: str) -> None:
    """Refuse JSON that nests too deep, or that would take far more memory than its size. Raises UnreadableError."""
    bare = _STRING.sub(b"", data)
    brackets = bare.translate(None, _NO_BRACKET)
    if bare.count(b",") + len(brackets) > _FREE_TOKENS + len(data) // _BYTES_PER_TOKEN:
        raise UnreadableError(f"{shown(what)} holds more values than evidence of its size can")
    depth = deepest = 0
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    if deepest > DEPTH:
        raise UnreadableError(f"{shown(what)} nests {deepest} levels deep; at most {DEPTH} are read")


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def _whole(text: str) -> int:
    if len(text) > 17 or abs(int(text)) >= 2**53:
        raise ValueError(f"the number {text[:20]} is out of range")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]} is out of range")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object names a key twice")
    return found


# ---- folders -------------------------------------------------------------------------------------------------------


@dataclass
class Tree:
    """What lies below a folder, by name relative to it (with ``/``), in order. ``odd``: links, FIFOs, sockets, devices.

    ``unread``: folders that could not be listed.
    """

    files: dict[str, int] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    odd: dict[str, str] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)


def tree(root: Path, most: int) -> Tree:
    """Everything below ``root``, following no link. Raises UnreadableError for more than ``most`` entries."""
    found, due, count = Tree(), [""], 0
    while due:
        at = due.pop()
        try:
            with os.scandir(root / at) as listing:
                for entry in listing:
                    count += 1
                    if count > most:
                        raise UnreadableError(
                            f"more than {most} files and folders lie under {shown(root)}", "name a run's folder"
                        )
                    name = f"{at}/{entry.name}" if at else entry.name
                    if entry.is_dir(follow_symlinks=False):
                        found.folders.append(name)
                        due.append(name)
                    elif entry.is_file(follow_symlinks=False):
                        found.files[name] = entry.stat(follow_symlinks=False).st_size
                    else:
                        found.odd[name] = _kind(entry.stat(follow_symlinks=False).st_mode)
        except OSError as e:
            if not at:
                raise UnreadableError(f"cannot list {shown(root)}: {reason(e)}", "name a folder that is yours") from e
            found.unread.append(at)
    found.files = dict(sorted(found.files.items()))
    found.folders.sort()
    found.unread.sort()
    return found


def _kind(mode: int) -> str:
    for test, name in _KINDS:
        if test(mode):
            return name
    return "no file"


_KINDS: Final = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISLNK, "a link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


# ---- showing -------------------------------------------------------------------------------------------------------


def shown(value: object, most: int = 400) -> str:
    """Text of unknown origin for a message: one line without control characters, cut to ``most`` characters."""
    text = str(value)
    cut = text if len(text) <= most else f"{text[: most - 20]}... ({len(text)} characters)"
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in cut)


def reason(error: BaseException) -> str:
    """Why something failed, in a few words."""
    if isinstance(error, MemoryError):
        return "there is not enough memory for it"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return shown(text, 200)
