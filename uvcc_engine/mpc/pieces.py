"""Long vectors in pieces: each fits the processor's cache, flows through the rounds by itself, and has its own dealer.

Pieces take the three parties in turn as dealers, so that the dealer's larger share of work and of bytes is spread
evenly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from uvcc_engine.mpc.runtime import Steps, par
from uvcc_engine.mpc.share import Share

PIECE = 1 << 16  # elements


def cuts(n: int, piece: int = PIECE) -> list[slice]:
    """``[0, n)`` in pieces of ``piece``; one alone if there would be less than two full ones."""
    if n < 2 * piece:
        return [slice(0, n)]
    return [slice(at, min(at + piece, n)) for at in range(0, n, piece)]


def in_pieces_gen(x: Share, build: Callable[[int, Share], Steps[list[Share]]], dealer: int) -> Steps[list[Share]]:
    """``build(dealer, piece)`` on the flattened ``x``; every result is flat and as long as its piece.

    The rounds of one piece; results are put together as the pieces finish.
    """
    flat = x.reshape(-1)
    places = cuts(flat.n)
    if len(places) == 1:
        return (yield from build(dealer, flat))
    results: list[Share] = []

    def into_gen(at: int, place: slice) -> Steps[None]:
        found = yield from build((dealer + at) % 3, flat.index(place))
        if not results:
            results.extend(Share(torch.empty_like(flat.lo), torch.empty_like(flat.lo), one.f) for one in found)
        for whole, one in zip(results, found, strict=True):
            whole.lo[place] = one.lo
            whole.hi[place] = one.hi

    yield from par(*[into_gen(at, place) for at, place in enumerate(places)])
    return results
