"""Agent messages -> journal events. One decoder per pod and engine run; keeps the cursors it has turned into events.

Whatever a pod's files hold, nothing here raises: a line that cannot be used is counted and the stream goes on behind
it. A pod speaks for its own workers, under the names that the run contract knows, and only so many of them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from uvcc_console.core import events as ev
from uvcc_console.core.events import reserved
from uvcc_engine.contract.agent_protocol.agent_messages import (
    AgentMessage,
    Dropped,
    Lines,
    Rewind,
    Telemetry,
    WorkerChange,
)
from uvcc_engine.contract.parsing.untrusted import STEPS, as_int, as_object, bounded_copy, scalar_text
from uvcc_engine.contract.run_files import files, records
from uvcc_engine.contract.run_files.narrate import repeats_event
from uvcc_engine.contract.run_files.records import Malformed
from uvcc_engine.contract.text import clean, counted

FACTS = ("parameters", "seq_len", "precision", "save_every", "steps", "batch_size", "accumulate")
TELEMETRY_EVERY_S = 15.0
COLUMNS = ("step", "loss", "lr", "toks_per_s", "samples_per_s")
MOST_FILES: Final = 512
MOST_COLUMNS: Final = 32
MOST_NAMES: Final = records.MOST_NAMES
MOST_GPUS: Final = 32
PAST_STEPS: Final = 16  # the result has an epoch of its own after the last step's
LINE: Final = 4096
DOCUMENT: Final = records.LONGEST_DOCUMENT
_COLUMN: Final = re.compile(r"[A-Za-z][A-Za-z0-9_./%-]{0,47}")


class Decoder:
    """Translates what one pod's agent streams. ``first`` is the worker whose figures training.csv holds.

    ``coords`` are the pod's workers of this run (none given: those whose names begin with the pod's); ``steps`` > 0 is
    where its epochs end.
    """

    def __init__(
        self,
        pod: str,
        engine_run: str,
        phase: str,
        first: str,
        cursors: Mapping[str, Sequence[int]] | None = None,
        *,
        coords: Collection[str] = (),
        steps: int = 0,
    ) -> None:
        self.pod = pod
        self.engine_run = engine_run
        self.phase = phase
        self.cursors: dict[str, list[int]] = {k: list(v) for k, v in (cursors or {}).items()}
        self._first = first
        self._coords = frozenset((*coords, first)) if coords else None
        self._own = re.compile(rf"{re.escape(pod)}s\d{{1,2}}t\d{{1,2}}")
        self._last_epoch = steps + PAST_STEPS if steps else STEPS
        self._columns: dict[str, Sequence[str]] = {}
        self._partial: dict[str, str] = {}
        self._names: set[str] = set()
        self._telemetry_at = float("-inf")
        self._bad: dict[str, tuple[int, str]] = {}

    def events(self, message: AgentMessage | Malformed) -> list[ev.Event]:
        """What a message means for the journal; nothing for acknowledgements and other runs' lines."""
        self._bad = {}
        found = self._translated(message)
        return found + [
            ev.LinesMalformed(where=self.pod, count=n, src=src, sample=line) for src, (n, line) in self._bad.items()
        ]

    def _translated(self, message: AgentMessage | Malformed) -> list[ev.Event]:
        match message:
            case Malformed():
                return [ev.LinesMalformed(where=self.pod, count=message.n, src="agent", sample=message.why)]
            case Dropped():
                text = f"the agent dropped {counted(message.n, 'line')} for this console"
                return [ev.Alert(level="warn", name="dropped", text=text, subject=self.pod)]
            case Telemetry():
                return self._telemetry(message)
            case Lines() if message.run == self.engine_run:
                return self._lines(message)
            case WorkerChange() if message.run == self.engine_run:
                return self._process(message)
            case Rewind() if message.run == self.engine_run:
                self._partial.pop(clean(message.src, 200), None)
                fields = {"src": clean(message.src, 200), "reason": message.reason}
                return [ev.EngineEvent(pod=self.pod, level="warn", event="rewind", fields=fields)]
        return []

    def _refuse(self, src: str, line: object) -> list[ev.Event]:
        """Count what cannot be used."""
        n, sample = self._bad.get(src, (0, clean(line, 200) if isinstance(line, str) else type(line).__name__))
        self._bad[src] = (n + 1, sample)
        return []

    def _mine(self, coord: object) -> str | None:
        """The worker that something is about: this pod's own, its first where none is named; else None."""
        if coord is None or coord == "":
            return self._first
        if not isinstance(coord, str):
            return None
        known = coord in self._coords if self._coords is not None else bool(self._own.fullmatch(coord))
        return coord if known or coord == self._first else None

    def _telemetry(self, m: Telemetry) -> list[ev.Event]:
        """Vital signs come every two seconds; the journal of a long run keeps one in fifteen."""
        if 0 <= m.ts - self._telemetry_at < TELEMETRY_EVERY_S:
            return []
        self._telemetry_at = m.ts
        gpus = [dict(g) for g in m.gpus[:MOST_GPUS]]
        return [ev.PodTelemetry(pod=self.pod, cpu=m.cpu, mem_mib=m.mem_mib, disk_free_mib=m.disk_free_mib, gpus=gpus)]

    def _process(self, m: WorkerChange) -> list[ev.Event]:
        coord = self._mine(m.coord)
        if coord is None:
            return self._refuse("agent", f"a process of {m.coord[:40]!r}")
        return [
            ev.WorkerProcess(
                pod=self.pod,
                coord=coord,
                state=m.state,
                pid=m.pid,
                rc=m.rc,
                signal=m.signal,
                engine_run=self.engine_run,
            )
        ]

    def _lines(self, m: Lines) -> list[ev.Event]:
        src, lines, ino, off = clean(m.src, 200), list(m.lines), m.ino, m.off
        key = f"{self.engine_run}/{src}"
        before = self.cursors.get(key)
        if before is None and len(self.cursors) >= MOST_FILES:
            return self._refuse("agent", f"more than {MOST_FILES} files, {src} among them")
        if before is not None and before[0] != ino:
            self._partial.pop(src, None)  # another file under the same name: its beginning is not the old one's end
        found = self._of_file(src, lines)
        self.cursors[key] = [ino, off]
        return found

    def _of_file(self, src: str, lines: list[str]) -> list[ev.Event]:
        if files.is_heartbeat(src):
            return self._heartbeats(src, lines)
        if src == files.EVENTS:
            return [e for line in lines for e in self._engine(src, line)]
        if src in (files.TRAINING, files.VAL):
            return self._rows(src, lines)
        if files.is_result(src):
            return self._result(src, lines)
        if files.is_exit(src):
            return self._exit(src, lines)
        if src == files.RUN_JSON:
            return self._facts(src, lines)
        if src.endswith(".json") or not lines:
            return []
        if files.is_worker_log(src):  # its story is in events.jsonl, too: once is enough for a journal and a reader
            lines = [line for line in lines if not repeats_event(line)]
            if not lines:
                return []
        shown = lines if all(len(x) <= LINE and x.isprintable() for x in lines) else [clean(x, LINE) for x in lines]
        return [ev.LogLines(pod=self.pod, src=src, lines=shown)]

    def _heartbeats(self, src: str, lines: list[str]) -> list[ev.Event]:
        """Only the newest record of a batch per worker matters: the figures of each step are in training.csv."""
        latest: dict[str, Mapping[str, Any]] = {}
        for line in lines:
            beat = records.parse(src, line)
            coord = self._mine(beat.coord) if isinstance(beat, records.Heartbeat) else None
            if not isinstance(beat, records.Heartbeat) or coord is None:
                self._refuse(src, line)
            else:
                latest[coord] = beat.fields
        return [ev.HeartbeatRead(pod=self.pod, coord=coord, record=dict(r)) for coord, r in latest.items()]

    def _engine(self, src: str, line: str) -> list[ev.Event]:
        read = records.parse(src, line)
        if not isinstance(read, records.EngineRecord | records.ReportedRoot):
            return self._refuse(src, line)
        coord = self._mine(read.coord)
        if coord is None:
            return self._refuse(src, line)
        if isinstance(read, records.ReportedRoot):
            if read.epoch > self._last_epoch:
                return self._refuse(src, line)
            return [ev.RootReported(coord=coord, epoch=read.epoch, root=read.root, pairs=dict(read.pairs))]
        name, fields = read.name, dict(read.fields)
        if name in reserved.RESERVED:  # a pod may not speak for the console
            name, fields = reserved.EVENT, {"event": name, "fields": fields}
        if self._coords is not None and len(self._coords) > 1 and (read.coord or read.by) in self._coords:
            fields["coord"] = read.coord or read.by  # several workers say the same: this tells them apart
        return [ev.EngineEvent(pod=self.pod, level=read.level, event=name, fields=fields, at=read.ts)]

    def _rows(self, src: str, lines: list[str]) -> list[ev.Event]:
        found: list[ev.Event] = []
        split = "train" if src == files.TRAINING else "val"
        for line in lines:
            cells = line[:LINE].strip().split(",")
            if cells[0] == "step":
                if len(cells) > MOST_COLUMNS or not all(_COLUMN.fullmatch(c) for c in cells):
                    self._refuse(src, line)
                elif self._known(cells):
                    self._columns[src] = cells
                continue
            columns = self._columns.get(src, COLUMNS if split == "train" else files.VAL_COLUMNS)
            try:
                row = {k: float(v) for k, v in zip(columns, cells, strict=False) if v != ""}
                step = as_int(row.pop("step"), 0, STEPS)
            except (ValueError, KeyError):
                step = None
            if step is None:
                self._refuse(src, line)
                continue
            found.append(ev.Metric(coord=self._first, step=step, values=row, split=split))
        return found

    def _known(self, names: Sequence[str]) -> bool:
        """Whether these figures may be kept beside those that the pod has named before."""
        if len(self._names | set(names)) > MOST_NAMES:
            self._refuse("agent", f"more than {MOST_NAMES} figures")
            return False
        self._names |= set(names)
        return True

    def _document(self, src: str, lines: list[str]) -> dict[str, Any] | None:
        """A document of this run. It may arrive in pieces; it is read once it is whole."""
        text = self._partial.get(src, "") + "\n".join(lines)
        read = as_object(text, DOCUMENT)
        if read is None and len(text) > DOCUMENT:
            self._refuse(src, "a document without end")
            text = ""
        self._partial[src] = "" if read is not None else text
        return read if read is not None and read.get("run") == self.engine_run else None

    def _facts(self, src: str, lines: list[str]) -> list[ev.Event]:
        """What the directory's lead worker says it runs: what a plan can be held against, and how large a step is."""
        read = self._document(src, lines)
        if read is None:
            return []
        found = records.facts(read)
        coord = self._mine(found.coord) if isinstance(found, records.Facts) else None
        if coord is None:
            return self._refuse(src, f"of {scalar_text(read.get('coord'), 40)!r}")
        config = read.get("config")
        parts = [read, read.get("job"), *(config.values() if isinstance(config, Mapping) else ())]
        facts = {k: p[k] for p in reversed(parts) if isinstance(p, Mapping) for k in FACTS if k in p}
        return [
            ev.EngineEvent(pod=self.pod, level="info", event="run_facts", fields=bounded_copy(facts) | {"coord": coord})
        ]

    def _exit(self, src: str, lines: list[str]) -> list[ev.Event]:
        read = self._document(src, lines)
        if read is None:
            return []
        found = records.exit_record(read)
        coord = self._mine(found.coord) if isinstance(found, records.Exit) else None
        if isinstance(found, records.Malformed) or coord is None:
            return self._refuse(src, f"of {scalar_text(read.get('coord'), 40)!r}")
        level = "error" if found.status == "failed" else "info"
        fields = {**found.fields, "coord": coord}
        return [ev.EngineEvent(pod=self.pod, level=level, event="exit", fields=fields)]

    def _result(self, src: str, lines: list[str]) -> list[ev.Event]:
        read = self._document(src, lines)
        if read is None:
            return []
        found = records.result(read)
        coord = self._mine(found.coord) if isinstance(found, records.Result) else None
        if isinstance(found, records.Malformed) or coord is None:
            return self._refuse(src, f"of {scalar_text(read.get('coord'), 40)!r}")
        values, digest = dict(found.values), found.result_hash
        return [ev.ResultReported(pod=self.pod, coord=coord, phase=self.phase, result_hash=digest, values=values)]
