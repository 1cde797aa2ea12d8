"""The words of a list of layers, ``{linear: 16}``, ``relu``: which layers each stands for where it stands. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.parsing.suggest import did_you_mean
from uvcc_engine.model.layer_spec import LayerSpec
from uvcc_engine.model.layer_types.attention import Attention
from uvcc_engine.model.layer_types.batch_norm import BatchNorm
from uvcc_engine.model.layer_types.branches import CONCAT, PRODUCT, SUM, Branches
from uvcc_engine.model.layer_types.centroids import KMeans
from uvcc_engine.model.layer_types.conv2d import Conv1d, Conv2d
from uvcc_engine.model.layer_types.dense import Dense
from uvcc_engine.model.layer_types.dropout import LARGEST, Dropout
from uvcc_engine.model.layer_types.embedding import Embedding
from uvcc_engine.model.layer_types.gelu import Gelu
from uvcc_engine.model.layer_types.layer_norm import LayerNorm
from uvcc_engine.model.layer_types.leaky_relu import LeakyRelu
from uvcc_engine.model.layer_types.places import LinePlaces
from uvcc_engine.model.layer_types.pool import Pool
from uvcc_engine.model.layer_types.rearrange import Rearrange, lines_of
from uvcc_engine.model.layer_types.reduce import Reduce, Softmax
from uvcc_engine.model.layer_types.relu import Relu
from uvcc_engine.model.layer_types.residual import Residual
from uvcc_engine.model.layer_types.rms_norm import RmsNorm
from uvcc_engine.model.layer_types.smooth import Sigmoid, Silu, Tanh
from uvcc_engine.model.layer_types.tied import Tied
from uvcc_engine.model.layer_types.trees import Trees
from uvcc_engine.model.registry import layer_types, type_of
from uvcc_engine.model.shapes import Image

MOST_LAYERS: Final = 1024
MOST_NUMBERS: Final = 1 << 28
"""Entries of all weights together: shares of more do not fit a pod."""
ROTARY_BASE: Final = 10000.0
_DEPTH: Final = 8


@dataclass(frozen=True, slots=True)
class At:
    """What comes out of the layers so far: ``lines`` of so many features, lying as an image where one was named."""

    features: int
    classes: int
    image: Image | None
    where: str
    last: bool
    depth: int = 0
    lines: int = 1


_Made = tuple[tuple[LayerSpec, ...], Image | None]
_Word = Callable[[object, At], _Made]


def stack(layers: Sequence[object], at: At) -> tuple[tuple[LayerSpec, ...], At]:
    """The layers that a list stands for, and what comes out of them. Raises ConfigError naming the place."""
    if at.depth > _DEPTH or len(layers) > MOST_LAYERS:
        raise ConfigError(f"{at.where} is too deep or too long", f"use up to {MOST_LAYERS} layers in {_DEPTH} blocks")
    made: list[LayerSpec] = []
    here = at
    for i, layer in enumerate(layers):
        here = replace(here, where=f"{at.where}[{i}]", last=at.last and i == len(layers) - 1)
        name, value = _named(layer, here.where)
        found, image = WORDS[name](value, here)
        made += found
        shape = (here.lines, here.features)
        for spec in found:  # here, where the place in the list is known
            try:
                shape = type_of(spec).output_shape(spec, shape)
            except ConfigError as error:
                raise ConfigError(f"{here.where}: {error.what}", error.hint) from error
        here = replace(here, lines=shape[0], features=shape[1], image=image)
    return tuple(made), here


def _named(layer: object, where: str) -> tuple[str, object]:
    if isinstance(layer, str):
        layer = {layer: None}
    if not isinstance(layer, Mapping) or len(layer) != 1 or not isinstance(next(iter(layer)), str):
        raise ConfigError(f"{where} is {_short(layer)}", "a layer is a word, like relu, or one key: {linear: 16}")
    ((name, value),) = layer.items()
    if name not in WORDS:
        other = " (it is not written in lists)" if name in layer_types() else ""
        raise ConfigError(f"{where}: unknown layer {name[:80]!r}{other}", did_you_mean(name.lower(), WORDS))
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


def _image_of(at: At) -> Image:
    if at.image is None:
        raise ConfigError(
            f"{at.where} works on images, it is fed {at.features} features in a row",
            "say before how they lie: {image: [channels, height, width]}",
        )
    return at.image


def _bare(value: object, at: At) -> None:
    if value is not None:
        raise ConfigError(f"{at.where} takes no value", "write the word alone")


def _linear(value: object, at: At) -> _Made:
    width = _size(value, f"{at.where}: the width", at.classes if at.last else None)
    return (Dense(at.features, width),), None


def _same(kind: Callable[[int], LayerSpec], *, keeps_image: bool = True) -> _Word:
    def make(value: object, at: At) -> _Made:
        _bare(value, at)
        return (kind(at.features),), at.image if keeps_image else None

    return make


def _flatten(value: object, at: At) -> _Made:
    _bare(value, at)
    return ((lines_of(at.lines * at.features, 1),) if at.lines > 1 else ()), None  # pixels lie flat already


def _image(value: object, at: At) -> _Made:
    if not isinstance(value, list) or len(value) != 3:
        raise ConfigError(f"{at.where} is {_short(value)}", "write {image: [channels, height, width]}")
    image = Image(*(_size(item, at.where) for item in value))
    if image.size != at.lines * at.features:
        raise ConfigError(
            f"{at.where}: an image of {image.size} pixels, there are {at.lines * at.features} features",
            "make them as many",
        )
    return ((lines_of(image.size, 1),) if at.lines > 1 else ()), image


def _conv_sizes(value: object, at: At) -> tuple[int, int, int, int]:
    """Channels, kernel, stride and padding."""
    found = _options(value, "channels", ("channels", "kernel", "stride", "padding"), at.where)
    padding = found.get("padding", 0)
    if type(padding) is not int or padding < 0:
        raise ConfigError(f"{at.where}: the padding is {_short(padding)}", "it must be a whole number of at least 0")
    channels = _size(found.get("channels"), f"{at.where}: the number of channels")
    kernel = _size(found.get("kernel"), f"{at.where}: the kernel", 3)
    stride = _size(found.get("stride"), f"{at.where}: the stride", 1)
    return channels, kernel, stride, padding


def _conv(value: object, at: At) -> _Made:
    channels, kernel, stride, padding = _conv_sizes(value, at)
    spec = Conv2d(_image_of(at), channels, kernel, stride=stride, padding=padding)
    return (spec,), spec.out


def _pool(kind: str) -> _Word:
    def make(value: object, at: At) -> _Made:
        spec = Pool(_image_of(at), _size(value, f"{at.where}: the window", 2), kind)
        return (spec,), spec.out

    return make


def _batch_norm(value: object, at: At) -> _Made:
    _bare(value, at)
    if at.lines > 1:
        raise ConfigError(f"{at.where} is fed {at.lines} lines of a row", "use layer-norm")
    return (BatchNorm(at.image or Image(at.features, 1, 1)),), at.image


def _leaky(value: object, at: At) -> _Made:
    slope = 0.01 if value is None else value
    if not isinstance(slope, int | float) or isinstance(slope, bool):
        raise ConfigError(f"{at.where} is {_short(slope)}", "give the slope below zero, like {leaky-relu: 0.01}")
    return (LeakyRelu(at.features, float(slope)),), at.image


def _tied(value: object, at: At) -> _Made:
    if not isinstance(value, list) or not value or _named(value[0], f"{at.where}.tied[0]")[0] != "embedding":
        what = f"{at.where} does not begin with an embedding, whose table is used twice"
        raise ConfigError(what, "write {tied: [{embedding: 16}, layer-norm]}")
    made, _ = stack(value, replace(at, where=f"{at.where}.tied", last=False, depth=at.depth + 1))
    return (Tied(cast(Embedding, made[0]), made[1:]),), None


def _residual(value: object, at: At) -> _Made:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{at.where} is {_short(value)}", "write {residual: [{linear: 16}, relu]}")
    made, after = stack(value, replace(at, where=f"{at.where}.residual", last=False, depth=at.depth + 1))
    return (Residual(made),), after.image


def _branches(join: str) -> _Word:
    def make(value: object, at: At) -> _Made:
        if not isinstance(value, list) or not value or not all(isinstance(one, list) for one in value):
            raise ConfigError(f"{at.where} is {_short(value)}", f"write {{{join}: [[{{linear: 16}}, relu], []]}}")
        made = []
        for k, one in enumerate(value):
            inside = replace(at, where=f"{at.where}.{join}[{k}]", last=False, depth=at.depth + 1)
            made.append(stack(one, inside)[0])
        return (Branches(join, tuple(made)),), None

    return make


def _lines(value: object, at: At) -> _Made:
    count = _size(value, f"{at.where}: the number of lines")
    return (lines_of(at.lines * at.features, count),), None


def _patches(value: object, at: At) -> _Made:
    """An image's squares, each a line."""
    image, side = _image_of(at), _size(value, f"{at.where}: the side")
    high, wide = image.height // side, image.width // side
    if (high * side, wide * side) != (image.height, image.width):
        raise ConfigError(f"{at.where}: squares of {side} do not fill {image}", "use a side that divides both")
    sizes = (high, wide, image.channels, side, side)
    strides = (side * image.width, side, image.height * image.width, image.width, 1)
    return (Rearrange(image.size, high * wide, sizes, strides),), None


def _turned(at: At) -> Rearrange:
    """Lines become features, and features lines."""
    return Rearrange(at.lines * at.features, at.features, (at.features, at.lines), (1, at.features))


def _over_lines(kind: str) -> _Word:
    def make(value: object, at: At) -> _Made:
        _bare(value, at)
        if at.lines == 1:
            raise ConfigError(f"{at.where} is over lines, a row has one here", "use it behind embedding or patches")
        return (_turned(at), Reduce(at.lines, kind), lines_of(at.features, 1)), None

    return make


def _embedding(value: object, at: At) -> _Made:
    found = _options(value, "width", ("vocabulary", "width", "places"), at.where)
    vocabulary = _size(found.get("vocabulary"), f"{at.where}: the vocabulary", at.classes)
    width = _size(found.get("width"), f"{at.where}: the width")
    places = found.get("places", True)
    if not isinstance(places, bool):
        raise ConfigError(f"{at.where}: places is {_short(places)}", "give true or false")
    if at.lines > 1 or at.features % vocabulary:
        raise ConfigError(
            f"{at.where}: {at.features} features on {at.lines} lines are no letters of {vocabulary}",
            "put it first, over one-hot letters",
        )
    return (Embedding(vocabulary, at.features // vocabulary, width, places),), None


def _places(value: object, at: At) -> _Made:
    _bare(value, at)
    return (LinePlaces(at.lines, at.features),), None


def _attention(value: object, at: At) -> _Made:
    found = _options(value, "heads", ("heads", "kv-heads", "causal", "rotary"), at.where)
    heads = _size(found.get("heads"), f"{at.where}: the number of heads", 1)
    shared = _size(found.get("kv-heads"), f"{at.where}: the number of heads of keys", heads)
    for name in ("causal", "rotary"):
        if not isinstance(found.get(name, False), bool):
            raise ConfigError(f"{at.where}: {name} is {_short(found[name])}", "give true or false")
    width = at.features
    rotary = ROTARY_BASE if found.get("rotary", False) else 0.0
    shared = 0 if shared == heads else shared
    spec = Attention(at.lines, width, heads, shared, causal=found.get("causal", False), rotary=rotary)
    fed = spec.fed if width % heads == 0 else 3 * width  # the layer says what is wrong with it
    return (Dense(width, fed), spec, Dense(width, width)), None


def _sequence(at: At) -> tuple[tuple[LayerSpec, ...], Image]:
    """Layers to a sequence that lies channel by channel, and its size."""
    if at.image is not None and at.image.height == 1:
        return (), at.image
    if at.lines > 1:
        return (replace(_turned(at), lines=1),), Image(at.features, 1, at.lines)
    raise ConfigError(
        f"{at.where} works on sequences, it is fed {at.features} features in a row",
        "say before how they lie: {image: [channels, 1, length]}",
    )


def _conv1d(value: object, at: At) -> _Made:
    first, image = _sequence(at)
    channels, kernel, stride, padding = _conv_sizes(value, at)
    spec = Conv1d(image.channels, image.width, channels, kernel, stride=stride, padding=padding)
    return (*first, spec), spec.out


def _pool1d(kind: str) -> _Word:
    def make(value: object, at: At) -> _Made:
        first, image = _sequence(at)
        size = _size(value, f"{at.where}: the window", 2)
        count = image.width // size
        if not count:
            raise ConfigError(f"{at.where}: a window of {size} on {image.width} places", "use a smaller one")
        windows = Rearrange(image.size, image.channels * count, (image.channels, count, size), (image.width, size, 1))
        flat = lines_of(image.channels * count, 1)
        return (*first, windows, Reduce(size, kind), flat), Image(image.channels, 1, count)

    return make


def _adaptive(value: object, at: At) -> _Made:
    image, out = _image_of(at), _size(value, f"{at.where}: the side", 1)
    size = image.height // out
    if size < 1 or (size * out, size * out) != (image.height, image.width):
        raise ConfigError(f"{at.where}: {image} does not divide into {out} x {out}", "use a square that divides it")
    spec = Pool(image, size, "avg")
    return (spec,), spec.out


def _dropout(value: object, at: At) -> _Made:
    if isinstance(value, bool) or not (isinstance(value, int | float) and 0 < value <= LARGEST):
        raise ConfigError(f"{at.where} is {_short(value)}", f"give the share that is left out, above 0, to {LARGEST}")
    return (Dropout(at.features, float(value)),), at.image


def _trees(value: object, at: At) -> _Made:
    found = _options(value, "count", ("count", "depth", "l2", "min_gain"), at.where)
    if not at.last or at.depth or at.lines > 1:
        raise ConfigError(
            f"{at.where}: trees for {at.classes} outputs, or beside other layers",
            "they stand alone, and learn a target: classes, or one number",
        )
    count = _size(found.get("count"), f"{at.where}: the number of trees")
    depth = _size(found.get("depth"), f"{at.where}: the depth", 3)
    numbers = {"l2": 1.0, "min_gain": 0.0}
    for name in numbers:
        given = found.get(name, numbers[name])
        if not isinstance(given, int | float) or isinstance(given, bool):
            raise ConfigError(f"{at.where}: {name} is {_short(given)}", "give a number")
        numbers[name] = float(given)
    return (Trees(at.features, count, depth, **numbers, outputs=at.classes),), None


def _kmeans(value: object, at: At) -> _Made:
    found = _options(value, "clusters", ("clusters",), at.where)
    if at.classes or not at.last or at.depth or at.lines > 1:
        raise ConfigError(
            f"{at.where}: k-means for {at.classes} outputs, or beside other layers",
            "it stands alone and learns no target: leave target out of the schema, and give that column kind: drop",
        )
    return (KMeans(at.features, _size(found.get("clusters"), f"{at.where}: the number of clusters")),), None


WORDS: Final[dict[str, _Word]] = {
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
    "tied": _tied,
    "sum": _branches(SUM),
    "product": _branches(PRODUCT),
    "concat": _branches(CONCAT),
    "softmax": _same(Softmax, keeps_image=False),
    "dropout": _dropout,
    "lines": _lines,
    "patches": _patches,
    "embedding": _embedding,
    "places": _places,
    "attention": _attention,
    "trees": _trees,
    "kmeans": _kmeans,
    "mean": _over_lines("avg"),
    "max": _over_lines("max"),
    "conv1d": _conv1d,
    "max-pool1d": _pool1d("max"),
    "avg-pool1d": _pool1d("avg"),
    "adaptive-avg-pool": _adaptive,
}
"""A word of the list -> the layers that it stands for, and what comes out of them."""
