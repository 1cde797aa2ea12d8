"""Three parties as threads: arrays against NumPy, costs, scikit-learn's interface.

That a simulation has the numbers of a real run is tested beside the real runs (``test_private_worker.py``).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from private_kit import opened_digits

from uvcc_console.plan.plan import engine_job
from uvcc_console.plan.profile import parse
from uvcc_console.plan.schema import PrivateJobSettings
from uvcc_engine import simulate
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.sets import load_digits
from uvcc_engine.model.definition.specs import find_model
from uvcc_engine.model.learning.training import PrivateTrainer
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.owner.client import dataset_for

torch.set_num_threads(1)
JOB = PrivateJob(steps=4, batch=16, test_rows=100, reveal=("loss", "accuracy", "weights"))


@settings(deadline=None, max_examples=10)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**31))
def test_arrays_compute_what_numpy_computes(rows: int, inner: int, columns: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b, c = rng.normal(size=(rows, inner)), rng.normal(size=(inner, columns)), rng.normal(size=(rows, columns))
    x, y, z = (simulate.share(one) for one in (a, b, c))
    assert np.abs(simulate.open(x) - a).max() <= 2.0**-17
    got = simulate.open(simulate.relu(simulate.matmul(x, y) - z) * 0.5 + z * z + 1.0)
    assert np.abs(got - (np.maximum(a @ b - c, 0) * 0.5 + c * c + 1.0)).max() < 1e-3
    assert np.abs((x.sum(0) - y.sum(1)).open() - (a.sum(0) - b.sum(1))).max() < 1e-3
    assert np.abs(x.T.open() - a.T).max() <= 2.0**-17


def test_arrays_count_rounds_and_refuse_strangers() -> None:
    here, there = simulate.Parties(1), simulate.Parties(2)
    x = here.share(np.ones((2, 3)))
    assert (here.rounds, here.bytes_sent) == (0, 0)
    x @ x.T
    assert here.rounds == 2
    assert here.bytes_sent == 4 * 40  # 40 bytes an output
    with pytest.raises(ConfigError, match="different parties"):
        x + there.share(np.ones((2, 3)))
    with pytest.raises(ConfigError, match="does not fit the ring"):
        here.share([2.0**40])


def test_to_watch_a_training_changes_nothing_and_every_round_is_counted() -> None:
    job = replace(JOB, model="cnn-digits", steps=2)
    inputs = opened_digits(job)

    def body(rt: Runtime) -> tuple[list[float | None], int, int]:
        trainer, losses = PrivateTrainer(rt, job, find_model(job.model), inputs[rt.party]), []
        for step in range(job.steps):
            rt.begin_epoch(step)
            losses.append(trainer.step(step).loss)
        return losses, rt.rounds, rt.bytes_sent

    plain = LocalPlanes(job.seed).run_three(body)
    seen = simulate.train(job, load_digits(job.seed, job.test_rows))
    assert list(seen.losses) == plain[0][0]
    assert (seen.rounds, seen.bytes_sent) == (plain[0][1], sum(p[2] for p in plain))
    by_name = {one.layer: one for one in seen.layers}
    assert list(by_name) == ["0 conv2d", "1 relu", "2 pool", "3 dense"]
    assert by_name["0 conv2d"].rounds == {"forward": 0.0, "backward": 0.0, "update": 2.0}  # fused; the lowest layer
    assert 3.0 <= by_name["1 relu"].rounds["forward"] <= 6.0
    assert by_name["3 dense"].rounds == {"forward": 0.0, "backward": 2.0, "update": 2.0}  # fused with the maximum
    counted = sum(sum(one.bytes.values()) for one in seen.layers) * job.steps
    assert 0.5 * seen.bytes_sent < counted < seen.bytes_sent
    assert 0.1 < by_name["1 relu"].largest < 20
    assert by_name["1 relu"].headroom == pytest.approx(30 - np.log2(by_name["1 relu"].largest))
    assert "1 relu" in seen.report()


def test_fit_learns_and_tells_its_progress() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(240, 6))
    y = np.where(x[:, 0] * x[:, 1] > 0, "same", "other")
    told: list[tuple[int, int]] = []
    layers = [{"linear": 12}, "relu", "linear"]
    made = simulate.fit(
        layers, x, y, epochs=10, batch=48, lr=0.5, progress=lambda done, of, loss: told.append((done, of))
    )
    assert made.classes == ("other", "same")
    assert made.accuracy > 0.8
    assert made.losses[-1] < made.losses[0] / 2
    assert told == [(n + 1, made.job.steps) for n in range(made.job.steps)]
    assert (made.predict(x) == y).mean() > 0.85
    assert np.allclose(made.predict_proba(x).sum(1), 1.0)


def test_a_fit_writes_the_profile_that_runs_it_for_real(tmp_path: Path) -> None:
    """The console reads it, and the owner's program finds the very rows in the file."""
    x, y = np.random.default_rng(2).normal(size=(50, 4)), np.arange(50) % 3
    made = simulate.fit([{"linear": 5}, "relu", "linear"], x, y, steps=2, batch=10)
    np.savez(tmp_path / "rows.npz", x=x, y=y)
    profile = parse(yaml.safe_load(made.profile(str(tmp_path / "rows.npz"))))
    assert isinstance(profile.job, PrivateJobSettings)
    job = PrivateJob.from_json(engine_job(profile.job, profile.job.steps))
    assert job == made.job
    data = dataset_for(job, Path(profile.job.data))
    assert np.array_equal(data.train_x, made.data.train_x)
    assert np.array_equal(data.test_y, made.data.test_y)
    with pytest.raises(ConfigError, match="holds classes"):
        simulate.fit(["linear"], x, y * 1.0, steps=1, objective="mse").profile("rows.npz")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": np.ones(4)}, "features of shape"),
        ({"y": [0, 1]}, "one label per row"),
        ({"epochs": None}, "epochs or steps"),
        ({"x": np.full((4, 2), np.nan)}, "not finite"),
        ({"model": ["lineer"]}, "did you mean 'linear'"),
        ({"frac_bits": 3}, "fractional bits"),
        ({"sead": 3}, "did you mean 'seed'"),
        ({"y": None}, "rows without labels, and a list of layers"),
        ({"y": None, "model": "mlp-digits"}, "rows without labels, and mlp-digits"),
        ({"y": None, "model": torch.nn.Linear(2, 2)}, "rows without labels, and a module"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_computed(change: dict[str, object], words: str) -> None:
    arguments = {"model": ["linear"], "x": np.eye(4)[:, :2], "y": [0, 1, 0, 1], "epochs": 1} | change
    with pytest.raises(ConfigError, match=words) as caught:
        simulate.fit(arguments.pop("model"), arguments.pop("x"), arguments.pop("y"), test=0.25, **arguments)  # type: ignore[arg-type]
    assert str(caught.value)


def test_the_classifier_is_one_of_scikit_learns() -> None:
    base = pytest.importorskip("sklearn.base")
    selection = pytest.importorskip("sklearn.model_selection")
    rng = np.random.default_rng(1)
    x = rng.normal(size=(90, 3))
    y = (x @ [1.0, -2.0, 0.5] > 0).astype(int)
    made = simulate.PrivateClassifier(["linear"], epochs=6, batch=30, lr=0.5)
    copy = base.clone(made)
    assert copy.get_params() == made.get_params()
    assert selection.cross_val_score(copy, x, y, cv=2).min() > 0.85
    with pytest.raises(ConfigError, match="no parameter 'depth'"):
        made.set_params(depth=2)
    with pytest.raises(ConfigError, match="not fitted"):
        made.predict(x)


def test_trees_and_clusters_are_estimators_of_scikit_learns_too() -> None:
    base = pytest.importorskip("sklearn.base")
    selection = pytest.importorskip("sklearn.model_selection")
    x = np.random.default_rng(1).normal(size=(60, 2))
    y = np.where(x[:, 0] > 0, "right", "left")
    search = selection.GridSearchCV(simulate.PrivateTrees(1, n_bins=4), {"max_depth": [1, 2]}, cv=2).fit(x, y)
    assert search.best_score_ > 0.7
    groups = base.clone(simulate.PrivateKMeans(2, max_iter=2, n_init=1))
    assert groups.get_params()["max_iter"] == 2
    assert base.is_clusterer(groups)
    assert len(groups.fit_predict(x)) == 60
    with pytest.raises(ConfigError, match="PrivateKMeans has no parameter 'k'"):
        groups.set_params(k=2)


def test_few_rounds_are_paid_in_bytes_and_give_the_same_curve() -> None:
    x, y = np.random.default_rng(3).normal(size=(60, 4)), np.arange(60) % 3
    few, sparing = (
        simulate.fit([{"linear": 8}, "relu", "linear"], x, y, steps=2, batch=10, rounds=rounds)
        for rounds in ("few", "sparing")
    )
    assert few.rounds < sparing.rounds
    assert few.bytes_sent > sparing.bytes_sent
    assert np.allclose(few.losses, sparing.losses, atol=1e-3)
    assert "rounds: sparing" in sparing.profile("rows.npz")
