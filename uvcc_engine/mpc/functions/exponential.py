"""The exponential of what is not positive, and the inverse and the logarithm of a sum of such powers.

The parties exponentiate their own summands in the clear: with ``x = u + v`` (``roles``), ``e^x = e^u e^v``, and only
the carry of ``u + v`` past the range is computed under masks (the idea of Kelkar et al., "Secure Poisson regression",
USENIX Security 2022, moved from a prime field to the power-of-two ring). Both online parties must compute the very
same ``e^v``: it comes from tables that are rounded exactly, and one IEEE multiplication.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.comparisons.boolean import PairBits, drelu_protocol, padded
from uvcc_engine.mpc.comparisons.carry import carry_protocol, tree
from uvcc_engine.mpc.comparisons.selection import open_bits, pair_to_share_protocol, select_dealt_protocol
from uvcc_engine.mpc.foundation.roles import known, online_part, roles
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Round, Runtime, par
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.functions.proved_powers import EXP_RANGE as EXP_RANGE
from uvcc_engine.mpc.functions.proved_powers import exp_by_products_protocol
from uvcc_engine.mpc.products.arithmetic import DEALER, add_public
from uvcc_engine.mpc.products.truncation import Opened, truncate_pair_protocol
from uvcc_engine.transcript.formats import kinds

_DIGIT = 4
_DEALER_BITS = 40
_ONLINE_BITS = 20
_SHIFT = _DEALER_BITS + _ONLINE_BITS
ABOVE = 1
"""Units by which what is exponentiated may exceed zero. A row's maximum may be found before the rounding of its
entries, which lifts one of them by a unit: of two that are almost equal, the other one may then be a unit larger."""
_HALF = 10  # the 20 bits of an exponent below 16 at 16 fractional bits, in two halves
_CONTEXT = Context(prec=40)
LOOKUP_BITS = 8
SUM_LIMIT = 15  # summands whose total stays below 16
LOOKUP_F = 42  # fractional bits of what is looked up: an inverse times a power stays below 2^59
LOOKUP_ERROR = 2.0**-13  # of the inverse, relative, and of the logarithm; for sums from 1 - 2^-8 on
INVERSE, LOG = "inverse", "log"  # what can be looked up
_WITHIN = 13  # bits of the place within a cell of the lookup


@lru_cache(maxsize=4)
def _exp_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """``e^(i 2^-6)`` and ``e^(i 2^-16)`` for ``0 <= i < 1024``, correctly rounded to float64."""

    def table(step: int) -> Tensor:
        exact = [float(_CONTEXT.exp(Decimal(i * step) / Decimal(1 << 16))) for i in range(1 << _HALF)]
        return torch.tensor(exact, dtype=torch.float64, device=device)

    return table(1 << _HALF), table(1)


def exp_public(value: Tensor, f: int, exponent: Decimal, bits: int) -> Tensor:
    """``round(e^(value / 2^f + exponent) 2^bits)`` for integers ``0 <= value < 16 2^f``: the same on every machine.

    Products of correctly rounded numbers, each rounded once; relative error below 2^-51. Any shape, element by element.
    """
    upper, lower = _exp_tables(value.device)
    index = value << (16 - f)
    factor = float(_CONTEXT.exp(exponent)) * 2.0**bits
    return torch.round(upper[index >> _HALF] * lower[index & ((1 << _HALF) - 1)] * factor).to(torch.int64)


@dataclass(slots=True)
class PowerParts:
    """An exponential before its truncation: the carry past the range, and the parties' own powers."""

    wrapped: PairBits
    dealt: Tensor | None  # at the dealer: e^(u - 16)
    plain: Tensor | None  # online: e^v
    less: Tensor | None  # online: e^(v - 16)


def _parts_protocol(rt: Runtime, flat: Share, dealer: int) -> MpcProtocol[PowerParts]:
    """2 rounds. ``flat`` is one row, a multiple of 64 long."""
    if flat.f not in (12, 16):  # below, the way back from the power's 60 bits is longer than a truncation goes
        raise ConfigError(f"the exponential at f={flat.f}", "use f = 12 or 16 here")
    role = roles(rt, dealer)
    value = (flat.first + flat.second) if role.is_dealer else online_part(rt, role, flat)
    u = value if role.is_dealer else None
    return (yield from parts_of_protocol(rt, dealer, flat.n, flat.f, u, lambda: value))


def parts_of_protocol(
    rt: Runtime, dealer: int, n: int, f: int, u: Tensor | None, v: Callable[[], Tensor]
) -> MpcProtocol[PowerParts]:
    """The parts of ``e^(u + v)`` for ``u`` known to the dealer and ``v()`` to the online parties, ``[n]`` each, n a
    multiple of 64. 2 rounds; ``v`` is asked for after the first."""
    bits = f + 4
    role = roles(rt, dealer)
    low = (1 << bits) - 1
    seen: list[Tensor] = []

    def online() -> Tensor:
        seen.append(v() & low)
        return rt.kernels.to_planes(seen[0], bits)

    # so much less that zero and ``ABOVE`` lie below the upper end; the units come back in the power
    mine = None if u is None else (u - 1 - ABOVE) & low
    planes = None if mine is None else rt.kernels.to_planes(mine, bits)
    extra = None if planes is None else torch.zeros_like(planes[0])
    steps = tree(((bits // _DIGIT, 1),))
    carry, _ = yield from carry_protocol(rt, dealer, _DIGIT, steps, n // 64, planes, online, extra)
    # x - units + 16 = u + v - 16 wrapped, each of u and v in [0, 16)
    wrapped = PairBits(role.d, torch.Size((n,)), carry)
    units = Decimal(1 + ABOVE) / Decimal(1 << f)
    if mine is not None:
        return PowerParts(wrapped, exp_public(mine, f, units - EXP_RANGE, _DEALER_BITS), None, None)
    plain = exp_public(seen[0], f, Decimal(0), _ONLINE_BITS)
    return PowerParts(wrapped, None, plain, exp_public(seen[0], f, Decimal(-EXP_RANGE), _ONLINE_BITS))


def exp_in_range_protocol(rt: Runtime, x: Share, *, dealer: int = DEALER) -> MpcProtocol[Share]:
    """``e^x`` for ``-16 + 2^-f < x <= 2^-f``; outside, a wrong number (still secret). Shape and scale kept.

    f = 12 or 16. 5 rounds. Absolute error below 2^-17 + one unit.
    """
    flat = padded(x.reshape(-1))
    at = yield from _parts_protocol(rt, flat, dealer)
    whole, over = yield from select_dealt_protocol(rt, at.wrapped, at.dealt)
    z: Tensor | None = None
    if whole is not None and over is not None:
        z = whole * known(at.plain) + over * (known(at.less) - known(at.plain))
    out = yield from truncate_pair_protocol(rt, z, flat.shape, _SHIFT - x.f, x.f, dealer)
    return out.map(lambda t: t[: x.n].reshape(x.shape))


def _gated_protocol(rt: Runtime, at: PowerParts, keep: PairBits) -> MpcProtocol[Tensor | None]:
    """Pair shares of ``keep * e^x``, 60 fractional bits. 1 round: both bits open under masks, 32 bytes from the
    dealer."""
    role = roles(rt, keep.d)
    draws = rt.draws()
    masks: list[tuple[Tensor | None, Tensor | None]] = []
    for _ in range(2):
        left = draws.ring(role.with_left, *keep.word_shape) if not role.is_right else None
        masks.append((left, draws.ring(role.with_right, *keep.word_shape) if not role.is_left else None))
    dealt = draws.ring(role.with_right, 4, *keep.shape) if not role.is_left else None
    message = Round()
    if role.is_dealer:
        value = known(at.dealt)
        w, k = (rt.kernels.bits_to_ints(known(a) ^ known(b), keep.shape[-1]) for a, b in masks)
        message.send(role.left, kinds.DEALER, torch.stack([value, w * value, k * value, w * k * value]) - known(dealt))
        yield message
        return None
    closed = [known(open_bits(role, b, message, *m)) for b, m in zip((at.wrapped, keep), masks, strict=True)]
    if role.is_left:
        message.want(role.d, kinds.DEALER, torch.int64, 4, *keep.shape)
    got: list[Tensor] = yield message
    w, k = (rt.kernels.bits_to_ints(mine ^ theirs, keep.shape[-1]) for mine, theirs in zip(closed, got, strict=False))
    plain, less = known(at.plain), known(at.less)
    # e^v for w = 0, e^(v - 16) for w = 1, in terms of the mask bit; likewise the gate
    level, swing = plain + w * (less - plain), (1 - 2 * w) * (less - plain)
    one, by_w, by_k, by_both = got[2] if role.is_left else known(dealt)
    kept: Tensor = k * (level * one + swing * by_w) + (1 - 2 * k) * (level * by_k + swing * by_both)
    return kept


def exp_protocol(rt: Runtime, x: Share, *, dealer: int = DEALER) -> MpcProtocol[Share]:
    """``e^x`` for any ``x <= 2^-f``; zero below -16. 6 rounds: the comparison runs beside the exponential.

    Shape and scale kept. Where everything is proved: by products alone (``proved_powers``).
    """
    if rt.proves_everything:
        return (yield from exp_by_products_protocol(rt, x, dealer=dealer))
    flat = padded(x.reshape(-1))
    z = yield from _before_truncation_protocol(rt, flat, dealer)
    out = yield from truncate_pair_protocol(rt, z, flat.shape, _SHIFT - x.f, x.f, dealer)
    return out.map(lambda t: t[: x.n].reshape(x.shape))


def _before_truncation_protocol(rt: Runtime, flat: Share, dealer: int) -> MpcProtocol[Tensor | None]:
    inside = add_public(rt, flat, EXP_RANGE - (1 + ABOVE) * 2.0**-flat.f)
    both: MpcProtocol[list[Any]] = par(_parts_protocol(rt, flat, dealer), drelu_protocol(rt, inside, dealer=dealer))
    at, keep = yield from both
    return (yield from _gated_protocol(rt, at, keep))


def powers_protocol(
    rt: Runtime, x: Share, look_up: Sequence[str] = (INVERSE,), *, dealer: int = DEALER
) -> MpcProtocol[list[Share]]:
    """``e^x`` of ``[rows, n]``, ``n <= 15``, ``x <= 0`` with a zero in every row: powers, their sum, what to look up.

    The sum, its ``INVERSE`` and its ``LOG`` are ``[rows, 1]``; what is looked up has ``LOOKUP_F`` fractional bits and
    an error below ``LOOKUP_ERROR``. 6 rounds: the lookup starts from the powers while they are being truncated.
    Raises ConfigError for longer rows.
    """
    rows, n = x.shape
    if n > SUM_LIMIT:
        raise ConfigError(f"a sum of {n} powers", f"up to {SUM_LIMIT} fit; use exp_protocol and divide_protocol")
    flat = padded(x.reshape(-1))
    z = yield from _before_truncation_protocol(rt, flat, dealer)
    opened = Opened()

    def total(part: Tensor | None) -> Tensor:
        return known(part)[: x.n].reshape(rows, n).sum(1)

    truncation = truncate_pair_protocol(rt, z, flat.shape, _SHIFT - x.f, x.f, dealer, opened=opened)
    looked_up = _look_up_protocol(rt, rows, look_up, dealer, lambda: total(opened.u), lambda: total(opened.v))
    out, found = yield from par(truncation, looked_up)
    powers = out.map(lambda t: t[: x.n].reshape(rows, n))
    return [powers, powers.sum(1, keepdim=True), *[found.index(i).reshape(rows, 1) for i in range(len(look_up))]]


@dataclass(frozen=True, slots=True)
class PairPowers:
    """Powers ``[n, side]`` (60 fractional bits; of ``side`` columns ``rows`` count) between the online parties."""

    z: Tensor | None
    n: int
    rows: int
    side: int


def settle_powers_protocol(
    rt: Runtime,
    at: PairPowers,
    look_up: Sequence[str],
    f: int,
    dealer: int,
    *,
    looked_up_f: int = LOOKUP_F,
    below: Callable[[Share], MpcProtocol[Any]] | None = None,
    beside: Callable[[Share], MpcProtocol[Any]] | None = None,
) -> MpcProtocol[list[Any]]:
    """Replicated powers ``[rows, n]`` at scale ``f``, 2 rounds, and what was looked up of their rows' sums ``[look_up,
    rows]``, 2 rounds, or 3 if it is to have fewer than ``LOOKUP_F`` fractional bits.

    Whatever goes on with one of them before the other is there: ``below`` with the powers, ``beside`` with what was
    looked up; their results then stand in its place.
    """
    opened = Opened()

    def total(part: Tensor | None) -> Tensor:
        return known(part).view(at.n, at.side)[:, : at.rows].sum(0)

    def powers_of_sums_protocol() -> MpcProtocol[Any]:
        flat, shape = None if at.z is None else at.z.reshape(-1), torch.Size((at.n * at.side,))
        out = yield from truncate_pair_protocol(rt, flat, shape, _SHIFT - f, f, dealer, opened=opened)
        powers = out.map(lambda t: t.view(at.n, at.side)[:, : at.rows].t().contiguous())
        return powers if below is None else (yield from below(powers))

    def looked_up_protocol() -> MpcProtocol[Any]:
        found = yield from _look_up_protocol(
            rt, at.rows, look_up, dealer, lambda: total(opened.u), lambda: total(opened.v), looked_up_f
        )
        return found if beside is None else (yield from beside(found))

    both: MpcProtocol[list[Any]] = par(powers_of_sums_protocol(), looked_up_protocol())
    return (yield from both)


def _look_up_protocol(
    rt: Runtime,
    rows: int,
    functions: Sequence[str],
    dealer: int,
    u: Callable[[], Tensor],
    v: Callable[[], Tensor],
    f: int = LOOKUP_F,
) -> MpcProtocol[Share]:
    """Functions of ``1 <= s < 16``, ``[functions, rows]``, from ``u + v = s 2^60 (mod 2^64)``, to run beside what
    opens ``v``.

    The upper bits of ``u`` and ``v`` name one of 256 cells, up to the carry of the lower ones; over two cells a
    parabola ``a + b t + c t^2`` will do, with ``t`` the sum of the two places within. The dealer knows its own place,
    so the parabola is one in the online parties' place alone: they pick its three shared coefficients, turned by the
    dealer's cell, and evaluate it by themselves. 2 rounds, 6 KiB per row and function; 3 rounds
    where ``f`` asks for fewer bits.
    """
    role = roles(rt, dealer)
    size, count = 1 << LOOKUP_BITS, len(functions)
    draws = rt.draws()
    right = draws.ring(role.with_right, count, 3, rows, size) if not role.is_left else None
    message = Round()
    y: Tensor | None = None
    if role.is_dealer:
        cell, place = _cell_and_place(u())
        turned = (cell[:, None] + torch.arange(size, device=rt.device)) & (size - 1)
        a, b, c = torch.stack([parabolas(name, rt.device) for name in functions], 1)[..., turned]
        at = place[:, None]
        dealt = torch.stack([a + at * (b + at * c), b + 2 * at * c, c], 1)
        message.send(role.left, kinds.DEALER, dealt - known(right))
        yield message
    else:
        if role.is_left:
            message.want(role.d, kinds.DEALER, torch.int64, count, 3, rows, size)
        got: list[Tensor] = yield message
        cell, place = _cell_and_place(v())
        table = got[0] if role.is_left else known(right)
        a, b, c = table.gather(3, cell[:, None].expand(count, 3, rows, 1)).squeeze(3).unbind(1)
        y = a + place * (b + place * c)
    shape = torch.Size((count, rows))
    if f < LOOKUP_F:
        return (yield from truncate_pair_protocol(rt, y, shape, LOOKUP_F - f, f, dealer))
    return (yield from pair_to_share_protocol(rt, y, shape, LOOKUP_F, dealer))


def _cell_and_place(x: Tensor) -> tuple[Tensor, Tensor]:
    cell = (x >> (64 - LOOKUP_BITS)) & ((1 << LOOKUP_BITS) - 1)
    return cell, (x >> (64 - LOOKUP_BITS - _WITHIN)) & ((1 << _WITHIN) - 1)


@lru_cache(maxsize=8)
def parabolas(name: str, device: torch.device) -> Tensor:
    """``[3, 256]``: coefficients of 1, t and t^2 for every cell, in whole units; zero where no sum of powers lies."""
    rows = [_parabola(name, i) if i >= 8 else (0, 0, 0) for i in range(1 << LOOKUP_BITS)]
    return torch.tensor(rows, dtype=torch.int64, device=device).t().contiguous()


def _parabola(name: str, i: int) -> tuple[int, int, int]:
    """The function of ``(i + t) / 16`` for ``0 <= t <= 2`` through its three Chebyshev points; each coefficient is
    rounded so that the lower ones make up for it. The same on every machine."""
    far = math.sqrt(3.0) / 2
    points = [Decimal((i + 1 + x) / 16) for x in (-far, 0.0, far)]
    low, mid, high = (float(_CONTEXT.divide(1, s) if name == INVERSE else _CONTEXT.ln(s)) for s in points)
    c = (low - 2 * mid + high) / (2 * far * far)
    slope = (high - low) / (2 * far)
    unit = 2.0**-LOOKUP_F * 2.0**_WITHIN
    whole_c = round(c / (unit * 2.0**_WITHIN))
    less_c = c - whole_c * unit * 2.0**_WITHIN
    b = slope - 2 * c + 2 * less_c  # t^2 is 2 t - 1/2, up to a half
    whole_b = round(b / unit)
    a = mid - slope + c - less_c / 2 + (b - whole_b * unit)
    a += b * 2.0**-_WITHIN  # what the two places leave out, on average
    return round(a * 2.0**LOOKUP_F), whole_b, whole_c


def exp(rt: Runtime, x: Share) -> Share:
    """``exp_protocol``, run."""
    return rt.run(exp_protocol(rt, x))
