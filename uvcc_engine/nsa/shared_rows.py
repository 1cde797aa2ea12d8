"""A row of tokens that several ranks share (context parallelism): each computes two slices of it, and sees all keys.

Of a row cut into 2 N slices, rank r has slice r and slice 2 N - 1 - r, so that each has an early one with few keys
before it and a late one with many (Llama 3, section 3.3.2). Queries, norms and the MLP stay with their tokens; keys and
values of all ranks are gathered for each layer, and each slice attends to those up to its end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from uvcc_engine.nsa.config import NSAConfig
from uvcc_engine.nsa.visibility import Layout


@dataclass(frozen=True, slots=True)
class SharedRows:
    """This rank's place among those that share a row. ``gather`` [B, n, ...] -> [ranks, B, n, ...], in their order."""

    rank: int
    ranks: int
    gather: Callable[[Tensor], Tensor]

    def slices(self, s: int, rank: int) -> tuple[range, range]:
        """The positions of a row of ``s`` tokens that ``rank`` computes; ``s`` is a multiple of twice the ranks."""
        each = s // (2 * self.ranks)
        late = 2 * self.ranks - 1 - rank
        return range(rank * each, (rank + 1) * each), range(late * each, (late + 1) * each)

    def places(self, s: int, device: torch.device, rank: int | None = None) -> Tensor:
        """The same as numbers, int64 [s / ranks]; of this rank by default."""
        one, two = self.slices(s, self.rank if rank is None else rank)
        return torch.cat([torch.arange(p.start, p.stop, device=device) for p in (one, two)])


class SharedLayout:
    """What this rank's slices of rows of ``s`` tokens may see; ``doc_start`` [B, s] of the whole rows, or None."""

    def __init__(
        self, cfg: NSAConfig, s: int, device: torch.device, doc_start: Tensor | None, context: SharedRows
    ) -> None:
        self.cfg, self.s, self.context = cfg, s, context
        self.n_cmp = cfg.n_cmp(s)
        self.places = context.places(s, device)
        order = torch.cat([context.places(s, device, rank) for rank in range(context.ranks)])
        self._order = torch.empty_like(order)
        self._order[order] = torch.arange(s, device=device)
        cuts = context.slices(s, context.rank)
        starts = [None if doc_start is None else doc_start[:, p.start : p.stop] for p in cuts]
        self.parts = [Layout(cfg, len(p), device, start, first=p.start) for p, start in zip(cuts, starts, strict=True)]

    def whole(self, x: Tensor) -> Tensor:
        """Every rank's tokens [B, s / ranks, ...], in the row's order: [B, s, ...]."""
        return self.context.gather(x).transpose(0, 1).flatten(1, 2).index_select(1, self._order)
