"""The exponential by products alone, so that every message of it can be proved.

On ``[-EXP_RANGE, 0]`` the power is a polynomial of degree 16 in ``t = 1 + x / 8``, its Chebyshev series, whose later
terms are below 2^-22 together. With ``T_(8+k) = 2 T_8 T_k - T_(8-k)`` the series is ``A T_8 + B`` for public
combinations ``A`` and ``B`` of ``T_1`` to ``T_8``, so four products one after the other are enough (Paterson and
Stockmeyer, SIAM J. Comput. 1973). What lies below the range is compared beside them and chosen to be zero at the end:
there the polynomial is some number modulo 2^64, which nobody sees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Context, Decimal, localcontext
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.comparisons.proved_bits import sign_proved_protocol
from uvcc_engine.mpc.comparisons.proved_numbers import numbers_proved_protocol
from uvcc_engine.mpc.foundation.chunking import chunk_slices, in_chunks_protocol
from uvcc_engine.mpc.foundation.claim_ledger import ELEMENTWISE, SUMMED
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime, par
from uvcc_engine.mpc.foundation.share import Share, cat, placed
from uvcc_engine.mpc.products.arithmetic import (
    DEALER,
    add_public,
    add_ring,
    bilinear,
    form_protocol,
    mul_protocol,
    scale_int,
    sub,
)
from uvcc_engine.mpc.products.truncation import MAX_SHIFT

EXP_RANGE: Final = 16
_HALF: Final = 8  # of the range, and of the degree
_HALF_BITS: Final = 3
_WITHIN: Final = 22  # fractional bits on the way
_TOP: Final = 14  # of T_8, which stands beside coefficients below 2^-7
_MOST_BITS: Final = 60  # of the last product, which is below 1
_SUMMANDS: Final = 50  # of the series of a coefficient, far beyond its last digit
_CONTEXT: Final = Context(prec=40)


def exp_by_products_protocol(rt: Runtime, x: Share, *, dealer: int = DEALER) -> MpcProtocol[Share]:
    """``e^x`` for any ``x <= 2^-f``; zero below -16. 10 rounds.

    Shape and scale kept. Absolute error below 2^-18 + 1.5 units. Raises ConfigError for a scale above 19 bits.
    """
    if not 0 < x.f <= _WITHIN - _HALF_BITS:
        raise ConfigError(f"the exponential at f={x.f}", f"use 1 to {_WITHIN - _HALF_BITS} bits here")
    flat = x.reshape(-1)

    def build(dealer: int, place: slice, outs: Sequence[Share | None]) -> MpcProtocol[list[Share]]:
        part = flat.index(place)
        both: MpcProtocol[list[Share]] = par(_series_protocol(rt, part, dealer), _inside_protocol(rt, part, dealer))
        power, inside = yield from both
        return [placed((yield from mul_protocol(rt, power, inside, dealer=dealer)), outs[0])]

    (power,) = yield from in_chunks_protocol(chunk_slices(flat.n), flat.shape, [x.f], build, dealer, rt.device)
    return power.reshape(*x.shape)


def _inside_protocol(rt: Runtime, x: Share, dealer: int) -> MpcProtocol[Share]:
    """``[x >= -EXP_RANGE]``, ``f = 0``: 9 rounds."""
    sign = yield from sign_proved_protocol(rt, add_public(rt, x, float(EXP_RANGE)), dealer=dealer)
    return (yield from numbers_proved_protocol(rt, sign, dealer=dealer))


def _series_protocol(rt: Runtime, x: Share, dealer: int) -> MpcProtocol[Share]:
    """``e^x`` on the range, and elsewhere some number, whose size nobody watches. 8 rounds. ``x`` is ``[n]``."""

    def twice(pairs: Sequence[tuple[Share, Share]], f: int) -> MpcProtocol[list[Share]]:
        """Twice the product of each pair, with ``f`` fractional bits."""
        left, right = (cat([pair[side] for pair in pairs]) for side in (0, 1))
        split_at = right.with_f(2 * _WITHIN - f)
        found = yield from form_protocol(
            rt, left.with_f(f), split_at, None, ELEMENTWISE, scale=2.0, dealer=dealer, watched=False
        )
        return [found.index(slice(at * x.n, (at + 1) * x.n)) for at in range(len(pairs))]

    t1 = add_public(rt, scale_int(x, 1 << (_WITHIN - _HALF_BITS - x.f)).with_f(_WITHIN), 1.0)
    t2 = add_public(rt, (yield from twice([(t1, t1)], _WITHIN))[0], -1.0)
    of_3, of_4 = yield from twice([(t1, t2), (t2, t2)], _WITHIN)
    t3, t4 = sub(of_3, t1), add_public(rt, of_4, -1.0)
    level: MpcProtocol[list[Any]] = par(twice([(t1, t4), (t2, t4), (t3, t4)], _WITHIN), twice([(t4, t4)], _TOP))
    (of_5, of_6, of_7), (of_8,) = yield from level
    basis = [t1, t2, t3, t4, sub(of_5, t3), sub(of_6, t2), sub(of_7, t1)]
    t8 = add_public(rt, of_8, -1.0)
    bits = min(_MOST_BITS, x.f + MAX_SHIFT)
    fine = bits - _TOP - _WITHIN
    factor = _combined(rt, [*basis, scale_int(t8, 1 << (_WITHIN - _TOP))], _factors(fine), fine)
    rest = _combined(rt, basis, _rest(fine), fine)
    one = add_ring(rt, scale_int(t8, 0), 1 << _TOP)
    left, right = (_beside(*pair) for pair in ((t8, one), (factor, rest)))
    local = bilinear(lambda a, b: (a * b).sum(-1))
    last = form_protocol(rt, left.with_f(x.f), right.with_f(bits - x.f), local, SUMMED, dealer=dealer, watched=False)
    return (yield from last)


def _combined(rt: Runtime, basis: Sequence[Share], coefficients: Sequence[int], fine: int) -> Share:
    """``sum c_k T_k`` with the constant first, all with ``fine`` fractional bits more than the basis. Local."""
    first = sum((c * t.first for c, t in zip(coefficients[1:], basis, strict=True)), torch.zeros_like(basis[0].first))
    second = sum((c * t.second for c, t in zip(coefficients[1:], basis, strict=True)), torch.zeros_like(first))
    return add_ring(rt, Share(first, second, _WITHIN + fine), coefficients[0] << _WITHIN)


def _beside(x: Share, y: Share) -> Share:
    """Two of ``[n]`` as ``[n, 2]``."""

    def stacked(a: Tensor, b: Tensor) -> Tensor:
        return torch.stack([a, b], -1)

    return Share(stacked(x.first, y.first), stacked(x.second, y.second), x.f)


@lru_cache(maxsize=1)
def chebyshev_of_power() -> list[Decimal]:
    """``c_0`` to ``c_16`` of ``e^(8 (t - 1)) ~ sum c_k T_k(t)``: ``(2 - [k = 0]) e^-8 I_k(8)``. The same everywhere."""
    with localcontext(_CONTEXT):
        return [(2 if k else 1) * Decimal(-_HALF).exp() * _bessel(k) for k in range(2 * _HALF + 1)]


def _bessel(k: int) -> Decimal:
    """``I_k(8)`` by its power series."""
    quarter = Decimal(_HALF // 2)
    return sum(
        (quarter ** (2 * m + k) / (math.factorial(m) * math.factorial(m + k)) for m in range(_SUMMANDS)), Decimal(0)
    )


def _whole(values: Sequence[Decimal], bits: int) -> list[int]:
    with localcontext(_CONTEXT):
        return [int((value * (1 << bits)).to_integral_value()) for value in values]


@lru_cache(maxsize=8)
def _factors(fine: int) -> list[int]:
    """Of ``A``: what stands beside ``T_8`` in the terms from the eighth on; ``T_0`` to ``T_8``."""
    c = chebyshev_of_power()
    return _whole([c[_HALF], *[2 * c[_HALF + k] for k in range(1, _HALF + 1)]], fine)


@lru_cache(maxsize=8)
def _rest(fine: int) -> list[int]:
    """Of ``B``: the lower terms less what the upper ones take back; ``T_0`` to ``T_7``."""
    c = chebyshev_of_power()
    return _whole([c[k] - c[2 * _HALF - k] for k in range(_HALF)], fine)
