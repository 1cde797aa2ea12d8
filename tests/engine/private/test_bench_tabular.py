"""The table of private beside clear training: one small case through the command, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from uvcc_engine.bench import tabular
from uvcc_engine.contract.errors import ConfigError

torch.set_num_threads(1)


@pytest.mark.ci(__file__)
def test_a_case_is_measured_beside_its_clear_twin(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    assert tabular.main(["--case", "diabetes_linear", "--runs", "2", "--json"]) == 0
    out, told = capsys.readouterr()
    quality, behind, seconds, step, rounds, sent = json.loads(out)
    assert "diabetes_linear, seed 1: 1 of 45 steps" in told
    assert "diabetes_linear, seed 2: 45 of 45 steps" in told
    assert seconds["value"] == pytest.approx(step["value"] * 45 / 8, rel=0.5)
    assert quality["name"] == "diabetes_linear"
    assert quality["runs"] == 2
    assert behind["met"] is True
    assert -0.01 < behind["min"] <= behind["max"] < 0.01
    assert 0.99 < quality["ratio"] < 1.01
    assert quality["value"] != quality["reference"]  # two computations, not one number told twice
    assert rounds["value"] == 4.0
    assert seconds["value"] > 0
    assert sent["value"] > 1000


def test_features_and_targets_are_scaled_by_the_training_rows() -> None:
    pytest.importorskip("sklearn")
    data = tabular.dataset("diabetes", 3, real=True, single=False)
    assert (len(data.train_x), len(data.test_x), data.classes) == (354, 88, 1)
    assert np.allclose([data.train_x.mean(), data.train_y.mean(), data.train_y.std()], [0, 0, 1])
    assert abs(data.test_y.mean()) > 1e-6


def test_made_up_cover_types_can_be_learned_but_for_what_is_noise() -> None:
    data = tabular.covertype(3, 4_000)
    assert (data.train_x.shape, data.test_x.shape, data.classes) == ((3200, 54), (800, 54), 7)
    assert np.array_equal(data.train_x[:, 10:14].sum(1), np.ones(3200))
    assert np.array_equal(data.train_x[:, 14:].sum(1), np.ones(3200))
    ways = np.bincount(data.train_y, minlength=7) / 3200
    assert 0.015 < ways.min() <= ways.max() < 0.6


@pytest.mark.ci(__file__)
def test_a_vision_transformer_is_trained_on_shares_as_in_clear() -> None:
    pytest.importorskip("sklearn")
    case = replace(tabular.CASES["digits_vit"], epochs=1, batch=718)  # two steps
    seed = tabular.one_seed("digits_vit", case, 1, tabular.TableProgress())
    quality, behind, *_ = tabular.case_rows("digits_vit", case, [seed])
    assert 0.1 < quality.value < 0.9  # two steps teach it something
    assert abs(behind.value) < 0.05


@pytest.mark.parametrize(("seed", "names"), [(1, {"diabetes_linear_step"}), (2, {"diabetes_linear"})])
def test_a_signal_ends_it_after_the_step_and_what_is_done_is_printed(
    seed: int, names: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    before, step = signal.getsignal(signal.SIGTERM), tabular.TableProgress.step
    trained: list[int] = []

    def told(self: tabular.TableProgress, done: int, steps: int, loss: float | None) -> None:
        trained.append(done)
        if trained.count(3) == seed and done == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            while not self._asked:  # the main thread hears it
                time.sleep(0.001)
        step(self, done, steps, loss)

    monkeypatch.setattr(tabular.TableProgress, "step", told)
    asked = ["--case", "diabetes_linear", "--case", "wine_mlp", "--runs", "5", "--epochs", "1", "--json"]
    assert tabular.main(asked) == 1
    out, err = capsys.readouterr()
    rows = json.loads(out)
    assert names <= {one["name"] for one in rows}
    assert len(rows) == (1 if seed == 1 else 6)
    assert {one["runs"] for one in rows} == {1}
    assert f"diabetes_linear, seed {seed}: 3 of 6 steps" in err
    assert "stopped" in err
    assert trained[-1] == 3
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_in_the_training_in_clear_is_not_waited_for() -> None:
    watch = tabular.TableProgress()
    watch.begin("made up")
    watch.stop(signal.SIGTERM, None)  # in the middle of a step
    with pytest.raises(tabular.StoppedError):
        watch.step(1, 2, None)
    again = tabular.TableProgress()
    again.begin("made up")
    again.step(2, 2, None)
    with pytest.raises(tabular.StoppedError):
        again.stop(signal.SIGTERM, None)


def test_an_unknown_case_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown case 'breast'"):
        tabular.main(["--case", "breast"])
    with pytest.raises(ConfigError, match="--runs takes a whole number of at least 1"):
        tabular.main(["--runs", "0"])
