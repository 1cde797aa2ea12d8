"""The table of private beside clear training: one small case through the command, and what it refuses."""

from __future__ import annotations

import json

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


def test_an_unknown_case_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown case 'breast'"):
        tabular.main(["--case", "breast"])
