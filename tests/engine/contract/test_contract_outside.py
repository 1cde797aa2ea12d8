"""Text and values from elsewhere: what is kept, what is not, and that no value there is makes a reader raise."""

from __future__ import annotations

import json
import math
import time
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uvcc_engine.contract.errors import UvccError, VerificationError
from uvcc_engine.contract.parsing import untrusted
from uvcc_engine.contract.text import clean, clean_block, in_markdown

ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


@pytest.mark.parametrize(
    ("raw", "kept"),
    [
        ("plain words", "plain words"),
        ("größer – 模型 🚀 é", "größer – 模型 🚀 é"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07rest", "rest"),
        ("\x1b]52;c;aGVsbG8=\x1b\\rest", "rest"),
        ("\x9b31mred \x9d0;t\x9cx", "red x"),
        ("\x1bP1$r\x1b\\x\x1b_a\x1b\\y", "xy"),
        ("\x1bc\x1b(Bx\x1b7", "x"),
        ("a\nb\r\nc\td\u2028e\u2029f\x0bg\x85h", "a b  c d e f g h"),
        ("pay\u202egpj.exe\u2066x\u2069", "paygpj.exex"),
        ("to\u200bken\ufeff\u2060\u00ad", "token"),
        ("\ud800x\x00\x7f\x80", "x"),
        ("unfinished \x1b]0;", "unfinished ]0;"),
        ("\U000e0041tag\ue000", "tag\ufffd"),
        ("a\u00a0b", "a b"),
    ],
)
def test_what_a_terminal_would_obey_is_gone_and_words_stay(raw: str, kept: str) -> None:
    assert clean(raw) == kept


def test_a_block_keeps_its_lines_and_nothing_else() -> None:
    assert clean_block("a\n\tb\x1b[2J\u202e\r\n") == "a\n\tb \n"


def test_length_is_bounded_and_the_cut_is_marked() -> None:
    assert clean("x" * 100, 10) == "x" * 9 + "…"
    assert len(clean("\x1b[31m" * 10_000 + "x", 10)) <= 10


@given(st.text())
def test_every_text_comes_out_printable(text: str) -> None:
    for found in (clean(text), clean_block(text).replace("\n", "").replace("\t", "")):
        assert found == "" or found.isprintable()
        assert not any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in found)
    assert clean(clean(text)) == clean(text)


def test_cleaning_takes_time_in_proportion_to_the_text() -> None:
    began = time.process_time()
    for bad in ("\x1b]", "\x1b[", "\x1bP", "\x1b[0;", "\x9d", "\x90", "\x9b0", "\x1b[" + "0" * 50, "\x1b]0;\x1b"):
        clean_block(bad * 100_000)
    assert time.process_time() - began < 10


def test_errors_say_nothing_that_a_terminal_obeys() -> None:
    error = VerificationError("root\x1b[2J", "epoch \u202e3", "ask\x07")
    assert (error.what, error.hint, error.check) == ("root: epoch 3", "ask", "root")
    assert str(UvccError("a\x1b]0;t\x07b")) == "ab"
    lines = VerificationError("a\nb", "c\nd", "e\nf")
    assert (str(lines), lines.check, lines.finding) == ("a b: c d (e f)", "a b", "c d")


@pytest.mark.parametrize(
    ("raw", "kept"),
    [
        ("<= 20 s, 1 < 2 (so)", "<= 20 s, 1 < 2 (so)"),
        ("<img src=x> </b><!-- <?", "\\<img src=x> \\</b>\\<!-- \\<?"),
        ("![a](http://x) [a][b]", "![a]\\(http://x) [a][b]"),
        ("a|b", "a\\|b"),
        ("\\<b> \\\\| \\n", "\\\\\\<b> \\\\\\\\\\| \\n"),
        ("\x1b[31m<b>\n# c", "\\<b> # c"),
    ],
)
def test_a_text_in_markdown_stays_text(raw: str, kept: str) -> None:
    assert in_markdown(raw) == kept


@given(ANY)
def test_no_value_makes_a_reader_raise(value: object) -> None:
    n, x = untrusted.as_int(value), untrusted.as_float(value)
    assert n is None or (type(n) is int and 0 <= n <= untrusted.WIDE)
    assert x is None or (type(x) is float and math.isfinite(x))
    assert untrusted.as_text(value, 5) is None or len(untrusted.as_text(value, 5) or "") <= 5
    assert isinstance(untrusted.scalar_text(value), str)
    kept = untrusted.bounded_copy({"k": value}, nodes=20, depth=3)
    assert len(json.dumps(kept)) < 200_000
    json.dumps(untrusted.without_nan(value), allow_nan=False)


@pytest.mark.parametrize("value", [True, "3", None, [3], {"a": 3}, math.nan, math.inf, 1.5, -1, 1 << 70, 1e300])
def test_what_is_no_whole_number(value: object) -> None:
    assert untrusted.as_int(value) is None


@pytest.mark.parametrize("value", [False, "1.0", None, [], math.nan, -math.inf, 10**400])
def test_what_is_no_number(value: object) -> None:
    assert untrusted.as_float(value) is None


@pytest.mark.parametrize("text", ["[" * 200_000, "9" * 5000, "{", "", '"\\', b"\xff\xfe\x00", "{" * 1_100_000])
def test_texts_that_are_no_json(text: str | bytes) -> None:
    assert untrusted.as_object(text) is None
    with pytest.raises(ValueError):
        untrusted.load_json(text)


def test_a_copy_is_bounded_in_depth_width_and_text() -> None:
    deep: dict[str, object] = {}
    inner = deep
    for _ in range(500):
        inner["in"] = inner = {}
    wide = {f"k{i}": ["x" * 1000] * 1000 for i in range(1000)}
    assert len(json.dumps(untrusted.bounded_copy(deep))) < 100
    assert len(json.dumps(untrusted.bounded_copy(wide))) < 40_000
    assert untrusted.bounded_copy({"a\x1b[1m": "b\n", "n": 10**30, "f": math.inf}) == {
        "a": "b ",
        "n": None,
        "f": math.inf,
    }
