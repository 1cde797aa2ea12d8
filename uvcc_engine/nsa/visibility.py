"""What every position may see, worked out once per forward pass and shared by all layers.

Without packing it depends on the shape alone and is kept between steps.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from uvcc_engine.nsa import blocks
from uvcc_engine.nsa.config import NSAConfig
from uvcc_engine.nsa.rope import forget_tables


class Layout:
    """Visibility of S positions of ``doc_start`` ([B, S], None = one document a row). B' is B with packing, else 1.

    ``first``: the place of the first of them in its row; keys are there from the row's beginning.
    """

    def __init__(self, cfg: NSAConfig, s: int, device: torch.device, doc_start: Tensor | None, first: int = 0) -> None:
        self.cfg, self.s, self.device, self.doc_start, self.first = cfg, s, device, doc_start, first
        self.n_keys = first + s
        self.n_cmp, self.n_blocks = cfg.n_cmp(self.n_keys), cfg.n_blocks(self.n_keys)

    @property
    def packed(self) -> bool:
        """Whether a row may hold several documents."""
        return self.doc_start is not None

    @property
    def selects(self) -> bool:
        """Whether any query has more blocks than it may choose; else the selection is all that causality allows."""
        return self.n_cmp > 0 and self.n_blocks > self.cfg.n_sel

    @cached_property
    def positions(self) -> Tensor:
        """first..first+S-1, int64."""
        return torch.arange(self.first, self.n_keys, device=self.device)

    @cached_property
    def starts(self) -> Tensor:
        """[B', S] int64."""
        if self.doc_start is not None:
            return self.doc_start
        return torch.zeros(1, self.s, dtype=torch.int64, device=self.device)

    @cached_property
    def cmp_visible(self) -> Tensor:
        """[B', S, n_cmp] bool."""
        return blocks.cmp_visible(self.cfg, self.positions, self.starts, self.n_cmp)

    @cached_property
    def sees_cmp(self) -> Tensor:
        """Whether a query sees any compression block, 1 or 0: [B', S, 1] float32."""
        return self.cmp_visible.any(-1, keepdim=True).to(torch.float32)

    @cached_property
    def causal(self) -> Tensor | None:
        """[B, 1, S, keys] bool; None without packing, where SDPA's own causal form serves."""
        if not self.packed and not self.first:
            return None
        return blocks.causal_mask(self.positions, self.starts, self.n_keys)[:, None]

    @cached_property
    def window(self) -> Tensor | None:
        """[B', 1, S, keys] bool; as ``causal`` where the window spans the row."""
        if self.cfg.w >= self.n_keys:
            return self.causal
        return blocks.window_mask(self.cfg, self.positions, self.starts, self.n_keys)[:, None]

    def cmp_bias(self, heads: int) -> Tensor:
        """0 where visible, else -inf, for ``heads`` rows of queries: [B', n_cmp, heads * S] float32.

        A query that sees nothing gets zeros: its softmax is finite, and ``sees_cmp`` takes its output away.
        """
        known = self._bias.get(heads)
        if known is None:
            hidden = ~self.cmp_visible & self.cmp_visible.any(-1, keepdim=True)
            bias = torch.zeros(hidden.shape, device=self.device).masked_fill_(hidden, -torch.inf)
            known = self._bias[heads] = bias.transpose(1, 2).repeat(1, 1, heads)
        return known

    @cached_property
    def band_masks(self) -> dict[tuple[int, ...], Any]:
        """FlexAttention's block masks of the bands, by their numbers: kept here by ``uvcc_engine.nsa.flex``."""
        return {}

    @cached_property
    def tiles(self) -> dict[tuple[str, int], list[list[Any]]]:
        """Tiles of queries and the keys they see, by branch and heads of a group: kept by ``uvcc_engine.nsa.spans``."""
        return {}

    @cached_property
    def joint_tiles(self) -> dict[tuple[tuple[str, ...], int], list[list[tuple[Any, ...]]]]:
        """As ``tiles``, of several branches with the same queries."""
        return {}

    @cached_property
    def bounds(self) -> dict[str, list[Any]]:
        """What each query of a branch sees, by branch: kept by ``uvcc_engine.nsa.fused``."""
        return {}

    @cached_property
    def _bias(self) -> dict[int, Tensor]:
        return {}


@lru_cache(maxsize=8)
def _unpacked(cfg: NSAConfig, s: int, device: torch.device) -> Layout:
    return Layout(cfg, s, device, None)


def layout_of(cfg: NSAConfig, s: int, device: torch.device, doc_start: Tensor | None) -> Layout:
    """The layout of a batch of rows of ``s`` tokens."""
    return _unpacked(cfg, s, device) if doc_start is None else Layout(cfg, s, device, doc_start)


def forget() -> None:
    """Drop every cached layout and table, for instance because they were made under another tensor mode."""
    _unpacked.cache_clear()
    forget_tables()
