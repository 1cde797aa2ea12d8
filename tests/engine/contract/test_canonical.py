"""The quick way to canonical JSON writes what the library for RFC 8785 writes, and leaves to it what it would not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import rfc8785
from hypothesis import given, settings
from hypothesis import strategies as st

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.parsing import canonical as module
from uvcc_engine.contract.parsing.canonical import canonical

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.binary(max_size=3)
KEYS = st.text(max_size=6) | st.sampled_from(["a", "é", "￿", "\U00010000", "\ud800", ""])
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=6
)


def library(value: Any) -> bytes | None:
    try:
        return rfc8785.dumps(value)
    except (rfc8785.CanonicalizationError, UnicodeEncodeError):
        return None


@settings(max_examples=60)
@given(VALUES)
def test_both_ways_write_the_same_bytes_or_refuse(value: Any) -> None:
    expected = library(value)
    quick = module.quick_canonical(value)
    assert quick is None or quick == expected
    if expected is not None:
        assert canonical(value) == expected


@pytest.mark.parametrize("number", [0.0, -0.0, 1.0, 1e21, 1e-7, 5e-324, 2**53 - 1, -(2**53) + 1, 123456.5, 0.0001])
def test_numbers_are_spelled_as_in_the_standard(number: float) -> None:
    assert canonical([number]) == rfc8785.dumps([number])


@pytest.mark.parametrize("value", [math.nan, math.inf, 2**53, -(2**53), b"x", {1: 2}, "\ud800", {"\ud800": 1}])
def test_what_json_cannot_carry_is_refused(value: Any) -> None:
    with pytest.raises((ConfigError, UnicodeEncodeError)):
        canonical(value)


def test_statements_take_the_quick_way() -> None:
    assert module.quick_canonical(
        {"values": {"loss": 2.301953125}, "epoch": 3, "seen": {}, "text": "é\x00\x1f\x7f\u2028"}
    )
