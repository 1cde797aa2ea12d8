"""Training to the last bit: with masks of zero, rounding is determined, and the same however the work is divided."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from architectures import ResNet
from fixed_twin import F, Ints, ZeroStream, train_in_integers
from training_kit import check_replicas, shares, train, weights

from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.data.sets import Dataset
from uvcc_engine.model import ops
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.model.definition.specs import find_model
from uvcc_engine.model.definition.torch_module import model_of_module
from uvcc_engine.model.layer_types import batch_norm
from uvcc_engine.model.learning.training import PrivateTrainer
from uvcc_engine.mpc.foundation import prg
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.sharding.validation import fit_model

torch.set_num_threads(1)
TABLE: list[Any] = [{"linear": 5}, "batch-norm", {"linear": 4}, "batch-norm", {"linear": 4}]
ALONE = Topology(1, 1, 1, 1)


@pytest.fixture(autouse=True)
def zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(prg.STREAMS, "zeros", ZeroStream)


def table_job(size: Topology, **changes: Any) -> PrivateJob:
    """Of 16 rows a step, all replicas' together."""
    values = {"model": model_to_json(model_of_list(TABLE, 6, 4)), "steps": 3, "batch": 16 // size.replicas, "lr": 0.25}
    values |= {"test_rows": 8, "objective": "mse", "reveal": ["loss"]} | changes
    return PrivateJob.from_json(json.loads(json.dumps(values)))


@cache
def table() -> tuple[Dataset, Dataset]:
    """Rows with a class each, and the same with its one-hot."""
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(40, 6)), rng.integers(0, 4, 40)
    data = Dataset(x[8:], y[8:], x[:8], y[:8], 4)
    return data, replace(data, train_y=np.eye(4)[data.train_y])


@cache
def in_integers(parts: int) -> list[Ints]:
    return train_in_integers(table_job(ALONE), table()[1], parts)


def rounded_down(size: Topology, rules: Callable[[], AbstractContextManager[Any]] = nullcontext) -> list[Ints]:
    job = table_job(size)
    fit_model(job, workers=2, replicas=size.replicas, tensor=size.tensor, microbatches=size.microbatches)
    found = train(job, size, data=table()[0], prg="zeros", rules=rules)
    check_replicas(found)
    return [np.rint(w * 2.0**F).astype(np.int64) for w in weights(job, found, size)]


def same(ours: list[Ints], theirs: list[Ints]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "size",
    [
        ALONE,
        Topology(1, 1, 1, 2),
        *(
            pytest.param(size, marks=pytest.mark.ci(__file__))
            for size in (Topology(2, 2, 1, 2), Topology(1, 1, 2, 1), Topology(2, 1, 2, 1))
        ),
        pytest.param(Topology(1, 1, 3, 1), marks=pytest.mark.ci(__file__)),
    ],
    ids=str,
)
def test_a_batch_normalisation_is_its_twin_in_integers_to_the_last_bit(size: Topology) -> None:
    parts = size.replicas * size.microbatches
    clear = in_integers(parts)
    assert same(rounded_down(size), clear)
    assert not same(clear, in_integers(8 // parts))  # as other parts do


def test_one_worker_alone_is_the_twin_in_integers_as_well() -> None:
    """It is another program than that of several workers."""
    job, inputs = table_job(ALONE), shares(table_job(ALONE), table()[0])

    def trained(rt: Runtime) -> list[Ints]:
        trainer = PrivateTrainer(rt, job, find_model(job.model), inputs[rt.party])
        for step in range(job.steps):
            rt.begin_epoch(step)
            trainer.step(step)
        return [w.first.numpy().copy() for w in trainer.weights]

    parties = LocalPlanes(3, prg="zeros").run_three(trained)
    assert same([a + b + c for a, b, c in zip(*parties, strict=True)], in_integers(1))


@contextmanager
def each_rank_rounds() -> Iterator[None]:
    """Every rank truncates its own sum of squares, and the rounded ones are added up."""

    def apart(rt: Runtime, tp: Any, x: Share, y: Share, scale: float) -> MpcProtocol[Share]:
        mine = yield from ops.summed_products_protocol(rt, x, y, -1, scale=scale, keepdim=True)
        both = tp.sum_(torch.stack([mine.first, mine.second]))
        return Share(both[0], both[1], mine.f)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_norm, "summed_over_ranks_protocol", apart)
        yield


@contextmanager
def variance_a_unit_off() -> Iterator[None]:
    """The variance of each channel is a unit of 2^-16 too large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_norm, "EPSILON", batch_norm.EPSILON + 2.0**-F)
        yield


@pytest.mark.parametrize(
    ("size", "rules"),
    [
        pytest.param(Topology(1, 1, 3, 1), each_rank_rounds, marks=pytest.mark.ci(__file__)),
        (ALONE, variance_a_unit_off),
    ],
)
def test_a_rounding_or_a_unit_too_much_is_seen(
    size: Topology, rules: Callable[[], AbstractContextManager[None]]
) -> None:
    assert not same(rounded_down(size, rules), in_integers(1))


@pytest.mark.ci(__file__)
def test_a_convolutional_network_that_normalises_gives_the_same_bits_however_its_work_is_divided() -> None:
    model = model_to_json(model_of_module(ResNet(norm=True), (1, 8, 8), 3).model)
    rng = np.random.default_rng(4)
    x, y = rng.normal(size=(48, 64)), rng.integers(0, 3, 48)
    data, found = Dataset(x[8:], y[8:], x[:8], y[:8], 3), []
    for size in [Topology(1, 1, 1, 4), Topology(2, 1, 2, 2)]:
        values = {"model": model, "steps": 2, "batch": 8 // size.replicas, "lr": 0.25, "test_rows": 8}
        job = PrivateJob.from_json(json.loads(json.dumps(values)))
        found.append(weights(job, train(job, size, data=data, prg="zeros"), size))
    assert same(*found)


@pytest.mark.ci(__file__)
@pytest.mark.timeout(600)
def test_proved_parts_give_the_same_bits_whichever_replica_has_them() -> None:
    """Each worker's product is a claim of its own and is rounded by itself, so the parts are what counts."""
    model = model_to_json(model_of_list([{"linear": 3}, "batch-norm", {"linear": 2}], 3, 2))
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(16, 3)), rng.integers(0, 2, 16)
    data, found = Dataset(x[8:], y[8:], x[:8], y[:8], 2), []
    for size in [Topology(1, 1, 1, 2), Topology(2, 1, 1, 1)]:
        job = table_job(size, model=model, steps=1, batch=4 // size.replicas, verify="proofs")
        found.append(weights(job, train(job, size, data=data, prg="zeros"), size))
    assert same(*found)
