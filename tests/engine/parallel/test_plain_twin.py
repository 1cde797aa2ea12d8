"""Every layer, objective and optimiser: two steps of three parties without masks are those in plain integers."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import plain_ring
import pytest
import torch
from fixed_twin import ZeroStream
from plain_training import Ended, by_three_parties, in_plain_integers, same
from test_layer_matrix import data_of, job_of

from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.sets import Dataset
from uvcc_engine.model.definition.base_model import Adapters, adapted, read_base, write_base
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.model.definition.list_words import WORDS
from uvcc_engine.model.definition.specs import ModelSpec, find_model, initial_weights
from uvcc_engine.model.layer_types.dense import Dense
from uvcc_engine.model.registry import layer_types, type_of
from uvcc_engine.mpc.comparisons.shuffle import shuffle_protocol
from uvcc_engine.mpc.foundation import opening, prg
from uvcc_engine.mpc.functions import exponential
from uvcc_engine.mpc.products import arithmetic

sys.path.append(str(Path(__file__).parents[3]))

from docs.make import layers as table

torch.set_num_threads(1)
RNG = np.random.default_rng(6)
ROWS, CLASSES, COUNTS = RNG.normal(size=(56, 5)), RNG.integers(0, 1 << 16, 56), RNG.uniform(0.0, 2.0, 56)
MOST_APART = 64
"""Units of the last place from the twin to two steps of parties with masks, of the manual's examples."""
TWO: list[Any] = [{"linear": 6}, "relu", {"linear": 3}]


@pytest.fixture(autouse=True)
def zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(prg.STREAMS, "zeros", ZeroStream)


def moved(ended: Ended, job: PrivateJob, model: Any) -> bool:
    """Whether each weight has left where it started, so that one that stands still is no match."""
    starts = initial_weights(model, job.seed, job.frac_bits)
    rings = [np.rint(w * 2.0**job.frac_bits).astype(np.int64) for w in starts]
    return all((ended[2][f"weight.{at}"] != ring).any() for at, ring in enumerate(rings))


@pytest.mark.parametrize(
    "word", [pytest.param(value, marks=pytest.mark.ci(__file__) if n % 2 != 1 else ()) for n, value in enumerate(WORDS)]
)
def test_two_steps_of_every_word_are_those_in_plain_integers(word: str) -> None:
    """Masks lift some truncations by a unit, and what follows differs by a few: measured, of these models."""
    model = table.model_of(word)
    job, data = job_of(model), data_of(model)
    clear = in_plain_integers(job, data, model)
    assert moved(clear, job, model)
    assert same(by_three_parties(job, data, model), clear)
    masked = by_three_parties(job, data, model, "aes")
    assert max(np.abs(masked[2][name] - clear[2][name]).max() for name in clear[2]) <= MOST_APART


def model_of_operation(name: str) -> ModelSpec:
    """A module with one operation, and a product behind it."""
    make, own, letters = table.modules()[name]
    torch.manual_seed(1)
    layers, shape = table.layers_of(make, own), (1, math.prod(own) * max(1, letters))
    features = shape[1]
    for spec in layers:
        shape = type_of(spec).output_shape(spec, shape)
    return ModelSpec(name, (*layers, Dense(shape[1], 5)), features, 5, shape[0])


def lines_of(model: ModelSpec) -> Dataset:
    """Numbers, and a class for each line of a row."""
    rng = np.random.default_rng(4)
    x, y = rng.normal(size=(24, model.features)), rng.integers(0, model.classes, (24, model.positions))
    y = y if model.positions > 1 else y[:, 0]
    return Dataset(x[8:], y[8:], x[:8], y[:8], model.classes)


@pytest.mark.parametrize(
    "operation",
    [pytest.param(value, marks=pytest.mark.ci(__file__) if n % 2 else ()) for n, value in enumerate(table.modules())],
)
def test_two_steps_of_every_operation_of_a_module_are_those_in_plain_integers(operation: str) -> None:
    model = model_of_operation(operation)
    job = job_of(model)
    data = data_of(model) if operation == "embedding" else lines_of(model)
    clear = in_plain_integers(job, data, model)
    assert moved(clear, job, model)
    assert same(by_three_parties(job, data, model), clear)


MANY = [{"linear": 6}, "relu", {"linear": 20}]
ONE = [{"linear": 6}, "tanh", {"linear": 1}]
WEIGHED = {"row_weights": True}
NUMBERS = {"reveal": ["loss", "rmse", "r2", "overflow"]}
TOLD = {"reveal": ["loss", "accuracy", "confusion", "auc", "precision", "recall", "perplexity"]}
JOBS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "momentum": (TWO, {"momentum": 0.5, "schedule": "cosine", "warmup": 1, "steps": 3}),
    "no momentum": (TWO, {"momentum": 0.0, "schedule": "constant"}),
    "weight decay": (TWO, {"weight_decay": 0.01}),
    "adam": (TWO, {"optimizer": "adam", "lr": 0.01}),
    "adamw": (TWO, {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.1}),
    "norm cut": (TWO, {"clip_norm": 0.05}),
    "norm not cut": (TWO, {"clip_norm": 50.0}),
    "adam, norm cut": (TWO, {"optimizer": "adam", "lr": 0.01, "clip_norm": 0.05}),
    "12 bits": ([{"linear": 6}, "silu", {"linear": 3}], {"frac_bits": 12}),
    "14 bits": ([{"linear": 6}, "silu", {"linear": 3}], {"frac_bits": 14}),
    "18 bits": ([{"linear": 6}, "silu", {"linear": 3}], {"frac_bits": 18}),
    "few bytes": (TWO, {"rounds": "sparing"}),
    "class weights": (TWO, {"class_weights": [0.5, 1.0, 3.0], "label_smoothing": 0.1}),
    "row weights": (TWO, WEIGHED),
    "20 classes": (MANY, TOLD | {"reveal": ["loss", "accuracy", "perplexity"]}),
    "12 classes, weighted": ([{"linear": 6}, "relu", {"linear": 12}], WEIGHED),
    "binary": (ONE, TOLD | {"objective": "binary"}),
    "binary, weighted": (ONE, {"objective": "binary", "reveal": ["loss"]} | WEIGHED),
    "mse": (ONE, NUMBERS | {"objective": "mse"}),
    "mse, weighted": (ONE, NUMBERS | {"objective": "mse"} | WEIGHED),
    "huber": (ONE, NUMBERS | {"objective": "huber"}),
    "huber, weighted": (ONE, NUMBERS | {"objective": "huber"} | WEIGHED),
    "poisson": (ONE, NUMBERS | {"objective": "poisson"}),
    "poisson, weighted": (ONE, NUMBERS | {"objective": "poisson"} | WEIGHED),
    "validation": (TWO, {"val_rows": 8, "val_every": 1, "keep_best": True, "reveal": ["loss", "val_loss", "accuracy"]}),
    "standardised": (TWO, {"standardise": True}),
    "standardised by range": (TWO, {"standardise": True, "standardise_by": "range"}),
    "standardised by quantiles": (TWO, {"standardise": True, "standardise_by": "quantiles"}),
    "standard errors": ([{"linear": 1}], {"objective": "binary", "reveal": ["loss", "weights", "standard_errors"]}),
}


def case_of(name: str) -> tuple[PrivateJob, Dataset]:
    layers, asked = JOBS[name]
    classes = layers[-1]["linear"]
    model = model_of_list(layers, 5, classes)
    values = {"model": model_to_json(model), "steps": 2, "batch": 16, "lr": 0.25, "test_rows": 8} | asked
    job = PrivateJob.from_json(json.loads(json.dumps(values)))
    truth = ROWS @ [1.0, -0.5, 0.0, 0.25, 0.7]
    y: Any = CLASSES % classes
    if job.objective == "binary":
        y = (truth > 0).astype(np.int64)
    elif classes == 1:
        y = np.rint(np.exp(0.4 * truth)) if job.objective == "poisson" else 2.0 * truth
    own = COUNTS[8:48] if job.row_weights else None
    val = (ROWS[48:], y[48:]) if job.val_rows else (None, None)
    return job, Dataset(ROWS[8:48], y[8:48], ROWS[:8], y[:8], classes, *val, own)


@pytest.mark.parametrize("name", JOBS)
def test_every_objective_optimiser_and_preparation_is_that_in_plain_integers(name: str) -> None:
    job, data = case_of(name)
    clear = in_plain_integers(job, data)
    assert moved(clear, job, find_model(job.model))
    assert same(by_three_parties(job, data), clear)


CNN: list[Any] = [{"image": [1, 6, 6]}, {"conv": {"channels": 2, "padding": 1}}, "relu", {"avg-pool": 2}, "flatten"]
BLOCK = {"residual": [{"linear": 4}, "relu"]}
BASES: dict[str, tuple[list[Any], int, Adapters]] = {
    "adapters": ([{"linear": 6}, "relu", {"linear": 5}, "relu", "linear"], 5, Adapters(2, 2.0)),
    "public head": ([{"linear": 6}, "relu", "linear"], 5, Adapters(2, 1.0, (), "public")),
    "new head": ([{"linear": 6}, "relu", "linear"], 5, Adapters(0, head="new")),
    "convolution": ([*CNN, {"linear": 6}, "relu", "linear"], 36, Adapters(2)),
    "lines": ([{"lines": 3}, {"linear": 4}, "places", "layer-norm", BLOCK, "flatten", "linear"], 12, Adapters(2)),
    "root mean squares": ([{"linear": 6}, "rms-norm", "linear"], 5, Adapters(2)),
}


@pytest.mark.parametrize("name", BASES)
def test_training_around_a_public_base_is_that_in_plain_integers(name: str, tmp_path: Path) -> None:
    layers, features, asked = BASES[name]
    plain = model_of_list(layers, features, 5)
    rng = np.random.default_rng(5)
    weights = [w + rng.normal(0, 0.02, w.shape) for w in initial_weights(plain, 3, 16)]
    model = adapted(read_base(tmp_path / "base", write_base(tmp_path / "base", plain, weights)), asked, 5)
    values = {"model": model_to_json(model), "base": model.base, "steps": 2, "batch": 8, "lr": 0.25, "test_rows": 8}
    job, data = PrivateJob.from_json(json.loads(json.dumps(values))), data_of(model)
    clear = in_plain_integers(job, data, model)
    assert moved(clear, job, model)
    assert same(by_three_parties(job, data, model), clear)


def test_every_layer_type_is_among_what_is_trained() -> None:
    found = {"prefix", "started"} | set().union(*(table.names(table.model_of(word).layers) for word in WORDS))
    found |= set().union(*(table.names(model_of_operation(name).layers) for name in table.modules()))
    assert {*layer_types()} - found == {"adapted", "public"}  # around a public base


def nearest(rt: Any, x: Any, y: Any, *, scale: float = 1.0, dealer: int = 2) -> Any:
    """Half a unit is added before a product is cut off."""
    half = torch.full_like(x.first[..., :1] * y.first[..., :1], 1 << 15) if scale == 1.0 and y.f == 16 else None
    found = yield from plain_ring.mul(rt, x, y, scale=scale, dealer=dealer)
    return found if half is None else plain_ring.held(x.first * y.first + half >> 16, x.f, dealer)


def towards_zero(rt: Any, x: Any, value: float, *, dealer: int = 2) -> Any:
    """What is below zero is rounded up."""
    found = yield from plain_ring.mul_public(rt, x, value, dealer=dealer)
    return plain_ring.add_ring(rt, found, (found.first < 0).long())


def summand_by_summand(rt: Any, x: Any, y: Any, local: Any, form: str, **named: Any) -> Any:
    """Each product of a sum is rounded, and then they are added up."""
    each = yield from plain_ring.product_with(rt, x, y, torch.mul, scale=named.get("scale", 1.0))
    return each.sum(-1)


def scaled_first(rt: Any, x: Any, y: Any, *, scale: float = 1.0, dealer: int = 2) -> Any:
    """The learning rate is taken before the product, in an order of its own."""
    if scale == 1.0:
        return (yield from plain_ring.matmul(rt, x, y, dealer=dealer))
    first = yield from plain_ring.mul_public(rt, x, scale)
    return (yield from plain_ring.matmul(rt, first, y, dealer=dealer))


def coarse_power(rt: Any, x: Any, *, dealer: int = 2) -> Any:
    """The power of the whole, without its summands' own rounding."""
    exact = torch.exp(x.first.double() / 2**x.f) * 2**x.f
    return plain_ring.held(torch.where(x.first > -(16 << x.f), exact, 0.0).floor().long(), x.f, dealer)
    yield


PLANTED: dict[str, tuple[str, Any, Any]] = {
    "nearest": ("layer-norm", arithmetic.mul_protocol, nearest),
    "towards zero": ("linear", arithmetic.mul_public_protocol, towards_zero),
    "summand by summand": ("layer-norm", arithmetic.form_protocol, summand_by_summand),
    "scaled first": ("linear", arithmetic.matmul_protocol, scaled_first),
    "coarse power": ("sigmoid", exponential.exp_protocol, coarse_power),
}


@pytest.mark.parametrize("what", PLANTED)
def test_another_rounding_or_order_is_seen(what: str) -> None:
    word, real, planted = PLANTED[what]
    model = table.model_of(word)
    job, data = job_of(model), data_of(model)
    clear = in_plain_integers(job, data, model, {real: planted})
    ours = by_three_parties(job, data, model)
    assert not same(ours, clear)
    assert all(np.abs(ours[2][name] - clear[2][name]).max() < 256 for name in ours[2])  # by units, not by another sum


def test_what_the_twin_lacks_is_not_left_to_the_protocols() -> None:
    """A protocol on shares finds no random numbers there, and nobody to send a message to."""
    x = plain_ring.held(torch.ones(3, dtype=torch.int64), 16)
    with plain_ring.plain_ring() as rt:
        with pytest.raises(AssertionError, match="asks for random numbers"):
            rt.run(shuffle_protocol(rt, x))
        with pytest.raises(AssertionError, match="sends"):
            rt.run(opening.open_to_protocol(rt, x, 0))
