"""The models that can be trained in secret: layer by layer, by name. Shapes only; no torch.

Initial weights are a public, deterministic function of the job's seed (Kaiming-uniform, rounded to the fixed-point
grid): sharing a public constant is free, and after the first update the weights are secret.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from typing import Final

import numpy as np

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.data.sets import Floats, public_stream


@dataclass(frozen=True, slots=True)
class Dense:
    """A fully connected layer. Its weight is (inputs + 1, outputs); the last row is the bias."""

    inputs: int
    outputs: int

    @property
    def weight_shape(self) -> tuple[int, int]:
        return self.inputs + 1, self.outputs


@dataclass(frozen=True, slots=True)
class Image:
    """Shape of an image whose pixels lie flat in a row: channel by channel, line by line."""

    channels: int
    height: int
    width: int

    @property
    def size(self) -> int:
        return self.channels * self.height * self.width


@dataclass(frozen=True, slots=True)
class Conv2d:
    """A convolution with zero padding. Its weight is (channels * kernel^2 + 1, outputs); the last row is the bias."""

    image: Image
    channels: int
    kernel: int
    stride: int = 1
    padding: int = 0

    @property
    def out(self) -> Image:
        image, both = self.image, 2 * self.padding - self.kernel
        return Image(self.channels, (image.height + both) // self.stride + 1, (image.width + both) // self.stride + 1)

    @property
    def inputs(self) -> int:
        """Fan-in of one output."""
        return self.image.channels * self.kernel**2

    @property
    def outputs(self) -> int:
        return self.channels

    @property
    def weight_shape(self) -> tuple[int, int]:
        return self.inputs + 1, self.channels


@dataclass(frozen=True, slots=True)
class Pool:
    """Average or maximum over ``size`` x ``size`` windows that do not overlap; a remainder at the edge is dropped."""

    image: Image
    size: int
    kind: str

    @property
    def out(self) -> Image:
        return Image(self.image.channels, self.image.height // self.size, self.image.width // self.size)


@dataclass(frozen=True, slots=True)
class Relu:
    """max(0, x) on ``width`` features."""

    width: int


@dataclass(frozen=True, slots=True)
class Gelu:
    """x times the normal distribution function of x, on ``width`` features."""

    width: int


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Every row brought to mean 0 and variance 1. Its weight is (2, width): gain and bias."""

    width: int

    @property
    def weight_shape(self) -> tuple[int, int]:
        return 2, self.width


@dataclass(frozen=True, slots=True)
class BatchNorm:
    """Every channel brought to mean 0 and variance 1. Its weight is (4, channels): gain, mean, variance and bias."""

    image: Image

    @property
    def weight_shape(self) -> tuple[int, int]:
        return 4, self.image.channels


@dataclass(frozen=True, slots=True)
class Embedding:
    """Letters and their places to vectors. Its weight is (vocabulary + positions, width)."""

    vocabulary: int
    positions: int
    width: int

    @property
    def weight_shape(self) -> tuple[int, int]:
        return self.vocabulary + self.positions, self.width


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal self-attention of ``heads`` heads over queries, keys and values of ``width`` each."""

    positions: int
    width: int
    heads: int


@dataclass(frozen=True, slots=True)
class Residual:
    """x + layers(x)."""

    layers: tuple[LayerSpec, ...]


Weighted = Dense | Conv2d | LayerNorm | BatchNorm | Embedding
LayerSpec = Weighted | Pool | Relu | Gelu | Attention | Residual


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A named stack of layers that ends in one logit per class, at each of ``positions`` positions of a row.

    ``frac_bits``: the least number of fractional bits that the model trains with.
    """

    name: str
    layers: tuple[LayerSpec, ...]
    features: int
    classes: int
    positions: int = 1
    frac_bits: int = 8

    @property
    def weights(self) -> tuple[Weighted, ...]:
        """The layers that hold a weight, in order."""
        return tuple(_weighted(self.layers))

    @property
    def targets(self) -> int:
        """Columns of the one-hot labels."""
        return self.classes * self.positions


def _weighted(layers: Sequence[LayerSpec]) -> Iterator[Weighted]:
    for layer in layers:
        if isinstance(layer, Residual):
            yield from _weighted(layer.layers)
        elif isinstance(layer, Dense | Conv2d | LayerNorm | BatchNorm | Embedding):
            yield layer


def mlp(name: str, *widths: int) -> ModelSpec:
    """Dense layers of the given widths with ReLU between them."""
    layers: list[LayerSpec] = []
    for i, (inputs, outputs) in enumerate(pairwise(widths)):
        if i:
            layers.append(Relu(inputs))
        layers.append(Dense(inputs, outputs))
    return ModelSpec(name, tuple(layers), widths[0], widths[-1])


def cnn(
    name: str,
    image: Image,
    stages: Sequence[tuple[int, int, int, str]],
    *dense: int,
    stride: int = 1,
    normed: bool = False,
    frac_bits: int = 8,
) -> ModelSpec:
    """Stages of convolution, ReLU and 2 x 2 pooling, then dense layers with ReLU between them.

    A stage is (channels, kernel, padding, kind of pooling: "avg", "max" or "" for none). ``stride`` is that of the
    first convolution; ``normed`` puts a batch normalisation after each.
    """
    layers: list[LayerSpec] = []
    at = image
    for channels, kernel, padding, pool in stages:
        conv = Conv2d(at, channels, kernel, stride=1 if layers else stride, padding=padding)
        at = conv.out
        layers += [conv, BatchNorm(at), Relu(at.size)] if normed else [conv, Relu(at.size)]
        if pool:
            layers.append(Pool(at, 2, pool))
            at = Pool(at, 2, pool).out
    head = mlp(name, at.size, *dense)
    return ModelSpec(name, (*layers, *head.layers), image.size, head.classes, frac_bits=frac_bits)


def gpt(name: str, vocabulary: int, positions: int, width: int, heads: int, blocks: int) -> ModelSpec:
    """A decoder of pre-normalised blocks of attention and a four times wider GELU layer (Radford et al., 2019)."""
    layers: list[LayerSpec] = [Embedding(vocabulary, positions, width)]
    for _ in range(blocks):
        mix = (LayerNorm(width), Dense(width, 3 * width), Attention(positions, width, heads), Dense(width, width))
        think = (LayerNorm(width), Dense(width, 4 * width), Gelu(4 * width), Dense(4 * width, width))
        layers += [Residual(mix), Residual(think)]
    layers += [LayerNorm(width), Dense(width, vocabulary)]
    return ModelSpec(name, tuple(layers), positions * vocabulary, vocabulary, positions, frac_bits=14)


def _vgg(*groups: tuple[int, int]) -> list[tuple[int, int, int, str]]:
    """(convolutions, channels) per group of 3 x 3 convolutions, each group ending in a maximum pool."""
    return [(width, 3, 1, "max" if i == count - 1 else "") for count, width in groups for i in range(count)]


_MNIST: Final = Image(1, 28, 28)
_CIFAR: Final = Image(3, 32, 32)
_ALEXNET: Final = [(96, 11, 9, "max"), (256, 5, 1, "max"), (384, 3, 1, ""), (384, 3, 1, ""), (256, 3, 1, "")]
MODELS: Final[dict[str, ModelSpec]] = {
    spec.name: spec
    for spec in (
        mlp("logistic-digits", 64, 10),
        mlp("mlp-digits", 64, 32, 10),
        mlp("mlp4-digits", 64, 32, 32, 32, 10),
        mlp("mlp22-digits", 64, *[32] * 21, 10),  # four even stages: six layers, or four and the loss
        cnn("cnn-digits", Image(1, 8, 8), [(8, 3, 1, "avg")], 10),
        mlp("secureml-a", 784, 128, 128, 10),  # SecureML (Mohassel and Zhang, 2017), "network A"
        # LeNet as in Falcon (Wagh et al., 2021) and Piranha (Watson et al., 2022), whose tables it is compared with
        cnn("lenet", _MNIST, [(20, 5, 0, "max"), (50, 5, 0, "max")], 500, 10),
        cnn("lenet-avg", _MNIST, [(20, 5, 0, "avg"), (50, 5, 0, "avg")], 500, 10),
        cnn("cnn-digits-norm", Image(1, 8, 8), [(8, 3, 1, "avg")], 10, normed=True, frac_bits=14),
        # as in Falcon and Piranha for CIFAR-10, with pooling windows that do not overlap
        cnn("alexnet-cifar", _CIFAR, _ALEXNET, 256, 256, 10, stride=4, frac_bits=20),
        cnn("vgg16-cifar", _CIFAR, _vgg((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)), 256, 256, 10, frac_bits=20),
        gpt("gpt-tiny", 27, 8, 16, heads=2, blocks=1),
    )
}


def find_model(name: str) -> ModelSpec:
    """The model called ``name``. Raises ConfigError naming the nearest known one."""
    if name in MODELS:
        return MODELS[name]
    near = get_close_matches(name, MODELS, n=1, cutoff=0.0)
    raise ConfigError(f"job.model: unknown model {name!r}", f"did you mean {near[0]!r}?")


def initial_weights(model: ModelSpec, seed: int, frac_bits: int) -> list[Floats]:
    """Public initial weights, one array per weighted layer, on the grid of 2^-frac_bits.

    Kaiming-uniform with gain sqrt(2) before a ReLU and 1 before the logits; biases and places are zero, gains one (He
    et al., 2015).
    """
    weighted = model.weights
    return [
        np.rint(_initial(layer, seed, index, last=index == len(weighted) - 1) * 2.0**frac_bits) / 2.0**frac_bits
        for index, layer in enumerate(weighted)
    ]


def _initial(layer: Weighted, seed: int, index: int, *, last: bool) -> Floats:
    weight = np.zeros(layer.weight_shape)
    if isinstance(layer, LayerNorm | BatchNorm):
        weight[0] = 1.0
        weight[2:-1] = 1.0  # the running variance, if there is one
        return weight
    if isinstance(layer, Embedding):
        rows, columns, bound = layer.vocabulary, layer.width, 0.5
    else:
        rows, columns, bound = layer.inputs, layer.outputs, math.sqrt((3.0 if last else 6.0) / layer.inputs)
    words = public_stream("init", seed, index, rows * columns)
    uniform = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    weight[:rows] = ((2.0 * uniform - 1.0) * bound).reshape(rows, columns)
    return weight
