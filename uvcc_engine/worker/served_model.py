"""A model whose weights are secret answers batches of secret queries; what comes out goes to whoever asked.

A row's answer does not depend on the other rows of its batch: products, comparisons and truncations are of each row
alone, and normalisations take what they learned. So a client that sends nonsense spoils its own answers only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.model import layers as nn
from uvcc_engine.model.definition.specs import ModelSpec
from uvcc_engine.model.learning.state_digests import Half, component, component_digest, loaded, rings, stored
from uvcc_engine.model.learning.training import StepResult
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.foundation.share import Share, cat
from uvcc_engine.mpc.products.arithmetic import add_public, public
from uvcc_engine.proofs.instalments import proves
from uvcc_engine.proofs.step_proof import NOTHING_PROVED, prove_silently
from uvcc_engine.sealing.components import Ring
from uvcc_engine.sealing.inputs import PartyInputs
from uvcc_engine.sealing.queries import OpenedQuery
from uvcc_engine.worker.inference import answers_protocol

COUNT: Final = "rows_answered"


class ServedModel:
    """One party's part of a served model; drives like a trainer. Its state is how many rows it has answered."""

    def __init__(self, rt: Runtime, job: PrivateJob, model: ModelSpec, inputs: PartyInputs) -> None:
        """Raises ConfigError if the weights among the inputs do not fit the model."""
        self._rt, self._job, self._model = rt, job, model
        if job.proves:
            proves(rt, job.proving, committed=False)
        self.proved_metrics = NOTHING_PROVED
        weights = [
            Share(torch.from_numpy(first), torch.from_numpy(second), inputs.frac_bits).to(rt.device)
            for first, second in (inputs.tensors[f"weight.{i}"] for i in range(len(model.weights)))
        ]
        self._layers = nn.build(model, weights)
        nn.set_training(self._layers, False)
        self._count = public(rt, torch.zeros(1), f=0)
        self.batch: Sequence[OpenedQuery] = ()
        self.answers: list[tuple[OpenedQuery, Ring, Ring]] = []
        """Of the last step: both components of each query's answer, (rows, outputs)."""

    def step(self, step: int) -> StepResult:
        """Answer ``batch``, of any number of queries; of none, a row of zeros, which nobody is told the answer of.

        Where the job says so it is proved before there are answers. Opens nothing. 2 rounds a product, 5 with its ReLU,
        6 the maximum of 10.
        """
        f = self._job.frac_bits
        parts = [Share(torch.from_numpy(q.first), torch.from_numpy(q.second), f) for q in self.batch]
        x = cat(parts) if parts else public(self._rt, torch.zeros(1, self._model.features), f=f)
        answering = answers_protocol(self._rt, self._job, self._model, self._layers, x.to(self._rt.device))
        found = self._rt.run(answering)
        proved, owed = prove_silently(self._rt)
        whole = found.reshape(x.shape[0], -1)
        first, second = whole.first.cpu().numpy(), whole.second.cpu().numpy()
        self.answers, at = [], 0
        for query in self.batch:
            self.answers.append((query, first[at : at + query.rows], second[at : at + query.rows]))
            at += query.rows
        self._count = add_public(self._rt, self._count, float(at))
        return StepResult(None, proved, owed=owed)

    def evaluate(self) -> dict[str, float]:
        """No metric, since queries have no labels."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """The count, in components of one element each."""
        return {name: part.clone() for name, part in stored(COUNT, self._count).items()}  # both may be one zero

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what :meth:`state` gave. Raises ConfigError for anything else."""
        if {n: t.shape for n, t in state.items()} != {n: t.shape for n, t in self.state().items()}:
            raise ConfigError("the checkpoint is not of a served model", "resume with the job that wrote it")
        self._count = loaded(state, COUNT, 0).to(self._rt.device)

    def weight_halves(self) -> tuple[dict[str, Ring], dict[str, Ring]]:
        """Both components of the count: answers were handed out as they were made."""
        return rings([(COUNT, self._count)])

    def component_digest(self, half: Half, blind: bytes) -> str:
        """Blinded digest of one component of the count."""
        return component_digest([(COUNT, component(self._count, half))], blind)
