"""Layers and models as JSON: one object per layer, its ``type`` beside the fields of its spec.

    {"type": "dense", "inputs": 64, "outputs": 32}

What is read is checked in full: types and fields that are unknown are refused with the nearest known one, a field that
is missing or of another kind by its place, and a model whose layers do not fit together at the first that does not.
``canonical`` bytes of it are the same wherever they are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Final, get_args, get_origin

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.parsing.suggest import did_you_mean
from uvcc_engine.model.layer_spec import LayerSpec, field_kinds
from uvcc_engine.model.registry import layer_type, type_of

_DEPTH: Final = 16
_LARGEST: Final = 2**31 - 1


def layer_to_json(spec: LayerSpec) -> dict[str, Any]:
    """One layer, and those inside of it, as plain JSON values."""
    return {"type": type_of(spec).name} | _fields_to_json(spec)


def layer_from_json(found: object, where: str = "layer") -> LayerSpec:
    """What :func:`layer_to_json` gave. Raises ConfigError naming the place ``where`` it is wrong."""
    return _layer(found, where, 0)


def _layer(found: object, where: str, depth: int) -> LayerSpec:
    if not isinstance(found, Mapping):
        raise ConfigError(f"{where} is {_short(found)}", "it must be an object with a type")
    if depth > _DEPTH:
        raise ConfigError(f"{where} lies in more than {_DEPTH} blocks", "use fewer")
    name = found.get("type")
    if not isinstance(name, str):
        raise ConfigError(f"{where}.type is {_short(name)}", "it must be the name of a layer type")
    try:
        kind = layer_type(name)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.what}", error.hint) from None
    spec = _dataclass(kind.spec, {k: v for k, v in found.items() if k != "type"}, where, depth)
    assert isinstance(spec, LayerSpec)
    return spec


def _fields_to_json(value: Any) -> dict[str, Any]:
    return {field.name: _to_json(getattr(value, field.name)) for field in fields(value)}


def _to_json(value: Any) -> Any:
    if isinstance(value, LayerSpec):
        return layer_to_json(value)
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    return _fields_to_json(value) if is_dataclass(value) else value


def _dataclass(kind: type, found: Mapping[Any, Any], where: str, depth: int) -> Any:
    hints = field_kinds(kind)
    for key in found:
        if key not in hints:
            raise ConfigError(f"{where}: unknown key {_short(key)}", did_you_mean(str(key), hints))
    for field in fields(kind):
        if field.name not in found and field.default is MISSING:
            raise ConfigError(f"{where} lacks {field.name!r}", "every layer says all of its sizes")
    return kind(**{key: _value(hints[key], value, f"{where}.{key}", depth) for key, value in found.items()})


def _value(kind: Any, value: Any, where: str, depth: int) -> Any:
    if get_origin(kind) is tuple and isinstance(value, list | tuple):
        return tuple(_value(get_args(kind)[0], item, f"{where}[{i}]", depth) for i, item in enumerate(value))
    if isinstance(kind, type) and issubclass(kind, LayerSpec):
        made = _layer(value, where, depth + 1)
        if not isinstance(made, kind):
            raise ConfigError(f"{where} is of another type", f"it must be of the type {kind.__name__}")
        return made
    if is_dataclass(kind) and isinstance(kind, type) and isinstance(value, Mapping):
        return _dataclass(kind, value, where, depth)
    if kind is float and type(value) in (int, float) and abs(value) <= _LARGEST:
        return float(value)
    if kind is int and type(value) is int and 0 <= value <= _LARGEST:
        return value
    if kind in (bool, str) and type(value) is kind:
        return value
    name = getattr(kind, "__name__", str(kind))
    raise ConfigError(f"{where} is {_short(value)}", f"it must be of the kind {name}, numbers not negative")


def _short(value: object) -> str:
    return repr(value)[:80] if isinstance(value, str | int | float | bool | None) else f"a {type(value).__name__}"
