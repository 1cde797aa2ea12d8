"""The power with which a cost grows is found, whatever its constant, and one above what is allowed misses its bar."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uvcc_engine.contract.machine.growth import TOLERANCE, fitted, growth_rows


@given(power=st.floats(0.0, 3.0), factor=st.floats(1e-3, 1e6))
def test_a_pure_power_is_found_exactly(power: float, factor: float) -> None:
    found = fitted([(x, factor * x**power) for x in (3.0, 7.0, 40.0, 500.0)])
    assert (found.exponent, found.low, found.high) == pytest.approx((power, power, power), abs=1e-6)


def test_a_constant_hides_little_of_the_upper_half() -> None:
    square = fitted([(x, 1000 + x * x) for x in (24.0, 192.0, 1000.0, 10_000.0)])
    assert square.exponent > 1.9
    line = fitted([(x, 1000 + 3 * x) for x in (24.0, 192.0, 1000.0, 10_000.0)])
    assert 0.5 < line.exponent <= 1.0


def test_a_cost_that_grows_too_fast_misses_its_bar_and_one_that_does_not_meets_it() -> None:
    found = [(x, {"linear": 5 * x, "square": x * x, "steady": 7.0}) for x in (1.0, 10.0, 100.0)]
    allowed = {"linear": 1.0, "square": 1.0, "steady": 0.0}
    rows = growth_rows("rows", found, allowed, dict.fromkeys(allowed, "B"))
    met = {row.name: row.met for row in rows if row.metric == "power"}
    assert met == {"rows_linear": True, "rows_square": False, "rows_steady": True}
    each = {row.name: row.value for row in rows if row.metric == "each"}
    assert each == {"rows_linear": 5.0, "rows_square": 110.0, "rows_steady": 0.0}
    costs = {row.name: row.value for row in rows if row.metric == "cost"}
    assert costs["rows_square@100"] == 10_000
    assert next(row.bar for row in rows if row.name == "rows_linear") == 1.0 + TOLERANCE


@pytest.mark.parametrize("points", [[(1, 1), (2, 2)], [(1, 1), (1, 2), (3, 3)], [(1, 1), (2, 0), (3, 3)]])
def test_what_says_nothing_of_growth_is_refused(points: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="growth takes"):
        fitted(points)
