"""Secret-shared training on replicas, stages and tensor ranks: one worker's part of it.

Replica r trains on its own slice of every step's rows. Activations and their gradients move between stages inside each
party (1F1B); the weights' gradients stay additive terms until they are summed over microbatches and replicas, are then
truncated once with the learning rate and 1/R in the truncation, each replica doing its slice, and the updates are
gathered: all replicas of a party hold identical shares, bit for bit. What is opened (loss, accuracy) is summed over
the whole fleet before one worker of each party opens it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.arithmetic import add, mul_public_gen, public, sub
from uvcc_engine.mpc.opening import open_ring_gen
from uvcc_engine.mpc.runtime import Runtime, Steps, par
from uvcc_engine.mpc.share import Share
from uvcc_engine.parallel.groups import Group, OnEvent, PartyGroups
from uvcc_engine.parallel.pipeline import BACKWARD, FORWARD, UPDATE, Gantt, Pipe, Record
from uvcc_engine.parallel.schedule import one_f_one_b
from uvcc_engine.private import losses
from uvcc_engine.private.additive import settle_gen
from uvcc_engine.private.components import Ring
from uvcc_engine.private.data import batch_rows
from uvcc_engine.private.inputs import PartyInputs
from uvcc_engine.private.job import PrivateJob
from uvcc_engine.private.models import ModelSpec, initial_weights
from uvcc_engine.private.sharded import Part, Pass, backward_gen, bounds, forward_gen, my_rows
from uvcc_engine.private.stage import build_stage
from uvcc_engine.private.state import component_digest
from uvcc_engine.private.training import StepResult

_EVAL_ROWS: Final = 256
MainRuntime = Callable[[int], Runtime]


class Learner(Protocol):
    """What a session drives: the plain trainer, or one worker's part of a parallel one."""

    def step(self, step: int) -> StepResult:
        """Train on the batch of step ``step``."""

    def count_correct(self) -> int:
        """Open how many test rows are classified correctly."""

    @property
    def test_rows(self) -> int:
        """Rows that are counted."""

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds of this worker."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what :meth:`state` gave."""

    def weight_halves(self) -> tuple[dict[str, Ring], dict[str, Ring]]:
        """Both components of this worker's weights by name."""

    def component_digest(self, component: str, blind: bytes) -> str:
        """Blinded digest of one component of this worker's state."""


def stream_of(direction: str, microbatch: int) -> int:
    """The stream of one pass: 1 + 2 m forwards, 2 + 2 m backwards; 0 is everything else."""
    return 1 + 2 * microbatch + (direction == BACKWARD)


class Lanes:
    """A runtime for every stream of an epoch: the main one, and one per microbatch and direction."""

    def __init__(self, make: MainRuntime, main: Runtime) -> None:
        self.main = main
        self._make = make
        self._others: dict[int, Runtime] = {}

    def of(self, direction: str, microbatch: int) -> Runtime:
        """The runtime of one pass."""
        stream = stream_of(direction, microbatch)
        if stream not in self._others:
            self._others[stream] = self._make(stream)
        lane = self._others[stream]
        if lane.epoch != self.main.epoch:
            lane.begin_epoch(self.main.epoch)
        return lane


@dataclass
class _Sums:
    """Additive terms of one step's weight gradients, by weight slot; ``due`` counts the microbatches still to come."""

    terms: list[Tensor | None]
    due: list[int]


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
        self._lanes = Lanes(runtime, main)
        self._tensors = {
            name: Share(torch.from_numpy(lo), torch.from_numpy(hi), inputs.frac_bits)
            for name, (lo, hi) in inputs.tensors.items()
        }
        starts = initial_weights(model, job.seed, job.frac_bits)
        self._stage = build_stage(main, model, starts, job.frac_bits, pp=groups.pp, tp=groups.tp)
        self._slots = self._stage.slots
        self.velocity = [public(main, torch.zeros_like(w.lo), f=job.frac_bits) for w in self.weights]
        self._pipe = Pipe(groups.pp, groups.pp_back, record)
        self._passes: dict[int, Pass] = {}
        self._grads: dict[int, tuple[losses.Powers, Share]] = {}
        self._losses: list[Share] = []
        self._first_sum = True

    @property
    def weights(self) -> list[Share]:
        """This worker's weights, in the order of the model."""
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
        self._sums = _Sums([None] * len(self._slots), [size.microbatches] * len(self._slots))
        self._losses = []
        gantt = Gantt()
        for direction, m in one_f_one_b(self._groups.pp.index, size.stages, size.microbatches):
            began = time.time()
            mine = rows[bounds(len(rows), size.microbatches, m)]
            if direction == FORWARD:
                self._forward(m, mine)
            else:
                self._backward(m, mine, reveal)
            gantt.note(direction, m, began)
        self._pipe.finish()
        began = time.time()
        loss = self._update(step, reveal)
        gantt.note(UPDATE, 0, began)
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

    def _forward(self, m: int, rows: Tensor) -> None:
        rt = self._lanes.of(FORWARD, m)
        on = Pass(rt, self._groups.tp, len(rows), self._collect)
        x = self._tensors["train_x"].index(rows) if self._pipe.first else self._receive(FORWARD, m)
        if not self._pipe.last:
            self._send(FORWARD, m, rt.run(forward_gen(on, self._stage.parts, x)))
        else:
            y = self._tensors["train_y"].index(rows).map(lambda t: my_rows(self._groups.tp, t))
            self._grads[m] = (rt.run(self._powers_gen(on, x)), y)
        self._passes[m] = on

    def _powers_gen(self, on: Pass, x: Share) -> Steps[losses.Powers]:
        logits = yield from forward_gen(on, self._stage.parts, x)
        return (yield from losses.powers_gen(on.rt, logits))

    def _backward(self, m: int, rows: Tensor, reveal: bool) -> None:
        rt, on = self._lanes.of(BACKWARD, m), self._passes.pop(m)
        on.rt = rt
        if self._pipe.last:
            grad = rt.run(self._descend_gen(on, *self._grads.pop(m), reveal))
        else:
            incoming = self._receive(BACKWARD, m)
            grad = rt.run(backward_gen(on, self._stage.parts, incoming, wanted=not self._pipe.first))
        if not self._pipe.first:
            self._send(BACKWARD, m, grad)

    def _descend_gen(self, on: Pass, at: losses.Powers, targets: Share, reveal: bool) -> Steps[Share]:
        if reveal:
            grad, loss = yield from par(self._from_loss_gen(on, at, targets), losses.total_loss_gen(on.rt, at, targets))
            self._losses.append(loss)
            return grad
        return (yield from self._from_loss_gen(on, at, targets))

    def _from_loss_gen(self, on: Pass, at: losses.Powers, targets: Share) -> Steps[Share]:
        grad = yield from losses.gradient_gen(on.rt, at, targets)
        return (yield from backward_gen(on, self._stage.parts, grad, wanted=not self._pipe.first))

    def _receive(self, direction: str, m: int) -> Share:
        both = self._pipe.receive(direction, m, self._lanes.main.device)
        return Share(both[0], both[1], self._job.frac_bits)

    def _send(self, direction: str, m: int, x: Share) -> None:
        self._pipe.send(direction, m, torch.stack([x.lo, x.hi]))

    # -- the update --------------------------------------------------------------------------------------------------

    def _collect(self, part: Part, weight: int, term: Tensor) -> None:
        """Take a microbatch's gradient term of one weight."""
        at = next(i for i, (p, k) in enumerate(self._slots) if p is part and k == weight)
        known = self._sums.terms[at]
        self._sums.terms[at] = term if known is None else known.add_(term)
        self._sums.due[at] -= 1

    def _update(self, step: int, reveal: bool) -> float | None:
        """Sum the gradients over the replicas, truncate this replica's slice, gather, apply; open the loss beside."""
        groups = self._groups
        groups.start_dp()
        waits = []
        for term in self._sums.terms:
            assert term is not None, "a weight without a gradient"
            waits.append(groups.dp.sum_slices(_padded(term.reshape(-1), groups.dp.size)))
        slices = [wait() for wait in waits]
        if self._first_sum:
            self._first_sum = False
            self._on_event("dp_ok", {"coord": str(groups.place.coord)})
        total = self._fleet_sum(self._losses) if reveal and self._pipe.last else None
        found = self._lanes.main.run(self._update_gen(step, slices, total if self._opener else None))
        for at, (part, k) in enumerate(self._slots):
            weight = part.weights[k]
            fresh = _joined(groups.dp, found[at], weight)
            self.velocity[at] = fresh
            part.weights[k] = sub(weight, fresh)
        if not reveal:
            return None
        opened = self._told(found[-1])
        return float(opened) / 2.0**self._job.frac_bits / (self._whole_job.batch * self._model_positions)

    @property
    def _model_positions(self) -> int:
        """Predictions per row."""
        return 1

    def _update_gen(self, step: int, slices: list[Tensor], loss: Share | None) -> Steps[list[Any]]:
        steps: list[Steps[Any]] = [self._slice_gen(step, at, z) for at, z in enumerate(slices)]
        if loss is not None:
            steps.append(open_ring_gen(self._lanes.main, loss))
        else:
            steps.append(_nothing_gen())
        return (yield from par(*steps))

    def _slice_gen(self, step: int, at: int, z: Tensor) -> Steps[Share]:
        """The update u <- m u + (lr / B) g of this replica's slice of one weight: 2 rounds."""
        job, rt, dp = self._whole_job, self._lanes.main, self._groups.dp
        part, k = self._slots[at]
        before = self.velocity[at].map(lambda t: _padded(t.reshape(-1), dp.size).reshape(dp.size, -1)[dp.index])
        rate, f = job.rate_at(step), job.frac_bits
        fresh, kept = yield from par(
            settle_gen(rt, z, f, f, part.dealers[k], rate), mul_public_gen(rt, before, job.decay_at(step))
        )
        return add(kept, fresh)

    # -- what is opened ----------------------------------------------------------------------------------------------

    def _fleet_sum(self, shares: list[Share]) -> Share:
        """The sum of some shares of one element over this list, the tensor ranks and the replicas of the last stage."""
        both = torch.stack([torch.stack([s.lo, s.hi]) for s in shares]).sum(0)
        self._groups.dp.sum_(self._groups.tp.sum_(both))
        return Share(both[0], both[1], shares[0].f)

    def _told(self, opened: Tensor | None) -> int:
        """What the opener opened, at every worker of the party."""
        value = opened.reshape(1).clone() if opened is not None else torch.zeros(1, dtype=torch.int64)
        groups = self._groups
        for group, source in ((groups.tp, 0), (groups.dp, 0), (groups.pp, groups.pp.size - 1)):
            group.broadcast_(value, source)
        return int(value.item())

    def count_correct(self) -> int:
        """Open how many test rows are classified correctly: each replica counts its slice, one opens the sum."""
        groups, size = self._groups, self._groups.place.topology
        groups.start_dp()
        mine = torch.arange(self.test_rows)[bounds(self.test_rows, size.replicas, groups.place.coord.replica)]
        hits = [public(self._lanes.main, torch.zeros(1), f=self._job.frac_bits)]
        for m, rows in enumerate(torch.split(mine, _EVAL_ROWS)):
            rt = self._lanes.of(FORWARD, m)
            on = Pass(rt, groups.tp, len(rows), self._collect)
            x = self._tensors["test_x"].index(rows) if self._pipe.first else self._receive(FORWARD, m)
            if self._pipe.last:
                y = self._tensors["test_y"].index(rows).map(lambda t: my_rows(groups.tp, t))
                hits.append(rt.run(self._hits_gen(on, x, y)))
            else:
                self._send(FORWARD, m, rt.run(forward_gen(on, self._stage.parts, x)))
        self._pipe.finish()
        opened = None
        if self._pipe.last:
            total = self._fleet_sum(hits)
            opened = self._lanes.main.run(open_ring_gen(self._lanes.main, total)) if self._opener else None
        return self._told(opened) >> self._job.frac_bits

    def _hits_gen(self, on: Pass, x: Share, targets: Share) -> Steps[Share]:
        logits = yield from forward_gen(on, self._stage.parts, x)
        return (yield from losses.hits_gen(on.rt, logits, targets))

    @property
    def test_rows(self) -> int:
        return int(self._tensors["test_x"].shape[0])

    # -- state -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Everything a checkpoint holds of this worker: both components of its weights and momentum, by name."""
        found: dict[str, Tensor] = {}
        for kind, shares in (("weight", self.weights), ("velocity", self.velocity)):
            for number, share in zip(self._stage.numbers, shares, strict=True):
                found[f"{kind}.{number}.lo"] = share.lo.contiguous()
                found[f"{kind}.{number}.hi"] = share.hi.contiguous()
        return found

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what :meth:`state` gave. Raises ConfigError if it does not fit this worker."""
        wanted = {name: t.shape for name, t in self.state().items()}
        if {name: t.shape for name, t in state.items()} != wanted or any(
            t.dtype != torch.int64 for t in state.values()
        ):
            raise ConfigError("the checkpoint does not fit this worker's part of the model", "resume the same topology")
        f = self._job.frac_bits
        for at, number in enumerate(self._stage.numbers):
            part, k = self._slots[at]
            part.weights[k] = Share(state[f"weight.{number}.lo"], state[f"weight.{number}.hi"], f)
            self.velocity[at] = Share(state[f"velocity.{number}.lo"], state[f"velocity.{number}.hi"], f)

    def weight_halves(self) -> tuple[dict[str, Ring], dict[str, Ring]]:
        """Both components of this worker's weights by name, as the owner's box holds them."""
        named = list(zip(self._stage.numbers, self.weights, strict=True))
        lo, hi = ({f"weight.{n}": getattr(w, c).numpy() for n, w in named} for c in ("lo", "hi"))
        return lo, hi

    def component_digest(self, component: str, blind: bytes) -> str:
        """Blinded SHA-256 (hex) of one component of this worker's state; equal at its holder in the other party."""
        named = [
            (f"{kind}.{number}", getattr(share, component))
            for kind, shares in (("weight", self.weights), ("velocity", self.velocity))
            for number, share in zip(self._stage.numbers, shares, strict=True)
        ]
        return component_digest(named, blind)


def _nothing_gen() -> Steps[None]:
    return None
    yield  # a generator like its siblings


def _padded(flat: Tensor, size: int) -> Tensor:
    """A flat tensor with zeros behind it, up to a multiple of ``size``."""
    short = -len(flat) % size
    return torch.cat([flat, flat.new_zeros(short)]) if short else flat


def _joined(dp: Group, mine: Share, like: Share) -> Share:
    """All replicas' slices of an update, put together in the shape of a weight: equal at every replica."""
    whole = torch.cat(dp.gather(torch.stack([mine.lo, mine.hi])), 1)[:, : like.n]
    return Share(whole[0].reshape(like.shape), whole[1].reshape(like.shape), mine.f)
