"""Folding many events of which nobody looks at the states between: what long readings are made of.

``state.reduce`` makes a new snapshot for every event, and copies for it what the event touches. Here the workers, their
curves, the roots and the log lie open while events of the four kinds come that nearly all of a journal are, and
are closed to a snapshot when it is asked for, or for an event that may touch them. Events of which that is known that
they do not are folded beside them. The state is the same, event by event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from uvcc_console.core import events as ev
from uvcc_console.core.folding import bad_records, reported_state
from uvcc_console.core.folding.measures import AT, measured
from uvcc_console.core.folding.reducing import LARGE, LOG_KEEP, changed
from uvcc_console.core.folding.state import reduce
from uvcc_console.core.series import Series
from uvcc_console.core.snapshot import EpochAgreement, LogEntry, Snapshot, WorkerView

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
        # of each worker: its curves, and those of them that were made here, which may grow in place
        self._own_curves: dict[str, tuple[dict[str, Series], dict[str, Series]]] = {}
        self._epochs: dict[int, tuple[dict[str, str], dict[str, Mapping[str, str]]]] | None = None
        self._agreed, self._everyone = s.agreed_epoch, reported_state.workers_of(s)
        self._log: list[LogEntry] | None = None
        self._beside = False  # whether something was folded beside what lies open
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
        elif not self._many and stands_apart(event, self._s):
            return self._fold_beside(event, seq)
        before = self.snapshot
        self._s = reduce(before, event, seq)
        self._open()
        return _added(before, self._s, event)

    @property
    def snapshot(self) -> Snapshot:
        """The state so far."""
        if self._beside or self.seq != self._s.seq:
            self._s = self._closed()
            self._open()
        return self._s

    def _closed(self) -> Snapshot:
        new: dict[str, Any] = {"seq": self.seq, "updated": self.updated}
        if self._workers is not None:
            new["workers"] = MappingProxyType(self._workers)
        if self._series is not None:
            self._series.update({coord: MappingProxyType(own) for coord, (own, _) in self._own_curves.items()})
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

    def _fold_beside(self, event: ev.Event, seq: int) -> tuple[LogEntry, ...]:
        """Fold an event that asks for nothing of what lies open; its lines go to the open log."""
        own = self._own_log()
        after = reduce(changed(self._s, log=()) if self._s.log else self._s, event, seq)
        new = after.log
        self._s = changed(after, log=()) if new else after
        self._append(own, new)
        self.seq, self._beside = seq, True
        if event.ts > self.updated:
            self.updated = event.ts
        return new

    def _own_log(self) -> list[LogEntry]:
        if self._log is None:
            self._log = list(self._s.log)
        return self._log

    def _append(self, own: list[LogEntry], new: tuple[LogEntry, ...]) -> None:
        own.extend(new)
        if len(own) > 4 * LOG_KEEP:
            del own[:-LOG_KEEP]

    def _own_workers(self) -> dict[str, WorkerView]:
        if self._workers is None:
            self._workers = dict(self._s.workers)
        return self._workers

    def _extend(self, coord: str, step: int, values: Mapping[str, float]) -> None:
        known = self._own_curves.get(coord)
        if known is None:
            if self._series is None:
                self._series = dict(self._s.series)
            known = self._own_curves[coord] = dict(self._series.get(coord, {})), {}
            self._series.setdefault(coord, known[0])  # its place among the others
        own, made = known
        x = float(step)
        for name, value in values.items():
            line = made.get(name)
            if line is None or not line.grow(x, value):
                own[name] = made[name] = own.get(name, _NONE).reaching(x, value)

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
        pairs[e.coord] = MappingProxyType(e.pairs.copy())
        if len(self._epochs) > reported_state.AGREEMENT_KEEP:
            del self._epochs[min(self._epochs)]
        if len(roots) == self._everyone and not reported_state.disagreement(EpochAgreement(e.epoch, roots, pairs)):
            self._agreed = max(self._agreed, e.epoch)
        return _NO_LINES

    def _lines(self, e: ev.LogLines) -> tuple[LogEntry, ...] | None:
        new = reported_state.entries_of(e, e.lines)
        self._append(self._own_log(), new)
        return new


_QUICK: Final[Mapping[type[ev.Event], Callable[[Folding, Any], tuple[LogEntry, ...] | None]]] = {
    ev.HeartbeatRead: Folding._heartbeat,
    ev.Metric: Folding._metric,
    ev.RootReported: Folding._root,
    ev.LogLines: Folding._lines,
}


APART: Final = frozenset(
    (
        ev.ActionDone,
        ev.CheckpointHome,
        ev.CostTick,
        ev.CursorMoved,
        ev.EngineEvent,
        ev.GateMeasured,
        ev.HaltAck,
        ev.Intent,
        ev.LinkChanged,
        ev.PodTelemetry,
        ev.ResultReported,
    )
)
"""Kinds whose reducers neither ask for workers, curves, roots or the log, nor change them but by a line of the log."""


def stands_apart(event: ev.Event, s: Snapshot) -> bool:
    """Whether an event can be folded beside workers, curves, roots and log that lie open; ``s`` as it was before."""
    if type(event) not in APART:
        return False
    if not isinstance(event, ev.EngineEvent):
        return True
    if event.event == "exit":  # says of what its worker ended
        return False
    return event.event != "plane_counters" or event.fields.get("coord") in s.workers  # of a known worker only


def _added(before: Snapshot, after: Snapshot, event: ev.Event) -> tuple[LogEntry, ...]:
    """The log lines that one event added."""
    if isinstance(event, ev.LogLines):
        return reported_state.entries_of(event, event.lines)
    return after.log[-1:] if after.log is not before.log else _NO_LINES
