"""Long vectors in chunks: each flows through the rounds by itself and has its own dealer.

Chunks take the three parties in turn as dealers, so that the dealer's larger share of work and of bytes is spread
evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.mpc.foundation.rounds import MpcProtocol, par
from uvcc_engine.mpc.foundation.share import Share

if TYPE_CHECKING:
    from uvcc_engine.mpc.foundation.runtime import Runtime

CHUNK = 1 << 19  # elements
SPREAD = 1 << 19
"""Bytes that a dealer sends for one operation, above which the three share them for few rounds. Three parts cost a
party some 2 ms more of processor time than one, which is what two thirds of so many bytes take at 1 Gbit/s; on thinner
lines they save time."""
_WORD = 64
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


def dealt_slices(rt: Runtime, rows: int, sent: int) -> list[slice]:
    """``rows``, of which one dealer would send ``sent`` bytes, in three parts with a dealer each, where few rounds
    matter: a round takes as long as the longest line, and with one dealer two lines lie idle. One part up to ``SPREAD``
    bytes, and where products are proved, since each part would be a claim of its own."""
    if not rt.few_rounds or rt.ledger is not None or rows < PARTIES or sent <= SPREAD:
        return [slice(0, rows)]
    step = -(-rows // PARTIES)
    return [slice(at, min(at + step, rows)) for at in range(0, rows, step)]


def dealt_words(rt: Runtime, rows: int, sent: int) -> list[slice]:
    """The same of rows whose bits are packed, in whole words of 64; one part where there is one word."""
    if len(dealt_slices(rt, rows, sent)) == 1 or rows <= _WORD:
        return [slice(0, rows)]
    step = -(-rows // (PARTIES * _WORD)) * _WORD
    return [slice(at, min(at + step, rows)) for at in range(0, rows, step)]


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
