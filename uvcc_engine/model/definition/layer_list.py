"""Models as people write them, ``[{linear: 16}, relu, {linear: 2}]``, and the canonical JSON that a policy holds.

Shapes follow from the data: the first layer takes its features, the last ``linear`` without a width gives its classes.

    {"classes": 2, "features": 30, "layers": [{"inputs": 30, "outputs": 16, "type": "dense"}, ...]}

That JSON says all sizes, so it means the same to every party whatever this file learns later. A model that answers at
several places of a row, as a language model does, says how many: ``"positions": 128``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.model.definition.list_words import MOST_LAYERS, MOST_NUMBERS, At, stack
from uvcc_engine.model.definition.spec_json import layer_from_json, layer_to_json
from uvcc_engine.model.layer_spec import LayerSpec
from uvcc_engine.model.layer_types.affine import Affine
from uvcc_engine.model.layer_types.branches import Branches, Chain
from uvcc_engine.model.layer_types.conv2d import Conv1d, Conv2d
from uvcc_engine.model.layer_types.dense import Dense
from uvcc_engine.model.layer_types.dropout import Dropout, numbered
from uvcc_engine.model.layer_types.leaky_relu import LeakyRelu
from uvcc_engine.model.layer_types.places import LinePlaces
from uvcc_engine.model.layer_types.pool import Pool
from uvcc_engine.model.layer_types.rearrange import Rearrange
from uvcc_engine.model.layer_types.reduce import Reduce
from uvcc_engine.model.layer_types.relu import Relu
from uvcc_engine.model.layer_types.residual import Residual
from uvcc_engine.model.layer_types.tied import Tied
from uvcc_engine.model.model_spec import ModelSpec, check_model

NO_TARGET: Final = "write target: {column: NAME} into the schema; k-means alone learns none: job.model: [{kmeans: 3}]"
_FINE: Final = 14
"""Fractional bits that layers with a division or a transcendental function need."""
_PLAIN: Final = (
    *(Dense, Relu, LeakyRelu, Conv2d, Conv1d, Pool, Reduce, Rearrange, LinePlaces, Affine, Dropout),
    *(Residual, Branches, Chain, Tied),
)


def is_module_file(text: str) -> bool:
    """Whether a model's name is that of a class in a file: ``file.py:Model``."""
    return bool(re.fullmatch(r"[^{\[].*\.py:[A-Za-z_]\w*", text))


def model_of_list(layers: object, features: int, classes: int, positions: int = 1) -> ModelSpec:
    """A model from the layers of a profile, for data of so many features, and classes at each of ``positions``.

    Raises ConfigError naming the layer's place in the list, what is wrong, and the nearest layer that there is.
    """
    if not isinstance(layers, list) or not layers:
        raise ConfigError("job.model is no list of layers", "write it like [{linear: 16}, relu, linear]")
    if not classes and layers != [one for one in layers if _word(one) == "kmeans"]:
        raise ConfigError("the schema names no target, and job.model learns one", NO_TARGET)
    made, here = stack(layers, At(features, classes, None, "job.model", True))
    return model_of_layers(numbered(made), features, classes or here.features, positions)


def check_labels(model: ModelSpec, labels: int) -> None:
    """Refuse (ConfigError) a model that learns a target where the rows have none (``labels`` is 0), or the reverse."""
    if bool(labels) == model.unsupervised:
        what = f"the rows have a target, and {model.name} learns none"
        raise ConfigError(
            what if labels else f"the schema names no target, and {model.name} learns one",
            "leave target out of the schema, and give that column kind: drop" if labels else NO_TARGET,
        )


def _word(layer: object) -> object:
    return next(iter(layer), None) if isinstance(layer, Mapping) else layer


def model_to_json(model: ModelSpec) -> dict[str, Any]:
    """A model as plain JSON values, with nothing left to guess."""
    layers = [layer_to_json(spec) for spec in model.layers]
    places = {"positions": model.positions} if model.positions > 1 else {}
    return {"classes": model.classes, "features": model.features, "layers": layers} | places


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
    if not isinstance(found, Mapping) or set(found) - {"positions"} != {"classes", "features", "layers"}:
        raise ConfigError("job.model is no model", "it has classes, features and layers, and may have positions")
    features, classes, positions = found["features"], found["classes"], found.get("positions", 1)
    if not all(type(size) is int and 0 < size <= MOST_NUMBERS for size in (features, classes, positions)):
        raise ConfigError("job.model: features and classes are no sizes", "give whole numbers of at least 1")
    if positions == 1 and "positions" in found:
        raise ConfigError("job.model: positions is 1", "leave it out: a model is written in one way")
    layers = found["layers"]
    if not isinstance(layers, list) or not 0 < len(layers) <= MOST_LAYERS:
        raise ConfigError("job.model.layers is no list of layers", f"give 1 to {MOST_LAYERS}")
    specs = [layer_from_json(layer, f"job.model.layers[{i}]") for i, layer in enumerate(layers)]
    return model_of_layers(specs, features, classes, positions)


def model_of_layers(layers: Sequence[LayerSpec], features: int, classes: int, positions: int = 1) -> ModelSpec:
    """A model from specs. Raises ConfigError if they do not fit together, or fit no pod."""
    specs = tuple(layers)
    return _checked(ModelSpec(_name(specs), specs, features, classes, positions, frac_bits=_bits(specs)))


def _checked(model: ModelSpec) -> ModelSpec:
    check_model(model)
    numbers = sum(spec.weight_shape[0] * spec.weight_shape[1] for spec in model.weights)
    if numbers > MOST_NUMBERS:
        raise ConfigError(f"{model.name} has {numbers} weights, at most {MOST_NUMBERS} fit", "make its layers narrower")
    return model


def _name(layers: Sequence[LayerSpec]) -> str:
    return f"job.model ({len(layers)} layers)"


def _bits(layers: Sequence[LayerSpec]) -> int:
    return 8 if all(isinstance(s, _PLAIN) and _bits(s.inner) == 8 for s in layers) else _FINE
