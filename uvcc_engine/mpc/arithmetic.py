"""Linear operations, multiplication and matrix products on replicated shares.

Multiplication is Araki et al. (CCS 2016): party ``i`` computes ``x_i (y_i + y_{i+1}) + x_{i+1} y_i`` (two products,
not three), adds its part of a pseudo-random zero, and sends the sum to party ``i - 1``. Fixed-point products never
re-establish replication before truncating: the additive result goes straight into the dealer's truncation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.pieces import PIECE, cuts
from uvcc_engine.mpc.runtime import Round, Runtime, Steps, par
from uvcc_engine.mpc.share import Share, encode
from uvcc_engine.mpc.truncation import Opened, truncate_product_gen
from uvcc_engine.transcript import kinds

DEALER = 2
_SCALE_BITS = 11
Pair = tuple[Share, Share]


def add(x: Share, y: Share) -> Share:
    """``x + y``, broadcasting. Local. ConfigError if the scales differ."""
    _same_scale(x, y, "add")
    return Share(x.lo + y.lo, x.hi + y.hi, x.f)


def sub(x: Share, y: Share) -> Share:
    """``x - y``, broadcasting. Local."""
    _same_scale(x, y, "subtract")
    return Share(x.lo - y.lo, x.hi - y.hi, x.f)


def neg(x: Share) -> Share:
    """``-x``. Local."""
    return Share(-x.lo, -x.hi, x.f)


def public(rt: Runtime, value: Tensor | float, like: Share | None = None, *, f: int | None = None) -> Share:
    """A public constant as a share: component 0 carries it. Local."""
    scale = f if f is not None else (like.f if like is not None else 16)
    ring = encode(torch.as_tensor(value, dtype=torch.float64, device=rt.device), scale, name="public constant")
    if like is not None and ring.shape != like.shape:
        ring = ring.expand(like.shape)
    zero = torch.zeros_like(ring)
    return Share(ring if rt.party == 0 else zero, ring if rt.next == 0 else zero, scale)


def add_public(rt: Runtime, x: Share, value: Tensor | float) -> Share:
    """``x + value`` for a public real value. Local."""
    ring = encode(torch.as_tensor(value, dtype=torch.float64, device=rt.device), x.f, name="public summand")
    return add_ring(rt, x, ring)


def add_ring(rt: Runtime, x: Share, ring: Tensor | int) -> Share:
    """``x + ring / 2^f`` for a public ring element. Local."""
    if rt.party == 0:
        return Share(x.lo + ring, x.hi, x.f)
    if rt.next == 0:
        return Share(x.lo, x.hi + ring, x.f)
    return x


def scale_int(x: Share, factor: Tensor | int) -> Share:
    """``x * factor`` for public integers. Local."""
    return Share(x.lo * factor, x.hi * factor, x.f)


def integer_scale(scale: float, *, bits: int = _SCALE_BITS) -> tuple[int, int]:
    """``scale ~ factor / 2^shift`` with an odd (or zero) integer of at most ``bits + 1`` bits: relative error <
    2^-bits-1."""
    if not math.isfinite(scale):
        raise ConfigError(f"a scale of {scale}", "give a finite number")
    if scale == 0:
        return 0, 0
    mantissa, exponent = math.frexp(scale)
    factor, shift = round(mantissa * 2 ** (bits + 1)), bits + 1 - exponent
    while factor % 2 == 0:
        factor, shift = factor // 2, shift - 1
    return factor, shift


def zero_share(rt: Runtime, shape: Sequence[int]) -> Tensor:
    """This party's part of a pseudo-random additive sharing of zero (Araki et al.). No communication."""
    draws = rt.draws()
    return draws.ring(rt.next, *shape) - draws.ring(rt.party, *shape)


def mul_gen(rt: Runtime, x: Share, y: Share, *, scale: float = 1.0, dealer: int = DEALER) -> Steps[Share]:
    """Elementwise ``x * y * scale``, broadcasting; the result keeps ``x.f``.

    ``y.f = 0`` and an integer scale (a bit times a value): 1 round, 24 bytes per output. Otherwise 2 rounds, 40 bytes.
    """
    if x.shape == y.shape and len(places := cuts(x.n)) > 1:
        a, b = x.reshape(-1), y.reshape(-1)

        def build(at: int, place: slice) -> Steps[Share]:
            return _product_gen(rt, a.index(place), b.index(place), rt.kernels.mul, scale, (dealer + at) % 3)

        return (yield from _assembled_gen(build, places, x.shape, x.f))
    return (yield from _product_gen(rt, x, y, rt.kernels.mul, scale, dealer))


def matmul_gen(rt: Runtime, x: Share, y: Share, *, scale: float = 1.0, dealer: int = DEALER) -> Steps[Share]:
    """``(x @ y) * scale`` for ``[..., m, k] @ [..., k, n]``; the result keeps ``x.f``.

    Rounds and bytes as ``mul_gen``, per output element; two local matrix products.
    """
    _check_matmul(x, y)
    if x.lo.dim() == 2 and y.lo.dim() == 2 and len(rows := cuts(x.shape[0], max(1, PIECE // y.shape[1]))) > 1:

        def build(at: int, place: slice) -> Steps[Share]:
            return _product_gen(rt, x.index(place), y, rt.kernels.matmul, scale, (dealer + at) % 3)

        return (yield from _assembled_gen(build, rows, torch.Size((x.shape[0], y.shape[1])), x.f))
    return (yield from _product_gen(rt, x, y, rt.kernels.matmul, scale, dealer))


def matmul_open_gen(rt: Runtime, x: Share, y: Share, opened: Opened, *, dealer: int = DEALER) -> Steps[Share]:
    """``matmul_gen`` that lets a comparison beside it start from the masked product (``opened``)."""
    _check_matmul(x, y)
    return (yield from _product_gen(rt, x, y, rt.kernels.matmul, 1.0, dealer, opened))


def product_with_gen(
    rt: Runtime,
    x: Share,
    y: Share,
    local: Callable[[Tensor, Tensor], Tensor],
    *,
    scale: float = 1.0,
    dealer: int = DEALER,
) -> Steps[Share]:
    """Any bilinear ``local(x, y)`` (convolution, einsum) as a secure product. Costs as ``mul_gen`` per output."""
    return (yield from _product_gen(rt, x, y, lambda a, b, c, d: local(a, b + d) + local(c, b), scale, dealer))


def _check_matmul(x: Share, y: Share) -> None:
    if x.shape[-1] != y.shape[-2 if y.lo.dim() > 1 else -1]:
        raise ConfigError(f"matrix product of shapes {tuple(x.shape)} and {tuple(y.shape)}", "inner sizes must agree")


def _assembled_gen(
    build: Callable[[int, slice], Steps[Share]], places: Sequence[slice], shape: torch.Size, f: int
) -> Steps[Share]:
    """Run the pieces side by side and put each into its place along the first axis as it finishes."""
    whole: list[Share] = []

    def into_gen(at: int, place: slice) -> Steps[None]:
        found = yield from build(at, place)
        if not whole:
            lead = places[-1].stop
            empty = torch.empty((lead, *found.shape[1:]), dtype=torch.int64, device=found.lo.device)
            whole.append(Share(empty, torch.empty_like(empty), f))
        whole[0].lo[place] = found.lo
        whole[0].hi[place] = found.hi

    yield from par(*[into_gen(at, place) for at, place in enumerate(places)])
    return whole[0].reshape(*shape)


def _product_gen(
    rt: Runtime,
    x: Share,
    y: Share,
    cross: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    scale: float,
    dealer: int,
    opened: Opened | None = None,
) -> Steps[Share]:
    factor, extra = integer_scale(scale)
    if extra < 0:
        factor, extra = factor << -extra, 0
    z = cross(x.lo, y.lo, x.hi, y.hi)
    draws = rt.draws()
    z = rt.kernels.blind(z, factor, draws.ring(rt.next, *z.shape), draws.ring(rt.party, *z.shape))
    shift = y.f + extra
    if shift > 0:
        return (yield from truncate_product_gen(rt, z, shift, x.f, dealer, opened=opened))
    return (yield from reshare_gen(rt, z, x.f))


def reshare_gen(rt: Runtime, z: Tensor, f: int) -> Steps[Share]:
    """Additive shares (masked by a zero share) to replicated ones: 1 round, 24 bytes per element."""
    message = Round()
    message.send(rt.prev, kinds.RESHARE, z)
    message.want(rt.next, kinds.RESHARE, torch.int64, *z.shape)
    (other,) = yield message
    return Share(z, other, f)


def mul(rt: Runtime, x: Share, y: Share, *, scale: float = 1.0) -> Share:
    """``mul_gen``, run."""
    return rt.run(mul_gen(rt, x, y, scale=scale))


def matmul(rt: Runtime, x: Share, y: Share, *, scale: float = 1.0) -> Share:
    """``matmul_gen``, run."""
    return rt.run(matmul_gen(rt, x, y, scale=scale))


def mul_many(rt: Runtime, pairs: Sequence[Pair]) -> list[Share]:
    """Independent elementwise products in the rounds of one."""
    return rt.run(par(*[mul_gen(rt, x, y) for x, y in pairs]))


def matmul_many(rt: Runtime, pairs: Sequence[Pair], *, scales: Sequence[float] | None = None) -> list[Share]:
    """Independent matrix products in the rounds of one."""
    factors = scales if scales is not None else [1.0] * len(pairs)
    return rt.run(par(*[matmul_gen(rt, x, y, scale=s) for (x, y), s in zip(pairs, factors, strict=True)]))


def mul_public_gen(rt: Runtime, x: Share, value: float, *, dealer: int = DEALER) -> Steps[Share]:
    """``x * value`` for a public real value: local if it is an integer, else a truncation (2 rounds, 40 bytes)."""
    factor, shift = integer_scale(value, bits=15)
    if shift <= 0:
        return scale_int(x, factor << -shift)
    z = x.lo * factor + zero_share(rt, x.shape)
    return (yield from truncate_product_gen(rt, z, shift, x.f, dealer))


def mul_public(rt: Runtime, x: Share, value: float) -> Share:
    """``mul_public_gen``, run."""
    return rt.run(mul_public_gen(rt, x, value))


def rescale_gen(rt: Runtime, x: Share, f: int, *, dealer: int = DEALER) -> Steps[Share]:
    """The same number at another scale: local upwards, a truncation downwards (2 rounds, 40 bytes)."""
    if f >= x.f:
        return scale_int(x, 1 << (f - x.f)).with_f(f)
    z = x.lo + zero_share(rt, x.shape)
    return (yield from truncate_product_gen(rt, z, x.f - f, f, dealer))


def _same_scale(x: Share, y: Share, verb: str) -> None:
    if x.f != y.f:
        raise ConfigError(f"cannot {verb} shares at f={x.f} and f={y.f}", "bring them to one scale with rescale_gen")
