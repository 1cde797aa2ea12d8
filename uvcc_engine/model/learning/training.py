"""One party's part of secret-shared training: the state, one step, and the final count of correct test rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.early_stop import WATCHED, ValidationLog
from uvcc_engine.contract.job.owner_files import INFORMATION_TENSORS
from uvcc_engine.contract.job.private_job import METRICS, STANDARD_ERRORS, PrivateJob
from uvcc_engine.data.sets import batch_rows
from uvcc_engine.data.weighted_targets import TRAIN_WEIGHTS, carries_weights
from uvcc_engine.model import layers as nn
from uvcc_engine.model import losses, ops
from uvcc_engine.model.batch_place import BatchPlace
from uvcc_engine.model.definition.specs import ModelSpec, initial_weights
from uvcc_engine.model.learning.answer_metrics import measure_protocol
from uvcc_engine.model.learning.information import information_protocol
from uvcc_engine.model.learning.measured import Measured, numbers
from uvcc_engine.model.learning.objectives import OF_ONE_OUTPUT
from uvcc_engine.model.learning.optimizers import Adam, Optimizer, Sgd
from uvcc_engine.model.learning.overflows import Bounded
from uvcc_engine.model.learning.standardising import Standardiser, named
from uvcc_engine.model.learning.state_digests import Half, component, component_digest, loaded, rings, stored
from uvcc_engine.model.learning.validating import validations_protocol
from uvcc_engine.mpc.foundation.claim_ledger import ProvedStep
from uvcc_engine.mpc.foundation.opening import open_ring_protocol
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime, par
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.products.arithmetic import mul_protocol, public, sub
from uvcc_engine.proofs.instalments import proves
from uvcc_engine.proofs.settling import OwedVerdict
from uvcc_engine.proofs.step_proof import NOTHING_PROVED, prove_and_open, prove_silently
from uvcc_engine.sealing.components import Ring
from uvcc_engine.sealing.inputs import PartyInputs

ops.load()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step reveals: the mean loss of its batch before the update, or None if it is not opened.

    ``proved``: what was proved of it before, where products are. ``validated``: the numbers of validation after it.
    ``owed``: where it opened nothing and the ledger defers, the verdict that is to be told, and the others' heard.
    """

    loss: float | None
    proved: ProvedStep | None = None
    validated: Mapping[str, float] = field(default_factory=dict)
    owed: OwedVerdict | None = None


@dataclass(frozen=True, slots=True)
class SummedLoss:
    """A batch's summed loss, one element, and what it was opened as, where that did not wait for a proof."""

    total: Share
    opened: Tensor | None


class PrivateTrainer:
    """Weights and momentum of one party and the protocol that moves them. Use it from one thread."""

    def __init__(self, rt: Runtime, job: PrivateJob, model: ModelSpec, inputs: PartyInputs) -> None:
        """Start from the public initial weights of the job's seed; as the job says, products are noted to be proved.

        Raises ConfigError if shapes do not fit.
        """
        if job.proves:
            proves(rt, job.proving)
        self.proved_metrics = NOTHING_PROVED
        self._rt = rt
        self._job = job
        self._tensors = {
            name: Share(torch.from_numpy(first), torch.from_numpy(second), inputs.frac_bits).to(rt.device)
            for name, (first, second) in inputs.tensors.items()
        }
        starts = initial_weights(model, job.seed, job.frac_bits)
        weights = [public(rt, torch.from_numpy(w), f=job.frac_bits) for w in starts]
        self._layers = nn.build(model, weights)
        self._model = model
        self._optimizer = _optimizer(rt, job, self._layers, model)
        self._standardiser = (
            Standardiser(rt, model.features, job.frac_bits, job.standardise_by) if job.standardise else None
        )
        self._information: list[Share] = []  # of a regression, once it has ended
        self.validations = ValidationLog(job.patience)
        self._best = self._copied() if job.keep_best else []

    @property
    def weights(self) -> list[Share]:
        """The weights, one per weighted layer."""
        return [layer.weight for layer in nn.weighted(self._layers) if layer.weight is not None]

    @property
    def layers(self) -> list[nn.Layer]:
        """The layers, in the order of the model."""
        return self._layers

    @property
    def information(self) -> list[Share]:
        """What a regression's standard errors follow from, ``[k, k]`` and ``[1, 3]``; empty before it is evaluated."""
        return self._information

    @property
    def velocity(self) -> list[Share]:
        """The momentum terms, one per weighted layer."""
        return self._optimizer.moments["velocity"]

    def _kept(self) -> list[tuple[str, list[Share]]]:
        found = [("weight", self.weights), *self._optimizer.moments.items()]
        found += [("best", self._best)] if self._job.keep_best else []
        found += [("information", self._information)] if self._information else []
        return found if self._standardiser is None else [*found, ("statistics", self._standardiser.statistics)]

    def step(self, step: int) -> StepResult:
        """Train on the batch of step ``step`` (from 0). 16 rounds for a two-layer network of 10 classes.

        Where the run proves what it computes, everything of the step is proved, its validation included, before
        anything of it is opened.
        """
        rt, job = self._rt, self._job
        rows = torch.from_numpy(batch_rows(job.seed, step, job.batch, self._tensors["train_x"].shape[0])).to(rt.device)
        self._optimizer.step = step
        loss = rt.run(self._step_protocol(rows, reveal=job.reveals_loss(step)))
        measured = rt.run(self._validation_protocol()) if job.validates(step) else []
        if loss is None and not measured:
            proved, owed = prove_silently(rt)
            return StepResult(None, proved, owed=owed)
        proved, rings = self._proved_and_opened([one.share for one in measured], loss)
        told = None
        if loss is not None:
            opened = rings[-1] if loss.opened is None else loss.opened
            told = float(opened.item()) / 2.0**loss.total.f / (len(rows) * self._model.positions)
        found = numbers(measured, rings[: len(measured)])
        return StepResult(told, proved, self._validated(step + 1, found) if measured else {})

    def _proved_and_opened(
        self, shares: list[Share], loss: SummedLoss | None = None
    ) -> tuple[ProvedStep | None, list[Tensor]]:
        """Open these, and a loss that is not opened yet after them, in one round; where the run proves what it
        computes, they are opened if all of it held."""
        rt = self._rt
        shares = shares if loss is None or loss.opened is not None else [*shares, loss.total]
        if rt.ledger is not None:
            return prove_and_open(rt, shares)
        return None, rt.run(par(*(open_ring_protocol(rt, one) for one in shares))) if shares else []

    def _validated(self, done: int, found: dict[str, float]) -> dict[str, float]:
        """Note by the numbers of validation after ``done`` steps which weights are the best."""
        if WATCHED in found and self.validations.add(done, found[WATCHED]) and self._job.keep_best:
            self._best[:] = self._copied()
        return found

    def _copied(self) -> list[Share]:
        """The weights in memory of their own: a checkpoint holds them beside those that go on."""
        return [weight.map(torch.clone) for weight in self.weights]

    def _validation_protocol(self) -> MpcProtocol[list[Measured]]:
        seen: list[Share] | None = [] if "val_overflow" in self._job.reveal else None
        outputs, targets = yield from self._answers_protocol("val", seen)
        counted = self._counted(seen)
        return (yield from validations_protocol(self._rt, self._job, self._model, outputs, targets, counted))

    def _counted(self, seen: list[Share] | None) -> list[Share | Bounded]:
        """What an overflow is looked for in, where it is."""
        return [] if seen is None else [*seen, *self._optimizer.bounded()]

    def _answers_protocol(self, part: str, seen: list[Share] | None = None) -> MpcProtocol[tuple[Share, Share]]:
        """Outputs for all rows of ``part`` and their targets, ``[rows * positions, classes]`` each.

        ``seen``: see ``forward_protocol``.
        """
        nn.set_training(self._layers, False)
        x = yield from self._rows_protocol(part)
        outputs = yield from nn.forward_protocol(self._rt, self._layers, x, seen)
        return outputs, self._tensors[f"{part}_y"].reshape(-1, self._model.classes)

    def _rows_protocol(self, part: str, rows: Tensor | None = None) -> MpcProtocol[Share]:
        """Features of these rows of ``part``, or of all, as the first layer takes them ``[rows, features]``."""
        x = self._tensors[f"{part}_x"]
        x = x if rows is None else x.index(rows)
        return x if self._standardiser is None else (yield from self._standardiser.apply_protocol(x))

    def _loss_protocol(self, total: MpcProtocol[Share]) -> MpcProtocol[SummedLoss]:
        """A loss summed over the rows; opened at once only where nothing waits for a proof."""
        found = yield from total
        if self._rt.ledger is not None:
            return SummedLoss(found, None)
        return SummedLoss(found, (yield from open_ring_protocol(self._rt, found)))

    def _step_protocol(self, rows: Tensor, *, reveal: bool) -> MpcProtocol[SummedLoss | None]:
        """A step on these rows of the training data; the summed loss, if it is to be revealed."""
        if self._standardiser is not None and self._optimizer.step == 0:
            yield from self._standardiser.fit_protocol(self._tensors["train_x"])
        x = yield from self._rows_protocol("train", rows)
        y = self._tensors["train_y"].index(rows).reshape(-1, self._model.classes)
        self._set_training(len(rows))
        if self._job.objective == "mse":
            outputs = yield from nn.forward_protocol(self._rt, self._layers, x)
            return (yield from self._squares_protocol(outputs, y, self._counts(rows), reveal=reveal))
        if self._job.objective in OF_ONE_OUTPUT:
            return (yield from self._fitted_protocol(x, y, self._counts(rows), reveal=reveal))
        powers = yield from nn.forward_powers_protocol(self._rt, self._layers, x, loss=reveal)
        total = losses.total_loss_protocol(self._rt, powers, y, weighted=self._job.weighted)
        return (yield from self._beside_protocol(self._learn_protocol(powers, y), total if reveal else None))

    def _beside_protocol(
        self, down: MpcProtocol[None], total: MpcProtocol[Share] | None
    ) -> MpcProtocol[SummedLoss | None]:
        """The way down, and beside it the summed loss, if wanted."""
        if total is None:
            yield from down
            return None
        both: MpcProtocol[list[Any]] = par(down, self._loss_protocol(total))
        _, loss = yield from both
        return cast(SummedLoss, loss)

    def _set_training(self, rows: int) -> None:
        """A step's whole batch goes through."""
        nn.set_training(self._layers, True, BatchPlace(self._job.seed, self._optimizer.step, 0, rows))

    def _counts(self, rows: Tensor) -> Share | None:
        """What each of these rows counts [rows, 1], where its target does not say so."""
        return self._tensors[TRAIN_WEIGHTS].index(rows) if carries_weights(self._job) else None

    def _squares_protocol(
        self, outputs: Share, y: Share, counts: Share | None, *, reveal: bool
    ) -> MpcProtocol[SummedLoss | None]:
        difference = sub(outputs, y)
        grad = difference if counts is None else (yield from mul_protocol(self._rt, difference, counts))
        total = losses.total_square_protocol(self._rt, difference, grad)
        return (yield from self._beside_protocol(self._backward_protocol(grad), total if reveal else None))

    def _fitted_protocol(
        self, x: Share, y: Share, counts: Share | None, *, reveal: bool
    ) -> MpcProtocol[SummedLoss | None]:
        outputs = yield from nn.forward_protocol(self._rt, self._layers, x)
        objective = OF_ONE_OUTPUT[self._job.objective]
        grad, total = yield from objective(self._rt, outputs, y, counts, loss=reveal)
        there = None if total is None else there_protocol(total)
        return (yield from self._beside_protocol(self._backward_protocol(grad), there))

    def _learn_protocol(self, powers: losses.Powers, targets: Share) -> MpcProtocol[None]:
        grad = yield from losses.gradient_protocol(self._rt, powers, targets, weighted=self._job.weighted)
        yield from self._backward_protocol(grad)

    def _backward_protocol(self, grad: Share) -> MpcProtocol[None]:
        yield from nn.backward_protocol(
            self._rt, self._layers, grad, lambda layer, g: self._optimizer.update_protocol(self._rt, layer, g)
        )

    def evaluate(self) -> dict[str, float]:
        """Open the metrics that the job lists, over all test rows; nothing else about them is revealed.

        The weights are those of the least validation loss from now on, where the job keeps them.
        """
        if self._job.keep_best:
            self._set_weights(self._best)
        if STANDARD_ERRORS in self._job.reveal:
            self._information = self._rt.run(self._information_protocol())
        measured = self._rt.run(self._measure_protocol()) if set(METRICS) & set(self._job.reveal) else []
        proved, rings = self._proved_and_opened([one.share for one in measured])
        self.proved_metrics = self.proved_metrics if proved is None else proved
        return numbers(measured, rings)

    def _information_protocol(self) -> MpcProtocol[list[Share]]:
        x = yield from self._rows_protocol("train")
        y = self._tensors["train_y"].reshape(-1, 1)
        return (yield from information_protocol(self._rt, self._job, self.weights[0], x, y))

    def _measure_protocol(self) -> MpcProtocol[list[Measured]]:
        seen: list[Share] | None = [] if "overflow" in self._job.reveal else None
        outputs, targets = yield from self._answers_protocol("test", seen)
        counted = self._counted(seen)
        return (yield from measure_protocol(self._rt, self._job, self._model, outputs, targets, seen=counted))

    def count_correct(self) -> int:
        """Open how many test rows are classified correctly; nothing else about them is revealed."""
        return self._rt.run(self._count_protocol())

    def _count_protocol(self) -> MpcProtocol[int]:
        logits, targets = yield from self._answers_protocol("test")
        return (yield from losses.correct_protocol(self._rt, logits, targets))

    @property
    def test_rows(self) -> int:
        """Labels that are counted: one per test row, or per position of every test row."""
        return int(self._tensors["test_x"].shape[0]) * self._model.positions

    # -- state -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Everything a checkpoint holds of this party: both components of weights and momentum, by name.

        Each component is int64 in the shape of its weight.
        """
        found: dict[str, Tensor] = {}
        for kind, shares in self._kept():
            for i, share in enumerate(shares):
                found |= stored(f"{kind}.{i}", share)
        return found

    def weight_halves(self) -> tuple[dict[str, Ring], dict[str, Ring]]:
        """Both components of the weights by name, as the owner's box holds them, and of the statistics and a
        regression's information if listed."""
        more = list(named(self._standardiser)) if "statistics" in self._job.reveal else []
        more += zip(INFORMATION_TENSORS, self._information, strict=False)
        return rings([*((f"weight.{i}", w) for i, w in enumerate(self.weights)), *more])

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what :meth:`state` gave. Raises ConfigError if a name or shape does not fit the model."""
        wanted = {name: t.shape for name, t in self.state().items()}
        if {name: t.shape for name, t in state.items()} != wanted or any(
            t.dtype != torch.int64 for t in state.values()
        ):
            raise ConfigError("the checkpoint does not fit the model", "resume with the job that wrote it")
        for kind, shares in self._kept():
            for i, old in enumerate(shares):
                shares[i] = loaded(state, f"{kind}.{i}", old.f).to(self._rt.device)
            if kind == "weight":
                self._set_weights(shares)

    def _set_weights(self, weights: list[Share]) -> None:
        for layer, weight in zip(nn.weighted(self._layers), weights, strict=True):
            layer.weight = weight

    def component_digest(self, half: Half, blind: bytes) -> str:
        """Blinded SHA-256 (hex) of one component of the whole state; equal at both of its holders."""
        named = [
            (f"{kind}.{i}", component(share, half)) for kind, shares in self._kept() for i, share in enumerate(shares)
        ]
        return component_digest(named, blind)


def there_protocol(found: Share) -> MpcProtocol[Share]:
    """What is there already, of any shape, as a protocol."""
    return found
    yield  # a generator like its siblings


def _optimizer(rt: Runtime, job: PrivateJob, layers: list[nn.Layer], model: ModelSpec) -> Optimizer:
    decays = [spec.decays for spec in model.weights]
    if job.optimizer == "adam":
        return Adam(rt, job, layers, model.positions, decays)
    weights = [layer.weight for layer in nn.weighted(layers) if layer.weight is not None]
    return Sgd(
        job, layers, [public(rt, torch.zeros(w.shape), f=job.frac_bits) for w in weights], model.positions, decays
    )
