"""The accuracy table: quickly for the small model, in full by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.sets import load_digits
from uvcc_engine.owner.accuracy import JOBS, enlarge, main, measure


def test_enlarged_digits_are_the_digits() -> None:
    x = load_digits(7).test_x[:5]
    wide = enlarge(x).reshape(5, 28, 28)
    assert np.array_equal(wide[:, 3:26:3, 3:26:3].reshape(5, 64), x)
    assert (wide[:, :2] == x.min()).all()


@pytest.mark.ci("tests/engine/private/test_private_training.py")
def test_a_short_run_is_within_the_bar_and_a_worse_one_would_not_be() -> None:
    row = measure(PrivateJob(steps=16, batch=64, lr=0.2), load_digits(7))
    assert row.holds
    assert row.loss_gap < 2e-3
    assert 0.0 < row.nudged_gap < 2e-3
    assert row.clear > 70.0
    assert not replace(row, private=row.clear - 0.6).holds


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(JOBS))
def test_the_table_holds(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", name]) == 0
    assert json.loads(capsys.readouterr().out)["float_percent"] > 85.0
