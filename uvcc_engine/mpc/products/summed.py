"""Products entry by entry, added up along one axis: what norms and their gradients are made of."""

from __future__ import annotations

from torch import Tensor

from uvcc_engine.mpc.foundation.claim_ledger import SUMMED
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.products.arithmetic import DEALER, bilinear, form_protocol


def summed_products_protocol(
    rt: Runtime, x: Share, y: Share, axis: int, *, scale: float = 1.0, keepdim: bool = False, dealer: int = DEALER
) -> MpcProtocol[Share]:
    """``sum(x * y) * scale`` along an axis of two shares of one shape; the result keeps ``x.f``. 2 rounds.

    The sum is taken before the one truncation, so it is off by a unit. It is one claim where products are proved.
    """
    left, right = (s.map(lambda t: t.movedim(axis, -1)) for s in (x, y))

    def local(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(-1)

    total = yield from form_protocol(rt, left, right, bilinear(local), SUMMED, scale=scale, dealer=dealer)
    return total.map(lambda t: t.unsqueeze(axis)) if keepdim else total
