"""Where a function has a corner, at zero, a training goes on as PyTorch's does: a ReLU's slope there is 0.

Rows without any feature and black patches of an image meet weights whose bias starts at 0, so their products are zero
to the last bit, before they are rounded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from uvcc_engine import simulate

torch.set_num_threads(1)
ROWS = 48
IMAGE: list[Any] = [{"image": [1, 4, 4]}, {"conv": {"channels": 2, "kernel": 2, "stride": 2}}]


@pytest.mark.parametrize(
    "layers",
    [
        [{"linear": 6}, "relu", "linear"],
        [{"linear": 6}, "leaky-relu", "linear"],
        [*IMAGE, "max-pool", "relu", "flatten", "linear"],
        [{"lines": 4}, {"residual": [{"linear": 4}, "relu", {"linear": 4}]}, "max", "linear"],
    ],
    ids=["relu", "leaky", "behind a pool", "in a block"],
)
@pytest.mark.parametrize("rounds", ["few", "sparing"])
def test_what_is_zero_moves_weights_as_in_clear(layers: list[Any], rounds: str) -> None:
    _as_in_clear(layers, rounds=rounds)


@pytest.mark.parametrize("rounds", ["few", pytest.param("sparing", marks=pytest.mark.ci(__file__))])
@pytest.mark.parametrize("word", ["relu", {"leaky-relu": 0.0}], ids=["of a product", "by itself"])
def test_it_does_where_it_is_proved(word: Any, rounds: str) -> None:
    _as_in_clear([{"linear": 3}, word, "linear"], rounds=rounds, verify="proofs", steps=1)


def _as_in_clear(layers: list[Any], **job: Any) -> None:
    random = np.random.default_rng(2)
    x = random.normal(size=(ROWS, 16)) * (random.random(ROWS) < 0.5)[:, None]
    y = np.arange(ROWS) % 2 * (x[:, 0] == 0)  # rows of nothing are of either class, and others of the first
    settings = {"steps": 2, "batch": 20, "lr": 0.5, "momentum": 0.0, "schedule": "constant", "reveal": ["loss"]}
    fit = simulate.fit(layers, x, y, **settings | job)
    clear = fit.twin()
    assert np.abs(np.array(fit.losses) - clear.losses).max() < 1e-3
    moved = max(float(np.abs(a - b).max()) for a, b in zip(fit.weights, clear.weights, strict=True))
    assert moved < 2e-3
