"""The first layers of a model on a table some of whose columns are embedded: each category a learned vector.

The owner shares such a column one-hot, so nobody sees which category a row has; its vector is a product with a secret
table. The other features go on beside the vectors, in the order of the columns.
"""

from __future__ import annotations

import numpy as np

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.data.schema import EMBEDDED, Schema
from uvcc_engine.model.definition.layer_list import model_of_layers
from uvcc_engine.model.layer_spec import LayerSpec
from uvcc_engine.model.layer_types.branches import CONCAT, Branches
from uvcc_engine.model.layer_types.embedding import Embedding
from uvcc_engine.model.layer_types.rearrange import strided
from uvcc_engine.model.layer_types.trees import trees_of
from uvcc_engine.model.model_spec import ModelSpec


def embedded_width(schema: Schema) -> int:
    """Features of a row behind these layers; those of the schema where none is embedded."""
    return schema.features + sum(c.dimension - len(c.values) for c in schema.used if c.kind == EMBEDDED)


def column_embeddings(schema: Schema) -> tuple[LayerSpec, ...]:
    """The layers from the schema's features to ``embedded_width``; none where no column is embedded."""
    stacks: list[tuple[LayerSpec, ...]] = []
    start = plain = 0  # features before `start` are placed, but for those from `plain` on
    total = schema.features
    for column in schema.used:
        if column.kind == EMBEDDED:
            stacks += _slice(plain, start, total)
            end = start + len(column.values)
            table = Embedding(len(column.values), 1, column.dimension, places=False)
            stacks.append((*(_slice(start, end, total)[0] if end - start < total else ()), table))
            plain = end
        start += column.width
    if not any(column.kind == EMBEDDED for column in schema.used):
        return ()
    stacks += _slice(plain, start, total)
    return stacks[0] if len(stacks) == 1 else (Branches(CONCAT, tuple(stacks)),)


def _slice(start: int, end: int, total: int) -> list[tuple[LayerSpec, ...]]:
    """The layer that takes the features from ``start`` to ``end``, if there are any."""
    if start == end:
        return []
    found = strided(np.arange(start, end), total, 1)
    assert found is not None  # neighbours are one stride
    return [(found,)]


def behind_embeddings(schema: Schema, model: ModelSpec, *, whole: bool) -> ModelSpec:
    """A model of the schema's features. ``whole``: ``model`` is one already, and must begin with the schema's layers;
    else it takes ``embedded_width`` features, and those layers are put before it.

    Raises ConfigError for a whole model that begins otherwise, and for trees, which ask features.
    """
    first = column_embeddings(schema)
    if not first:
        return model
    names = ", ".join(column.name for column in schema.used if column.kind == EMBEDDED)
    if trees_of(model) is not None:
        raise ConfigError(f"columns that are embedded ({names}), and trees, which ask bits", "give them kind: one-hot")
    if not whole:
        return model_of_layers([*first, *model.layers], schema.features, model.classes, model.positions)
    if model.layers[: len(first)] != first:
        what = f"the schema embeds {names}, and {model.name} does not begin with their tables"
        raise ConfigError(what, "write job.model as a list of layers or a module, or give the columns kind: one-hot")
    return model
