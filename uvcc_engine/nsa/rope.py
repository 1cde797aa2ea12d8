"""Rotary position embedding per head (Su et al. 2021), neighbouring pairs, with linear position scaling."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def rope_tables(
    positions: Tensor, dim: int, *, base: float, scale: float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Rotations of integer positions [...] as cos and sin: [..., dim // 2, 2]. Angles are computed in float64.

    Of at least 32 bits: sixteen would turn far positions by an angle that is off in its third digit.
    """
    rate = base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim)
    angle = positions.to(torch.float64)[..., None] / scale * rate
    return torch.stack((angle.cos(), angle.sin()), dim=-1).to(torch.promote_types(dtype, torch.float32))


@lru_cache(maxsize=16)
def first_positions(s: int, dim: int, base: float, scale: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The tables of positions 0..s-1 [s, dim // 2, 2], computed once and shared by all layers."""
    with torch.inference_mode(False), torch.no_grad():
        return rope_tables(torch.arange(s, device=device), dim, base=base, scale=scale, dtype=dtype)


def forget_tables() -> None:
    """Drop every cached table, for instance because they were made under another tensor mode."""
    first_positions.cache_clear()


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate the pairs (x[..., 2i], x[..., 2i+1]), in the table's precision; the result has x's type.

    ``table`` [..., dim // 2, 2] broadcasts against x's pairs.
    """
    wide = x.to(table.dtype).reshape(*x.shape[:-1], -1, 2)  # one complex product instead of four real ones
    if any(step % 2 for step in (*wide.stride()[:-1], wide.storage_offset())):
        # part of rows of an odd width, in which no pair lies as a complex number would
        wide = wide.clone(memory_format=torch.contiguous_format)
    turned = torch.view_as_complex(wide) * torch.view_as_complex(table)
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)
