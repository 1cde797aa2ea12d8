"""The place of the greatest of many numbers: blocks of few are compared all with all, and their winners again."""

from __future__ import annotations

import torch

from uvcc_engine.mpc.comparisons.maximum import ALL_PAIRS, max_and_place_protocol
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share, cat
from uvcc_engine.mpc.products.arithmetic import DEALER, mul_protocol, public


def greatest_place_protocol(rt: Runtime, x: Share, *, dealer: int = DEALER) -> MpcProtocol[Share]:
    """One-hot (``f = 0``) of the greatest entry of every row of ``[rows, n]``, the first in a tie; n is 1 or more.

    Up to ``ALL_PAIRS`` entries take the 6 rounds of ``maximum.max_and_place_protocol``, every further factor of that
    7 more, in which a block's one-hot is multiplied by whether the block won. About 5 comparisons per entry, where
    ``argmax_one_hot_protocol`` takes n / 2. Reveals nothing.
    """
    rows, n = x.shape
    if n == 1:
        return public(rt, torch.ones(rows, 1), f=0)
    if n <= ALL_PAIRS:
        _, place = yield from max_and_place_protocol(rt, x, dealer=dealer)
        return place
    blocks = -(-n // ALL_PAIRS)
    if short := blocks * ALL_PAIRS - n:  # the last entry again: it ties with itself, and the first of a tie wins
        x = cat([x, x.index((slice(None), slice(-1, None))).expand(rows, short)], 1)
    best, inside = yield from max_and_place_protocol(rt, x.reshape(rows * blocks, ALL_PAIRS), dealer=dealer)
    won = yield from greatest_place_protocol(rt, best.reshape(rows, blocks), dealer=dealer)
    place = yield from mul_protocol(
        rt, inside.reshape(rows, blocks, ALL_PAIRS), won.reshape(rows, blocks, 1), dealer=dealer
    )
    return place.reshape(rows, blocks * ALL_PAIRS).index((slice(None), slice(0, n)))
