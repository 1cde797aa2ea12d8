"""Optimisers, losses and the functions below them, on shares against the same in floats."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from private_kit import opened_digits

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.private_job import PrivateJob
from uvcc_engine.data.sets import load_digits
from uvcc_engine.model.functions import rsqrt_protocol
from uvcc_engine.model.plaintext import train_plaintext
from uvcc_engine.model.specs import find_model
from uvcc_engine.model.training import PrivateTrainer
from uvcc_engine.mpc.arithmetic import public
from uvcc_engine.mpc.local import LocalPlanes
from uvcc_engine.mpc.runtime import Runtime
from uvcc_engine.mpc.share import reconstruct

torch.set_num_threads(1)


@pytest.mark.parametrize("f", [16, 24])
def test_inverse_square_root_over_thirty_bits(f: int) -> None:
    x = torch.logspace(-5.9, 3.5, 400, dtype=torch.float64)
    x = torch.round(x * 2**24) / 2**24
    got = LocalPlanes(1).run_three(lambda rt: rt.run(rsqrt_protocol(rt, public(rt, x, f=24), -10, 5, f)))
    relative = (reconstruct(got) * x.sqrt() - 1.0).abs()
    assert relative.max() < 2e-4 + 8 * 2.0**-f * x.max().sqrt()


@pytest.mark.parametrize(
    "job",
    [
        PrivateJob(model="logistic-digits", steps=12, batch=64, lr=0.02, optimizer="adam", test_rows=100),
        PrivateJob(model="mlp-digits", steps=6, batch=32, lr=0.02, optimizer="adam", objective="mse", test_rows=100),
        PrivateJob(model="mlp-digits", steps=6, batch=32, lr=0.1, objective="mse", test_rows=100),
        PrivateJob(model="mlp-digits", steps=6, batch=32, lr=0.2, frac_bits=22, test_rows=100),
    ],
    ids=["adam", "adam-mse", "mse", "f22"],
)
def test_training_follows_the_float_reference(job: PrivateJob) -> None:
    inputs = opened_digits(job)

    def body(rt: Runtime) -> tuple[list[float | None], PrivateTrainer]:
        trainer = PrivateTrainer(rt, job, find_model(job.model), inputs[rt.party])
        found = []
        for step in range(job.steps):
            rt.begin_epoch(step)
            found.append(trainer.step(step).loss)
        return found, trainer

    results = LocalPlanes(2).run_three(body)
    clear = train_plaintext(job, load_digits(job.seed, job.test_rows))
    losses = [loss for loss in results[0][0] if loss is not None]
    assert np.allclose(losses, clear.losses, atol=1e-2)
    assert losses[-1] < 0.9 * losses[0]
    for i, exact in enumerate(clear.weights):
        got = reconstruct([trainer.weights[i] for _, trainer in results]).numpy()
        assert np.sqrt(np.mean((got - exact) ** 2)) < 0.02 * job.lr * math.sqrt(job.steps) + 1e-3
    state = results[0][1].state()
    assert ("second.0.lo" in state) == (job.optimizer == "adam")
    results[0][1].load_state(state)
    assert all(torch.equal(state[k], v) for k, v in results[0][1].state().items())


@pytest.mark.parametrize(
    ("found", "words"),
    [({"optimizer": "adamw"}, "sgd, adam"), ({"objective": "l1"}, "mse"), ({"beta2": 1.0}, "decay rate")],
)
def test_an_unknown_rule_is_refused(found: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PrivateJob.from_json(found)
