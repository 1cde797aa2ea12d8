"""torch's collectives for ranks on one machine, over Unix sockets and on the caller's own thread.

Gloo runs a thread for every group that wakes a hundred times a second, and hands each operation to two others. With
hundreds of ranks on a few processors that alone fills them. Here a rank that waits sleeps in the kernel until the
bytes that it waits for are there. Every pair of a group's members has a connection of its own, made at the first
operation; small gathers and sums of many members go over few of them (``by_halves``).

Registered as the torch backend ``unix``; only sums, of integers and floats, and whole tensors of equal shape.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from uvcc_engine.parallel import by_halves
from uvcc_engine.parallel.member_connection import MemberConnection, flush, memory_of

NAME: Final = "unix"
_INDEX: Final = struct.Struct("<I")
_CALLER_S: Final = 5.0  # for a caller of this user to say who it is
_WHOLE_BYTES: Final = 64 << 10  # a larger sum is made slice by slice
Finish = Callable[[], None]


class Done(dist.Work):
    """An operation that was started; ``wait`` ends it."""

    def __init__(self, finish: Finish = lambda: None) -> None:
        super().__init__()
        self._finish = finish

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until done. Raises RuntimeError if a member is gone or does not come; the group has the timeout."""
        self._finish()
        return True


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
        if by_halves.worth_it(self._size, x):
            return self._small_sum(x)
        key, mine = self._begin(), x.contiguous()
        sent = {line: line.send(key, memory_of(mine)) for line in self._others().values()}

        def finish() -> None:
            theirs = torch.empty_like(mine)
            if self._size == 2:  # in either order the same, and a pass over memory less
                self._lines[1 - self._me].receive(key, memory_of(theirs))
                x.copy_(theirs.add_(mine))
                flush(sent)
                return
            total = torch.zeros_like(mine)
            for member in range(self._size):
                if member != self._me:
                    self._lines[member].receive(key, memory_of(theirs))
                total += mine if member == self._me else theirs
            x.copy_(total)
            flush(sent)

        return Done(finish)

    def _small_sum(self, x: Tensor) -> Done:
        """All members' tensors, added up here in the order of the members: floats, too, are the same at all."""
        every = torch.empty((self._size, x.numel()), dtype=x.dtype)
        gathered = self.all_gather_single(every, x)

        def finish() -> None:
            gathered.wait()
            x.copy_(_added(every).reshape(x.shape))

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
            sent = {line: line.send(key, memory_of(mine)) for line in self._others().values()}
            return Done(lambda: flush(sent))
        return Done(lambda: self._fill(root, key, x))

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Done:
        """All members' tensors one after the other, at every member."""
        key, mine = self._begin(), source.contiguous()
        parts = output.reshape(self._size, -1)
        if by_halves.worth_it(self._size, mine):
            gather = by_halves.gathered(self._others(), self._me, key, mine.reshape(-1))
            return Done(lambda: gather(parts))
        sent = {line: line.send(key, memory_of(mine)) for line in self._others().values()}

        def finish() -> None:
            for member in range(self._size):
                if member == self._me:
                    parts[member] = mine.reshape(-1)
                else:
                    self._lines[member].receive(key, memory_of(parts[member]))
            flush(sent)

        return Done(finish)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Done:
        """Member k gets the sum of all members' slice k."""
        _check_sum(opts)
        key, parts = self._begin(), source.contiguous().reshape(self._size, -1)
        if by_halves.worth_it(self._size, parts[0]):
            scatter = by_halves.scattered(self._others(), self._me, key, parts)
            return Done(lambda: _put(output, scatter()))
        sent = {line: line.send(key, memory_of(parts[member])) for member, line in self._others().items()}

        def finish() -> None:
            theirs, total = torch.empty_like(parts[0]), torch.zeros_like(parts[0])
            for member in range(self._size):
                if member != self._me:
                    self._lines[member].receive(key, memory_of(theirs))
                total += parts[member] if member == self._me else theirs
            output.copy_(total.reshape(output.shape))
            flush(sent)

        return Done(finish)

    # the names of older versions
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> Done:
        """Start to send to member ``to``; tags are not negative."""
        line = self._others()[to]
        sent = line.send(tag, memory_of(tensors[0].contiguous()))
        return Done(lambda: line.flush(sent))

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Done:
        """Receive from member ``source``."""
        self._others()
        return Done(lambda: self._fill(source, tag, tensors[0]))

    @property
    def messages(self) -> int:
        """How many this member has sent to others."""
        return sum(line.messages for line in self._lines.values())

    # -- inside ------------------------------------------------------------------------------------------------------

    def _begin(self) -> int:
        """The number of the next collective; negative, for tags are not."""
        self._operations += 1
        return -self._operations

    def _fill(self, source: int, key: int, x: Tensor) -> None:
        whole = x if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype)
        self._lines[source].receive(key, memory_of(whole))
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


def _added(rows: Tensor) -> Tensor:
    """The sum of the rows, of floats one after the other: torch's own order is not that of every processor."""
    if not rows.is_floating_point():
        return rows.sum(0, dtype=rows.dtype)
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def _put(output: Tensor, x: Tensor) -> None:
    output.copy_(x.reshape(output.shape))


def _check_sum(opts: Any) -> None:
    if opts is not None and opts.reduceOp != dist.ReduceOp.SUM:
        raise RuntimeError(f"this backend only adds up, not {opts.reduceOp}")


def register() -> str:
    """Make the backend known to torch, once; returns its name."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, UnixGroup, devices=["cpu"])
    return NAME
