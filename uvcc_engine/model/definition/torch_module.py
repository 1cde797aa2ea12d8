"""A torch module as a model of this package: ``torch.export`` gives its graph, and the graph becomes layers.

It runs the user's file, so it runs where that file is: at the proposer's, never on a pod. What leaves is the model's
canonical JSON (``layer_list``), which says sizes and layers and holds no code. Weights start as the job's seed says,
not as the module's own would.

What the layers cannot say is refused by the operation's name, the line of the user's file and what to use instead. A
sum of a layer's input and its output becomes a residual block; other joins are refused.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
from torch import nn
from torch.fx import Node

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.parsing.suggest import did_you_mean
from uvcc_engine.model.definition.layer_list import model_of_layers
from uvcc_engine.model.definition.substitutes import substitute
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
from uvcc_engine.model.model_spec import ModelSpec
from uvcc_engine.model.shapes import Image

_ROWS: Final = 5  # of the example that a module is traced with: no size of a usual layer
_FRAME: Final = re.compile(r'File "([^"]+)", line (\d+)')
_DTYPES: Final = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class ExportedModule:
    """A module's model, and what of the module it leaves out or does otherwise."""

    model: ModelSpec
    notes: tuple[str, ...]


def model_of_file(text: str, features: int, classes: int) -> ExportedModule:
    """The model of ``file.py:Model``; runs that file.

    The class is built with those of ``features`` and ``classes`` that it takes by name. Its ``input_shape``, if it has
    one, says how a row's features lie, like (1, 8, 8). Raises UnreadableError or ConfigError with the user's line.
    """
    path, _, name = text.rpartition(":")
    file = Path(path).expanduser()
    made = _built(_loaded(file), name, file, {"features": features, "classes": classes})
    shape = tuple(getattr(made, "input_shape", (features,)))
    size = 1
    for side in shape:
        if type(side) is not int or side < 1:
            raise ConfigError(f"{text}: input_shape is {shape}", "give whole numbers, like (1, 8, 8)")
        size *= side
    if size != features:
        raise ConfigError(f"{text}: input_shape {shape} is {size} numbers, a row has {features} features", "mend it")
    return model_of_module(made, shape, classes, str(file.resolve()))


def _loaded(file: Path) -> ModuleType:
    if not file.is_file():
        raise UnreadableError(f"cannot read {file}: no such file", "job.model is a name, a list, or file.py:Model")
    spec = importlib.util.spec_from_file_location(f"users_{file.stem}", file.resolve())  # as errors are looked up
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(made)
    except Exception as error:
        raise _users_error(error, str(file.resolve()), "cannot be run") from error
    return made


def _built(found: ModuleType, name: str, file: Path, sizes: dict[str, int]) -> nn.Module:
    kind = getattr(found, name, None)
    known = [n for n, v in vars(found).items() if isinstance(v, type) and issubclass(v, nn.Module)]
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        hint = did_you_mean(name, known, "define a class derived from torch.nn.Module")
        raise ConfigError(f"{file.name} has no torch module {name!r}", hint)
    taken = inspect.signature(kind).parameters
    given = {key: value for key, value in sizes.items() if key in taken}
    open_ones = [
        p.name
        for p in taken.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in given
    ]
    if open_ones:
        raise ConfigError(
            f"{file.name}: {name} needs {', '.join(open_ones)}", "give them defaults; features and classes are known"
        )
    try:
        return kind(**given)
    except Exception as error:
        raise _users_error(error, str(file.resolve()), f"{name} cannot be built") from error


def model_of_module(module: nn.Module, shape: Sequence[int], classes: int, file: str = "") -> ExportedModule:
    """The model that a module computes on rows of ``shape``. Raises ConfigError naming operation and line."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if (tensor.is_floating_point() and tensor.dtype not in _DTYPES) or tensor.is_complex():
            raise ConfigError(
                f"{name} is of type {tensor.dtype}", "make the module with float32; shares are fixed point"
            )
    example = torch.zeros(_ROWS, *shape, dtype=next((p.dtype for p in module.parameters()), torch.float32))
    was = module.training
    try:
        program = torch.export.export(module.eval(), (example,))
    except Exception as error:
        raise _users_error(error, file, "cannot be exported") from error
    finally:
        module.train(was)
    walk = _Walk(program, file)
    features = example[0].numel()
    layers = walk.whole()
    dropouts = [m for m in module.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.p]
    notes = [*walk.notes, *(["dropout is left out, in training too"] if dropouts else [])]
    return ExportedModule(model_of_layers(layers, features, classes), tuple(dict.fromkeys(notes)))


def by_secret_data(error: BaseException) -> bool:
    """Whether torch refuses to trace a module because what it computes depends on the numbers in a tensor.

    Torch has no public type for it: eager shape checks, fake tensors and the export each raise an error of their own
    kind, and only the words are the same in all. This is the one place that reads them.
    """
    low = str(error).lower()
    return "data-dependent" in low or "data dependent" in low


def _users_error(error: Exception, file: str, what: str) -> ConfigError:
    """An error of the user's code or of its export, with the line of the user's file."""
    text = str(error)
    lines = [int(n) for path, n in _FRAME.findall(text) if path == file]
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    place = f"{Path(file).name or 'the module'}" + (f", line {lines[-1]}" if lines else "")
    if by_secret_data(error):
        return ConfigError(
            f"{place}: what is computed depends on secret data", "use no if, while or indexing by what is in a tensor"
        )
    first = " ".join(text.split())[:160]
    return ConfigError(f"{place} {what}: {type(error).__name__}: {first}", "mend the module")


@dataclass
class _Walk:
    """From a graph's output back to its input."""

    program: Any
    file: str
    notes: list[str] = field(default_factory=list)
    used: dict[str, str] = field(default_factory=dict)

    def whole(self) -> list[LayerSpec]:
        signature, graph = self.program.graph_signature, self.program.graph_module.graph
        inputs = [n for n in graph.nodes if n.op == "placeholder" and n.name in signature.user_inputs]
        (end,) = [n for n in graph.nodes if n.op == "output"]
        outs = [n for n in end.args[0] if n.name in signature.user_outputs]
        if len(inputs) != 1 or len(outs) != 1:
            raise ConfigError(f"the module takes {len(inputs)} tensors and gives {len(outs)}", "let it be one of each")
        node: Any = _plain(outs[0])
        if _name(node) in ("softmax", "log_softmax"):
            self.notes.append(f"the last {_name(node)} is left out: the objective has it already")
            node = node.args[0]
        return self.between(node, _plain(inputs[0]))

    def between(self, node: Any, source: Node) -> list[LayerSpec]:
        """The layers that lead from ``source`` to ``node``."""
        layers: list[LayerSpec] = []
        while (node := _plain(node)) is not source:
            if node.op != "call_function":
                raise ConfigError(f"{self.place(node)}: two branches that both compute meet", _JOINS)
            name = _name(node)
            if name == "add":
                node, block = self.residual(node)
                layers.insert(0, block)
                continue
            make = OPERATIONS.get(name)
            if make is None:
                raise self.refusal(node, "cannot be computed on shares here", substitute(name, OPERATIONS))
            layers[:0] = make(self, node)
            node = node.args[0]
        return layers

    def residual(self, node: Node) -> tuple[Node, LayerSpec]:
        if len(node.args) != 2 or not all(isinstance(a, Node) for a in node.args) or node.kwargs.get("alpha", 1) != 1:
            raise self.refusal(node, "adds a constant", "leave it out, or put it into a layer's bias")
        a, b = (_plain(arg) for arg in node.args)
        if a is b:
            raise self.refusal(node, "adds a tensor to itself", "use a layer")
        for near, far in ((a, b), (b, a)):
            if near in _ancestors(far):
                return near, Residual(tuple(self.between(far, near)))
        raise self.refusal(node, "adds two branches that both compute", _JOINS)

    def refusal(self, node: Node, why: str, hint: str) -> ConfigError:
        return ConfigError(f"{self.place(node)}: {_name(node)} {why}", hint)

    def place(self, node: Node) -> str:
        """File and line of the user's code that an operation comes from."""
        frames = _FRAME.findall(str(node.meta.get("stack_trace") or ""))
        mine = [f for f in frames if f[0] == self.file] or frames
        return f"{Path(mine[-1][0]).name}, line {mine[-1][1]}" if mine else "the module"

    def once(self, node: Node, weight: Any) -> None:
        """Note that a layer's weight is used here. Raises ConfigError if it was before."""
        if not isinstance(weight, Node):
            return
        if weight.name in self.used:
            raise self.refusal(node, f"uses the weight of {self.used[weight.name]} again", "give it one of its own")
        self.used[weight.name] = self.place(node)


_JOINS: Final = "a join is x + layers(x)"
_COPIES: Final = ("dropout", "feature_dropout", "alias", "detach", "clone", "contiguous", "identity")
_SHAPES: Final = ("flatten", "view", "_unsafe_view", "reshape", "unflatten", "squeeze", "unsqueeze")
_SAME: Final = frozenset((*_COPIES, *_SHAPES))
"""What changes nothing of rows whose numbers lie flat."""


def _name(node: Node) -> str:
    """``aten.leaky_relu_.default`` -> ``leaky_relu``."""
    name = str(getattr(node.target, "_opname", getattr(node.target, "__name__", node.target)))
    return name.removesuffix("_") if not name.startswith("_") else name


def _plain(node: Any) -> Node:
    """The node that this one only gives another shape to."""
    while node.op == "call_function" and _name(node) in _SAME and _shape(node)[:1] == (_ROWS,):
        node = node.args[0]
    found: Node = node
    return found


def _ancestors(node: Node) -> set[Node]:
    found: set[Node] = set()
    left = [node]
    while left:
        for one in left.pop().all_input_nodes:
            if one not in found:
                found.add(one)
                left.append(one)
    return found


def _shape(node: Any) -> tuple[int, ...]:
    value = node.meta.get("val")
    return tuple(int(n) for n in value.shape) if isinstance(value, torch.Tensor) else ()


def _width(node: Node) -> int:
    size = 1
    for side in _shape(node)[1:]:
        size *= side
    return size


def _args(node: Node, *names: str) -> dict[str, Any]:
    """The arguments behind the input, by name; None where one is not given."""
    given = dict(zip(names, node.args[1:], strict=False))
    return {name: given.get(name, node.kwargs.get(name)) for name in names}


def _image(walk: _Walk, node: Node) -> Image:
    shape = _shape(node.args[0])
    if len(shape) != 4:
        raise walk.refusal(node, f"is fed a shape of {list(shape)}", "give the module input_shape = (channels, h, w)")
    return Image(*shape[1:])


def _square(walk: _Walk, node: Node, value: Any, what: str) -> int:
    sides = _sides(value)
    if len(set(sides)) != 1:
        raise walk.refusal(node, f"has a {what} of {sides}", "make it square")
    return int(sides[0])


def _sides(value: Any) -> list[Any]:
    return [value] if value is None or isinstance(value, int) else list(value)


def _linear(walk: _Walk, node: Node) -> list[LayerSpec]:
    found = _args(node, "weight", "bias")
    walk.once(node, found["weight"])
    if len(_shape(node.args[0])) != 2:
        raise walk.refusal(node, f"is fed a shape of {list(_shape(node.args[0]))}", "flatten it to (rows, features)")
    if found["bias"] is None:
        walk.notes.append("a linear without bias is given one, which starts at 0")
    return [Dense(_width(node.args[0]), _width(node))]  # type: ignore[arg-type]


def _conv(walk: _Walk, node: Node) -> list[LayerSpec]:
    found = _args(node, "weight", "bias", "stride", "padding", "dilation", "groups")
    walk.once(node, found["weight"])
    image = _image(walk, node)
    if isinstance(found["padding"], str):
        raise walk.refusal(node, f"has padding {found['padding']!r}", "give the padding as a number")
    if _square(walk, node, found["dilation"] or 1, "dilation") != 1 or (found["groups"] or 1) != 1:
        raise walk.refusal(node, "has dilation or groups", "use plain convolutions")
    if found["bias"] is None:
        walk.notes.append("a convolution without bias is given one, which starts at 0")
    kernel = _square(walk, node, _shape(found["weight"])[2:], "kernel")
    stride = _square(walk, node, found["stride"] or 1, "stride")
    padding = _square(walk, node, found["padding"] or 0, "padding")
    return [Conv2d(image, _shape(node)[1], kernel, stride=stride, padding=padding)]


def _pool(kind: str) -> Callable[[_Walk, Node], list[LayerSpec]]:
    def make(walk: _Walk, node: Node) -> list[LayerSpec]:
        found = _args(node, "kernel", "stride", "padding")
        size = _square(walk, node, found["kernel"], "window")
        step = _square(walk, node, found["stride"], "stride") if found["stride"] else size
        image = _image(walk, node)
        out = (image.height // size, image.width // size)
        if step != size or any(_sides(found["padding"])) or _shape(node)[2:] != out:
            raise walk.refusal(node, "has windows that overlap or reach over the edge", "use stride = size, no padding")
        return [Pool(image, size, kind)]

    return make


def _adaptive(walk: _Walk, node: Node) -> list[LayerSpec]:
    image, out = _image(walk, node), _shape(node)[2:]
    size = image.height // out[0]
    if (out[0] * size, out[1] * size) != (image.height, image.width):
        raise walk.refusal(node, f"takes {image.height} x {image.width} to {list(out)}", "use a square that divides it")
    return [Pool(image, size, "avg")]


def _mean(walk: _Walk, node: Node) -> list[LayerSpec]:
    image = _image(walk, node)
    over = {d % 4 for d in node.args[1]}  # type: ignore[union-attr,operator]
    if over != {2, 3} or image.height != image.width:
        raise walk.refusal(
            node, f"is over axes {sorted(over)}", "only the mean of square channels, over (2, 3), can be"
        )
    return [Pool(image, image.height, "avg")]


def _batch_norm(walk: _Walk, node: Node) -> list[LayerSpec]:
    walk.once(node, _args(node, "weight")["weight"])
    shape = _shape(node.args[0])
    walk.notes.append(_NORMS)
    return [BatchNorm(Image(shape[1], 1, 1) if len(shape) == 2 else _image(walk, node))]


def _row_norm(kind: type[LayerNorm] | type[RmsNorm]) -> Callable[[_Walk, Node], list[LayerSpec]]:
    def make(walk: _Walk, node: Node) -> list[LayerSpec]:
        found = _args(node, "shape", "weight")
        walk.once(node, found["weight"])
        if tuple(found["shape"]) != _shape(node.args[0])[1:]:
            raise walk.refusal(
                node, f"is over {list(found['shape'])} of {list(_shape(node.args[0]))}", "take whole rows"
            )
        walk.notes.append(_NORMS)
        return [kind(_width(node))]

    return make


_NORMS: Final = "normalisations add 2^-10 to the variance and train a gain, whatever the module says"


def _leaky(walk: _Walk, node: Node) -> list[LayerSpec]:
    slope = _args(node, "slope")["slope"]
    return [LeakyRelu(_width(node), 0.01 if slope is None else float(slope))]


def _gelu(walk: _Walk, node: Node) -> list[LayerSpec]:
    if node.kwargs.get("approximate", "none") != "none":
        walk.notes.append("GELU is the exact one, not its tanh approximation")
    return [Gelu(_width(node))]


def _same(kind: Callable[[int], LayerSpec]) -> Callable[[_Walk, Node], list[LayerSpec]]:
    return lambda walk, node: [kind(_width(node))]


OPERATIONS: Final[dict[str, Callable[[_Walk, Node], list[LayerSpec]]]] = {
    "linear": _linear,
    "conv2d": _conv,
    "max_pool2d": _pool("max"),
    "avg_pool2d": _pool("avg"),
    "adaptive_avg_pool2d": _adaptive,
    "mean": _mean,
    "batch_norm": _batch_norm,
    "layer_norm": _row_norm(LayerNorm),
    "rms_norm": _row_norm(RmsNorm),
    "relu": _same(Relu),
    "leaky_relu": _leaky,
    "gelu": _gelu,
    "silu": _same(Silu),
    "sigmoid": _same(Sigmoid),
    "tanh": _same(Tanh),
}
