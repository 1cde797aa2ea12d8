"""What reducers share: a mapping with one entry more, and a line in the snapshot's log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

from uvcc_console.core import events as ev
from uvcc_console.core.snapshot import LogEntry, Snapshot
from uvcc_engine.contract.event_names import Area, area_of

LOG_KEEP = 2000
_OF_LINKS = (ev.LinkChanged, ev.FlightRead, ev.ForkDetected)
K = TypeVar("K")
V = TypeVar("V")


def put(mapping: Mapping[K, V], key: K, value: V) -> Mapping[K, V]:
    """The same with one entry new or replaced."""
    return MappingProxyType({**mapping, key: value})


def logged(s: Snapshot, e: ev.Event, level: str, source: str, text: str) -> Snapshot:
    """The snapshot with one more line in its log."""
    area = area_of(e.event) if isinstance(e, ev.EngineEvent) else Area.LINK if isinstance(e, _OF_LINKS) else None
    return replace(s, log=(*s.log[-(LOG_KEEP - 1) :], LogEntry(e.ts, level, source, text, str(area or ""))))
