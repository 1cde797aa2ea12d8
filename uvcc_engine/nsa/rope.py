"""Rotary position embedding per head (Su et al. 2021), half-split layout, with linear position scaling."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_tables(
    positions: Tensor, dim: int, *, base: float, scale: float, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """cos and sin for integer positions [...]: two tensors [..., dim // 2]. Angles are computed in float64."""
    rate = base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim)
    angle = positions.to(torch.float64)[..., None] / scale * rate
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[..., i], x[..., i + dim/2]). cos and sin broadcast against x[..., : dim/2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
