"""One party of the transcript's share: ``-m uvcc_engine.bench.party.share_party CONFIG PARTY`` prints a line of JSON.

It trains real steps over a sealed link, with the transcript and without in turn, and says of each what it took. How
much of that went into recording, hashing and finalising, and how much into signing and agreeing, is said of steps of
their own: to read a clock around each message takes a fiftieth of the step.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from uvcc_engine.bench.party.overlap_party import rows
from uvcc_engine.bench.party.plane_party import identity
from uvcc_engine.bench.work.rehearsal import make_policy, revealed
from uvcc_engine.contract.job.link_spec import LinkSpec
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import PARTIES, Coord, Topology
from uvcc_engine.model.definition.specs import find_model
from uvcc_engine.model.learning.training import PrivateTrainer
from uvcc_engine.mpc.foundation.local import rehearsal_keys
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.kernels.memory import keep_freed_memory
from uvcc_engine.plane.api import Buffer, Tag
from uvcc_engine.plane.connect import open_plane
from uvcc_engine.plane.live import LivePlane
from uvcc_engine.transcript.exchange.evidence import WorkerEvidence
from uvcc_engine.transcript.leaves.roots import EpochRoot, sid_of

WAYS: Final = ((False, False), (True, False), (True, True))
"""The steps of a round: whether with the transcript, and whether its parts are timed."""


@dataclass(slots=True)
class StepSeconds:
    """Seconds of one step: on the clock, of this process's processor time, and of that in the transcript's parts.

    ``waiting`` is what of the recording is done while the party waits for another; ``beside`` is the hashing thread's
    processor time: of what waits to be read and of what was sent. ``hashed``: bytes of the messages that were recorded.
    """

    wall: float = 0.0
    cpu: float = 0.0
    recording: float = 0.0
    agreeing: float = 0.0
    waiting: float = 0.0
    beside: float = 0.0
    leaves: int = 0
    hashed: int = 0


class Switch:
    """Stands where the plane expects a recorder; records only while it is on, in epochs of its own count, and reads
    clocks only while it is ``timed``."""

    def __init__(self, evidence: WorkerEvidence) -> None:
        self.evidence = evidence
        self.on = self.timed = False
        self.epoch = 0
        self.took = StepSeconds()

    def record(self, direction: int, peer: int, tag: Tag, payload: Buffer) -> None:
        """See ``plane.api.Recorder``."""
        if not self.on:
            return
        begun = time.thread_time() if self.timed else 0.0
        self.evidence.recorder.record(direction, peer, (self.epoch, tag.stream, tag.op, tag.kind), payload)
        if self.timed:
            self.took.recording += time.thread_time() - begun
            self.took.leaves += 1
            self.took.hashed += memoryview(payload).nbytes

    def hash_ahead(self, peer: int, tag: Tag, payload: memoryview) -> None:
        """See ``plane.api.Recorder``."""
        if not self.on:
            return
        begun = time.thread_time() if self.timed else 0.0
        self.evidence.recorder.hash_ahead(peer, Tag(self.epoch, tag.stream, tag.op, tag.kind), payload)
        if self.timed:
            self.took.recording += time.thread_time() - begun

    def catch_up(self) -> None:
        """See ``plane.api.Recorder``."""
        if not self.on:
            return
        begun = time.thread_time() if self.timed else 0.0
        self.evidence.recorder.catch_up()
        if self.timed:
            self.took.waiting += time.thread_time() - begun

    def finish(self) -> None:
        """Finalise the epoch, which is the end of its recording, and sign its root."""
        finalize, took = self.evidence.recorder.finalize_epoch, self.took

        def finalized() -> EpochRoot:
            with self.counted("recording"):
                return finalize()

        begun, recorded = time.thread_time(), took.recording
        self.evidence.recorder.finalize_epoch = finalized  # type: ignore[method-assign]
        try:
            self.evidence.finish(self.epoch, revealed(self.evidence.policy, self.epoch))
        finally:
            del self.evidence.recorder.finalize_epoch
        took.agreeing += time.thread_time() - begun - (took.recording - recorded)

    @contextlib.contextmanager
    def counted(self, part: str) -> Iterator[None]:
        """Add the processor time of what is done inside to a part of the step."""
        begun = time.thread_time()
        yield
        setattr(self.took, part, getattr(self.took, part) + time.thread_time() - begun)


class Party:
    """What a worker's session does in a step, less everything that has nothing to do with the transcript."""

    def __init__(self, plane: LivePlane, rt: Runtime, trainer: PrivateTrainer, switch: Switch) -> None:
        self._plane, self._rt, self._trainer, self._switch = plane, rt, trainer, switch
        self._peers = [p for p in range(PARTIES) if p != plane.party]

    def step(self, number: int, *, on: bool, timed: bool = False) -> StepSeconds:
        """Train once. With the transcript: begin, tell both peers of the root before, record, check what they told,
        finalise, and sign, in the order of a worker's session.

        What its parts take is said where they are ``timed``.
        """
        switch, evidence = self._switch, self._switch.evidence
        switch.on, switch.timed, switch.took = on, timed, StepSeconds()
        self._meet()
        begun, busy, beside = time.perf_counter(), time.process_time(), evidence.recorder.beside_s
        self._rt.begin_epoch(number)
        told, notes = on and switch.epoch > 0, dict.fromkeys(self._peers, b"{}")
        if on:
            with switch.counted("recording"):
                evidence.begin(switch.epoch)
        if told:
            with switch.counted("agreeing"):
                notes = {p: evidence.agreement(p) for p in self._peers}
        for peer, note in notes.items():
            self._plane.send_control(peer, note)
        self._trainer.step(number)
        heard = {peer: self._plane.recv_control(peer, 120.0) for peer in self._peers}
        if told:
            with switch.counted("agreeing"):
                for peer, note in heard.items():
                    evidence.check(peer, note)
        if on:
            switch.finish()
            switch.epoch += 1
        switch.took.wall, switch.took.cpu = time.perf_counter() - begun, time.process_time() - busy
        switch.took.beside = evidence.recorder.beside_s - beside
        return switch.took

    def goes_on(self, *, more: bool) -> bool:
        """Whether all three take another step: not once one of them has had enough."""
        for peer in self._peers:
            self._plane.send_control(peer, b"more" if more else b"enough")
        heard = [self._plane.recv_control(peer, 120.0) for peer in self._peers]
        return more and all(word == b"more" for word in heard)

    def _meet(self) -> None:
        """All parties leave together, as nearly as two control messages allow."""
        for _ in range(2):
            for peer in self._peers:
                self._plane.send_control(peer, b"go")
            for peer in self._peers:
                self._plane.recv_control(peer, 120.0)


@contextlib.contextmanager
def training(config: dict[str, Any], party: int, folder: Path, rounds: int) -> Iterator[Party]:
    """A party at its link, ready to train: at most ``rounds`` times a step of each of ``WAYS``."""
    job = PrivateJob(model=config["model"], batch=config["batch"], steps=len(WAYS) * (rounds + 1), lr=0.1)
    parties = [identity(p) for p in range(PARTIES)]
    policy = make_policy(parties, Topology(), sum(on for on, _ in WAYS) * (rounds + 1))
    evidence = WorkerEvidence.open(folder / f"w{party}", parties[party], policy, Coord(0, party, 0, 0))
    switch = Switch(evidence)
    plane = open_plane(
        party=party,
        coord=f"p{party}r0s0t0",
        sid_sub=sid_of(policy.sid_job, Coord(0, party, 0, 0)),
        identity=parties[party],
        peers={p: i.public for p, i in enumerate(parties)},
        link=LinkSpec.from_json(config["links"][party]),
        recorder=switch,
        state_dir=folder / f"plane{party}",
        on_event=lambda name, fields: None,
    )
    keys, sid = rehearsal_keys(7)[party], sid_of(policy.sid_job, Coord(0, party, 0, 0))
    rt = Runtime(party, plane, keys, sid, attempt=0, few_rounds=config["few_rounds"])
    model = find_model(job.model)
    body = Party(plane, rt, PrivateTrainer(rt, job, model, rows(job, model, party)), switch)
    gc.collect()
    gc.freeze()  # as a worker's process does
    yield body
    evidence.close()
    plane.close()


def measure(config: dict[str, Any], party: int, folder: Path) -> list[list[dict[str, Any]]]:
    """Of every round: the step in each of ``WAYS``, which take turns at being the first."""
    rounds = int(config["rounds"])
    found = []
    with training(config, party, folder, rounds) as body:
        for k in range(rounds + 1):  # the first one warms up
            order = [(k + i) % len(WAYS) for i in range(len(WAYS))][:: 1 if k % 2 else -1]
            took = {}
            for i, way in enumerate(order):
                on, timed = WAYS[way]
                took[way] = asdict(body.step(len(WAYS) * k + i, on=on, timed=timed))
            if k:
                found.append([took[way] for way in range(len(WAYS))])
    return found


def main() -> int:
    torch.set_num_threads(1)
    keep_freed_memory()
    path = Path(sys.argv[1])
    print(json.dumps(measure(json.loads(path.read_text()), int(sys.argv[2]), path.parent)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
