"""Every layer, and what stands around it, keeps to the device that its shares lie on: by a GPU's rules, on a CPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from other_device import OtherDevice, nothing_kept, on_device, tensors_of
from test_private_device import FakeCuda
from torch.overrides import _pop_mode_temporarily

from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.sets import Dataset, one_hot
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.model.definition.list_words import WORDS
from uvcc_engine.model.definition.specs import ModelSpec
from uvcc_engine.model.layer_types.trees import trees_of
from uvcc_engine.model.learning.trainers import trainer_of
from uvcc_engine.mpc.foundation.local import LocalPlanes, rehearsal_keys
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.foundation.staging import CudaStaging
from uvcc_engine.mpc.kernels.plain import PlainKernels
from uvcc_engine.sealing.inputs import dataset_tensors
from uvcc_engine.simulate.fitting import party_inputs

sys.path.append(str(Path(__file__).parents[3]))

from docs.make import layers as table

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _nothing_kept_from_other_tests() -> Iterator[None]:
    with nothing_kept():
        yield


def data_of(model: ModelSpec) -> Dataset:
    rng = np.random.default_rng(4)
    if trees_of(model) is not None:
        bits = rng.integers(0, 2, (8, model.features)).astype(np.float64)
        return Dataset(bits[4:], rng.normal(size=4), bits[:4], rng.normal(size=4), 1)
    if model.positions > 1:
        letters = rng.integers(0, model.classes, (8, model.positions))
        x, y = one_hot(letters, model.classes), rng.integers(0, model.classes, (8, model.positions))
    else:
        x, y = rng.normal(size=(8, model.features)), rng.integers(0, max(2, model.classes), 8)
        y = y if model.classes > 1 else y.astype(np.float64)
    return Dataset(x[4:], y[4:], x[:4], y[:4], model.classes)


def trained(model: ModelSpec, monkeypatch: pytest.MonkeyPatch, **more: Any) -> list[Any]:
    """The losses of a step and its evaluation, computed by a GPU's rules."""
    values = {"model": model_to_json(model), "steps": 1, "batch": 4, "test_rows": 4, "reveal": ["loss"]} | more
    values |= {"objective": "mse", "momentum": 0.0} if trees_of(model) is not None else {}
    job, data = PrivateJob.from_json(json.loads(json.dumps(values))), data_of(model)
    inputs = party_inputs(dataset_tensors(data, job.frac_bits, job), job.frac_bits)
    monkeypatch.setattr("uvcc_engine.mpc.foundation.runtime.kernels_for", lambda device: PlainKernels())
    planes = LocalPlanes(3)
    for p in range(3):
        staging = CudaStaging(CPU, FakeCuda())
        planes.runtimes[p] = Runtime(p, planes.planes[p], rehearsal_keys(3)[p], bytes(32), staging=staging)

    on_host = Runtime.on_host

    @contextmanager
    def without_rules(self: Runtime) -> Iterator[None]:
        """A proof computes on the host alone, so nothing that it starts from may lie on the device."""
        assert self.ledger is not None
        products, equations = self.ledger.take()
        left = [x for one in (*products, *equations) for x in tensors_of(*_parts(one))]
        assert left or self.epoch == 1
        assert not any(map(on_device, left))
        for one in products:
            self.ledger.file(one)
        self.ledger.claim(*equations)
        with on_host(self), _pop_mode_temporarily():
            yield

    monkeypatch.setattr(Runtime, "on_host", without_rules)

    def body(rt: Runtime) -> Any:
        with OtherDevice():
            trainer = trainer_of(rt, job, model, inputs[rt.party])
            rt.begin_epoch(0)
            loss = trainer.step(0).loss
            rt.begin_epoch(1)
            return loss, trainer.evaluate()

    return planes.run_three(body)


def _parts(one: Any) -> list[Any]:
    """What a claim holds, down to its tensors."""
    found = [getattr(one, field.name) for field in fields(one)]
    held = [_parts(part) for part in found if is_dataclass(part)]
    return [part for part in found if not is_dataclass(part)] + [part for parts in held for part in parts]


@pytest.mark.parametrize(
    "word", [pytest.param(word, marks=pytest.mark.ci(__file__) if n % 2 else ()) for n, word in enumerate(WORDS)]
)
def test_a_step_of_every_layer_never_mixes_device_and_host(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (loss, _), *_ = trained(table.model_of(word), monkeypatch)
    assert loss is not None


MLP = [{"linear": 5}, "relu", {"linear": 3}]
ONE = [{"linear": 5}, "relu", {"linear": 1}]
SETTINGS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "adam": (MLP, {"optimizer": "adam", "weight_decay": 0.01, "clip_norm": 1.0}),
    "clipped": (MLP, {"clip_norm": 1.0, "schedule": "cosine", "warmup": 1}),
    "metrics": (MLP, {"reveal": ["loss", "accuracy", "confusion", "perplexity"]}),
    "binary": (ONE, {"objective": "binary", "reveal": ["loss", "auc", "precision", "recall", "accuracy"]}),
    "huber": (ONE, {"objective": "huber", "reveal": ["loss", "rmse", "r2"]}),
    "poisson": (ONE, {"objective": "poisson", "reveal": ["loss", "rmse"]}),
    "mse": ([{"linear": 1}], {"objective": "mse", "reveal": ["loss", "rmse", "weights", "standard_errors"]}),
    "weighed": (MLP, {"class_weights": [1.0, 2.0, 0.5], "label_smoothing": 0.1}),
    "sparing": (MLP, {"rounds": "sparing"}),
    "proofs": (ONE, {"verify": "proofs", "objective": "binary", "reveal": ["loss", "accuracy"]}),
    "audited": (ONE, {"verify": "covert", "audit_one_in": 2, "objective": "binary", "reveal": ["loss", "auc"]}),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.ci(__file__) if name in ("adam", "audited") else ()) for name in SETTINGS],
)
def test_no_objective_optimizer_or_metric_mixes_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, settings = SETTINGS[name]
    outputs = layers[-1]["linear"]
    (loss, _), *_ = trained(model_of_list(layers, 4, outputs), monkeypatch, **settings)
    assert loss is not None


def test_what_mixes_them_is_found() -> None:
    with OtherDevice():
        there, here = torch.ones(3, device=CPU), torch.ones(3)
        found = [there, there[1:] * torch.tensor(2.0), here.to(CPU), next(iter(there)), here, here + 1, there.cpu()]
        assert [on_device(x) for x in found] == [True] * 4 + [False] * 3
        for mix in (lambda: there * here, lambda: torch.cat([here, there]), lambda: there.index_select(0, here.long())):
            with pytest.raises(RuntimeError, match="mixes tensors of the device and of the host"):
                mix()
        with pytest.raises(TypeError, match="the host reads"):
            there.numpy()
