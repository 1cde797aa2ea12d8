"""The page of decisions: its text (``decisions.txt``) with figures from the kept rows of benchmarks."""

from __future__ import annotations

from pathlib import Path

from docs.make.kept_rows import filled
from docs.make.words import HEAD


def page() -> str:
    """The page."""
    text = (Path(__file__).parent / "decisions.txt").read_text(encoding="utf-8")
    title, _, rest = filled(text).partition("\n")
    return f"{title}\n\n{HEAD}\n{rest}"
