"""What a job of k-means says where nothing else is asked. Standard library only."""

from __future__ import annotations

from typing import Final

PLAIN: Final[dict[str, str | float]] = {
    "objective": "inertia",
    "momentum": 0.0,
    "schedule": "constant",
    "lr": 1.0,
}
"""With all training rows as the batch, a step is one of Lloyd's."""
MOST_ROWS: Final = 1 << 17
"""Up to so many rows are all taken in every step, of k-means and of trees, where the job says nothing of its batch."""
