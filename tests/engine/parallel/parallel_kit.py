"""Ranks of one party as forked processes that meet on loopback; each returns a picklable value."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed  # imported before the fork, so that the ranks need not
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from uvcc_engine.contract.errors import PeerLostError
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.contract.machine.free_ports import ports
from uvcc_engine.mpc.kernels.compiling.preload import load_for_children
from uvcc_engine.parallel.groups import PartyGroups
from uvcc_engine.parallel.meeting import BACKEND_VARIABLE
from uvcc_engine.parallel.party_keys import PartyKeys
from uvcc_engine.parallel.place import RankAddress
from uvcc_engine.parallel.presence import HEARD, Presence, withdraw
from uvcc_engine.plane.api import Tag
from uvcc_engine.transcript.signing.identity import Identity

JOB = b"J" * 32
Body = Callable[[PartyGroups, list[tuple[str, dict[str, Any]]]], Any]


def pod(replica: int, party: int = 0) -> Identity:
    """The identity of a party's pod."""
    own = 1 + party + 3 * replica
    return Identity(bytes([own] * 32), bytes([own + 100] * 32))


def party_keys(topology: Topology, replica: int, *, party: int = 0, sid_job: bytes = JOB) -> PartyKeys:
    """What a rank of a replica's pod has to prove itself with."""
    pods = [pod(r, party).public for r in range(topology.replicas)]
    return PartyKeys.of(pod(replica, party), pods, sid_job, party, topology)


def run_ranks(
    topology: Topology,
    body: Body,
    *,
    timeout_s: float = 100.0,
    end_gracefully: bool = True,
    dies: int = -1,
    gives_up: Mapping[int, str] = MappingProxyType({}),
    late: bool = False,
    sealed: bool = False,
    address: str = "127.0.0.1",
    enter: Callable[[int], None] = lambda rank: None,
) -> list[Any]:
    """``body(groups, events)`` in every rank of party 0; results in rank order, raised exceptions as they are.

    ``sealed``: as if every replica were another machine. ``address``: where they meet; ``enter``: called by every
    rank's process first.

    The rank that ``dies`` is there and ends before it meets the others, when all have seen it; those that give up tell
    why. ``late``: the last rank starts when those that give up have ended, and the first one knows it.
    """
    torch.set_num_threads(1)
    (port,), pipes, ended = ports(1), [], set()
    coords = sorted((c for c in topology.coords() if c.party == 0), key=topology.local_rank)
    for coord in coords:
        if late and coord == coords[-1]:
            ended = {rank for rank in gives_up if os.waitpid(pipes[rank][0], 0)}
            store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), False)
            store.wait([f"{HEARD}/0"])
            del store
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            os.close(reader)
            rank, world = topology.local_rank(coord), topology.workers_per_party
            enter(rank)
            if sealed:
                os.environ[BACKEND_VARIABLE] = "sealed"
            keys = party_keys(topology, coord.replica) if sealed else None
            if rank == dies:
                _die(port, rank, world)
            if rank in gives_up:
                env = {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                }
                withdraw(env, gives_up[rank], keys=keys)
                os._exit(0)
            _rank(coord, topology, port, body, writer, timeout_s, end_gracefully, keys, address)
        os.close(writer)
        pipes.append((pid, reader))
    found = []
    for rank, (pid, reader) in enumerate(pipes):
        with os.fdopen(reader, "rb") as stream:
            data = stream.read()
        if rank not in ended:
            os.waitpid(pid, 0)
        found.append(pickle.loads(data) if data else None)
    return found


def _die(port: int, rank: int, world: int) -> None:
    """Come, be seen by the rank that watches this one, and end."""
    presence = Presence(f"127.0.0.1:{port}", rank, world, 0)
    presence.own_socket.accept()
    os._exit(9)


def _rank(
    coord: Coord,
    topology: Topology,
    port: int,
    body: Body,
    writer: int,
    timeout_s: float,
    end_gracefully: bool,
    keys: PartyKeys | None = None,
    address: str = "127.0.0.1",
    device: str = "cpu",
) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    try:
        place = RankAddress(coord, topology, address, port)
        groups = PartyGroups.open(
            place, on_event=lambda n, f: events.append((n, f)), device=device, timeout_s=timeout_s, keys=keys
        )
        result = body(groups, events)
        groups.close(graceful=end_gracefully)
    except Exception as error:  # noqa: BLE001 - handed to the parent
        result = error
        if not isinstance(error, RuntimeError) and "uvcc" not in type(error).__module__:
            traceback.print_exc()
    with os.fdopen(writer, "wb") as stream:
        pickle.dump(result, stream)
    os._exit(0)


# -- three parties -----------------------------------------------------------------------------------------------------


class SocketPlane:
    """``plane.api.Plane`` of one worker over socket pairs, for rehearsals in forked processes."""

    def __init__(self, party: int, ends: dict[int, socket.socket]) -> None:
        self.party = party
        self._ends = ends
        self._seen: dict[tuple[int, Tag], bytes] = {}
        self._arrived = threading.Condition()
        for peer, end in ends.items():
            threading.Thread(target=self._read, args=(peer, end), daemon=True).start()

    def _read(self, peer: int, end: socket.socket) -> None:
        # a worker that ends with something unread resets the connection: nothing comes any more all the same
        with suppress(OSError, struct.error), end.makefile("rb") as stream:
            while head := stream.read(_HEAD.size):
                *tag, size = _HEAD.unpack(head)
                body = stream.read(size)
                with self._arrived:
                    self._seen[peer, Tag(*tag)] = body
                    self._arrived.notify_all()
        with self._arrived:
            self._seen[peer, _END] = b""
            self._arrived.notify_all()

    def send(self, dst: int, tag: Tag, payload: Any) -> None:
        body = bytes(payload)
        self._ends[dst].sendall(_HEAD.pack(*tag, len(body)) + body)

    def recv(self, src: int, tag: Tag) -> memoryview:
        with self._arrived:
            self._arrived.wait_for(lambda: (src, tag) in self._seen or (src, _END) in self._seen, 120.0)
            if (src, tag) not in self._seen:
                raise PeerLostError(f"party {src} never sent {tag}", party=src)
            return memoryview(self._seen.pop((src, tag)))

    def _there(self, wants: Iterable[tuple[int, Tag]]) -> bool:
        return all((src, tag) in self._seen or (src, _END) in self._seen for src, tag in wants)

    def arrived(self, wants: Iterable[tuple[int, Tag]]) -> bool:
        with self._arrived:
            return self._there(wants)

    def wait_any(self, wants: Sequence[Sequence[tuple[int, Tag]]], other: Callable[[], bool] | None = None) -> None:
        with self._arrived:
            while not (any(map(self._there, wants)) or (other is not None and other())):
                self._arrived.wait(60.0 if other is None else 0.005)

    def send_control(self, dst: int, body: bytes) -> None:
        raise NotImplementedError

    def recv_control(self, src: int, timeout: float | None = None) -> bytes:
        raise NotImplementedError

    def close(self, *, graceful: bool = True) -> None:
        for end in self._ends.values():
            end.close()


_HEAD = struct.Struct("<IQIIQ")
_END = Tag(0, 0, 0, 0)
Work = Callable[[SocketPlane, PartyGroups, list[tuple[str, dict[str, Any]]]], Any]


def run_fleet(topology: Topology, work: Work, device: str = "cpu") -> dict[Coord, Any]:
    """``work(plane, groups, events)`` in every worker of all three parties, each a process; results by coordinate.

    ``device``: whose memory the groups carry. All workers share one GPU, if it is one: NCCL takes them for hosts of
    their own, since it refuses two ranks of one host on one device.
    """
    torch.set_num_threads(1)
    load_for_children()
    masters, ends, pids = ports(3), _connect(topology), []
    for coord in topology.coords():
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            os.environ["NCCL_HOSTID"] = str(coord)
            _rank(coord, topology, masters[coord.party], _worker(work, coord, ends), writer, 0.0, True, device=device)
        os.close(writer)
        pids.append((coord, pid, reader))
    for others in ends.values():
        for end in others.values():
            end.close()
    found = {}
    for coord, pid, reader in pids:
        with os.fdopen(reader, "rb") as stream:
            data = stream.read()
        os.waitpid(pid, 0)
        found[coord] = pickle.loads(data) if data else None
    for value in found.values():
        if isinstance(value, Exception):
            raise value
    return found


def _worker(work: Work, coord: Coord, ends: dict[Coord, dict[int, socket.socket]]) -> Body:
    mine = ends.pop(coord)
    for others in ends.values():
        for end in others.values():
            end.close()
    return lambda groups, events: work(SocketPlane(coord.party, mine), groups, events)


def _connect(topology: Topology) -> dict[Coord, dict[int, socket.socket]]:
    found: dict[Coord, dict[int, socket.socket]] = {c: {} for c in topology.coords()}
    for c in found:
        for peer in range(c.party + 1, 3):
            one, two = socket.socketpair()
            for end in (one, two):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            found[c][peer] = one
            found[Coord(c.replica, peer, c.stage, c.tensor)][c.party] = two
    return found
