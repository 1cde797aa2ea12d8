"""Maximum and argmax over the last axis.

Up to ``ALL_PAIRS`` entries are compared pairwise at once, and the winner is the entry that beats all others (first
one in a tie): a constant number of rounds. Longer axes run a tournament of such blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from uvcc_engine.mpc.arithmetic import DEALER
from uvcc_engine.mpc.boolean import PairBits, and_gen, drelu_gen, padded
from uvcc_engine.mpc.roles import roles
from uvcc_engine.mpc.runtime import Runtime, Steps
from uvcc_engine.mpc.selection import pair_to_share_gen, select_pair_gen
from uvcc_engine.mpc.share import Share, cat

ALL_PAIRS = 10


def winner_gen(rt: Runtime, x: Share, *, dealer: int = DEALER) -> Steps[PairBits]:
    """One-hot of the maximum (first in a tie): ``[rows, n]`` -> pair-shared bits ``[n, rows]``.

    n (n - 1) / 2 comparisons per row at once (3 rounds), then an AND of n - 1 bits (1 round for n <= 10).
    """
    rows, n = x.shape
    upper = torch.triu_indices(n, n, 1)
    first, second = upper[0], upper[1]
    columns = padded(x.map(lambda t: t.transpose(0, 1)))
    difference = columns.map(lambda t: t[first] - t[second])
    wins = yield from drelu_gen(rt, difference, dealer=dealer)
    shape = torch.Size((n - 1, n, rows))
    if wins.words is None:
        return (yield from and_gen(rt, PairBits(wins.d, shape, None)))
    words = wins.words.reshape(len(first), -1)
    flip = -1 if roles(rt, wins.d).is_left else 0
    table: list[list[Tensor]] = [[] for _ in range(n)]
    for k, (i, j) in enumerate(zip(first.tolist(), second.tolist(), strict=True)):
        table[i].append(words[k])
        table[j].append(words[k] ^ flip)
    stacked = torch.stack([torch.stack(row) for row in table], 1)
    return (yield from and_gen(rt, PairBits(wins.d, shape, stacked)))


def max_gen(rt: Runtime, x: Share, *, dealer: int = DEALER) -> Steps[Share]:
    """Maximum over the last axis: ``[..., n]`` -> ``[...]``.

    6 rounds for n <= 10; 6 more for every further factor of 10.
    """
    lead = x.shape[:-1]
    flat = x.reshape(-1, x.shape[-1])
    while flat.shape[-1] > 1:
        rows, n = flat.shape
        width = min(n, ALL_PAIRS)
        blocks = -(-n // width)
        short = blocks * width - n
        if short:  # repeat the last entry: a tie changes nothing
            flat = cat([flat, flat.index((slice(None), slice(-1, None))).expand(rows, short)], 1)
        block = flat.reshape(rows * blocks, width)
        hot = yield from winner_gen(rt, block, dealer=dealer)
        columns = block.map(lambda t: t.transpose(0, 1).contiguous())
        (picked,) = yield from select_pair_gen(rt, hot, [columns])
        total = None if picked is None else picked.sum(0)
        best = yield from pair_to_share_gen(rt, total, torch.Size((rows * blocks,)), x.f, hot.d)
        flat = best.reshape(rows, blocks)
    return flat.reshape(*lead)


def argmax_one_hot_gen(rt: Runtime, x: Share, *, dealer: int = DEALER) -> Steps[Share]:
    """One-hot of the maximum over the last axis as arithmetic bits (``f = 0``), first in a tie: ``[..., n]``.

    6 rounds for n <= 10. All pairs are compared, so the cost grows with n squared.
    """
    flat = x.reshape(-1, x.shape[-1])
    hot = yield from winner_gen(rt, flat, dealer=dealer)
    (own,) = yield from select_pair_gen(rt, hot, [], bit=True)
    bits = yield from pair_to_share_gen(rt, own, hot.shape, 0, hot.d)
    return bits.map(lambda t: t.transpose(0, 1).reshape(x.shape))


def max_(rt: Runtime, x: Share) -> Share:
    """``max_gen``, run."""
    return rt.run(max_gen(rt, x))


def argmax_one_hot(rt: Runtime, x: Share) -> Share:
    """``argmax_one_hot_gen``, run."""
    return rt.run(argmax_one_hot_gen(rt, x))
