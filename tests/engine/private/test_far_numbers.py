"""Numbers far from one, as tables and images have them before anybody scales them: trained on as in clear."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from uvcc_engine import simulate
from uvcc_engine.model.learning.plaintext import train_plaintext

torch.set_num_threads(1)
ROWS = 60


def _as_in_clear(model: list[Any], x: np.ndarray[Any, Any], **job: Any) -> None:
    """Trained between three parties and in clear, on whether each row's first features add up to more than nothing."""
    y = (x[:, : min(4, x.shape[1])].sum(1) > 0).astype(int)
    settings = {"steps": 3, "batch": ROWS - 10, "lr": 0.1, "schedule": "constant", "reveal": ["loss"]}
    fit = simulate.fit(model, x, y, test=(x[:10], y[:10]), watch_range=True, **settings | job)
    clear = train_plaintext(fit.job, fit.data, model=fit.model)
    assert np.abs(np.array(fit.losses) - clear.losses).max() < 0.02
    moved = max(float(np.abs(a - b).max()) for a, b in zip(fit.weights, clear.weights, strict=True))
    assert moved < 0.02 * max(1.0, *(float(np.abs(w).max()) for w in clear.weights))


@pytest.mark.parametrize("scale", [0.01, 90.0, 250.0])
@pytest.mark.parametrize("norm", ["batch-norm", "layer-norm", "rms-norm"])
def test_features_of_any_size_that_is_taken_are_normalised(norm: str, scale: float) -> None:
    x = np.random.default_rng(3).normal(size=(ROWS, 7)).clip(-4, 4) * scale
    _as_in_clear([norm, {"linear": 3}, "relu", "linear"], x)


def test_a_channel_of_many_pixels_is_normalised() -> None:
    x = np.random.default_rng(4).normal(size=(ROWS, 28 * 28)) * 6
    _as_in_clear([{"image": [1, 28, 28]}, "batch-norm", {"avg-pool": 14}, "flatten", "linear"], x, steps=2)


@pytest.mark.parametrize("verify", ["off", "proofs"])
def test_the_largest_of_one_pixel_is_itself(verify: str) -> None:
    x = np.random.default_rng(5).normal(size=(ROWS, 9))
    image: list[Any] = [{"image": [1, 3, 3]}, {"max-pool": 1}, "flatten"]
    _as_in_clear([*image, "linear"], x, verify=verify)
    _as_in_clear([{"linear": 9}, *image, "linear"], x, verify=verify)  # and its gradient


def test_the_largest_line_of_numbers_of_one_is_found() -> None:
    x = np.random.default_rng(6).normal(size=(ROWS, 9))
    _as_in_clear([{"linear": 6}, {"image": [2, 1, 3]}, {"max-pool1d": 1}, "flatten", "linear"], x)


def test_a_large_gradient_is_cut_before_adam_squares_it() -> None:
    x = np.random.default_rng(7).normal(size=(ROWS, 5)).clip(-4, 4) * 200
    _as_in_clear(["linear"], x, optimizer="adam", lr=0.01, clip_norm=1.0)


@pytest.mark.parametrize("verify", ["off", "proofs"])
def test_a_line_does_not_see_those_after_it_however_small_its_scores_are(verify: str) -> None:
    """Scores down to some -700: what does not count is to be less than any of them."""
    x = np.random.default_rng(8).normal(size=(ROWS, 12)).clip(-4, 4) * 20
    _as_in_clear([{"lines": 3}, {"attention": {"causal": True}}, "flatten", "linear"], x, verify=verify, lr=0.001)


@pytest.mark.parametrize("f", [16, 20])
@pytest.mark.parametrize("beta2", [0.9, 0.99])
def test_adam_squares_gradients_of_hundreds(beta2: float, f: int) -> None:
    """Some 400 a weight in each step, once they are multiplied by the power of two next to 1 / sqrt(rows)."""
    x = np.random.default_rng(9).normal(size=(ROWS, 4)).clip(-4, 4)
    y = x.sum(1) * 100
    job = {
        "steps": 4,
        "batch": 16,
        "lr": 0.05,
        "schedule": "constant",
        "objective": "mse",
        "reveal": ["loss", "overflow"],
    }
    fit = simulate.fit(["linear"], x, y, optimizer="adam", beta2=beta2, frac_bits=f, watch_range=True, **job)
    clear = fit.twin()
    assert fit.metrics == {"overflow": 0.0}
    assert max(float(np.abs(a - b).max()) for a, b in zip(fit.weights, clear.weights, strict=True)) < 5e-4
