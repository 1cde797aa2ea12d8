"""Optimisers, losses and the functions below them, on shares against the same in floats."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from private_kit import opened_digits

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.sets import load_digits
from uvcc_engine.model.definition.specs import find_model
from uvcc_engine.model.functions import rsqrt_protocol
from uvcc_engine.model.learning.clipping import clipped, clipped_protocol, raised_bits
from uvcc_engine.model.learning.plaintext import train_plaintext
from uvcc_engine.model.learning.training import PrivateTrainer
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.foundation.share import Share, reconstruct
from uvcc_engine.mpc.products.arithmetic import public

torch.set_num_threads(1)


@pytest.mark.parametrize("f", [16, 24])
def test_inverse_square_root_over_thirty_bits(f: int) -> None:
    x = torch.logspace(-5.9, 3.5, 400, dtype=torch.float64)
    x = torch.round(x * 2**24) / 2**24
    got = LocalPlanes(1).run_three(lambda rt: rt.run(rsqrt_protocol(rt, public(rt, x, f=24), -10, 5, f)))
    relative = (reconstruct(got) * x.sqrt() - 1.0).abs()
    assert relative.max() < 2e-4 + 8 * 2.0**-f * x.max().sqrt()


MLP = PrivateJob(model="mlp-digits", steps=5, batch=32, test_rows=100)


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(
            PrivateJob(model="logistic-digits", steps=12, batch=64, lr=0.02, optimizer="adam", test_rows=100),
            marks=pytest.mark.ci(__file__),
        ),
        pytest.param(
            PrivateJob(
                model="mlp-digits", steps=6, batch=32, lr=0.02, optimizer="adam", objective="mse", test_rows=100
            ),
            marks=pytest.mark.ci(__file__),
        ),
        PrivateJob(model="mlp-digits", steps=6, batch=32, lr=0.1, objective="mse", test_rows=100),
        PrivateJob(model="mlp-digits", steps=6, batch=32, lr=0.2, frac_bits=22, test_rows=100),
        replace(MLP, lr=0.2, schedule="cosine", warmup=2, weight_decay=0.1, clip_norm=0.5),
        replace(MLP, model="logistic-digits", lr=0.02, optimizer="adam", weight_decay=0.5, clip_norm=0.25),
    ],
    ids=["adam", "adam-mse", "mse", "f22", "sgd-all", "adamw"],
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


@settings(deadline=None, max_examples=6)
@given(seed=st.integers(0, 2**31), size=st.floats(-8, 14), limit=st.floats(-4, 3))
def test_a_norm_is_cut_at_its_limit_and_no_other(seed: int, size: float, limit: float) -> None:
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = torch.round(x / x.norm() * 2.0**size * 2**16) / 2**16
    got = LocalPlanes(1).run_three(lambda rt: rt.run(clipped_protocol(rt, public(rt, x, f=16), 2.0**limit)))
    off = (reconstruct(got) - clipped(x, 2.0**limit)).norm()
    units = 3 * 2.0 ** (size - 16) * 2.0 ** max(0.0, limit)  # of the norm's inverse, and of the factor
    assert off < 2e-3 * min(2.0**size, 2.0**limit) + 6 * 8 * 2.0**-16 + units


@pytest.mark.parametrize("size", [9.3, 9.9, 10.5, 12.0, 14.0])
def test_the_longest_gradients_are_cut_and_keep_their_direction(size: float) -> None:
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x = torch.round(x / x.norm() * 2.0**size * 2**16) / 2**16
    found = reconstruct(LocalPlanes(1).run_three(lambda rt: rt.run(clipped_protocol(rt, public(rt, x, f=16), 1.0))))
    assert found.norm().item() == pytest.approx(1.0, rel=2.0 ** (size - 15))
    assert torch.cosine_similarity(found.flatten(), x.flatten(), 0) > 0.999


@pytest.mark.parametrize("limit", [1e-2, 3e-4, 1e-5])
@pytest.mark.parametrize("size", [0.1, 0.9, 5.0])
def test_what_is_shorter_than_a_small_limit_is_not_cut(size: float, limit: float) -> None:
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x = x / x.norm() * size * limit
    raised = raised_bits(limit)

    def body(rt: Runtime) -> Share:
        large = public(rt, x * 2.0**raised, f=20)
        return rt.run(clipped_protocol(rt, large, limit * 2.0**raised, raised))

    found = reconstruct(LocalPlanes(1).run_three(body))
    assert (found - clipped(x, limit)).norm() < 0.02 * limit + 6 * 2.0**-20


@pytest.mark.parametrize("more", [{}, {"weight_decay": 0.1, "clip_norm": 0.5}, {"verify": "proofs"}], ids=str)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_last_step_of_a_long_training_is_made(optimizer: Any, more: dict[str, Any]) -> None:
    """Where a cosine ends the rate is less than a millionth of what it was, and moves no weight any more."""
    job = PrivateJob(model="logistic-digits", steps=100_000, batch=16, lr=0.1, schedule="cosine", optimizer=optimizer)
    job = replace(job, momentum=0.0, **more)
    inputs = opened_digits(job)

    def body(rt: Runtime) -> tuple[Share, Share]:
        trainer = PrivateTrainer(rt, job, find_model(job.model), inputs[rt.party])
        after = []
        for step in (job.steps // 2, job.steps - 1):
            rt.begin_epoch(step)
            trainer.step(step)
            after.append(trainer.weights[0].map(torch.clone))
        return after[0], after[1]

    ended = LocalPlanes(1).run_three(body)
    middle, last = (reconstruct([one[at] for one in ended]) for at in range(2))
    assert middle.abs().max() > 0.01
    assert (last - middle).abs().max() < 8 * 2.0**-16


def test_the_learning_rate_rises_and_falls_as_the_schedule_says() -> None:
    job = PrivateJob(steps=12, lr=1.0, schedule="cosine", warmup=3)
    rates = [job.lr_at(step) for step in range(12)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[3:] == [pytest.approx((1 + math.cos(math.pi * k / 9)) / 2) for k in range(9)]
    assert PrivateJob(steps=4, lr=1.0).lr_at(1) == 0.75
    short = PrivateJob(steps=2, lr=1.0, warmup=5)  # a smoke of the same job
    assert [short.lr_at(0), short.lr_at(1)] == [1 / 6, 2 / 6]


@pytest.mark.parametrize(
    ("found", "words"),
    [({"weight_decay": 2.0}, "like 0.01"), ({"clip_norm": 0.001}, "0.01 to 64"), ({"warmup": -1}, "warmup")],
)
def test_rules_out_of_range_are_refused(found: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PrivateJob.from_json(found)


@pytest.mark.parametrize(
    ("found", "words"),
    [({"optimizer": "adamw"}, "sgd, adam"), ({"objective": "l1"}, "mse"), ({"beta2": 1.0}, "decay rate")],
)
def test_an_unknown_rule_is_refused(found: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PrivateJob.from_json(found)
