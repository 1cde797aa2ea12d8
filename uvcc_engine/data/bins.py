"""Numbers as bits: whether each is at most an edge, edges lying at quantiles. Trees ask nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.data.sets import Floats

BINS: Final = 16
"""Into how many parts of equal weight a column is divided, where the schema does not say."""
MOST_BINS: Final = 256


def edges_of(known: Floats, bins: int) -> tuple[float, ...]:
    """The ``bins - 1`` values that divide these, ``[rows]``, into ``bins`` parts of as many each.

    They are equal where values repeat. An edge is a value that occurs, the greatest of its part, so that no two parts
    fall together which need not.
    """
    found = np.quantile(known, np.arange(1, bins) / bins, method="inverted_cdf")
    return tuple(float(edge) for edge in found)


def bits_of(x: Floats, edges: Sequence[float]) -> list[Floats]:
    """For each edge which numbers ``[rows]`` are at most that: 1.0 or 0.0, ``[rows]``."""
    return [(x <= edge).astype(np.float64) for edge in edges]


def check_bits(x: Floats, names: Sequence[str] = (), what: str = "the data") -> None:
    """Refuse (ConfigError naming the first) features ``[rows, features]`` for trees that are not all 0 or 1."""
    odd = ((x != 0.0) & (x != 1.0)).any(0)
    if not odd.any():
        return
    at = int(odd.argmax())
    name = f"{names[at]!r}" if names else f"{at} (from 0)"
    value = float(x[(x[:, at] != 0.0) & (x[:, at] != 1.0), at][0])
    raise ConfigError(
        f"{what}: feature {name} holds {value:g}, and trees ask bits",
        "give number columns kind: bins in the schema (uvcc data infer --bins 16 does), in a notebook take"
        " simulate.PrivateTrees; a one-hot column takes no missing: mean or indicator, but missing: drop",
    )
