"""Which layers there are, how each is asked for and where it trains: from the registry, and by trying each of them.

``EXAMPLES`` has a model for every word of a list, ``modules`` one for every operation of a module; tests train them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from docs.make.words import HEAD, cell


@dataclass(frozen=True)
class Example:
    """A list of layers with one of a kind in it, for rows of so many features and classes at so many positions."""

    layers: list[Any]
    features: int
    classes: int = 3
    positions: int = 1


def _image(*layers: Any) -> Example:
    return Example([{"image": [1, 6, 6]}, *layers, "flatten", "linear"], 36)


def _table(*layers: Any) -> Example:
    return Example([{"linear": 6}, *layers, "linear"], 5)


def _lines(*layers: Any) -> Example:
    return Example([{"lines": 3}, {"linear": 4}, *layers, "flatten", "linear"], 12)


_BESIDE: Final = {"relu": "relu", "tanh": "tanh", "rearrange": "transpose"}
"""Types that stand in the examples of other operations, too, with their own operation."""
EXAMPLES: Final[dict[str, Example]] = {
    "linear": _table({"linear": 4}),
    "relu": _table("relu"),
    "leaky-relu": _table({"leaky-relu": 0.125}),
    "gelu": _table("gelu"),
    "silu": _table("silu"),
    "sigmoid": _table("sigmoid"),
    "tanh": _table("tanh"),
    "softmax": _table("softmax"),
    "dropout": _table({"dropout": 0.1}),
    "layer-norm": _table("layer-norm"),
    "rms-norm": _table("rms-norm"),
    "batch-norm": _table("batch-norm"),
    "image": _image({"conv": 2}),
    "conv": _image({"conv": {"channels": 2, "padding": 1}}),
    "max-pool": _image({"conv": 2}, {"max-pool": 2}),
    "avg-pool": _image({"conv": 2}, {"avg-pool": 2}),
    "adaptive-avg-pool": _image({"conv": 2}, {"adaptive-avg-pool": 2}),
    "patches": _image({"patches": 3}, {"linear": 2}),
    "conv1d": Example([{"image": [2, 1, 6]}, {"conv1d": 3}, "relu", "flatten", "linear"], 12),
    "max-pool1d": Example([{"image": [2, 1, 6]}, {"conv1d": 3}, {"max-pool1d": 2}, "flatten", "linear"], 12),
    "avg-pool1d": Example([{"image": [2, 1, 6]}, {"conv1d": 3}, {"avg-pool1d": 2}, "flatten", "linear"], 12),
    "flatten": _lines(),
    "lines": _lines(),
    "mean": Example([{"lines": 3}, {"linear": 4}, "mean", "linear"], 12),
    "max": Example([{"lines": 3}, {"linear": 4}, "max", "linear"], 12),
    "places": _lines("places"),
    "attention": _lines({"attention": {"heads": 2, "causal": True, "kv-heads": 1, "rotary": True}}),
    "embedding": Example([{"embedding": {"vocabulary": 5, "width": 4}}, "layer-norm", "linear"], 20, 5, 4),
    "residual": _table({"residual": [{"linear": 6}, "relu"]}),
    "tied": Example([{"tied": [{"embedding": {"vocabulary": 5, "width": 4}}, "layer-norm"]}], 20, 5, 4),
    "sum": _table({"sum": [[{"linear": 4}], [{"linear": 4}, "relu"]]}),
    "product": _table({"product": [[{"linear": 4}, "silu"], [{"linear": 4}]]}),
    "concat": _table({"concat": [[], [{"linear": 4}, "relu"]]}),
    "trees": Example([{"trees": {"count": 2, "depth": 1}}], 6, 1),
    "kmeans": Example([{"kmeans": 2}], 5, 0),
}
"""By word; every word of a list has one."""
AROUND_A_BASE: Final = ("adapted", "public", "started")
"""Types that no word asks for: a job around a public base is made of them."""
_ABOUT: Final[dict[str, str]] = {
    "adapted": "a public dense layer with a secret adapter of low rank (`job.adapters`)",
    "attention": "multi-head and grouped, causal or open, rotary",
    "batch-norm": "statistics of the batch while it trains",
    "branches": "added, multiplied or side by side",
    "chain": "one of several branches",
    "dense": "",
    "dropout": "numbers left out while a model trains, by a public mask of the job's seed",
    "embedding": "secret letters, learned places",
    "places": "a learned vector for every line",
    "pool": "windows that do not overlap",
    "prefix": "learned lines before the others: a class token",
    "public": "a layer whose weight is a public tensor of `job.base`",
    "started": "a layer that starts from a tensor of `job.base` and is trained",
    "rearrange": "reshape, transpose, slice, windows: no message",
    "reduce": "mean or maximum of a line",
    "residual": "x + layers(x)",
    "tied": "layers behind an embedding, then the product with its own table: one weight, used twice",
    "kmeans": "centroids that move to the mean of their rows; they stand alone, without a target or a backward pass",
    "trees": "boosted trees over bits, grown one a step; they stand alone, and have no backward pass",
}


@lru_cache(maxsize=1)
def modules() -> dict[str, tuple[Callable[[], Any], tuple[int, ...], int]]:
    """By operation of a module: what makes a module with it, the shape of a row, and its letters (0: numbers)."""
    import torch
    from torch import nn
    from torch.nn import functional as fn

    class Of(nn.Module):
        """A linear layer and one operation."""

        def __init__(self, act: Callable[..., Any], *inner: Any, width: int = 6) -> None:
            super().__init__()
            self.act, self.first, self.inner = act, nn.Linear(width, width), nn.ModuleList(inner)

        def forward(self, x: Any) -> Any:
            return self.act(self.first(x), *self.inner)

    class Letters(nn.Module):
        """An embedding."""

        vocabulary = 5

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 4)

        def forward(self, x: Any) -> Any:
            return self.table(x)

    def plain(act: Callable[..., Any], *inner: Any) -> tuple[Callable[[], Any], tuple[int, ...], int]:
        return lambda: Of(act, *inner), (6,), 0

    def on(shape: tuple[int, ...], act: Callable[..., Any], *inner: Any) -> Any:
        return lambda: Of(act, *inner, width=shape[-1]), shape, 0

    def attend(x: Any) -> Any:
        heads = x.view(-1, 4, 2, 3).transpose(1, 2)
        return fn.scaled_dot_product_attention(heads, heads, heads)

    def written(x: Any) -> Any:
        return torch.softmax(x @ x.transpose(1, 2) / 6**0.5, -1) @ x

    return {
        "linear": plain(lambda x: x),
        "relu": plain(torch.relu),
        "leaky_relu": plain(fn.leaky_relu),
        "gelu": plain(fn.gelu),
        "silu": plain(fn.silu),
        "sigmoid": plain(torch.sigmoid),
        "tanh": plain(torch.tanh),
        "dropout": plain(lambda x: fn.dropout(x, 0.25)),
        "softmax": plain(lambda x: torch.relu(torch.softmax(x, -1))),
        "layer_norm": plain(lambda x, norm: norm(x), nn.LayerNorm(6)),
        "rms_norm": plain(lambda x, norm: norm(x), nn.RMSNorm(6)),
        "batch_norm": plain(lambda x, norm: norm(x), nn.BatchNorm1d(6)),
        "embedding": (Letters, (4,), 5),
        "conv1d": on((2, 6), lambda x, conv: conv(x), nn.Conv1d(2, 3, 3)),
        "conv2d": on((1, 6, 6), lambda x, conv: conv(x), nn.Conv2d(1, 2, 3)),
        "max_pool1d": on((2, 6), lambda x: fn.max_pool1d(x, 2)),
        "avg_pool1d": on((2, 6), lambda x: fn.avg_pool1d(x, 3, 1)),
        "adaptive_avg_pool1d": on((2, 6), lambda x: fn.adaptive_avg_pool1d(x, 2)),
        "max_pool2d": on((1, 6, 6), lambda x: fn.max_pool2d(x, 2)),
        "avg_pool2d": on((1, 6, 6), lambda x: fn.avg_pool2d(x, 2)),
        "adaptive_avg_pool2d": on((1, 6, 6), lambda x: fn.adaptive_avg_pool2d(x, 1)),
        "mean": on((4, 6), lambda x: x.mean(1)),
        "amax": on((4, 6), lambda x: x.amax(1)),
        "scaled_dot_product_attention": on((4, 6), attend),
        "matmul": on((4, 6), written),
        "bmm": on((4, 6), lambda x: torch.bmm(torch.softmax(torch.bmm(x, x.mT) * 6**-0.5, -1), x)),
        "add": plain(lambda x: torch.relu(x) + torch.tanh(x)),
        "sub": plain(lambda x: x - 0.5),
        "rsub": plain(lambda x: 1.0 - x),
        "mul": plain(lambda x: torch.relu(x) * torch.tanh(x)),
        "div": plain(lambda x: x / 8.0),
        "neg": plain(lambda x: -x),
        "pow": plain(lambda x: x**2),
        "cat": plain(lambda x: torch.cat([torch.relu(x), x], 1)),
        "transpose": on((4, 6), lambda x: torch.relu(x.transpose(1, 2))),
    }


def layers_of(make: Callable[[], Any], shape: tuple[int, ...]) -> list[Any]:
    """The layers that a module's operations become."""
    from uvcc_engine.model.definition.torch_module import layers_of_module

    return layers_of_module(make(), shape)[0]


def flat(specs: Iterable[Any]) -> list[Any]:
    """All layers, blocks and those inside of them."""
    found: list[Any] = []
    for spec in specs:
        found += [spec, *flat(spec.inner)]
    return found


def names(specs: Iterable[Any]) -> set[str]:
    """The types of all layers, those inside of blocks with them."""
    from uvcc_engine.model.registry import type_of

    return {type_of(spec).name for spec in flat(specs)}


def model_of(word: str) -> Any:
    """The model of a word's example."""
    from uvcc_engine.model.definition.layer_list import model_of_list

    case = EXAMPLES[word]
    return model_of_list(case.layers, case.features, case.classes, case.positions)


def split_models() -> list[Any]:
    """Models in which layers that want rows are fed rows."""
    from uvcc_engine.model.definition.specs import ModelSpec, find_model
    from uvcc_engine.model.layer_types.affine import Affine
    from uvcc_engine.model.layer_types.dense import Dense
    from uvcc_engine.model.layer_types.reduce import Softmax
    from uvcc_engine.model.layer_types.rms_norm import RmsNorm

    layers = (Dense(5, 8), Affine(8, 0.5, 0.25), Dense(8, 6), RmsNorm(6), Softmax(6), Dense(6, 3))
    return [find_model("gpt-tiny"), ModelSpec("split", layers, 5, 3, frac_bits=14)]


def fits(model: Any, tensor: int) -> bool:
    """Whether a model can be split over so many tensor ranks, on several workers of a party."""
    from uvcc_engine.contract.errors import ConfigError
    from uvcc_engine.sharding.partition import place_layers

    try:
        place_layers(model, tensor)
    except ConfigError:
        return False
    return True


def page() -> str:
    """The page."""
    from uvcc_engine.model.definition.list_words import WORDS
    from uvcc_engine.model.registry import layer_type, layer_types
    from uvcc_engine.sharding.validation import PROVED_LAYERS

    plain = names(model_of("linear").layers)
    by_word = {word: names(model_of(word).layers) for word in WORDS}
    by_module = {name: names(layers_of(make, shape)) for name, (make, shape, _) in modules().items()}
    own = {name: found - (plain if name != "linear" else set()) for name, found in by_module.items()}
    split = set().union(*(names(model.layers) for model in split_models() if fits(model, 2)))
    lines = [
        "# Layers",
        "",
        HEAD,
        "",
        "What a model may be made of. A layer is asked for by a word of `job.model`'s list, or by an",
        "operation of a `torch.nn.Module`; every one has a forward and a backward pass on shares, a plaintext",
        "twin, and goes on bit for bit from a checkpoint. The tests train each: two steps beside the twin, a",
        "step from the state that was kept, and over replicas, stages and tensor ranks where this page says",
        "so. Truncations round by masks that only the parties have, so the twin is met within some units of",
        "2^-16; [simulated parties](../tutorials/notebook.md) with a run's keys give its numbers to the last",
        "bit. Nothing but those masks makes fleets differ. Where all of them are zero, plain integers without",
        "shares or messages give the very bits of two steps: of every layer here, every objective, optimiser",
        "and way to standardise, and of an MLP, a residual network, a sequence model, a vision transformer and",
        "a GPT over replicas, stages, microbatches and tensor ranks. A product is then the exact integer,",
        "rounded down once; a public factor has 12 significant bits (16 without a secret one), comparisons,",
        "choices and maxima are exact, and an exponential rounds the powers of two summands, so its last bit",
        "follows from how its argument is shared. Masks lift a truncation by one unit or by none, and move an",
        "exponential by one at most: two steps of the lists of this page end within 64 units of the plain",
        "integers. How far a longer training drifts depends on the model. A `batch-norm` takes the statistics",
        "of each microbatch of each replica, so its bits are those of that many parts of a batch; where",
        "products are proved, each worker's are rounded by themselves, for every layer. (One worker a party",
        "begins a softmax before its inputs are rounded, in fewer rounds, so with cross-entropy it is some",
        "units from what several are.)",
        "",
        "At a corner it is PyTorch's rule: the slope of a ReLU at zero is 0 (of `leaky-relu`, its slope below",
        "zero), also of what a rounding has lifted from zero by a unit, and of equal maxima the first takes the",
        "gradient (`torch.amax` would divide it). What several roundings, a normalisation or a smooth activation",
        "leave of a zero may lie on either side of it. So may the difference of two numbers that are nearer to each",
        "other than their roundings, or alike after some, as those of a letter that stands twice: which of them is",
        "the maximum, and which weight is moved, then differs from the twin, from one fleet to another and from one",
        "GPU to another. Where gradients are zero in clear but for rounding, like those of a bias in front of",
        "`batch-norm`, Adam moves weights by the rounding alone.",
        "",
        "SGD's rate over the batch has 10 significant bits, and fewer where twice `frac_bits` and the batch's bits",
        "come to more than 50, to leave room for the gradient: with 24 and batches of 128 it may be off by a",
        "twentieth, with 1,024 by a fifth.",
        "",
        "Normalisations add 2^-10 to the variance, where PyTorch adds 1e-5, which is less than a unit: features with",
        "a deviation far below 0.03 come out smaller than there. The running variance of `batch-norm` follows the",
        "batch's own, which is divided by its numbers, by a tenth of the way a step (PyTorch's: by one less).",
        "",
        "| layer | | words | operations | several workers | tensor ranks | rounds | proved |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in layer_types():
        kind = layer_type(name)
        words = [word for word, found in by_word.items() if name in found and _about(word, name)]
        operations = [op for op, found in own.items() if name in found and _BESIDE.get(name, op) == op]
        tensor = any(fits(model_of(word), 2) for word in words) or name in split
        split = "yes" if tensor else "one rank" if kind.tensor_parallel is not None else "no"
        lines.append(
            f"| `{name}` | {cell(_ABOUT.get(name, ''))} | {_list(words)} | {_list(operations)} |"
            f" {'yes' if kind.tensor_parallel is not None else 'no'} | {split} | {kind.rounds or ''} |"
            f" {'yes' if kind.spec in PROVED_LAYERS else ''} |"
        )
    lines += [
        "",
        "*Several workers*: replicas, pipeline stages and microbatches, of trees and k-means replicas alone;",
        "batch normalisation then takes the statistics of each microbatch by itself.",
        "*Tensor ranks*: batch normalisation behind columns that",
        "are channels each, or fed rows; other normalisations and",
        "softmax where rows are split, as behind a second product, attention where its heads are; `uvcc plan`",
        "refuses the others by name. *Rounds*: of a layer that stands alone, forward and backward together.",
        "*Proved*: by `verify: products` and `verify: proofs`.",
        "",
        "What only moves numbers (`reshape`, `transpose`, `permute`, slices, `split`, `chunk`, `expand`,",
        "`unfold`, ...) becomes `rearrange`, or nothing. `torch.nn.MultiheadAttention` and torch's encoder",
        "layers are written out. Dropout leaves numbers out while a model trains, by a public mask of the job's",
        "seed; that of whole channels, and of attention's weights, is left out itself. A parameter",
        "that is added becomes `places`, one that is put before the lines `prefix`. A module that takes",
        "letters says so: `vocabulary = 65` beside `input_shape = (positions,)`, and the data has them",
        "one-hot.",
        "",
        "Weights start as the job's seed says. An embedding's table may be the last product's, too (`tied`);",
        "other second uses of one parameter, recurrence,",
        "attention between two sequences, and masks other than causal are refused, with the line of the file.",
    ]
    return "\n".join(lines) + "\n"


def _about(word: str, name: str) -> bool:
    """Whether a word is about a layer, and not only stands beside it in its example."""
    beside = {"dense", "rearrange", "conv2d", "conv1d", "relu", "silu", "layer-norm"}
    special = {
        "linear": "dense",
        "relu": "relu",
        "silu": "silu",
        "layer-norm": "layer-norm",
        "conv": "conv2d",
        "conv1d": "conv1d",
        "lines": "rearrange",
        "patches": "rearrange",
        "flatten": "rearrange",
    }
    return special.get(word) == name or (name not in beside and word not in special)


def _list(found: Iterable[str]) -> str:
    return ", ".join(f"`{one}`" for one in found)
