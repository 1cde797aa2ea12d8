"""Folding many events of which nobody looks at the states between: what long readings are made of.

``core.state.reduce`` makes a new snapshot for every event, and copies for it what the event touches. Here the workers,
their curves, the roots and the log lie open while events of the four kinds come that nearly all of a journal are, and
are closed to a snapshot when it is asked for, or for an event of another kind. The state is the same, event by event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from uvcc_console.core import bad_records, reported_state
from uvcc_console.core import events as ev
from uvcc_console.core.measures import AT, measured
from uvcc_console.core.reducing import LARGE, LOG_KEEP, changed
from uvcc_console.core.series import Series
from uvcc_console.core.snapshot import EpochAgreement, LogEntry, Snapshot, WorkerView
from uvcc_console.core.state import reduce

_NO_LINES: Final[tuple[LogEntry, ...]] = ()
_NONE: Final = Series()


class Folding:
    """A state that events are folded into; ``snapshot`` closes it for whoever looks."""

    def __init__(self, start: Snapshot) -> None:
        self._s = start
        self._open()

    def _open(self) -> None:
        s = self._s
        self.seq, self.updated = s.seq, s.updated
        self._workers: dict[str, WorkerView] | None = None
        self._series: dict[str, Mapping[str, Series]] | None = None
        self._own_curves: dict[str, dict[str, Series]] = {}
        self._epochs: dict[int, tuple[dict[str, str], dict[str, Mapping[str, str]]]] | None = None
        self._agreed = s.agreed_epoch
        self._log: list[LogEntry] | None = None
        self._many = len(s.workers) >= LARGE  # kept in pages, of which a copy of all would cost more

    def add(self, event: ev.Event, seq: int) -> tuple[LogEntry, ...]:
        """Fold one event; the log lines that it added, all of them even where the state keeps only the newest."""
        quick = _QUICK.get(type(event)) if not self._many else None
        if quick is not None:
            try:
                lines = quick(self, event)
            except bad_records.ERRORS:
                lines = None  # nothing is changed yet: it is folded, or told to be unusable, as every event is
            if lines is not None:
                self.seq = seq
                if event.ts > self.updated:
                    self.updated = event.ts
                return lines
        before = self.snapshot
        self._s = reduce(before, event, seq)
        self._open()
        return _added(before, self._s, event)

    @property
    def snapshot(self) -> Snapshot:
        """The state so far."""
        if self.seq != self._s.seq:
            self._s = self._closed()
            self._open()
        return self._s

    def _closed(self) -> Snapshot:
        new: dict[str, Any] = {"seq": self.seq, "updated": self.updated}
        if self._workers is not None:
            new["workers"] = MappingProxyType(self._workers)
        if self._series is not None:
            self._series.update({coord: MappingProxyType(own) for coord, own in self._own_curves.items()})
            new["series"] = MappingProxyType(self._series)
        if self._epochs is not None:
            new["agreement"] = tuple(
                EpochAgreement(epoch, MappingProxyType(roots), MappingProxyType(pairs))
                for epoch, (roots, pairs) in sorted(self._epochs.items())
            )
            new["agreed_epoch"] = self._agreed
        if self._log is not None:
            new["log"] = tuple(self._log[-LOG_KEEP:])
        return changed(self._s, **new)

    def _own_workers(self) -> dict[str, WorkerView]:
        if self._workers is None:
            self._workers = dict(self._s.workers)
        return self._workers

    def _extend(self, coord: str, step: int, values: Mapping[str, float]) -> None:
        own = self._own_curves.get(coord)
        if own is None:
            if self._series is None:
                self._series = dict(self._s.series)
            own = self._own_curves[coord] = dict(self._series.get(coord, {}))
            self._series.setdefault(coord, own)  # its place among the others
        x = float(step)
        for name, value in values.items():
            own[name] = own.get(name, _NONE).reaching(x, value)

    def _heartbeat(self, e: ev.HeartbeatRead) -> tuple[LogEntry, ...] | None:
        workers = self._own_workers()
        old = workers.get(e.coord)
        if old is None:
            if len(workers) >= LARGE - 1:
                return None
            old = WorkerView(e.coord)
        w = reported_state.beaten(old, e)
        values = measured(old, e.record, w.step) | {AT: e.ts} if w.step > old.step >= 0 else None
        workers[e.coord] = w
        if values is not None:
            self._extend(e.coord, w.step, values)
        return _NO_LINES

    def _metric(self, e: ev.Metric) -> tuple[LogEntry, ...] | None:
        self._extend(e.coord, e.step, reported_state.named_values(e))
        return _NO_LINES

    def _root(self, e: ev.RootReported) -> tuple[LogEntry, ...] | None:
        workers = self._own_workers()
        old = workers.get(e.coord)
        if old is None:
            return None
        if self._epochs is None:
            self._epochs = {a.epoch: (dict(a.roots), dict(a.pairs)) for a in self._s.agreement}
        workers[e.coord] = changed(old, root_epoch=e.epoch, root=e.root)
        roots, pairs = self._epochs.setdefault(e.epoch, ({}, {}))
        roots[e.coord] = e.root
        pairs[e.coord] = MappingProxyType(dict(e.pairs))
        if len(self._epochs) > reported_state.AGREEMENT_KEEP:
            del self._epochs[min(self._epochs)]
        if reported_state.all_agree(self._s, EpochAgreement(e.epoch, roots, pairs)):
            self._agreed = max(self._agreed, e.epoch)
        return _NO_LINES

    def _lines(self, e: ev.LogLines) -> tuple[LogEntry, ...] | None:
        new = reported_state.entries_of(e, e.lines)
        if self._log is None:
            self._log = list(self._s.log)
        self._log.extend(new)
        if len(self._log) > 4 * LOG_KEEP:
            del self._log[:-LOG_KEEP]
        return new


_QUICK: Final[Mapping[type[ev.Event], Callable[[Folding, Any], tuple[LogEntry, ...] | None]]] = {
    ev.HeartbeatRead: Folding._heartbeat,
    ev.Metric: Folding._metric,
    ev.RootReported: Folding._root,
    ev.LogLines: Folding._lines,
}


def _added(before: Snapshot, after: Snapshot, event: ev.Event) -> tuple[LogEntry, ...]:
    """The log lines that one event added."""
    if isinstance(event, ev.LogLines):
        return reported_state.entries_of(event, event.lines)
    return after.log[-1:] if after.log is not before.log else _NO_LINES
