"""How far a simulated training is, told while it goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable

Progress = Callable[[int, int, float | None], None]
"""Told after every step: steps done, of how many, and the loss if it was revealed."""


def teller(progress: bool | Progress) -> Progress:
    """What is told after every step: nobody, a bar on standard error, or who was given."""
    if callable(progress):
        return progress
    return _bar if progress else _nothing


def _nothing(done: int, steps: int, loss: float | None) -> None:
    """Say nothing."""


def _bar(done: int, steps: int, loss: float | None) -> None:
    filled = 30 * done // steps
    said = "" if loss is None else f"  loss {loss:.4f}"
    end = "\n" if done == steps else ""
    print(f"\r[{'#' * filled}{'.' * (30 - filled)}] {done}/{steps}{said}", end=end, file=sys.stderr, flush=True)
