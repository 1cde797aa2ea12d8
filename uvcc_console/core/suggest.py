"""What somebody probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word most like ``word``; the first one if none is alike, "" if there are none."""
    words = list(known)
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.0)
    return close[0] if close else (words[0] if words else "")
