"""What reducers share: a mapping with one entry more, and a line in the snapshot's log."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from uvcc_console.core import events as ev
from uvcc_console.core.paged import PagedMapping
from uvcc_console.core.snapshot import LogEntry, Snapshot
from uvcc_engine.contract.run_files.event_names import Area, area_of

LOG_KEEP = 2000
LARGE = 256
"""Entries from which a mapping is kept in pages: where copying it costs more than copying a page and asking for it."""
_OF_LINKS = (ev.LinkChanged, ev.FlightRead, ev.ForkDetected)
_bare, _set = object.__new__, object.__setattr__
K = TypeVar("K")
V = TypeVar("V")
R = TypeVar("R")


def changed(record: R, **new: Any) -> R:
    """``dataclasses.replace``, many times as fast: folding a journal is little else.

    Meant for the large records, which have no slots: all their fields are copied at once. Raises KeyError for a field
    that it does not have.
    """
    known = record.__dict__
    fields = known | new
    if len(fields) != len(known):
        raise KeyError(f"{type(record).__name__} has no {', '.join(new.keys() - known.keys())}")
    made: R = _bare(type(record))
    _set(made, "__dict__", fields)
    return made


def put(mapping: Mapping[K, V], key: K, value: V) -> Mapping[K, V]:
    """The same with one entry new or replaced."""
    if type(mapping) is MappingProxyType and len(mapping) < LARGE:
        return MappingProxyType(mapping | {key: value})
    return put_all(mapping, {key: value})


def put_all(mapping: Mapping[K, V], new: dict[K, V]) -> Mapping[K, V]:
    """The same with these entries new or replaced: by a proxy's own union, which copies without asking key by key.

    From ``LARGE`` entries on it is kept in pages, so that one entry does not cost a copy of all.
    """
    if len(mapping) >= LARGE:
        paged = mapping if isinstance(mapping, PagedMapping) else PagedMapping(mapping)
        for key, value in new.items():
            paged = paged.with_entry(key, value)
        return paged
    proxy = mapping if isinstance(mapping, MappingProxyType) else MappingProxyType(dict(mapping))
    return MappingProxyType(proxy | new)


def logged(s: Snapshot, e: ev.Event, level: str, source: str, text: str, detail: str = "") -> Snapshot:
    """The snapshot with one more line in its log."""
    area = area_of(e.event) if isinstance(e, ev.EngineEvent) else Area.LINK if isinstance(e, _OF_LINKS) else None
    entry = LogEntry(e.ts, level, source, text, str(area or ""), detail)
    return changed(s, log=s.log[-(LOG_KEEP - 1) :] + (entry,))  # noqa: RUF005 - two copies of two thousand, not three
