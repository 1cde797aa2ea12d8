"""Products that stay additively shared between the parties until they have been summed up.

Each party's term of a secure product is local. Sums over microbatches, tensor ranks and replicas are taken of these
terms, inside each party and without a message between parties, and truncated once: the result is off by at most the
one unit of a single truncation, however many terms there were.
"""

from __future__ import annotations

from torch import Tensor

from uvcc_engine.mpc.foundation.roles import roles
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.products.arithmetic import integer_scale, partners, terms
from uvcc_engine.mpc.products.truncation import truncate_product_protocol


def product(rt: Runtime, x: Share, y: Share, dealer: int) -> Tensor:
    """This party's additive term of ``x @ y`` ([m, k] and [k, n]), at scale ``x.f + y.f``. Local.

    Terms may be added up only if they were made for one dealer, who is the dealer of :func:`settle_protocol`, too. They
    are not re-randomised: they may be moved inside the party only.
    """
    role = roles(rt, dealer)
    return rt.kernels.right_factor(partners(role, y), x.shape[0])(terms(role, x))


def public_product(rt: Runtime, x: Share, factor: Tensor, added: Tensor | None = None) -> Tensor:
    """This party's additive term of ``x @ factor + added`` for public ring elements at scale ``x.f``. Local.

    One local product, where a secure one takes five of three parties; it may be added to terms of :func:`product` for
    any dealer. ``x``: [m, k]; ``factor``: [k, n]; ``added``: spread to [m, n].
    """
    return _with_public(rt, x, rt.kernels.right_factor([factor], x.shape[0])([x.first]), added)


def public_scaling(rt: Runtime, x: Share, factor: Tensor, added: Tensor | None = None) -> Tensor:
    """The same element by element: ``x * factor + added``, shapes spread. Local."""
    return _with_public(rt, x, x.first * factor, added)


def _with_public(rt: Runtime, x: Share, term: Tensor, added: Tensor | None) -> Tensor:
    return term if added is None or rt.party != 0 else term + (added << x.f)


def settle_protocol(rt: Runtime, z: Tensor, shift: int, f: int, dealer: int, scale: float = 1.0) -> MpcProtocol[Share]:
    """``scale * z / 2^shift`` from additive terms ``z`` at scale ``f + shift``, re-randomised and truncated.

    2 rounds; the result has ``f`` fractional bits. ``z`` is used up. Shape of ``z``.
    """
    factor, extra = integer_scale(scale)
    if extra < 0:
        factor, extra = factor << -extra, 0
    draws = rt.draws()
    z = rt.kernels.blind(z, factor, draws.ring(rt.next, *z.shape), draws.ring(rt.party, *z.shape))
    return (yield from truncate_product_protocol(rt, z, shift + extra, f, dealer))
