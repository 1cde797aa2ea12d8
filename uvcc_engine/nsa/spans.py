"""Which keys each query of a branch sees where they lie side by side, cut into tiles of queries.

Bounds are worked out with numpy, so that nothing waits for tensors; masks exist for the edges of a tile alone, and are
shared by the layers that share a layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from uvcc_engine.nsa.visibility import Layout

Kind = Literal["cmp", "causal", "local", "window"]
"""The compression blocks, all earlier tokens, those of the two local blocks where a query selects, or the window."""

ROWS: Final = 384  # rows of queries and heads at a time: what one product needs to come near the processor's rate
SCORES: Final = 196_608  # scores at a time: two such tiles of 32 bits stay in a cache of 2 MiB
FEWEST: Final = 16  # queries


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries ``begin`` to ``end`` of a row, and the keys ``low`` to ``high`` that any of them sees.

    ``edges``: columns from and to between which some query does not see every key, and 0 where it does, else -inf
    [queries, 1, columns].
    """

    begin: int
    end: int
    low: int
    high: int
    edges: tuple[tuple[int, int, Tensor], ...]

    def hide(self, score: Tensor) -> None:
        """Make -inf of the scores [queries * heads, keys] of what is not seen."""
        for first, last, bias in self.edges:
            part = score.view(self.end - self.begin, -1, score.shape[-1])[..., first:last]
            part += bias


def tiles(layout: Layout, kind: Kind, heads: int) -> list[list[Tile]]:
    """The tiles of each row of the layout, one list for all rows without packing; ``heads`` of a group share keys.

    How many queries one has follows from places alone, and so never from what a token is.
    """
    known = layout.tiles.get((kind, heads))
    if known is None:
        low, high = seen(layout, kind, np.zeros((1, layout.s), dtype=np.int64))
        cuts = _cuts(low[0], high[0], heads, ROWS * (4 if kind == "cmp" else 1))
        if layout.packed and not isinstance(layout.starts, FakeTensor):
            low, high = seen(layout, kind, layout.starts.cpu().numpy())
        known = layout.tiles[kind, heads] = [
            [_tile(a, x[a:b, None], y[a:b, None], layout.device) for a, b in cuts]
            for x, y in zip(low, high, strict=True)
        ]
    return known


def together(layout: Layout, kinds: tuple[Kind, ...], heads: int) -> list[list[tuple[Tile, ...]]]:
    """Of each row, for tiles of queries that are those of ``causal``, the tile of each of these branches."""
    known = layout.joint_tiles.get((kinds, heads))
    if known is None:
        known = layout.joint_tiles[kinds, heads] = []
        starts = np.zeros((1, layout.s), dtype=np.int64)
        first, last = seen(layout, "causal", starts)
        cuts = _cuts(first[0], last[0], heads, ROWS)
        if layout.packed and not isinstance(layout.starts, FakeTensor):
            starts = layout.starts.cpu().numpy()
        bounds = [seen(layout, kind, starts) for kind in kinds]
        for row in range(len(starts)):
            of_row = [(low[row], high[row]) for low, high in bounds]
            known.append(
                [tuple(_tile(a, x[a:b, None], y[a:b, None], layout.device) for x, y in of_row) for a, b in cuts]
            )
    return known


def early(layout: Layout) -> int:
    """How many of the layout's queries have no more blocks than they may choose, and so see all that is earlier."""
    return min(layout.s, max(0, layout.cfg.n_sel * layout.cfg.l_sel - layout.first))


def seen(layout: Layout, kind: Kind, start: Any) -> tuple[Any, Any]:
    """The first key that each query sees, and the one behind its last, of documents from ``start``: int64 [B', S].

    A query that sees no compression block is given one: its output is finite, and the layer takes it away.
    """
    cfg, place = layout.cfg, np.arange(layout.first, layout.n_keys)
    if kind == "cmp":
        low = np.minimum(-(-start // cfg.d), layout.n_cmp - 1)
        whole = np.where(place + 1 < cfg.l, 0, (place + 1 - cfg.l) // cfg.d + 1)
        return low, np.maximum(whole, low + 1)
    first = {
        "causal": 0 * place,
        "local": np.where(place < cfg.n_sel * cfg.l_sel, 0, (place // cfg.l_sel - 1) * cfg.l_sel),
        "window": place - cfg.w + 1,
    }[kind]
    low = np.maximum(start, first)
    return low, np.broadcast_to(place + 1, low.shape)


def _cuts(low: Any, high: Any, heads: int, rows: int) -> list[tuple[int, int]]:
    found, begin, most = [], 0, max(FEWEST, 1 << ((rows // heads).bit_length() - 1) if heads <= rows else 0)
    while begin < len(low):
        n = most
        while n > FEWEST and n * heads * int(high[begin : begin + n].max() - low[begin : begin + n].min()) > SCORES:
            n //= 2
        found.append((begin, min(begin + n, len(low))))
        begin += n
    return found


def _tile(begin: int, low: Any, high: Any, device: torch.device) -> Tile:
    """``low`` and ``high`` [queries, 1]."""
    first, last = int(low.min()), int(high.max())
    seen_from, seen_to = int(low.max()), int(high.min())
    cuts = [(first, seen_from), (seen_to, last)] if seen_from < seen_to else [(first, last)]
    edges = []
    for a, b in cuts:
        if a == b:
            continue
        place = np.arange(a, b)
        bias = np.where((place >= low) & (place < high), np.float32(0), np.float32(-np.inf))
        edges.append((a - first, b - first, torch.as_tensor(bias, device=device)[:, None]))
    return Tile(begin, begin + len(low), first, last, tuple(edges))
