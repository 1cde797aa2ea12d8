"""What the graph of an exported module says: which numbers an operation hands on unchanged, where branches part, what
does not depend on the data. Operations that only move numbers are carried out on the numbers' places.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.fx import Node

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.data.sets import Ints
from uvcc_engine.model.definition.substitutes import INSTEAD_OF

ROWS: Final = 5
"""Rows of the example that a module is traced with: no size of a usual layer."""
FRAME: Final = re.compile(r'File "([^"]+)", line (\d+)')
_NOT_THE_USERS: Final = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
COPIES: Final = (
    "dropout",
    "feature_dropout",
    "alias",
    "detach",
    "clone",
    "contiguous",
    "identity",
    "lift_fresh_copy",
)
MOVES: Final = frozenset(
    (
        *(*COPIES, "flatten", "view", "_unsafe_view", "reshape", "unflatten", "squeeze", "unsqueeze", "view_as"),
        *("transpose", "permute", "t", "movedim", "swapaxes", "numpy_T", "mT", "expand", "expand_as", "narrow"),
        *("slice", "select", "split", "split_with_sizes", "chunk", "unbind", "getitem", "tile", "repeat", "unfold"),
        *("repeat_interleave", "pixel_shuffle", "pixel_unshuffle", "swapdims", "adjoint", "as_strided"),
    )
)
"""Operations that hand on numbers of one tensor unchanged, in whatever order and shape."""


_CASTS: Final = ("to", "_to_copy", "type_as")


def name_of(node: Node) -> str:
    """``aten.leaky_relu_.default`` -> ``leaky_relu``."""
    name = str(getattr(node.target, "_opname", getattr(node.target, "__name__", node.target)))
    return name.removesuffix("_") if not name.startswith("_") else name


def args_of(node: Any) -> tuple[Any, ...]:
    """What an operation is called with, by place."""
    return tuple(node.args)


def keywords_of(node: Any) -> dict[str, Any]:
    """What an operation is called with, by name."""
    return dict(node.kwargs)


def shape_of(node: Any) -> tuple[int, ...]:
    """The shape of what a node gives, () if it is no tensor."""
    value = node.meta.get("val")
    return tuple(int(n) for n in value.shape) if isinstance(value, Tensor) else ()


def numbers_of(node: Any) -> int:
    """How many numbers of one row it gives."""
    size = 1
    for side in shape_of(node)[1:]:
        size *= side
    return size


def users_place(trace: str, file: str) -> str:
    """File and line of the user's last call in a trace: in ``file``, or else in any that is not torch's or ours; "" if
    in none."""
    frames = FRAME.findall(trace)
    mine = [f for f in frames if f[0] == file] or [f for f in frames if not f[0].startswith(_NOT_THE_USERS)]
    return f"{Path(mine[-1][0]).name}, line {mine[-1][1]}" if mine else ""


class Graph:
    """The nodes of an exported program: which depend on the module's input, and what all ways to each go through."""

    def __init__(self, program: Any, file: str) -> None:
        self.program = program
        self.file = file
        nodes = list(program.graph_module.graph.nodes)
        signature = program.graph_signature
        self.inputs = [n for n in nodes if n.op == "placeholder" and n.name in signature.user_inputs]
        (end,) = [n for n in nodes if n.op == "output"]
        self.outputs = [n for n in end.args[0] if n is not None and n.name in signature.user_outputs]
        self._order = {node: at for at, node in enumerate(nodes)}
        self._through: dict[Node, frozenset[Node]] = {}
        for node in nodes:
            fed = [self._through[one] for one in node.all_input_nodes if one in self._through]
            if node in self.inputs:
                self._through[node] = frozenset([node])
            elif fed:
                self._through[node] = frozenset.intersection(*fed) | {node}

    def check_shapes(self) -> None:
        """Refuse (ConfigError naming operation and line) shapes and numbers that only the data decide."""
        for node in self._order:
            value = node.meta.get("val")
            sizes = tuple(value.shape) if isinstance(value, Tensor) else (value,)
            if any(isinstance(size, SymInt | SymFloat | SymBool) for size in sizes):
                hint = "shapes must follow from a row's: no masks, nonzero, item or slices by what a tensor holds"
                raise self.refusal(node, "gives a shape or number that depends on secret data", hint)

    def secret(self, node: Any) -> bool:
        """Whether it depends on the module's input."""
        return isinstance(node, Node) and node in self._through

    def parting(self, *nodes: Node) -> Node:
        """The last tensor that every way to each of these goes through; one of them, if the others come from it."""
        common = frozenset.intersection(*(self._through[node] for node in nodes))
        return max((node for node in common if shape_of(node)), key=lambda node: self._order[node])

    def place(self, node: Node) -> str:
        """File and line of the user's code that an operation comes from."""
        if place := users_place(str(node.meta.get("stack_trace") or ""), self.file):
            return place
        parts = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values() if path]
        return f"the module's {parts[-1]!r}" if parts else "the module"

    def refusal(self, node: Node, why: str, hint: str) -> ConfigError:
        """The error of an operation that cannot be taken over."""
        return ConfigError(f"{self.place(node)}: {name_of(node)} {why}", hint)

    # -- numbers that are only moved ---------------------------------------------------------------------------------

    def moved(self, node: Node, source: Node) -> tuple[Node, Ints | None]:
        """The node below that computes (or ``source``), and from which places of one of its rows this node's numbers
        come, ``[numbers]``; None if all do, in order. Raises ConfigError if rows mix."""
        base = node
        while base is not source and base.op == "call_function" and self._moves(base):
            base = next(one for one in base.all_input_nodes if self.secret(one))
        if base is node:
            return base, None
        if shape_of(base) and shape_of(base)[0] != ROWS:
            raise self.refusal(base, "is along the rows of the data", "leave the first axis alone")
        if not shape_of(base):
            hint = INSTEAD_OF.get(name_of(base), "use operations that give one")
            raise self.refusal(base, "gives several tensors", hint)
        each = numbers_of(base)
        start = torch.arange(ROWS * each).reshape(shape_of(base))
        found = self.carried(node, {base: start}).reshape(ROWS, -1)
        rows = torch.arange(ROWS)[:, None] * each
        if shape_of(node)[:1] != (ROWS,) or not torch.equal(found - rows, (found[:1]).expand_as(found)):
            raise self.refusal(node, "moves numbers from one row of the data to another", "leave the first axis alone")
        index = found[0].numpy().astype(np.int64)
        return base, None if np.array_equal(index, np.arange(each)) else index

    def _moves(self, node: Node) -> bool:
        value = node.meta.get("val")
        if name_of(node) == "dropout" and args_of(node)[1]:
            return False  # it leaves numbers out while the model trains
        same = isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float64, torch.int64)
        return name_of(node) in MOVES or (name_of(node) in _CASTS and same)

    def carried(self, node: Node, known: Mapping[Node, Any]) -> Tensor:
        """What a node gives, in its own shape, where the nodes below it have the ``known`` values."""
        found: Tensor = self._evaluated(node, dict(known))
        return found.contiguous()

    # -- numbers that are public -------------------------------------------------------------------------------------

    def constant(self, node: Any) -> Tensor:
        """The value, in its own shape, of what does not depend on the module's input."""
        value = self._evaluated(node, {}) if isinstance(node, Node) else node
        return torch.as_tensor(value)

    def parameter_places(self, node: Node) -> tuple[str, Tensor] | None:
        """The name of the only parameter that a node hands on, and from which of its places, in the shape of what the
        node gives; None if it is no such."""
        found = [one for one in self._below(node) if one.name in self.program.graph_signature.inputs_to_parameters]
        if len(found) != 1:
            return None
        name = self.program.graph_signature.inputs_to_parameters[found[0].name]
        weight = self.program.state_dict[name]
        known = {found[0]: torch.arange(weight.numel(), dtype=torch.float64).reshape(weight.shape)}
        way = [one for one in self._below(node) if one in self._using(found[0])]
        if any(
            one is not found[0] and name_of(one) not in {*MOVES, "embedding", "index", "index_select"} for one in way
        ):
            return None
        return name, self._evaluated(node, dict(known)).long()

    def _using(self, leaf: Node) -> set[Node]:
        found, left = {leaf}, [leaf]
        while left:
            for one in left.pop().users:
                if one not in found:
                    found.add(one)
                    left.append(one)
        return found

    def _below(self, node: Node) -> set[Node]:
        found, left = {node}, [node]
        while left:
            for one in left.pop().all_input_nodes:
                if one not in found:
                    found.add(one)
                    left.append(one)
        return found

    def _evaluated(self, node: Node, known: dict[Node, Any]) -> Any:
        """Carry out what leads to a node from what is known."""
        order = sorted(self._below(node), key=lambda one: self._order[one])
        wanted = self._needed(node, known)
        for one in order:
            if one in known or one not in wanted:
                continue
            known[one] = self._leaf(one) if one.op != "call_function" else self._called(one, known)
        return known[node]

    def _needed(self, node: Node, known: Mapping[Node, Any]) -> set[Node]:
        found, left = {node}, [node]
        while left:
            one = left.pop()
            for below in one.all_input_nodes if one not in known else ():
                if below not in found:
                    found.add(below)
                    left.append(below)
        return found

    def _called(self, node: Node, known: Mapping[Node, Any]) -> Any:
        given: Any = torch.fx.node.map_arg((node.args, node.kwargs), lambda one: known[one])
        args, kwargs = given
        if name_of(node) in (*COPIES, *_CASTS):
            return args[0]
        if name_of(node) in ("view", "_unsafe_view"):
            return args[0].reshape(args[1])  # copies above are left out, which a view would mind
        if name_of(node) == "embedding":
            return args[0][args[1]]
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def _leaf(self, node: Node) -> Any:
        signature, program = self.program.graph_signature, self.program
        if node.op == "placeholder":
            if node.name in signature.inputs_to_parameters:
                return program.state_dict[signature.inputs_to_parameters[node.name]].detach()
            if node.name in signature.inputs_to_buffers:
                name = signature.inputs_to_buffers[node.name]
                return program.state_dict[name] if name in program.state_dict else program.constants[name]
            if node.name in signature.inputs_to_lifted_tensor_constants:
                return program.constants[signature.inputs_to_lifted_tensor_constants[node.name]]
        if node.op == "get_attr":
            return getattr(program.graph_module, str(node.target))
        raise self.refusal(node, "is not known before the data is", "use numbers of the module's own")
