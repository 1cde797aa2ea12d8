"""Secret-shared training on replicas, stages and tensor ranks: one worker's part of it.

Replica r trains on its own slice of every step's rows. Activations and their gradients move between stages inside each
party (1F1B); the weights' gradients stay additive terms until they are summed over microbatches and replicas, are then
truncated once with the learning rate and 1/R in the truncation, each replica doing its slice, and the updates are
gathered: all replicas of a party hold identical shares, bit for bit. What is opened (loss, accuracy) is summed over
the whole fleet before one worker of each party opens it.

Where products are proved, every microbatch's gradient is truncated by itself, and shares are added up: a claim is about
one product of one worker. What is opened waits for the proofs of all workers (``fleet_proof``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.early_stop import WATCHED, ValidationLog
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.sets import batch_rows
from uvcc_engine.data.weighted_targets import TRAIN_WEIGHTS, carries_weights
from uvcc_engine.model.batch_place import BatchPlace
from uvcc_engine.model.definition.specs import ModelSpec, initial_weights
from uvcc_engine.model.learning.measured import Measured
from uvcc_engine.model.learning.state_digests import Half, component, component_digest, loaded, rings, stored
from uvcc_engine.model.learning.training import StepResult
from uvcc_engine.model.parts import Following, leaves
from uvcc_engine.mpc.foundation.claim_ledger import ProvedStep
from uvcc_engine.mpc.foundation.opening import open_ring_protocol
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, ProtocolProgress, Runtime, par
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.parallel.group import OnEvent
from uvcc_engine.parallel.groups import PartyGroups
from uvcc_engine.parallel.pipeline import BACKWARD, FORWARD, UPDATE, Gantt, Pipe, PipelineReceiver, Record
from uvcc_engine.parallel.schedule import one_f_one_b
from uvcc_engine.plane.api import Wakeable, WatchedPlane
from uvcc_engine.proofs.instalments import proves
from uvcc_engine.proofs.step_proof import NOTHING_PROVED
from uvcc_engine.sealing.components import Ring
from uvcc_engine.sealing.inputs import PartyInputs
from uvcc_engine.sharding import fleet_answers
from uvcc_engine.sharding.fleet_part import FleetPart
from uvcc_engine.sharding.fleet_proof import prove_silently_together, prove_together
from uvcc_engine.sharding.gradients import Gradients, SettledGradients
from uvcc_engine.sharding.loss_ends import Reached, Targets, descend_protocol, reached_protocol
from uvcc_engine.sharding.microbatches import MainRuntime, StreamRuntimes, in_flight, stream_of
from uvcc_engine.sharding.overlap import Overlap, Passage
from uvcc_engine.sharding.partition import bounds
from uvcc_engine.sharding.stage import build_stage
from uvcc_engine.sharding.stage_passes import Pass, Settling, StagePart, backward_protocol, forward_protocol
from uvcc_engine.sharding.updates import OPTIMIZERS
from uvcc_engine.sharding.validation import check_provable, check_slices

__all__ = ["ParallelTrainer", "stream_of"]

PassSteps = Callable[[Runtime, int, Tensor, Share | None], MpcProtocol[Share | None]]


class ParallelTrainer:
    """Weights and moments of one worker and the protocol that moves them. Use it from one thread."""

    def __init__(
        self,
        main: Runtime,
        runtime: MainRuntime,
        job: PrivateJob,
        model: ModelSpec,
        inputs: PartyInputs,
        groups: PartyGroups,
        on_event: OnEvent,
        record: Record | None = None,
    ) -> None:
        """``runtime`` makes the runtime of another stream. Raises ConfigError if the model cannot be placed so."""
        size = groups.place.topology
        if size.microbatches > job.batch:
            raise ConfigError(f"{size.microbatches} microbatches of a batch of {job.batch} rows", "use fewer")
        check_provable(job, model)
        check_slices(job, model, size.microbatches)
        if job.proves:
            alike, streams = groups.tp.size == 1, 2 * size.microbatches + 1
            proves(main, job.proving, sisters=not groups.alone, alike=alike, streams=streams)
        self.proved_metrics = NOTHING_PROVED
        self._job, self._model, self._groups, self._on_event = job, model, groups, on_event
        self._whole_job = replace(job, batch=job.batch * size.replicas)
        self._runtimes = StreamRuntimes(runtime, main, size.microbatches, instalments=groups.tp.size == 1)
        tensors = {
            name: Share(torch.from_numpy(first), torch.from_numpy(second), inputs.frac_bits).to(main.device)
            for name, (first, second) in inputs.tensors.items()
        }
        starts = initial_weights(model, job.seed, job.frac_bits)
        self._stage = build_stage(main, model, starts, job.frac_bits, pp=groups.pp, tp=groups.tp)
        self._slots = self._stage.slots
        self._gradients = Gradients(self._slots, groups)
        decaying = [model.weights[number].decays for number in self._stage.numbers]
        self._optimizer = OPTIMIZERS[job.optimizer](
            main, self._whole_job, model.positions, self._slots, self._gradients, decaying
        )
        self._settled = SettledGradients(self._slots, groups, job.frac_bits) if job.proves else None
        self._settling: Settling | None = None
        self._pipe = Pipe(groups.pp, groups.pp_back, record)
        self._fleet = FleetPart(job, model, tensors, self._stage, groups, self._pipe, self._runtimes)
        if not isinstance(main.plane, WatchedPlane):
            raise ConfigError("this plane cannot say what has arrived", "train several microbatches on another")
        self._wake = main.plane.wake if isinstance(main.plane, Wakeable) else _nobody
        self._depth = min(in_flight(os.environ), size.microbatches)
        self._overlap = Overlap(main.plane, self._depth, groups.tp)
        self._passes: dict[int, Pass] = {}
        self._ends: dict[int, tuple[Reached, Targets]] = {}
        self._losses: list[Share] = []
        self._first_sum = True
        self._step = job.first_step
        self.validations = ValidationLog(job.patience)
        self._best = self._copied() if job.keep_best else []

    @property
    def weights(self) -> list[Share]:
        """This worker's slices of the weights, in the order of the model, each in its slice's shape."""
        return [part.weights[k] for part, k in self._slots]

    # -- a step ------------------------------------------------------------------------------------------------------

    def step(self, step: int) -> StepResult:
        """Train on this replica's slice of the rows of step ``step``; the loss is the mean over all replicas."""
        reveal, self._step = self._job.reveals_loss(step), step
        total, opened = self._trained(step, reveal=reveal)
        return self._told(step, total, opened, reveal=reveal)

    def _trained(self, step: int, *, reveal: bool) -> tuple[Share | None, Tensor | None]:
        """Train on this replica's rows; the summed loss of all if it is to be revealed, and opened if it is already."""
        size, place = self._groups.place.topology, self._groups.place
        rows, lent = self._my_batch(step), self._lent
        self._gradients.begin(size.microbatches, lent)
        if self._settled is not None:
            self._settled.begin(size.microbatches, lent)
            self._settling = Settling(self._optimizer.factor(step), self._settled.take)
        self._losses = []
        gantt = Gantt()
        self._fleet.lend(0)
        self._overlap.run(self._passages(rows, reveal, gantt))
        self._take_back()
        self._pipe.finish()
        began = time.time()
        total, opened = self._update(step, reveal)
        gantt.ticks.append((UPDATE, 0, began, time.time()))
        coord = str(place.coord)
        for name in ("fwd_open_ok", "bwd_open_ok"):
            self._on_event(name, {"coord": coord, "step": step, "count": size.microbatches})
        if step == min(1, self._job.steps - 1):
            self._tell(gantt, step)
        return total, opened

    def _told(self, step: int, total: Share | None, opened: Tensor | None, *, reveal: bool) -> StepResult:
        """What the step tells: where it is proved, all of it is first, the validation after it included."""
        validates = self._job.validates(step)
        measured = self._measured_validation() if validates else []
        if self._settled is not None and not reveal and not validates:
            silent, owed = prove_silently_together(self._runtimes, self._groups)
            return StepResult(None, silent, owed=owed)
        proved, rings = self._proved_and_opened(measured, total if opened is None else None)
        loss = None
        if reveal:
            opened = rings[-1] if rings and opened is None else opened
            mine = None if opened is None or total is None else float(opened.item()) / 2.0**total.f
            loss = self._fleet.told(mine) / (self._whole_job.batch * self._model.positions)
        found = fleet_answers.told_numbers(self._fleet, measured, rings[: len(measured)]) if validates else {}
        return StepResult(loss, proved, self._validated(step + 1, found))

    def _measured_validation(self) -> list[Measured]:
        """The numbers of validation that the job lists, still shared, at the worker that opens them."""
        return fleet_answers.measure_validation(self._fleet)

    def _proved_and_opened(
        self, measured: list[Measured], total: Share | None = None
    ) -> tuple[ProvedStep | None, list[Tensor]]:
        """Open what was measured, and a loss that is not opened yet after it, at the worker that opens; where the run
        proves what it computes, once all workers have."""
        shares = [one.share for one in measured] + ([] if total is None or not self._fleet.opener else [total])
        return self._opened(shares)

    def _opened(self, shares: Sequence[Share]) -> tuple[ProvedStep | None, list[Tensor]]:
        if self._job.proves:
            return prove_together(self._runtimes, self._groups, shares)
        main = self._runtimes.main
        return None, main.run(par(*(open_ring_protocol(main, one) for one in shares))) if shares else []

    def _my_batch(self, step: int) -> Tensor:
        first = self._groups.place.coord.replica * self._job.batch
        return self._whole_batch(step)[first : first + self._job.batch]

    def _whole_batch(self, step: int) -> Tensor:
        """The rows of all replicas, one replica's after the other's."""
        every = batch_rows(self._job.seed, step, self._whole_job.batch, self._fleet.tensors["train_x"].shape[0])
        assert len(every) == self._groups.place.topology.replicas * self._job.batch
        return torch.from_numpy(every).to(self._runtimes.main.device)

    def _tell(self, gantt: Gantt, step: int) -> None:
        for phase, m, start, end in gantt.ticks:
            at = {"start": round(start, 6), "end": round(end, 6)}
            self._on_event(
                "pipeline_tick",
                {"coord": str(self._groups.place.coord), "step": step, "phase": phase, "microbatch": m, **at},
            )

    def _passages(self, rows: Tensor, reveal: bool, gantt: Gantt) -> Iterator[Passage]:
        """The step's passes in the order of the schedule."""
        size, device = self._groups.place.topology, self._runtimes.main.device
        count = size.microbatches
        sources = {
            direction: None if at_end else PipelineReceiver(self._pipe, direction, count, device, self._wake)
            for direction, at_end in ((FORWARD, self._pipe.first), (BACKWARD, self._pipe.last))
        }
        for direction, m in one_f_one_b(self._groups.pp.index, size.stages, count, self._depth):
            mine, source = rows[bounds(len(rows), count, m)], sources[direction]
            steps = self._forward if direction == FORWARD else partial(self._backward, reveal=reveal)
            yield Passage(
                name=(direction, m),
                after=frozenset([(FORWARD, m)] if direction == BACKWARD else []),
                arrived=partial(_arrived, source, m),
                start=partial(self._start, steps, direction, m, mine, source, gantt),
                finish=partial(self._finish, direction, m, gantt),
            )

    def _start(
        self, steps: PassSteps, direction: str, m: int, rows: Tensor, source: PipelineReceiver | None, gantt: Gantt
    ) -> ProtocolProgress[Share | None]:
        incoming = None
        if source is not None:
            both = source.take(m)
            incoming = Share(both[0], both[1], self._job.frac_bits)
        gantt.begin(direction, m)
        rt = self._runtimes.of(direction, m)
        return rt.start(steps(rt, m, rows, incoming))

    def _finish(self, direction: str, m: int, gantt: Gantt, out: Share | None) -> None:
        if out is not None:
            self._fleet.send(direction, m, out)
        gantt.end(direction, m)

    def _forward(self, rt: Runtime, m: int, rows: Tensor, incoming: Share | None) -> MpcProtocol[Share | None]:
        """What goes to the next stage; the last one keeps what its loss needs."""
        take = self._gradients.take if self._settled is None else _unproved
        self._passes[m] = on = self._fleet.passing(rt, len(rows), take, self._place(m), self._settling)
        x = self._fleet.tensors["train_x"].index(rows) if incoming is None else incoming
        out = yield from forward_protocol(on, self._stage.parts, x)
        if not self._pipe.last:
            return out
        self._ends[m] = (yield from reached_protocol(rt, self._job, out)), self._targets(rows)
        return None

    def _place(self, m: int) -> BatchPlace:
        """Which rows of the step's batch a microbatch is."""
        size, job = self._groups.place.topology, self._job
        mine = bounds(job.batch, size.microbatches, m)
        first = self._groups.place.coord.replica * job.batch + mine.start
        return BatchPlace(job.seed, self._step, first, mine.stop - mine.start, self._whole_job.batch)

    def _targets(self, rows: Tensor) -> Targets:
        """This tensor rank's targets of some rows, one line per position, and what each row counts beside them."""
        lines = self._fleet.my_lines
        counts = lines(TRAIN_WEIGHTS, rows, 1) if carries_weights(self._job) else None
        return Targets(lines("train_y", rows, self._model.classes), counts)

    def _backward(
        self, rt: Runtime, m: int, rows: Tensor, incoming: Share | None, *, reveal: bool
    ) -> MpcProtocol[Share | None]:
        """What goes to the stage before."""
        on = self._passes.pop(m)
        on.rt = rt
        if incoming is None:
            down = partial(backward_protocol, on, self._stage.parts, wanted=not self._pipe.first)
            grad, loss = yield from descend_protocol(rt, self._job, *self._ends.pop(m), down, reveal=reveal)
            self._losses += [] if loss is None else [loss]
        else:
            grad = yield from backward_protocol(on, self._stage.parts, incoming, wanted=not self._pipe.first)
        return None if self._pipe.first else grad

    @property
    def _lent(self) -> StagePart | None:
        """The part of this stage whose weight another one computes with, too."""
        loan = self._stage.loan
        return loan.part if loan is not None and loan.lends else None

    def _take_back(self) -> None:
        """Add what another stage's use of a weight gives to the weight's gradient."""
        repaid = self._fleet.repaid()
        if repaid is None:
            return
        part, terms = repaid
        with torch.inference_mode():  # as the passes before it, whose sums it goes on with
            if self._settled is None:
                self._gradients.take(part, 0, terms[0])
            else:
                self._settled.take(part, 0, Share(terms[0], terms[1], self._job.frac_bits))

    # -- the update --------------------------------------------------------------------------------------------------

    def _update(self, step: int, reveal: bool) -> tuple[Share | None, Tensor | None]:
        """Sum the gradients over the replicas, truncate this replica's slice, gather, apply; the summed loss, and
        opened beside it, unless that waits until all is proved."""
        slices = self._gradients.slices() if self._settled is None else self._settled.slices()
        self._note_first_sum()
        self._follow()
        total = self._fleet.summed(self._losses) if reveal and self._pipe.last else None
        now = total if self._fleet.opener and self._settled is None else None
        opened: Tensor | None = self._optimizer.update(step, slices, self._opening_protocol(now))
        return total, opened

    def _note_first_sum(self) -> None:
        if self._first_sum and self._groups.dp.size > 1:
            self._on_event("dp_ok", {"coord": str(self._groups.place.coord)})
        self._first_sum = False

    def _follow(self) -> None:
        """Have statistics that a layer keeps follow what all replicas' microbatches were like, the same at each."""
        parts = [part for part in leaves(self._stage.parts) if isinstance(part, Following)]
        if not parts:
            return
        drifts = [part.drift() for part in parts]
        flat = torch.stack([torch.cat([half(one).reshape(-1) for one in drifts]) for half in (_first, _second)])
        if any(part.shared for part in parts):  # a tensor rank has a part of the rows, and tells what these change
            apart = [torch.full((one.n,), part.shared) for part, one in zip(parts, drifts, strict=True)]
            rows = torch.cat(apart).to(flat.device)
            flat[:, rows] = self._groups.tp.sum_(flat[:, rows])
        self._groups.dp.sum_(flat)
        first, second = (torch.split(row, [one.n for one in drifts]) for row in flat)
        for part, one, a, b in zip(parts, drifts, first, second, strict=True):
            part.follow(Share(a.reshape(one.shape), b.reshape(one.shape), one.f))

    def _opening_protocol(self, loss: Share | None) -> MpcProtocol[Tensor | None]:
        return None if loss is None else (yield from open_ring_protocol(self._runtimes.main, loss))

    # -- what is opened of rows held out -----------------------------------------------------------------------------

    def _validated(self, done: int, found: dict[str, float]) -> dict[str, float]:
        """Note by the numbers of validation after ``done`` steps which weights are the best."""
        if WATCHED in found and self.validations.add(done, found[WATCHED]) and self._job.keep_best:
            self._best[:] = self._copied()
        return found

    def _copied(self) -> list[Share]:
        """The weights in memory of their own: a checkpoint holds them beside those that go on."""
        return [weight.map(torch.clone) for weight in self.weights]

    def evaluate(self) -> dict[str, float]:
        """See ``Learner``. The weights are those of the least validation loss from now on, where the job keeps them."""
        if self._job.keep_best:
            self._set_weights(self._best)
        return fleet_answers.evaluate(self._fleet, self._open_metrics)

    def count_correct(self) -> int:
        """Open how many test rows are classified correctly: each replica counts its slice, one opens the sum."""
        return fleet_answers.count_correct(self._fleet, self._open_metrics)

    def _open_metrics(self, shares: Sequence[Share]) -> list[Tensor]:
        """Where products are proved: by all workers together."""
        proved, rings = self._opened(shares)
        self.proved_metrics = self.proved_metrics if proved is None else proved
        return rings

    @property
    def test_rows(self) -> int:
        """Labels that are counted: one per test row, or per position of every test row."""
        return int(self._fleet.tensors["test_x"].shape[0]) * self._model.positions

    # -- state -------------------------------------------------------------------------------------------------------

    def _kept(self) -> list[tuple[str, list[Share]]]:
        found = [("weight", self.weights), *self._optimizer.moments.items()]
        return [*found, ("best", self._best)] if self._job.keep_best else found

    def state(self) -> dict[str, Tensor]:
        """Everything a checkpoint holds of this worker: both components of its weights and moments, by name.

        Each is int64 in the shape of its slice.
        """
        found: dict[str, Tensor] = {}
        for kind, shares in self._kept():
            for number, share in zip(self._stage.numbers, shares, strict=True):
                found |= stored(f"{kind}.{number}", share)
        return found

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what :meth:`state` gave. Raises ConfigError if a name or shape does not fit."""
        wanted = {name: t.shape for name, t in self.state().items()}
        if {name: t.shape for name, t in state.items()} != wanted or any(
            t.dtype != torch.int64 for t in state.values()
        ):
            raise ConfigError("the checkpoint does not fit this worker's part of the model", "resume the same topology")
        for kind, shares in self._kept():
            for at, number in enumerate(self._stage.numbers):
                shares[at] = loaded(state, f"{kind}.{number}", shares[at].f).to(self._runtimes.main.device)
            if kind == "weight":
                self._set_weights(shares)

    def _set_weights(self, weights: Sequence[Share]) -> None:
        for (part, k), weight in zip(self._slots, weights, strict=True):
            part.weights[k] = weight

    def weight_halves(self) -> tuple[dict[str, Ring], dict[str, Ring]]:
        """Both components of this worker's weights by name, as the owner's box holds them."""
        return rings((f"weight.{n}", w) for n, w in zip(self._stage.numbers, self.weights, strict=True))

    def component_digest(self, half: Half, blind: bytes) -> str:
        """Blinded SHA-256 (hex) of one component of this worker's state; equal at its holder in the other party."""
        named = [
            (f"{kind}.{number}", component(share, half))
            for kind, shares in self._kept()
            for number, share in zip(self._stage.numbers, shares, strict=True)
        ]
        return component_digest(named, blind)


def _first(share: Share) -> Tensor:
    return share.first


def _second(share: Share) -> Tensor:
    return share.second


def _nobody() -> None:
    """What is called where nobody waits."""


def _unproved(part: StagePart, weight: int, term: Tensor) -> None:
    """What takes an additive term where products are proved: nobody could prove it."""
    raise ConfigError(f"a gradient of {type(part).__name__} has no proof", "verify: off, or another layer")


def _arrived(source: PipelineReceiver | None, microbatch: int) -> bool:
    return source is None or source.arrived(microbatch)
