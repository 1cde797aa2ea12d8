"""Long vectors in chunks: each flows through the rounds by itself and has its own dealer.

Chunks take the three parties in turn as dealers, so that the dealer's larger share of work and of bytes is spread
evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from uvcc_engine.mpc.foundation.rounds import MpcProtocol, par
from uvcc_engine.mpc.foundation.share import Share

CHUNK = 1 << 19  # elements
ChunkProtocol = Callable[[int, slice, Sequence[Share | None]], MpcProtocol[list[Share]]]


def chunk_slices(n: int, size: int = CHUNK) -> list[slice]:
    """``[0, n)`` in equal chunks of at most ``size``, three or a multiple of it; one alone up to ``size``.

    Chunks are aligned to 64 elements where they are long enough.
    """
    if n <= size:
        return [slice(0, n)]
    count = -(-n // (3 * size)) * 3
    step = -(-n // count // 64) * 64 if n >= 64 * count else -(-n // count)
    return [slice(at, min(at + step, n)) for at in range(0, n, step)]


def in_chunks_protocol(
    places: Sequence[slice],
    shape: torch.Size,
    scales: Sequence[int],
    build: ChunkProtocol,
    dealer: int,
    device: torch.device,
) -> MpcProtocol[list[Share]]:
    """``build(dealer, place, outs)`` for every place, side by side; the rounds of one.

    Each writes its results into ``outs``, the place's rows of results of ``shape`` at the given scales. With one place
    alone ``outs`` are None, and what it returns is returned.
    """
    if len(places) == 1:
        return (yield from build(dealer, places[0], [None] * len(scales)))
    blank = partial(torch.empty, shape, dtype=torch.int64, device=device)
    whole = [Share(blank(), blank(), f) for f in scales]
    yield from par(
        *[
            build((dealer + at) % 3, place, [Share(w.first[place], w.second[place], w.f) for w in whole])
            for at, place in enumerate(places)
        ]
    )
    return whole
