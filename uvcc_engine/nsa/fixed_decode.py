"""One token at a time in storage of fixed size: a step that a CUDA graph can hold.

It computes what ``nsa.decode`` does. There the caches grow and the host counts, so every step has other shapes; here
the storage has the longest sequence's size from the start, the position is a number on the device, and what a query
must not see yet is masked. Every step is then the same list of operations on the same memory, none of which the host
reads or writes, so on a GPU the whole model's step is recorded once and replayed with one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.nsa import blocks, dispatch
from uvcc_engine.nsa.attention import NSAttention
from uvcc_engine.nsa.cache import LayerCache, Rows
from uvcc_engine.nsa.decode import DecodeState, gather_tokens, one_query
from uvcc_engine.nsa.index import best_blocks, pool, pool_weights
from uvcc_engine.nsa.model import LanguageModel, TransformerBlock
from uvcc_engine.nsa.rope import rope_tables, rotate

WARM_UPS = 3  # steps before a graph is recorded, in which kernels are chosen and loaded


@dataclass(frozen=True, slots=True)
class FixedCache:
    """Of one layer, keys and values. ``raw``: [B, l, G, d], token t at t mod l. ``cmp``: [B, n_cmp + 1, G, d]; the last
    row takes what is no whole block. ``sel``: [B, n_blocks * l_sel, G, d]. ``win``: [B, w, G, d], token t at t mod w.
    """

    raw: tuple[Tensor, Tensor]
    cmp: tuple[Tensor, Tensor]
    sel: tuple[Tensor, Tensor]
    win: tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class _Here:
    """What all layers of a step share. Tables are of the token's place and of the block's that it may complete."""

    at: Tensor  # int64 [1], the token's place
    table: Tensor
    block_table: Tensor
    raw_order: Tensor  # int64 [l], where the last l tokens lie, oldest first
    block: Tensor  # int64 [1], the compressed block's row
    sees_cmp: Tensor  # bool [n_cmp]
    sees_win: Tensor  # bool [w]
    forced: Tensor  # bool [1, 1, 1, n_blocks], as ``index.best_blocks`` takes it
    candidates: Tensor
    shares: Tensor  # those of ``index.pool_weights``
    counts: Tensor  # int32 [3], how many rows of cmp, sel and win the token sees


class FixedDecoder:
    """Goes on from ``state``, for up to ``most`` tokens. Its steps are recorded where ``graph`` is given (on a GPU).

    Raises ConfigError for a model without NSA, and for a graph on a device that has none.
    """

    def __init__(self, model: LanguageModel, state: DecodeState, most: int, *, graph: bool = False) -> None:
        weight = model.embed.weight
        if model.cfg.attention != "nsa":
            raise ConfigError(f"a fixed step of attention {model.cfg.attention!r}", "it is there for nsa alone")
        if graph and weight.device.type != "cuda":
            raise ConfigError(f"a CUDA graph on the device {weight.device.type}", "leave it out, or take a GPU")
        self.model, self._nsa = model, model.cfg.nsa
        self._done, self._most = state.position, state.position + most
        device, nsa = weight.device, self._nsa
        self._n_cmp, self._n_blocks = nsa.n_cmp(self._most), nsa.n_blocks(self._most)
        self._layers = [self._cache(layer) for layer in state.layers]
        self._at = torch.full((1,), state.position, dtype=torch.int64, device=device)
        self._zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
        batch = self._layers[0].sel[0].shape[0]
        self._token = torch.zeros(batch, dtype=torch.int64, device=device)
        self._logits = torch.empty(batch, model.cfg.vocab, dtype=weight.dtype, device=device)
        self._graph = self._recorded() if graph else None

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Feed one token per sequence. tokens [B] -> logits [B, vocab]. Raises ConfigError behind the last place."""
        if self._done >= self._most:
            raise ConfigError(f"a token behind place {self._most}", "make the decoder for more tokens")
        self._token.copy_(tokens)
        if self._graph is None:
            self.compute()
        else:
            self._graph.replay()
        self._done += 1
        return self._logits.clone()

    @torch.no_grad()
    def compute(self) -> None:
        """The step itself, from and to memory that stays: the token's, the caches, the position, the logits."""
        model = self.model
        here = self._here()
        x = model.embed(self._token)[:, None]
        for block, cache in zip(model.blocks, self._layers, strict=True):
            assert isinstance(block, TransformerBlock)
            assert isinstance(block.attention, NSAttention)
            x = x + self._attend(block.attention, block.norm_a(x), cache, here)
            x = x + block.down(F.gelu(block.up(block.norm_m(x))))
        self._logits.copy_(F.linear(model.norm(x), model.embed.weight)[:, 0])
        self._at.add_(1)

    @torch.no_grad()
    def attention(self, number: int, x: Tensor) -> Tensor:
        """What one layer's attention alone makes of x [B, 1, dim] at the next place: [B, 1, dim]. The token is written,
        the place stays."""
        block = self.model.blocks[number]
        assert isinstance(block, TransformerBlock)
        assert isinstance(block.attention, NSAttention)
        return self._attend(block.attention, x, self._layers[number], self._here())

    def _cache(self, known: object) -> FixedCache:
        """What a prompt left, in storage of the full size."""
        assert isinstance(known, LayerCache)
        nsa = self._nsa
        return FixedCache(
            raw=(self._ring(known.raw_k, nsa.l), self._ring(known.raw_v, nsa.l)),
            cmp=(_storage(known.cmp_k, self._n_cmp + 1), _storage(known.cmp_v, self._n_cmp + 1)),
            sel=(_storage(known.sel_k, self._n_blocks * nsa.l_sel), _storage(known.sel_v, self._n_blocks * nsa.l_sel)),
            win=(self._ring(known.win_k, nsa.w), self._ring(known.win_v, nsa.w)),
        )

    def _ring(self, rows: Rows, size: int) -> Tensor:
        """The newest rows, each at its token's place modulo ``size``."""
        known = rows.view[:, -size:]
        made = known.new_zeros(known.shape[0], size, *known.shape[2:])
        first = self._done - known.shape[1]
        made[:, torch.arange(first, self._done, device=known.device) % size] = known
        return made

    def _here(self) -> _Here:
        nsa, c, at = self._nsa, self.model.cfg, self._at
        device, dtype = at.device, self.model.embed.weight.dtype
        first = at + 1 - nsa.l  # of the block that ends here, if one does
        whole = (first >= 0) & (first % nsa.d == 0)
        whole_blocks = (first.div(nsa.d, rounding_mode="floor") + 1).clamp(min=0)
        tables = [
            rope_tables(place, c.d_k, base=c.rope_base, scale=c.rope_scale, dtype=dtype)[:, None]
            for place in (at, first.clamp(min=0))
        ]
        return _Here(
            at=at,
            table=tables[0],
            block_table=tables[1],
            raw_order=(first + torch.arange(nsa.l, device=device)) % nsa.l,
            block=torch.where(whole, first.div(nsa.d, rounding_mode="floor"), self._n_cmp),
            sees_cmp=blocks.cmp_visible(nsa, at, self._zero, self._n_cmp)[0, 0],
            sees_win=torch.arange(nsa.w, device=device) <= at,
            forced=blocks.forced_blocks(nsa, at, self._zero, self._n_blocks)[:, None],
            candidates=blocks.block_candidates(nsa, at, self._zero, self._n_blocks)[:, None],
            shares=pool_weights(nsa, device),
            counts=torch.cat([whole_blocks, at + 1, (at + 1).clamp(max=nsa.w)]).to(torch.int32),
        )

    def _attend(self, layer: NSAttention, x: Tensor, cache: FixedCache, here: _Here) -> Tensor:
        """One layer's attention. x [B, 1, dim] -> [B, 1, dim]; writes the token into the cache."""
        nsa, at = self._nsa, here.at
        p = layer.project(x)
        q, k_sel, k_win = layer.heads(rotate(p.token, here.table))
        for rows, place, new in (
            *((rows, at % nsa.l, new) for rows, new in zip(cache.raw, (p.k_cmp, p.v_cmp), strict=True)),
            *((rows, at, new) for rows, new in zip(cache.sel, (k_sel, p.v_sel), strict=True)),
            *((rows, at % nsa.w, new) for rows, new in zip(cache.win, (k_win, p.v_win), strict=True)),
        ):
            rows.index_copy_(1, place, new)
        raw_k, raw_v = (rows.index_select(1, here.raw_order) for rows in cache.raw)
        cache.cmp[0].index_copy_(1, here.block, rotate(layer.phi_k(raw_k), here.block_table))
        cache.cmp[1].index_copy_(1, here.block, layer.phi_v(raw_v))
        chosen = self._choose(q, cache.cmp[0][:, : self._n_cmp], here)
        o_cmp, o_sel, o_win = self._branches(q, cache, chosen, here)
        g_cmp, g_sel, g_win = (g[..., None] for g in p.gates.unbind(-1))
        out: Tensor = layer.out((g_cmp * o_cmp + g_sel * o_sel + g_win * o_win).flatten(-2))
        return out

    def _choose(self, q: Tensor, k_cmp: Tensor, here: _Here) -> Tensor:
        """As ``decode.choose``: int32 [B, G, 1, n_sel], -1 for none."""
        b, _, heads, dk = q.shape
        groups = k_cmp.shape[2]
        if not self._n_cmp:
            score = q.new_zeros(b, groups, 1, self._n_blocks)
            return best_blocks(self._nsa, score, here.forced, here.candidates)
        scores = torch.einsum("bghd,bngd->bghn", q.view(b, groups, heads // groups, dk), k_cmp) * dk**-0.5
        scores = scores.masked_fill(~here.sees_cmp, -torch.inf)
        p = torch.softmax(scores, dim=-1, dtype=torch.promote_types(q.dtype, torch.float32))
        p = torch.where(here.sees_cmp, p, 0.0).sum(2)  # where nothing is seen, the softmax is no number
        rank = pool(self._nsa, p, self._n_blocks, here.shares)[:, :, None]
        return best_blocks(self._nsa, rank, here.forced, here.candidates)

    def _branches(self, q: Tensor, cache: FixedCache, chosen: Tensor, here: _Here) -> tuple[Tensor, Tensor, Tensor]:
        """As ``decode.branches``: the three outputs [B, 1, H, dv]."""
        if dispatch.decodes_by_kernel(q.device):
            from uvcc_engine.nsa.kernels import decode as kernel

            k_cmp, v_cmp = (rows[:, : self._n_cmp] for rows in cache.cmp)
            (k_sel, v_sel), (k_win, v_win) = cache.sel, cache.win
            keys, values = (k_cmp, k_sel, k_win), (v_cmp, v_sel, v_win)
            return kernel.attend(q, keys, values, chosen, self._nsa.l_sel, here.counts)
        o_win = one_query(q, *cache.win, here.sees_win[None, None, None])
        o_cmp = torch.zeros_like(o_win)
        if self._n_cmp:
            k, v = (rows[:, : self._n_cmp] for rows in cache.cmp)
            o_cmp = torch.where(here.sees_cmp.any(), one_query(q, k, v, here.sees_cmp[None, None, None]), 0.0)
        inside = torch.arange(self._nsa.l_sel, device=q.device)
        place = (chosen[:, :, 0, :, None].to(torch.int64) * self._nsa.l_sel + inside).flatten(2)
        there = (place >= 0) & (place <= here.at)
        k, v = (gather_tokens(rows, place.clamp(min=0)) for rows in cache.sel)
        mask = there.repeat_interleave(q.shape[2] // k.shape[2], dim=1)[:, :, None]
        return o_cmp, one_query(q, k, v, mask), o_win

    def _recorded(self) -> torch.cuda.CUDAGraph:
        """The step as a graph. A step writes what it is given to its place again, so repeating it changes nothing but
        the position, which is put back."""
        before = self._at.clone()

        def put_back() -> None:
            self._at.copy_(before)

        graph = recorded(self.compute, put_back)
        put_back()
        return graph


@torch.no_grad()
def recorded(work: Callable[[], object], undo: Callable[[], object] = lambda: None) -> torch.cuda.CUDAGraph:
    """``work`` as a CUDA graph, behind a few calls aside, each followed by ``undo``."""
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(WARM_UPS):
            work()
            undo()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def _storage(rows: Rows, size: int) -> Tensor:
    known = rows.view
    made = known.new_zeros(known.shape[0], size, *known.shape[2:])
    made[:, : known.shape[1]] = known
    return made
