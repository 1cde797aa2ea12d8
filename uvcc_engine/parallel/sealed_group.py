"""torch's collectives between a party's machines: those of ``unix_group`` over sealed connections.

Registered as the torch backend ``sealed``. Each pair of members has one connection, made at the group's first
operation and proven with the identities of the two pods. Tensors of another device than the host travel through the
host's memory; NCCL has no way between machines that would be sealed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from uvcc_engine.parallel import sealed_stream
from uvcc_engine.parallel.member_connection import HEAD, MemberConnection
from uvcc_engine.parallel.party_keys import PartyKeys
from uvcc_engine.parallel.sealed_door import Door, of_group
from uvcc_engine.parallel.sealed_stream import SealedStream
from uvcc_engine.parallel.unix_group import Done, UnixGroup

NAME: Final = "sealed"
_MEETING_BYTES: Final = 8
_DIAL_S: Final = 10.0
_PAUSE_S: Final = (0.05, 1.0)


class SealedConnection(MemberConnection):
    """A connection to a member whose messages are sealed on the way out and opened where they are wanted."""

    def __init__(self, stream: SealedStream, timeout_s: float) -> None:
        super().__init__(stream.sock, timeout_s)
        self._stream = stream

    def send(self, key: int, data: memoryview) -> int:
        """As with the base; what the socket does not take now waits sealed. Raises RuntimeError."""
        self.messages += 1
        with self._news:
            if self._broken is not None:
                raise RuntimeError(f"a member is gone: {self._broken}")
            upto = self._queued
            for record in self._stream.records(HEAD.pack(key, len(data)), data):
                upto = self._leave([record] if self._left else self._now([record]))
            return upto

    def _fill(self, into: memoryview) -> None:
        try:
            self._stream.fill(into)
        except BlockingIOError as error:
            raise self.late() from error
        except OSError as error:
            raise RuntimeError(f"a member is gone: {error}") from error

    def close(self) -> None:
        self._stream.close()


class PartyNetwork:
    """How this process reaches its sister ranks: its keys, its door, and the addresses it can be dialled at."""

    def __init__(self, keys: PartyKeys, rank: int, door: Door, addresses: Sequence[str]) -> None:
        self.keys, self.rank, self.door = keys, rank, door
        self.addresses = tuple(dict.fromkeys(a for a in addresses if a))

    @property
    def card(self) -> bytes:
        """What a group's store tells the other members: rank, port, addresses."""
        return " ".join([str(self.rank), str(self.door.port), *self.addresses]).encode()

    def dial(self, card: bytes, about: bytes, limit_s: float) -> SealedStream:
        """Connect to who left ``card``, at the first of its addresses where it is. Raises OSError."""
        rank, port, *addresses = card.decode().split()
        deadline, pause = time.monotonic() + limit_s, _PAUSE_S[0]
        while True:
            trouble: OSError = ConnectionError(f"rank {rank} gave no address")
            for address in addresses:
                left = min(_DIAL_S, deadline - time.monotonic())
                try:
                    where = (address, int(port))
                    return sealed_stream.dial(self.keys, self.rank, int(rank), where, about, max(0.1, left))
                except OSError as error:
                    trouble = error
            if time.monotonic() + pause > deadline:
                raise trouble
            time.sleep(pause)  # its door is full, or the way was broken for a moment
            pause = min(2 * pause, _PAUSE_S[1])


class SealedGroup(UnixGroup):
    """A process group of torch over :class:`SealedConnection`."""

    backend_name = NAME

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, network: PartyNetwork) -> None:
        self._network = network
        super().__init__(store, rank, size, timeout)
        if rank == 0:
            store.set("sealed", secrets.token_bytes(_MEETING_BYTES))

    def _connected(self) -> Mapping[int, MemberConnection]:
        """A line to every other member: this one dials those before it and takes the calls of those behind it."""
        meeting = bytes(self._store.get("sealed"))[:_MEETING_BYTES]
        self._store.set(f"at/{self._me}", self._network.card)
        found: dict[int, SealedStream] = {}
        for member in range(self._me):
            card = bytes(self._store.get(f"at/{member}"))
            found[member] = self._network.dial(card, of_group(meeting), self._timeout_s)
        deadline = time.monotonic() + self._timeout_s
        for member in range(self._me + 1, self._size):
            rank = int(bytes(self._store.get(f"at/{member}")).split()[0])
            left = max(0.0, deadline - time.monotonic())
            found[member] = self._network.door.take(meeting, rank, left)
        return {member: SealedConnection(found[member], self._timeout_s) for member in sorted(found)}

    # -- tensors of another device -----------------------------------------------------------------------------------

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Done:  # type: ignore[override]
        host = on_host(tensors[0])
        return _back(super().allreduce([host], opts), host, tensors[0])

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Done:  # type: ignore[override]
        host = on_host(tensors[0])
        return _back(super().broadcast([host], opts), host, tensors[0])

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Done:
        host = room_on_host(output)
        return _back(super().all_gather_single(host, on_host(source), opts), host, output)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Done:
        host = room_on_host(output)
        return _back(super().reduce_scatter_single(host, on_host(source), opts), host, output)

    # the names of older versions
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> Done:
        return super().send([on_host(tensors[0])], to, tag)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Done:
        host = room_on_host(tensors[0])
        return _back(super().recv([host], source, tag), host, tensors[0])


def on_host(x: Tensor) -> Tensor:
    """``x``, of any shape, or a copy of it in the host's memory."""
    return x if x.device.type == "cpu" else x.to("cpu")


def room_on_host(x: Tensor) -> Tensor:
    """``x``, or memory of its shape on the host."""
    return x if x.device.type == "cpu" else torch.empty(x.shape, dtype=x.dtype, device="cpu")


def _back(done: Done, host: Tensor, x: Tensor) -> Done:
    """Copy the result back to where it is wanted, if that is elsewhere."""
    if host is x:
        return done

    def finish() -> None:
        done.wait()
        x.copy_(host)

    return Done(finish)


_networks: list[PartyNetwork] = []
"""Of this process' world, which torch's constructor of backends does not pass on; at most one."""


def register(network: PartyNetwork) -> str:
    """Make the backend known to torch, and ``network`` what its next groups use; returns its name."""
    _networks[:] = [network]
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _made, devices=["cpu", "cuda"])
    return NAME


def _made(store: Any, rank: int, size: int, timeout: timedelta) -> SealedGroup:
    return SealedGroup(store, rank, size, timeout, _networks[0])
