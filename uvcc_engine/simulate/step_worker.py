"""One worker of a rehearsed step, in a process of its own: it trains, seals, records, signs and agrees as in a run.

Its keys are known, so it protects nothing, and it holds made-up rows.
"""

from __future__ import annotations

import gc
import hashlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from uvcc_engine.contract.job.link_spec import LinkSpec
from uvcc_engine.contract.job.link_waits import patience
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import PARTIES, Coord, Topology
from uvcc_engine.contract.machine import host
from uvcc_engine.contract.run_files.writer import RunWriter, Ticker
from uvcc_engine.model.learning.trainers import trainer_of
from uvcc_engine.model.learning.training import PrivateTrainer
from uvcc_engine.model.model_spec import ModelSpec
from uvcc_engine.mpc.foundation.local import rehearsal_keys
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.parallel.groups import PartyGroups
from uvcc_engine.parallel.place import RankAddress
from uvcc_engine.plane.connect import open_plane
from uvcc_engine.plane.live import LivePlane
from uvcc_engine.proofs.settling import OwedVerdict
from uvcc_engine.sealing.inputs import PartyInputs
from uvcc_engine.sharding.fleet_proof import agree
from uvcc_engine.sharding.microbatches import stream_of
from uvcc_engine.sharding.sharded_training import ParallelTrainer
from uvcc_engine.sharding.summed_training import parallel_trainer_of
from uvcc_engine.simulate.message_chain import Happening, StepTrace
from uvcc_engine.simulate.step_links import HERE
from uvcc_engine.transcript.exchange.evidence import WorkerEvidence
from uvcc_engine.transcript.formats import kinds
from uvcc_engine.transcript.leaves.roots import sid_of
from uvcc_engine.transcript.signed.statements import Verdict
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.transcript.terms.policy import Policy, PolicyParty

ALONE: Final = Topology()
_ZERO: Final = "00" * 32
_SETTLES_S: Final = 1800.0
"""For a sister rank or a peer in a step of a large model on few processors: as long as a rehearsal may take at all."""
_VOTE_BYTES: Final = 136
"""What the ranks of a party tell each other with every step's vote (``worker.ranks``)."""


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """What one worker of a rehearsal does. ``store``: the port at which the ranks of its party meet."""

    coord: Coord
    size: Topology
    job: PrivateJob
    model: ModelSpec
    inputs: PartyInputs
    link: LinkSpec
    store: int
    folder: Path


def by_itself(size: Topology) -> bool:
    """Whether a party has one worker, which takes its batch as a whole: as a session chooses its trainer."""
    return size.workers_per_party == size.microbatches == 1


@dataclass
class WorkerSteps:
    """Of each step of a worker: when it had ended, by the clock and by this process's processor time, and its rounds
    and bytes; ``main_bytes``: of them those of no microbatch's pass. ``happenings``: of its last step. ``peak_mib``:
    the most memory that it held."""

    ends: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    bytes_sent: list[int] = field(default_factory=list)
    main_bytes: list[int] = field(default_factory=list)
    happenings: list[Happening] = field(default_factory=list)
    peak_mib: float = 0.0


class _Worker:
    """The trainer of one worker, and what it tells of its steps."""

    def __init__(self, task: WorkerTask, groups: PartyGroups, plane: LivePlane, evidence: WorkerEvidence) -> None:
        self._task, self._groups, self._plane, self._evidence = task, groups, plane, evidence
        self._trace = StepTrace()
        if not by_itself(task.size):
            self._trace.watch(plane)
        self._runtimes: list[Runtime] = []
        self.main = self._runtime(0)
        self._trainer = self._learner()
        if self.main.ledger is not None:
            self.main.ledger.defers = True
        self.found = WorkerSteps()

    def _runtime(self, stream: int) -> Runtime:
        task, c = self._task, self._task.coord
        made = Runtime(
            c.party,
            self._plane,
            rehearsal_keys(7)[c.party],
            sid_of(self._evidence.policy.sid_job, c),
            0,
            stream=stream,
            prg=task.job.random_generator,
            few_rounds=task.job.rounds == "few",
        )
        self._runtimes.append(made)
        return made

    def _learner(self) -> PrivateTrainer | ParallelTrainer:
        t = self._task
        if by_itself(t.size):
            return trainer_of(self.main, t.job, t.model, t.inputs)
        return parallel_trainer_of(
            self.main, self._runtime, t.job, t.model, t.inputs, self._groups, _nobody, self._note_passage
        )

    def _note_passage(self, direction: str, microbatch: int, which: int, passed: Tensor) -> None:
        """As a session does, and for the chain of messages."""
        tag = (self.main.epoch, stream_of(direction, microbatch), which, kinds.PIPELINE)
        self._evidence.recorder.record_local(tag, passed.cpu().numpy().data.cast("B"))
        self._trace.passage(direction, microbatch, which, passed)

    def _counts(self) -> tuple[int, int, int]:
        rounds, sent = sum(rt.rounds for rt in self._runtimes), sum(rt.bytes_sent for rt in self._runtimes)
        return rounds, sent, self.main.bytes_sent

    def step(self, step: int, writer: RunWriter) -> None:
        """What a worker's session does in a step: train, sign, agree with both peers and its sisters, write files."""
        evidence, policy, began = self._evidence, self._evidence.policy, time.monotonic()
        self.main.begin_epoch(step)
        evidence.begin(step)
        writer.poll_halt()
        before = self._counts()
        self._trace.on = step == self._task.job.steps - 1
        result = self._trainer.step(step)
        self._trace.on = False
        rounds, sent, of_main = (b - a for a, b in zip(before, self._counts(), strict=True))
        due = policy.step_values(step)
        revealed = {"loss": result.loss} if result.loss is not None and "loss" in due else {}
        proved = result.proved
        verdict = None if proved is None else Verdict(proved.claims, proved.digest, proved.coins, proved.drawn)
        root = evidence.finish(step, revealed, verdict)
        self._agree(result.owed)
        writer.event("epoch_root", **root.event(evidence.coord))
        if result.loss is not None:
            writer.metrics(step + 1, result.loss, 0.0, 0.0, 1.0 / (time.monotonic() - began))
        writer.heartbeat(step + 1, "train", sent_bytes=self._plane.sent_bytes)
        self._note(rounds, sent, of_main)

    def _note(self, rounds: int, sent: int, of_main: int) -> None:
        found = self.found
        found.rounds.append(rounds)
        found.bytes_sent.append(sent)
        found.main_bytes.append(of_main)
        found.ends.append(time.monotonic())
        found.cpu.append(time.process_time())
        found.happenings = self._trace.happenings

    def _agree(self, owed: OwedVerdict | None) -> None:
        """Both peers' roots of the step, and their verdicts where they are owed, as a worker hears them with the votes
        of the next; and the sisters' votes."""
        plane, evidence = self._plane, self._evidence
        peers = [p for p in range(PARTIES) if p != plane.party]
        said = b"" if owed is None else owed.said
        for peer in peers:
            plane.send_control(peer, said + evidence.agreement(peer))
        told = {peer: plane.recv_control(peer, _SETTLES_S) for peer in peers}
        if owed is not None:
            agree(self._groups, lambda: owed.hear({peer: note[: len(said)] for peer, note in told.items()}))
        for peer, note in told.items():
            evidence.check(peer, note[len(said) :])
        self._vote()

    def _vote(self) -> None:
        if self._groups.alone:
            return
        self._groups.start_dp()
        for group in (self._groups.tp, self._groups.pp, self._groups.dp):
            group.gather(torch.zeros(_VOTE_BYTES, dtype=torch.uint8))


def trained(task: WorkerTask) -> WorkerSteps:
    """Train the job's steps. Raises what the protocol, the plane, the groups and the disk raise."""
    policy, mine, c = _policy(task), _identity(task.coord.party), task.coord
    evidence = WorkerEvidence.open(
        task.folder / f"w_{c}", mine, policy, c, policy.peers(c.party, c.replica), resume_epoch=0
    )
    plane = open_plane(
        party=c.party,
        coord=str(c),
        sid_sub=sid_of(policy.sid_job, c),
        identity=mine,
        peers=policy.peers(c.party, c.replica),
        link=task.link.or_else(patience(task.size)),
        recorder=evidence.recorder,
        state_dir=task.folder / f"plane_{c}",
        on_event=_nobody,
    )
    place = RankAddress(c, task.size, HERE, task.store)
    groups = PartyGroups.open(place, on_event=_nobody, timeout_s=_SETTLES_S)
    worker = _Worker(task, groups, plane, evidence)
    gc.collect()
    gc.freeze()  # as a worker's process does
    writer = RunWriter.open(task.folder / f"run_{c}", "rehearsal", 0, str(c))
    with Ticker(writer):
        for step in range(task.job.steps):
            worker.step(step, writer)
    plane.close()
    groups.close()
    evidence.close()
    worker.found.peak_mib = host.peak_mib()
    return worker.found


def _policy(task: WorkerTask) -> Policy:
    """Of a session that protects nothing: its keys are known."""
    named = [_identity(p).public for p in range(PARTIES)]
    return Policy.build(
        job={"kind": "private", **task.job.to_json()},
        model_hash=_ZERO,
        code_hash=_ZERO,
        topology=task.size,
        parties=[PolicyParty(p, named[p], "rehearsal", "here") for p in range(PARTIES)],
        owner="rehearsal",
        commitments=[_ZERO] * PARTIES,
        reveal=list(task.job.reveal),
        limits={"total": 0},
        nonce=_ZERO,
    )


def _identity(party: int) -> Identity:
    return Identity(*(hashlib.sha256(f"rehearsal {use} {party}".encode()).digest() for use in ("sign", "agree")))


def _nobody(name: str, fields: dict[str, Any]) -> None:
    """Nobody listens to a rehearsal's events."""
