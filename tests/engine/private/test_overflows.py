"""What is revealed of numbers that outgrow the fixed point: one count over all rows and layers, if it is listed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from uvcc_engine import simulate
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.model.learning.measured import opened_protocol
from uvcc_engine.model.learning.overflows import overflow_protocol
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.products.arithmetic import public
from uvcc_engine.sharding.validation import fit_model

RNG = np.random.default_rng(5)


def test_the_count_is_exact_at_the_edge_and_of_the_ring_elements() -> None:
    edges = np.array([[32768.0, 32767.9999, -32768.0, -32768.0001], [0.0, 1.5, 1e6, -1e6]])
    fine = np.array([127.9, 128.0, -128.1])

    def body(rt: Runtime) -> dict[str, float]:
        seen = [public(rt, torch.from_numpy(edges), f=16), public(rt, torch.from_numpy(fine), f=24)]
        return rt.run(opened_protocol(rt, [rt.run(overflow_protocol(rt, seen))]))

    # [-edge, edge) is inside: 32768, -32768.0001, 1e6 and -1e6 are not, nor 128 and -128.1 at 24 bits
    assert LocalPlanes().run_three(body) == [{"overflow": 6.0}] * 3


def test_a_training_reveals_how_many_numbers_outgrew_it_at_the_end_and_of_each_validation() -> None:
    x = RNG.normal(0, 60, (60, 3))
    y = (x[:, 0] > 0).astype(int)
    job = {"objective": "binary", "frac_bits": 24, "lr": 0.25, "batch": 20, "seed": 3}
    told = ["overflow", "val_overflow"]
    fit = simulate.fit(["linear"], x, y, epochs=2, test=0.25, validation=0.25, reveal=told, **job)
    answers = np.abs(fit.outputs(fit.data.test_x))[:, 0]
    assert np.abs(answers - 128.0).min() > 1e-2  # none so near the edge that rounding decides
    assert fit.metrics["overflow"] == float((answers >= 128.0).sum()) > 0
    assert all(value["val_overflow"] >= 0 for value in fit.validated.values())
    assert len(fit.validated) == 2
    calm = simulate.fit(["linear"], x / 60, y, epochs=1, test=0.25, reveal=["overflow"], **job)
    assert calm.metrics == {"overflow": 0.0}


def test_it_tells_of_gradients_that_adam_cannot_square() -> None:
    """Their noise moves weights by the rate at a time, so that nothing which comes out of a layer need be large."""
    x = RNG.normal(0, 1, (60, 4)).clip(-4, 4)
    job: dict[str, Any] = {"optimizer": "adam", "objective": "mse", "lr": 0.05, "batch": 20, "frac_bits": 24}
    told = ["overflow", "val_overflow"]
    fit = simulate.fit(["linear"], x, x.sum(1) * 100, epochs=2, test=0.25, validation=0.25, reveal=told, **job)
    assert fit.metrics["overflow"] > 0
    assert all(found["val_overflow"] > 0 for found in fit.validated.values())
    fewer = simulate.fit(
        ["linear"], x, x.sum(1) * 100, epochs=2, test=0.25, reveal=["overflow"], **job | {"frac_bits": 16}
    )
    assert fewer.metrics == {"overflow": 0.0}


def test_it_is_of_one_worker_a_party_and_of_enough_rows() -> None:
    model = model_to_json(model_of_list([{"linear": 4}, "relu", "linear"], 8, 2))
    job = {"model": model, "steps": 2, "batch": 8, "test_rows": 9, "reveal": ["overflow"]}
    fit_model(PrivateJob.from_json(job))
    with pytest.raises(ConfigError, match="reveal: 'overflow' on 2 workers"):
        fit_model(PrivateJob.from_json(job), workers=2, tensor=2)
    with pytest.raises(ConfigError, match=r"a number of 9 rows would be revealed, job\.min_rows is 10"):
        fit_model(PrivateJob.from_json(job | {"min_rows": 10}))
    fit_model(PrivateJob.from_json(job | {"verify": "proofs"}))
