"""A replay of all workers of a run, each a process of the owner's machine: what each would have recorded, and when.

Workers of one party exchange gradients and activations among themselves, which leave no records. So what a worker sends
may follow from what another worker of its party received. The clock of one machine puts all that they do into one order
that no effect runs against, and the first record of a party that differs is judged in that order.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed  # before the fork, so that the workers need not

from uvcc_engine.contract.errors import PeerLostError, UvccError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import PARTIES, Coord
from uvcc_engine.contract.machine import host
from uvcc_engine.contract.machine.free_ports import ports
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.kernels.threads import use as use_threads
from uvcc_engine.parallel.groups import PartyGroups
from uvcc_engine.parallel.place import RankAddress
from uvcc_engine.plane.api import Buffer, Tag
from uvcc_engine.sealing.inputs import PartyInputs
from uvcc_engine.sealing.seeds import Seeds
from uvcc_engine.sharding.summed_training import parallel_trainer_of
from uvcc_engine.sharding.validation import fit_model
from uvcc_engine.transcript.leaves.leaf import RECEIVED, RECORD, SENT, epoch_key, make_record
from uvcc_engine.transcript.leaves.payload_digests import chunks
from uvcc_engine.transcript.leaves.roots import sid_of
from uvcc_engine.transcript.terms.policy import Policy

PATIENCE_S: Final = 3600.0
_HEAD: Final = struct.Struct("<IQIIQ")
_COUNT: Final = struct.Struct("<q")
_ONE: Final = struct.Struct(f"<q{RECORD.size}s")
_END: Final = Tag(0, 0, 0, 0)
Timed = list[tuple[int, bytes]]
"""Records with the nanosecond of each."""


class ReplayPlane:
    """``plane.api.Plane`` of one worker over sockets to its two peers; notes every message and its time."""

    def __init__(
        self, party: int, ends: Mapping[int, socket.socket], sid_sub: bytes, blinds: Mapping[int, bytes]
    ) -> None:
        self.party, self._ends, self._sid, self._blinds = party, ends, sid_sub, blinds
        self.records: Timed = []
        self._keys_of_epoch: dict[int, Any] = {}
        self._seen: dict[tuple[int, Tag], bytes] = {}
        self._arrived = threading.Condition()
        for peer, end in ends.items():
            threading.Thread(target=self._read, args=(peer, end), daemon=True).start()

    def begin(self, epoch: int) -> None:
        """What is noted from now on is of this epoch."""
        self.records = []
        self._keys_of_epoch = {p: epoch_key(key, self._sid, epoch) for p, key in self._blinds.items()}

    def _read(self, peer: int, end: socket.socket) -> None:
        with end.makefile("rb") as stream:
            while head := stream.read(_HEAD.size):
                *tag, size = _HEAD.unpack(head)
                body = stream.read(size)
                with self._arrived:
                    self._seen[peer, Tag(*tag)] = body
                    self._arrived.notify_all()
        with self._arrived:
            self._seen[peer, _END] = b""
            self._arrived.notify_all()

    def _note(self, direction: int, peer: int, tag: Tag, payload: Buffer) -> None:
        src, dst = (peer, self.party) if direction else (self.party, peer)
        now = time.monotonic_ns()
        for chunk, piece in chunks(payload):
            key = (tag.stream, tag.op, chunk, direction, src, dst, tag.kind)
            self.records.append((now, make_record(self._keys_of_epoch[peer], key, piece)[0]))

    def send(self, dst: int, tag: Tag, payload: Buffer) -> None:
        body = bytes(payload)
        self._note(SENT, dst, tag, body)
        self._ends[dst].sendall(_HEAD.pack(*tag, len(body)) + body)

    def recv(self, src: int, tag: Tag) -> memoryview:
        with self._arrived:
            self._arrived.wait_for(lambda: (src, tag) in self._seen or (src, _END) in self._seen, PATIENCE_S)
            if (src, tag) not in self._seen:
                raise PeerLostError(f"party {src} never sent {tag}", party=src)
            body = self._seen.pop((src, tag))
        self._note(RECEIVED, src, tag, body)
        return memoryview(body)

    def _there(self, wants: Iterable[tuple[int, Tag]]) -> bool:
        return all((src, tag) in self._seen or (src, _END) in self._seen for src, tag in wants)

    def arrived(self, wants: Iterable[tuple[int, Tag]]) -> bool:
        with self._arrived:
            return self._there(wants)

    def wait_any(self, wants: Sequence[Sequence[tuple[int, Tag]]], other: Callable[[], bool] | None = None) -> None:
        with self._arrived:
            while not (any(map(self._there, wants)) or (other is not None and other())):
                self._arrived.wait(PATIENCE_S if other is None else 0.005)

    def send_control(self, dst: int, body: bytes) -> None:
        raise NotImplementedError("a replay votes on nothing")

    def recv_control(self, src: int, timeout: float | None = None) -> bytes:
        raise NotImplementedError("a replay votes on nothing")

    def close(self, *, graceful: bool = True) -> None:
        for end in self._ends.values():
            end.close()


def replay_fleet(
    policy: Policy, seeds: Mapping[Coord, Seeds], inputs: Mapping[Coord, PartyInputs]
) -> Generator[dict[Coord, Timed], None, None]:
    """Every epoch's records of every worker; the last epoch opens the result. Raises UvccError if a worker fails."""
    torch.set_num_threads(1)
    coords, ends = list(policy.topology.coords()), _connected(list(policy.topology.coords()))
    masters, workers = ports(PARTIES), {}
    try:
        for coord in coords:
            reader, writer = os.pipe()
            if (pid := os.fork()) == 0:
                for other in (end for c, mine in ends.items() if c != coord for end in mine.values()):
                    other.close()
                _work(policy, coord, seeds[coord], inputs[coord], ends[coord], masters[coord.party], writer)
            os.close(writer)
            workers[coord] = (pid, os.fdopen(reader, "rb"))
        for one in (end for mine in ends.values() for end in mine.values()):
            one.close()
        for _ in range(int(policy.job["steps"]) + 1):
            yield {coord: _read_epoch(coord, stream) for coord, (_, stream) in workers.items()}
    finally:
        for pid, stream in workers.values():
            stream.close()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _read_epoch(coord: Coord, stream: Any) -> Timed:
    head = stream.read(_COUNT.size)
    (count,) = _COUNT.unpack(head) if len(head) == _COUNT.size else (-1,)
    if count < 0:
        raise UvccError(f"the replay of {coord} failed: {stream.read(-count).decode(errors='replace')[:300]}")
    return list(_ONE.iter_unpack(stream.read(count * _ONE.size)))


def _work(
    policy: Policy,
    coord: Coord,
    seeds: Seeds,
    inputs: PartyInputs,
    ends: Mapping[int, socket.socket],
    port: int,
    writer: int,
) -> None:
    """One worker's whole life; it ends the process."""
    use_threads(max(1, int(host.cpu_limit()) // sum(1 for _ in policy.topology.coords())))
    with os.fdopen(writer, "wb") as out:
        try:
            for records in _epochs(policy, coord, seeds, inputs, ends, port):
                out.write(_COUNT.pack(len(records)) + b"".join(_ONE.pack(*one) for one in records))
                out.flush()
            out.write(_COUNT.pack(0))  # a training that ended early: nothing comes where an epoch might be looked for
            out.flush()
            signal.pause()  # its groups stay until all are done
        except BaseException as error:  # noqa: BLE001 - told to the process that reads
            told = f"{type(error).__name__}: {error}".encode()
            out.write(_COUNT.pack(-len(told)) + told)
            out.flush()
            signal.pause()
    os._exit(0)


def _epochs(
    policy: Policy,
    coord: Coord,
    seeds: Seeds,
    inputs: PartyInputs,
    ends: Mapping[int, socket.socket],
    port: int,
) -> Iterator[Timed]:
    job, sid = PrivateJob.from_json(policy.job), sid_of(policy.sid_job, coord)
    plane = ReplayPlane(coord.party, ends, sid, seeds.blinds)
    place = RankAddress(coord, policy.topology, "127.0.0.1", port)
    groups = PartyGroups.open(place, on_event=lambda name, fields: None, timeout_s=PATIENCE_S)

    def runtime(stream: int = 0) -> Runtime:
        few = job.rounds == "few"
        prg = job.random_generator
        return Runtime(coord.party, plane, seeds.prg, sid, seeds.attempt, stream=stream, prg=prg, few_rounds=few)

    main = runtime()
    trainer = parallel_trainer_of(main, runtime, job, fit_model(job), inputs, groups, lambda name, fields: None)
    if main.ledger is not None:
        main.ledger.defers = True  # as workers do
    for epoch in range(job.steps + 1):
        plane.begin(epoch)
        main.begin_epoch(epoch)
        last = epoch == job.steps or trainer.validations.ended
        if last:
            trainer.evaluate()
        elif (owed := trainer.step(epoch).owed) is not None:
            owed.take_as_held()
        yield plane.records
        if last:
            return


def _connected(coords: Sequence[Coord]) -> dict[Coord, dict[int, socket.socket]]:
    found: dict[Coord, dict[int, socket.socket]] = {c: {} for c in coords}
    for c in found:
        for peer in range(c.party + 1, 3):
            other = Coord(c.replica, peer, c.stage, c.tensor)
            found[c][peer], found[other][c.party] = socket.socketpair()
    return found
