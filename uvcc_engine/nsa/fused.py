"""All branches of rows of 32-bit floats on a processor, gated, in one go by compiled loops (``loops``).

A weight is computed where its scores lie in the cache and used there, so nothing of a row's square is written to
memory, and a query's heads are multiplied with the very blocks that it sees. Gradients compute the weights again; what
is kept for them is what each branch read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from uvcc_engine.nsa import loops, spans
from uvcc_engine.nsa.index import pool_weights
from uvcc_engine.nsa.kept import KINDS, Triple, gated_pairs
from uvcc_engine.nsa.products import LOG2_E, scale_of
from uvcc_engine.nsa.visibility import Layout

FROM: Final = 256  # keys a row: shorter ones are not worth compiling for
LANES: Final = 16  # what widths and blocks must be multiples of
ROWS: Final = 96  # rows of queries and heads at a time, on the way back: with a block's keys they fill the first cache


def serves(layout: Layout, dtype: torch.dtype, groups: int, widths: tuple[int, int]) -> bool:
    """Whether this is the way for queries of a type, with keys and values of these widths.

    A thread takes whole groups; more threads than groups are better served by torch's own products.
    """
    if dtype != torch.float32 or layout.device.type != "cpu" or layout.n_keys < FROM:
        return False
    if any(width % LANES for width in (*widths, layout.cfg.l_sel)) or torch.compiler.is_compiling():
        return False
    return torch.get_num_threads() <= groups and loops.found() is not None


def mixed(q: Tensor, keys: Triple, values: Triple, gates: Tensor, layout: Layout) -> Tensor:
    """The gated sum of the branches [B, S, H, dv] of what ``kept.mixed`` is given."""
    pairs, gates, by_heads = gated_pairs(q, keys, values, gates, layout)
    o: Tensor = _Fused.apply(by_heads, gates, layout, *pairs)  # type: ignore[no-untyped-call]
    return o.flatten(2, 3)


@dataclass(frozen=True, slots=True)
class Seen:
    """The first key that each query of a branch sees, the one behind its last, and the queries of each block where they
    lie side by side: see ``queries_of_blocks``."""

    low: Any
    high: Any
    offset: Any
    entry: Any


def _seen(layout: Layout, kind: spans.Kind) -> list[Seen]:
    """Of each row of the layout, kept there."""
    known = layout.bounds.get(kind)
    if known is None:
        starts = layout.starts.numpy()
        low, high = (np.ascontiguousarray(np.broadcast_to(x, starts.shape)) for x in spans.seen(layout, kind, starts))
        keys = layout.n_cmp if kind == "cmp" else layout.n_keys
        none = np.empty((0, 0), dtype=np.int32)
        known = [
            Seen(x, y, *_listed(layout.cfg.l_sel, keys, x, y, len(x), none)) for x, y in zip(low, high, strict=True)
        ]
        layout.bounds[kind] = known
    return known


def _listed(size: int, keys: int, low: Any, high: Any, skip: int, picks: Any) -> tuple[Any, Any]:
    """The queries of each block: offset [blocks + 1] and entry."""
    run, offset = _loops().queries_of_blocks, np.zeros(-(-keys // size) + 1, dtype=np.int64)
    run(size, low, high, skip, picks, offset, np.empty(0, dtype=np.int32), False)
    entry = np.empty(int(offset[-1]), dtype=np.int32)
    run(size, low, high, skip, picks, offset, entry, True)
    return offset, entry


def _loops() -> Any:
    found = loops.found()
    assert found is not None
    return found


def _each(q: Tensor, work: Callable[[int, int], None]) -> None:
    """``work`` of each row and group of queries [B, S, G, h, dk], on as many threads as torch may use."""
    places = [(row, group) for row in range(q.shape[0]) for group in range(q.shape[2])]
    threads = min(torch.get_num_threads(), len(places))
    if threads < 2:
        for row, group in places:
            work(row, group)
        return
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, row, group) for row, group in places]:
            done.result()


def _step(x: Tensor) -> int:
    """Bytes from a token to the next, of [B, S, ...]."""
    return 4 * x.stride(1)


def _rows(x: Tensor) -> Tensor:
    """x [B, S, G, ..., d], such that a token's and group's numbers are contiguous."""
    return x if x[0, 0, 0].is_contiguous() else x.contiguous()


def _padded(x: Tensor, size: int) -> Tensor:
    """x [B, n, G, d] by group, up to a whole block: [B, G, n', d]."""
    return F.pad(x.transpose(1, 2), (0, 0, 0, -x.shape[1] % size)).contiguous()


def _turned(x: Tensor, size: int, times: float) -> Tensor:
    """x [B, n, G, d] by group and block, turned around, times so much: [B, G, blocks, d, size]."""
    x = _rows(x)
    b, n, g, d = x.shape
    out = x.new_empty(b, g, -(-n // size), d, size)
    if not isinstance(out, FakeTensor):
        for row in range(b):
            for group in range(g):
                to = out[row, group].data_ptr()
                _loops().turn(x[row, 0, group].data_ptr(), _step(x), n, d, size, times, to)
    return out


class _Fused(torch.autograd.Function):
    """q [B, S, G, h, dk], gates [B, S, G, h, branches], k/v [B, n, G, d] of each -> [B, S, G, h, dv]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, gates: Tensor, layout: Layout, *pairs: Tensor) -> Tensor:
        q, size = _rows(q), layout.cfg.l_sel
        (b, s, g, h, _), n, dv = q.shape, gates.shape[-1], pairs[1].shape[-1]
        gate = gates.permute(4, 0, 2, 1, 3).contiguous()
        y, read = q.new_empty(b, s, g, h, dv), q.new_empty(n, b, s, g, h, dv)
        peaks, totals = torch.empty_like(gate), torch.empty_like(gate)
        panels = [_turned(k, size, scale_of(q) * LOG2_E) for k in pairs[::2]]
        values = [_padded(v, size) for v in pairs[1::2]]
        late = s - spans.early(layout) if layout.selects else 0
        picks = np.empty((b, g, late, layout.cfg.n_sel), dtype=np.int32)
        if not isinstance(q, FakeTensor):
            _forward(q, gate, layout, (panels, values), picks, (y, read, peaks, totals))
        ctx.save_for_backward(q, gate, read, peaks, totals, *pairs)
        ctx.layout, ctx.picks = layout, picks
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, gate, read, peaks, totals, *pairs = ctx.saved_tensors
        size, scale, dy = ctx.layout.cfg.l_sel, scale_of(q), _rows(dy)
        panels = [_turned(k, size, scale * LOG2_E) for k in pairs[::2]]
        turned = [_turned(v, size, 1.0) for v in pairs[1::2]]
        keys = [_padded(k, size) for k in pairs[::2]]
        on_k = [torch.zeros_like(k) for k in keys]
        on_v = [k.new_zeros(*k.shape[:3], read.shape[-1]) for k in keys]
        dq, means = torch.zeros_like(q, memory_format=torch.contiguous_format), torch.empty_like(gate)
        if not isinstance(q, FakeTensor):
            sums = dq, means, on_k, on_v
            _backward(q, dy, read, (peaks, gate / totals), ctx.layout, (panels, turned, keys), ctx.picks, sums)
        found = []
        for k, v, like in zip(on_k, on_v, pairs[::2], strict=True):
            found += [(x[:, :, : like.shape[1]]).transpose(1, 2) for x in (k.mul_(scale), v)]
        return dq.mul_(scale), means.permute(1, 3, 2, 4, 0), None, *found


def _forward(
    q: Tensor, gate: Tensor, layout: Layout, given: Sequence[list[Tensor]], picks: Any, outs: Sequence[Tensor]
) -> None:
    """Fills y, what each branch read, peaks and totals, and the blocks that were picked."""
    run, cfg, (panels, values), (y, read, peaks, totals) = _loops(), layout.cfg, given, outs
    _, s, _, h, dk = q.shape
    n, dv, cut = len(panels), y.shape[-1], s - picks.shape[2]
    weights, starts = pool_weights(cfg).numpy(), layout.starts.numpy()
    seen = [(kind, _seen(layout, kind)) for kind in KINDS[-n:]]

    def work(row: int, group: int) -> None:
        mine = picks[row, group]
        for i, (kind, rows) in enumerate(seen):
            here, at = rows[row % len(rows)], (i, row, group)
            skip, listed = (cut, mine) if kind == "causal" else (s, mine[:0, :0])
            blocks = panels[i][row, group].data_ptr(), values[i][row, group].data_ptr()
            known = here.low, here.high, skip, listed
            out = read[i, row, 0, group].data_ptr(), _step(y)
            sums = peaks[at].data_ptr(), totals[at].data_ptr()
            ranked = layout.first, starts[row % len(starts)], cfg.l_sel // cfg.d, weights
            chosen = mine if kind == "cmp" else mine[:0]
            me = q[row, 0, group].data_ptr(), _step(q)
            run.attend(h, dk, dv, cfg.l_sel, *me, *blocks, *known, *out, *sums, *ranked, chosen)
            run.mix(s, h, dv, gate[at].data_ptr(), *out, y[row, 0, group].data_ptr(), _step(y), int(i == 0))

    _each(q, work)


def _backward(
    q: Tensor,
    dy: Tensor,
    read: Tensor,
    kept: tuple[Tensor, Tensor],
    layout: Layout,
    given: Sequence[list[Tensor]],
    picks: Any,
    sums: tuple[Tensor, Tensor, list[Tensor], list[Tensor]],
) -> None:
    """Adds the gradients to dq and those of each branch's keys and values, and fills the gates'."""
    run, size, (panels, turned, keys) = _loops(), layout.cfg.l_sel, given
    (peaks, shares), (dq, means, on_k, on_v) = kept, sums
    _, s, _, h, dk = q.shape
    n, dv, cut = len(keys), dy.shape[-1], s - picks.shape[2]
    seen = [(kind, _seen(layout, kind)) for kind in KINDS[-n:]]

    def work(row: int, group: int) -> None:
        me, grad = (q[row, 0, group].data_ptr(), _step(q)), (dy[row, 0, group].data_ptr(), _step(dy))
        for i, (kind, rows) in enumerate(seen):
            here, at = rows[row % len(rows)], (i, row, group)
            lists = here.offset, here.entry
            if kind == "causal" and cut < s:
                lists = _listed(size, layout.n_keys, here.low, here.high, cut, picks[row, group])
            mean = means[at].data_ptr()
            run.dots(s, h, dv, *grad, read[i, row, 0, group].data_ptr(), _step(read[i]), mean)
            blocks = [x[i][row, group].data_ptr() for x in (panels, turned, keys)]
            rates = peaks[at].data_ptr(), shares[at].data_ptr(), mean
            into = dq[row, 0, group].data_ptr(), _step(dq)
            ends = on_k[i][row, group].data_ptr(), on_v[i][row, group].data_ptr()
            tile = max(1, ROWS // h)
            run.slopes(h, dk, dv, size, tile, *me, *grad, *blocks, here.low, here.high, *lists, *rates, *into, *ends)

    _each(q, work)
