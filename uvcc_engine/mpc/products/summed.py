"""Products entry by entry, added up along one axis: what norms and their gradients are made of."""

from __future__ import annotations

from torch import Tensor

from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.products.arithmetic import DEALER, mul_protocol, mul_public_protocol, product_with_protocol


def summed_products_protocol(
    rt: Runtime, x: Share, y: Share, axis: int, *, scale: float = 1.0, keepdim: bool = False, dealer: int = DEALER
) -> MpcProtocol[Share]:
    """``sum(x * y) * scale`` along an axis of two shares of one shape; the result keeps ``x.f``. 2 rounds.

    The sum is taken before the one truncation, so it is off by a unit. Where products are proved every single one is
    truncated, as a claim of the form that has a proof, and their sum after it: 4 rounds, and off by a unit for every
    product before the scale.
    """
    if rt.ledger is None:

        def local(a: Tensor, b: Tensor) -> Tensor:
            return (a * b).sum(axis, keepdim=keepdim)

        return (yield from product_with_protocol(rt, x, y, local, scale=scale, dealer=dealer))
    products = yield from mul_protocol(rt, x, y, dealer=dealer)
    return (yield from mul_public_protocol(rt, products.sum(axis, keepdim=keepdim), scale, dealer=dealer))
