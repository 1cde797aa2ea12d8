"""Private inference: secret queries through a model whose weights are secret, too.

A step answers one batch of queries. Nothing is opened: what comes out (:func:`answers_protocol`) goes in shares to the
owner of the queries, who alone can put them together. Logits stay secret, since they say more about the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.model import layers as nn
from uvcc_engine.model.definition.specs import ModelSpec
from uvcc_engine.model.learning.state_digests import Half, component, component_digest, loaded, rings, stored
from uvcc_engine.model.learning.training import StepResult
from uvcc_engine.model.secret_layer import Layer
from uvcc_engine.mpc.comparisons.maximum import argmax_one_hot_protocol
from uvcc_engine.mpc.comparisons.selection import drelu_arithmetic_protocol
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.products.arithmetic import public, scale_int
from uvcc_engine.proofs.instalments import proves
from uvcc_engine.proofs.step_proof import NOTHING_PROVED, prove_silently
from uvcc_engine.sealing.components import Ring
from uvcc_engine.sealing.inputs import PartyInputs
from uvcc_engine.sharding.validation import PREDICTION, QUERY


def answers_protocol(
    rt: Runtime, job: PrivateJob, model: ModelSpec, layers: Sequence[Layer], x: Share
) -> MpcProtocol[Share]:
    """What queries ``[rows, features]`` are answered, ``[rows * positions, classes]``: the one-hot of the largest
    logit; of one output 1 or 0 by its sign where two classes are learnt, else the number."""
    outputs = yield from nn.forward_protocol(rt, layers, x)
    if model.classes > 1:
        bits = yield from argmax_one_hot_protocol(rt, outputs)
    elif job.objective == "binary":
        bits = yield from drelu_arithmetic_protocol(rt, outputs)
    else:
        return outputs
    return scale_int(bits, 1 << job.frac_bits).with_f(job.frac_bits)


class Predictor:
    """One party's part of answering queries; drives like a trainer, and its state are the answers so far."""

    def __init__(self, rt: Runtime, job: PrivateJob, model: ModelSpec, inputs: PartyInputs) -> None:
        """Raises ConfigError if the weights among the inputs do not fit the model."""
        self._rt, self._job, self._model = rt, job, model
        if job.proves:
            proves(rt, job.proving)
        self.proved_metrics = NOTHING_PROVED
        tensors = {
            name: Share(torch.from_numpy(first), torch.from_numpy(second), inputs.frac_bits).to(rt.device)
            for name, (first, second) in inputs.tensors.items()
        }
        self._queries = tensors[QUERY]
        self._layers = nn.build(model, [tensors[f"weight.{i}"] for i in range(len(model.weights))])
        rows = self._queries.shape[0] * model.positions
        self._answers = public(rt, torch.zeros(rows, model.classes), f=job.frac_bits)

    def step(self, step: int) -> StepResult:
        """Answer batch ``step`` (from 0), and prove it where the job says so; only then is it among the answers, which
        leave after all verdicts.

        Opens nothing. 2 rounds a product, 5 with its ReLU, 6 the maximum of 10.
        """
        size = self._job.batch
        rows = slice(step * size, (step + 1) * size)
        batch = self._queries.index(rows)
        found = self._rt.run(answers_protocol(self._rt, self._job, self._model, self._layers, batch))
        proved, owed = prove_silently(self._rt)
        place = slice(rows.start * self._model.positions, rows.start * self._model.positions + found.shape[0])
        self._answers = self._with(place, found)
        return StepResult(None, proved, owed=owed)

    def _with(self, place: slice, found: Share) -> Share:
        first, second = self._answers.first.clone(), self._answers.second.clone()
        first[place], second[place] = found.first, found.second
        return Share(first, second, self._answers.f)

    def evaluate(self) -> dict[str, float]:
        """No metric, since queries have no labels."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """Both components of the answers so far."""
        return stored(PREDICTION, self._answers)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what :meth:`state` gave. Raises ConfigError if it does not fit the queries."""
        if {n: t.shape for n, t in state.items()} != {n: t.shape for n, t in self.state().items()}:
            raise ConfigError("the checkpoint does not fit the queries", "resume with the job that wrote it")
        self._answers = loaded(state, PREDICTION, self._answers.f).to(self._rt.device)

    def weight_halves(self) -> tuple[dict[str, Ring], dict[str, Ring]]:
        """Both components of what goes to the owner of the queries: the answers, (queries, classes)."""
        return rings([(PREDICTION, self._answers)])

    def component_digest(self, half: Half, blind: bytes) -> str:
        """Blinded digest of one component of the answers."""
        return component_digest([(PREDICTION, component(self._answers, half))], blind)
