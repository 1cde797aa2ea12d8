"""The training step of a private GPT, on made-up letters that are shared alike by all three parties."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.sets import one_hot
from uvcc_engine.model.definition.layer_list import model_to_json
from uvcc_engine.model.definition.specs import gpt
from uvcc_engine.model.learning.training import PrivateTrainer, StepResult
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.foundation.share import share_of, split
from uvcc_engine.sealing.inputs import PartyInputs
from uvcc_engine.simulate.gpt_forecast import GptSize

TINY: Final = GptSize(vocabulary=27, positions=8, width=16, heads=2, blocks=1, batch=8)
"""``gpt-tiny``, as ``profiles/local-gpt-r2s2t2.yaml`` trains it."""
SMALL: Final = GptSize(vocabulary=27, positions=128, width=128, heads=4, blocks=4, batch=4)
"""``uvcc-engine gpt`` without options, among the letters of ``gpt-tiny``."""


def stepping(party: int, size: GptSize) -> Callable[[Runtime], StepResult]:
    """What makes the next step of one and the same training each time; its loss is opened."""
    spec = gpt("step", size.vocabulary, size.positions, size.width, size.heads, size.blocks)
    values = {"model": model_to_json(spec), "steps": 1, "batch": size.batch, "test_rows": 1, "reveal": ["loss"]}
    job = PrivateJob.from_json(json.loads(json.dumps(values)))
    inputs = _inputs(party, size, job.frac_bits)
    trainers: dict[Runtime, PrivateTrainer] = {}

    def step(rt: Runtime) -> StepResult:
        if rt not in trainers:
            trainers[rt] = PrivateTrainer(rt, job, spec, inputs)
        return trainers[rt].step(0)

    return step


def _inputs(party: int, size: GptSize, frac_bits: int) -> PartyInputs:
    """A batch of windows and what follows each of their letters; all parties draw the same components, as benchmarks
    may."""
    letters = np.random.default_rng(3).integers(0, size.vocabulary, (size.batch, size.positions + 1))
    generator = torch.Generator().manual_seed(4)

    def source(count: int) -> bytes:
        words = torch.randint(-(2**63), 2**63 - 1, (-(-count // 8),), generator=generator)
        return words.numpy().tobytes()[:count]

    made = {}
    for name, of in (("train_x", letters[:, :-1]), ("train_y", letters[:, 1:])):
        whole = torch.from_numpy(one_hot(of, size.vocabulary)).reshape(size.batch, -1)
        mine = share_of(split(whole, frac_bits, source), party)
        made[name] = mine.first.numpy(), mine.second.numpy()
    return PartyInputs(party, frac_bits, made)
