"""The models that can be trained in secret: stacks of layers, by name. Shapes only; no torch is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.parsing.suggest import CLOSE, did_you_mean
from uvcc_engine.model.definition.layer_list import model_of_text
from uvcc_engine.model.layer_spec import LayerSpec
from uvcc_engine.model.layer_types.attention import Attention
from uvcc_engine.model.layer_types.batch_norm import BatchNorm
from uvcc_engine.model.layer_types.conv2d import Conv2d
from uvcc_engine.model.layer_types.dense import Dense
from uvcc_engine.model.layer_types.embedding import Embedding
from uvcc_engine.model.layer_types.gelu import Gelu
from uvcc_engine.model.layer_types.layer_norm import LayerNorm
from uvcc_engine.model.layer_types.leaky_relu import LeakyRelu
from uvcc_engine.model.layer_types.pool import Pool
from uvcc_engine.model.layer_types.relu import Relu
from uvcc_engine.model.layer_types.residual import Residual
from uvcc_engine.model.layer_types.rms_norm import RmsNorm
from uvcc_engine.model.layer_types.smooth import Sigmoid, Silu, Tanh
from uvcc_engine.model.model_spec import ModelSpec, check_model, initial_weights
from uvcc_engine.model.shapes import Image

__all__ = [
    "MODELS",
    "Attention",
    "BatchNorm",
    "Conv2d",
    "Dense",
    "Embedding",
    "Gelu",
    "Image",
    "LayerNorm",
    "LayerSpec",
    "LeakyRelu",
    "ModelSpec",
    "Pool",
    "Relu",
    "Residual",
    "RmsNorm",
    "Sigmoid",
    "Silu",
    "Tanh",
    "check_model",
    "cnn",
    "find_model",
    "gpt",
    "initial_weights",
    "mlp",
    "register_model",
]


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
    """The model called ``name``, or the one that ``name`` describes as JSON (``layer_list``).

    Raises ConfigError naming the nearest known one, or the place where a description is wrong.
    """
    if name in MODELS:
        return MODELS[name]
    if name.startswith("{"):
        return model_of_text(name)
    others = f"{', '.join(MODELS)}; or a list of layers, or file.py:Model"
    raise ConfigError(f"job.model: unknown model {name!r}", did_you_mean(name, MODELS, others, CLOSE))


def register_model(model: ModelSpec) -> ModelSpec:
    """Give a model its name, by which jobs ask for it; and give it back.

    Raises ConfigError if the name is taken, or if its layers do not fit together. Names are this process's: a run
    trains it where every party and the owner registered the same model.
    """
    if model.name in MODELS:
        raise ConfigError(f"there is a model {model.name!r} already", "choose another name")
    check_model(model)
    MODELS[model.name] = model
    return model
