"""What somebody probably meant: the one place that compares words."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

CLOSE = 0.6  # a likeness that a slip of the finger leaves
LONGEST = 80  # of a word that is compared; a longer one is nobody's typing


def nearest(word: str, known: Iterable[str], cutoff: float = 0.0) -> str:
    """The known word most like ``word``, or "" if none is as like as ``cutoff``: 0 takes any, 1 the same word only."""
    close = difflib.get_close_matches(word[:LONGEST], list(known), n=1, cutoff=cutoff)
    return close[0] if close else ""


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "", cutoff: float = 0.0) -> str:
    """A hint that names the nearest of the known words, or ``otherwise`` where none is near."""
    near = nearest(word, known, cutoff)
    return f"did you mean {near!r}?" if near else otherwise
