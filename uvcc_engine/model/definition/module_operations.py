"""What each operation of an exported module becomes: its layers, put behind those that lead to its input."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch.fx import Node

from uvcc_engine.data.sets import Ints
from uvcc_engine.model.definition.module_attention import product_attention, scaled_attention
from uvcc_engine.model.definition.module_graph import args_of, keywords_of, numbers_of, shape_of
from uvcc_engine.model.definition.module_walk import Meeting, PutLayers, Run, Walk
from uvcc_engine.model.layer_spec import LayerSpec
from uvcc_engine.model.layer_types.batch_norm import BatchNorm
from uvcc_engine.model.layer_types.conv2d import Conv1d, Conv2d
from uvcc_engine.model.layer_types.dense import Dense
from uvcc_engine.model.layer_types.dropout import LARGEST, Dropout
from uvcc_engine.model.layer_types.embedding import Embedding
from uvcc_engine.model.layer_types.gelu import Gelu
from uvcc_engine.model.layer_types.layer_norm import LayerNorm
from uvcc_engine.model.layer_types.leaky_relu import LeakyRelu
from uvcc_engine.model.layer_types.pool import Pool
from uvcc_engine.model.layer_types.reduce import Reduce, Softmax
from uvcc_engine.model.layer_types.relu import Relu
from uvcc_engine.model.layer_types.rms_norm import RmsNorm
from uvcc_engine.model.layer_types.smooth import Sigmoid, Silu, Tanh
from uvcc_engine.model.shapes import Image

_NORMS: Final = "normalisations add 2^-10 to the variance and train a gain, whatever the module says"


def arguments(node: Node, *names: str) -> dict[str, Any]:
    """The arguments behind the input, by name; None where one is not given."""
    given = dict(zip(names, args_of(node)[1:], strict=False))
    return {name: given.get(name, keywords_of(node).get(name)) for name in names}


def fed(node: Node) -> tuple[int, ...]:
    """The shape of what an operation is fed, without the rows."""
    return shape_of(args_of(node)[0])[1:]


def _named(walk: Walk, node: Node, weight: Any) -> str:
    """The name of the parameter that a weight is; "" without one. Raises ConfigError if it is computed."""
    if not isinstance(weight, Node):
        return ""
    name = walk.graph.program.graph_signature.inputs_to_parameters.get(weight.name)
    if name is None:
        raise walk.graph.refusal(node, "has a weight that is no parameter", "use a layer's own, which is learnt")
    return str(name)


def _use(walk: Walk, node: Node, weight: Any) -> None:
    if name := _named(walk, node, weight):
        walk.once(node, name)


def _image(walk: Walk, node: Node) -> Image:
    shape = fed(node)
    if len(shape) != 3:
        hint = "give the module input_shape = (channels, h, w)"
        raise walk.graph.refusal(node, f"is fed a shape of {list(shape_of(args_of(node)[0]))}", hint)
    return Image(*shape)


def _square(walk: Walk, node: Node, value: Any, what: str) -> int:
    sides = sides_of(value)
    if len(set(sides)) != 1:
        raise walk.graph.refusal(node, f"has a {what} of {sides}", "make it square")
    return int(sides[0])


def sides_of(value: Any) -> list[Any]:
    """One number or several, as a list."""
    return [value] if value is None or isinstance(value, int) else list(value)


# -- products ------------------------------------------------------------------------------------------------------


def _linear(walk: Walk, node: Node, run: Run) -> None:
    found = arguments(node, "weight", "bias")
    if walk.tie(node, _named(walk, node, found["weight"]), run, biased=found["bias"] is not None):
        return
    _use(walk, node, found["weight"])
    if found["bias"] is None:
        walk.notes.append("a linear without bias is given one, which starts at 0")
    shape = fed(node)
    spec = Dense(shape[-1], shape_of(node)[-1])
    walk.add(run, node, spec, math.prod(shape[:-1]))
    run.product = spec


def _embedding(walk: Walk, node: Node, run: Run) -> None:
    weight, letters = args_of(node)[0], args_of(node)[1]
    vocabulary, width = shape_of(weight)
    if not walk.vocabulary:
        hint = "say how many letters there are: vocabulary = 65, beside input_shape = (positions,)"
        raise walk.graph.refusal(node, "looks up numbers of the data", hint)
    if run.layers or walk.vocabulary != vocabulary:
        why = f"looks up in {vocabulary} rows, the module's vocabulary is {walk.vocabulary}"
        raise walk.graph.refusal(node, why, "embed the input itself, of as many letters")
    _use(walk, node, weight)
    spec = Embedding(vocabulary, numbers_of(letters), width, places=False)
    walk.table = (_named(walk, node, weight), spec)
    walk.add(run, node, spec)
    run.letters = spec


def _convolution(walk: Walk, node: Node, found: dict[str, Any]) -> tuple[int, int, int]:
    _use(walk, node, found["weight"])
    if isinstance(found["padding"], str):
        raise walk.graph.refusal(node, f"has padding {found['padding']!r}", "give the padding as a number")
    if _square(walk, node, found["dilation"] or 1, "dilation") != 1 or (found["groups"] or 1) != 1:
        raise walk.graph.refusal(node, "has dilation or groups", "use plain convolutions")
    if found["bias"] is None:
        walk.notes.append("a convolution without bias is given one, which starts at 0")
    kernel = _square(walk, node, shape_of(found["weight"])[2:], "kernel")
    stride = _square(walk, node, found["stride"] or 1, "stride")
    return kernel, stride, _square(walk, node, found["padding"] or 0, "padding")


_CONV: Final = ("weight", "bias", "stride", "padding", "dilation", "groups")


def _conv2d(walk: Walk, node: Node, run: Run) -> None:
    image = _image(walk, node)
    kernel, stride, padding = _convolution(walk, node, arguments(node, *_CONV))
    walk.add(run, node, Conv2d(image, shape_of(node)[1], kernel, stride=stride, padding=padding), 1)


def _conv1d(walk: Walk, node: Node, run: Run) -> None:
    shape = fed(node)
    if len(shape) != 2:
        raise walk.graph.refusal(node, f"is fed {list(shape)} of a row", "give it (rows, channels, length)")
    kernel, stride, padding = _convolution(walk, node, arguments(node, *_CONV))
    walk.add(run, node, Conv1d(*shape, shape_of(node)[1], kernel, stride=stride, padding=padding), 1)


# -- means and maxima ----------------------------------------------------------------------------------------------


def _reduced(walk: Walk, node: Node, run: Run, index: Ints, each: int, kind: str) -> None:
    """The means or maxima of ``each`` consecutive numbers of those at ``index``."""
    run.take(index)
    walk.add(run, node, Reduce(each, kind), len(index) // each)


def _over(kind: str) -> PutLayers:
    """Over some of the axes, as ``mean`` and ``amax`` are."""

    def make(walk: Walk, node: Node, run: Run) -> None:
        shape = fed(node)
        dims = arguments(node, "dim")["dim"]
        axes = sorted({int(d) % (len(shape) + 1) for d in ([] if dims is None else sides_of(dims))})
        if not axes or 0 in axes:
            raise walk.graph.refusal(node, "is over the rows of the data", "name axes behind the first")
        if kind == "avg" and axes == [2, 3] and len(shape) == 3 and shape[1] == shape[2]:
            walk.add(run, node, Pool(Image(*shape), shape[1], "avg"), 1)
            return
        order = [a for a in range(len(shape)) if a + 1 not in axes] + [a - 1 for a in axes]
        places = np.arange(math.prod(shape)).reshape(shape).transpose(order).reshape(-1)
        _reduced(walk, node, run, places, math.prod(shape[a - 1] for a in axes), kind)

    return make


def _windows(walk: Walk, node: Node, run: Run, sizes: Sequence[int], steps: Sequence[int], kind: str) -> None:
    """The means or maxima of windows along the last axes, which may overlap."""
    shape = fed(node)
    lead = len(shape) - len(sizes)
    places = torch.arange(math.prod(shape)).reshape(shape)
    for k, (size, step) in enumerate(zip(sizes, steps, strict=True)):
        places = places.unfold(lead + k, size, step)
    if tuple(places.shape[: len(shape)]) != shape_of(node)[1:]:
        raise walk.graph.refusal(node, "has windows that reach over the edge", "use ceil_mode=False and no padding")
    _reduced(walk, node, run, places.reshape(-1).numpy().astype(np.int64), math.prod(sizes), kind)


def _pool(kind: str, axes: int) -> PutLayers:
    def make(walk: Walk, node: Node, run: Run) -> None:
        found = arguments(node, "kernel", "stride", "padding", "dilation" if kind == "max" else "ceil_mode")
        sizes = _per_axis(found["kernel"], axes)
        steps = _per_axis(found["stride"], axes) if found["stride"] else sizes
        dilated = kind == "max" and any(d != 1 for d in sides_of(found["dilation"] or 1))
        if any(p for p in sides_of(found["padding"])) or dilated:
            raise walk.graph.refusal(node, "has padding or dilation", "leave them out")
        shape = fed(node)
        whole = shape_of(node)[2:] == tuple(side // size for side, size in zip(shape[1:], sizes, strict=True))
        if axes == 2 and len({*sizes, *steps}) == 1 and len(shape) == 3 and whole:
            walk.add(run, node, Pool(Image(*shape), sizes[0], kind), 1)
            return
        _windows(walk, node, run, sizes, steps, kind)

    return make


def _per_axis(value: Any, axes: int) -> list[int]:
    sides = sides_of(value)
    return [int(side) for side in (sides * axes if len(sides) == 1 else sides)]


def _adaptive(axes: int) -> PutLayers:
    def make(walk: Walk, node: Node, run: Run) -> None:
        shape, out = fed(node), shape_of(node)[2:]
        sizes = [side // after for side, after in zip(shape[-axes:], out, strict=True)]
        if [size * after for size, after in zip(sizes, out, strict=True)] != list(shape[-axes:]):
            raise walk.graph.refusal(node, f"takes {list(shape[-axes:])} to {list(out)}", "use sizes that divide it")
        if axes == 2 and len(set(sizes)) == 1 and len(shape) == 3:
            walk.add(run, node, Pool(Image(*shape), sizes[0], "avg"), 1)
            return
        _windows(walk, node, run, sizes, sizes, "avg")

    return make


# -- normalisations and activations ----------------------------------------------------------------------------------


def _batch_norm(walk: Walk, node: Node, run: Run) -> None:
    _use(walk, node, arguments(node, "weight")["weight"])
    walk.notes.append(_NORMS)
    shape = fed(node)
    walk.add(run, node, BatchNorm(Image(*(*shape, 1, 1)[:3]) if len(shape) < 3 else _image(walk, node)), 1)


def _row_norm(kind: type[LayerNorm] | type[RmsNorm]) -> PutLayers:
    def make(walk: Walk, node: Node, run: Run) -> None:
        found = arguments(node, "shape", "weight")
        _use(walk, node, found["weight"])
        shape, over = fed(node), tuple(found["shape"])
        walk.notes.append(_NORMS)
        walk.add(run, node, kind(math.prod(over)), math.prod(shape[: len(shape) - len(over)]))

    return make


def _softmax(walk: Walk, node: Node, run: Run) -> None:
    shape = fed(node)
    axis = arguments(node, "dim")["dim"]
    if int(axis) % (len(shape) + 1) != len(shape):
        raise walk.graph.refusal(node, f"is over axis {axis}", "bring that axis last: x.transpose(a, -1)")
    walk.add(run, node, Softmax(shape[-1]), math.prod(shape[:-1]))


def _same(kind: Callable[[int], LayerSpec]) -> PutLayers:
    def make(walk: Walk, node: Node, run: Run) -> None:
        walk.settle(run, node)
        walk.add(run, node, kind(run.width))

    return make


def _leaky(walk: Walk, node: Node, run: Run) -> None:
    slope = arguments(node, "slope")["slope"]
    _same(lambda width: LeakyRelu(width, 0.01 if slope is None else float(slope)))(walk, node, run)


def _gelu(walk: Walk, node: Node, run: Run) -> None:
    if keywords_of(node).get("approximate", "none") != "none":
        walk.notes.append("GELU is the exact one, not its tanh approximation")
    _same(Gelu)(walk, node, run)


def _dropout(walk: Walk, node: Node, run: Run) -> None:
    share = float(arguments(node, "p")["p"])
    if share > LARGEST:
        raise walk.graph.refusal(node, f"leaves out {share:g} of its numbers", f"leave out at most {LARGEST}")
    _same(lambda width: Dropout(width, share))(walk, node, run)


OPERATIONS: Final[dict[str, PutLayers]] = {
    "linear": _linear,
    "embedding": _embedding,
    "conv1d": _conv1d,
    "conv2d": _conv2d,
    "max_pool1d": _pool("max", 1),
    "max_pool2d": _pool("max", 2),
    "avg_pool1d": _pool("avg", 1),
    "avg_pool2d": _pool("avg", 2),
    "adaptive_avg_pool1d": _adaptive(1),
    "adaptive_avg_pool2d": _adaptive(2),
    "mean": _over("avg"),
    "amax": _over("max"),
    "batch_norm": _batch_norm,
    "layer_norm": _row_norm(LayerNorm),
    "rms_norm": _row_norm(RmsNorm),
    "softmax": _softmax,
    "relu": _same(Relu),
    "leaky_relu": _leaky,
    "gelu": _gelu,
    "silu": _same(Silu),
    "sigmoid": _same(Sigmoid),
    "tanh": _same(Tanh),
    "dropout": _dropout,
}
"""An operation's name -> what puts its layers behind those of its input."""
ATTENTION: Final[dict[str, Meeting]] = {
    "scaled_dot_product_attention": scaled_attention,
    "matmul": product_attention,
    "bmm": product_attention,
}
"""Operations of several secret inputs that are one layer."""
