"""Dropout: which numbers are left out follows from public numbers alone, and only while a model trains."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from uvcc_engine import simulate
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.sets import Dataset
from uvcc_engine.model.batch_place import BatchPlace
from uvcc_engine.model.definition.layer_list import model_of_json, model_of_list, model_to_json
from uvcc_engine.model.definition.specs import find_model
from uvcc_engine.model.layer_types.dropout import LARGEST, Dropout, kept, numbered
from uvcc_engine.model.layer_types.residual import Residual
from uvcc_engine.model.learning.plaintext import forward, train_plaintext

torch.set_num_threads(1)
RNG = np.random.default_rng(5)
X = RNG.normal(size=(40, 6))
Y = (X[:, 0] > 0).astype(np.int64)
DATA = Dataset(X[:30], Y[:30], X[30:], Y[30:], 2)
LAYERS = [{"linear": 8}, "relu", {"dropout": 0.5}, {"residual": [{"dropout": 0.3}, {"linear": 8}]}, "linear"]
JOB = PrivateJob.from_json(
    {
        "model": model_to_json(model_of_list(LAYERS, 6, 2)),
        "steps": 3,
        "batch": 8,
        "lr": 0.02,
        "test_rows": 10,
        "reveal": ["loss", "accuracy", "perplexity"],
    }
)


def test_it_trains_as_its_twin_does_leaving_out_the_same_numbers_and_answers_with_all() -> None:
    found, clear = simulate.train(JOB, DATA), train_plaintext(JOB, DATA)
    assert np.allclose(found.losses, clear.losses, atol=2e-3)
    for ours, theirs in zip(found.weights, clear.weights, strict=True):
        assert np.abs(ours - theirs).max() < 128 * 2.0**-16
    whole = [layer for layer in LAYERS if layer != {"dropout": 0.5}]
    other = replace(JOB, model=PrivateJob.from_json({"model": model_to_json(model_of_list(whole, 6, 2))}).model)
    assert np.abs(train_plaintext(other, DATA).losses[0] - clear.losses[0]) > 1e-2  # numbers were left out
    model, weights = find_model(JOB.model), [torch.from_numpy(w) for w in found.weights]
    x = torch.from_numpy(DATA.test_x)
    answers = forward(model, weights, x)
    loss = torch.nn.functional.cross_entropy(answers, torch.from_numpy(DATA.test_y))
    assert found.metrics["perplexity"] == pytest.approx(float(loss.exp()), abs=5e-3)  # all numbers count there
    thinned = forward(model, weights, x, training=True, batch=BatchPlace(7, 0, 0, 10))
    assert (thinned - answers).abs().max() > 0.05


def test_a_mask_is_that_of_the_whole_batch_however_the_rows_are_split() -> None:
    spec, at = Dropout(50, 0.3, 1), BatchPlace(seed=3, step=9, first=0, count=12)
    whole = kept(spec, at, 24)  # two lines of each row
    assert whole.shape == (24, 50)
    assert np.array_equal(whole[8:14], kept(spec, replace(at, first=4, count=3), 6))
    assert abs(whole.mean() - 0.7) < 0.05
    others = [replace(at, step=10), replace(at, seed=4)]
    masks = [kept(spec, one, 24) for one in others] + [kept(replace(spec, number=2), at, 24)]
    assert all(abs((whole == mask).mean() - (0.7**2 + 0.3**2)) < 0.1 for mask in masks)  # as if drawn anew


def test_dropouts_are_told_apart_wherever_they_stand() -> None:
    made = numbered([Dropout(4, 0.1), Residual((Dropout(4, 0.2), Residual((Dropout(4, 0.3),)))), Dropout(4, 0.4)])
    inner = (Dropout(4, 0.2, 1), Residual((Dropout(4, 0.3, 2),)))
    assert made == (Dropout(4, 0.1, 0), Residual(inner), Dropout(4, 0.4, 3))


@pytest.mark.parametrize("share", [0.0, 1.0, LARGEST + 0.01])
def test_a_share_that_leaves_all_or_nothing_out_is_refused(share: float) -> None:
    made = model_to_json(model_of_list(LAYERS, 6, 2))
    made["layers"][2]["share"] = share
    with pytest.raises(ConfigError, match="a dropout leaves out"):
        model_of_json(made)
    with pytest.raises(ConfigError, match=r"job\.model\[0\] is .*"):
        model_of_list([{"dropout": share}, "linear"], 6, 2)
