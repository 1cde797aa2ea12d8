"""Data, job and the clear reference."""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.sets import DIGITS_FILE, Dataset, batch_rows, load_digits, permutation
from uvcc_engine.model.definition.specs import find_model, initial_weights
from uvcc_engine.model.learning.plaintext import train_plaintext


def test_packaged_digits_are_scikit_learns_copy() -> None:
    if (found := importlib.util.find_spec("sklearn")) is None or found.origin is None:
        pytest.skip("could not import 'sklearn.datasets'")
    # its file alone: to import the module takes as long as many tests
    theirs = np.loadtxt(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    ours = load_digits(3)
    assert len(ours.train_x) + len(ours.test_x) == 1797
    order = permutation("split", 3, 0, 1797)
    assert np.array_equal(np.concatenate([ours.test_x, ours.train_x]) * 8 + 5, theirs[order, :-1])
    assert np.array_equal(np.concatenate([ours.test_y, ours.train_y]), theirs[order, -1])
    assert (DIGITS_FILE.parent / "README.md").read_text().count("CC BY 4.0") == 1


def test_features_are_exact_in_fixed_point() -> None:
    scaled = load_digits(0).train_x * 2**16
    assert np.array_equal(scaled, np.rint(scaled))


def test_split_is_a_function_of_the_seed_and_disjoint() -> None:
    one, same, other = load_digits(1), load_digits(1), load_digits(2)
    assert np.array_equal(one.test_x, same.test_x)
    assert not np.array_equal(one.test_y, other.test_y)
    order = permutation("split", 1, 0, 1797)
    assert sorted(order.tolist()) == list(range(1797))


def test_batches_walk_through_every_row_once_per_pass() -> None:
    rows = np.concatenate([batch_rows(5, step, 64, 160) for step in range(5)])
    assert rows.shape == (320,)
    assert sorted(rows[:160].tolist()) == list(range(160))
    assert sorted(rows[160:].tolist()) == list(range(160))
    assert not np.array_equal(rows[:160], rows[160:])
    assert len(batch_rows(5, 0, 400, 160)) == 400  # a batch larger than the data wraps


def test_public_stream_is_pinned() -> None:
    # what a policy means may not change between versions: batches and initial weights are part of it
    digest = hashlib.sha256()
    digest.update(batch_rows(7, 3, 128, 1437).astype("<i8").tobytes())
    for weight in initial_weights(find_model("mlp-digits"), 7, 16):
        digest.update(np.rint(weight * 2**16).astype("<i8").tobytes())
    assert digest.hexdigest() == "9f6176993381af8bccd3920309e9d521c3a9206cf482cc986b630e71f1cce708"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"stepz": 3}, "did you mean 'steps'"),
        ({"model": "mlp-digit"}, "did you mean 'mlp-digits'"),
        ({"reveal": ["los"]}, "did you mean 'loss'"),
        ({"steps": "many"}, "must be a whole number"),
        ({"steps": True}, "must be a whole number"),
        ({"steps": 0}, "at least 1"),
        ({"lr": float("nan")}, "a finite number"),
        ({"kind": "lm"}, "kind"),
        ({"frac_bits": 40}, "fractional bits"),
        ({"momentum": 1.0}, "momentum"),
    ],
)
def test_a_wrong_job_is_refused_and_says_what_to_write(found: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        find_model(PrivateJob.from_json(found).model)
    assert words in str(error.value)


def test_job_survives_json() -> None:
    job = PrivateJob(steps=3, reveal=("loss",), lr=0.25)
    assert PrivateJob.from_json(job.to_json()) == job
    assert PrivateJob.from_json({"lr": 1}).lr == 1.0


def test_schedule_and_reveal_points() -> None:
    job = PrivateJob(steps=10, lr=1.0, loss_every=4)
    assert [round(job.lr_at(s), 3) for s in (0, 5, 9)] == [1.0, 0.5, 0.1]
    assert [s for s in range(10) if job.reveals_loss(s)] == [0, 4, 8, 9]
    assert not replace(job, reveal=("accuracy",)).reveals_loss(0)


def test_clear_training_reaches_the_bar() -> None:
    results = [train_plaintext(PrivateJob(seed=s), load_digits(s)) for s in range(4)]
    assert min(r.accuracy for r in results) >= 0.945
    assert all(r.losses[-1] < 0.35 < 2.0 < r.losses[0] for r in results)


def test_misfitting_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="labels"):
        Dataset(np.zeros((2, 3)), np.array([0, 9]), np.zeros((1, 3)), np.array([0]), classes=4)
    with pytest.raises(ConfigError, match="do not fit"):
        Dataset(np.zeros((2, 3)), np.array([0]), np.zeros((1, 3)), np.array([0]), classes=4)
