"""What a plan asks the owner's program about a model around a public base: its shapes, and what of it is secret."""

from __future__ import annotations

import argparse
import json
from typing import Any

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.data.data_files import read_arrays
from uvcc_engine.data.schema import load_schema
from uvcc_engine.model.definition.base_model import NEW, Adapters, BaseModel, adapted, read_base
from uvcc_engine.model.definition.layer_list import model_to_json
from uvcc_engine.model.definition.specs import ModelSpec


def around_base(args: argparse.Namespace, size: tuple[int, int, int]) -> dict[str, Any]:
    """The model around a public base, and the base's hash. ``size``: features, classes and positions of the data."""
    features, classes, positions = size
    base = _held_base(args)
    if base.letters and args.schema is not None and load_schema(args.schema).values != base.letters:
        what = "the schema's letters are not those that the base learned"
        raise ConfigError(what, "take the schema that uvcc-engine base wrote beside the base")
    model = _adapted(base, args, classes)
    if (model.features, model.classes, model.positions) != (features, classes, positions):
        raise ConfigError(
            f"the data has {features} features, {classes} classes and {positions} positions, the base"
            f" {model.features}, {model.classes} and {model.positions}",
            "head: new for other classes; features and positions must be the base's",
        )
    return _beside_base(model, base)


def alone(args: argparse.Namespace) -> dict[str, Any]:
    """The model around a public base whose owners share their rows later, from their own machines: of the base's own
    features, classes and positions."""
    base = _held_base(args)
    if Adapters.from_json(json.loads(args.adapters)).head == NEW:
        raise ConfigError(
            "a new head, and no data that say its classes", "head: train goes on with the classes of the base"
        )
    return _beside_base(_adapted(base, args, 0), base)


def answers(args: argparse.Namespace) -> dict[str, Any]:
    """The model that answers queries around a public base: the one that was trained with the same ``--adapters``. A new
    head has as many classes as the last of what was trained has columns."""
    base = _held_base(args)
    trained = {} if args.weights is None else read_arrays(args.weights)
    last = trained.get(f"weight.{len(trained) - 1}")
    asked = Adapters.from_json(json.loads(args.adapters))
    if asked.head == NEW and (last is None or last.ndim != 2):
        raise ConfigError(
            "a new head, and no trained weights that say its classes",
            "give job.weights, the adapters.safetensors that uvcc owner open wrote, or name job.model",
        )
    model = _adapted(base, args, 0 if last is None or last.ndim != 2 else last.shape[1])
    shapes = {f"weight.{i}": w.weight_shape for i, w in enumerate(model.weights)}
    if args.weights is not None and {name: one.shape for name, one in trained.items()} != shapes:
        raise ConfigError(
            f"{args.weights.name} holds other weights than the base with these adapters has",
            "give adapters.safetensors of uvcc owner open, and the job.adapters of its training; merged weights are an"
            " ordinary model's, without a base",
        )
    return _beside_base(model, base)


def _beside_base(model: ModelSpec, base: BaseModel) -> dict[str, Any]:
    """What a plan is told of a model around a public base."""
    notes = [f"{len(model.public_layers)} of its layers compute with public weights of {base.sha256[:12]}"]
    notes += [f"weight {i} is {w.weight_shape[0]} x {w.weight_shape[1]} secret" for i, w in enumerate(model.weights)]
    return {"model": model_to_json(model), "notes": notes, "base": base.sha256}


def _held_base(args: argparse.Namespace) -> BaseModel:
    """The public base, held to the hash that the profile names."""
    base = read_base(args.base)
    if args.base_sha256 not in ("", base.sha256):
        what = f"{args.base.name} has the hash {base.sha256}, job.base_sha256 is {args.base_sha256}"
        raise ConfigError(what, "give the file that the profile means")
    return base


def _adapted(base: BaseModel, args: argparse.Namespace, classes: int) -> ModelSpec:
    return adapted(base, Adapters.from_json(json.loads(args.adapters)), classes)
