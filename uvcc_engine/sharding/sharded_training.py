"""Secret-shared training on replicas, stages and tensor ranks: one worker's part of it.

Replica r trains on its own slice of every step's rows. Activations and their gradients move between stages inside each
party (1F1B); the weights' gradients stay additive terms until they are summed over microbatches and replicas, are then
truncated once with the learning rate and 1/R in the truncation, each replica doing its slice, and the updates are
gathered: all replicas of a party hold identical shares, bit for bit. What is opened (loss, accuracy) is summed over
the whole fleet before one worker of each party opens it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.sets import batch_rows
from uvcc_engine.model import losses
from uvcc_engine.model.additive import settle_protocol
from uvcc_engine.model.definition.specs import ModelSpec, initial_weights
from uvcc_engine.model.functions import exp_scale
from uvcc_engine.model.learning.optimizers import decayed_protocol
from uvcc_engine.model.learning.state_digests import Half, component, component_digest, loaded, rings, stored
from uvcc_engine.model.learning.training import StepResult
from uvcc_engine.mpc.foundation.opening import open_ring_protocol
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, ProtocolProgress, Runtime, par
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.products.arithmetic import add, mul_public_protocol, public, sub
from uvcc_engine.parallel.group import OnEvent
from uvcc_engine.parallel.groups import PartyGroups
from uvcc_engine.parallel.pipeline import BACKWARD, FORWARD, UPDATE, Gantt, Pipe, PipelineReceiver, Record
from uvcc_engine.parallel.schedule import one_f_one_b
from uvcc_engine.plane.api import Wakeable, WatchedPlane
from uvcc_engine.sealing.components import Ring
from uvcc_engine.sealing.inputs import PartyInputs
from uvcc_engine.sharding.gradients import Gradients
from uvcc_engine.sharding.microbatches import MainRuntime, StreamRuntimes, in_flight, stream_of
from uvcc_engine.sharding.overlap import Overlap, Passage
from uvcc_engine.sharding.partition import bounds
from uvcc_engine.sharding.stage import build_stage
from uvcc_engine.sharding.stage_passes import Pass, backward_protocol, forward_protocol, my_rows
from uvcc_engine.sharding.updates import SliceUpdate, cut_to_norm, decays

__all__ = ["Learner", "ParallelTrainer", "stream_of"]

_EVAL_ROWS: Final = 256
PassSteps = Callable[[Runtime, int, Tensor, Share | None], MpcProtocol[Share | None]]


class Learner(Protocol):
    """What a session drives: the plain trainer, or one worker's part of a parallel one."""

    def step(self, step: int) -> StepResult:
        """Train on the batch of step ``step``."""

    def evaluate(self) -> dict[str, float]:
        """Open the metrics that the job lists, over all test rows, by name."""

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds of this worker: both components, each in the shape of its weight, by name."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what :meth:`state` gave, in the same shapes."""

    def weight_halves(self) -> tuple[dict[str, Ring], dict[str, Ring]]:
        """Both components of this worker's weights by name."""

    def component_digest(self, half: Half, blind: bytes) -> str:
        """Blinded digest of one component of this worker's state."""


class ParallelTrainer:
    """Weights and momentum of one worker and the protocol that moves them. Use it from one thread."""

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
        if (job.optimizer, job.objective) != ("sgd", "cross-entropy"):
            raise ConfigError(
                f"{job.objective} with {job.optimizer} over several workers", "use cross-entropy with sgd there"
            )
        self._job, self._model, self._groups, self._on_event = job, model, groups, on_event
        self._whole_job = replace(job, batch=job.batch * size.replicas)
        self._runtimes = StreamRuntimes(runtime, main)
        self._tensors = {
            name: Share(torch.from_numpy(first), torch.from_numpy(second), inputs.frac_bits)
            for name, (first, second) in inputs.tensors.items()
        }
        starts = initial_weights(model, job.seed, job.frac_bits)
        self._stage = build_stage(main, model, starts, job.frac_bits, pp=groups.pp, tp=groups.tp)
        self._slots = self._stage.slots
        self.velocity = [public(main, torch.zeros_like(w.first), f=job.frac_bits) for w in self.weights]
        self._gradients = Gradients(self._slots, groups)
        self._pipe = Pipe(groups.pp, groups.pp_back, record)
        if not isinstance(main.plane, WatchedPlane):
            raise ConfigError("this plane cannot say what has arrived", "train several microbatches on another")
        self._wake = main.plane.wake if isinstance(main.plane, Wakeable) else _nobody
        self._depth = min(in_flight(os.environ), size.microbatches)
        self._overlap = Overlap(main.plane, self._depth, groups.tp)
        self._passes: dict[int, Pass] = {}
        self._grads: dict[int, tuple[losses.Powers, Share]] = {}
        self._losses: list[Share] = []
        self._first_sum = True

    @property
    def weights(self) -> list[Share]:
        """This worker's slices of the weights, in the order of the model, each in its slice's shape."""
        return [part.weights[k] for part, k in self._slots]

    @property
    def _opener(self) -> bool:
        """Whether this worker opens what the job reveals: one of each party does."""
        c = self._groups.place.coord
        return self._pipe.last and c.replica == 0 and c.tensor == 0

    # -- a step ------------------------------------------------------------------------------------------------------

    def step(self, step: int) -> StepResult:
        """Train on this replica's slice of the rows of step ``step``; the loss is the mean over all replicas."""
        size, place = self._groups.place.topology, self._groups.place
        reveal = self._job.reveals_loss(step)
        rows = self._my_batch(step)
        self._gradients.begin(size.microbatches)
        self._losses = []
        gantt = Gantt()
        self._overlap.run(self._passages(rows, reveal, gantt))
        self._pipe.finish()
        began = time.time()
        loss = self._update(step, reveal)
        gantt.ticks.append((UPDATE, 0, began, time.time()))
        coord = str(place.coord)
        for name in ("fwd_open_ok", "bwd_open_ok"):
            self._on_event(name, {"coord": coord, "step": step, "count": size.microbatches})
        if step == min(1, self._job.steps - 1):
            self._tell(gantt, step)
        return StepResult(loss)

    def _my_batch(self, step: int) -> Tensor:
        size = self._groups.place.topology
        every = batch_rows(self._job.seed, step, self._whole_job.batch, self._tensors["train_x"].shape[0])
        first = self._groups.place.coord.replica * self._job.batch
        assert len(every) == size.replicas * self._job.batch
        return torch.from_numpy(every[first : first + self._job.batch])

    def _tell(self, gantt: Gantt, step: int) -> None:
        for phase, m, start, end in gantt.ticks:
            at = {"start": round(start, 6), "end": round(end, 6)}
            self._on_event(
                "pipeline_tick",
                {"coord": str(self._groups.place.coord), "step": step, "phase": phase, "microbatch": m, **at},
            )

    def _pass(self, rt: Runtime, rows: Tensor) -> Pass:
        return Pass(rt, self._groups.tp, len(rows) * self._model.positions, self._gradients.take)

    def _targets(self, name: str, rows: Tensor) -> Share:
        """This tensor rank's one-hot labels of some rows, one line per position."""
        whole = self._tensors[name].index(rows).reshape(-1, self._model.classes)
        return whole.map(lambda t: my_rows(self._groups.tp, t))

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
            self._send(direction, m, out)
        gantt.end(direction, m)

    def _forward(self, rt: Runtime, m: int, rows: Tensor, incoming: Share | None) -> MpcProtocol[Share | None]:
        """What goes to the next stage; the last one keeps what its loss needs."""
        self._passes[m] = on = self._pass(rt, rows)
        x = self._tensors["train_x"].index(rows) if incoming is None else incoming
        out = yield from forward_protocol(on, self._stage.parts, x)
        if not self._pipe.last:
            return out
        self._grads[m] = (yield from losses.powers_protocol(rt, out)), self._targets("train_y", rows)
        return None

    def _backward(
        self, rt: Runtime, m: int, rows: Tensor, incoming: Share | None, *, reveal: bool
    ) -> MpcProtocol[Share | None]:
        """What goes to the stage before."""
        on = self._passes.pop(m)
        on.rt = rt
        if incoming is None:
            grad = yield from self._descend_protocol(on, *self._grads.pop(m), reveal)
        else:
            grad = yield from backward_protocol(on, self._stage.parts, incoming, wanted=not self._pipe.first)
        return None if self._pipe.first else grad

    def _descend_protocol(self, on: Pass, at: losses.Powers, targets: Share, reveal: bool) -> MpcProtocol[Share]:
        if reveal:
            grad, loss = yield from par(
                self._from_loss_protocol(on, at, targets),
                losses.total_loss_protocol(on.rt, at, targets, weighted=self._job.weighted),
            )
            self._losses.append(loss)
            return grad
        return (yield from self._from_loss_protocol(on, at, targets))

    def _from_loss_protocol(self, on: Pass, at: losses.Powers, targets: Share) -> MpcProtocol[Share]:
        grad = yield from losses.gradient_protocol(on.rt, at, targets, weighted=self._job.weighted)
        return (yield from backward_protocol(on, self._stage.parts, grad, wanted=not self._pipe.first))

    def _receive(self, direction: str, m: int) -> Share:
        both = self._pipe.receive(direction, m, self._runtimes.main.device)
        return Share(both[0], both[1], self._job.frac_bits)

    def _send(self, direction: str, m: int, x: Share) -> None:
        self._pipe.send(direction, m, torch.stack([x.first, x.second]))

    # -- the update --------------------------------------------------------------------------------------------------

    def _update(self, step: int, reveal: bool) -> float | None:
        """Sum the gradients over the replicas, truncate this replica's slice, gather, apply; open the loss beside."""
        groups = self._groups
        slices = self._gradients.slices()
        if self._first_sum:
            self._first_sum = False
            if groups.dp.size > 1:
                self._on_event("dp_ok", {"coord": str(groups.place.coord)})
        total = self._fleet_sum(self._losses) if reveal and self._pipe.last else None
        rt = self._runtimes.main
        *found, opened = rt.run(self._update_protocol(step, slices, total if self._opener else None))
        if self._job.clip_norm:
            found = cut_to_norm(rt, self._gradients, found, self._job.clip_norm * self._job.lr_at(step))
        taken = decays(self._gradients, found, self.weights)
        self.velocity = self._gradients.joined([add(one.kept, one.fresh) for one in found], self.weights)
        for at, ((part, k), fresh) in enumerate(zip(self._slots, self.velocity, strict=True)):
            moved = sub(part.weights[k], fresh)
            part.weights[k] = sub(moved, taken[at]) if at in taken else moved
        if not reveal:
            return None
        loss = self._told(opened) / 2.0 ** exp_scale(self._job.frac_bits)
        return loss / (self._whole_job.batch * self._model.positions)

    def _update_protocol(self, step: int, slices: list[Tensor], loss: Share | None) -> MpcProtocol[list[Any]]:
        steps: list[MpcProtocol[Any]] = [self._slice_protocol(step, at, z) for at, z in enumerate(slices)]
        if loss is not None:
            steps.append(open_ring_protocol(self._runtimes.main, loss))
        else:
            steps.append(_nothing_protocol())
        return (yield from par(*steps))

    def _slice_protocol(self, step: int, at: int, z: Tensor) -> MpcProtocol[SliceUpdate]:
        """What the update u <- m u + (lr / B) g of this replica's slice of one weight is made of: 2 rounds."""
        job, rt = self._whole_job, self._runtimes.main
        part, k = self._slots[at]
        before, weight = (x.map(lambda t: self._gradients.mine(at, t)) for x in (self.velocity[at], part.weights[k]))
        rate, f = job.rate_at(step) / self._model.positions, job.frac_bits
        three: MpcProtocol[list[Any]] = par(
            settle_protocol(rt, z, f, f, part.dealers[k], rate),
            mul_public_protocol(rt, before, job.decay_at(step)),
            decayed_protocol(rt, weight, job, step, self._model.weights[self._stage.numbers[at]].decays),
        )
        return SliceUpdate(*(yield from three))

    # -- what is opened ----------------------------------------------------------------------------------------------

    def _fleet_sum(self, shares: list[Share]) -> Share:
        """The sum of some shares of one element over this list, the tensor ranks and the replicas of the last stage."""
        both = torch.stack([torch.stack([s.first, s.second]) for s in shares]).sum(0)
        self._groups.dp.sum_(self._groups.tp.sum_(both))
        return Share(both[0], both[1], shares[0].f)

    def _told(self, opened: Tensor | None) -> int:
        """What the opener opened, at every worker of the party."""
        value = opened.reshape(1).clone() if opened is not None else torch.zeros(1, dtype=torch.int64)
        groups = self._groups
        for group, source in ((groups.tp, 0), (groups.dp, 0), (groups.pp, groups.pp.size - 1)):
            group.broadcast_(value, source)
        return int(value.item())

    def evaluate(self) -> dict[str, float]:
        """See ``Learner``; over several workers it is the accuracy alone."""
        return {"accuracy": self.count_correct() / self.test_rows} if "accuracy" in self._job.reveal else {}

    def count_correct(self) -> int:
        """Open how many test rows are classified correctly: each replica counts its slice, one opens the sum."""
        groups, size = self._groups, self._groups.place.topology
        groups.start_dp()
        rows = int(self._tensors["test_x"].shape[0])
        mine = torch.arange(rows)[bounds(rows, size.replicas, groups.place.coord.replica)]
        hits = [public(self._runtimes.main, torch.zeros(1), f=self._job.frac_bits)]
        count = -(-len(mine) // _EVAL_ROWS)
        for m in range(count):  # parts of one size, up to one: a tensor rank without a row could not take part
            some = mine[bounds(len(mine), count, m)]
            rt = self._runtimes.of(FORWARD, m)
            on = self._pass(rt, some)
            x = self._tensors["test_x"].index(some) if self._pipe.first else self._receive(FORWARD, m)
            if self._pipe.last:
                hits.append(rt.run(self._hits_protocol(on, x, self._targets("test_y", some))))
            else:
                self._send(FORWARD, m, rt.run(forward_protocol(on, self._stage.parts, x)))
        self._pipe.finish()
        opened = None
        if self._pipe.last:
            total = self._fleet_sum(hits)
            opened = self._runtimes.main.run(open_ring_protocol(self._runtimes.main, total)) if self._opener else None
        return self._told(opened) >> self._job.frac_bits

    def _hits_protocol(self, on: Pass, x: Share, targets: Share) -> MpcProtocol[Share]:
        logits = yield from forward_protocol(on, self._stage.parts, x)
        return (yield from losses.hits_protocol(on.rt, logits, targets))

    @property
    def test_rows(self) -> int:
        """Labels that are counted: one per test row, or per position of every test row."""
        return int(self._tensors["test_x"].shape[0]) * self._model.positions

    # -- state -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Everything a checkpoint holds of this worker: both components of its weights and momentum, by name.

        Each is int64 in the shape of its slice.
        """
        found: dict[str, Tensor] = {}
        for kind, shares in (("weight", self.weights), ("velocity", self.velocity)):
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
        f = self._job.frac_bits
        for at, number in enumerate(self._stage.numbers):
            part, k = self._slots[at]
            part.weights[k] = loaded(state, f"weight.{number}", f)
            self.velocity[at] = loaded(state, f"velocity.{number}", f)

    def weight_halves(self) -> tuple[dict[str, Ring], dict[str, Ring]]:
        """Both components of this worker's weights by name, as the owner's box holds them."""
        return rings((f"weight.{n}", w) for n, w in zip(self._stage.numbers, self.weights, strict=True))

    def component_digest(self, half: Half, blind: bytes) -> str:
        """Blinded SHA-256 (hex) of one component of this worker's state; equal at its holder in the other party."""
        named = [
            (f"{kind}.{number}", component(share, half))
            for kind, shares in (("weight", self.weights), ("velocity", self.velocity))
            for number, share in zip(self._stage.numbers, shares, strict=True)
        ]
        return component_digest(named, blind)


def _nobody() -> None:
    """What is called where nobody waits."""


def _nothing_protocol() -> MpcProtocol[None]:
    return None
    yield  # a generator like its siblings


def _arrived(source: PipelineReceiver | None, microbatch: int) -> bool:
    return source is None or source.arrived(microbatch)
