"""Objectives of numbers, counts and two classes, and what is revealed of the answers: against torch, scikit-learn."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from uvcc_engine import simulate
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.model.learning.answer_metrics import evaluate_protocol, perplexity, plaintext_metrics
from uvcc_engine.model.learning.objectives import OF_ONE_OUTPUT, plaintext_loss
from uvcc_engine.model.model_spec import ModelSpec
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.foundation.share import Share, reconstruct
from uvcc_engine.mpc.products.arithmetic import public

torch.set_num_threads(1)
RNG = np.random.default_rng(6)
ROWS = RNG.normal(size=(150, 5))
TRUTH = ROWS @ [1.0, -0.5, 0.0, 0.25, 0.7]


@pytest.mark.parametrize("f", [16, 20])
@pytest.mark.parametrize("name", sorted(OF_ONE_OUTPUT))
@settings(deadline=None, max_examples=3)
@given(seed=st.integers(0, 2**31))
def test_gradient_and_loss_are_torchs(name: str, f: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    z = torch.from_numpy(rng.uniform(-6, 3.9, (9, 1)))
    y = torch.from_numpy(rng.integers(0, 2, (9, 1)) * 1.0 if name == "binary" else rng.integers(0, 5, (9, 1)) * 1.0)
    wanted = z.clone().requires_grad_()
    loss = plaintext_loss(name, wanted, y)
    (exact,) = torch.autograd.grad(loss, wanted)

    def body(rt: Runtime) -> tuple[Share, Share, Share]:
        arguments = rt, public(rt, z, f=f), public(rt, y, f=f)
        grad, total = rt.run(OF_ONE_OUTPUT[name](*arguments, loss=True))
        bare, nothing = rt.run(OF_ONE_OUTPUT[name](*arguments, loss=False))
        assert nothing is None
        assert total is not None
        return grad, total, bare

    found = LocalPlanes(seed).run_three(body)
    grad, total, bare = (reconstruct([one[k] for one in found]) for k in range(3))
    assert (grad / 9 - exact).abs().max() < 1e-3
    assert (grad - bare).abs().max() < 2e-3
    assert abs(total.item() / 9 - loss.item()) < 4e-3


@settings(deadline=None, max_examples=3)
@given(seed=st.integers(0, 2**31), rows=st.integers(2, 24))
def test_two_class_metrics_are_those_in_clear(seed: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    grid = rng.integers(-30, 30, (rows, 1)) * 0.25 + 0.125  # between the edges, so that buckets lose no order
    z = torch.from_numpy(grid)
    y = torch.from_numpy(rng.integers(0, 2, (rows, 1)) * 1.0)
    told: Any = ("accuracy", "confusion", "auc", "precision", "recall")
    job = PrivateJob(model="mlp-digits", objective="binary", reveal=told, threshold=0.7)
    single = revealed(job, 1, z, y)
    check(single, plaintext_metrics(job, z, y))
    both = PrivateJob(model="mlp-digits", reveal=(*told, "perplexity"), threshold=0.7)
    wide, hot = torch.cat([0 * z, z], 1), torch.cat([1 - y, y], 1)
    found = revealed(both, 2, wide, hot)
    check(found, plaintext_metrics(both, wide, y), 0.05)
    assert all(found[name] == single[name] for name in single)
    counts = [[found[f"confusion.{i}.{j}"] for j in range(2)] for i in range(2)]
    assert np.sum(counts) == rows
    metrics = pytest.importorskip("sklearn.metrics")
    assert counts == metrics.confusion_matrix(y.reshape(-1), z.reshape(-1) >= 0, labels=[0, 1]).tolist()
    right, taken = y.reshape(-1), 1.0 / (1.0 + torch.exp(-z.reshape(-1))) >= 0.7
    assert ("precision" in found, "recall" in found) == (bool(taken.any()), bool(y.any()))
    if taken.any() and y.any():
        assert found["precision"] == pytest.approx(metrics.precision_score(right, taken))
        assert found["recall"] == pytest.approx(metrics.recall_score(right, taken))
    assert ("auc" in found) == bool(0 < y.sum() < rows)
    if "auc" in found:
        assert found["auc"] == pytest.approx(metrics.roc_auc_score(y.reshape(-1), z.reshape(-1)))


@pytest.mark.parametrize("f", [12, 14, 16, 18])
@pytest.mark.parametrize("objective", ["mse", "poisson"])
def test_errors_of_numbers_are_those_in_clear(objective: str, f: int) -> None:
    z, y = torch.from_numpy(RNG.uniform(-2, 2, (60, 1))), torch.from_numpy(RNG.uniform(0, 3, (60, 1)))
    job = PrivateJob(model="mlp-digits", objective=objective, reveal=("rmse", "r2"), frac_bits=f)
    check(revealed(job, 1, z, y), plaintext_metrics(job, z, y), 2e-3 if f > 12 else 2e-2)


def test_a_metric_that_is_no_number_is_left_out_and_a_large_loss_has_no_perplexity() -> None:
    z, y = torch.tensor([[-2.0], [-1.0]]).double(), torch.zeros(2, 1).double()
    told: Any = ("accuracy", "auc", "precision", "recall")
    job = PrivateJob(model="mlp-digits", objective="binary", reveal=told)
    assert revealed(job, 1, z, y) == plaintext_metrics(job, z, y) == {"accuracy": 1.0}
    assert revealed(replace(job, objective="mse", reveal=("r2", "rmse")), 1, z, y).keys() == {"rmse"}
    assert perplexity(math.log(9.0)) == pytest.approx(9.0)
    assert math.isnan(perplexity(301.0))


def revealed(job: PrivateJob, classes: int, z: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
    model = ModelSpec("any", (), 1, classes)

    def body(rt: Runtime) -> dict[str, float]:
        f = job.frac_bits
        return rt.run(evaluate_protocol(rt, job, model, public(rt, z, f=f), public(rt, y, f=f)))

    found = LocalPlanes(3).run_three(body)
    assert str(found[0]) == str(found[1]) == str(found[2])
    return found[0]


def check(found: Any, wanted: Any, off: float = 1e-9) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, abs=off, nan_ok=True), name


@pytest.mark.parametrize(
    ("objective", "y", "reveal"),
    [
        ("mse", TRUTH, ["loss", "rmse", "r2"]),
        ("huber", TRUTH + 8.0 * (np.arange(150) % 30 == 0), ["loss", "rmse"]),
        ("poisson", RNG.poisson(np.exp(0.4 * TRUTH)).astype(float), ["loss", "rmse"]),
        pytest.param(
            "binary",
            np.where(TRUTH > 0, "yes", "no"),
            ["loss", "accuracy", "auc", "confusion"],
            marks=pytest.mark.ci(__file__),
        ),
    ],
)
def test_training_on_shares_is_that_in_clear(objective: str, y: Any, reveal: list[str]) -> None:
    made = simulate.fit(["linear"], ROWS, y, epochs=8, batch=30, lr=0.1, objective=objective, reveal=reveal)
    clear = made.twin()
    assert np.allclose(made.losses, clear.losses, atol=5e-3)
    assert made.losses[-1] < made.losses[0]
    assert made.metrics.keys() == clear.metrics.keys()
    for name, value in clear.metrics.items():
        assert made.metrics[name] == pytest.approx(value, abs=1.0 if name.startswith("confusion") else 1e-2)
    assert made.predict(ROWS).shape == (150,)
    if objective == "binary":
        assert made.metrics["auc"] > 0.97
        assert set(made.predict(ROWS)) == {"yes", "no"}
    if objective == "mse":
        assert made.metrics["r2"] > 0.95


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"objective": "binary"}, "3 classes"),
        ({"reveal": ["rmse"]}, "'rmse' for objective 'cross-entropy' and 3 outputs"),
        ({"reveal": ["auc"]}, "'auc' for objective"),
        ({"reveal": ["precision"]}, "'precision' for objective 'cross-entropy' and 3 outputs"),
        ({"objective": "mse", "reveal": ["perplexity"]}, "'perplexity' for objective 'mse'"),
        ({"threshold": 1.0}, "job.threshold is 1"),
        ({"objective": "huber", "reveal": ["accuracy"]}, "'accuracy' for objective 'huber'"),
        ({"min_rows": 20, "test": 0.1}, "a number of 3 rows would be revealed, job.min_rows is 20"),
        ({"min_rows": 5, "batch": 4}, "a number of 4 rows"),
    ],
)
def test_what_does_not_fit_the_targets_is_refused(change: dict[str, Any], what: str) -> None:
    arguments = {"epochs": 1, "batch": 20} | change
    with pytest.raises(ConfigError, match=what):
        simulate.fit(["linear"], ROWS[:30], np.arange(30) % 3, **arguments)


def test_a_policy_without_the_new_keys_is_what_it_was() -> None:
    assert "min_rows" not in PrivateJob().to_json()
    assert PrivateJob.from_json(PrivateJob(min_rows=5).to_json()).min_rows == 5


def test_the_regressor_brings_targets_to_scale_and_back() -> None:
    made = simulate.PrivateRegressor(["linear"], epochs=20, batch=50, lr=0.1).fit(ROWS, 400.0 + 70.0 * TRUTH)
    assert made.score(ROWS, 400.0 + 70.0 * TRUTH) > 0.98
    assert math.isclose(float(made.predict(ROWS).mean()), 400.0 + 70.0 * float(TRUTH.mean()), rel_tol=0.01)
    selection = pytest.importorskip("sklearn.model_selection")
    assert selection.cross_val_score(made, ROWS, 70.0 * TRUTH, cv=2).min() > 0.9
    with pytest.raises(ConfigError, match="one of mse, huber, poisson"):
        made.set_params(objective="binary").fit(ROWS, TRUTH)
