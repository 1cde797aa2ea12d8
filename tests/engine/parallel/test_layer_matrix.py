"""The manual's table of layers, each of its models trained: beside its twin, from a kept state, on several workers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixed_twin import ZeroStream
from plain_training import in_plain_integers, in_plain_integers_by_parts, weights_in_clear
from training_kit import check_replicas, shares, train, weights

from uvcc_engine import simulate
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.data.sets import Dataset, one_hot
from uvcc_engine.model.definition.layer_list import model_to_json
from uvcc_engine.model.definition.list_words import WORDS
from uvcc_engine.model.definition.module_operations import ATTENTION, OPERATIONS
from uvcc_engine.model.definition.module_walk import JOINS
from uvcc_engine.model.definition.specs import ModelSpec, find_model, initial_weights, register_model
from uvcc_engine.model.layer_spec import weighted_specs
from uvcc_engine.model.layer_types.trees import trees_of
from uvcc_engine.model.learning.plaintext import train_plaintext
from uvcc_engine.model.learning.trainers import trainer_of
from uvcc_engine.model.registry import layer_types
from uvcc_engine.mpc.foundation import prg
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.sharding.partition import place_layers

sys.path.append(str(Path(__file__).parents[3]))

from docs.make import layers as table

UNIT = 2.0**-16


def data_of(model: ModelSpec) -> Dataset:
    rng = np.random.default_rng(4)
    if trees_of(model) is not None:  # which ask bits, and answer with a number
        bits = rng.integers(0, 2, (24, model.features)).astype(np.float64)
        numbers = rng.normal(size=24)
        return Dataset(bits[8:], numbers[8:], bits[:8], numbers[:8], 1)
    if model.unsupervised:
        rows = rng.normal(size=(24, model.features))
        return Dataset(rows[8:], rows[8:, :0], rows[:8], rows[:8, :0], 0)
    if model.positions > 1:
        x = one_hot(rng.integers(0, model.classes, (24, model.positions)), model.classes)
        y = rng.integers(0, model.classes, (24, model.positions))
    else:
        x, y = rng.normal(size=(24, model.features)), rng.integers(0, model.classes, 24)
    return Dataset(x[8:], y[8:], x[:8], y[:8], model.classes)


def job_of(model: ModelSpec) -> PrivateJob:
    named = model.name if model.name in ("gpt-tiny", "split") else model_to_json(model)
    values = {"model": named, "steps": 2, "batch": 8, "lr": 0.25, "test_rows": 8}
    values |= {"objective": "mse", "momentum": 0.0, "reveal": ["loss"]} if trees_of(model) is not None else {}
    values |= {"objective": "inertia", "momentum": 0.0, "reveal": ["loss"]} if model.unsupervised else {}
    return PrivateJob.from_json(json.loads(json.dumps(values)))


def close(ours: Any, theirs: Any) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert np.abs(a - b).max() < 256 * UNIT


def test_the_table_knows_every_word_and_operation_and_its_models_have_every_layer() -> None:
    assert table.EXAMPLES.keys() == WORDS.keys()
    assert {*OPERATIONS, *ATTENTION, *JOINS} <= table.modules().keys()
    found = set().union(*(table.names(table.model_of(word).layers) for word in WORDS))
    found |= set().union(*(table.names(model.layers) for model in table.split_models()))
    by_modules_only = {"prefix"}  # test_architectures has it
    assert set(layer_types()) - found == by_modules_only | {*table.AROUND_A_BASE}  # those: test_public_base


@pytest.mark.parametrize(
    "word", [pytest.param(value, marks=pytest.mark.ci(__file__) if n % 2 else ()) for n, value in enumerate(WORDS)]
)
def test_two_steps_end_where_the_twin_does_and_a_kept_state_goes_on_bit_for_bit(word: str) -> None:
    model = table.model_of(word)
    job, data = job_of(model), data_of(model)
    found, clear = simulate.train(job, data), train_plaintext(job, data)
    close(found.weights, clear.weights)
    assert np.allclose(found.losses, clear.losses, atol=4e-3)
    starts = initial_weights(model, job.seed, job.frac_bits)
    moved = [np.abs(a - b).max() for a, b in zip(clear.weights, starts, strict=True)]
    assert min(moved) > 64 * UNIT  # so a weight that stands still is found
    inputs = shares(job, data)

    def through(rt: Runtime, first: int, state: Any) -> list[dict[str, torch.Tensor]]:
        trainer = trainer_of(rt, job, model, inputs[rt.party])
        if state:
            trainer.load_state(state[rt.party][0])
        kept = []
        for step in range(first, 2):
            rt.begin_epoch(step)
            trainer.step(step)
            kept.append({name: t.clone() for name, t in trainer.state().items()})
        return kept

    whole = LocalPlanes(3).run_three(lambda rt: through(rt, 0, None))
    resumed = LocalPlanes(3).run_three(lambda rt: through(rt, 1, whole))
    for party in range(3):
        assert all(torch.equal(whole[party][-1][name], t) for name, t in resumed[party][-1].items())


FLEETS = [Topology(2, 1, 1, 2), Topology(1, 2, 1, 1), Topology(1, 1, 2, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("size", FLEETS, ids=str)
@pytest.mark.parametrize("word", [*WORDS, "split"])
def test_several_workers_train_it_to_the_last_bit_as_plain_integers_where_the_table_says_so(
    word: str, size: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(prg.STREAMS, "zeros", ZeroStream)
    model = table.split_models()[1] if word == "split" else table.model_of(word)
    if word == "split":
        model = find_model("split") if _named("split") else register_model(model)
    if not table.fits(model, size.tensor):
        assert size.tensor > 1
        return
    summed = word in ("trees", "kmeans")
    if summed:  # made of sums over rows, which replicas alone divide, by one worker's program
        size = Topology(size.replicas)
    if sum(bool(weighted_specs([spec])) for spec in model.layers) < size.stages:
        return
    place_layers(model, size.tensor)
    job, data = job_of(model), data_of(model)
    found = train(job, size, data=data, prg="zeros")
    check_replicas(found)
    whole = PrivateJob.from_json(job.to_json() | {"batch": job.batch * size.replicas})
    parts = size.replicas * size.microbatches if word == "batch-norm" else 1
    ended = in_plain_integers(whole, data) if summed else in_plain_integers_by_parts(whole, data, parts)
    plain = weights_in_clear(whole, ended)
    assert all(np.array_equal(a, b) for a, b in zip(weights(job, found, size), plain, strict=True))
    clear = train_plaintext(whole, data, replicas=size.replicas, microbatches=size.microbatches)
    close(weights(job, found, size), clear.weights)


def _named(name: str) -> bool:
    from uvcc_engine.model.definition.specs import MODELS

    return name in MODELS
