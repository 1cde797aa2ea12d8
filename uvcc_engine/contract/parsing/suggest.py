"""What somebody probably meant: the one place that compares words."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

CLOSE = 0.6  # a likeness that a slip of the finger leaves
LONGEST = 80  # of a word that is compared; a longer one is nobody's typing
LISTED = 12  # words that are named where none is near


def nearest(word: str, known: Iterable[str], cutoff: float = 0.0) -> str:
    """The known word most like ``word``, or "" if none is as like as ``cutoff``: 0 takes any, 1 the same word only."""
    close = difflib.get_close_matches(word[:LONGEST], list(known), n=1, cutoff=cutoff)
    return close[0] if close else ""


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "", cutoff: float = CLOSE) -> str:
    """A hint that names the nearest of the known words; where none is near ``otherwise``, or some of the known ones."""
    words = list(known)
    near = nearest(word, words, cutoff)
    return f"did you mean {near!r}?" if near else otherwise or known_words(words)


def known_words(known: Iterable[str]) -> str:
    """A hint that lists the known words, as many as one reads."""
    words = list(known)
    more = f" and {len(words) - LISTED} more" if len(words) > LISTED else ""
    return f"there are {', '.join(words[:LISTED])}{more}" if words else ""
