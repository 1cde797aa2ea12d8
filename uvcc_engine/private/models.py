"""The models that can be trained in secret: layer by layer, by name. Shapes only; no torch.

Initial weights are a public, deterministic function of the job's seed (Kaiming-uniform, rounded to the fixed-point
grid): sharing a public constant is free, and after the first update the weights are secret.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from typing import Final

import numpy as np

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.private.data import Floats, public_stream


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


Weighted = Dense | Conv2d
LayerSpec = Dense | Conv2d | Pool | Relu


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A named stack of layers that ends in one logit per class."""

    name: str
    layers: tuple[LayerSpec, ...]
    features: int
    classes: int

    @property
    def weights(self) -> tuple[Weighted, ...]:
        """The layers that hold a weight, in order."""
        return tuple(layer for layer in self.layers if isinstance(layer, Dense | Conv2d))


def mlp(name: str, *widths: int) -> ModelSpec:
    """Dense layers of the given widths with ReLU between them."""
    layers: list[LayerSpec] = []
    for i, (inputs, outputs) in enumerate(pairwise(widths)):
        if i:
            layers.append(Relu(inputs))
        layers.append(Dense(inputs, outputs))
    return ModelSpec(name, tuple(layers), widths[0], widths[-1])


def cnn(name: str, image: Image, stages: Sequence[tuple[int, int, int, str]], *dense: int) -> ModelSpec:
    """Stages of convolution, ReLU and 2 x 2 pooling, then dense layers with ReLU between them.

    A stage is (channels, kernel, padding, kind of pooling: "avg", "max" or "" for none).
    """
    layers: list[LayerSpec] = []
    at = image
    for channels, kernel, padding, pool in stages:
        conv = Conv2d(at, channels, kernel, padding=padding)
        at = conv.out
        layers += [conv, Relu(at.size)]
        if pool:
            layers.append(Pool(at, 2, pool))
            at = Pool(at, 2, pool).out
    head = mlp(name, at.size, *dense)
    return ModelSpec(name, (*layers, *head.layers), image.size, head.classes)


_MNIST: Final = Image(1, 28, 28)
MODELS: Final[dict[str, ModelSpec]] = {
    spec.name: spec
    for spec in (
        mlp("logistic-digits", 64, 10),
        mlp("mlp-digits", 64, 32, 10),
        cnn("cnn-digits", Image(1, 8, 8), [(8, 3, 1, "avg")], 10),
        mlp("secureml-a", 784, 128, 128, 10),  # SecureML (Mohassel and Zhang, 2017), "network A"
        # LeNet as in Falcon (Wagh et al., 2021) and Piranha (Watson et al., 2022), whose tables it is compared with
        cnn("lenet", _MNIST, [(20, 5, 0, "max"), (50, 5, 0, "max")], 500, 10),
        cnn("lenet-avg", _MNIST, [(20, 5, 0, "avg"), (50, 5, 0, "avg")], 500, 10),
    )
}


def find_model(name: str) -> ModelSpec:
    """The model called ``name``. Raises ConfigError naming the nearest known one."""
    if name in MODELS:
        return MODELS[name]
    near = get_close_matches(name, MODELS, n=1, cutoff=0.0)
    raise ConfigError(f"job.model: unknown model {name!r}", f"did you mean {near[0]!r}?")


def initial_weights(model: ModelSpec, seed: int, frac_bits: int) -> list[Floats]:
    """Public initial weights, one (fan-in + 1, outputs) array per weighted layer, on the grid of 2^-frac_bits.

    Kaiming-uniform with gain sqrt(2) before a ReLU and 1 before the logits; biases are zero (He et al., 2015).
    """
    found: list[Floats] = []
    weighted = model.weights
    for index, layer in enumerate(weighted):
        gain = 6.0 if index < len(weighted) - 1 else 3.0
        bound = math.sqrt(gain / layer.inputs)
        words = public_stream("init", seed, index, layer.inputs * layer.outputs)
        uniform = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
        weight = np.zeros(layer.weight_shape)
        weight[:-1] = ((2.0 * uniform - 1.0) * bound).reshape(layer.inputs, layer.outputs)
        found.append(np.rint(weight * 2.0**frac_bits) / 2.0**frac_bits)
    return found
