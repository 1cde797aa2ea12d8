"""Products that stay additively shared between the parties until they have been summed up.

Each party's term of a secure product is local. Sums over microbatches, tensor ranks and replicas are taken of these
terms, inside each party and without a message between parties, and truncated once: the result is off by at most the
one unit of a single truncation, however many terms there were.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from uvcc_engine.mpc.foundation.roles import roles
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime, par
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.products.arithmetic import (
    DEALER,
    add,
    add_ring,
    integer_scale,
    matmul_protocol,
    partners,
    rescale_protocol,
    reshare_protocol,
    terms,
)
from uvcc_engine.mpc.products.truncation import truncate_product_protocol

Linear = Callable[[Tensor], Tensor]
"""A public linear map of ring elements."""


def product(rt: Runtime, x: Share, y: Share, dealer: int) -> Tensor:
    """This party's additive term of ``x @ y`` ([m, k] and [k, n]), at scale ``x.f + y.f``. Local.

    Terms may be added up only if they were made for one dealer, who is the dealer of :func:`settle_protocol`, too. They
    are not re-randomised: they may be moved inside the party only.
    """
    role = roles(rt, dealer)
    return rt.kernels.right_factor(partners(role, y), x.shape[0])(terms(role, x))


def summed_term(rt: Runtime, x: Share, y: Share, axis: int, dealer: int) -> Tensor:
    """This party's additive term of ``sum(x * y)`` along an axis, of two shares of one shape, as :func:`product` gives
    that of a matrix product. Local."""
    role = roles(rt, dealer)
    pairs = zip(terms(role, x), partners(role, y), strict=True)
    first, *others = [(a * b).sum(axis) for a, b in pairs]
    for other in others:
        first += other
    return first


def public_product_protocol(
    rt: Runtime,
    x: Share,
    factor: Tensor,
    added: Tensor | None = None,
    *,
    after: Linear | None = None,
    also: tuple[Share, Share] | None = None,
) -> MpcProtocol[Share]:
    """``x @ factor + added`` for public ring elements at the scale of ``x``: 2 rounds, 40 bytes a number.

    ``x``: [m, k]; ``factor``: [k, n]; ``added``: spread to [m, n]. ``after``: a public linear map of the outcome.
    ``also``: two shares whose secret product is added, in the same truncation; where products are proved it is a claim
    of its own, truncated by itself. One local product, where a secure one takes five of three parties.
    """

    def local(t: Tensor) -> Tensor:
        found = rt.kernels.right_factor([factor], t.shape[0])([t])
        return found if after is None else after(found)

    return (yield from _public_protocol(rt, x, local, added, also))


def public_scaling_protocol(rt: Runtime, x: Share, factor: Tensor, added: Tensor | None = None) -> MpcProtocol[Share]:
    """The same element by element: ``x * factor + added``, shapes spread. 2 rounds."""
    return (yield from _public_protocol(rt, x, lambda t: t * factor, added, None))


def _public_protocol(
    rt: Runtime, x: Share, local: Linear, added: Tensor | None, also: tuple[Share, Share] | None
) -> MpcProtocol[Share]:
    """A public linear map doubles the scale; where products are proved both components go through it, so that what is
    truncated is a share."""
    if rt.ledger is None:
        term = local(x.first)
        if added is not None and rt.party == 0:
            term = term + (added << x.f)
        if also is not None:
            term = term + product(rt, *also, DEALER)
        return (yield from settle_protocol(rt, term, x.f, x.f, DEALER))
    whole = x.map(local).with_f(2 * x.f)
    whole = whole if added is None else add_ring(rt, whole, added << x.f)
    steps: list[MpcProtocol[Share]] = [rescale_protocol(rt, whole, x.f)]
    steps += [] if also is None else [matmul_protocol(rt, *also)]
    first, *rest = yield from par(*steps)
    return add(first, rest[0]) if rest else first


def settle_protocol(rt: Runtime, z: Tensor, shift: int, f: int, dealer: int, scale: float = 1.0) -> MpcProtocol[Share]:
    """``scale * z / 2^shift`` from additive terms ``z`` at scale ``f + shift``, re-randomised and truncated.

    2 rounds, 1 where nothing is cut off; the result has ``f`` fractional bits. ``z`` is used up. Shape of ``z``.
    """
    factor, extra = integer_scale(scale, cut=shift)
    if extra < 0:
        factor, extra = factor << -extra, 0
    draws = rt.draws()
    z = rt.kernels.blind(z, factor, draws.ring(rt.next, *z.shape), draws.ring(rt.party, *z.shape))
    if shift + extra == 0:
        return (yield from reshare_protocol(rt, z, f))
    return (yield from truncate_product_protocol(rt, z, shift + extra, f, dealer))
