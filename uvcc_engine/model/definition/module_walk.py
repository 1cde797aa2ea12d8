"""From an exported module's graph to layers: backwards from its output to its input, each operation by its name.

What an operation gives lies flat in a row as torch lays it out; layers want lines of features, and ``Run`` puts in
between what changes one into the other. Branches meet as sums, products and side by side; attention is found by its
operation, and its queries, keys and values by which numbers of which product they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import torch
from torch.fx import Node

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.data.sets import Ints
from uvcc_engine.model.definition.module_graph import Graph, args_of, keywords_of, name_of, numbers_of, shape_of
from uvcc_engine.model.definition.substitutes import substitute
from uvcc_engine.model.layer_spec import LayerSpec
from uvcc_engine.model.layer_types.affine import Affine
from uvcc_engine.model.layer_types.branches import CONCAT, PRODUCT, SUM, Branches
from uvcc_engine.model.layer_types.dense import Dense
from uvcc_engine.model.layer_types.embedding import Embedding
from uvcc_engine.model.layer_types.places import LinePlaces, Prefix
from uvcc_engine.model.layer_types.rearrange import lines_of, strided
from uvcc_engine.model.layer_types.residual import Residual
from uvcc_engine.model.layer_types.tied import Tied
from uvcc_engine.model.registry import type_of

JOINS: Final = {"add": SUM, "sub": SUM, "rsub": SUM, "mul": PRODUCT, "div": PRODUCT, "neg": SUM, "pow": PRODUCT}
_PARTS: Final = {"cat": CONCAT, "concat": CONCAT, "concatenate": CONCAT}


@dataclass
class Run:
    """Layers so far, and the ``lines`` and ``numbers`` of a row behind them. ``moved``: which of these numbers come
    next, where they are not all, in order; a layer is put in for it once another follows. ``product`` and ``letters``:
    the last layer, if it is a product whose columns may be in any order, or an embedding without places."""

    lines: int
    numbers: int
    layers: list[LayerSpec] = field(default_factory=list)
    moved: Ints | None = None
    product: Dense | None = None
    letters: Embedding | None = None

    def take(self, index: Ints | None) -> None:
        """Of the numbers so far those at ``index``."""
        if index is not None:
            self.moved = index if self.moved is None else self.moved[index]

    def settle(self, lines: int = 0) -> None:
        """Put in the layer that moves numbers, or changes the lines, if there must be one. 0: lines as they are.

        Raises ConfigError where no layer moves numbers so.
        """
        index = self.moved
        if index is not None and np.array_equal(index, np.arange(self.numbers)):
            index = None
        count = self.numbers if index is None else len(index)
        wanted = lines or (self.lines if count % self.lines == 0 else 1)
        if index is not None:
            found = strided(index, self.numbers, wanted)
            if found is None:
                raise ConfigError(
                    "numbers are moved as no few strides say", "reshape, transpose and slice in few steps"
                )
            self.layers.append(found)
        elif wanted != self.lines:
            self.layers.append(lines_of(self.numbers, wanted))
        if index is not None or wanted != self.lines:
            self.product = self.letters = None
        self.lines, self.numbers, self.moved = wanted, count, None

    def add(self, spec: LayerSpec, lines: int = 0) -> None:
        """Put a layer behind. Raises ConfigError if it does not fit."""
        self.settle(lines)
        after = type_of(spec).output_shape(spec, (self.lines, self.numbers // self.lines))
        self.product = self.letters = None
        self.layers.append(spec)
        self.lines, self.numbers = after[0], after[0] * after[1]

    @property
    def width(self) -> int:
        """Features of a line."""
        return self.numbers // self.lines


PutLayers = Callable[["Walk", Node, Run], None]
"""Put the layers of an operation of one secret tensor behind those of its input."""
Meeting = Callable[["Walk", Node, Node, Run], None]
"""Put the layers of an operation of several, and of all below it as far as a source, behind a run."""


@dataclass
class Walk:
    """From a graph's output back to its input. ``vocabulary``: of the letters that the input is, 0 for numbers;
    ``table``: the name of the parameter that they are looked up in, and their layer before it had places."""

    graph: Graph
    operations: Mapping[str, PutLayers]
    attention: Mapping[str, Meeting]
    vocabulary: int = 0
    notes: list[str] = field(default_factory=list)
    used: dict[str, str] = field(default_factory=dict)
    table: tuple[str, Embedding] | None = None

    def whole(self, lines: int) -> list[LayerSpec]:
        """The layers of the whole module, which ends on so many lines (0: as they come). Raises ConfigError."""
        graph = self.graph
        if len(graph.inputs) != 1 or len(graph.outputs) != 1:
            counts = f"the module takes {len(graph.inputs)} tensors and gives {len(graph.outputs)}"
            raise ConfigError(counts, "let it be one of each")
        (source,), (node,) = graph.inputs, graph.outputs
        if not graph.secret(node):
            raise ConfigError("what the module gives does not depend on what it takes", "mend the module")
        below, _ = graph.moved(node, source)
        if name_of(below) in ("softmax", "log_softmax") and numbers_of(below) == numbers_of(node):
            self.notes.append(f"the last {name_of(below)} is left out: the objective has it already")
            node = args_of(below)[0]
        run = Run(1, numbers_of(source) * (self.vocabulary or 1))
        self.emit(node, source, run)
        self.settle(run, node, lines)
        return run.layers

    def settle(self, run: Run, node: Node, lines: int = 0) -> None:
        """``run.settle`` with the place of an error."""
        try:
            run.settle(lines)
        except ConfigError as error:
            raise self.graph.refusal(node, f"cannot be laid out: {error.what}", error.hint) from error

    def add(self, run: Run, node: Node, spec: LayerSpec, lines: int = 0) -> None:
        """``run.add`` with the place of an error."""
        self.settle(run, node, lines)
        try:
            run.add(spec, lines)
        except ConfigError as error:
            raise self.graph.refusal(node, f"does not fit: {error.what}", error.hint) from error

    def emit(self, node: Node, source: Node, run: Run) -> None:
        """Put what leads from ``source`` to ``node`` behind ``run``; its numbers then lie as the node's do."""
        below, index = self.graph.moved(node, source)
        if below is not source:
            self.compute(below, source, run)
        elif self.vocabulary and below in self.graph.inputs and index is not None:
            raise self.graph.refusal(node, "moves letters before they are embedded", "embed them first")
        run.take(index)

    def compute(self, node: Node, source: Node, run: Run) -> None:
        """The same for an operation that computes."""
        name = name_of(node)
        if name in JOINS:
            self.join(node, source, run)
        elif name in _PARTS:
            self.concat(node, source, run)
        elif name in self.attention:
            self.attention[name](self, node, source, run)
        elif name in self.operations:
            (fed,) = [one for one in args_of(node)[:1] if self.graph.secret(one)] or [None]
            if name == "embedding":
                fed = args_of(node)[1]
            if fed is None or sum(self.graph.secret(one) for one in node.all_input_nodes) != 1:
                raise self.graph.refusal(node, "has a weight that is computed from the data", "use a layer's own")
            self.emit(fed, source, run)
            self.operations[name](self, node, run)
        else:
            raise self.graph.refusal(node, "cannot be computed on shares here", substitute(name, self.known()))

    def known(self) -> list[str]:
        """The names of all operations that can be taken over, but for those that only move numbers."""
        return sorted({*self.operations, *self.attention, *JOINS, *_PARTS})

    def branch(self, node: Node, source: Node, run: Run) -> Run:
        """What leads from ``source``, behind which ``run`` is, to ``node``."""
        found = Run(run.lines, run.numbers)
        self.emit(node, source, found)
        return found

    # -- where branches meet -----------------------------------------------------------------------------------------

    def join(self, node: Node, source: Node, run: Run) -> None:
        """Two that are added, subtracted or multiplied, one with itself or with a public number or a parameter."""
        name = name_of(node)
        args = list(args_of(node))
        if name == "pow":
            if args[1] != 2:
                raise self.graph.refusal(node, f"is to the power {args[1]}", "only squares can be")
            args = [args[0], args[0]]
        secret = [arg for arg in args if self.graph.secret(arg)]
        if len(secret) == 1:
            self.emit(secret[0], source, run)
            self._with_public(node, args, run)
            return
        if name == "div":
            raise self.graph.refusal(node, "divides by secret numbers", "use a normalisation, or sigmoid")
        alpha = keywords_of(node).get("alpha", 1)
        a, b = args[0], args[1]
        signs = {"sub": (1, -1), "rsub": (-1, 1)}.get(name, (1, 1))
        if len({shape_of(a), shape_of(b), shape_of(node)}) > 1:
            raise self.graph.refusal(
                node, f"is of {list(shape_of(a))} and {list(shape_of(b))}", "make both of one shape: nothing is spread"
            )
        parting = self.graph.parting(a, b)
        self.emit(parting, source, run)
        self.settle(run, node)
        first, second = self.branch(a, parting, run), self.branch(b, parting, run)
        for one, sign in ((first, signs[0]), (second, signs[1] * alpha)):
            if JOINS[name] == SUM and sign != 1:
                self.add(one, node, Affine(one.width, float(sign), 0.0))
        self._meet(node, run, JOINS[name], [first, second])

    def _meet(self, node: Node, run: Run, join: str, parts: Sequence[Run], lines: int = 0) -> None:
        lines = lines or next((one.lines for one in parts if one.layers), run.lines)
        if join == SUM and len(parts) == 2 and (not parts[0].layers or not parts[1].layers):
            lines = run.lines
        for one in parts:
            self.settle(one, node, lines)
        if join == SUM and not all(one.layers for one in parts) and any(one.layers for one in parts):
            (busy,) = [one for one in parts if one.layers]
            self.add(run, node, Residual(tuple(busy.layers)))
        else:
            self.add(run, node, Branches(join, tuple(tuple(one.layers) for one in parts)))

    def concat(self, node: Node, source: Node, run: Run) -> None:
        """Tensors side by side along any axis but the rows'."""
        tensors = list(args_of(node)[0])
        axis = args_of(node)[1] if len(args_of(node)) > 1 else keywords_of(node).get("dim", 0)
        axis = int(axis) % len(shape_of(node))
        secret = [one for one in tensors if self.graph.secret(one)]
        if axis == 0:
            raise self.graph.refusal(node, "is along the rows of the data", "leave the first axis alone")
        if len(secret) < len(tensors):
            self._prefix(node, tensors, axis, source, run)
            return
        lines = math.prod(shape_of(node)[1:axis])
        parting = self.graph.parting(*secret)
        self.emit(parting, source, run)
        self.settle(run, node)
        self._meet(node, run, CONCAT, [self.branch(one, parting, run) for one in tensors], lines)

    def _prefix(self, node: Node, tensors: Sequence[Any], axis: int, source: Node, run: Run) -> None:
        """A parameter before the lines of a row: a class token."""
        found = self.graph.parameter_places(tensors[0]) if len(tensors) == 2 else None
        shape = shape_of(tensors[-1])
        if found is None or axis != 1 or len(shape) != 3 or not self.graph.secret(tensors[1]):
            raise self.graph.refusal(node, "is of a tensor that is not computed from the data", "put a parameter first")
        name, at = found
        self._own(node, name, at)
        self.emit(tensors[1], source, run)
        self.add(run, node, Prefix(shape[1], shape[2], shape_of(tensors[0])[1]), shape[1])

    def _own(self, node: Node, name: str, at: Any) -> None:
        """A parameter that is used here whole, or the same for every row. Raises ConfigError if it was used before."""
        flat = at.reshape(-1, *at.shape[-2:]) if at.dim() > 2 else at[None]
        if not bool((flat == flat[:1]).all()) or len(flat[0].unique()) != flat[0].numel():
            raise self.graph.refusal(node, f"spreads the parameter {name}", "give every line numbers of its own")
        self.once(node, name)

    def once(self, node: Node, name: str) -> None:
        """Note that a parameter is used here. Raises ConfigError if it was before."""
        if name in self.used:
            raise self.graph.refusal(node, f"uses the weight of {self.used[name]} again", "give it one of its own")
        self.used[name] = self.graph.place(node)

    def tie(self, node: Node, name: str, run: Run, *, biased: bool) -> bool:
        """Put the product with the embedding's own table behind ``run``; False if ``name`` is another parameter.

        Raises ConfigError where the table can be used no second time.
        """
        if self.table is None or name != self.table[0]:
            return False
        self.settle(run, node, math.prod(shape_of(node)[1:-1]))
        if biased:
            raise self.graph.refusal(node, "adds a bias to a product with the embedding's table", "give bias=False")
        letters = self.table[1]
        begins = (letters, replace(letters, places=True))
        table = next((one for one in begins if run.layers[:1] == [one]), None)
        if table is None:
            why = f"uses the weight of {self.used[name]} again, beside the layers that begin with it"
            raise self.graph.refusal(node, why, "tie the last product of the stack that the embedding begins")
        tied = Tied(table, tuple(run.layers[1:]))
        run.layers.clear()
        run.lines, run.numbers = 1, table.positions * table.vocabulary
        self.add(run, node, tied)
        self.table = None
        return True

    def _with_public(self, node: Node, args: Sequence[Any], run: Run) -> None:
        name = name_of(node)
        other = next((arg for arg in args if not self.graph.secret(arg)), None)
        found = self.graph.parameter_places(other) if isinstance(other, Node) else None
        if found is not None and name == "add" and keywords_of(node).get("alpha", 1) == 1:
            self._places(node, found, run)
            return
        if found is not None:
            raise self.graph.refusal(node, f"has the parameter {found[0]} in it", "only sums with parameters can be")
        value = self.graph.constant(other) if other is not None else None
        number = None if value is None else float(value.reshape(-1)[0])
        if value is not None and len(torch.unique(value)) > 1:
            raise self.graph.refusal(node, f"has a constant tensor {list(value.shape)} in it", _CONSTANT)
        factor, shift = self._line(node, name, number, secret_first=self.graph.secret(args[0]))
        if (factor, shift) != (1.0, 0.0):
            self.settle(run, node)
            self.add(run, node, Affine(run.width, factor, shift))

    def _line(self, node: Node, name: str, number: float | None, *, secret_first: bool) -> tuple[float, float]:
        """Factor and shift of what is done with a public number."""
        if number is None:
            return -1.0, 0.0
        alpha = float(keywords_of(node).get("alpha", 1))
        if name == "mul":
            return number, 0.0
        if name == "div" and secret_first and number:
            return 1.0 / number, 0.0
        if name == "add":
            return (1.0, alpha * number) if secret_first else (alpha, number)
        if name == "sub":
            return (1.0, -alpha * number) if secret_first else (-alpha, number)
        if name == "rsub":
            return -alpha, number
        raise self.graph.refusal(node, "divides by secret numbers", "use a normalisation, or sigmoid")

    def _places(self, node: Node, found: tuple[str, Any], run: Run) -> None:
        """A parameter that is added: one vector for each line of a row."""
        name, at = found
        shape = shape_of(node)
        spread = at.expand(shape[1:]) if at.dim() < len(shape) else at.expand(shape)[0]
        lines, width = (shape[1], shape[2]) if len(shape) == 3 else (1, numbers_of(node))
        if len(spread.unique()) != spread.numel():
            raise self.graph.refusal(node, f"spreads the parameter {name}", "give every line numbers of its own")
        self.once(node, name)
        letters = run.letters
        if letters is not None and letters.positions == lines and run.moved is None:
            run.layers[-1] = replace(letters, places=True)
            run.letters = None
        else:
            self.add(run, node, LinePlaces(lines, width), lines)


_CONSTANT: Final = "make it a torch.nn.Parameter, which is learnt, or leave it out"
