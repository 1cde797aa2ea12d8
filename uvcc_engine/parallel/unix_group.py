"""torch's collectives for ranks on one machine, over Unix sockets and on the caller's own thread.

Gloo runs a thread for every group that wakes a hundred times a second, and hands each operation to two others. With
hundreds of ranks on a few processors that alone fills them. Here a rank that waits sleeps in the kernel until the
bytes that it waits for are there. Every pair of a group's members has a connection of its own, made at the first
operation; what a full socket does not take at once is written by a thread that lives until it has.

Registered as the torch backend ``unix``; only sums, of integers and floats, and whole tensors of equal shape.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

NAME: Final = "unix"
HEAD: Final = struct.Struct("<qQ")  # which operation or tag, how many bytes follow
_INDEX: Final = struct.Struct("<I")
_MOST_BYTES: Final = 1 << 36  # of a message: memory is never asked for more
_CALLER_S: Final = 5.0  # for a caller of this user to say who it is
_WHOLE_BYTES: Final = 64 << 10  # a larger sum is made slice by slice
Finish = Callable[[], None]


class LateMemberError(RuntimeError):
    """A member sent or took nothing for the whole of the group's timeout."""


class Done(dist.Work):
    """An operation that was started; ``wait`` ends it."""

    def __init__(self, finish: Finish = lambda: None) -> None:
        super().__init__()
        self._finish = finish

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until done. Raises RuntimeError if a member is gone or does not come; the group has the timeout."""
        self._finish()
        return True


class MemberConnection:
    """One connection to a member. Sending never blocks; receiving sleeps until the wanted message is there."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        sock.setblocking(True)
        limit = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, limit)
        self._sock, self._timeout_s = sock, timeout_s
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


class UnixGroup(dist.ProcessGroup):
    """A process group of torch over :class:`MemberConnection`; made by torch through the backend's name.

    Tensors are contiguous and lie on the host; their shape is the same at all members, as torch asks.
    """

    backend_name = NAME

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stubs know the other constructor only
        self._store, self._me, self._size, self._timeout_s = store, rank, size, timeout.total_seconds()
        self._lines: Mapping[int, MemberConnection] = {}
        self._operations = 0
        self._names = {"name": "", "desc": ""}
        if rank == 0:
            store.set("meeting", secrets.token_hex(8))

    # -- what torch calls --------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return self.backend_name

    def getGroupName(self) -> str:
        return self._names["name"]

    def setGroupName(self, name: str) -> None:
        self._names["name"] = name

    def getGroupDesc(self) -> str:
        return self._names["desc"]

    def setGroupDesc(self, desc: str) -> None:
        self._names["desc"] = desc

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Done:  # type: ignore[override]
        """The sum of all members' tensor at every member."""
        x = tensors[0]
        _check_sum(opts)
        if x.numel() * x.element_size() > _WHOLE_BYTES and self._size > 2:
            return self._large_sum(x)
        key, mine = self._begin(), x.contiguous()
        sent = {line: line.send(key, _bytes(mine)) for line in self._others().values()}

        def finish() -> None:
            theirs = torch.empty_like(mine)
            if self._size == 2:  # in either order the same, and a pass over memory less
                self._lines[1 - self._me].receive(key, _bytes(theirs))
                x.copy_(theirs.add_(mine))
                _flush(sent)
                return
            total = torch.zeros_like(mine)
            for member in range(self._size):
                if member != self._me:
                    self._lines[member].receive(key, _bytes(theirs))
                total += mine if member == self._me else theirs
            x.copy_(total)
            _flush(sent)

        return Done(finish)

    def _large_sum(self, x: Tensor) -> Done:
        flat = torch.zeros(-(-x.numel() // self._size) * self._size, dtype=x.dtype)
        flat[: x.numel()] = x.reshape(-1)
        slice_ = torch.empty(len(flat) // self._size, dtype=x.dtype)
        scattered = self.reduce_scatter_single(slice_, flat)

        def finish() -> None:
            scattered.wait()
            self.all_gather_single(flat, slice_).wait()
            x.copy_(flat[: x.numel()].reshape(x.shape))

        return Done(finish)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Done:  # type: ignore[override]
        """The root's tensor at every member."""
        x, root = tensors[0], int(opts.rootRank)
        key = self._begin()
        if root == self._me:
            mine = x.contiguous()
            sent = {line: line.send(key, _bytes(mine)) for line in self._others().values()}
            return Done(lambda: _flush(sent))
        return Done(lambda: self._fill(root, key, x))

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Done:
        """All members' tensors one after the other, at every member."""
        key, mine = self._begin(), source.contiguous()
        sent = {line: line.send(key, _bytes(mine)) for line in self._others().values()}
        parts = output.reshape(self._size, -1)

        def finish() -> None:
            for member in range(self._size):
                if member == self._me:
                    parts[member] = mine.reshape(-1)
                else:
                    self._lines[member].receive(key, _bytes(parts[member]))
            _flush(sent)

        return Done(finish)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Done:
        """Member k gets the sum of all members' slice k."""
        _check_sum(opts)
        key, parts = self._begin(), source.contiguous().reshape(self._size, -1)
        sent = {line: line.send(key, _bytes(parts[member])) for member, line in self._others().items()}

        def finish() -> None:
            theirs, total = torch.empty_like(parts[0]), torch.zeros_like(parts[0])
            for member in range(self._size):
                if member != self._me:
                    self._lines[member].receive(key, _bytes(theirs))
                total += parts[member] if member == self._me else theirs
            output.copy_(total.reshape(output.shape))
            _flush(sent)

        return Done(finish)

    # the names of older versions
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> Done:
        """Start to send to member ``to``; tags are not negative."""
        line = self._others()[to]
        sent = line.send(tag, _bytes(tensors[0].contiguous()))
        return Done(lambda: line.flush(sent))

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Done:
        """Receive from member ``source``."""
        self._others()
        return Done(lambda: self._fill(source, tag, tensors[0]))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _begin(self) -> int:
        """The number of the next collective; negative, for tags are not."""
        self._operations += 1
        return -self._operations

    def _fill(self, source: int, key: int, x: Tensor) -> None:
        whole = x if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype)
        self._lines[source].receive(key, _bytes(whole))
        if whole is not x:
            x.copy_(whole)

    def _others(self) -> Mapping[int, MemberConnection]:
        if not self._lines and self._size > 1:
            try:
                self._lines = self._connected()
            except OSError as error:
                raise RuntimeError(f"a member cannot be reached: {error}") from error
        return self._lines

    def _connected(self) -> Mapping[int, MemberConnection]:
        """A line to every other member: this one dials those before it and takes the calls of those behind it."""
        meeting = bytes(self._store.get("meeting")).decode()
        found: dict[int, socket.socket] = {}
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as own:
            own.bind(f"\0uvcc/group/{meeting}/{self._me}")
            own.listen(self._size)
            own.settimeout(self._timeout_s)
            self._store.set(f"up/{self._me}", b"1")
            for member in range(self._me):
                self._store.wait([f"up/{member}"])
                found[member] = sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                sock.connect(f"\0uvcc/group/{meeting}/{member}")
                sock.sendall(_INDEX.pack(self._me))
            while len(found) < self._size - 1:
                sock, _ = own.accept()
                member = calling_member(sock, min(_CALLER_S, self._timeout_s))
                if member in range(self._me + 1, self._size) and member not in found:
                    found[member] = sock
                else:
                    sock.close()
        return {member: MemberConnection(found[member], self._timeout_s) for member in sorted(found)}


def calling_member(sock: socket.socket, timeout_s: float) -> int:
    """Who calls: a member's index, -1 for another user's process or one that says nothing sensible."""
    if sys.platform != "linux":  # see groups._backend: this is never chosen there
        return -1
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.getuid():
        return -1
    sock.settimeout(timeout_s)
    try:
        said = sock.recv(_INDEX.size, socket.MSG_WAITALL)
    except OSError:
        return -1
    return int(_INDEX.unpack(said)[0]) if len(said) == _INDEX.size else -1


def _flush(sent: Mapping[MemberConnection, int]) -> None:
    for line, upto in sent.items():
        line.flush(upto)


def _bytes(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return x.numpy().data.cast("B") if x.numel() else memoryview(b"")


def _check_size(key: int, found: int, wanted: int) -> None:
    if found != wanted:
        raise RuntimeError(f"a member sent {found} bytes for operation {key}, {wanted} were due")


def _check_sum(opts: Any) -> None:
    if opts is not None and opts.reduceOp != dist.ReduceOp.SUM:
        raise RuntimeError(f"this backend only adds up, not {opts.reduceOp}")


def register() -> str:
    """Make the backend known to torch, once; returns its name."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, UnixGroup, devices=["cpu"])
    return NAME
