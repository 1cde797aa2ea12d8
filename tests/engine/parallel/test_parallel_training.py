"""Training on replicas, stages and tensor ranks equals training on one worker, up to one unit per update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from training_kit import check_replicas, train, weights

from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.model.learning.plaintext import train_plaintext
from uvcc_engine.owner.client import dataset_for

MLP = PrivateJob(steps=3, batch=16, lr=0.5, momentum=0.9, test_rows=50)
GPT = PrivateJob(model="gpt-tiny", steps=2, batch=4, lr=0.2, momentum=0.9, test_rows=5)
FIRST = Coord(0, 0, 0, 0)


@pytest.mark.parametrize(
    ("job", "size"),
    [
        (MLP, Topology(2)),
        (MLP, Topology(1, 2, 1, 4)),
        pytest.param(MLP, Topology(1, 1, 2, 2), marks=pytest.mark.ci(__file__)),
        pytest.param(MLP, Topology(2, 2, 2, 2), marks=pytest.mark.ci(__file__)),
        pytest.param(GPT, Topology(1, 1, 2, 2), marks=pytest.mark.ci(__file__)),
        pytest.param(GPT, Topology(1, 3, 1, 2), marks=pytest.mark.ci(__file__)),
    ],
    ids=lambda value: value.model if isinstance(value, PrivateJob) else str(value)[9:-1],
)
def test_every_way_of_splitting_trains_the_same_model(job: PrivateJob, size: Topology) -> None:
    found = train(job, size)
    clear = train_plaintext(replace(job, batch=job.batch * size.replicas), dataset_for(job))
    near, bits = (2e-3, 1e-3) if job is MLP else (2e-2, 2e-2)
    assert found[FIRST]["losses"] == pytest.approx(clear.losses, abs=near)
    assert abs(found[FIRST]["correct"] - clear.correct) <= 1
    for number, exact in enumerate(clear.weights):
        assert np.abs(weights(job, found, size)[number] - exact).max() < bits
    check_replicas(found)


@pytest.mark.parametrize(
    "size", [Topology(2), pytest.param(Topology(1, 2, 2, 2), marks=pytest.mark.ci(__file__))], ids=str
)
def test_weights_of_classes_and_rows_count_the_same_however_the_work_is_split(size: Topology) -> None:
    """A row's smoothed target is split over tensor ranks and replicas as any other; what it counts lies in it."""
    weighted: dict[str, Any] = {"class_weights": (3.0, *[1.0] * 8, 0.5), "label_smoothing": 0.1, "row_weights": True}
    job = replace(MLP, steps=2, **weighted)
    plain = dataset_for(MLP)
    data = replace(plain, weights=np.random.default_rng(3).uniform(0.0, 2.0, len(plain.train_x)))
    found = train(job, size, data=data)
    clear = train_plaintext(replace(job, batch=job.batch * size.replicas), data)
    assert found[FIRST]["losses"] == pytest.approx(clear.losses, abs=2e-3)
    for number, exact in enumerate(clear.weights):
        assert np.abs(weights(job, found, size)[number] - exact).max() < 1e-3
    check_replicas(found)


@pytest.mark.parametrize(
    "size",
    [
        Topology(1, 1, 2, 1),
        *(pytest.param(size, marks=pytest.mark.ci(__file__)) for size in (Topology(1, 2, 1, 2), Topology(2, 1, 2, 1))),
    ],
    ids=str,
)
def test_norms_are_cut_and_weights_decay_as_in_clear_however_the_work_is_split(size: Topology) -> None:
    """The norm is that of a weight's whole gradient, though every worker has a slice of it."""
    job = replace(MLP, steps=2, clip_norm=0.05, weight_decay=0.4)
    found = train(job, size)
    clear = train_plaintext(replace(job, batch=job.batch * size.replicas), dataset_for(job))
    free = train_plaintext(replace(job, batch=job.batch * size.replicas, clip_norm=0.0), dataset_for(job))
    for number, exact in enumerate(clear.weights):
        assert np.abs(weights(job, found, size)[number] - exact).max() < 1e-3
        assert np.abs(free.weights[number] - exact).max() > 1e-2  # it was cut
    check_replicas(found)


@pytest.mark.slow  # 24 processes
def test_a_gpt_on_all_three_axes_learns_a_poem_as_it_does_in_clear() -> None:
    job, size = replace(GPT, steps=8, batch=8, schedule="constant"), Topology(2, 2, 2, 2)
    found = train(job, size)
    clear = train_plaintext(replace(job, batch=job.batch * size.replicas), dataset_for(job))
    check_replicas(found)
    losses = found[FIRST]["losses"]
    assert losses == pytest.approx(clear.losses, abs=3e-2)
    assert losses[-1] < losses[0] - 0.5
    assert abs(found[FIRST]["correct"] - clear.correct) <= 2
