"""JSON objects into frozen dataclasses, strictly: a key holds what the annotation of its field says, or is refused.

One small helper for the whole engine instead of a library: it runs in forked workers and in helpers that have only the
standard library, pydantic alone takes longer to import (0.17 s) than a worker takes to start, and none of the libraries
names the nearest known key or refuses ``true`` for a number without as much code again.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

from uvcc_engine.contract.errors import ConfigError, UvccError
from uvcc_engine.contract.parsing.suggest import did_you_mean

T = TypeVar("T")
_NO: Final = object()
_WORDS: Final = {str: "text", Path: "a path", bool: "true or false", int: "a whole number", float: "a finite number"}


def read(cls: type[T], data: object, what: str, *, optional: Collection[str] = ()) -> T:
    """``data`` as a ``cls``, whose own checks follow. Fields without a default must be there, unless ``optional``.

    Annotations may be str, bool, int, float (finite), Path, bytes, None, Any, Literal, unions, lists, tuples, sets and
    mappings of these, and further dataclasses. Raises ConfigError naming ``what`` and the key that is unknown (with the
    nearest known one), missing or of another type.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{what} is {_shown(data)}", "it must be an object")
    known = _fields(typing.cast(Any, cls))
    for key in data:
        if key not in known:
            raise ConfigError(f"{what}: unknown key {str(key)[:80]!r}", did_you_mean(str(key), known, "remove it"))
    values: dict[str, Any] = {}
    for name, (hint, required) in known.items():
        if name in data:
            found = _value(data[name], hint, f"{what}.{name}")
            values[name] = _fitting(found, data[name], hint, f"{what}.{name}")
        elif required and name not in optional:
            needed = [n for n, (_, must) in known.items() if must]
            raise ConfigError(f"{what} lacks {name!r}", f"it needs {', '.join(needed)}")
    return cls(**values)


def exact(
    data: object,
    names: Sequence[str],
    what: str,
    error: Callable[[str, str], UvccError] = ConfigError,
) -> Mapping[str, Any]:
    """``data`` if it is an object with exactly these keys, as signed documents are. Raises ``error`` otherwise."""
    if not isinstance(data, dict):
        raise error(f"{what} is not an object", f"it needs the fields {', '.join(names)}")
    for key in data:
        if key not in names:
            raise error(f"{what} has the unknown field {str(key)[:40]!r}", did_you_mean(str(key), names, "remove it"))
    for name in names:
        if name not in data:
            raise error(f"{what} lacks the field {name!r}", f"it needs {', '.join(names)}")
    return data


@cache
def _fields(cls: Any) -> dict[str, tuple[Any, bool]]:
    """Name -> (annotation, whether it must be given)."""
    hints = typing.get_type_hints(cls)
    missing = dataclasses.MISSING
    return {
        f.name: (hints[f.name], f.default is missing and f.default_factory is missing)
        for f in dataclasses.fields(cls)
        if f.init
    }


def _fitting(found: Any, value: Any, hint: Any, what: str) -> Any:
    """What was read of ``value``, if it is such a value. Raises ConfigError."""
    if found is not _NO:
        return found
    near = ""
    if typing.get_origin(hint) is typing.Literal and isinstance(value, str):
        near = f"; {did_you_mean(value, [str(v) for v in typing.get_args(hint)])}"
    raise ConfigError(f"{what} is {_shown(value)}", f"it must be {_words(hint)}{near}")


def _value(value: Any, hint: Any, what: str) -> Any:
    """The value as its annotation wants it; ``_NO`` where it is not such a value."""
    if hint is Any:
        return value
    if hint is None or hint is type(None):
        return None if value is None else _NO
    if hint is bool or hint is str:
        return value if isinstance(value, hint) else _NO
    if hint is int:
        return value if isinstance(value, int) and not isinstance(value, bool) else _NO
    if hint is float:
        return _number(value)
    if hint is Path:
        return Path(value) if isinstance(value, str) and value else value if isinstance(value, Path) else _NO
    if hint is bytes:
        return value if isinstance(value, bytes) else _NO
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return value if isinstance(value, hint) else read(hint, value, what)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return value if any(type(value) is type(v) and value == v for v in inner) else _NO
    if origin in (typing.Union, types.UnionType):
        kinds = [kind for kind in inner if kind is not type(None)]
        if value is None and len(kinds) < len(inner):
            return None
        if len(kinds) == 1:
            return _value(value, kinds[0], what)
        return next((v for kind in kinds if (v := _value(value, kind, what)) is not _NO), _NO)
    return _collection(value, origin, inner, what)


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _NO
    try:
        number = float(value)
    except OverflowError:
        return _NO
    return number if math.isfinite(number) else _NO


def _collection(value: Any, origin: Any, inner: tuple[Any, ...], what: str) -> Any:
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            return _NO
        of_key, of_value = inner
        made = {}
        for key, inside in value.items():
            at = f"{what}.{str(key)[:40]}"
            named = _fitting(_value(key, of_key, what), key, of_key, at)
            made[named] = _fitting(_value(inside, of_value, at), inside, of_value, at)
        return made
    if origin in (list, tuple, Sequence, frozenset):
        if not isinstance(value, list | tuple):
            return _NO
        if origin is tuple and inner[-1] is not Ellipsis and len(value) != len(inner):
            return _NO
        kinds = inner if origin is tuple and inner[-1] is not Ellipsis else (inner[0],) * len(value)
        listed = []
        for n, (inside, kind) in enumerate(zip(value, kinds, strict=True)):
            listed.append(_fitting(_value(inside, kind, f"{what}[{n}]"), inside, kind, f"{what}[{n}]"))
        return listed if origin is list else frozenset(listed) if origin is frozenset else tuple(listed)
    raise TypeError(f"{what}: no reading of {origin}")  # an annotation of this program, not a value


def _words(hint: Any) -> str:
    """What an annotation says, for people."""
    if hint in _WORDS:
        return _WORDS[hint]
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(kind) for kind in inner)
    if origin in (list, tuple, Sequence, frozenset):
        return f"a list, each {_words(inner[0])}"
    if origin in (dict, Mapping):
        return f"an object, each value {_words(inner[1])}" if inner[1] is not Any else "an object"
    return "null" if hint is type(None) else "an object" if dataclasses.is_dataclass(hint) else "anything"


def _shown(value: object) -> str:
    """A value of unknown size for a message."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return repr(value)[:100]
