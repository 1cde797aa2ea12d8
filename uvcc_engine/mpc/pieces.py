"""Long vectors in pieces: each flows through the rounds by itself and has its own dealer.

Pieces take the three parties in turn as dealers, so that the dealer's larger share of work and of bytes is spread
evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from uvcc_engine.mpc.rounds import Steps, par
from uvcc_engine.mpc.share import Share

PIECE = 1 << 19  # elements
Build = Callable[[int, slice, Sequence[Share | None]], Steps[list[Share]]]


def cuts(n: int, piece: int = PIECE) -> list[slice]:
    """``[0, n)`` in equal pieces of at most ``piece``, three or a multiple of it; one alone up to ``piece``.

    Pieces are aligned to 64 elements where they are long enough.
    """
    if n <= piece:
        return [slice(0, n)]
    count = -(-n // (3 * piece)) * 3
    size = -(-n // count // 64) * 64 if n >= 64 * count else -(-n // count)
    return [slice(at, min(at + size, n)) for at in range(0, n, size)]


def in_pieces_gen(
    places: Sequence[slice], shape: torch.Size, scales: Sequence[int], build: Build, dealer: int
) -> Steps[list[Share]]:
    """``build(dealer, place, outs)`` for every place, side by side; the rounds of one.

    Each writes its results into ``outs``, the place's rows of results of ``shape`` at the given scales. With one place
    alone ``outs`` are None, and what it returns is returned.
    """
    if len(places) == 1:
        return (yield from build(dealer, places[0], [None] * len(scales)))
    whole = [Share(torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.int64), f) for f in scales]
    yield from par(
        *[
            build((dealer + at) % 3, place, [Share(w.lo[place], w.hi[place], w.f) for w in whole])
            for at, place in enumerate(places)
        ]
    )
    return whole
