"""A program in a pseudo-terminal of a given size: what it shows, what it costs, keys to press."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

import psutil

F9, ESCAPE = b"\x1b[20~", b"\x1b"


class Terminal:
    """Starts at once; a thread drains its output, so that it never blocks on us."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str] | None = None, *, size: tuple[int, int] = (160, 50)):
        self.started = time.perf_counter()
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ.update({"TERM": "xterm-256color", "COLORTERM": "truecolor", **(env or {})})
            os.execv(args[0], list(args))
        columns, rows = size
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.output = bytearray()
        self._seen: dict[bytes, float] = {}
        self._lock = threading.Condition()
        self._reader = threading.Thread(target=self._drain, daemon=True)
        self._reader.start()

    def _drain(self) -> None:
        while True:
            try:
                select.select([self.fd], [], [])
                data = os.read(self.fd, 1 << 16)
            except (OSError, ValueError):
                return
            if not data:
                return
            with self._lock:
                self.output += data
                if len(self.output) > 1 << 20:
                    del self.output[: 1 << 19]
                self._lock.notify_all()

    def wait_for(self, text: bytes, timeout: float = 20.0) -> float:
        """Seconds from the start until ``text`` was shown. Raises TimeoutError."""
        with self._lock:
            if not self._lock.wait_for(lambda: text in self.output, timeout):
                raise TimeoutError(f"{text!r} was not shown within {timeout} s")
        return time.perf_counter() - self.started

    def press(self, keys: bytes) -> None:
        """Write to the program's keyboard."""
        os.write(self.fd, keys)

    def cpu_s(self) -> float:
        """Processor seconds used so far."""
        used = psutil.Process(self.pid).cpu_times()
        return used.user + used.system

    def rss_mib(self) -> float:
        """Resident memory."""
        return psutil.Process(self.pid).memory_info().rss / (1 << 20)

    def close(self) -> None:
        """End the program."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGTERM)
            os.waitpid(self.pid, 0)
        os.close(self.fd)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def python(*args: str) -> list[str]:
    """This interpreter with arguments."""
    return [sys.executable, *args]
