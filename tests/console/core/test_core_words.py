"""No surface shows a value as a program spells it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uvcc_console.core import events as ev
from uvcc_console.core.alerts.quality import differing
from uvcc_console.core.state import fold
from uvcc_console.core.words import engine_words, value_words

PYTHON = re.compile(r"\bTrue\b|\bFalse\b|\bNone\b|'")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(["a", "bf16"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["k", "v"]), inner, max_size=2),
    max_leaves=6,
)


@given(VALUES)
def test_no_value_is_spelt_as_a_program_spells_it(value: Any) -> None:
    assert not PYTHON.search(value_words(value))
    assert not PYTHON.search(" ".join(engine_words("something_new", {"coord": "p0", "what": value})))
    settings = ev.SettingsChanged(changes={"ddp.shard": value, "runtime.compile": True}, by="ada")
    assert not PYTHON.search(fold([settings]).log[-1].text)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (True, "true"),
        (None, "null"),
        ([1, 2.5, False], "[1, 2.5, false]"),
        ({"op": "sum", "late": None}, "{op: sum, late: null}"),
        ("bf16", "bf16"),
    ],
)
def test_it_is_spelt_as_a_file_spells_it(value: Any, said: str) -> None:
    assert value_words(value) == said
    assert engine_words("something_new", {"what": value})[0] == f"something_new what={said}"
    assert differing({"x": value}, {"x": 7}) == [f"x is 7, planned {said}"]
