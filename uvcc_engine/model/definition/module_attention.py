"""Attention in an exported module, by its one operation or written out: which numbers are queries, keys and values.

They are found by carrying the places of a product's numbers through whatever moves them, so any way of cutting heads is
understood; the order of the columns of a product whose weight is made anew is free, and is chosen as the layer wants.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import Node

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.data.sets import Ints
from uvcc_engine.model.definition.module_graph import Graph, args_of, keywords_of, name_of, shape_of
from uvcc_engine.model.definition.module_rotary import turned
from uvcc_engine.model.definition.module_walk import Run, Walk
from uvcc_engine.model.layer_spec import LayerSpec, weighted_specs
from uvcc_engine.model.layer_types.attention import Attention
from uvcc_engine.model.layer_types.branches import CONCAT, Branches
from uvcc_engine.model.layer_types.dense import Dense

_MASKED: Final = -1e4  # what is added to a score that is not to count is below
_KEYWORDS: Final = {"attn_mask": "mask", "is_causal": "causal", "dropout_p": "dropout"}
_HINT: Final = "use scaled_dot_product_attention(q, k, v, is_causal=True) of heads cut from linear layers"


def scaled_attention(walk: Walk, node: Node, source: Node, run: Run) -> None:
    """``scaled_dot_product_attention``."""
    names = ("query", "key", "value", "mask", "dropout", "causal", "scale")
    found = dict(zip(names, args_of(node), strict=False)) | {
        {"attn_mask": "mask", "is_causal": "causal", "dropout_p": "dropout"}.get(k, k): v
        for k, v in keywords_of(node).items()
    }
    causal = bool(found.get("causal", False))
    if found.get("mask") is not None:
        if walk.graph.secret(found["mask"]):
            raise walk.graph.refusal(node, "has a mask that is computed from the data", "use a public one")
        causal = _is_causal(walk.graph, node, _seen(walk.graph, node, walk.graph.constant(found["mask"])))
    query = found["query"]
    scale = found.get("scale")
    _attend(walk, node, source, run, (query, found["key"], found["value"]), causal=causal, scale=scale)


def product_attention(walk: Walk, node: Node, source: Node, run: Run) -> None:
    """``softmax(q @ k.T * scale, masked) @ v``, written out."""
    graph = walk.graph
    weights, value = args_of(node)[0], args_of(node)[1]
    if not (graph.secret(weights) and graph.secret(value)):
        raise graph.refusal(node, "is a product with a public matrix", "use linear")
    below = _copied(weights)
    if name_of(below) != "softmax":
        raise graph.refusal(node, "multiplies secret tensors", _HINT)
    axis = args_of(below)[1] if len(args_of(below)) > 1 else keywords_of(below).get("dim")
    if axis not in (-1, len(shape_of(below)) - 1):
        raise graph.refusal(below, f"is over axis {axis}", "take the last one")
    scores, scale, seen = _copied(args_of(below)[0]), 1.0, None
    while (name := name_of(scores)) not in ("matmul", "bmm"):
        other = [arg for arg in args_of(scores)[1:] if not graph.secret(arg)]
        secret = [arg for arg in args_of(scores) if graph.secret(arg)]
        if name in ("mul", "div") and len(secret) == 1 and other and graph.constant(other[0]).numel() == 1:
            scale *= float(graph.constant(other[0])) ** (1 if name == "mul" else -1)
        elif name == "masked_fill" and len(other) == 2 and float(graph.constant(other[1])) < _MASKED and seen is None:
            seen = ~graph.constant(other[0]).bool()
        elif name == "add" and len(secret) == 1 and other and seen is None:
            seen = _seen(graph, scores, graph.constant(other[0]))
        elif name == "where" and _fills(graph, scores) and seen is None:
            seen = graph.constant(args_of(scores)[0]).bool()
        else:
            raise graph.refusal(scores, "is no part of an attention", _HINT)
        scores = _copied(secret[0])
    causal = seen is not None and _is_causal(graph, node, seen)
    _attend(
        walk,
        node,
        source,
        run,
        (args_of(scores)[0], args_of(scores)[1], value),
        causal=causal,
        scale=scale,
        flipped=True,
    )


def _copied(node: Any) -> Node:
    """The node below copies, which change neither shape nor order."""
    while isinstance(node, Node) and name_of(node) in ("dropout", "clone", "contiguous", "alias", "detach", "to"):
        node = args_of(node)[0]
    assert isinstance(node, Node)
    return node


def _fills(graph: Graph, node: Node) -> bool:
    """Whether ``where`` keeps the scores, and puts what does not count in place of the others."""
    condition, kept, other = args_of(node)[:3]
    public = not graph.secret(condition) and not graph.secret(other)
    return public and graph.secret(kept) and bool((graph.constant(other) < _MASKED).all())


def _seen(graph: Graph, node: Node, mask: Tensor) -> Tensor:
    """Which places count: a mask says so, or is added to the scores. Raises ConfigError for other numbers added."""
    if mask.dtype == torch.bool:
        return mask
    if not bool(((mask == 0) | (mask < _MASKED)).all()):
        raise graph.refusal(node, "adds numbers of its own to the scores", "add 0 or -inf, as a mask does")
    return mask == 0


def _is_causal(graph: Graph, node: Node, seen: Tensor) -> bool:
    size = seen.shape[-1]
    if bool(seen.all()):
        return False
    if seen.shape[-2:] == (size, size) and torch.equal(seen, torch.ones(size, size).tril().bool().expand_as(seen)):
        return True
    raise graph.refusal(node, "has a mask that is neither causal nor open", "let a line see all, or those before it")


@dataclass(frozen=True, slots=True)
class _Part:
    """Queries, keys or values: the node whose numbers they are, and for each (head, feature) which column of it."""

    base: Node
    columns: Ints
    rotary: float = 0.0


def _attend(
    walk: Walk,
    node: Node,
    source: Node,
    run: Run,
    tensors: tuple[Any, Any, Any],
    *,
    causal: bool,
    scale: Any,
    flipped: bool = False,
) -> None:
    graph = walk.graph
    if not all(graph.secret(one) for one in tensors):
        raise graph.refusal(node, "attends to public numbers", _HINT)
    parting, _ = graph.moved(graph.parting(*tensors), source)
    shape = shape_of(tensors[0])[1:]
    heads, lines, each = shape if len(shape) == 3 else (1, *shape)
    parts = [_part(graph, node, one, parting, (lines, each), flipped and k == 1) for k, one in enumerate(tensors)]
    if scale is not None and not math.isclose(float(scale), each**-0.5, rel_tol=1e-3):
        raise graph.refusal(node, f"scales by {float(scale):g}", f"scale by 1 / sqrt({each}), or leave it out")
    if parts[0].columns.shape[0] != heads or parts[1].columns.shape != parts[2].columns.shape:
        raise graph.refusal(node, "has keys and values of different shapes", _HINT)
    shared = _shared(graph, node, heads, parts[1].columns, parts[2].columns)
    wanted = [parts[0].columns, *(one.columns[:: len(one.columns) // shared] for one in parts[1:])]
    graph_run = _Columns(walk, node, parting, run, lines)
    walk.emit(parting, source, run)
    graph_run.put([one.base for one in parts], wanted)
    if parts[2].rotary or parts[0].rotary != parts[1].rotary:
        raise graph.refusal(node, "turns queries and keys by different angles", "turn both alike, and no values")
    kv = 0 if shared == heads else shared
    spec = Attention(lines, heads * each, heads, kv, causal=causal, rotary=parts[0].rotary)
    walk.add(run, node, spec, lines)
    back = np.arange(lines * heads * each).reshape(lines, heads, each).transpose(1, 0, 2)
    run.take(back.reshape(-1))


def _part(graph: Graph, node: Node, tensor: Node, parting: Node, size: tuple[int, int], flip: bool) -> _Part:
    """Which columns of which node a tensor (rows, heads, lines, each) is; ``flip``: its last axes are exchanged."""
    lines, each = size
    shape = shape_of(tensor)[1:]
    if (shape[-2:][::-1] if flip else shape[-2:]) != size:
        raise graph.refusal(node, f"is of {list(shape_of(tensor))}", f"give queries and keys the same lines: {_HINT}")
    rotary = turned(graph, tensor, parting, size, flip=flip)
    base, index = graph.moved(tensor if rotary is None else rotary.before, parting)
    places = np.arange(math.prod(shape)) if index is None else index
    if rotary is not None:
        places = places[rotary.places]
    else:
        places = places.reshape(-1, *shape[-2:])
        places = places.transpose(0, 2, 1) if flip else places
    width = shape_of(base)[-1]
    if places.shape[1:] != (lines, each) or math.prod(shape_of(base)[1:-1]) != lines:
        raise graph.refusal(
            node, f"is of {list(shape_of(tensor))}", "let queries and keys have the same lines: " + _HINT
        )
    columns = places - np.arange(lines)[:, None] * width
    if not (columns == columns[:, :1]).all() or columns.min() < 0 or columns.max() >= width:
        raise graph.refusal(node, "mixes lines on the way to its heads", _HINT)
    return _Part(base, columns[:, 0].astype(np.int64), 0.0 if rotary is None else rotary.base)


def _shared(graph: Graph, node: Node, heads: int, keys: Ints, values: Ints) -> int:
    """How many heads of keys and values there are, each for as many heads of queries."""
    both = np.concatenate([keys, values], 1)
    first = both[np.sort(np.unique(both, axis=0, return_index=True)[1])]
    if heads % len(first) or not np.array_equal(np.repeat(first, len(both) // len(first), 0), both):
        raise graph.refusal(node, f"shares {len(first)} heads of keys among {heads}", "share each among as many")
    return len(first)


@dataclass
class _Columns:
    """Puts queries, keys and values side by side on every line."""

    walk: Walk
    node: Node
    parting: Node
    run: Run
    lines: int

    def put(self, bases: list[Node], wanted: list[Ints]) -> None:
        """The columns ``wanted`` of what each of ``bases`` gives, in this order."""
        order = list(dict.fromkeys(bases))
        walk, run = self.walk, self.run
        starts, total = {}, 0
        for base in order:
            starts[base], total = total, total + shape_of(base)[-1]
        columns = np.concatenate([one.reshape(-1) + starts[b] for b, one in zip(bases, wanted, strict=True)])
        if order != [self.parting]:
            self._branch(order, total)
        free = run.product is not None and run.moved is None and run.lines == self.lines
        if free and len(columns) == total == len(np.unique(columns)):
            return  # a weight that starts anew may have its columns in any order
        run.take((np.arange(self.lines)[:, None] * total + columns).reshape(-1))
        walk.settle(run, self.node, self.lines)

    def _branch(self, order: list[Node], total: int) -> None:
        walk, run = self.walk, self.run
        walk.settle(run, self.node)
        parts = [walk.branch(base, self.parting, run) for base in order]
        plain = [one.product for one in parts if one.product is not None and one.moved is None]
        firsts = {tuple(one.layers[:-1]) for one in parts}
        if len(plain) == len(parts) and len(firsts) == 1 and not any(map(_weighted, *firsts)):
            (first,) = firsts  # several products of one input are one product
            for spec in first:
                walk.add(run, self.node, spec)
            product = Dense(plain[0].inputs, total)
            walk.add(run, self.node, product, self.lines)
            run.product = product
            return
        for one in parts:
            walk.settle(one, self.node, self.lines)
        walk.add(run, self.node, Branches(CONCAT, tuple(tuple(one.layers) for one in parts)))


def _weighted(spec: LayerSpec) -> bool:
    return bool(weighted_specs([spec]))


class SelfAttention(nn.Module):
    """What ``torch.nn.MultiheadAttention`` computes of one sequence, by operations that a graph can show."""

    def __init__(self, old: nn.MultiheadAttention) -> None:
        super().__init__()
        if not old.batch_first or not old._qkv_same_embed_dim or old.bias_k is not None or old.add_zero_attn:
            raise ConfigError(
                "nn.MultiheadAttention with other axes or sizes than one sequence has",
                "make it with batch_first=True, and without kdim, vdim, add_bias_kv and add_zero_attn",
            )
        self.num_heads = old.num_heads
        self.batch_first = True
        self._qkv_same_embed_dim = False  # so that torch's encoder layers take no way around this
        self.in_proj_weight, self.in_proj_bias, self.out_proj = old.in_proj_weight, old.in_proj_bias, old.out_proj

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """The mixed values, and no weights. Raises ConfigError for attention between two sequences."""
        if query is not key or key is not value or key_padding_mask is not None:
            raise ConfigError("attention between two sequences, or with padding", "attend from a sequence to itself")
        rows, lines, width = query.shape
        all_three = nn.functional.linear(query, self.in_proj_weight, self.in_proj_bias)
        q, k, v = (one.view(rows, lines, self.num_heads, -1).transpose(1, 2) for one in all_three.chunk(3, -1))
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = ~attn_mask  # there True is what does not count
        mixed = nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask, is_causal=is_causal and attn_mask is None
        )
        return self.out_proj(mixed.transpose(1, 2).reshape(rows, lines, width)), None


def with_plain_attention(module: nn.Module) -> nn.Module:
    """The module with every ``MultiheadAttention`` written out, so that its graph shows what it does."""
    if isinstance(module, nn.MultiheadAttention):
        return SelfAttention(module)
    for name, child in module.named_children():
        if (other := with_plain_attention(child)) is not child:
            setattr(module, name, other)
    return module
