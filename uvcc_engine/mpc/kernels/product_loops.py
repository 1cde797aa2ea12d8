"""Fused loops of elementwise products, on unsigned views: signed overflow would leave the compiler free to assume that
it never happens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from uvcc_engine.mpc.kernels.compiling.loop_cache import compiled_loop

Words = NDArray[np.uint64]


@compiled_loop
def cross(terms: int, a: Words, b: Words, c: Words, d: Words, out: Words) -> None:
    """``a b``, or ``a b + c d``."""
    if terms == 1:
        for i in range(out.shape[0]):
            out[i] = a[i] * b[i]
    else:
        for i in range(out.shape[0]):
            out[i] = a[i] * b[i] + c[i] * d[i]


@compiled_loop
def blind(z: Words, factor: int, plus: Words, minus: Words) -> None:
    """``z * factor + plus - minus`` modulo 2^64, in place of ``z``."""
    by = np.uint64(factor)
    for i in range(z.shape[0]):
        z[i] = z[i] * by + plus[i] - minus[i]


@compiled_loop
def mul_blinded(
    first: bool,
    second: bool,
    a: Words,
    b: Words,
    c: Words,
    d: Words,
    plus: Words,
    minus: Words,
    factor: int,
    out: Words,
) -> None:
    """``(a d + b c) * factor + plus - minus`` modulo 2^64, with ``c`` added to ``d`` where ``first``, ``d`` to ``c``
    where ``second``."""
    by, none = np.uint64(factor), np.uint64(0)
    of_first = none - np.uint64(first)
    of_second = none - np.uint64(second)
    for i in range(out.shape[0]):
        product = a[i] * (d[i] + (c[i] & of_first)) + b[i] * (c[i] + (d[i] & of_second))
        out[i] = product * by + plus[i] - minus[i]
