"""Which path computes which branch."""

from __future__ import annotations

from torch import Tensor

from uvcc_engine.nsa import masked
from uvcc_engine.nsa.layout import Layout

Triple = tuple[Tensor | None, Tensor, Tensor]


def attend(layout: Layout, q: Tensor, keys: Triple, values: Triple) -> Triple:
    """The three branches' outputs [B, S, H, dv], the first None where no compression block exists.

    q [B, S, H, dk] and keys rotated; keys and values in the order cmp [B, n_cmp, G, d], sel and win [B, S, G, d].
    Rows that see no compression block hold something finite in the first output.
    """
    k_cmp, k_sel, k_win = keys
    v_cmp, v_sel, v_win = values
    o_cmp = chosen = None
    if k_cmp is not None and v_cmp is not None:
        o_cmp, p = masked.compressed(q, k_cmp, v_cmp, layout.cmp_bias(q.shape[2] // k_sel.shape[2]))
        chosen = masked.choose(layout, p) if layout.selects else None
    return o_cmp, masked.selected(q, k_sel, v_sel, chosen, layout), masked.window(q, k_win, v_win, layout)
