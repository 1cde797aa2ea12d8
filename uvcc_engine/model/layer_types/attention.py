"""Softmax self-attention of several heads (Vaswani et al., 2017), causal or not; heads may share keys and values
(Ainslie et al., 2023), and queries and keys may be turned by their places (Su et al., 2021).

Language models lay their tokens out as lines: (rows * positions, width). Only the embedding and the attention know
which lines belong together. On tensor ranks each has some of the heads, for all lines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.model import ops
from uvcc_engine.model.parts import Local, StagePart
from uvcc_engine.model.registry import LayerSpec, LayerType, PlaintextContext, SecretContext, register
from uvcc_engine.model.secret_layer import Layer
from uvcc_engine.model.shapes import WeightShape, check_features, check_positive, check_shared
from uvcc_engine.model.tensor_parallel import COLUMNS, PartContext, PlaceContext, Placed, TensorParallel, bounds

if TYPE_CHECKING:
    from torch import Tensor

    from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
    from uvcc_engine.mpc.foundation.share import Share

_MASKED: Final = -1 << 58
"""The ring element of a score that does not count: below any that does, and a score's distance from it can be compared.
A score is a product that was truncated, and so within 2^54 whatever its fractional bits."""


@dataclass(frozen=True, slots=True)
class Attention(LayerSpec):
    """Self-attention of ``heads`` heads over queries of ``width`` and keys and values of ``kv_heads`` heads (0: as many
    as queries have) each. ``causal``: a line sees itself and those before it, else all. ``rotary``: the base of the
    angles by which queries and keys are turned, 0 for none."""

    positions: int
    width: int
    heads: int
    kv_heads: int = 0
    causal: bool = True
    rotary: float = 0.0

    @property
    def shared_heads(self) -> int:
        """Heads of keys, and of values."""
        return self.kv_heads or self.heads

    @property
    def fed(self) -> int:
        """Features of a line: queries, keys and values side by side."""
        return self.width + 2 * (self.width // self.heads) * self.shared_heads


def angles(spec: Attention) -> np.ndarray[Any, Any]:
    """Cosines and sines ``[2, positions, width of a head]``, both halves of a head alike."""
    half = spec.width // spec.heads // 2
    turns = np.arange(spec.positions)[:, None] * spec.rotary ** (-np.arange(half) / half)
    return np.stack([np.tile(np.cos(turns), 2), np.tile(np.sin(turns), 2)])


def _turned(x: Tensor, table: Tensor, sign: int = 1) -> Tensor:
    """Each head's two halves turned into each other by the angles of their line; back with ``sign`` -1."""
    return x * table[0] + sign * _swapped(x) * table[1]


def _swapped(x: Tensor) -> Tensor:
    """Each head's two halves, the upper one first and negative."""
    low, high = x.chunk(2, -1)
    return ops.torch.cat([-high, low], -1)


class AttentionLayer(Layer):
    """Softmax attention over (rows * positions, fed): queries, keys and values side by side.

    Forward 22 rounds and more for more than 10 positions, backward 8. Turning by places takes 2 more, each way.
    """

    def __init__(self, spec: Attention) -> None:
        self._spec = spec
        self._scale = 1.0 / math.sqrt(spec.width // spec.heads)
        self._parts: list[Share] = []
        self._weights: Share | None = None
        self._past: list[Share] = []

    def _heads(self, x: Share, counts: Sequence[int], lines: int = 0) -> list[Share]:
        """(rows * positions, heads * width of a head) -> for every part (rows, heads, positions, width of a head)."""
        spec = self._spec
        each = spec.width // spec.heads
        ends = list(accumulate(counts))

        def cut(t: Tensor, k: int) -> Tensor:
            split = t.reshape(-1, lines or spec.positions, ends[-1], each)
            return split[:, :, ends[k] - counts[k] : ends[k]].transpose(1, 2).contiguous()

        return [ops.Share(cut(x.first, k), cut(x.second, k), x.f) for k in range(len(counts))]

    def _lay(self, parts: list[Share]) -> Share:
        """The inverse of ``_heads``."""
        lines = len(parts[0].first) * self._spec.positions
        return ops.cat([p.map(lambda t: t.transpose(1, 2).reshape(lines, -1)) for p in parts], 1)

    def _turned_protocol(
        self, rt: Runtime, q: Share, k: Share, sign: int, lines: slice = slice(None)
    ) -> MpcProtocol[list[Share]]:
        """Queries and keys turned by their places, or turned back: 2 rounds."""
        if not self._spec.rotary:
            return [q, k]
        table = ops.public(rt, ops.torch.from_numpy(angles(self._spec)[:, lines]), f=q.f)
        both = ops.cat([q, k], 1)
        if rt.ledger is None:
            found = yield from ops.product_with_protocol(rt, both, table, lambda x, t: _turned(x, t, sign))
        else:
            across = both.map(lambda t: sign * _swapped(t))
            found = ops.add(
                *(yield from ops.par(*(ops.mul_protocol(rt, x, table.index(i)) for i, x in enumerate((both, across)))))
            )
        heads = self._spec.heads
        return [found.index((slice(None), slice(None, heads))), found.index((slice(None), slice(heads, None)))]

    def _spread(self, x: Share) -> Share:
        """A head of keys or values for every head of queries."""
        return x.map(lambda t: t.repeat_interleave(self._spec.heads // self._spec.shared_heads, 1))

    def _gathered(self, x: Share) -> Share:
        """The transpose of ``_spread``."""
        spec = self._spec
        shape = (-1, spec.shared_heads, spec.heads // spec.shared_heads, *x.shape[2:])
        return x.map(lambda t: t.reshape(shape).sum(2))

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        torch, spec = ops.torch, self._spec
        q, k, v = self._heads(x, (spec.heads, spec.shared_heads, spec.shared_heads))
        q, k = yield from self._turned_protocol(rt, q, k, 1)
        self._parts = q, k, v = [q, self._spread(k), self._spread(v)]
        scores = yield from ops.matmul_protocol(rt, q, k.T, scale=self._scale)
        narrow = yield from ops.to_exp_scale_protocol(rt, scores)
        if spec.causal:
            seen = torch.ones(spec.positions, spec.positions, dtype=torch.int64, device=rt.device).tril()
            narrow = ops.add_ring(rt, ops.scale_int(narrow, seen), (1 - seen) * _MASKED)
        share, _, _ = yield from ops.softmax_protocol(rt, narrow)
        self._weights = yield from ops.rescale_protocol(rt, share, x.f)
        mixed = yield from ops.matmul_protocol(rt, self._weights, v)
        return self._lay([mixed])

    def next_protocol(self, rt: Runtime, x: Share, place: int) -> MpcProtocol[Share]:
        """One more line: its query over the keys and values of all lines before it, which are kept. Raises ConfigError
        unless it is causal."""
        spec = self._spec
        if not spec.causal:
            raise ConfigError("attention to lines that are still to come", "generate with causal attention")
        parts = self._heads(x, (spec.heads, spec.shared_heads, spec.shared_heads), lines=1)
        q, k = yield from self._turned_protocol(rt, parts[0], parts[1], 1, slice(place, place + 1))
        more = [self._spread(k), self._spread(parts[2])]
        self._past = [ops.cat([old, new], 2) for old, new in zip(self._past, more, strict=True)] if place else more
        keys, values = self._past
        scores = yield from ops.matmul_protocol(rt, q, keys.T, scale=self._scale)
        share, _, _ = yield from ops.softmax_protocol(rt, (yield from ops.to_exp_scale_protocol(rt, scores)))
        mixed = yield from ops.matmul_protocol(rt, (yield from ops.rescale_protocol(rt, share, x.f)), values)
        return mixed.map(lambda t: t.transpose(1, 2).reshape(x.shape[0], spec.width))

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        assert self._weights is not None
        q, k, v = self._parts
        p, (g,) = self._weights, self._heads(grad, (self._spec.heads,))
        dv, dp = yield from ops.par(ops.matmul_protocol(rt, p.T, g), ops.matmul_protocol(rt, g, v.T))
        along = yield from ops.summed_products_protocol(rt, dp, p, -1, keepdim=True)
        ds = yield from ops.mul_protocol(rt, ops.sub(dp, along), p)
        dq, dk = yield from ops.par(
            ops.matmul_protocol(rt, ds, k, scale=self._scale), ops.matmul_protocol(rt, ds.T, q, scale=self._scale)
        )
        dq, dk = yield from self._turned_protocol(rt, dq, self._gathered(dk), -1)
        return self._lay([dq, dk, self._gathered(dv)])


def _output_shape(spec: Attention, shape: WeightShape) -> WeightShape:
    check_positive(spec, "positions", "width", "heads")
    check_shared("Attention.positions", spec.positions)
    if spec.width % spec.heads or shape[0] % spec.positions:
        raise ConfigError(
            f"{spec} cannot divide {spec.width} features into heads, or {shape[0]} lines into positions",
            "give a width that the heads divide, and as many positions as the embedding has",
        )
    each = spec.width // spec.heads
    if spec.kv_heads < 0 or spec.heads % spec.shared_heads:
        raise ConfigError(f"{spec} cannot share {spec.kv_heads} heads of keys", "give a number that divides the heads")
    if spec.rotary and (each % 2 or not 1.0 < spec.rotary <= 1e9):
        raise ConfigError(f"{spec} cannot be turned by places", "give heads of even width, and a base like 10000")
    check_features(spec, shape, spec.fed)
    return shape[0], spec.width


def _secret(spec: Attention, at: SecretContext) -> AttentionLayer:
    return AttentionLayer(spec)


def _plaintext(spec: Attention, at: PlaintextContext, x: Tensor) -> Tensor:
    torch, shared, each = ops.torch, spec.shared_heads, spec.width // spec.heads
    parts = x.reshape(-1, spec.positions, spec.heads + 2 * shared, each).transpose(1, 2)
    q, k, v = torch.tensor_split(parts, (spec.heads, spec.heads + shared), 1)
    if spec.rotary:
        table = torch.from_numpy(angles(spec))
        q, k = _turned(q, table), _turned(k, table)
    k, v = (one.repeat_interleave(spec.heads // shared, 1) for one in (k, v))
    mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=spec.causal)
    return mixed.transpose(1, 2).reshape(-1, spec.width)


def _products(spec: Attention) -> int:
    return spec.positions * (2 * spec.width + 256 * spec.heads)  # every weight is an exponential


def _place(spec: Attention, at: PlaceContext) -> Placed:
    if at.tensor > 1 and (at.layout != COLUMNS or spec.shared_heads != spec.heads):
        raise at.refusal(spec, "heads share keys" if at.layout == COLUMNS else "")
    if spec.heads % at.tensor:  # the product behind takes as many columns from each rank
        raise at.refusal(spec, f"{spec.heads} heads do not divide among {at.tensor} tensor ranks")
    return at.placed(spec, "", at.layout)


def _part(spec: Attention, at: PartContext) -> StagePart:
    mine = bounds(spec.heads, at.tp.size, at.tp.index)
    heads = mine.stop - mine.start
    if heads == spec.heads:
        return Local(AttentionLayer(spec))
    return Local(AttentionLayer(replace(spec, heads=heads, kv_heads=0, width=spec.width // spec.heads * heads)))


def _head_count(spec: Attention) -> int:
    return spec.heads


register(
    LayerType(
        name="attention",
        spec=Attention,
        output_shape=_output_shape,
        secret=_secret,
        plaintext=_plaintext,
        rounds=30,
        products=_products,
        tensor_parallel=TensorParallel(place=_place, part=_part, heads=_head_count),
    )
)
