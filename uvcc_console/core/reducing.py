"""What reducers share: a mapping with one entry more, and a line in the snapshot's log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any, TypeVar

from uvcc_console.core import events as ev
from uvcc_console.core.snapshot import LogEntry, Snapshot
from uvcc_engine.contract.run_files.event_names import Area, area_of

LOG_KEEP = 2000
_OF_LINKS = (ev.LinkChanged, ev.FlightRead, ev.ForkDetected)
K = TypeVar("K")
V = TypeVar("V")
R = TypeVar("R")


@cache
def _made_of(kind: type[Any]) -> tuple[Callable[[Any], tuple[Any, ...]], Mapping[str, int], tuple[Any, ...]]:
    """How a dataclass with slots is read, where each field stands, and what sets it."""
    names = [f.name for f in fields(kind)]
    return attrgetter(*names), {name: i for i, name in enumerate(names)}, tuple(getattr(kind, n).__set__ for n in names)


def changed(record: R, **new: Any) -> R:
    """``dataclasses.replace`` for a record with slots, several times as fast: folding a journal is little else.

    Raises KeyError for a field that it does not have.
    """
    kind: Any = type(record)
    read, places, setters = _made_of(kind)
    values = list(read(record))
    for name, value in new.items():
        values[places[name]] = value
    made: R = object.__new__(kind)
    for put_into, value in zip(setters, values, strict=True):
        put_into(made, value)
    return made


def put(mapping: Mapping[K, V], key: K, value: V) -> Mapping[K, V]:
    """The same with one entry new or replaced."""
    return MappingProxyType({**mapping, key: value})


def logged(s: Snapshot, e: ev.Event, level: str, source: str, text: str, detail: str = "") -> Snapshot:
    """The snapshot with one more line in its log."""
    area = area_of(e.event) if isinstance(e, ev.EngineEvent) else Area.LINK if isinstance(e, _OF_LINKS) else None
    return changed(s, log=(*s.log[-(LOG_KEEP - 1) :], LogEntry(e.ts, level, source, text, str(area or ""), detail)))
