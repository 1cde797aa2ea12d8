"""What a caller gives as rows, labels and weights, as arrays of the kinds that a training takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.data.sets import Floats, one_hot


def given_rows(x: ArrayLike, letters: int) -> Floats:
    """Rows of features: as they are, or one-hot of so many letters. Raises ConfigError for anything else."""
    if not letters:
        found: Floats = flat_features(x).numpy()
        return found
    numbers = np.asarray(x)
    if numbers.dtype.kind not in "iu" or numbers.ndim != 2 or numbers.min() < 0 or numbers.max() >= letters:
        raise ConfigError(
            f"letters of shape {numbers.shape}, {numbers.dtype}", f"give (rows, positions) below {letters}"
        )
    return one_hot(numbers.astype(np.int64), letters)


def given_labels(y: ArrayLike | None, rows: int) -> np.ndarray[Any, Any]:
    """Labels as they were given; none (rows, 0) where there are none."""
    return np.zeros((rows, 0)) if y is None else np.asarray(y)


def given_weights(given: ArrayLike | None, rows: int) -> Floats | None:
    """What each of so many rows counts, ``[rows]``; None where none is given. Raises ConfigError for another shape."""
    if given is None:
        return None
    found = plain_numbers(given, "row_weights")
    if found.shape != (rows,):
        raise ConfigError(f"row_weights of shape {found.shape} for {rows} rows", "give one number per row")
    return found


def plain_numbers(x: ArrayLike, what: str = "features") -> Floats:
    """Numbers of any shape as float64. Raises ConfigError for text, lines of unequal length and complex numbers."""
    try:
        given = np.asarray(x)
        if given.dtype.kind == "c":
            raise ConfigError(f"{what} are complex numbers", "give their real and imaginary parts as columns")
        return np.array(given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        what = f"{what} are no table of numbers: {str(error)[:80]}"
        raise ConfigError(what, "give categories as one-hot columns, and each row as many numbers") from error


def flat_features(x: ArrayLike) -> torch.Tensor:
    """Rows of numbers, each flat: (rows, features). Raises ConfigError for what is no table."""
    found = plain_numbers(x)
    if found.ndim < 2 or not len(found):
        raise ConfigError(f"features of shape {found.shape}", "give one row of numbers per line: (rows, features)")
    return torch.from_numpy(found.reshape(len(found), -1))
