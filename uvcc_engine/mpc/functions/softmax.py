"""Softmax of a matrix product in the rounds of few: maximum and exponentials at once.

The exponential needs ``x - max``, and the maximum needs comparisons and a choice: one after the other, 11 rounds. Here
every entry of a row is taken for the maximum at the same time. For each pair of entries ``(j, k)`` the power
``e^(x_k - x_j)`` is prepared from the masked product (``exponential``), beside the comparisons that find the largest
entry; its one-hot ``h_j`` then picks ``sum_j h_j e^(x_k - x_j)``, the powers of the row shifted by its maximum. For
``n`` classes this costs ``n^2`` exponentials a row instead of ``n``: little, where rows are few and rounds are long.

Rounds: 1. the product opens under the dealer's mask, and the dealer's tables of all comparisons and carries leave
(they depend on that mask alone); 2. the pairs' signs in one wide step, the carries of the exponents; 3. the AND over
each entry's comparisons, the range check's second step; 4. three bits a pair (carry, range, one-hot) open under masks
and pick the power from the dealer's eight shared products; 5. the powers open under fresh masks, to be truncated and
looked up; 6. the truncation's and the lookup's last exchange.

What is new on the wire is of kinds that the other protocols have: bits under uniform mask bits that only the dealer
knows (round 4: Damgard et al., "TinyTable", CRYPTO 2017), and a dealer's correlations under the right party's stream.
Nothing is opened to the dealer, and nothing unmasked to the online parties.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.mpc.comparisons.boolean import PairBits, sign_protocol
from uvcc_engine.mpc.comparisons.maximum import ALL_PAIRS, picked_protocol, unbeaten_of_protocol
from uvcc_engine.mpc.comparisons.selection import open_bits
from uvcc_engine.mpc.foundation.chunking import dealt_words
from uvcc_engine.mpc.foundation.roles import known, roles
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Round, Runtime, par
from uvcc_engine.mpc.foundation.share import Share, cat
from uvcc_engine.mpc.functions.exponential import (
    ABOVE,
    EXP_RANGE,
    INVERSE,
    PairPowers,
    PowerParts,
    parts_of_protocol,
    settle_powers_protocol,
)
from uvcc_engine.mpc.products.arithmetic import DEALER, matmul_open_protocol, sub
from uvcc_engine.mpc.products.truncation import Opened
from uvcc_engine.transcript.formats import kinds

FINE: Final = 16
"""Fractional bits of an exponent here, whatever the scale of the factors."""
_WORD: Final = 64  # rows whose bits one word holds
_PAIR, _ENTRY, _CELLS = 240, 129, 6144
"""Bytes that a dealer sends for a comparison of two entries of a row, for one of n^2 powers, for a look-up of a sum."""
LEAST: Final = 10
"""Fractional bits of the factors: powers are truncated from 60, by at most ``truncation.MAX_SHIFT``."""


@dataclass(frozen=True, slots=True, eq=False)
class SoftmaxParts:
    """Of a product ``[rows, n]``: itself, its rows' maxima ``[rows]``, the powers of what is shifted by them, their
    sums ``[rows, 1]``, and what was looked up of these (``exponential.LOOKUP_F`` fractional bits)."""

    logits: Share
    top: Share
    powers: Share
    total: Share
    looked_up: list[Share]


def powers_fit(rt: Runtime, rows: int, classes: int, f: int) -> bool:
    """Whether ``matmul_powers_protocol`` takes such a product, and few rounds are what is wanted."""
    if rt.proves_everything:
        return False
    return rt.few_rounds and 1 < classes <= ALL_PAIRS and rows * classes**2 <= 1 << 16 and f >= LEAST


@dataclass(frozen=True, slots=True, eq=False)
class ShiftedPowers:
    """A product ``[rows, n]``, the one-hot ``[n, rows]`` of its rows' largest entries, and their powers."""

    logits: Share
    hot: PairBits
    powers: PairPowers


def matmul_powers_protocol(
    rt: Runtime,
    x: Share,
    y: Share,
    look_up: tuple[str, ...] = (INVERSE,),
    *,
    f: int | None = None,
    dealer: int = DEALER,
) -> MpcProtocol[SoftmaxParts]:
    """Powers ``e^(z - max z)`` of the rows of ``z = x @ y``, at scale ``f`` (that of ``x`` if None). 6 rounds.

    Many rows are shared out to the three dealers, who send at the same time what one would send alone. Raises
    ConfigError for more or finer products than the powers leave room for.
    """
    _refuse_unfit(rt, x, y)
    places = dealt_rows(rt, x.shape[0], y.shape[1], len(look_up))
    parts: list[SoftmaxParts] = yield from par(
        *[
            _matmul_powers_protocol(rt, x.index(place), y, look_up, x.f if f is None else f, (dealer + at) % PARTIES)
            for at, place in enumerate(places)
        ]
    )
    if len(parts) == 1:
        return parts[0]
    return SoftmaxParts(
        logits=cat([part.logits for part in parts]),
        top=cat([part.top for part in parts]),
        powers=cat([part.powers for part in parts]),
        total=cat([part.total for part in parts]),
        looked_up=[cat(list(found)) for found in zip(*(part.looked_up for part in parts), strict=True)],
    )


def _refuse_unfit(rt: Runtime, x: Share, y: Share) -> None:
    rows, n = x.shape[0], y.shape[1]
    if not powers_fit(rt, rows, n, x.f) or x.f != y.f:
        raise ConfigError(
            f"powers of {rows} x {n} products at f={x.f} and {y.f}", "use matmul_max_protocol and powers_protocol"
        )


def dealt_rows(rt: Runtime, rows: int, n: int, functions: int) -> list[slice]:
    """Rows of ``n`` entries as the three dealers share them: whole words of 64 rows, as bits are packed, where
    more than one is worth it."""
    sent = rows * (n * (n - 1) // 2 * _PAIR + n * n * _ENTRY + functions * _CELLS)
    return dealt_words(rt, rows, sent)


def _matmul_powers_protocol(
    rt: Runtime, x: Share, y: Share, look_up: tuple[str, ...], f: int, dealer: int
) -> MpcProtocol[SoftmaxParts]:
    """See :func:`matmul_powers_protocol`, of one dealer."""
    at = yield from shifted_powers_protocol(rt, x, y, dealer=dealer)
    settled = settle_powers_protocol(rt, at.powers, look_up, f, dealer)
    both: MpcProtocol[list[Any]] = par(settled, picked_protocol(rt, at.hot, at.logits))
    (powers, found), top = yield from both
    looked_up = [found.index(i).reshape(-1, 1) for i in range(len(look_up))]
    return SoftmaxParts(at.logits, top, powers, powers.sum(1, keepdim=True), looked_up)


def shifted_powers_protocol(rt: Runtime, x: Share, y: Share, *, dealer: int = DEALER) -> MpcProtocol[ShiftedPowers]:
    """The first 4 rounds of :func:`matmul_powers_protocol`: the powers are still between the online parties.

    Beside the product: per row of n entries ``n (n - 1) / 2`` wide comparisons (240 bytes each), and for each of the
    n^2 pairs a comparison (51 bytes), a carry over 20 bits (14 bytes) and 64 bytes for the choice. Powers below e^-16
    are zero; errors as in ``exponential``, and one unit of 2^-16 more in the exponent.
    Raises ConfigError for more or finer products than the powers leave room for.
    """
    _refuse_unfit(rt, x, y)
    rows, n = x.shape[0], y.shape[1]
    role = roles(rt, dealer)
    opened = Opened()
    side = -(-rows // _WORD) * _WORD
    scale = 2 * x.f

    def pairs(part: Tensor | None) -> Tensor:
        """``[n (j), n (k), side]``: entry k less entry j."""
        columns = torch.nn.functional.pad(known(part).t(), (0, side - rows))
        return columns[None, :] - columns[:, None]

    def exponents(part: Tensor | None) -> Tensor:
        return pairs(part).reshape(-1) >> (scale - FINE)

    def powers_of_pairs_protocol() -> MpcProtocol[PowerParts]:
        u = exponents(opened.u) if role.is_dealer else None
        return (yield from parts_of_protocol(rt, dealer, n * n * side, FINE, u, lambda: exponents(opened.v)))

    def in_range_protocol() -> MpcProtocol[PairBits]:
        inside = (EXP_RANGE << scale) - ((3 + ABOVE) << (scale - FINE))  # what the two roundings may take is left out
        u = pairs(opened.u).reshape(-1) + inside if role.is_dealer else None
        return (yield from sign_protocol(rt, dealer, n * n * side, u, lambda: pairs(opened.v).reshape(-1), most=0))

    largest = unbeaten_of_protocol(rt, opened, rows, n, dealer)
    product = matmul_open_protocol(rt, x, y, opened, dealer=dealer)
    ready: MpcProtocol[list[Any]] = par(product, largest, powers_of_pairs_protocol(), in_range_protocol())
    # the product ends a round or two before the others; whoever only needs it waits for them
    logits, hot, at, keep = yield from ready
    z = yield from _picked_powers_protocol(rt, at, keep, hot, torch.Size((n, n, side)))
    return ShiftedPowers(logits, hot, PairPowers(z, n, rows, side))


def _picked_powers_protocol(
    rt: Runtime, at: PowerParts, keep: PairBits, hot: PairBits, shape: torch.Size
) -> MpcProtocol[Tensor | None]:
    """Pair shares of ``sum_j h_j keep_jk e^(x_k - x_j)``, ``[n, side]``, 60 fractional bits. 1 round."""
    role = roles(rt, hot.d)
    draws = rt.draws()
    n, _, side = shape
    flat = n * n * side // 64
    masks: list[tuple[Tensor | None, Tensor | None]] = []
    for words in ((1, flat), (1, flat), (n, side // 64)):
        left = draws.ring(role.with_left, *words) if not role.is_right else None
        masks.append((left, draws.ring(role.with_right, *words) if not role.is_left else None))
    dealt = draws.ring(role.with_right, 8, *shape) if not role.is_left else None
    bits = [
        PairBits(hot.d, torch.Size((1, shape.numel())), at.wrapped.words),
        PairBits(hot.d, torch.Size((1, shape.numel())), keep.words),
        PairBits(hot.d, torch.Size((n, side)), hot.words),
    ]

    def numbers(words: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        w, k = (rt.kernels.bits_to_ints(t, n * n * side).view(shape) for t in words[:2])
        return w, k, rt.kernels.bits_to_ints(words[2], side).view(n, 1, side)

    message = Round()
    if role.is_dealer:
        w, k, h = numbers([known(a) ^ known(b) for a, b in masks])
        value = known(at.dealt).view(shape)
        four = torch.stack([value, w * value, k * value, w * k * value])
        message.send(role.left, kinds.DEALER, torch.cat([four, four * h]) - known(dealt))
        yield message
        return None
    closed = [known(open_bits(role, b, message, *m)) for b, m in zip(bits, masks, strict=True)]
    if role.is_left:
        message.want(role.d, kinds.DEALER, torch.int64, 8, *shape)
    got: list[Tensor] = yield message
    w, k, h = numbers([mine ^ theirs for mine, theirs in zip(closed, got, strict=False)])
    plain, less = known(at.plain).view(shape), known(at.less).view(shape)
    # e^v for w = 0, e^(v - 16) for w = 1, in terms of the mask bit; likewise the range, likewise the one-hot
    level, swing = plain + w * (less - plain), (1 - 2 * w) * (less - plain)
    shares = got[3] if role.is_left else known(dealt)

    def kept(part: Tensor) -> Tensor:
        one, by_w, by_k, by_both = part
        found: Tensor = k * (level * one + swing * by_w) + (1 - 2 * k) * (level * by_k + swing * by_both)
        return found

    picked: Tensor = (h * kept(shares[:4]) + (1 - 2 * h) * kept(shares[4:])).sum(0)
    return picked


def shifted(parts: SoftmaxParts) -> Share:
    """The product less its rows' maxima. Local."""
    return sub(parts.logits, parts.top.map(lambda t: t.unsqueeze(-1)))
