"""A connection between two members of a party's group: whole messages, by number, and no thread that waits for any.

Sending never blocks: what a full socket does not take at once is written by a thread that lives until it has.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from collections.abc import Mapping
from typing import Final

from torch import Tensor

HEAD: Final = struct.Struct("<qQ")  # which operation or tag, how many bytes follow
_MOST_BYTES: Final = 1 << 36  # of a message: memory is never asked for more


class LateMemberError(RuntimeError):
    """A member sent or took nothing for the whole of the group's timeout."""


class MemberConnection:
    """One connection to a member. Sending never blocks; receiving sleeps until the wanted message is there."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        sock.setblocking(True)
        limit = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, limit)
        self._sock, self._timeout_s = sock, timeout_s
        self.messages = 0  # handed over to :meth:`send`
        self._left: deque[memoryview] = deque()
        self._queued = self._written = 0  # pieces that the socket did not take at once, and those that it took since
        self._news = threading.Condition()
        self._reading = threading.Lock()
        self._early: dict[int, deque[bytearray]] = {}
        self._broken: OSError | None = None

    def send(self, key: int, data: memoryview) -> int:
        """Hand over a message; what the socket does not take now is copied and follows by itself.

        Returns up to where :meth:`flush` has to wait for it. Raises RuntimeError, as torch's backends do, if the member
        is gone.
        """
        self.messages += 1
        parts = [memoryview(HEAD.pack(key, len(data))), data]
        with self._news:
            if self._broken is not None:
                raise RuntimeError(f"a member is gone: {self._broken}")
            if not self._left:
                parts = self._now(parts)
            return self._leave([memoryview(bytes(part)) for part in parts if len(part)])

    def _leave(self, parts: list[memoryview]) -> int:
        """Have a thread write these, unless one is at it; up to where that is."""
        idle = not self._left
        self._left += parts
        self._queued += len(parts)
        if idle and self._left:
            threading.Thread(target=self._write, name="group writer", daemon=True).start()
        return self._queued

    def _now(self, parts: list[memoryview]) -> list[memoryview]:
        """Send without waiting; returns what is left."""
        try:
            sent = self._sock.sendmsg(parts, [], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return parts
        except OSError as error:
            raise RuntimeError(f"a member is gone: {error}") from error
        while parts and sent >= len(parts[0]):
            sent -= len(parts.pop(0))
        return [parts[0][sent:], *parts[1:]] if parts else []

    def _write(self) -> None:
        while True:
            with self._news:
                if not self._left or self._broken is not None:
                    self._news.notify_all()
                    return
                piece = self._left[0]
            try:
                self._sock.sendall(piece)
            except OSError as error:
                with self._news:
                    self._broken = error
                continue
            with self._news:
                self._left.popleft()
                self._written += 1
                self._news.notify_all()

    def flush(self, sent: int) -> None:
        """Wait until what :meth:`send` handed over up to ``sent`` is in the socket.

        Not for what follows: both members may have begun a later operation, and neither takes its message before this
        one is done. Raises RuntimeError if it cannot get there, LateMemberError if nothing was taken for the timeout.
        """
        if self._written < sent:
            with self._news:
                self._news.wait_for(lambda: self._written >= sent or self._broken is not None)
        if isinstance(self._broken, BlockingIOError):
            raise LateMemberError(f"timed out, a member took nothing for {self._timeout_s:g} s")
        if self._broken is not None:
            raise RuntimeError(f"a member does not take what was sent: {self._broken}")

    def receive(self, key: int, into: memoryview) -> None:
        """Fill ``into`` with the message ``key``; those before it are kept for who asks for them.

        Raises RuntimeError, as torch's backends do, if the member is gone or does not come in time.
        """
        with self._reading:
            if (kept := self._early.get(key)) is not None:
                whole = kept.popleft()
                if not kept:
                    del self._early[key]
                _check_size(key, len(whole), len(into))
                into[:] = whole
                return
            head = memoryview(bytearray(HEAD.size))
            while True:
                self._fill(head)
                found, size = HEAD.unpack(head)
                if found == key:
                    _check_size(key, size, len(into))
                    self._fill(into)
                    return
                if size > _MOST_BYTES:
                    raise RuntimeError(f"a member sends {size} bytes for operation {found}")
                other = bytearray(size)
                self._fill(memoryview(other))
                self._early.setdefault(found, deque()).append(other)

    def _fill(self, into: memoryview) -> None:
        done = 0
        while done < len(into):
            try:
                count = self._sock.recv_into(into[done:] if done else into, 0, socket.MSG_WAITALL)
            except BlockingIOError as error:
                raise self.late() from error
            except OSError as error:
                raise RuntimeError(f"a member is gone: {error}") from error
            if not count:
                raise RuntimeError("a member closed the connection")
            done += count

    def late(self) -> LateMemberError:
        """What to raise where nothing came for the whole timeout."""
        return LateMemberError(f"timed out waiting for a member: nothing came for {self._timeout_s:g} s")

    def close(self) -> None:
        self._sock.close()


def flush(sent: Mapping[MemberConnection, int]) -> None:
    """Wait until what was handed to each connection, up to where its ``send`` said, is in its socket. Raises
    RuntimeError as :meth:`MemberConnection.flush`."""
    for line, upto in sent.items():
        line.flush(upto)


def memory_of(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor of any shape."""
    return x.numpy().data.cast("B") if x.numel() else memoryview(b"")


def _check_size(key: int, found: int, wanted: int) -> None:
    if found != wanted:
        raise RuntimeError(f"a member sent {found} bytes for operation {key}, {wanted} were due")
