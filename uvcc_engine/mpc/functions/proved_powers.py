"""The exponential by products alone, so that every message of it can be proved.

``e^x = (1 + y + y^2 / 2)^(2^7)`` with ``y = x / 2^7``, up to a relative error of ``|x|^3 / (6 4^7)``: the absolute one
is below 2^-16, as ``x`` is not positive. What lies below ``-EXP_RANGE`` is lifted to it first.
"""

from __future__ import annotations

from typing import Final

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.comparisons.selection import relu_only_protocol
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.products.arithmetic import DEALER, add, add_public, mul_protocol, scale_int

EXP_RANGE: Final = 16
SQUARINGS: Final = 7
_WITHIN: Final = 26  # fractional bits on the way


def exp_by_products_protocol(rt: Runtime, x: Share, *, dealer: int = DEALER) -> MpcProtocol[Share]:
    """``e^x`` for any ``x <= 2^-f``; ``e^-16`` below -16, which is less than a unit. 26 rounds.

    Shape and scale kept. Absolute error below 2^-15 + one unit. Raises ConfigError for a scale above 19 bits.
    """
    if not 0 < x.f <= _WITHIN - SQUARINGS:
        raise ConfigError(f"the exponential at f={x.f}", f"use 1 to {_WITHIN - SQUARINGS} bits here")
    lifted = yield from relu_only_protocol(rt, add_public(rt, x, float(EXP_RANGE)), dealer=dealer)
    clipped = add_public(rt, lifted, -float(EXP_RANGE))
    y = scale_int(clipped, 1 << (_WITHIN - SQUARINGS - x.f)).with_f(_WITHIN)
    half_square = yield from mul_protocol(rt, y, y, scale=0.5, dealer=dealer)
    power = add_public(rt, add(y, half_square), 1.0)
    for _ in range(SQUARINGS - 1):
        power = yield from mul_protocol(rt, power, power, dealer=dealer)
    # the last one brings it to scale, too: of 2 * 26 fractional bits f are left
    return (yield from mul_protocol(rt, power.with_f(x.f), power.with_f(2 * _WITHIN - x.f), dealer=dealer))
