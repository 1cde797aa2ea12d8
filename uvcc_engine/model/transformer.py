"""Layers of deep networks on shares: normalisation, GELU, secret embeddings and causal self-attention.

Language models lay their tokens out as rows: (rows * positions, width). Only the embedding and the attention know
which rows belong together.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.model.functions import to_exp_scale_gen
from uvcc_engine.model.specs import Attention, BatchNorm, Embedding
from uvcc_engine.mpc.activations import gelu_gen
from uvcc_engine.mpc.arithmetic import (
    add,
    add_public,
    matmul_gen,
    mul_gen,
    mul_public_gen,
    product_with_gen,
    public,
    rescale_gen,
    scale_int,
    sub,
)
from uvcc_engine.mpc.nonlinear import softmax_gen
from uvcc_engine.mpc.normalize import normalize_gen, normalize_gradient_gen, rsqrt_gen
from uvcc_engine.mpc.runtime import Runtime, Steps, par
from uvcc_engine.mpc.share import Share, cat

EPSILON: Final = 2.0**-10
"""Added to a variance before its inverse root."""
HIGHEST: Final = 4096.0
KEEP: Final = 0.9
"""What batch normalisation keeps of its running statistics in a step."""
_MASKED: Final = -64.0  # e^-64 is zero here, as below -16


class _Weightless:
    weight: Share | None = None

    def weight_gradient_gen(self, rt: Runtime, grad: Share, scale: float) -> Steps[Share]:
        raise ConfigError("this layer has no weight")
        yield  # a generator like its siblings


class GeluLayer(_Weightless):
    """x times the normal distribution function of x: forward 13 rounds and keeps the slope; backward 2 rounds."""

    def __init__(self) -> None:
        self._slope: Share | None = None

    def forward_gen(self, rt: Runtime, x: Share) -> Steps[Share]:
        y, self._slope = yield from gelu_gen(rt, x)
        return y

    def input_gradient_gen(self, rt: Runtime, grad: Share) -> Steps[Share]:
        assert self._slope is not None
        return (yield from mul_gen(rt, grad, self._slope))


class LayerNormLayer:
    """Rows brought to mean 0 and variance 1, then gain and bias: the rows of the weight (2, width).

    Forward 31 rounds, backward 8 (Ba et al., 2016).
    """

    def __init__(self, weight: Share) -> None:
        self.weight: Share | None = weight
        self._normal: Share | None = None
        self._inverse: Share | None = None

    def forward_gen(self, rt: Runtime, x: Share) -> Steps[Share]:
        assert self.weight is not None
        self._normal, self._inverse = yield from normalize_gen(rt, x, epsilon=EPSILON, high=HIGHEST)
        scaled = yield from mul_gen(rt, self._normal, self.weight.index(0))
        return add(scaled, self.weight.index(1))

    def input_gradient_gen(self, rt: Runtime, grad: Share) -> Steps[Share]:
        assert self.weight is not None
        assert self._normal is not None
        assert self._inverse is not None
        gained = yield from mul_gen(rt, grad, self.weight.index(0))
        return (yield from normalize_gradient_gen(rt, gained, self._normal, self._inverse))

    def weight_gradient_gen(self, rt: Runtime, grad: Share, scale: float) -> Steps[Share]:
        assert self._normal is not None
        gain, bias = yield from par(
            product_with_gen(rt, grad, self._normal, lambda g, n: (g * n).sum(0), scale=scale),
            mul_public_gen(rt, grad.sum(0), scale),
        )
        return cat([gain.reshape(1, -1), bias.reshape(1, -1)])


class BatchNormLayer:
    """Channels brought to mean 0 and variance 1 (Ioffe and Szegedy, 2015). The weight (4, channels) holds gain,
    running mean, running variance and bias, so that a checkpoint and the owner get the statistics with the weights.

    ``training``: use the batch's own statistics and let the running ones follow when the weight is updated.
    Forward 31 rounds (27 in evaluation), backward 8.
    """

    def __init__(self, spec: BatchNorm, weight: Share) -> None:
        self.weight: Share | None = weight
        self.training = False
        self._spec = spec
        self._normal: Share | None = None
        self._inverse: Share | None = None
        self._statistics: Share | None = None

    def _channels(self, x: Share) -> Share:
        image = self._spec.image
        return x.map(lambda t: t.reshape(-1, image.channels, image.height * image.width).transpose(0, 1).flatten(1))

    def _rows(self, x: Share) -> Share:
        image = self._spec.image
        return x.map(lambda t: t.reshape(image.channels, -1, image.height * image.width).transpose(0, 1).flatten(1))

    def forward_gen(self, rt: Runtime, x: Share) -> Steps[Share]:
        assert self.weight is not None
        gain, mean, variance, bias = (self.weight.index(i).reshape(-1, 1) for i in range(4))
        cut = self._channels(x)
        if self.training:
            mean, variance = yield from self._measure_gen(rt, cut)
        centred = sub(cut, mean)
        inverse = yield from rsqrt_gen(rt, add_public(rt, variance, EPSILON), EPSILON / 2, HIGHEST)
        self._inverse = inverse
        self._normal = yield from mul_gen(rt, centred, inverse)
        scaled = yield from mul_gen(rt, self._normal, gain)
        return self._rows(add(scaled, bias))

    def _measure_gen(self, rt: Runtime, cut: Share) -> Steps[tuple[Share, Share]]:
        n = cut.shape[-1]
        mean = yield from mul_public_gen(rt, cut.sum(-1, keepdim=True), 1.0 / n)
        centred = sub(cut, mean)
        variance = yield from product_with_gen(
            rt, centred, centred, lambda a, b: (a * b).sum(-1, keepdim=True), scale=1.0 / n
        )
        self._statistics = cat([mean.T, variance.T])
        return mean, variance

    def input_gradient_gen(self, rt: Runtime, grad: Share) -> Steps[Share]:
        assert self.weight is not None
        assert self._normal is not None
        assert self._inverse is not None
        gained = yield from mul_gen(rt, self._channels(grad), self.weight.index(0).reshape(-1, 1))
        return self._rows((yield from normalize_gradient_gen(rt, gained, self._normal, self._inverse)))

    def weight_gradient_gen(self, rt: Runtime, grad: Share, scale: float) -> Steps[Share]:
        """The gradient of gain and bias; moves the running statistics, too."""
        assert self.weight is not None
        assert self._normal is not None
        assert self._statistics is not None
        cut = self._channels(grad)
        running = self.weight.index(slice(1, 3))
        gain, bias, drift = yield from par(
            product_with_gen(rt, cut, self._normal, lambda g, n: (g * n).sum(-1), scale=scale),
            mul_public_gen(rt, cut.sum(-1), scale),
            mul_public_gen(rt, sub(self._statistics, running), 1.0 - KEEP),
        )
        self.weight = cat([self.weight.index(slice(0, 1)), add(running, drift), self.weight.index(slice(3, 4))])
        still = public(rt, torch.zeros(2, gain.shape[0]), f=gain.f)
        return cat([gain.reshape(1, -1), still, bias.reshape(1, -1)])


class EmbeddingLayer:
    """Secret one-hot letters, and their public places, times a table (vocabulary + positions, width): which row is
    looked up stays secret. Forward 2 rounds, weight gradient 2 rounds."""

    def __init__(self, spec: Embedding, weight: Share) -> None:
        self.weight: Share | None = weight
        self._spec = spec
        self._seen: Share | None = None

    def forward_gen(self, rt: Runtime, x: Share) -> Steps[Share]:
        assert self.weight is not None
        letters = x.reshape(-1, self._spec.vocabulary)
        places = torch.eye(self._spec.positions).repeat(x.shape[0], 1)
        self._seen = cat([letters, public(rt, places, f=x.f)], 1)
        return (yield from matmul_gen(rt, self._seen, self.weight))

    def input_gradient_gen(self, rt: Runtime, grad: Share) -> Steps[Share]:
        raise ConfigError("an embedding has no input gradient", "put it first")
        yield  # a generator like its siblings

    def weight_gradient_gen(self, rt: Runtime, grad: Share, scale: float) -> Steps[Share]:
        assert self._seen is not None
        return (yield from matmul_gen(rt, self._seen.T, grad, scale=scale))


class AttentionLayer(_Weightless):
    """Causal softmax attention over (rows * positions, 3 width): queries, keys and values side by side.

    Forward 22 rounds and more for more than 10 positions, backward 8 (Vaswani et al., 2017).
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

        return [Share(cut(x.lo, k), cut(x.hi, k), x.f) for k in range(parts)]

    def _lay(self, parts: list[Share]) -> Share:
        """The inverse of ``_heads``."""
        width = self._spec.width
        return cat([p.map(lambda t: t.transpose(1, 2).reshape(-1, width)) for p in parts], 1)

    def forward_gen(self, rt: Runtime, x: Share) -> Steps[Share]:
        self._parts = q, k, v = self._heads(x, 3)
        scores = yield from matmul_gen(rt, q, k.T, scale=self._scale)
        narrow = yield from to_exp_scale_gen(rt, scores)
        seen = torch.ones(self._spec.positions, self._spec.positions).tril()
        masked = add_public(rt, scale_int(narrow, seen.to(torch.int64)), (1.0 - seen) * _MASKED)
        share, _, _ = yield from softmax_gen(rt, masked)
        self._weights = yield from rescale_gen(rt, share, x.f)
        mixed = yield from matmul_gen(rt, self._weights, v)
        return self._lay([mixed])

    def input_gradient_gen(self, rt: Runtime, grad: Share) -> Steps[Share]:
        assert self._weights is not None
        q, k, v = self._parts
        p, (g,) = self._weights, self._heads(grad, 1)
        dv, dp = yield from par(matmul_gen(rt, p.T, g), matmul_gen(rt, g, v.T))
        along = yield from product_with_gen(rt, dp, p, lambda a, b: (a * b).sum(-1, keepdim=True))
        ds = yield from mul_gen(rt, sub(dp, along), p)
        dq, dk = yield from par(matmul_gen(rt, ds, k, scale=self._scale), matmul_gen(rt, ds.T, q, scale=self._scale))
        return self._lay([dq, dk, dv])
