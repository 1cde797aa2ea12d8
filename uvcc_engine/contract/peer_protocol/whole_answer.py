"""A relay's answer within a limit over all of it. The standard library's HTTP client limits each read alone, so that a
relay which sends a byte now and then holds whoever asked for as long as it likes. Standard library only."""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import time
from typing import Any, Final

TIMES: Final = 6.0
"""As long as so many of its reads may take, an answer may take in all."""


class _Until(io.RawIOBase):
    """What arrives at a socket until a moment of the monotonic clock."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, each_s: float, within_s: float) -> None:
        self._raw, self._sock, self._each_s, self._within_s = raw, sock, each_s, within_s
        self._end = time.monotonic() + within_s

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int | None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"its answer did not end in {self._within_s:g} s")
        self._sock.settimeout(min(left, self._each_s))
        return self._raw.readinto(into)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.settimeout(self._each_s)  # for the next request on it
        self._raw.close()
        super().close()


class _Whole(http.client.HTTPResponse):
    """Begins when its request has been sent."""

    def __init__(self, sock: socket.socket, *args: Any, **more: Any) -> None:
        super().__init__(sock, *args, **more)
        each_s = sock.gettimeout() or 0.0
        self.fp = io.BufferedReader(_Until(self.fp.detach(), sock, each_s, TIMES * each_s))


def limited(connection: http.client.HTTPConnection) -> http.client.HTTPConnection:
    """The same connection, which has a limit for each of its reads: no answer takes longer than ``TIMES`` as long."""
    connection.response_class = _Whole
    return connection
