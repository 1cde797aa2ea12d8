"""The table of private beside clear training: one small case through the command, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from uvcc_engine.bench import tabular
from uvcc_engine.contract.errors import ConfigError

torch.set_num_threads(1)


def test_a_case_is_measured_beside_its_clear_twin(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    assert tabular.main(["--case", "diabetes_linear", "--runs", "2", "--json"]) == 0
    quality, behind, seconds, rounds, sent = json.loads(capsys.readouterr().out)
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


def test_a_vision_transformer_is_trained_on_shares_as_in_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    case = replace(tabular.CASES["digits_vit"], epochs=1, batch=718)  # two steps
    monkeypatch.setitem(tabular.CASES, "digits_vit", case)
    quality, behind, *_ = tabular.case_rows("digits_vit", [1])
    assert 0.0 < quality.value < 0.7  # two steps teach it little
    assert abs(behind.value) < 0.05


def test_an_unknown_case_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown case 'breast'"):
        tabular.main(["--case", "breast"])
