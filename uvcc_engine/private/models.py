"""The models that can be trained in secret: layer by layer, by name. Shapes only; no torch.

Initial weights are a public, deterministic function of the job's seed (Kaiming-uniform, rounded to the fixed-point
grid): sharing a public constant is free, and after the first update the weights are secret.
"""

from __future__ import annotations

import math
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


@dataclass(frozen=True, slots=True)
class Relu:
    """max(0, x) on ``width`` features."""

    width: int


LayerSpec = Dense | Relu


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A named stack of layers that ends in one logit per class."""

    name: str
    layers: tuple[LayerSpec, ...]
    features: int
    classes: int

    @property
    def weights(self) -> tuple[Dense, ...]:
        """The layers that hold a weight, in order."""
        return tuple(layer for layer in self.layers if isinstance(layer, Dense))


def mlp(name: str, *widths: int) -> ModelSpec:
    """Dense layers of the given widths with ReLU between them."""
    layers: list[LayerSpec] = []
    for i, (inputs, outputs) in enumerate(pairwise(widths)):
        if i:
            layers.append(Relu(inputs))
        layers.append(Dense(inputs, outputs))
    return ModelSpec(name, tuple(layers), widths[0], widths[-1])


MODELS: Final[dict[str, ModelSpec]] = {
    spec.name: spec
    for spec in (
        mlp("logistic-digits", 64, 10),
        mlp("mlp-digits", 64, 32, 10),
        mlp("secureml-a", 784, 128, 128, 10),  # SecureML (Mohassel and Zhang, 2017), "network A"
    )
}


def find_model(name: str) -> ModelSpec:
    """The model called ``name``. Raises ConfigError naming the nearest known one."""
    if name in MODELS:
        return MODELS[name]
    near = get_close_matches(name, MODELS, n=1, cutoff=0.0)
    raise ConfigError(f"job.model: unknown model {name!r}", f"did you mean {near[0]!r}?")


def initial_weights(model: ModelSpec, seed: int, frac_bits: int) -> list[Floats]:
    """Public initial weights, one (inputs + 1, outputs) array per dense layer, on the grid of 2^-frac_bits.

    Kaiming-uniform with gain sqrt(2) before a ReLU and 1 before the logits; biases are zero (He et al., 2015).
    """
    found: list[Floats] = []
    dense = model.weights
    for index, layer in enumerate(dense):
        gain = 6.0 if index < len(dense) - 1 else 3.0
        bound = math.sqrt(gain / layer.inputs)
        words = public_stream("init", seed, index, layer.inputs * layer.outputs)
        uniform = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
        weight = np.zeros((layer.inputs + 1, layer.outputs))
        weight[:-1] = ((2.0 * uniform - 1.0) * bound).reshape(layer.inputs, layer.outputs)
        found.append(np.rint(weight * 2.0**frac_bits) / 2.0**frac_bits)
    return found
