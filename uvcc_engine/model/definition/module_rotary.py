"""Queries and keys that a module turns by their places, however it writes that: found by what it computes.

What leads from a projection to the turned tensor is carried out on random numbers, and held against the layer's own
turning (Su et al., 2021), of halves or of neighbours. Nothing is taken over that differs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

from uvcc_engine.data.sets import Ints
from uvcc_engine.model.definition.module_graph import ROWS, Graph, name_of, shape_of

_TURNING: Final = ("add", "sub", "cat", "concat", "stack")
_CLOSE: Final = 1e-4


@dataclass(frozen=True, slots=True)
class Turned:
    """A tensor before it was turned: the node, which of its numbers (heads, lines, each) each turned one stands for,
    with the two halves of a head one after the other, and the ``base`` of the angles."""

    before: Node
    places: Ints
    base: float


def turned(graph: Graph, tensor: Node, source: Node, size: tuple[int, int], *, flip: bool) -> Turned | None:
    """What a tensor (rows, heads, lines, each) was before its places turned it; None if they did not.

    ``flip``: its last two axes are exchanged. ``size``: (lines, each).
    """
    last, index = graph.moved(tensor, source)
    if last is source or name_of(last) not in _TURNING or size[1] % 2:
        return None
    before = graph.parting(*(one for one in last.all_input_nodes if graph.secret(one)))
    while name_of(before) in ("select", "slice", "getitem", "unsqueeze") and before is not source:
        before = next(one for one in before.all_input_nodes if graph.secret(one))
    count = math.prod(shape_of(last)[1:])
    if math.prod(shape_of(before)[1:]) != count or before is last:
        return None
    places = (np.arange(count) if index is None else index).reshape(-1, *((size[::-1]) if flip else size))
    places = places.transpose(0, 2, 1) if flip else places
    seeded = torch.Generator().manual_seed(1)
    probe = 2.0 * torch.randn(shape_of(before), dtype=torch.float64, generator=seeded)
    after = graph.carried(last, {before: probe}).reshape(ROWS, -1)[:, places]
    fed = probe.reshape(ROWS, -1)[:, places]
    for order in (np.arange(size[1]), np.concatenate([np.arange(0, size[1], 2), np.arange(1, size[1], 2)])):
        base = _base(fed[..., order], after[..., order])
        if base is not None:
            return Turned(before, places[..., order], base)
    return None


def _base(fed: Tensor, after: Tensor) -> float | None:
    """The base of the angles by which halves of heads (rows, heads, lines, each) are turned; None if they are not."""
    lines, half = fed.shape[-2], fed.shape[-1] // 2
    a, b, c, d = fed[..., :half], fed[..., half:], after[..., :half], after[..., half:]
    angle = torch.atan2(a * d - b * c, a * c + b * d)[0, 0]
    base = 10000.0
    if half > 1 and lines > 1 and float(angle[1, 1]) > 0:
        base = float(round(float(angle[1, 1]) ** -half)) or base
    if base <= 1.0:
        return None
    turns = torch.arange(lines, dtype=torch.float64)[:, None] * base ** (
        -torch.arange(half, dtype=torch.float64) / half
    )
    cos, sin = torch.cos(turns), torch.sin(turns)
    found = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return base if float((found - after).abs().max()) < _CLOSE else None
