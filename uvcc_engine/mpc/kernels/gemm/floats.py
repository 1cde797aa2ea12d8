"""Matrix products modulo 2^64 on units that multiply double-precision numbers: whatever processor has a BLAS.

Every ring element is written in three balanced limbs, ``x = c0 + 2^22 c1 + 2^44 c2 (mod 2^64)`` with ``-2^21 <= c_i <=
2^21``, and the product is ``S0 + 2^22 S1 + 2^44 S2`` with ``S_s = sum_(i+j=s) C_i D_j``: six products instead of nine,
for whatever has the weight 2^66 is nothing. Those of one ``s`` are a single product of concatenated limbs.

They are exact: a product of two limbs is an integer of at most 2^42, and at most ``3 INNER <= 2^11`` of them are summed
up, so every partial sum, in whatever order and with or without fused multiplication, is an integer of at most 2^53,
which double precision represents. A longer inner dimension is cut into pieces of ``INNER``. That the limbs stay within
their bounds: ``c0`` and ``c1`` are remainders modulo 2^22 in ``[-2^21, 2^21)``; what is left after two shifts by 22
bits lies within ``+-(2^19 + 1)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BITS = 22
INNER = 640  # 3 * 640 <= 2^11
_HALF = 1 << (BITS - 1)


def limbs(x: Tensor) -> list[Tensor]:
    """The three limbs, lowest first, as float64. Each has the shape of ``x``."""
    found = []
    for _ in range(2):
        # where adding wraps around, the next limbs change by a multiple of what they are taken modulo
        lowest = ((x + _HALF) & ((1 << BITS) - 1)) - _HALF
        found.append(lowest.to(torch.float64))
        x = (x - lowest) >> BITS
    return [*found, x.to(torch.float64)]


def inner_chunks(ys: Sequence[Tensor]) -> list[tuple[int, slice, Tensor]]:
    """The right matrices cut and split: (which, its rows, ``[..., 3 rows, n]`` with the highest limb first)."""
    out = []
    for which, y in enumerate(ys):
        for at in range(0, y.shape[-2], INNER):
            place = slice(at, min(at + INNER, y.shape[-2]))
            out.append((which, place, torch.cat(limbs(y[..., place, :])[::-1], -2)))
    return out


def product(xs: Sequence[Tensor], right: Sequence[tuple[int, slice, Tensor]]) -> Tensor:
    """``sum_i xs[i] @ ys[i]`` for the ``inner_chunks`` of ``ys``, of which there is at least one."""
    total: Tensor | None = None
    for which, place, y in right:
        left = torch.cat(limbs(xs[which][..., place]), -1)
        k = place.stop - place.start
        for s in range(3):
            part = (left[..., : (s + 1) * k] @ y[..., (2 - s) * k :, :]).to(torch.int64)
            if s:
                part <<= BITS * s
            total = part if total is None else total.add_(part)
    assert total is not None
    return total
