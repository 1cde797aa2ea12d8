"""What every event is: a frozen record of a registered kind; how it is written down, and read back totally."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from types import MappingProxyType, NoneType, UnionType
from typing import Any, ClassVar, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from uvcc_engine.contract.parsing.untrusted import LATEST, WIDE, as_timestamp
from uvcc_engine.contract.text import clean

_REGISTRY: dict[str, type[Event]] = {}
_FORMER: Final = {"alert": {"remedy": "hint"}}  # fields of older journals, by kind, and what they are called now
_E = TypeVar("_E", bound="type[Event]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events. ``ts`` is the console's wall clock in seconds (0.0 = to be stamped by the journal)."""

    kind: ClassVar[str] = ""
    ts: float = 0.0


def event(kind: str) -> Any:
    """Class decorator: the events of this class are of ``kind``, a word that the journal keeps for ever."""

    def register(cls: _E) -> _E:
        cls.kind = kind
        _REGISTRY[kind] = cls
        return cls

    return register


@event("malformed")
@dataclass(frozen=True, slots=True, kw_only=True)
class LinesMalformed(Event):
    """Lines that could not be used: ``count`` of them from ``where`` (a pod, or ``journal``), with a ``sample`` now and
    then. Written where a pod's lines come in, and read in place of a journal row that cannot be an event
    (``journalled``; ``src`` is the row's kind then)."""

    where: str
    count: int = 1
    src: str = ""
    sample: str = ""
    journalled: bool = False


def to_json(event: Event) -> dict[str, Any]:
    """The event's fields without its kind."""
    cls: Any = type(event)
    return {name: getattr(event, name) for name in _fields_of(cls)}


@cache
def _fields_of(cls: type[Event]) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(cls) if f.name != "ts")


def from_json(kind: str, ts: object, data: object, *, harmless: bool = False) -> Event | None:
    """Read an event back; None for a kind this version does not know. Unknown fields are dropped. Never raises.

    Whatever is not of its field's type, or lacks a field, comes back as :class:`LinesMalformed`. Text is cleaned: a
    journal may be older than the care that is taken of what comes in; ``harmless``: no text in ``data`` needs that.
    """
    cls = _REGISTRY.get(kind)
    if cls is None:
        return None
    at = ts if type(ts) is float and 0.0 <= ts <= LATEST else as_timestamp(ts)
    if harmless and at is not None and type(data) is dict and (form := form_of(kind)) is not None and form.fits(data):
        return cls(ts=at, **data)
    if isinstance(data, Mapping) and (former := _FORMER.get(kind)):
        data = {former.get(str(name), name): value for name, value in data.items()}
    if at is None or not isinstance(data, Mapping):
        return _malformed(kind, at, data, "no object" if at is not None else "no time")
    wanted = checks(kind, harmless)
    try:
        fields = {name: wanted[name](value) for name, value in data.items() if name in wanted}
        return cls(ts=at, **fields)
    except (TypeError, ValueError, RecursionError) as e:
        return _malformed(kind, at, data, str(e))


def is_harmless(text: str) -> bool:
    """Whether no text within a JSON text needs to be cleaned. Most are so."""
    return len(text) <= _TEXT and "\\" not in text and text.isprintable()


def _malformed(kind: str, ts: float | None, data: object, why: str) -> LinesMalformed:
    pod = data.get("pod") if isinstance(data, Mapping) else None
    where = clean(pod, 32) if isinstance(pod, str) and pod else "journal"
    return LinesMalformed(ts=ts or 0.0, where=where, src=kind, sample=clean(why, 200), journalled=True)


def kinds() -> Mapping[str, type[Event]]:
    """Every kind of event that this version knows, by the word that the journal has for it."""
    return MappingProxyType(_REGISTRY)


FieldCheck = Callable[[Any], Any]
_TEXT: Final = 1 << 16


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"text wanted, got {type(value).__name__}")
    return value if value.isprintable() and len(value) <= _TEXT else clean(value, _TEXT)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -WIDE <= value <= WIDE:
        raise TypeError(f"whole number wanted, got {type(value).__name__}")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"number wanted, got {type(value).__name__}")
    if isinstance(value, int) and not -WIDE <= value <= WIDE:
        raise TypeError("a number too large")
    return float(value)


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"true or false wanted, got {type(value).__name__}")
    return value


def _any(value: Any) -> Any:
    """Any JSON value with its text cleaned."""
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, dict):
        return {_text(k): _any(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_any(v) for v in value]
    if isinstance(value, int) and not -WIDE <= value <= WIDE:
        return None  # nothing that counts so far, and too large for a float
    return value


def _list(inner: FieldCheck) -> FieldCheck:
    def check(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise TypeError(f"list wanted, got {type(value).__name__}")
        return [inner(v) for v in value]

    return check


def _texts(value: Any) -> list[str]:
    """A list of texts: log lines, which come by the hundred, mostly with nothing to clean."""
    if not isinstance(value, list):
        raise TypeError(f"list wanted, got {type(value).__name__}")
    joined = "".join(value)
    return value if joined.isprintable() and len(joined) <= _TEXT else [_text(v) for v in value]


def _object(inner: FieldCheck) -> FieldCheck:
    def check(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise TypeError(f"object wanted, got {type(value).__name__}")
        return {_text(k): inner(v) for k, v in value.items()}

    return check


def _own_object(value: Any) -> dict[str, Any]:
    """The operator's own words (a profile, an intent's arguments) stay as they were written."""
    if not isinstance(value, dict):
        raise TypeError(f"object wanted, got {type(value).__name__}")
    return value


def _or_none(inner: FieldCheck) -> FieldCheck:
    return lambda value: None if value is None else inner(value)


# ---- the same where no text needs to be cleaned


def _plain_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"text wanted, got {type(value).__name__}")
    return value


_AS_IS: Final = frozenset((str, float, bool, NoneType))


def _plain_any(value: Any) -> Any:
    """Any value, the very same where nothing in it has to be looked at."""
    kind = type(value)
    if kind in _AS_IS:
        return value
    if kind is dict:
        return _plain_record(value)
    if kind is list:
        for one in value:
            if type(one) is not float and _plain_any(one) is not one:
                return [_plain_any(v) for v in value]
        return value
    return None if kind is int and not -WIDE <= value <= WIDE else value


def _plain_record(value: Any) -> dict[str, Any]:
    """An object of any values: as it was read, copied only where something in it has to be looked at."""
    if not isinstance(value, dict):
        raise TypeError(f"object wanted, got {type(value).__name__}")
    for one in value.values():
        if type(one) not in _AS_IS and _plain_any(one) is not one:
            return {k: _plain_any(v) for k, v in value.items()}
    return value


def _plain_numbers(value: Any) -> dict[str, float]:
    """An object of numbers: as it was read where all of them have a fraction."""
    if not isinstance(value, dict):
        raise TypeError(f"object wanted, got {type(value).__name__}")
    for one in value.values():
        if type(one) is not float:
            return {k: _number(v) for k, v in value.items()}
    return value


def _plain_object(inner: FieldCheck) -> FieldCheck:
    def check(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise TypeError(f"object wanted, got {type(value).__name__}")
        for one in value.values():
            if inner(one) is not one:
                return {k: inner(v) for k, v in value.items()}
        return value

    return check


def _plain_list(inner: FieldCheck) -> FieldCheck:
    def check(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise TypeError(f"list wanted, got {type(value).__name__}")
        for one in value:
            if inner(one) is not one:
                return [inner(v) for v in value]
        return value

    return check


def _plain_object_of(wanted: Any, inner: FieldCheck) -> FieldCheck:
    found: dict[Any, FieldCheck] = {Any: _plain_record, float: _plain_numbers}
    return found.get(wanted) or _plain_object(inner)


_BY_TYPE: Final[dict[Any, FieldCheck]] = {str: _text, int: _whole, float: _number, bool: _truth, Any: _any}
_PLAIN: Final[dict[Any, FieldCheck]] = {**_BY_TYPE, str: _plain_text, Any: _plain_any}


def _check_of(wanted: Any, harmless: bool) -> FieldCheck:
    """What holds a value against a field's annotation."""
    if wanted in _BY_TYPE:
        return (_PLAIN if harmless else _BY_TYPE)[wanted]
    origin, args = get_origin(wanted), get_args(wanted)
    if origin is list and args[0] is str:
        return _texts
    if origin is list:
        inner = _check_of(args[0], harmless)
        return _plain_list(inner) if harmless else _list(inner)
    if origin is dict and args[0] is str:
        inner = _check_of(args[1], harmless)
        return _plain_object_of(args[1], inner) if harmless else _object(inner)
    if origin in (Union, UnionType) and len(args) == 2 and args[1] is NoneType:
        return _or_none(_check_of(args[0], harmless))
    raise TypeError(f"no check for {wanted}")  # an event's field of a new form: give it one


@cache
def checks(kind: str, harmless: bool = False) -> dict[str, FieldCheck]:
    """What holds each field of a kind against its annotation: returns the value cleaned, or raises TypeError."""
    cls = _REGISTRY[kind]
    hints = get_type_hints(cls)
    found = {f.name: _check_of(hints[f.name], harmless) for f in dataclasses.fields(cls) if f.name != "ts"}
    for name in ("profile", "args"):
        if name in found:
            found[name] = _own_object
    return found


# ---- a whole record at once, where it is as this version writes it

_TYPE_IS_ALL: Final = (_plain_text, _number, _truth, _own_object)


@dataclass(frozen=True, slots=True)
class _Form:
    """A record that has every field, each of exactly its type: what nearly every row of a journal is.

    It is told by its types in one comparison, and by ``deeper``: the checks that say more than the type does. Any other
    record, also one that an older version wrote with fewer fields, is read field by field.
    """

    values: Callable[[dict[str, Any]], tuple[Any, ...]]
    types: tuple[type, ...]
    deeper: tuple[tuple[str, FieldCheck], ...]

    def fits(self, data: dict[str, Any]) -> bool:
        """Whether the fields may be taken as they are."""
        try:
            if len(data) != len(self.types) or tuple(map(type, self.values(data))) != self.types:
                return False
            for name, check in self.deeper:
                value = data[name]
                if check(value) is not value:
                    return False
            return True
        except (KeyError, TypeError, RecursionError):
            return False


@cache
def form_of(kind: str) -> _Form | None:
    """None for a kind with fewer than two fields, or with one that may be of several types."""
    wanted, hints = checks(kind, harmless=True), get_type_hints(_REGISTRY[kind])
    types = tuple(get_origin(hints[name]) or hints[name] for name in wanted)
    if len(types) < 2 or any(found not in (str, int, float, bool, list, dict) for found in types):
        return None
    deeper = tuple((name, check) for name, check in wanted.items() if check not in _TYPE_IS_ALL)
    return _Form(itemgetter(*wanted), types, deeper)
