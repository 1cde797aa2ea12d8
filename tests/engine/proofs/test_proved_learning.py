"""Optimizers, objectives, metrics, statistics and layers under proofs: they learn what they learn without, and no lie
in what they compute gets through."""

from __future__ import annotations

import functools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from proof_kit import LEARNED, Ending, alter, normal, run_proved

from uvcc_engine import simulate
from uvcc_engine.contract.errors import ConfigError, ProofFailedError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.sets import Dataset
from uvcc_engine.model.definition.base_model import Adapters, adapted, read_base, write_base
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.model.definition.specs import Dense, Embedding, ModelSpec, initial_weights
from uvcc_engine.model.layer_types.tied import Tied
from uvcc_engine.mpc.products import arithmetic
from uvcc_engine.proofs.galois_ring import GaloisRing
from uvcc_engine.sharding import validation

X = np.random.default_rng(4).normal(size=(40, 5))
CLASSES = (X[:, 0] > 0).astype(int)
THREE = np.digitize(X[:, 0], [-0.5, 0.5])
NUMBERS = 0.5 * X[:, 0] + 0.2 * X[:, 1]
COUNTS = np.round(np.exp(np.clip(NUMBERS, -2, 1)))
WEIGHTS = np.linspace(0.5, 2, 40)
BITS = np.random.default_rng(1).integers(0, 2, (40, 4)).astype(float)


def _both(model: Any, x: Any, y: Any, verify: str, within: float = 2.0**-9, **job: Any) -> simulate.SimulatedFit:
    """The proved training, which must have ended where the unproved one does."""
    keys = {"steps": 1, "batch": 4, "seed": 3} | job
    plain, proved = simulate.fit(model, x, y, **keys), simulate.fit(model, x, y, verify=verify, **keys)
    _alike(plain, proved, within)
    return proved


def _alike(plain: simulate.SimulatedFit, proved: simulate.SimulatedFit, within: float = 2.0**-9) -> None:
    assert np.allclose(plain.losses, proved.losses, atol=within)
    for a, b in zip(plain.weights, proved.weights, strict=True):
        assert np.allclose(a, b, atol=within)
    assert plain.metrics.keys() == proved.metrics.keys()
    for name, value in plain.metrics.items():
        assert proved.metrics[name] == pytest.approx(value, abs=2.0**-10), name
    assert plain.validated.keys() == proved.validated.keys()
    for step, told in plain.validated.items():
        assert proved.validated[step] == pytest.approx(told, abs=2.0**-10)
    assert proved.rounds > plain.rounds


@pytest.mark.parametrize(
    ("y", "verify", "job"),
    [
        (CLASSES, "proofs", {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.1, "clip_norm": 0.5, "warmup": 1}),
        (CLASSES, "products", {"clip_norm": 0.1, "steps": 2}),
        (CLASSES, "proofs", {"objective": "binary", "row_weights": WEIGHTS, "reveal": ["loss", "accuracy", "auc"]}),
        (CLASSES, "products", {"objective": "binary", "reveal": ["loss", "confusion", "precision", "recall"]}),
        (NUMBERS, "proofs", {"objective": "mse", "row_weights": WEIGHTS, "reveal": ["loss", "rmse", "r2"]}),
        (NUMBERS, "proofs", {"objective": "huber", "reveal": ["loss", "r2"]}),
        (COUNTS, "proofs", {"objective": "poisson", "row_weights": WEIGHTS, "reveal": ["loss", "rmse"]}),
        (THREE, "products", {"class_weights": [1.0, 2.0, 0.5], "reveal": ["perplexity", "confusion", "overflow"]}),
        (THREE, "proofs", {"label_smoothing": 0.1, "reveal": ["loss", "confusion"]}),
    ],
    ids=lambda x: str(list(x)) if isinstance(x, dict) else "" if isinstance(x, np.ndarray) else x,
)
def test_what_is_trained_and_told_is_the_same_with_proofs(y: Any, verify: str, job: dict[str, Any]) -> None:
    poisson = job.get("objective") == "poisson"  # a rate is up to e^4 times a power, which is off by 2^-15
    proved = _both(["linear"], X, y, verify, 2.0**-8 if poisson else 2.0**-9, **job)
    assert np.abs(proved.weights[0] - initial_weights(proved.model, 3, 16)[0]).max() > 2.0**-9, "nothing was learnt"


def test_a_validation_is_proved_with_its_step_and_the_best_weights_are_kept() -> None:
    told = ["loss", "accuracy", "val_loss", "val_accuracy", "val_perplexity"]
    keys = {"validation": 0.3, "val_every": 1, "keep_best": True, "patience": 1, "steps": 2, "reveal": told}
    proved = _both(["linear"], X, CLASSES, "proofs", **keys)
    assert all(set(values) == set(told[2:]) for values in proved.validated.values())


@pytest.mark.parametrize("by", ["deviation", "range", "quantiles"])
def test_columns_are_standardised_by_proved_statistics(by: str) -> None:
    verify = "proofs" if by == "deviation" else "products"
    _both(["linear"], 3 * X + 1, CLASSES, verify, standardise=True, standardise_by=by)


def test_standard_errors_are_proved_before_they_are_sealed() -> None:
    for objective, y, verify in (("mse", NUMBERS, "proofs"), ("binary", CLASSES, "products")):
        proved = _both(["linear"], X, y, verify, objective=objective, reveal=["loss", "weights", "standard_errors"])
        assert proved.standard_errors is not None
        assert np.isfinite(proved.standard_errors).all()


@pytest.mark.parametrize(
    ("y", "objective", "verify"),
    [pytest.param(NUMBERS, "mse", "products", marks=pytest.mark.ci(__file__)), (CLASSES, "binary", "proofs")],
)
def test_trees_grow_the_same_with_proofs(y: Any, objective: str, verify: str) -> None:
    """Bits that come out of a proved truncation would be off by one now and then: they are compared instead."""
    y = BITS[:, 0] * 0.5 - BITS[:, 2] * 0.3 if objective == "mse" else (BITS[:, 0] + BITS[:, 1] > 1).astype(int)
    told = ["loss", "rmse" if objective == "mse" else "accuracy"]
    keys = {"objective": objective, "reveal": told, "momentum": 0.0, "batch": 16, "seed": 3, "lr": 0.5}
    net = [{"trees": {"count": 2 if verify == "products" else 1, "depth": 2}}]
    steps = 2 if verify == "products" else 1
    plain = simulate.fit(net, BITS, y, steps=steps, **keys)
    proved = simulate.fit(net, BITS, y, steps=steps, verify=verify, **keys)
    assert np.allclose(plain.losses, proved.losses, atol=2.0**-12)
    assert proved.metrics == pytest.approx(plain.metrics, abs=2.0**-12)


class _Meeting(torch.nn.Module):
    """Branches that meet side by side and in a product, a softmax, a mean, a maximum, a factor."""

    def __init__(self) -> None:
        super().__init__()
        for name in "abcde":
            setattr(self, name, torch.nn.Linear(5, 3))
        self.last = torch.nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both, scaled = torch.softmax(self.a(x), -1) * self.b(x), 0.7 * self.c(x) + 0.1
        ends = [self.d(x).amax(-1, keepdim=True), self.e(x).mean(-1, keepdim=True)]
        return self.last(torch.cat([both, scaled, *ends], 1))  # type: ignore[no-any-return]


IMAGE = [{"image": [1, 4, 4]}, {"conv": {"channels": 2, "padding": 1}}, "batch-norm", "relu", {"avg-pool": 2}]


@pytest.mark.parametrize("verify", [pytest.param("proofs", marks=pytest.mark.ci(__file__)), "products"])
def test_branches_batches_and_dropout_are_proved(verify: str) -> None:
    _both(_Meeting(), X, CLASSES, verify)
    images = np.random.default_rng(4).normal(size=(12, 1, 4, 4))
    net: list[Any] = [*IMAGE, {"linear": 4}, {"dropout": 0.5}, "linear"]
    proved = _both(net, images, (images[:, 0, 0, 0] > 0).astype(int), verify)
    moved = proved.weights[1] - initial_weights(proved.model, 3, 16)[1]
    assert np.abs(moved).max() > 2.0**-8, "the norm learnt nothing"


def test_a_public_base_with_adapters_and_a_table_that_is_used_twice_are_proved(tmp_path: Path) -> None:
    lines: list[Any] = [{"lines": 3}, {"linear": 4}, "places", "layer-norm", "relu", "flatten", "linear"]
    whole = model_of_list(lines, 12, 3)
    found = write_base(tmp_path / "base", whole, initial_weights(whole, 5, 16))
    model = adapted(read_base(tmp_path / "base", found), Adapters(2), 3)
    x = np.random.default_rng(6).normal(size=(12, 12))
    data = Dataset(x[:8], np.arange(8) % 3, x[8:], np.arange(4) % 3, 3)
    keys = {"steps": 1, "batch": 4, "test_rows": 4, "base": model.base, "model": model_to_json(model)}
    job = PrivateJob.from_json(json.loads(json.dumps(keys)))
    _alike(*(simulate.train(replace(job, verify=v), data, model=model) for v in ("off", "proofs")))
    letters = np.random.default_rng(2).integers(0, 3, (8, 3))
    spec = ModelSpec("tied", (Tied(Embedding(3, 2, 4), (Dense(4, 4),)),), 6, 3, 2)
    asked, after = np.eye(3)[letters[:, :2]].reshape(-1, 6), letters[:, 1:]
    data = Dataset(asked[:6], after[:6], asked[6:], after[6:], 3)
    job = PrivateJob.from_json({"model": model_to_json(spec), "steps": 1, "batch": 2, "test_rows": 2})
    _alike(*(simulate.train(replace(job, verify=v), data) for v in ("off", "proofs")))


@pytest.mark.parametrize("verify", ["products", "proofs"])
def test_what_has_no_proof_is_refused_by_name_and_not_skipped(verify: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer from elsewhere: wherever it stands, it is found before anything is computed."""
    own = tuple(layer for layer in validation.PROVED_LAYERS if layer is not Dense)
    monkeypatch.setattr(validation, "PROVED_LAYERS", own)
    for net in (["linear"], [{"residual": [{"linear": 5}]}, {"avg-reduce": 5}]):
        with pytest.raises(ConfigError, match="no proof of layer Dense"):
            simulate.fit(net[:1] if net == ["linear"] else [net[0], "linear"], X, CLASSES, steps=1, verify=verify)


# -- lies --------------------------------------------------------------------------------------------------------------

RING = GaloisRing(20)
INPUTS = (normal(1, 3, 4), normal(2, 4, 3))


def _lying(name: str, liar: int, number: int, how: str, seed: int, *, prove: bool) -> Ending:
    at = random.Random(seed)

    def lie(sent: int, data: torch.Tensor) -> None:
        if sent == number:
            alter(data, how, at)

    build = functools.partial(LEARNED[name], dealer=2)
    return run_proved(build, INPUTS, ring=RING, everything=True, liar=liar, stands_by=lie, seed=seed, prove=prove)


def test_a_long_sum_of_products_is_proved_in_parts_and_a_lie_in_one_part_is_found() -> None:
    """As of a norm of a whole gradient: the number of entries is no multiple of the number of parts."""
    x, y = normal(1, 1100, scale=0.5), normal(2, 1100, scale=0.5)
    honest = run_proved(arithmetic.dot_protocol, (x, y), ring=RING, everything=True)
    assert honest.opened[0] is not None
    assert abs(float(honest.opened[0] / 2.0**16 - x @ y)) < 64 * 1.5 * 2.0**-16
    assert honest.proved[0] is not None
    assert honest.proved[0].claims == 5  # the sums, their masks' carries and top bits, two parts of the online parties

    def lie(sent: int, data: torch.Tensor) -> None:
        if sent == 0:
            data.view(-1)[40] += 1

    for liar in range(3):
        told = run_proved(arithmetic.dot_protocol, (x, y), ring=RING, everything=True, liar=liar, stands_by=lie)
        assert told.opened == [None] * 3


@pytest.mark.parametrize("name", LEARNED)
def test_a_lie_in_what_learning_is_made_of_is_caught_before_an_opening_and_goes_through_without_proofs(
    name: str,
) -> None:
    """A seeded sample of what ``battery.py`` does whole."""
    honest = _lying(name, 0, -1, "one", 0, prove=False)
    at = random.Random(name)
    liar = at.randrange(3)
    # but for the last one, a lie in which the opening itself would notice
    number, how = at.randrange(honest.sends[liar] - 1), at.choice(("top", "random", "all"))
    caught = _lying(name, liar, number, how, 0, prove=True)
    assert caught.opened == [None] * 3
    errors = [caught.errors[p] for p in range(3) if p != liar and caught.errors[p] is not None]
    assert errors
    assert all(isinstance(error, ProofFailedError) and liar in error.pair for error in errors)
    through = _lying(name, liar, number, how, 0, prove=False)
    assert all(one is not None for one in through.opened), "something else than the proof noticed it"
