"""What somebody probably meant, and the known words where that is nobody's guess."""

from __future__ import annotations

import pytest

from uvcc_engine.contract.parsing.suggest import LISTED, did_you_mean, known_words


@pytest.mark.parametrize(
    ("word", "known", "said"),
    [
        ("stpes", ["steps", "batch"], "did you mean 'steps'?"),
        ("city", ["age", "weight"], "there are age, weight"),
        ("aws", ["vast", "lambda"], "there are vast, lambda"),
        ("anything", [], ""),
        ("x" * 10_000, ["age"], "there are age"),
    ],
)
def test_only_what_is_near_is_asked_for(word: str, known: list[str], said: str) -> None:
    assert did_you_mean(word, known) == said


def test_of_many_some_are_listed_and_what_else_is_to_be_done_comes_first() -> None:
    many = [f"column{n:02}" for n in range(LISTED + 3)]
    assert known_words(many).endswith(f"column{LISTED - 1:02} and 3 more")
    assert did_you_mean("zzz", many, "remove it") == "remove it"
