"""Maximum and argmax over the last axis.

Up to ``ALL_PAIRS`` entries are compared pairwise at once, and the winner is the entry that beats all others (first
one in a tie): a constant number of rounds. Longer axes run a tournament of such blocks.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.mpc.comparisons.boolean import WIDE_UP_TO, PairBits, and_protocol, drelu_protocol, sign_protocol
from uvcc_engine.mpc.comparisons.proved_bits import (
    Summands,
    all_proved_protocol,
    sign_of_summands_protocol,
    sign_proved_protocol,
)
from uvcc_engine.mpc.comparisons.proved_numbers import chosen_proved_protocol, numbers_proved_protocol
from uvcc_engine.mpc.comparisons.selection import COMPARED, pair_to_share_protocol, select_pair_protocol
from uvcc_engine.mpc.foundation.chunking import CHUNK, dealt_words
from uvcc_engine.mpc.foundation.roles import known, roles
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime, par
from uvcc_engine.mpc.foundation.share import BoolShare, Share, cat
from uvcc_engine.mpc.products.arithmetic import DEALER, matmul_open_protocol, matmul_protocol, public
from uvcc_engine.mpc.products.truncation import Opened

ALL_PAIRS = 10
_ENTRIES = 32  # of a row, up to which each is compared with all after it by one operation
_CHOSEN = 16  # bytes that the dealer sends for each entry of which one is chosen


def winner_protocol(rt: Runtime, x: Share, *, dealer: int = DEALER, of: int = 0) -> MpcProtocol[PairBits]:
    """One-hot of the maximum (first in a tie): ``[rows, n]`` to pair-shared bits ``[n, rows]``.

    ``of``: how many rows there are, where these are a part of them that has a dealer of its own.

    n (n - 1) / 2 comparisons per row at once (3 rounds), then an AND of n - 1 bits (1 round for n <= 10).
    """
    rows, n = x.shape
    difference = x.map(_differences)
    pairs = n * (n - 1) // 2
    wins = yield from drelu_protocol(rt, difference, dealer=dealer, of=pairs * (-(-of // 64) * 64))
    return (yield from _unbeaten_protocol(rt, wins, rows, n))


def _proved_winner_protocol(rt: Runtime, x: Share, dealer: int) -> MpcProtocol[BoolShare]:
    """The same one-hot with messages that can be proved, as replicated XOR shares ``[n, rows / 64]``: 7 rounds, and
    ``ceil(log2(n - 1))``."""
    rows, n = x.shape
    signs = yield from sign_proved_protocol(rt, x.map(_differences), dealer=dealer)
    return (yield from _proved_unbeaten_protocol(rt, signs, rows, n))


def _proved_winner_of_protocol(rt: Runtime, opened: Opened, rows: int, n: int, dealer: int) -> MpcProtocol[BoolShare]:
    """The same of a product that runs beside this (before it in ``par``) and fills ``opened``."""
    at = known(opened.truncation)  # the mask, p + q, is what the online parties' part is too large by
    parts = Summands(
        n * (n - 1) // 2 * (-(-rows // 64) * 64),
        of_left=lambda: -_differences(known(at.p)).reshape(-1),
        of_right=lambda: -_differences(known(at.q)).reshape(-1),
        online=lambda: _differences(known(opened.v)).reshape(-1),
    )
    signs = yield from sign_of_summands_protocol(rt, parts, dealer=dealer)
    return (yield from _proved_unbeaten_protocol(rt, signs, rows, n))


def _proved_unbeaten_protocol(rt: Runtime, signs: BoolShare, rows: int, n: int) -> MpcProtocol[BoolShare]:
    """From the signs of all differences to the one-hot: ``ceil(log2(n - 1))`` rounds."""
    place, lost = _duels(n, signs.first.device)

    def table(words: Tensor, component: int) -> Tensor:
        found = words.reshape(n * (n - 1) // 2, -1)[place]
        return found ^ lost if component == 0 else found  # the loser's bit is the complement

    wins = BoolShare(table(signs.first, rt.party), table(signs.second, rt.next), rows)
    return (yield from all_proved_protocol(rt, wins))


def _proved_pick_protocol(
    rt: Runtime, hot: BoolShare, x: Share, dealer: int, *, number: bool = False
) -> MpcProtocol[list[Share]]:
    """The entry of every row of ``[rows, n]`` at its one-hot, and the one-hot ``[n, rows]`` as a ``number`` (``f = 0``)
    if that is wanted: 2 rounds."""
    columns = x.map(lambda t: t.t().contiguous())
    picked, *numbers = yield from chosen_proved_protocol(rt, hot, columns, dealer=dealer, number=number)
    return [picked.sum(0), *numbers]


def _differences(x: Tensor) -> Tensor:
    """``[rows, n]`` to ``[pairs, rows padded to 64]``: entry ``i`` less entry ``j`` for ``i < j``."""
    columns = torch.nn.functional.pad(x.t(), (0, -x.shape[0] % 64)).contiguous()
    if len(columns) > _ENTRIES or x.device.type != "cpu":  # a GPU begins few operations sooner than many
        first, second = _pairs(x.shape[1], x.device)
        return columns[first] - columns[second]
    found = columns.new_empty(len(columns) * (len(columns) - 1) // 2, columns.shape[1])
    at = 0
    for i in range(len(columns) - 1):  # without a copy of what is subtracted
        after = at + len(columns) - 1 - i
        torch.sub(columns[i], columns[i + 1 :], out=found[at:after])
        at = after
    return found


def _unbeaten_protocol(rt: Runtime, wins: PairBits, rows: int, n: int) -> MpcProtocol[PairBits]:
    """From the signs of all differences to the one-hot: 1 round for n <= 10."""
    shape = torch.Size((n - 1, n, rows))
    if wins.words is None:
        return (yield from and_protocol(rt, PairBits(wins.d, shape, None)))
    place, lost = _duels(n, wins.words.device)
    table = wins.words.reshape(n * (n - 1) // 2, -1)[place]
    if roles(rt, wins.d).is_left:
        table ^= lost  # the loser's bit is the complement
    return (yield from and_protocol(rt, PairBits(wins.d, shape, table)))


@lru_cache(maxsize=64)
def _duels(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """``[n - 1, n]``: the places of every entry's comparisons, and all ones where it is the second of the two."""
    at = {pair: k for k, pair in enumerate(itertools.combinations(range(n), 2))}
    others = [[j for j in range(n) if j != i] for i in range(n)]
    place = torch.tensor([[at[min(i, j), max(i, j)] for j in row] for i, row in enumerate(others)], device=device)
    lost = torch.tensor([[-(j < i) for j in row] for i, row in enumerate(others)], device=device)
    return place.t().contiguous(), lost.t().contiguous().unsqueeze(-1)


@lru_cache(maxsize=64)
def _pairs(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """First and second of all pairs of ``n`` entries."""
    first, second = torch.triu_indices(n, n, 1, device=device)
    return first, second


def max_protocol(rt: Runtime, x: Share, *, dealer: int = DEALER) -> MpcProtocol[Share]:
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
        if rt.proves_everything:
            winner = yield from _proved_winner_protocol(rt, block, dealer)
            (best,) = yield from _proved_pick_protocol(rt, winner, block, dealer)
            flat = best.reshape(rows, blocks)
            continue
        hot = yield from winner_protocol(rt, block, dealer=dealer)
        best = yield from picked_protocol(rt, hot, block)
        flat = best.reshape(rows, blocks)
    return flat.reshape(*lead)


def picked_protocol(rt: Runtime, hot: PairBits, x: Share) -> MpcProtocol[Share]:
    """The entry of every row of ``[rows, n]`` at its one-hot ``[n, rows]``: 2 rounds."""
    (picked,) = yield from select_pair_protocol(rt, hot, [x.map(lambda t: t.transpose(0, 1).contiguous())])
    total = None if picked is None else picked.sum(0)
    return (yield from pair_to_share_protocol(rt, total, torch.Size((x.shape[0],)), x.f, hot.d))


def matmul_max_protocol(rt: Runtime, x: Share, y: Share, *, dealer: int = DEALER) -> MpcProtocol[tuple[Share, Share]]:
    """``x @ y`` (``[rows, n]``, ``n <= 10``) and the maximum of each row: 5 rounds instead of 8 (6 for many rows).

    The comparisons start from the masked product while it is truncated. For longer rows the two run one after the
    other. Where everything is proved: 13 rounds.
    """
    rows, n = x.shape[0], y.shape[1]
    if not 1 < n <= ALL_PAIRS or (rt.proves_everything and rows * n > CHUNK):
        product = yield from matmul_protocol(rt, x, y, dealer=dealer)
        return product, (yield from max_protocol(rt, product, dealer=dealer))
    opened = Opened()
    if rt.proves_everything:
        proved: MpcProtocol[list[Any]] = par(
            matmul_open_protocol(rt, x, y, opened, dealer=dealer),
            _proved_winner_of_protocol(rt, opened, rows, n, dealer),
        )
        product, winner = yield from proved
        (best,) = yield from _proved_pick_protocol(rt, winner, product, dealer)
        return product, best
    both: MpcProtocol[list[Any]] = par(
        matmul_open_protocol(rt, x, y, opened, dealer=dealer), unbeaten_of_protocol(rt, opened, rows, n, dealer)
    )
    product, hot = yield from both
    return product, (yield from picked_protocol(rt, hot, product))


def unbeaten_of_protocol(rt: Runtime, opened: Opened, rows: int, n: int, dealer: int) -> MpcProtocol[PairBits]:
    """The one-hot ``[n, rows]`` of the maximum of ``[rows, n]``, from a product that runs beside this (before it in
    ``par``) and fills ``opened``: 3 rounds in all, or 4 for many rows."""
    pairs = n * (n - 1) // 2 * (-(-rows // 64) * 64)
    u = _differences(known(opened.u)).reshape(-1) if roles(rt, dealer).is_dealer else None

    def v() -> Tensor:
        return _differences(known(opened.v)).reshape(-1)

    wins = yield from sign_protocol(rt, dealer, pairs, u, v, most=WIDE_UP_TO)
    return (yield from _unbeaten_protocol(rt, wins, rows, n))


def argmax_one_hot_protocol(rt: Runtime, x: Share, *, dealer: int = DEALER) -> MpcProtocol[Share]:
    """One-hot of the maximum over the last axis as arithmetic bits (``f = 0``), first in a tie: ``[..., n]``.

    6 rounds for n <= 10, none for one. All pairs are compared, so the cost grows with n squared.
    """
    if x.shape[-1] == 1:
        return public(rt, torch.ones(x.shape), f=0)
    flat = x.reshape(-1, x.shape[-1])
    if rt.proves_everything:
        winner = yield from _proved_winner_protocol(rt, flat, dealer)
        one_hot = yield from numbers_proved_protocol(rt, winner, dealer=dealer)
        return one_hot.map(lambda t: t.transpose(0, 1).reshape(x.shape))
    hot = yield from winner_protocol(rt, flat, dealer=dealer)
    (own,) = yield from select_pair_protocol(rt, hot, [], bit=True)
    bits = yield from pair_to_share_protocol(rt, own, hot.shape, 0, hot.d)
    return bits.map(lambda t: t.transpose(0, 1).reshape(x.shape))


def max_and_place_protocol(rt: Runtime, x: Share, *, dealer: int = DEALER) -> MpcProtocol[tuple[Share, Share]]:
    """Maximum of every row of ``[rows, n]``, ``[rows]``, and its one-hot ``[rows, n]`` (``f = 0``), first in a tie.

    6 rounds for n <= 10 (7 from ``boolean.BULK`` comparisons on): value and place are chosen by the same opened bits.
    n (n - 1) / 2 comparisons, one AND of n - 1 bits and 48 bytes per entry. For few rounds many rows are shared out to
    the three dealers. Of one entry a row nothing is asked.
    """
    if x.shape[1] == 1:
        return x.reshape(-1), public(rt, torch.ones(x.shape), f=0)
    if rt.proves_everything:
        winner = yield from _proved_winner_protocol(rt, x, dealer)
        best, place = yield from _proved_pick_protocol(rt, winner, x, dealer, number=True)
        return best, place.map(lambda t: t.t())
    rows, n = x.shape
    places = dealt_words(rt, rows, rows * (n * (n - 1) // 2 * COMPARED + n * _CHOSEN))
    if len(places) == 1:
        return (yield from _max_and_place_protocol(rt, x, dealer, rows))
    parts = yield from par(
        *[_max_and_place_protocol(rt, x.index(place), (dealer + at) % PARTIES, rows) for at, place in enumerate(places)]
    )
    return cat([best for best, _ in parts]), cat([one_hot for _, one_hot in parts])


def _max_and_place_protocol(rt: Runtime, x: Share, dealer: int, of: int) -> MpcProtocol[tuple[Share, Share]]:
    """See :func:`max_and_place_protocol`, of one dealer; ``of``: see :func:`winner_protocol`."""
    hot = yield from winner_protocol(rt, x, dealer=dealer, of=of)
    picked, bits = yield from select_pair_protocol(rt, hot, [x.map(lambda t: t.t().contiguous())], bit=True)
    best, one_hot = yield from par(
        pair_to_share_protocol(rt, None if picked is None else picked.sum(0), torch.Size((x.shape[0],)), x.f, hot.d),
        pair_to_share_protocol(rt, bits, hot.shape, 0, hot.d),
    )
    return best, one_hot.map(lambda t: t.t())


def max_(rt: Runtime, x: Share) -> Share:
    """``max_protocol``, run."""
    return rt.run(max_protocol(rt, x))


def argmax_one_hot(rt: Runtime, x: Share) -> Share:
    """``argmax_one_hot_protocol``, run."""
    return rt.run(argmax_one_hot_protocol(rt, x))
