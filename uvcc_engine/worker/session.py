"""One worker's run from its first message to its last: resume, steps, votes, roots, checkpoints, the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from uvcc_engine.checkpoint.encryption import state_name
from uvcc_engine.checkpoint.migration_target import START, read_migrated
from uvcc_engine.contract.checkpoints import checkpoint as ck
from uvcc_engine.contract.errors import ConfigError, UvccError
from uvcc_engine.contract.job.migration import Migration
from uvcc_engine.contract.job.private_job import SEALED
from uvcc_engine.contract.job.spec import WorkerSpec
from uvcc_engine.contract.peer_protocol.peer_messages import HALT, HOLD, AttachedNote, Resume, Topic, Vote
from uvcc_engine.contract.run_files import files
from uvcc_engine.contract.run_files.writer import RunWriter
from uvcc_engine.model.learning.trainers import trainer_of
from uvcc_engine.model.learning.training import PrivateTrainer, StepResult
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.plane.api import Plane
from uvcc_engine.plane.waits import Waits
from uvcc_engine.proofs.settling import OwedVerdict
from uvcc_engine.sealing.release import box_name, seal_weights
from uvcc_engine.sharding.learner import Learner
from uvcc_engine.sharding.sharded_training import ParallelTrainer, stream_of
from uvcc_engine.sharding.summed_training import parallel_trainer_of
from uvcc_engine.transcript.exchange.evidence import WorkerEvidence
from uvcc_engine.transcript.exchange.own_history import check_history
from uvcc_engine.transcript.formats import kinds
from uvcc_engine.transcript.leaves.leaf_file import folder_name
from uvcc_engine.transcript.leaves.roots import EpochRoot
from uvcc_engine.worker import metric_notes
from uvcc_engine.worker.admission import Admission
from uvcc_engine.worker.attempts import begin_attempt
from uvcc_engine.worker.checkpoints import Checkpoints
from uvcc_engine.worker.compute_setup import device_of, draw_ahead_for, runtime_of
from uvcc_engine.worker.consensus import StepConsensus
from uvcc_engine.worker.found_liar import end_attempt
from uvcc_engine.worker.high_water import HighWaterMark
from uvcc_engine.worker.inference import Predictor
from uvcc_engine.worker.late_recorder import LateRecorder
from uvcc_engine.worker.outcome import agree_on_state, own_digests, state_blinds, verdict_of
from uvcc_engine.worker.ranks import Ranks
from uvcc_engine.worker.root_agreement import RootAgreement
from uvcc_engine.worker.served_model import ServedModel
from uvcc_engine.worker.step_costs import StepCosts, audits_of
from uvcc_engine.worker.validation_notes import ended_early, remember_validations, validations_so_far

_TERMINATED: Final = "sigterm"
_PROVES: Final = (PrivateTrainer, ParallelTrainer, Predictor, ServedModel)
COUNT_EVERY_S: Final = 10.0  # what the plane counted is told at least so often while steps are made


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended: ``done``, ``halted`` or ``failed``; after how many steps; the checkpoint's sha256 or ""."""

    status: str
    step: int
    checkpoint: str = ""
    error: UvccError | None = None


class WorkerSession:
    """Drives the protocol of one admitted worker over an open plane. ``PHASE``: what its heartbeats say it does."""

    PHASE = "train"

    def __init__(
        self,
        spec: WorkerSpec,
        admitted: Admission,
        writer: RunWriter,
        plane: Plane,
        recorder: LateRecorder,
        table: StepConsensus,
        ranks: Ranks,
        terminated: Callable[[], bool],
        sent: Callable[[], int] = lambda: 0,
        count: Callable[[], None] = lambda: None,
    ) -> None:
        """``terminated``: whether SIGTERM came, which counts as a halt request; ``sent``: bytes to the peers so far;
        ``count`` has what the plane counted written down.
        """
        self._spec, self._admitted, self._writer = spec, admitted, writer
        self._recorder, self._table, self._ranks, self._terminated = recorder, table, ranks, terminated
        self._sent, self._count, self._counted = sent, count, time.monotonic()
        self._checkpoints = Checkpoints(spec, admitted, writer, ranks)
        self.device = device_of(admitted)
        self._costs = StepCosts()
        ahead = draw_ahead_for(admitted.policy.topology, self.device)

        def runtime(stream: int = 0) -> Runtime:
            return self._costs.of(runtime_of(admitted, plane, spec.attempt, self.device, stream, ahead))

        self._rt = runtime()
        self._trainer = self._learner(runtime)
        if self._rt.ledger is not None:
            self._rt.ledger.defers = True
        limit_s = Waits().proof_s if spec.link.proof_s is None else spec.link.proof_s
        self._agreement = RootAgreement(self._rt, table, ranks.groups, lambda: self._proof, limit_s, self._open_epoch)
        self._evidence: WorkerEvidence | None = None
        self._mark: HighWaterMark | None = None
        self._loss: float | None = None
        self._halting = Vote()
        self._taken_at = -1  # the step of the last checkpoint that this session took
        self.step = 0
        self.running = False  # whether the parties have met

    def _learner(self, runtime: Callable[[int], Runtime]) -> Learner:
        a, groups = self._admitted, self._ranks.groups
        if a.job.task == "serve":
            return ServedModel(self._rt, a.job, a.model, a.inputs)
        if a.job.task == "infer":
            return Predictor(self._rt, a.job, a.model, a.inputs)
        if groups.alone and a.policy.topology.microbatches == 1:
            return trainer_of(self._rt, a.job, a.model, a.inputs)
        return parallel_trainer_of(self._rt, runtime, a.job, a.model, a.inputs, groups, self._tell, self._note_passage)

    def _tell(self, name: str, fields: dict[str, Any]) -> None:
        self._writer.event(name, **fields)

    def _note_passage(self, direction: str, microbatch: int, sent: int, passed: Tensor) -> None:
        """What moves between stages leaves its digest in the transcript, in the stream of its pass."""
        tag = (self._rt.epoch, stream_of(direction, microbatch), sent, kinds.PIPELINE)
        self._proof.recorder.record_local(tag, passed.cpu().numpy().data.cast("B"))

    @property
    def _proof(self) -> WorkerEvidence:
        assert self._evidence is not None
        return self._evidence

    def run(self) -> RunOutcome:
        """Train to the end or to a halt. Raises what the protocol, the plane and the disk raise."""
        a, job, folder, attempt = self._admitted, self._admitted.job, Path(self._spec.dir), self._spec.attempt
        begin_attempt(folder, a.coord, attempt)
        mine = Path(self._spec.identity_dir)
        self._mark = HighWaterMark.claim(mine, a.policy.sid_job.hex(), a.coord, attempt, folder)
        self.step = self._agree_where_to_start()
        self.running = True
        self._open_evidence(self._epoch(self.step))
        self._mark.admit(self._proof.recorder.epochs, self._proof.recorder.left_open)
        if self.step > job.first_step:
            self._load(self.step)
        elif job.start is not None:
            self._migrate(job.start)
        self._writer.event("party_start", party=a.party, step=self.step, attempt=attempt)
        self._writer.heartbeat(self.step, self.PHASE, "start")
        while self.step < job.steps and not ended_early(self._trainer):
            if self._before_step().vote == HALT:
                return self._halt(self._halting, taken=self._taken_at == self.step)
            decision = self._train_step(self.step)
            self.step += 1
            self._after_step()
            due = self.step % job.checkpoint_every == 0
            if due:
                self._scheduled_checkpoint()
            if decision.vote == HOLD:
                decision = self._hold(decision)
            if decision.vote == HALT:
                return self._halt(decision, taken=due)
        return self._finish()

    def _before_step(self) -> Vote:
        """What is waited for before a step; a vote to halt ends the run there."""
        return Vote()

    def _rows(self) -> int:
        """Rows of the step that was just done."""
        return self._admitted.job.batch

    def _after_step(self) -> None:
        """What follows a step, before its checkpoint."""

    def note_failure(self, error: UvccError) -> None:
        """After a proof that did not hold: leave word that this attempt is over, and whom this party suspects."""
        if self._mark is not None:
            owed = self._agreement.owed
            epoch = self._rt.epoch if owed is None else owed.epoch
            end_attempt(self._mark, self._spec, self._admitted, self._table, epoch, error)

    @property
    def reached(self) -> int:
        """The step that it is in; as long as one before it may still be refused, that one."""
        return self.step if self._agreement.owed is None else self._admitted.job.first_step + self._agreement.owed.epoch

    def close(self) -> None:
        """Release the transcript files and end the checkpoints' thread. Harmless twice."""
        self._checkpoints.close()
        if self._evidence is not None:
            self._evidence.close()
        if self._mark is not None:
            self._mark.close()

    # -- starting ----------------------------------------------------------------------------------------------------

    def _agree_where_to_start(self) -> int:
        """The newest checkpoint that everybody holds, or the one that the operator decided on.

        Raises VerificationError if that would pass over an altered checkpoint in silence, ConfigError if the one that
        was decided on is not held by everybody.
        """
        spec, first = self._spec, self._admitted.job.first_step
        found = self._checkpoints.survey() if spec.resume else ck.FoundCheckpoints({}, {})
        policy, verify = self._admitted.policy.hash.hex(), self._admitted.job.proving.word
        mine = Resume(tuple(found.whole), spec.attempt, spec.start, policy, verify)
        start, common = self._table.agree_step(mine, among_ranks=self._ranks.common)
        if spec.start > first:
            if (altered := found.altered.get(spec.start)) is not None:
                raise altered
            if spec.start not in common:
                there = ", ".join(map(str, sorted(common))) or "none"
                what = f"not every worker holds a whole checkpoint of step {spec.start}; all hold steps {there}"
                raise ConfigError(what, "uvcc resume RUN --from one of these, or --from 0 to start over")
        start = max(start if spec.start < 0 else spec.start, first)
        if spec.start < 0 and (altered := found.newer_altered(start)) is not None:
            raise altered
        self._replay(start)
        if spec.start >= 0:
            self._checkpoints.set_aside(start)
        self._writer.resume_at(start if spec.resume else None)
        self._checkpoints.open()
        return start

    def _replay(self, start: int) -> None:
        """Read again what was recorded before ``start``; nobody trains before everybody has found that it holds.

        Raises VerificationError naming file and epoch.
        """
        a, epoch = self._admitted, self._epoch(start)
        if epoch <= 0:
            return
        began = time.monotonic()
        self._writer.heartbeat(start, "start", "replays its evidence")
        leaves = check_history(Path(self._spec.dir) / folder_name(a.coord), a.policy, a.coord, epoch)
        took = round(time.monotonic() - began, 3)
        self._writer.event("evidence_replayed", epochs=epoch, leaves=leaves, seconds=took)
        self._table.exchange(AttachedNote(Topic.REPLAYED, start), {})
        self._ranks.common(set())  # and all ranks of the party

    def _open_evidence(self, epoch: int) -> None:
        a = self._admitted
        self._evidence = WorkerEvidence.open(
            Path(self._spec.dir),
            a.identity,
            a.policy,
            a.coord,
            a.policy.peers(a.party, a.coord.replica),
            resume_epoch=epoch,
            power_cut=self._mark is None or not self._mark.same_boot,
        )
        self._evidence.input(a.policy.commitments[a.party])
        self._recorder.inner = self._evidence.recorder

    def _load(self, step: int) -> None:
        tensors, part, manifest = self._checkpoints.load(step)
        self._trainer.load_state(tensors)
        self._loss = part.extra.get("loss")
        remember_validations(self._trainer, part.extra)
        if part.extra.get("scheduled"):
            self._proof.checkpoint(step, part.files[state_name(self._spec.rank)]["sha256"])
        self._writer.event("resumed", step=step, checkpoint=manifest.sha256)

    def _migrate(self, start: Migration) -> None:
        """Begin with the state that another policy's checkpoint left."""
        a, folder = self._admitted, Path(self._spec.dir) / START
        self._trainer.load_state(read_migrated(folder, start, a.policy, a.identity, a.coord, a.job))
        self._writer.event("taken_over", step=start.step, of=start.of, commit=start.commit)

    def _epoch(self, step: int) -> int:
        """The transcript counts the steps of its own policy."""
        return step - self._admitted.job.first_step

    # -- one step ----------------------------------------------------------------------------------------------------

    def _vote(self) -> Vote:
        return Vote(HALT, _TERMINATED) if self._terminated() else Vote.of(self._writer.poll_halt())

    def _open_epoch(self, epoch: int) -> None:
        self._rt.begin_epoch(epoch)
        self._proof.begin(epoch)
        assert self._mark is not None
        self._mark.begin(epoch)

    def _begin(self, epoch: int) -> Vote:
        self._open_epoch(epoch)
        mine, stated = self._checkpoints.ballot(self._vote())
        self._agreement.open_step(epoch, mine, stated)
        return mine

    def _settle_votes(self, epoch: int, mine: Vote) -> Vote:
        """Read the peers' votes of an epoch, and with them their roots of the epoch before."""
        decision = self._agreement.close_step(epoch, mine)
        self._checkpoints.commit(self._table, decision.saved)
        return decision

    def _finished(self, root: EpochRoot, owed: OwedVerdict | None = None) -> None:
        self._agreement.finished(owed)
        self._writer.event("epoch_root", **root.event(self._admitted.coord))

    def _finish_step(self, epoch: int, result: StepResult, revealed: Mapping[str, float]) -> None:
        """Sign the epoch, unless what was found of its proofs is bad; that is told with the next vote."""
        if result.owed is not None and not result.owed.held:
            self._proof.leave_unsigned(epoch)
            self._agreement.finished(result.owed)
            return
        self._finished(self._proof.finish(epoch, revealed, verdict_of(result.proved)), result.owed)

    def _train_step(self, step: int) -> Vote:
        job, began = self._admitted.job, time.monotonic()
        epoch = self._epoch(step)
        mine = self._begin(epoch)
        self._costs.begin()
        result = self._trainer.step(step)
        if step > 0 and not job.validates(step):
            self._costs.end(audits_of(job, result.proved))
        decision = self._settle_votes(epoch, mine)
        revealed = {} if result.loss is None else {"loss": result.loss}
        revealed |= result.validated
        self._finish_step(epoch, result, revealed)
        rate = self._rows() / (time.monotonic() - began)
        if result.loss is not None:
            self._loss = result.loss
            self._writer.metrics(step + 1, result.loss, job.lr_at(step), 0.0, rate)
        if job.validates(step):
            metric_notes.tell_validated(self._writer, job, step + 1, result.validated)
        counts: dict[str, Any] = {"sent_bytes": self._sent(), **self._costs.means()}
        self._writer.heartbeat(step + 1, self.PHASE, samples_per_s=round(rate, 1), **counts)
        if time.monotonic() - self._counted > COUNT_EVERY_S:
            self._count_now()
        return decision

    # -- hold, halt, checkpoints -------------------------------------------------------------------------------------

    def _hold(self, decision: Vote) -> Vote:
        nonce = decision.nonce
        if self._agreement.owed is not None:
            self._settle_roots()
        self._checkpoints.settle(self._table)  # who holds may be ended: what was begun is on disk everywhere first
        self._writer.event("held", nonce=nonce, step=self.step)

        def stay(current: Vote) -> None:
            self._writer.heartbeat(self.step, "hold", "held", halt_nonce=current.nonce or nonce)

        stay(decision)
        after = self._table.hold(self.step, self._vote, stay)
        if after.vote != HALT:
            self._writer.event("released", nonce=nonce)
            self._writer.heartbeat(self.step, self.PHASE, "released")
        return after

    def _halt(self, decision: Vote, *, taken: bool) -> RunOutcome:
        if not taken:
            self._settle_roots()
            self._take(scheduled=False)
        self._make_durable()
        manifest = self._checkpoints.settle(self._table)
        assert manifest is not None
        self._writer.event("halted", nonce=decision.nonce, step=self.step, checkpoint=manifest.sha256)
        self._writer.heartbeat(self.step, "halted", "halted", halt_nonce=decision.nonce)
        return RunOutcome("halted", self.step, manifest.sha256)

    def _make_durable(self) -> None:
        self._proof.sync()
        assert self._mark is not None
        self._mark.settle()

    def _settle_roots(self) -> None:
        self._agreement.settle(self.step)

    def _scheduled_checkpoint(self) -> None:
        """Take the checkpoint that the job's schedule asks for, and note it in the transcript.

        What is noted is the hash of this rank's encrypted tensors, not of the manifest, which names the run: a rerun of
        the same policy has the same transcript.
        """
        self._settle_roots()
        self._proof.checkpoint(self.step, self._take(scheduled=True))
        self._count_now()

    def _count_now(self) -> None:
        self._counted = time.monotonic()
        self._count()

    def _take(self, *, scheduled: bool) -> str:
        root = self._proof.last_root
        self._taken_at = self.step
        extra = {"loss": self._loss, "scheduled": scheduled} | validations_so_far(self._trainer)
        return self._checkpoints.take(self.step, self._trainer.state(), root.root.hex() if root else "", extra)

    # -- the result --------------------------------------------------------------------------------------------------

    def _finish(self) -> RunOutcome:
        """The last epoch: open what the policy lists, agree on the final state, then on the roots, sign the result.

        The result is signed last, over the peers' roots of this epoch: a worker that is killed before has signed none,
        and whoever resumes repeats the epoch, word for word.
        """
        a, job, epoch = self._admitted, self._admitted.job, self._epoch(self.step)
        if self.step < job.steps:
            self._writer.event("training_ended_early", step=self.step, of=job.steps, patience=job.patience)
        self._writer.heartbeat(self.step, "evaluate")
        mine = self._begin(epoch)
        values = dict(self._trainer.evaluate())
        metric_notes.tell_undefined(self._writer, self.step, metric_notes.metrics_of(job), values)
        if "loss" in job.reveal and self._loss is not None:
            values["loss"] = self._loss
        self._settle_votes(epoch, mine)  # a halt that comes now is outrun by the end of the run
        blinds = self._ranks.of_first_replica(state_blinds(a.identity, a.policy, a.coord))
        digests_of_all = agree_on_state(self._table, own_digests(self._trainer, blinds, a.party))
        proved = self._trainer.proved_metrics if job.proves and isinstance(self._trainer, _PROVES) else None
        whole = self._ranks.whole_state(digests_of_all)
        self._finished(self._proof.outcome(values, whole, verdict_of(proved), self.step))
        self._settle_roots()
        result = self._proof.result()
        mine_at_end = {p: self._proof.closing(p) for p in self._table.peers}
        for peer, note in self._table.exchange(AttachedNote(Topic.CLOSING), mine_at_end).items():
            self._proof.check_closing(peer, note)
        self._make_durable()
        return self._publish(result, values, self._checkpoints.settle(self._table))

    def _release_weights(self) -> None:
        a = self._admitted
        box = seal_weights(
            self._trainer.weight_halves(),
            coord=a.coord,
            frac_bits=a.job.frac_bits,
            identity=a.identity,
            owner=a.policy.owner,
            sid_job=a.policy.sid_job,
        )
        files.write_atomic(Path(self._spec.dir) / box_name(a.coord), box)

    def _publish(
        self, result: dict[str, Any], values: dict[str, float], newest: ck.CheckpointManifest | None
    ) -> RunOutcome:
        if set(SEALED) & set(self._admitted.job.reveal) and self._admitted.coord.replica == 0:
            self._release_weights()
        extra = {k: v for k, v in result.items() if k not in ("result_hash", "values", "signature", "coord")}
        self._writer.result(result["result_hash"], values, result["signature"], **extra)
        self._writer.event("open_final_done", result_hash=result["result_hash"], values=values)
        self._writer.event("run_done", step=self.step)
        self._writer.heartbeat(self.step, "done", "done")
        return RunOutcome("done", self.step, newest.sha256 if newest is not None and newest.step == self.step else "")
