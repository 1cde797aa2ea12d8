"""Bars scale with the machine, in the direction in which they are meant."""

from __future__ import annotations

import pytest

from uvcc_engine.contract.machine import calibration
from uvcc_engine.contract.machine.benchrows import held, row, to_text
from uvcc_engine.contract.machine.calibration import NOMINAL, BenchBar, Speed

HALF = Speed(NOMINAL.python / 2, NOMINAL.copy / 4, NOMINAL.append)


def test_a_slower_machine_is_asked_for_less() -> None:
    assert BenchBar(10, "python").scaled(HALF) == 20
    assert BenchBar(10, "python", at_least=True).scaled(HALF) == 5
    assert BenchBar(10, "copy").scaled(HALF) == 40
    assert BenchBar(10, "append").scaled(HALF) == 10
    assert BenchBar(10).scaled(HALF) == 10
    fast = Speed(NOMINAL.python * 2, NOMINAL.copy, NOMINAL.append)
    assert BenchBar(10, "python").scaled(fast) == 5


def test_rows_say_whether_the_scaled_bar_is_met() -> None:
    rows = [row("a", "seconds", "s", [15.0]), row("b", "rate", "x/s", [4.0]), row("c", "seconds", "s", [1.0])]
    bars = {("a", "seconds"): BenchBar(10, "python"), ("b", "rate"): BenchBar(10, "python", at_least=True)}
    a, b, c = calibration.judged(rows, bars, HALF)
    assert (a.bar, a.met) == (20, True)
    assert (b.bar, b.met) == (5, False)
    assert (c.bar, c.met) == (None, None)
    text = to_text([a, b, c]).splitlines()
    assert text[0].endswith("bar 20.000: met")
    assert text[1].endswith("bar 5.000: MISSED")
    assert "bar" not in text[2]


@pytest.mark.parametrize(("value", "at_least", "met"), [(1, False, True), (2, False, True), (3, False, False),
                                                        (1, True, False), (2, True, True)])  # fmt: skip
def test_a_bar_is_the_most_or_the_least(value: float, at_least: bool, met: bool) -> None:
    assert held(row("a", "seconds", "s", [value]), 2.0, at_least=at_least).met is met


def test_this_machine_is_measured() -> None:
    before = Speed(1e18, 1.0, 1.0)  # the better of both measurements counts
    found = {r.name: r.value for r in calibration.with_bars([], {}, before)}
    assert set(found) == {"machine_python", "machine_copy", "machine_append"}
    assert found["machine_python"] == 1e18
    assert found["machine_copy"] > 10
    assert found["machine_append"] > 100
