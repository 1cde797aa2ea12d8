"""Attention to some of a row's keys, and its gradients where the logsumexp over all that count is known.

Longer rows are put together from such parts. On a processor torch's own fused operations compute them, elsewhere plain
arithmetic does: the same sums.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

FUSED: Final = frozenset({"cpu"})  # the kinds of device that torch has these operations for


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """q [R, dk], k [n, dk], v [n, dv], bias [R, n] -> (o [R, dv], logsumexp [R] in at least 32 bits).

    A row whose bias hides every key has no result.
    """
    scale = float(q.shape[-1]) ** -0.5
    if q.device.type not in FUSED:
        score = scores(q, k, bias, scale)
        lse = score.logsumexp(-1)
        return (score - lse[:, None]).exp().to(v.dtype) @ v, lse
    wide = max(k.shape[-1], v.shape[-1])
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _row(q, wide), _row(k, wide), _row(v, wide), 0.0, False, attn_mask=_mask(bias, q), scale=scale
    )
    return o[0, 0, :, : v.shape[-1]], lse[0, 0]


def slopes(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """What these keys add to the gradients of q, k and v: do and o [R, dv] and lse [R] are those over all keys."""
    scale = float(q.shape[-1]) ** -0.5
    if q.device.type not in FUSED:
        p = (scores(q, k, bias, scale) - lse[:, None]).exp()
        ds = (p * (do @ v.T - (do * o).sum(-1, keepdim=True)) * scale).to(q.dtype)
        return ds @ k, ds.T @ q, p.to(do.dtype).T @ do
    wide = max(k.shape[-1], v.shape[-1])
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(_row(x, wide) for x in (do, q, k, v, o)), lse[None, None], 0.0, False, attn_mask=_mask(bias, q), scale=scale
    )
    return dq[0, 0, :, : q.shape[-1]], dk[0, 0, :, : k.shape[-1]], dv[0, 0, :, : v.shape[-1]]


def scores(q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """q [R, dk] against k [n, dk], scaled, with the bias: [R, n] in at least 32 bits."""
    score = ((q * scale) @ k.T).to(torch.promote_types(q.dtype, torch.float32))
    return score if bias is None else score + bias


def _row(x: Tensor, wide: int) -> Tensor:
    """[1, 1, R, wide]: the fused operations know one width of heads, and zeros add nothing."""
    return (x if x.shape[-1] == wide else F.pad(x, (0, wide - x.shape[-1])))[None, None]


def _mask(bias: Tensor | None, q: Tensor) -> Tensor | None:
    return None if bias is None else bias.to(q.dtype)[None, None]
