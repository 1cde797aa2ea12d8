"""Which path computes which branch, by device, row length and heads; what was chosen is reported, never guessed.

Paths: ``masked`` (dense arithmetic under masks), ``kept`` (the same on one thread of a processor, by products whose
weights are kept for the gradients), ``fused`` (loops compiled for a processor), ``chunked`` (bounded memory in plain
torch), ``flex`` (FlexAttention, compiled), ``triton`` (kernels). All give the same result; tests hold each to the same
oracle.
"""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from types import ModuleType
from typing import Final

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.nsa import chunked, fused, kept, masked
from uvcc_engine.nsa.kept import Triple
from uvcc_engine.nsa.visibility import Layout

MASKED_UP_TO: Final = 512  # tokens a row: measured, beyond it tiles are faster and take a fraction of the memory
MASKED_UP_TO_ON_CUDA: Final = 512  # measured on an H200: kernels are as fast from 1,024 on, FlexAttention never
MOST_HEADS: Final = 64  # heads of a group that one tile of the selection kernel holds
PATHS: Final = ("masked", "kept", "fused", "chunked", "flex", "triton")
_TOGETHER: Final = {"fused": fused, "kept": kept}
"""What computes all branches at once; elsewhere than where it serves, another path is chosen even if it is forced."""


@dataclass(frozen=True, slots=True)
class Route:
    """The path of each branch. ``sel`` also says when there is nothing to select."""

    cmp: str
    sel: str
    win: str

    def to_json(self) -> dict[str, str]:
        """The paths by branch, as they are reported."""
        return asdict(self)


_forced: list[str] = []


def force(path: str | None) -> None:
    """Use one path for every branch from now on (tests, benchmarks); None chooses again. Raises ConfigError."""
    if path is not None and path not in PATHS:
        raise ConfigError(f"unknown attention path {path!r}", f"one of {', '.join(PATHS)}")
    if path == "triton" and not has_triton():
        raise ConfigError("the triton path needs triton", "install it, or take another path")
    if path == "flex" and not has_flex():
        raise ConfigError("the flex path needs torch 2.6 or newer", "install it, or take another path")
    _forced[:] = [path] if path is not None else []


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether kernels can be built here."""
    return importlib.util.find_spec("triton") is not None


@lru_cache(maxsize=1)
def has_flex() -> bool:
    """Whether this torch has FlexAttention as it is used here; looked up when first asked, since it takes long to
    import."""
    from uvcc_engine.nsa import flex

    return flex.available()


def route(
    layout: Layout, heads: int, groups: int, dtype: torch.dtype = torch.float32, widths: tuple[int, int] = (64, 64)
) -> Route:
    """What the layer will do for this shape: ``widths`` of a head's keys and values."""
    found = _name_together(layout, dtype, groups, widths)
    if found is not None:
        selects = found == "fused" and layout.selects
        return Route(found, found if selects else "dense", found)
    return _apart(layout, heads, groups)


def _apart(layout: Layout, heads: int, groups: int) -> Route:
    """The path of each branch where each is computed by itself."""
    chosen = _route(layout.device.type, layout.n_keys, heads // groups, _forced[0] if _forced else "")
    if layout.first and "flex" in (chosen.cmp, chosen.win):  # whose masks begin with the row
        chosen = Route("chunked", "chunked", "chunked")
    if layout.n_cmp == 0 and chosen.cmp == "triton":  # the kernel shares its tiles between both bands
        chosen = replace(chosen, cmp="masked", win="masked")
    return chosen if layout.selects else replace(chosen, sel="dense")


@lru_cache(maxsize=64)
def _route(device: str, s: int, heads_per_group: int, forced: str) -> Route:
    path = best_path(device, s, heads_per_group) if forced in ("", *_TOGETHER) else forced
    return Route(path, path, path)


def best_path(device: str, s: int, heads_per_group: int) -> str:
    """On CUDA short rows cost less under masks than a launch of each kernel; FlexAttention is for want of Triton."""
    if device != "cuda":
        return "masked" if s <= MASKED_UP_TO else "chunked"
    if s <= MASKED_UP_TO_ON_CUDA:
        return "masked"
    if has_triton() and heads_per_group <= MOST_HEADS:
        return "triton"
    return "flex" if has_flex() else "chunked"


def together(layout: Layout, dtype: torch.dtype, groups: int, widths: tuple[int, int]) -> ModuleType | None:
    """What computes all branches of queries of this type, and their gated sum, in one go by ``mixed``, or None."""
    found = _name_together(layout, dtype, groups, widths)
    return None if found is None else _TOGETHER[found]


def _name_together(layout: Layout, dtype: torch.dtype, groups: int, widths: tuple[int, int]) -> str | None:
    asked = _forced[0] if _forced else None
    if asked in (None, "fused") and fused.serves(layout, dtype, groups, widths):
        return "fused"
    return "kept" if asked in (None, "kept") and kept.serves(layout, dtype) else None


def decodes_by_kernel(device: torch.device) -> bool:
    """Whether one token's reads go through the split-KV kernel."""
    if _forced:
        return _forced[0] == "triton"
    return device.type == "cuda" and has_triton()


def attend(layout: Layout, q: Tensor, keys: Triple, values: Triple) -> Triple:
    """The three branches' outputs [B, S, H, dv], the first None where no compression block exists.

    q [B, S, H, dk] and keys rotated; keys and values in the order cmp [B, n_cmp, G, d], sel and win [B, S, G, d]; of a
    slice of a row, all keys up to its end.
    Rows that see no compression block hold something finite in the first output.
    """
    k_cmp, k_sel, k_win = keys
    v_cmp, v_sel, v_win = values
    way = _apart(layout, q.shape[2], k_sel.shape[2])
    o_cmp = o_win = chosen = None
    if k_cmp is not None and v_cmp is not None:
        if way.cmp == "triton":
            from uvcc_engine.nsa.kernels import launch

            o_cmp, o_win, chosen = launch.compressed_and_window(q, k_cmp, v_cmp, k_win, v_win, layout)
        else:
            o_cmp, chosen = _compressed(layout, way.cmp, q, k_cmp, v_cmp)
    if o_win is None:
        o_win = _window(layout, way.win, q, k_win, v_win)
    path = way.win if way.sel == "dense" else way.sel
    return o_cmp, _selected(layout, path, q, k_sel, v_sel, chosen), o_win


def _compressed(layout: Layout, path: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
    """The output, and the choice in the form that the selection on the same path wants."""
    if path == "chunked":
        return chunked.compressed(q, k, v, layout)
    if path == "flex":
        from uvcc_engine.nsa import flex

        return flex.compressed(q, k, v, layout)
    o, p = masked.compressed(q, k, v, layout.cmp_bias(q.shape[2] // k.shape[2]))
    return o, masked.choose(layout, p) if layout.selects else None


def _selected(layout: Layout, path: str, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor | None) -> Tensor:
    if path == "chunked":
        return chunked.selected(q, k, v, chosen, layout)
    if chosen is None or path == "masked":
        return masked.selected(q, k, v, chosen, layout)
    if path == "flex":
        from uvcc_engine.nsa import flex

        return flex.selected(q, k, v, chosen, layout)
    from uvcc_engine.nsa.kernels import gather

    return gather.selected(q, k, v, chosen, layout)


def _window(layout: Layout, path: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if path == "chunked":
        return chunked.window(q, k, v, layout)
    if path == "flex":
        from uvcc_engine.nsa import flex

        return flex.window(q, k, v, layout)
    return masked.window(q, k, v, layout)
