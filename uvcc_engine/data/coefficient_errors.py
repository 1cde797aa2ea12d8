"""What the owner of a regression's data computes in clear from its information matrix, on a machine without torch."""

from __future__ import annotations

from typing import Final

import numpy as np

from uvcc_engine.data.sets import Floats

LEAST_EIGENVALUE: Final = 1e-3
"""Of the mean information, as far as fixed point tells it: below, a column follows from the others, and a standard
error would be made of rounding."""


def standard_errors(matrix: Floats, sizes: Floats) -> Floats | None:
    """Those of each coefficient ``[k]``, the intercept last, from what ``information_protocol`` gave, in clear.

    None where a column nearly follows from the others.
    """
    rows, squares, linear = (float(value) for value in sizes.reshape(-1))
    both = (matrix + matrix.T) / 2.0
    values, vectors = np.linalg.eigh(both)
    k = len(both)
    if values.min() < LEAST_EIGENVALUE or rows <= k:
        return None
    variances = np.square(vectors) @ (1.0 / values)
    found: Floats = np.sqrt(variances * (squares / (rows - k) if linear else 1.0 / rows))
    return found
