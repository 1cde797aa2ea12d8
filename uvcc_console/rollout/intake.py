"""Agent messages -> journal events. One intake per pod and engine run; keeps the cursors it has turned into events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from uvcc_console.core import events as ev
from uvcc_console.core import reserved
from uvcc_engine.contract import wire

FACTS = ("parameters", "seq_len", "precision", "save_every", "steps")
TELEMETRY_EVERY_S = 30.0
COLUMNS = ("step", "loss", "lr", "toks_per_s", "samples_per_s")


class Intake:
    """Translates what one pod's agent streams. ``first`` is the worker whose figures training.csv holds."""

    def __init__(
        self, pod: str, engine_run: str, phase: str, first: str, cursors: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        self.pod = pod
        self.engine_run = engine_run
        self.phase = phase
        self.cursors: dict[str, list[int]] = {k: list(v) for k, v in (cursors or {}).items()}
        self._first = first
        self._columns: dict[str, Sequence[str]] = {}
        self._partial: dict[str, str] = {}
        self._telemetry_at = float("-inf")

    def events(self, message: Mapping[str, Any]) -> list[ev.Event]:
        """What a message means for the journal; nothing for acknowledgements and other runs' lines."""
        op = message.get("op")
        if op == wire.DROPPED:
            text = f"the agent dropped {message.get('n')} lines for this console"
            return [ev.Alert(level="warn", name="dropped", text=text, subject=self.pod)]
        if op == wire.TELEMETRY:
            return self._telemetry(message)
        if message.get("run") != self.engine_run:
            return []
        if op == wire.LINES:
            return self._lines(message)
        if op == wire.PROC:
            return [self._process(message)]
        if op == wire.REWIND:
            fields = {"src": message.get("src"), "reason": message.get("reason")}
            return [ev.EngineEvent(pod=self.pod, level="warn", event="rewind", fields=fields)]
        return []

    def _telemetry(self, m: Mapping[str, Any]) -> list[ev.Event]:
        """Vital signs come every two seconds; the journal of a long run keeps one in thirty seconds."""
        at = float(m.get("ts") or 0.0)
        if at - self._telemetry_at < TELEMETRY_EVERY_S:
            return []
        self._telemetry_at = at
        gpus = [dict(g) for g in m.get("gpus") or [] if isinstance(g, Mapping)]
        numbers = {k: float(m.get(k) or 0.0) for k in ("cpu", "mem_mib", "disk_free_mib")}
        return [ev.Telemetry(pod=self.pod, gpus=gpus, **numbers)]

    def _process(self, m: Mapping[str, Any]) -> ev.Event:
        rc = m.get("rc")
        return ev.WorkerProcess(
            pod=self.pod,
            coord=str(m.get("coord", "")),
            state=str(m.get("state", "")),
            pid=int(m.get("pid") or 0),
            rc=int(rc) if rc is not None else None,
            signal=str(m.get("signal") or ""),
        )

    def _lines(self, m: Mapping[str, Any]) -> list[ev.Event]:
        src, lines = str(m.get("src", "")), [str(x) for x in m.get("lines", [])]
        found: list[ev.Event]
        if src.startswith("heartbeat_rank"):
            found = self._heartbeats(lines)
        elif src == "events.jsonl":
            found = [e for line in lines for e in self._engine(line)]
        elif src in ("training.csv", "val.csv"):
            found = self._rows(src, lines)
        elif src.startswith("result") and src.endswith(".json"):
            found = self._result(src, lines)
        elif src.startswith("exit") and src.endswith(".json"):
            found = self._exit(src, lines)
        elif src == "run.json":
            found = self._facts(src, lines)
        elif src.endswith(".json") or not lines:
            found = []
        else:
            found = [ev.LogLines(pod=self.pod, src=src, lines=lines)]
        ino, off = int(m.get("ino") or 0), int(m.get("off") or 0)
        self.cursors[f"{self.engine_run}/{src}"] = [ino, off]
        return found

    def _bad(self, src: str, line: str) -> ev.Event:
        fields = {"src": src, "line": line[:200]}
        return ev.EngineEvent(pod=self.pod, level="warn", event="unreadable_line", fields=fields)

    def _record(self, src: str, line: str) -> dict[str, Any] | None:
        try:
            record = json.loads(line)
        except ValueError:
            return None
        return record if isinstance(record, dict) else None

    def _heartbeats(self, lines: list[str]) -> list[ev.Event]:
        """Only the newest record of a batch per worker matters: the figures of each step are in training.csv."""
        latest: dict[str, dict[str, Any]] = {}
        bad: list[ev.Event] = []
        for line in lines:
            record = self._record("heartbeat", line)
            if record is None:
                bad.append(self._bad("heartbeat", line))
            else:
                latest[str(record.get("coord") or self._first)] = record
        return bad + [ev.Heartbeat(pod=self.pod, coord=coord, record=r) for coord, r in latest.items()]

    def _engine(self, line: str) -> list[ev.Event]:
        record = self._record("events.jsonl", line)
        if record is None:
            return [self._bad("events.jsonl", line)]
        name, fields = str(record.get("event", "")), record.get("fields") or {}
        if name == "epoch_root":
            pairs = {str(k): str(v) for k, v in (fields.get("pairs") or {}).items()}
            coord = str(fields.get("coord") or self._first)
            return [
                ev.RootReported(coord=coord, epoch=int(fields.get("epoch", -1)), root=str(fields["root"]), pairs=pairs)
            ]
        if name in reserved.RESERVED:  # a pod may not speak for the console
            name, fields = reserved.EVENT, {"event": name, "fields": fields}
        level, at = str(record.get("level", "info")), float(record.get("ts") or 0.0)
        return [ev.EngineEvent(pod=self.pod, level=level, event=name, fields=fields, at=at)]

    def _rows(self, src: str, lines: list[str]) -> list[ev.Event]:
        found: list[ev.Event] = []
        split = "train" if src == "training.csv" else "val"
        for line in lines:
            cells = line.strip().split(",")
            if cells[0] == "step":
                self._columns[src] = cells
                continue
            columns = self._columns.get(src, COLUMNS if split == "train" else ("step", "loss", "ppl"))
            try:
                row = {k: float(v) for k, v in zip(columns, cells, strict=False) if v != ""}
                step = int(row.pop("step"))
            except (ValueError, KeyError):
                found.append(self._bad(src, line))
                continue
            found.append(ev.Metric(coord=self._first, step=step, values=row, split=split))
        return found

    def _document(self, src: str, lines: list[str]) -> dict[str, Any] | None:
        """A document of this run. It may arrive in pieces; it is read once it is whole."""
        text = self._partial.get(src, "") + "\n".join(lines)
        record = self._record(src, text)
        self._partial[src] = "" if record is not None else text
        return record if record is not None and record.get("run") == self.engine_run else None

    def _facts(self, src: str, lines: list[str]) -> list[ev.Event]:
        """What the directory's lead worker says it runs: only what a plan can be held against."""
        record = self._document(src, lines)
        if record is None:
            return []
        config = record.get("config") if isinstance(record.get("config"), Mapping) else {}
        parts = [record, record.get("job"), *(config or {}).values()]
        fields = {k: p[k] for p in reversed(parts) if isinstance(p, Mapping) for k in FACTS if k in p}
        fields["coord"] = str(record.get("coord") or self._first)
        return [ev.EngineEvent(pod=self.pod, level="info", event="run_facts", fields=fields)]

    def _exit(self, src: str, lines: list[str]) -> list[ev.Event]:
        record = self._document(src, lines)
        if record is None:
            return []
        level = "error" if record.get("status") == "failed" else "info"
        fields = {k: v for k, v in record.items() if k not in ("run", "ts") and v not in ("", None)}
        return [ev.EngineEvent(pod=self.pod, level=level, event="exit", fields=fields)]

    def _result(self, src: str, lines: list[str]) -> list[ev.Event]:
        record = self._document(src, lines)
        if record is None:
            return []
        values = {k: float(v) for k, v in (record.get("values") or {}).items() if isinstance(v, int | float)}
        coord = str(record.get("coord") or self._first)
        return [
            ev.ResultReported(
                pod=self.pod,
                coord=coord,
                phase=self.phase,
                result_hash=str(record.get("result_hash", "")),
                values=values,
            )
        ]
