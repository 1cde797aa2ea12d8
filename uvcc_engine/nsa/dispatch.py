"""Which path computes which branch, by device, row length and heads; what was chosen is reported, never guessed.

Paths: ``masked`` (dense arithmetic under masks), ``chunked`` (bounded memory in plain torch), ``flex``
(FlexAttention, compiled), ``triton`` (kernels). All give the same result; tests hold each to the same oracle.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Final

from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.nsa import chunked, masked
from uvcc_engine.nsa.index import as_mask
from uvcc_engine.nsa.layout import Layout

Triple = tuple[Tensor | None, Tensor, Tensor]
MASKED_UP_TO: Final = 1024  # tokens a row: measured, beyond it tiles are as fast and take a fraction of the memory
PATHS: Final = ("masked", "chunked")


@dataclass(frozen=True, slots=True)
class Route:
    """The path of each branch. ``sel`` also says when there is nothing to select."""

    cmp: str
    sel: str
    win: str

    def to_json(self) -> dict[str, str]:
        return asdict(self)


_forced: list[str] = []


def force(path: str | None) -> None:
    """Use one path for every branch from now on (tests, benchmarks); None chooses again. Raises ConfigError."""
    if path is not None and path not in PATHS:
        raise ConfigError(f"unknown attention path {path!r}", f"one of {', '.join(PATHS)}")
    _forced[:] = [path] if path is not None else []


def route(layout: Layout, heads: int, groups: int) -> Route:
    """What ``attend`` will do for this shape."""
    chosen = _route(layout.device.type, layout.s, heads // groups, _forced[0] if _forced else "")
    return chosen if layout.selects else replace(chosen, sel="dense")


@lru_cache(maxsize=64)
def _route(device: str, s: int, heads_per_group: int, forced: str) -> Route:
    path = forced or ("masked" if s <= MASKED_UP_TO else "chunked")
    return Route(path, path, path)


def attend(layout: Layout, q: Tensor, keys: Triple, values: Triple) -> Triple:
    """The three branches' outputs [B, S, H, dv], the first None where no compression block exists.

    q [B, S, H, dk] and keys rotated; keys and values in the order cmp [B, n_cmp, G, d], sel and win [B, S, G, d].
    Rows that see no compression block hold something finite in the first output.
    """
    k_cmp, k_sel, k_win = keys
    v_cmp, v_sel, v_win = values
    way = route(layout, q.shape[2], k_sel.shape[2])
    o_cmp = chosen = None
    if k_cmp is not None and v_cmp is not None:
        o_cmp, chosen = _compressed(layout, way, q, k_cmp, v_cmp)
    return o_cmp, _selected(layout, way, q, k_sel, v_sel, chosen), _window(layout, way, q, k_win, v_win)


def _compressed(layout: Layout, way: Route, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
    """The output, and the choice in the form that the selection's path wants."""
    if way.cmp == "chunked":
        o, numbers = chunked.compressed(q, k, v, layout)
        if numbers is not None and way.sel == "masked":
            return o, as_mask(numbers, layout.n_blocks)
        return o, numbers
    o, p = masked.compressed(q, k, v, layout.cmp_bias(q.shape[2] // k.shape[2]))
    return o, masked.choose(layout, p) if layout.selects else None


def _selected(layout: Layout, way: Route, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor | None) -> Tensor:
    if way.sel == "chunked" and chosen is not None:
        return chunked.selected(q, k, v, chosen, layout)
    return masked.selected(q, k, v, chosen, layout)


def _window(layout: Layout, way: Route, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if way.win == "chunked":
        return chunked.window(q, k, v, layout)
    return masked.window(q, k, v, layout)
