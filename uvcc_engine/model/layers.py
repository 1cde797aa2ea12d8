"""Layers on shares with an explicit forward and backward pass; a model is a stack of them.

Every pass is a protocol generator, so that independent work shares its rounds: while the gradient of an input travels
on to the layer below, the gradient of this layer's weight is computed and applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.model import im2col
from uvcc_engine.model.specs import (
    Attention,
    BatchNorm,
    Conv2d,
    Dense,
    Embedding,
    Gelu,
    LayerNorm,
    LayerSpec,
    ModelSpec,
    Pool,
    Residual,
)
from uvcc_engine.model.transformer import AttentionLayer, BatchNormLayer, EmbeddingLayer, GeluLayer, LayerNormLayer
from uvcc_engine.mpc.arithmetic import DEALER, add, matmul_gen, mul_gen, mul_public_gen, product_with_gen, public
from uvcc_engine.mpc.gated import matmul_gated_gen, product_gated_gen
from uvcc_engine.mpc.maximum import matmul_max_gen, max_and_place_gen, max_gen
from uvcc_engine.mpc.runtime import Runtime, Steps, par
from uvcc_engine.mpc.selection import matmul_relu_gen, relu_gen
from uvcc_engine.mpc.share import Share, cat

FUSED = 1 << 18  # outputs; larger products flow through their rounds in pieces, which is faster than fewer rounds


class Layer(Protocol):
    """One layer. ``forward_gen`` remembers what ``input_gradient_gen`` and ``weight_gradient_gen`` need."""

    weight: Share | None

    def forward_gen(self, rt: Runtime, x: Share) -> Steps[Share]:
        """Outputs (rows, ...) of inputs (rows, ...)."""

    def input_gradient_gen(self, rt: Runtime, grad: Share) -> Steps[Share]:
        """Gradient of the inputs from the gradient of the outputs."""

    def weight_gradient_gen(self, rt: Runtime, grad: Share, scale: float) -> Steps[Share]:
        """``scale`` times the gradient of the weight, summed over the rows; for layers that have one."""


class DenseLayer:
    """y = [x, 1] W with W (inputs + 1, outputs): the last row is the bias, so it costs no message of its own.

    Forward 2 rounds; input gradient 2 rounds; weight gradient 2 rounds.
    """

    def __init__(self, weight: Share) -> None:
        self.weight: Share | None = weight
        self._seen: Share | None = None

    def forward_gen(self, rt: Runtime, x: Share) -> Steps[Share]:
        return (yield from matmul_gen(rt, *self.factors(rt, x)))

    def factors(self, rt: Runtime, x: Share) -> tuple[Share, Share]:
        """The two matrices whose product are the outputs for ``x``."""
        assert self.weight is not None
        self._seen = cat([x, public(rt, torch.ones(x.shape[0], 1), f=x.f)], 1)
        return self._seen, self.weight

    def outputs(self, product: Share) -> Share:
        """The layout of the outputs, from that of the product. Local."""
        return product

    def input_gradient_gen(self, rt: Runtime, grad: Share) -> Steps[Share]:
        assert self.weight is not None
        return (yield from matmul_gen(rt, grad, self.weight.index(slice(0, -1)).T))

    def gated_gradient_gen(self, rt: Runtime, grad: Share, bits: Share) -> Steps[Share]:
        """The input gradient times bits of its shape."""
        assert self.weight is not None
        return (yield from matmul_gated_gen(rt, grad, self.weight.index(slice(0, -1)).T, bits))

    def weight_gradient_gen(self, rt: Runtime, grad: Share, scale: float) -> Steps[Share]:
        assert self._seen is not None
        return (yield from matmul_gen(rt, self._seen.T, grad, scale=scale))


class ConvLayer:
    """A convolution: patches times weight, the last row of the weight being the bias.

    Forward 2 rounds; input gradient 2 rounds (patches are added up before the truncation, so it costs one truncation
    per input pixel); weight gradient 2 rounds.
    """

    def __init__(self, spec: Conv2d, weight: Share) -> None:
        self.weight: Share | None = weight
        self._spec = spec
        self._seen: Share | None = None

    def forward_gen(self, rt: Runtime, x: Share) -> Steps[Share]:
        return self.outputs((yield from matmul_gen(rt, *self.factors(rt, x))))

    def factors(self, rt: Runtime, x: Share) -> tuple[Share, Share]:
        """See ``DenseLayer.factors``."""
        assert self.weight is not None
        patches = x.map(lambda t: im2col.cut_patches(t, self._spec))
        self._seen = cat([patches, public(rt, torch.ones(patches.shape[0], 1), f=x.f)], 1)
        return self._seen, self.weight

    def outputs(self, product: Share) -> Share:
        """See ``DenseLayer.outputs``."""
        return product.map(lambda t: im2col.channels_first(t, self._spec.out))

    def input_gradient_gen(self, rt: Runtime, grad: Share) -> Steps[Share]:
        assert self.weight is not None
        kernel = self.weight.index(slice(0, -1))
        last = grad.map(lambda t: im2col.channels_last(t, self._spec.out))
        return (yield from product_with_gen(rt, last, kernel, self._back))

    def gated_gradient_gen(self, rt: Runtime, grad: Share, bits: Share) -> Steps[Share]:
        """See ``DenseLayer.gated_gradient_gen``."""
        assert self.weight is not None
        kernel = self.weight.index(slice(0, -1))
        last = grad.map(lambda t: im2col.channels_last(t, self._spec.out))
        return (yield from product_gated_gen(rt, last, kernel, bits, self._back))

    def _back(self, grad: Tensor, kernel: Tensor) -> Tensor:
        return im2col.add_patches(grad @ kernel.T, self._spec)

    def weight_gradient_gen(self, rt: Runtime, grad: Share, scale: float) -> Steps[Share]:
        assert self._seen is not None
        last = grad.map(lambda t: im2col.channels_last(t, self._spec.out))
        return (yield from matmul_gen(rt, self._seen.T, last, scale=scale))


class AvgPoolLayer:
    """Window means: sums are local, the public factor takes 2 rounds, forward as backward."""

    weight: Share | None = None

    def __init__(self, spec: Pool) -> None:
        self._spec = spec

    def forward_gen(self, rt: Runtime, x: Share) -> Steps[Share]:
        total = x.map(lambda t: im2col.cut_windows(t, self._spec).sum(-1).reshape(-1, self._spec.out.size))
        return (yield from mul_public_gen(rt, total, self._spec.size**-2))

    def input_gradient_gen(self, rt: Runtime, grad: Share) -> Steps[Share]:
        spread = grad.map(lambda t: im2col.lay_windows(_spread(t, self._spec), self._spec))
        return (yield from mul_public_gen(rt, spread, self._spec.size**-2))

    def weight_gradient_gen(self, rt: Runtime, grad: Share, scale: float) -> Steps[Share]:
        raise ConfigError("a pooling layer has no weight")
        yield  # a generator like its siblings


class MaxPoolLayer:
    """Window maxima: 6 rounds forward, which also give the secret place of each maximum; backward 1 round."""

    weight: Share | None = None

    def __init__(self, spec: Pool) -> None:
        self._spec = spec
        self._place: Share | None = None

    def forward_gen(self, rt: Runtime, x: Share) -> Steps[Share]:
        windows = x.map(lambda t: im2col.cut_windows(t, self._spec))
        best, self._place = yield from max_and_place_gen(rt, windows)
        return best.reshape(-1, self._spec.out.size)

    def input_gradient_gen(self, rt: Runtime, grad: Share) -> Steps[Share]:
        assert self._place is not None
        windows = yield from mul_gen(rt, grad.map(lambda t: _spread(t, self._spec)), self._place)
        return windows.map(lambda t: im2col.lay_windows(t, self._spec))

    def weight_gradient_gen(self, rt: Runtime, grad: Share, scale: float) -> Steps[Share]:
        raise ConfigError("a pooling layer has no weight")
        yield  # a generator like its siblings


def _spread(grad: Tensor, spec: Pool) -> Tensor:
    """Every output's gradient, once per pixel of its window."""
    return grad.reshape(-1, 1).expand(-1, spec.size**2)


class ReluLayer:
    """max(0, x): forward 5 rounds and keeps the secret sign bits; backward 1 round.

    Behind a product of up to ``FUSED`` outputs the two take 5 rounds together, and on the way back the product that
    comes down and the choice by the bits take 2.
    """

    weight: Share | None = None

    def __init__(self) -> None:
        self._positive: Share | None = None

    def forward_gen(self, rt: Runtime, x: Share) -> Steps[Share]:
        y, self._positive = yield from relu_gen(rt, x)
        return y

    def after_gen(self, rt: Runtime, layer: DenseLayer | ConvLayer, x: Share) -> Steps[Share]:
        """The layer's outputs for ``x``, through this ReLU."""
        y = yield from self.of_product_gen(rt, *layer.factors(rt, x))
        if self._positive is not None:
            self._positive = layer.outputs(self._positive)
        return layer.outputs(y)

    def of_product_gen(self, rt: Runtime, left: Share, right: Share, *, dealer: int = DEALER) -> Steps[Share]:
        """``max(0, left @ right)``."""
        if left.shape[0] * right.shape[1] > FUSED:
            return (yield from self.forward_gen(rt, (yield from matmul_gen(rt, left, right, dealer=dealer))))
        y, self._positive = yield from matmul_relu_gen(rt, left, right, dealer=dealer)
        return y

    def input_gradient_gen(self, rt: Runtime, grad: Share) -> Steps[Share]:
        assert self._positive is not None
        return (yield from mul_gen(rt, grad, self._positive))

    def before_gen(self, rt: Runtime, layer: DenseLayer | ConvLayer, grad: Share) -> Steps[Share]:
        """The gradient of the inputs from that of the outputs of the layer above."""
        assert self._positive is not None
        if self._positive.n > FUSED:
            return (yield from self.input_gradient_gen(rt, (yield from layer.input_gradient_gen(rt, grad))))
        return (yield from layer.gated_gradient_gen(rt, grad, self._positive))

    def weight_gradient_gen(self, rt: Runtime, grad: Share, scale: float) -> Steps[Share]:
        raise ConfigError("a ReLU has no weight")
        yield  # a generator like its siblings


class ResidualLayer:
    """x + layers(x). Its weights are its layers'."""

    weight: Share | None = None

    def __init__(self, layers: list[Layer]) -> None:
        self.layers = layers

    def forward_gen(self, rt: Runtime, x: Share) -> Steps[Share]:
        return add(x, (yield from forward_gen(rt, self.layers, x)))

    def input_gradient_gen(self, rt: Runtime, grad: Share) -> Steps[Share]:
        below = grad
        for layer in reversed(self.layers):
            below = yield from layer.input_gradient_gen(rt, below)
        return add(grad, below)

    def weight_gradient_gen(self, rt: Runtime, grad: Share, scale: float) -> Steps[Share]:
        raise ConfigError("a residual block has no weight of its own", "ask its layers")
        yield  # a generator like its siblings


Update = Callable[[Layer, Share], Steps[None]]
"""Compute a layer's weight gradient from the gradient of its outputs, and apply it."""


def build(model: ModelSpec, weights: Sequence[Share]) -> list[Layer]:
    """The layers of a model around the given weights, one per weighted layer. Raises ConfigError if they do not fit."""
    if [tuple(w.shape) for w in weights] != [layer.weight_shape for layer in model.weights]:
        raise ConfigError(
            f"weights of shapes {[tuple(w.shape) for w in weights]} do not fit {model.name}", "use its own checkpoint"
        )
    left = iter(weights)
    return [_layer(spec, left) for spec in model.layers]


def flat(layers: Sequence[Layer]) -> Iterator[Layer]:
    """All layers, those inside of residual blocks in their place."""
    for layer in layers:
        if isinstance(layer, ResidualLayer):
            yield from flat(layer.layers)
        else:
            yield layer


def weighted(layers: Sequence[Layer]) -> list[Layer]:
    """The layers that hold a weight, in order."""
    return [layer for layer in flat(layers) if layer.weight is not None]


def set_training(layers: Sequence[Layer], on: bool) -> None:
    """Let batch normalisation use the batch's statistics (``on``) or the running ones."""
    for layer in flat(layers):
        if isinstance(layer, BatchNormLayer):
            layer.training = on


def _layer(spec: LayerSpec, weights: Iterator[Share]) -> Layer:
    if isinstance(spec, Residual):
        return ResidualLayer([_layer(inner, weights) for inner in spec.layers])
    if isinstance(spec, LayerNorm):
        return LayerNormLayer(next(weights))
    if isinstance(spec, BatchNorm):
        return BatchNormLayer(spec, next(weights))
    if isinstance(spec, Embedding):
        return EmbeddingLayer(spec, next(weights))
    if isinstance(spec, Attention):
        return AttentionLayer(spec)
    if isinstance(spec, Gelu):
        return GeluLayer()
    if isinstance(spec, Dense):
        return DenseLayer(next(weights))
    if isinstance(spec, Conv2d):
        return ConvLayer(spec, next(weights))
    if isinstance(spec, Pool):
        return AvgPoolLayer(spec) if spec.kind == "avg" else MaxPoolLayer(spec)
    return ReluLayer()


def forward_gen(rt: Runtime, layers: Sequence[Layer], x: Share) -> Steps[Share]:
    """Through all layers, first to last: (rows, features) to (rows, classes)."""
    left = list(reversed(layers))
    while left:
        layer = left.pop()
        following = left[-1] if left else None
        if isinstance(layer, DenseLayer | ConvLayer) and isinstance(following, ReluLayer):
            x = yield from following.after_gen(rt, layer, x)
            left.pop()
        else:
            x = yield from layer.forward_gen(rt, x)
    return x


def forward_max_gen(rt: Runtime, layers: Sequence[Layer], x: Share) -> Steps[tuple[Share, Share]]:
    """Logits (rows, classes) and the largest of every row (rows,): for up to 10 classes the maximum costs 4 rounds."""
    *below, last = layers
    if not isinstance(last, DenseLayer):
        logits = yield from forward_gen(rt, layers, x)
        return logits, (yield from max_gen(rt, logits))
    x = yield from forward_gen(rt, below, x)
    return (yield from matmul_max_gen(rt, *last.factors(rt, x)))


def backward_gen(rt: Runtime, layers: Sequence[Layer], grad: Share, update: Update) -> Steps[None]:
    """Through all layers, last to first, updating weights beside the gradient's way down.

    The lowest weighted layer needs no input gradient. Input gradients use the weights from before their update.
    """
    lowest = next((i for i, layer in enumerate(layers) if weighted([layer])), len(layers))
    yield from _backward_from_gen(rt, layers, len(layers) - 1, lowest, grad, update, None)


Then = Callable[[Share], Steps[None]]
"""What goes on below, from the gradient that arrives there."""


def _backward_from_gen(
    rt: Runtime, layers: Sequence[Layer], at: int, lowest: int, grad: Share, update: Update, then: Then | None
) -> Steps[None]:
    if at < lowest:
        if then is not None:
            yield from then(grad)
        return
    layer = layers[at]
    if isinstance(layer, ResidualLayer):
        yield from _through_residual_gen(rt, layers, at, lowest, grad, update, then)
        return
    if at == lowest and then is None:
        yield from update(layer, grad)
        return
    down = _descend_gen(rt, layers, at, lowest, grad, update, then)
    if layer.weight is None:
        yield from down
    else:
        # the first segment of `down` reads the old weight before `update` can replace it: par starts them in order
        yield from par(down, update(layer, grad))


def _through_residual_gen(
    rt: Runtime, layers: Sequence[Layer], at: int, lowest: int, grad: Share, update: Update, then: Then | None
) -> Steps[None]:
    block = layers[at]
    assert isinstance(block, ResidualLayer)

    def below_gen(inner: Share) -> Steps[None]:
        yield from _backward_from_gen(rt, layers, at - 1, lowest, add(grad, inner), update, then)

    last = at == lowest and then is None
    inside = next((i for i, layer in enumerate(block.layers) if weighted([layer])), 0) if last else 0
    yield from _backward_from_gen(
        rt, block.layers, len(block.layers) - 1, inside, grad, update, None if last else below_gen
    )


def _descend_gen(
    rt: Runtime, layers: Sequence[Layer], at: int, lowest: int, grad: Share, update: Update, then: Then | None
) -> Steps[None]:
    layer, following = layers[at], layers[at - 1] if at > lowest else None
    if isinstance(layer, DenseLayer | ConvLayer) and isinstance(following, ReluLayer):
        at -= 1
        below = yield from following.before_gen(rt, layer, grad)
    else:
        below = yield from layer.input_gradient_gen(rt, grad)
    yield from _backward_from_gen(rt, layers, at - 1, lowest, below, update, then)
