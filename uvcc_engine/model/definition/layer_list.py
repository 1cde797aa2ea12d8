"""Models as people write them, ``[{linear: 16}, relu, {linear: 2}]``, and the canonical JSON that a policy holds.

Shapes follow from the data: the first layer takes its features, the last ``linear`` without a width gives its classes.

    {"classes": 2, "features": 30, "layers": [{"inputs": 30, "outputs": 16, "type": "dense"}, ...]}

That JSON says all sizes, so it means the same to every party whatever this file learns later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.parsing.suggest import did_you_mean
from uvcc_engine.model.definition.spec_json import layer_from_json, layer_to_json
from uvcc_engine.model.layer_spec import LayerSpec
from uvcc_engine.model.layer_types.batch_norm import BatchNorm
from uvcc_engine.model.layer_types.conv2d import Conv2d
from uvcc_engine.model.layer_types.dense import Dense
from uvcc_engine.model.layer_types.gelu import Gelu
from uvcc_engine.model.layer_types.layer_norm import LayerNorm
from uvcc_engine.model.layer_types.leaky_relu import LeakyRelu
from uvcc_engine.model.layer_types.pool import Pool
from uvcc_engine.model.layer_types.relu import Relu
from uvcc_engine.model.layer_types.residual import Residual
from uvcc_engine.model.layer_types.rms_norm import RmsNorm
from uvcc_engine.model.layer_types.smooth import Sigmoid, Silu, Tanh
from uvcc_engine.model.model_spec import ModelSpec, check_model
from uvcc_engine.model.registry import layer_types, type_of
from uvcc_engine.model.shapes import Image

MOST_LAYERS: Final = 1024
MOST_NUMBERS: Final = 1 << 28
"""Entries of all weights together: shares of more do not fit a pod."""
_FINE: Final = 14
"""Fractional bits that layers with a division or a transcendental function need."""
_DEPTH: Final = 8


@dataclass(frozen=True, slots=True)
class _At:
    """What comes out of the layers so far: so many features, lying as an image where one was named."""

    features: int
    classes: int
    image: Image | None
    where: str
    last: bool
    depth: int = 0


_Made = tuple[tuple[LayerSpec, ...], int, Image | None]


def is_module_file(text: str) -> bool:
    """Whether a model's name is that of a class in a file: ``file.py:Model``."""
    return bool(re.fullmatch(r"[^{\[].*\.py:[A-Za-z_]\w*", text))


def model_of_list(layers: object, features: int, classes: int) -> ModelSpec:
    """A model from the layers of a profile, for data of so many features and classes.

    Raises ConfigError naming the layer's place in the list, what is wrong, and the nearest layer that there is.
    """
    if not isinstance(layers, list) or not layers:
        raise ConfigError("job.model is no list of layers", "write it like [{linear: 16}, relu, linear]")
    made, _, _ = _stack(layers, _At(features, classes, None, "job.model", True))
    return model_of_layers(made, features, classes)


def model_to_json(model: ModelSpec) -> dict[str, Any]:
    """A model as plain JSON values, with nothing left to guess."""
    layers = [layer_to_json(spec) for spec in model.layers]
    return {"classes": model.classes, "features": model.features, "layers": layers}


@lru_cache(maxsize=16)
def model_of_text(text: str) -> ModelSpec:
    """The model that a JSON text describes; hostile until read. Raises ConfigError naming the place."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"job.model is no JSON: {str(error)[:80]}", "give a name, or a list of layers") from error
    return model_of_json(found)


def model_of_json(found: object) -> ModelSpec:
    """What :func:`model_to_json` gave. Raises ConfigError naming the place."""
    if not isinstance(found, Mapping) or set(found) != {"classes", "features", "layers"}:
        raise ConfigError("job.model is no model", "it has exactly classes, features and layers")
    features, classes = found["features"], found["classes"]
    if not all(type(size) is int and 0 < size <= MOST_NUMBERS for size in (features, classes)):
        raise ConfigError("job.model: features and classes are no sizes", "give whole numbers of at least 1")
    layers = found["layers"]
    if not isinstance(layers, list) or not 0 < len(layers) <= MOST_LAYERS:
        raise ConfigError("job.model.layers is no list of layers", f"give 1 to {MOST_LAYERS}")
    return model_of_layers(
        [layer_from_json(layer, f"job.model.layers[{i}]") for i, layer in enumerate(layers)], features, classes
    )


def model_of_layers(layers: Sequence[LayerSpec], features: int, classes: int) -> ModelSpec:
    """A model from specs. Raises ConfigError if they do not fit together, or fit no pod."""
    specs = tuple(layers)
    return _checked(ModelSpec(_name(specs), specs, features, classes, frac_bits=_bits(specs)))


def _checked(model: ModelSpec) -> ModelSpec:
    check_model(model)
    numbers = sum(spec.weight_shape[0] * spec.weight_shape[1] for spec in model.weights)
    if numbers > MOST_NUMBERS:
        raise ConfigError(f"{model.name} has {numbers} weights, at most {MOST_NUMBERS} fit", "make its layers narrower")
    return model


def _name(layers: Sequence[LayerSpec]) -> str:
    return f"job.model ({len(layers)} layers)"


def _bits(layers: Sequence[LayerSpec]) -> int:
    plain = (Dense, Relu, LeakyRelu, Conv2d, Pool)
    return 8 if all(isinstance(s, plain) or (s.inner and _bits(s.inner) == 8) for s in layers) else _FINE


def _stack(layers: Sequence[object], at: _At) -> _Made:
    if at.depth > _DEPTH or len(layers) > MOST_LAYERS:
        raise ConfigError(f"{at.where} is too deep or too long", f"use up to {MOST_LAYERS} layers in {_DEPTH} blocks")
    made: list[LayerSpec] = []
    features, image = at.features, at.image
    for i, layer in enumerate(layers):
        here = _At(features, at.classes, image, f"{at.where}[{i}]", at.last and i == len(layers) - 1, at.depth)
        name, value = _named(layer, here.where)
        found, features, image = _LAYERS[name](value, here)
        made += found
        shape = (1, here.features)
        for spec in found:  # here, where the place in the list is known
            try:
                shape = type_of(spec).output_shape(spec, shape)
            except ConfigError as error:
                raise ConfigError(f"{here.where}: {error.what}", error.hint) from error
    return tuple(made), features, image


def _named(layer: object, where: str) -> tuple[str, object]:
    if isinstance(layer, str):
        layer = {layer: None}
    if not isinstance(layer, Mapping) or len(layer) != 1 or not isinstance(next(iter(layer)), str):
        raise ConfigError(f"{where} is {_short(layer)}", "a layer is a word, like relu, or one key: {linear: 16}")
    ((name, value),) = layer.items()
    if name not in _LAYERS:
        other = " (it is not written in lists)" if name in layer_types() else ""
        raise ConfigError(f"{where}: unknown layer {name[:80]!r}{other}", did_you_mean(name.lower(), _LAYERS))
    return name, value


def _short(value: object) -> str:
    return repr(value)[:60] if isinstance(value, str | int | float | bool | None) else f"a {type(value).__name__}"


def _size(value: object, where: str, default: int | None = None) -> int:
    if value is None and default is not None:
        return default
    if type(value) is int and 0 < value <= MOST_NUMBERS:
        return value
    raise ConfigError(f"{where} is {_short(value)}", "it must be a whole number of at least 1")


def _options(value: object, main: str, known: Sequence[str], where: str) -> dict[str, Any]:
    """``{conv: 8}`` says what ``{conv: {channels: 8}}`` says."""
    found = value if isinstance(value, Mapping) else {main: value}
    for key in found:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {_short(key)}", did_you_mean(str(key), known))
    return dict(found)


def _image_of(at: _At) -> Image:
    if at.image is None:
        raise ConfigError(
            f"{at.where} works on images, it is fed {at.features} features in a row",
            "say before how they lie: {image: [channels, height, width]}",
        )
    return at.image


def _bare(value: object, at: _At) -> None:
    if value is not None:
        raise ConfigError(f"{at.where} takes no value", "write the word alone")


def _linear(value: object, at: _At) -> _Made:
    width = _size(value, f"{at.where}: the width", at.classes if at.last else None)
    return (Dense(at.features, width),), width, None


def _same(kind: Callable[[int], LayerSpec], *, keeps_image: bool = True) -> Callable[[object, _At], _Made]:
    def make(value: object, at: _At) -> _Made:
        _bare(value, at)
        return (kind(at.features),), at.features, at.image if keeps_image else None

    return make


def _flatten(value: object, at: _At) -> _Made:
    _bare(value, at)
    return (), at.features, None  # pixels lie flat already


def _image(value: object, at: _At) -> _Made:
    if not isinstance(value, list) or len(value) != 3:
        raise ConfigError(f"{at.where} is {_short(value)}", "write {image: [channels, height, width]}")
    image = Image(*(_size(item, at.where) for item in value))
    if image.size != at.features:
        raise ConfigError(
            f"{at.where}: an image of {image.size} pixels, there are {at.features} features", "make them as many"
        )
    return (), at.features, image


def _conv(value: object, at: _At) -> _Made:
    found = _options(value, "channels", ("channels", "kernel", "stride", "padding"), at.where)
    padding = found.get("padding", 0)
    if type(padding) is not int or padding < 0:
        raise ConfigError(f"{at.where}: the padding is {_short(padding)}", "it must be a whole number of at least 0")
    channels = _size(found.get("channels"), f"{at.where}: the number of channels")
    kernel = _size(found.get("kernel"), f"{at.where}: the kernel", 3)
    stride = _size(found.get("stride"), f"{at.where}: the stride", 1)
    spec = Conv2d(_image_of(at), channels, kernel, stride=stride, padding=padding)
    return (spec,), spec.out.size, spec.out


def _pool(kind: str) -> Callable[[object, _At], _Made]:
    def make(value: object, at: _At) -> _Made:
        spec = Pool(_image_of(at), _size(value, f"{at.where}: the window", 2), kind)
        return (spec,), spec.out.size, spec.out

    return make


def _batch_norm(value: object, at: _At) -> _Made:
    _bare(value, at)
    return (BatchNorm(at.image or Image(at.features, 1, 1)),), at.features, at.image


def _leaky(value: object, at: _At) -> _Made:
    slope = 0.01 if value is None else value
    if not isinstance(slope, int | float) or isinstance(slope, bool):
        raise ConfigError(f"{at.where} is {_short(slope)}", "give the slope below zero, like {leaky-relu: 0.01}")
    return (LeakyRelu(at.features, float(slope)),), at.features, at.image


def _residual(value: object, at: _At) -> _Made:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{at.where} is {_short(value)}", "write {residual: [{linear: 16}, relu]}")
    inside = _At(at.features, at.classes, at.image, f"{at.where}.residual", False, at.depth + 1)
    made, features, image = _stack(value, inside)
    return (Residual(made),), features, image


_LAYERS: Final[dict[str, Callable[[object, _At], _Made]]] = {
    "linear": _linear,
    "relu": _same(Relu),
    "leaky-relu": _leaky,
    "gelu": _same(Gelu),
    "silu": _same(Silu),
    "sigmoid": _same(Sigmoid),
    "tanh": _same(Tanh),
    "layer-norm": _same(LayerNorm),
    "rms-norm": _same(RmsNorm),
    "batch-norm": _batch_norm,
    "conv": _conv,
    "max-pool": _pool("max"),
    "avg-pool": _pool("avg"),
    "image": _image,
    "flatten": _flatten,
    "residual": _residual,
}
"""A word of the list -> the layers that it stands for, and what comes out of them."""
