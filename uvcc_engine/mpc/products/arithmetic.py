"""Linear operations, multiplication and matrix products on replicated shares.

Multiplication is Araki et al. (CCS 2016): party ``i`` computes ``x_i (y_i + y_{i+1}) + x_{i+1} y_i`` (two products,
not three), adds its part of a pseudo-random zero, and sends the sum to party ``i - 1``. Fixed-point products never
re-establish replication before truncating: the additive result goes straight into the dealer's truncation, and the
dealer's knowledge of two components saves one of the six local products (``terms``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.foundation.chunking import CHUNK, chunk_slices, dealt_slices, in_chunks_protocol
from uvcc_engine.mpc.foundation.claim_ledger import ELEMENTWISE, LINEAR, MATMUL, PATCHES, SUMMED, ProductNotes
from uvcc_engine.mpc.foundation.roles import Roles, known, meets_both, roles
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Round, Runtime, par
from uvcc_engine.mpc.foundation.share import Share, encode, placed
from uvcc_engine.mpc.kernels.base import RightFactor
from uvcc_engine.mpc.kernels.layout import broadcast_shape
from uvcc_engine.mpc.products.proved_truncation import truncate_proved_protocol
from uvcc_engine.mpc.products.truncation import MAX_SHIFT, Opened, truncate_product_protocol
from uvcc_engine.transcript.formats import kinds

DEALER = 2
_SCALE_BITS = 11
_LONG = 1 << 10  # summands from which a sum of products is proved in parts
_DEALT = 20  # bytes that the dealer of a truncated product sends for one output, where 16 bits are cut off
_PARTS = 64  # a multiple of what a proof takes at once
Pair = tuple[Share, Share]


def add(x: Share, y: Share) -> Share:
    """``x + y``, shapes broadcast. Local. ConfigError if the scales differ."""
    _same_scale(x, y, "add")
    return Share(x.first + y.first, x.second + y.second, x.f)


def sub(x: Share, y: Share) -> Share:
    """``x - y``, shapes broadcast. Local."""
    _same_scale(x, y, "subtract")
    return Share(x.first - y.first, x.second - y.second, x.f)


def neg(x: Share) -> Share:
    """``-x``. Local. Shape of ``x``."""
    return Share(-x.first, -x.second, x.f)


def public(rt: Runtime, value: Tensor | float, like: Share | None = None, *, f: int | None = None) -> Share:
    """A public constant as a share: component 0 carries it. Local. Shape of ``value``, spread to that of ``like``."""
    scale = f if f is not None else (like.f if like is not None else 16)
    ring = _encoded(rt, value, scale, "public constant")
    if like is not None and ring.shape != like.shape:
        ring = ring.expand(like.shape)
    zero = torch.zeros_like(ring)
    return Share(ring if rt.party == 0 else zero, ring if rt.next == 0 else zero, scale)


def add_public(rt: Runtime, x: Share, value: Tensor | float) -> Share:
    """``x + value`` for a public real value. Local. Shapes broadcast."""
    return add_ring(rt, x, _encoded(rt, value, x.f, "public summand"))


def _encoded(rt: Runtime, value: Tensor | float, f: int, name: str) -> Tensor:
    """A public number's ring element on the device. It is checked on the host, so that no device is waited for."""
    host = value.cpu() if isinstance(value, Tensor) else value
    return encode(torch.as_tensor(host, dtype=torch.float64), f, name=name).to(rt.device, non_blocking=True)


def add_ring(rt: Runtime, x: Share, ring: Tensor | int) -> Share:
    """``x + ring / 2^f`` for a public ring element. Local. Shapes broadcast."""
    if rt.party == 0:
        return Share(x.first + ring, x.second, x.f)
    if rt.next == 0:
        return Share(x.first, x.second + ring, x.f)
    return x


def scale_int(x: Share, factor: Tensor | int) -> Share:
    """``x * factor`` for public integers. Local. Shapes broadcast."""
    return Share(x.first * factor, x.second * factor, x.f)


def integer_scale(scale: float, *, bits: int = _SCALE_BITS, cut: int = 0) -> tuple[int, int]:
    """``scale ~ factor / 2^shift`` with an odd (or zero) integer of at most ``bits + 1`` bits: relative error <
    2^-bits-1. Raises ConfigError for a scale that is not finite. ``cut``: bits that are cut off besides; a scale that
    takes more than ``MAX_SHIFT`` in all, as a late rate, has fewer: it is off by half of 2^-(MAX_SHIFT - cut)."""
    if not math.isfinite(scale):
        raise ConfigError(f"a scale of {scale}", "give a finite number")
    if scale == 0:
        return 0, 0
    mantissa, exponent = math.frexp(scale)
    factor, shift = round(mantissa * 2 ** (bits + 1)), bits + 1 - exponent
    if (beyond := shift - (MAX_SHIFT - cut)) > 0:
        factor, shift = (factor + (1 << beyond - 1)) >> beyond, shift - beyond
    while factor and factor % 2 == 0:
        factor, shift = factor // 2, shift - 1
    return factor, shift


def zero_share(rt: Runtime, shape: Sequence[int]) -> Tensor:
    """This party's part of a pseudo-random additive sharing of zero (Araki et al.), int64 of the given shape. Local."""
    draws = rt.draws()
    return draws.ring(rt.next, *shape) - draws.ring(rt.party, *shape)


LocalPart = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
Cut = Callable[[Tensor], Tensor]


def terms(role: Roles | None, x: Share) -> list[Tensor]:
    """This party's left factors of ``x y``; ``partners`` gives the right ones.

    Without a dealer the nine products of components are shared out evenly, two local products each. A dealer forms four
    of them in one product, ``(x_d + x_{d+1}) (y_d + y_{d+1})``: five local products over the three parties, not six.
    Each has the shape of ``x``.
    """
    if role is not None and role.is_dealer:
        return [x.first + x.second]
    return [x.first, x.second]


def partners(role: Roles | None, y: Share) -> list[Tensor]:
    """See ``terms``. Each has the shape of ``y``."""
    if role is None:
        return [y.first + y.second, y.first]
    if role.is_dealer:
        return [y.first + y.second]
    if role.is_left:
        return [y.second, y.first + y.second]
    return [y.second, y.first]


def mul_protocol(rt: Runtime, x: Share, y: Share, *, scale: float = 1.0, dealer: int = DEALER) -> MpcProtocol[Share]:
    """Elementwise ``x * y * scale``, broadcasting; the result keeps ``x.f``.

    ``y.f = 0`` and an integer scale (a bit times a value): 1 round, 24 bytes per output. Otherwise 2 rounds,
    34 to 40 bytes where 16 bits are cut off.
    """
    _fit_together(x, y, "multiply")
    if x.shape != y.shape or len(places := chunk_slices(x.n)) == 1:
        return (yield from _product_protocol(rt, x, y, None, scale, dealer, form=ELEMENTWISE))
    a, b = x.reshape(-1), y.reshape(-1)

    def build(dealer: int, place: slice, outs: Sequence[Share | None]) -> MpcProtocol[list[Share]]:
        parts = a.index(place), b.index(place)
        return [(yield from _product_protocol(rt, *parts, None, scale, dealer, out=outs[0], form=ELEMENTWISE))]

    (product,) = yield from in_chunks_protocol(places, a.shape, [x.f], build, dealer, rt.device)
    return product.reshape(*x.shape)


def matmul_protocol(rt: Runtime, x: Share, y: Share, *, scale: float = 1.0, dealer: int = DEALER) -> MpcProtocol[Share]:
    """``(x @ y) * scale`` for ``[..., m, k] @ [..., k, n]``; the result keeps ``x.f``.

    Rounds and bytes as ``mul_protocol``, per output element; five local matrix products over the three parties.
    """
    _check_matmul(x, y)
    rows = [slice(0, 1)]
    if x.first.dim() == 2 and y.first.dim() == 2:
        rows = chunk_slices(x.shape[0], max(64, CHUNK // max(1, y.shape[1])))
        rows = rows if len(rows) > 1 else dealt_slices(rt, x.shape[0], _DEALT * x.shape[0] * y.shape[1] if y.f else 0)
    if len(rows) == 1:
        return (yield from _product_protocol(rt, x, y, matmul_local(rt, x), scale, dealer, form=MATMUL))
    whole = object()
    ready: dict[int, RightFactor] = {}  # by dealer: chunks with one dealer share their prepared right factor

    def build(dealer: int, place: slice, outs: Sequence[Share | None]) -> MpcProtocol[list[Share]]:
        def local(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
            if dealer not in ready:
                ready[dealer] = rt.kernels.right_factor(ys, rows[0].stop)
            return ready[dealer](xs)

        part = _product_protocol(rt, x.index(place), y, local, scale, dealer, out=outs[0], form=MATMUL, whole=whole)
        return [(yield from part)]

    (product,) = yield from in_chunks_protocol(
        rows, torch.Size((x.shape[0], y.shape[1])), [x.f], build, dealer, rt.device
    )
    return product


def matmul_local(rt: Runtime, x: Share) -> LocalPart:
    """The matrix products of one party's factors, added up."""
    rows = x.shape[0] if x.first.dim() == 2 else 0
    return lambda xs, ys: rt.kernels.right_factor(ys, rows)(xs)


def matmul_open_protocol(
    rt: Runtime, x: Share, y: Share, opened: Opened, *, dealer: int = DEALER
) -> MpcProtocol[Share]:
    """``matmul_protocol`` that lets a comparison beside it start from the masked product (``opened``).

    ``x``: [..., m, k]; ``y``: [..., k, n].
    """
    _check_matmul(x, y)
    return (yield from _product_protocol(rt, x, y, matmul_local(rt, x), 1.0, dealer, opened, form=MATMUL))


def product_with_protocol(
    rt: Runtime,
    x: Share,
    y: Share,
    local: Callable[[Tensor, Tensor], Tensor],
    *,
    scale: float = 1.0,
    dealer: int = DEALER,
    cut: Cut | None = None,
) -> MpcProtocol[Share]:
    """Any bilinear ``local(x, y)`` (convolution, einsum) as a secure product. Costs as ``mul_protocol`` per output.

    ``cut``: where ``local`` is the transpose of this public map after a matrix product; such a product can be proved.
    """
    form = PATCHES if cut is not None else ""
    return (yield from _product_protocol(rt, x, y, bilinear(local), scale, dealer, form=form, cut=cut))


def dot_protocol(rt: Runtime, x: Share, y: Share, *, scale: float = 1.0, dealer: int = DEALER) -> MpcProtocol[Share]:
    """``sum x y * scale`` of two shares of one shape, ``[1]``. Costs as ``mul_protocol`` for one output.

    A long one is proved in ``_PARTS`` parts, which are truncated each: one product of matrices would take a hundred
    times the memory.
    """
    if rt.ledger is not None and x.n >= _LONG:
        left, right = (s.map(_in_parts) for s in (x, y))
        parts = yield from form_protocol(rt, left, right, bilinear(_summed), SUMMED, scale=scale, dealer=dealer)
        return parts.sum(0, keepdim=True)
    total = yield from matmul_protocol(rt, x.reshape(1, -1), y.reshape(-1, 1), scale=scale, dealer=dealer)
    return total.reshape(1)


def _in_parts(x: Tensor) -> Tensor:
    flat = x.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -len(flat) % _PARTS)).reshape(_PARTS, -1)


def _summed(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1)


def form_protocol(
    rt: Runtime,
    x: Share,
    y: Share,
    local: LocalPart | None,
    form: str,
    *,
    scale: float = 1.0,
    dealer: int = DEALER,
    cut: Cut | None = None,
    watched: bool = True,
) -> MpcProtocol[Share]:
    """A product by what every party computes of its factors (``local``) and what that is (``form``: claim_ledger).

    ``cut``: of the form ``PATCHES``. ``watched``: see ``truncate_proved_protocol``. The shape is that of ``local``;
    None multiplies element by element.
    """
    return (yield from _product_protocol(rt, x, y, local, scale, dealer, form=form, cut=cut, watched=watched))


def bilinear(local: Callable[[Tensor, Tensor], Tensor]) -> LocalPart:
    """The sum of ``local`` over the pairs of factors. The shape is that of ``local``."""

    def total(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
        found = local(xs[0], ys[0])
        return found if len(xs) == 1 else found + local(xs[1], ys[1])

    return total


def _check_matmul(x: Share, y: Share) -> None:
    _one_device(x, y, "multiply")
    if x.shape[-1] != y.shape[-2 if y.first.dim() > 1 else -1]:
        raise ConfigError(f"matrix product of shapes {tuple(x.shape)} and {tuple(y.shape)}", "inner sizes must agree")


def _product_protocol(
    rt: Runtime,
    x: Share,
    y: Share,
    local: LocalPart | None,
    scale: float,
    dealer: int,
    opened: Opened | None = None,
    out: Share | None = None,
    form: str = "",
    cut: Cut | None = None,
    whole: object | None = None,
    watched: bool = True,
) -> MpcProtocol[Share]:
    z, shift = additive_product(rt, x, y, local, scale, dealer, form, cut, whole)
    if rt.ledger is not None:
        return (yield from _proved_protocol(rt, rt.ledger.last, shift, x.f, dealer, opened, out, watched))
    if shift > 0:
        return (yield from truncate_product_protocol(rt, z, shift, x.f, dealer, opened=opened, out=out))
    return (yield from reshare_protocol(rt, z, x.f, out))


def _proved_protocol(
    rt: Runtime,
    notes: ProductNotes,
    shift: int,
    f: int,
    dealer: int,
    opened: Opened | None = None,
    out: Share | None = None,
    watched: bool = True,
) -> MpcProtocol[Share]:
    """A product in the ledger, truncated or reshared such that every message of it can be proved."""
    if shift > 0:
        found = yield from truncate_proved_protocol(rt, notes, shift, f, dealer, opened=opened, watched=watched)
    else:
        found = yield from reshare_protocol(rt, notes.z, f, proved=True)
        notes.received[rt.next] = found.second
    known(rt.ledger).settle(notes)
    return placed(found, out)


def additive_product(
    rt: Runtime,
    x: Share,
    y: Share,
    local: LocalPart | None,
    scale: float,
    dealer: int,
    form: str = "",
    cut: Cut | None = None,
    whole: object | None = None,
) -> tuple[Tensor, int]:
    """This party's additive share of ``x * y * scale``, re-randomised, and by how many bits to truncate it. Local.

    ``form`` (with ``cut``, and ``whole``: see ``ProductNotes``) says what ``local`` computes; where products are proved
    it is filed as a claim, the ledger's last. The shape is that of ``local``; None multiplies element by element.
    """
    factor, extra = integer_scale(scale, cut=y.f)
    if extra < 0:
        factor, extra = factor << -extra, 0
    shift = y.f + extra
    role = roles(rt, dealer) if shift > 0 else None
    z = local(terms(role, x), partners(role, y)) if local is not None else None
    shape = z.shape if z is not None else broadcast_shape(x.shape, y.shape)
    draws = rt.draws()
    plus, minus = draws.ring(rt.next, *shape), draws.ring(rt.party, *shape)
    if z is not None:
        z = rt.kernels.blind(z, factor, plus, minus)
    else:
        z = rt.kernels.mul_blinded(*meets_both(role), (x.first, x.second), (y.first, y.second), factor, plus, minus)
    if rt.ledger is not None:
        deals = dealer if shift > 0 else None
        rt.ledger.file(ProductNotes(form, x, y, factor, deals, minus, plus, z, cut=cut, whole=whole))
    return z, shift


def reshare_protocol(
    rt: Runtime, z: Tensor, f: int, out: Share | None = None, *, proved: bool = False
) -> MpcProtocol[Share]:
    """Additive shares (masked by a zero share) to replicated ones: 1 round, 24 bytes per element. Shape of ``z``.

    ``proved``: the ledger has what the summand is.
    """
    message = Round(proved=proved)
    message.send(rt.prev, kinds.RESHARE, z)
    message.want(rt.next, kinds.RESHARE, torch.int64, *z.shape)
    (other,) = yield message
    if out is None:
        return Share(z, other, f)
    out.first.copy_(z)
    out.second.copy_(other)
    return out


def mul(rt: Runtime, x: Share, y: Share, *, scale: float = 1.0) -> Share:
    """``mul_protocol``, run."""
    return rt.run(mul_protocol(rt, x, y, scale=scale))


def matmul(rt: Runtime, x: Share, y: Share, *, scale: float = 1.0) -> Share:
    """``matmul_protocol``, run."""
    return rt.run(matmul_protocol(rt, x, y, scale=scale))


def mul_many(rt: Runtime, pairs: Sequence[Pair]) -> list[Share]:
    """Independent products, element by element, in the rounds of one."""
    return rt.run(par(*[mul_protocol(rt, x, y) for x, y in pairs]))


def matmul_many(rt: Runtime, pairs: Sequence[Pair], *, scales: Sequence[float] | None = None) -> list[Share]:
    """Independent matrix products in the rounds of one."""
    factors = scales if scales is not None else [1.0] * len(pairs)
    return rt.run(par(*[matmul_protocol(rt, x, y, scale=s) for (x, y), s in zip(pairs, factors, strict=True)]))


def mul_public_protocol(rt: Runtime, x: Share, value: float, *, dealer: int = DEALER) -> MpcProtocol[Share]:
    """``x * value`` for a public real value: local if it is an integer, else a truncation (2 rounds, 40 bytes)."""
    factor, shift = integer_scale(value, bits=15)
    if shift <= 0:
        return scale_int(x, factor << -shift)
    return (yield from _truncate_linear_protocol(rt, x, factor, shift, x.f, dealer))


def mul_public(rt: Runtime, x: Share, value: float) -> Share:
    """``mul_public_protocol``, run."""
    return rt.run(mul_public_protocol(rt, x, value))


def rescale_protocol(rt: Runtime, x: Share, f: int, *, dealer: int = DEALER) -> MpcProtocol[Share]:
    """The same number at another scale: local upwards, a truncation downwards (2 rounds, 40 bytes)."""
    if f >= x.f:
        return scale_int(x, 1 << (f - x.f)).with_f(f)
    return (yield from _truncate_linear_protocol(rt, x, 1, x.f - f, f, dealer))


def _truncate_linear_protocol(
    rt: Runtime, x: Share, factor: int, shift: int, f: int, dealer: int
) -> MpcProtocol[Share]:
    draws = rt.draws()
    plus, minus = draws.ring(rt.next, *x.shape), draws.ring(rt.party, *x.shape)
    z = x.first * factor + plus - minus
    if rt.ledger is None:
        return (yield from truncate_product_protocol(rt, z, shift, f, dealer))
    notes = rt.ledger.file(ProductNotes(LINEAR, x, None, factor, dealer, minus, plus, z))
    return (yield from _proved_protocol(rt, notes, shift, f, dealer))


def _same_scale(x: Share, y: Share, verb: str) -> None:
    _fit_together(x, y, verb)
    if x.f != y.f:
        raise ConfigError(
            f"cannot {verb} shares at f={x.f} and f={y.f}", "bring them to one scale with rescale_protocol"
        )


def _fit_together(x: Share, y: Share, verb: str) -> None:
    _one_device(x, y, verb)
    if any(a != b and 1 not in (a, b) for a, b in zip(reversed(x.shape), reversed(y.shape), strict=False)):
        raise ConfigError(
            f"cannot {verb} shares of shapes {tuple(x.shape)} and {tuple(y.shape)}", "make one fit the other"
        )


def _one_device(x: Share, y: Share, verb: str) -> None:
    if x.first.device != y.first.device:
        raise ConfigError(f"cannot {verb} shares on {x.first.device} and {y.first.device}", "move both to one device")
