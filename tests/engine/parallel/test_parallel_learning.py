"""Adam, validation, every metric and every objective over several workers, beside the same training in clear."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_parallel_worker import same_end
from training_kit import check_replicas, train, weights

from uvcc_engine.bench.launch.fleet import Fleet, Forker, until
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.contract.run_files.control import HALT, HOLD
from uvcc_engine.data.sets import Dataset, load_digits
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.model.learning.plaintext import train_plaintext
from uvcc_engine.sharding.validation import fit_model

FIRST = Coord(0, 0, 0, 0)
RNG = np.random.default_rng(8)
ROWS = RNG.normal(size=(90, 6))
TRUTH = ROWS @ np.array([1.0, -1.0, 0.5, 0.0, 0.0, 0.3])
UNIT = 2.0**-16


def rows(y: Any, classes: int) -> Dataset:
    return Dataset(ROWS[:50], y[:50], ROWS[50:70], y[50:70], classes, ROWS[70:], y[70:])


def job_of(layers: list[Any], classes: int, **more: Any) -> PrivateJob:
    model = model_to_json(model_of_list(layers, 6, classes))
    told = {"model": model, "steps": 3, "batch": 8, "lr": 0.1, "test_rows": 20, "val_rows": 20, "val_every": 2}
    return PrivateJob.from_json(told | {key: list(v) if isinstance(v, tuple) else v for key, v in more.items()})


def alike(ours: Mapping[str, float], theirs: Mapping[str, float]) -> None:
    """The same numbers by name; for ``auc`` scores count in quarters, so that pairs of a few rows may be ties."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, abs=0.05 if "auc" in name else 1e-2), name


def beside_its_twin(job: PrivateJob, size: Topology, data: Dataset, near: int) -> None:
    """Weights within ``near`` units of the float64 training's; losses, validation and metrics by name and value."""
    fit_model(
        job,
        workers=2,
        replicas=size.replicas,
        stages=size.stages,
        tensor=size.tensor,
        microbatches=size.microbatches,
    )
    found = train(job, size, data=data)
    clear = train_plaintext(replace(job, batch=job.batch * size.replicas), data)
    check_replicas(found)
    first = found[FIRST]
    assert len(first["losses"]) == clear.steps
    assert first["losses"] == pytest.approx(clear.losses, abs=4e-3)
    assert first["validated"].keys() == clear.validated.keys() != set()
    for step, values in clear.validated.items():
        alike(first["validated"][step], values)
    alike(first["metrics"], clear.metrics)
    for ours, theirs in zip(weights(job, found, size), clear.weights, strict=True):
        assert np.abs(ours - theirs).max() < near * UNIT


@pytest.mark.parametrize(
    ("size", "more"),
    [
        (Topology(2, 1, 1, 2), {"weight_decay": 0.2}),
        pytest.param(Topology(1, 2, 2, 1), {"clip_norm": 0.3}, marks=pytest.mark.ci(__file__)),
    ],
    ids=str,
)
def test_adam_and_validation_are_those_in_clear_however_the_work_is_split(size: Topology, more: dict[str, Any]) -> None:
    """With decay it is AdamW. Every replica has the same moments in the end; all metrics of two classes are told."""
    reveal = ("loss", "accuracy", "confusion", "auc", "precision", "recall", "perplexity", "val_loss", "val_auc")
    job = job_of([{"linear": 8}, "relu", "linear"], 2, optimizer="adam", momentum=0.9, reveal=reveal, **more)
    beside_its_twin(job, size, rows((TRUTH > 0).astype(np.int64), 2), 200)


@pytest.mark.parametrize(
    ("objective", "y", "size", "reveal", "more"),
    [
        ("mse", TRUTH, Topology(2, 1, 1, 1), ("loss", "rmse", "r2", "val_loss", "val_r2"), {}),
        pytest.param(
            "huber", TRUTH, Topology(2, 1, 1, 2), ("loss", "rmse", "val_loss"), {}, marks=pytest.mark.ci(__file__)
        ),
        ("poisson", RNG.poisson(np.exp(0.4 * TRUTH)).astype(float), Topology(1, 1, 1, 2), ("loss", "val_rmse"), {}),
        ("binary", (TRUTH > 0).astype(float), Topology(2, 1, 1, 1), ("accuracy", "auc", "val_accuracy"), {}),
    ],
)
def test_objectives_of_one_output_over_replicas_and_microbatches(
    objective: str, y: Any, size: Topology, reveal: tuple[str, ...], more: dict[str, Any]
) -> None:
    job = job_of(["linear"], 1, objective=objective, reveal=("loss", *reveal[1:], reveal[0]), momentum=0.5, **more)
    beside_its_twin(job, size, rows(y, 1), 64)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"reveal": ("overflow",)}, "job.reveal: 'overflow' on 2 workers"),
        ({"reveal": ("val_overflow",), "val_rows": 9}, "job.reveal: 'val_overflow' on 2 workers"),
        ({"standardise": True}, "job.standardise True on 2 workers"),
        ({"val_rows": 1, "reveal": ("val_loss",)}, "job.val_rows is 1: 0 lines for a replica's 1 tensor ranks"),
    ],
)
def test_what_several_workers_do_not_do_is_refused_by_name(change: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        fit_model(replace(PrivateJob(), **change), workers=2, replicas=2)


# -- real workers, each a process ----------------------------------------------------------------------------------

SIZE = Topology(2, 1, 1, 1)
JOB = PrivateJob(
    model="logistic-digits",
    steps=30,
    batch=8,
    lr=0.3,
    momentum=0.9,
    optimizer="adam",
    schedule="constant",
    checkpoint_every=4,
    test_rows=100,
    val_rows=120,
    val_every=2,
    patience=1,
    keep_best=True,
    reveal=("loss", "accuracy", "val_loss", "val_accuracy"),
)
"""A rate so high that validation soon stops falling."""


def test_a_run_of_two_replicas_ends_early_where_it_does_in_clear(whole: Fleet, tmp_path: Path) -> None:
    clear = train_plaintext(replace(JOB, batch=2 * JOB.batch), load_digits(JOB.seed, JOB.test_rows, JOB.val_rows))
    assert clear.steps < JOB.steps
    for c in whole.coords:
        assert whole.exit(c)["step"] == clear.steps
        assert whole.events(c, "training_ended_early") == [{"step": clear.steps, "of": JOB.steps, "patience": 1}]
        lines = (whole.dir(c) / "val.csv").read_text().splitlines()
        told = {int(one.split(",")[0]): float(one.split(",")[2]) for one in lines[1:]}
        assert told == pytest.approx({step: v["val_loss"] for step, v in clear.validated.items()}, abs=0.02)
    assert whole.verified(tmp_path / "bundle").epochs == clear.steps + 1


@pytest.mark.ci("tests/engine/parallel/test_parallel_worker.py")
def test_a_halt_changes_nothing_of_a_run_that_ends_early(forker: Forker, whole: Fleet, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "fleet", forker, JOB, SIZE)
    fleet.launch(halt=(HOLD, Coord(1, 2, 0, 0)))
    until(lambda: all(fleet.events(c, "held") for c in fleet.coords), 500, "the hold")  # they train by then
    fleet.halt(HALT, FIRST, "n2")
    assert set(fleet.wait().values()) == {0}, fleet.logs()
    assert {fleet.exit(c)["status"] for c in fleet.coords} == {"halted"}
    fleet.launch(resume=True)
    assert set(fleet.wait().values()) == {0}, fleet.logs()
    same_end(fleet, whole)
    for c in whole.coords:
        assert (fleet.dir(c) / "val.csv").read_text() == (whole.dir(c) / "val.csv").read_text()
