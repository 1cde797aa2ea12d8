"""A small model with known weights, rows to ask it, and what it answers in clear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def write_asked(folder: Path) -> tuple[dict[str, Any], list[int]]:
    """Write weights ``w.npz`` and 30 rows ``q.npy``; the model as a job names it, and the classes of the rows."""
    made = np.random.default_rng(5)
    first, second = made.normal(size=(5, 8)), made.normal(size=(9, 3))
    np.savez(folder / "w.npz", **{"weight.0": first, "weight.1": second})  # type: ignore[arg-type]
    x = made.normal(size=(30, 4))
    hidden = np.maximum(np.hstack([x, np.ones((30, 1))]) @ first, 0)
    clear = (np.hstack([hidden, np.ones((30, 1))]) @ second).argmax(1).tolist()
    np.save(folder / "q.npy", x)
    layers = [
        {"type": "dense", "inputs": 4, "outputs": 8},
        {"type": "relu", "width": 8},
        {"type": "dense", "inputs": 8, "outputs": 3},
    ]
    return {"features": 4, "classes": 3, "layers": layers}, clear
