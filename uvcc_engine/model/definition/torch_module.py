"""A torch module as a model of this package: ``torch.export`` gives its graph, and the graph becomes layers.

It runs the user's file, so it runs where that file is: at the proposer's, never on a pod. What leaves is the model's
canonical JSON (``layer_list``), which says sizes and layers and holds no code. Weights start as the job's seed says,
not as the module's own would.

What the layers cannot say is refused by the operation's name, the line of the user's file and what to use instead.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

import torch
from torch import nn

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.parsing.suggest import did_you_mean
from uvcc_engine.model.definition.layer_list import model_of_layers
from uvcc_engine.model.definition.module_attention import with_plain_attention
from uvcc_engine.model.definition.module_graph import FRAME, ROWS, Graph, users_place
from uvcc_engine.model.definition.module_operations import ATTENTION, OPERATIONS
from uvcc_engine.model.definition.module_walk import Walk
from uvcc_engine.model.layer_spec import LayerSpec
from uvcc_engine.model.layer_types.dropout import numbered
from uvcc_engine.model.model_spec import ModelSpec

__all__ = ["OPERATIONS", "ExportedModule", "by_secret_data", "layers_of_module", "model_of_file", "model_of_module"]
_DTYPES: Final = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class ExportedModule:
    """A module's model, and what of the module it leaves out or does otherwise."""

    model: ModelSpec
    notes: tuple[str, ...]


def model_of_file(text: str, features: int, classes: int, positions: int = 1) -> ExportedModule:
    """The model of ``file.py:Model``; runs that file.

    The class is built with those of ``features`` and ``classes`` that it takes by name. Its ``input_shape``, if it has
    one, says how a row's features lie, like (1, 8, 8). Raises UnreadableError or ConfigError with the user's line.
    """
    path, _, name = text.rpartition(":")
    file = Path(path).expanduser()
    made = _built(_loaded(file), name, file, {"features": features, "classes": classes})
    vocabulary = getattr(made, "vocabulary", 0)
    letters = isinstance(vocabulary, int) and vocabulary > 0 and features % vocabulary == 0
    shape = tuple(getattr(made, "input_shape", (features // vocabulary if letters else features,)))
    size = vocabulary if letters else 1
    for side in shape:
        if type(side) is not int or side < 1:
            raise ConfigError(f"{text}: input_shape is {shape}", "give whole numbers, like (1, 8, 8)")
        size *= side
    if size != features:
        raise ConfigError(f"{text}: input_shape {shape} is {size} numbers, a row has {features} features", "mend it")
    return model_of_module(made, shape, classes, str(file.resolve()), positions)


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


def model_of_module(
    module: nn.Module, shape: Sequence[int], classes: int, file: str = "", positions: int = 1
) -> ExportedModule:
    """The model that a module computes on rows of ``shape``, with answers at each of ``positions``.

    A module whose ``vocabulary`` is a number takes letters, (rows, positions) of whole numbers below it; the data then
    has them one-hot. Raises ConfigError naming operation and line.
    """
    layers, notes, features = layers_of_module(module, shape, file, positions)
    return ExportedModule(model_of_layers(layers, features, classes, positions), notes)


def layers_of_module(
    module: nn.Module, shape: Sequence[int], file: str = "", lines: int = 0
) -> tuple[list[LayerSpec], tuple[str, ...], int]:
    """The layers of a module on rows of ``shape``, what is to be noted of them, and a row's numbers as data has them.

    They end on so many ``lines``, or on those that come out. Raises ConfigError naming operation and line.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if (tensor.is_floating_point() and tensor.dtype not in _DTYPES) or tensor.is_complex():
            raise ConfigError(
                f"{name} is of type {tensor.dtype}", "make the module with float32; shares are fixed point"
            )
    vocabulary = _vocabulary(module, shape)
    kind = torch.long if vocabulary else next((p.dtype for p in module.parameters()), torch.float32)
    example = torch.zeros(ROWS, *shape, dtype=kind)
    plain = with_plain_attention(copy.deepcopy(module)).eval()
    try:
        program = torch.export.export(plain, (example,))
    except ConfigError as error:
        raise ConfigError(f"{_place(error, file)}: {error.what}", error.hint) from error
    except Exception as error:
        if not vocabulary and any(isinstance(one, nn.Embedding) for one in module.modules()):
            what = f"{_place(error, file)}: an embedding looks up numbers of the data"
            hint = "say how many letters there are: vocabulary = 65, beside input_shape = (positions,)"
            raise ConfigError(what, hint) from error
        raise _users_error(error, file, "cannot be exported") from error
    graph = Graph(program, file)
    graph.check_shapes()
    walk = Walk(graph, OPERATIONS, ATTENTION, vocabulary)
    features = example[0].numel() * (vocabulary or 1)
    try:
        layers = walk.whole(lines)
    except RecursionError as error:
        raise ConfigError("the module is too deep", "use fewer operations, one after the other") from error
    return list(numbered(layers)), tuple(dict.fromkeys([*walk.notes, *_left_out(module)])), features


def _left_out(module: nn.Module) -> list[str]:
    """What of a module's dropout is left out: that of whole channels, and of attention's weights."""
    whole = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)
    channels = any(isinstance(m, whole) and m.p for m in module.modules())
    weights = any(isinstance(m, nn.MultiheadAttention) and m.dropout for m in module.modules())
    return ["dropout of whole channels is left out, in training too"] * channels + [
        "dropout of attention's weights is left out, in training too"
    ] * weights


def _vocabulary(module: nn.Module, shape: Sequence[int]) -> int:
    found = getattr(module, "vocabulary", 0)
    if not isinstance(found, int) or isinstance(found, bool) or found < 0 or (found and len(shape) != 1):
        raise ConfigError(f"vocabulary is {found!r}, input_shape {tuple(shape)}", "give a number, and (positions,)")
    return found


def _place(error: BaseException, file: str) -> str:
    """The user's file and the last of its lines that an error came through."""
    if not file:  # a module that was made elsewhere, as in a notebook
        return users_place(str(error), file) or "the module"
    lines = [int(n) for path, n in FRAME.findall(str(error)) if path == file]
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return f"{Path(file).name or 'the module'}" + (f", line {lines[-1]}" if lines else "")


def by_secret_data(error: BaseException) -> bool:
    """Whether torch refuses to trace a module because what it computes depends on the numbers in a tensor.

    Torch has no public type for it: eager shape checks, fake tensors and the export each raise an error of their own
    kind, and only the words are the same in all. This is the one place that reads them.
    """
    low = str(error).lower()
    return "data-dependent" in low or "data dependent" in low


def _users_error(error: Exception, file: str, what: str) -> ConfigError:
    """An error of the user's code or of its export, with the line of the user's file."""
    text, place = str(error), _place(error, file)
    if by_secret_data(error):
        return ConfigError(
            f"{place}: what is computed depends on secret data", "use no if, while or indexing by what is in a tensor"
        )
    first = " ".join(text.split())[:160]
    return ConfigError(f"{place} {what}: {type(error).__name__}: {first}", "mend the module")
