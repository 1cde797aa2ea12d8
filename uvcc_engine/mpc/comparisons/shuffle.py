"""A secret permutation: no party learns which row went where (Araki et al., "Secure graph analysis at scale", CCS
2021).

Three times over, two parties permute by an order that only they know, and hand the result on under fresh masks; each
party misses one of the three orders.
"""

from __future__ import annotations

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.comparisons.selection import pair_to_share_protocol
from uvcc_engine.mpc.foundation.roles import mine_part, online_part, roles
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share, cat


def shuffle_protocol(rt: Runtime, x: Share) -> MpcProtocol[Share]:
    """The rows of ``[n, ...]`` in a uniformly random secret order. 3 rounds, 48 bytes per element."""
    for left_out in range(3):
        role = roles(rt, left_out)
        draws = rt.draws()
        part: Tensor | None = None
        if not role.is_dealer:
            order = _order(draws.ring(role.online, 2, x.shape[0]))
            own = mine_part(role, x) + online_part(rt, role, x) if role.is_left else mine_part(role, x)
            part = own[order]
        x = yield from pair_to_share_protocol(rt, part, x.shape, x.f, role.d)
    return x


def shuffle_together_protocol(rt: Runtime, xs: list[Share]) -> MpcProtocol[list[Share]]:
    """Several tensors of equal length and scale in one common secret order (data and labels). 3 rounds.

    Raises ConfigError where the lengths differ. Each is [rows, ...]; rows move as a whole.
    """
    rows = {x.shape[0] for x in xs}
    if len(rows) != 1:
        raise ConfigError(f"tensors of {sorted(rows)} rows cannot share an order", "give each as many rows")
    flat = cat([x.reshape(x.shape[0], -1) for x in xs], 1)
    mixed = yield from shuffle_protocol(rt, flat)
    out, at = [], 0
    for x in xs:
        width = x.n // x.shape[0]
        out.append(mixed.index((slice(None), slice(at, at + width))).reshape(*x.shape))
        at += width
    return out


def _order(keys: Tensor) -> Tensor:
    """A permutation from uniform 128-bit keys: sorting them; equal keys are as unlikely as a broken cipher."""
    by_low = torch.argsort(keys[1], stable=True)
    return by_low[torch.argsort(keys[0][by_low], stable=True)]
