"""Causal softmax self-attention of several heads (Vaswani et al., 2017).

Language models lay their tokens out as lines: (rows * positions, width). Only the embedding and the attention know
which lines belong together. On tensor ranks each has some of the heads, for all lines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.model import ops
from uvcc_engine.model.parts import Local, StagePart
from uvcc_engine.model.registry import LayerSpec, LayerType, PlaintextContext, SecretContext, register
from uvcc_engine.model.secret_layer import Layer
from uvcc_engine.model.shapes import WeightShape, check_features, check_positive
from uvcc_engine.model.tensor_parallel import COLUMNS, PartContext, PlaceContext, Placed, TensorParallel, bounds

if TYPE_CHECKING:
    from torch import Tensor

    from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
    from uvcc_engine.mpc.foundation.share import Share

_MASKED: Final = -64.0  # e^-64 is zero here, as below -16


@dataclass(frozen=True, slots=True)
class Attention(LayerSpec):
    """Causal self-attention of ``heads`` heads over queries, keys and values of ``width`` each."""

    positions: int
    width: int
    heads: int


class AttentionLayer(Layer):
    """Causal softmax attention over (rows * positions, 3 width): queries, keys and values side by side.

    Forward 22 rounds and more for more than 10 positions, backward 8.
    """

    def __init__(self, spec: Attention) -> None:
        self._spec = spec
        self._scale = 1.0 / math.sqrt(spec.width // spec.heads)
        self._parts: list[Share] = []
        self._weights: Share | None = None

    def _heads(self, x: Share, parts: int) -> list[Share]:
        """(rows * positions, parts * width) -> for every part (rows, heads, positions, width / heads)."""
        spec = self._spec

        def cut(t: Tensor, k: int) -> Tensor:
            split = t.reshape(-1, spec.positions, parts, spec.heads, spec.width // spec.heads)
            return split[:, :, k].transpose(1, 2).contiguous()

        return [ops.Share(cut(x.first, k), cut(x.second, k), x.f) for k in range(parts)]

    def _lay(self, parts: list[Share]) -> Share:
        """The inverse of ``_heads``."""
        width = self._spec.width
        return ops.cat([p.map(lambda t: t.transpose(1, 2).reshape(-1, width)) for p in parts], 1)

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        torch = ops.torch
        self._parts = q, k, v = self._heads(x, 3)
        scores = yield from ops.matmul_protocol(rt, q, k.T, scale=self._scale)
        narrow = yield from ops.to_exp_scale_protocol(rt, scores)
        seen = torch.ones(self._spec.positions, self._spec.positions).tril()
        masked = ops.add_public(rt, ops.scale_int(narrow, seen.to(torch.int64)), (1.0 - seen) * _MASKED)
        share, _, _ = yield from ops.softmax_protocol(rt, masked)
        self._weights = yield from ops.rescale_protocol(rt, share, x.f)
        mixed = yield from ops.matmul_protocol(rt, self._weights, v)
        return self._lay([mixed])

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        assert self._weights is not None
        q, k, v = self._parts
        p, (g,) = self._weights, self._heads(grad, 1)
        dv, dp = yield from ops.par(ops.matmul_protocol(rt, p.T, g), ops.matmul_protocol(rt, g, v.T))
        along = yield from ops.product_with_protocol(rt, dp, p, lambda a, b: (a * b).sum(-1, keepdim=True))
        ds = yield from ops.mul_protocol(rt, ops.sub(dp, along), p)
        dq, dk = yield from ops.par(
            ops.matmul_protocol(rt, ds, k, scale=self._scale), ops.matmul_protocol(rt, ds.T, q, scale=self._scale)
        )
        return self._lay([dq, dk, dv])


def _output_shape(spec: Attention, shape: WeightShape) -> WeightShape:
    check_positive(spec, "positions", "width", "heads")
    if spec.width % spec.heads or shape[0] % spec.positions:
        raise ConfigError(
            f"{spec} cannot divide {spec.width} features into heads, or {shape[0]} lines into positions",
            "give a width that the heads divide, and as many positions as the embedding has",
        )
    check_features(spec, shape, 3 * spec.width)
    return shape[0], spec.width


def _secret(spec: Attention, at: SecretContext) -> AttentionLayer:
    return AttentionLayer(spec)


def _plaintext(spec: Attention, at: PlaintextContext, x: Tensor) -> Tensor:
    parts = x.reshape(-1, spec.positions, 3, spec.heads, spec.width // spec.heads).permute(2, 0, 3, 1, 4)
    fn = ops.torch.nn.functional
    mixed = fn.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
    return mixed.transpose(1, 2).reshape(-1, spec.width)


def _products(spec: Attention) -> int:
    return spec.positions * (2 * spec.width + 256 * spec.heads)  # every weight is an exponential


def _place(spec: Attention, at: PlaceContext) -> Placed:
    if at.layout != COLUMNS and at.tensor > 1:
        raise at.refusal(spec)
    return at.placed(spec, "", at.layout)


def _part(spec: Attention, at: PartContext) -> StagePart:
    mine = bounds(spec.heads, at.tp.size, at.tp.index)
    heads = mine.stop - mine.start
    return Local(AttentionLayer(replace(spec, heads=heads, width=spec.width // spec.heads * heads)))


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
