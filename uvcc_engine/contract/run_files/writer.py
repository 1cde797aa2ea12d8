"""Makes a trainer watchable in five lines. Standard library only.

with RunWriter.open(directory, run="m7c-1") as w:
    for step in range(1, steps + 1):
        loss = ...
        w.step(step, loss=loss, lr=lr, toks_per_s=rate, save=lambda: torch.save(model.state_dict(), path) or path)
    w.exit("done", step=steps)
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, PeerLostError, ProtocolError, UvccError
from uvcc_engine.contract.machine.host import process, resident_mib
from uvcc_engine.contract.run_files import files
from uvcc_engine.contract.run_files.control import Control, HaltRequest
from uvcc_engine.contract.run_files.eventlog import EventLog
from uvcc_engine.contract.run_files.files import LineFile
from uvcc_engine.contract.run_files.flight import FlightRecorder
from uvcc_engine.contract.run_files.obeying import Obeying, TrainingHalted, launched_by_torchrun
from uvcc_engine.contract.run_files.records import STATUSES
from uvcc_engine.contract.run_files.table import Table
from uvcc_engine.contract.run_files.waiting import Waiting

BEAT_EVERY_S: Final = 5.0
SAME_STEP_EVERY_S: Final = 0.5
WAIT_TOLD_S: Final = 2.0
MEMORY_EVERY_S: Final = 1.0
_CODE: Final = {"tree": "UVCC_CODE_TREE", "commit": "UVCC_CODE_COMMIT", "dirty": "UVCC_CODE_DIRTY"}  # of job.code
# totals and means so far: true until the next one, whatever phase says so in between
COUNTS: Final = ("sent_bytes", "step_rounds", "step_bytes", "step_audits", "step_audited")
HEARTBEAT_KEEP_BYTES: Final = 16 << 20


class RunWriter:
    """Writes one rank's part of a run directory. Safe to call from several threads.

    ``lead`` marks the one rank of the directory that writes ``training.csv``, ``val.csv``, ``exit.json`` and
    ``result.json``; the others' rows are dropped and their documents carry the rank in the name.
    """

    def __init__(
        self,
        directory: Path,
        run: str,
        rank: int,
        coord: str,
        *,
        lead: bool,
        resume_step: int | None,
        clock: Callable[[], float],
    ) -> None:
        self.directory = directory
        self.run = files.checked_run_id(run)
        self.rank = rank
        self.coord = coord
        self.lead = lead
        self.control = Control(directory, run)
        self._clock = clock
        self._resume = resume_step
        self._lock = threading.RLock()
        self._events = EventLog(directory / files.EVENTS, coord, clock)
        self._beats = LineFile(directory / files.heartbeat_name(rank))
        self._tables: dict[str, Table] = {}
        self.heard: Callable[[str, Mapping[str, Any]], None] = lambda name, fields: None
        self.told: Callable[[str, str, Mapping[str, Any]], None] = lambda name, level, fields: None
        self._last: dict[str, Any] = {}
        self._last_ts = 0.0
        self._memory = (-MEMORY_EVERY_S, 0.0)  # when it was read, MiB
        self._beat_bytes = self._beats.size()
        self._carried: dict[str, Any] = {}
        self._obeying = Obeying(self)

    @classmethod
    def open(
        cls,
        directory: Path | str,
        run: str,
        rank: int = 0,
        coord: str = "p0r0s0t0",
        *,
        lead: bool = True,
        resume_step: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> RunWriter:
        """Open (and make) a run directory.

        ``resume_step`` = the last step that the checkpoint contains: rows of later steps are cut off. Without it the
        tables of an earlier run in the same directory are moved aside. Raises UvccError if it cannot be written.
        """
        path = Path(directory)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise files.write_failed(path, error) from error
        return cls(path, run, rank, coord, lead=lead, resume_step=resume_step, clock=clock)

    @classmethod
    def from_env(cls, *, resume_step: int | None = None) -> RunWriter:
        """For commands started by an agent, which names directory, run, rank and coordinate in the environment.

        Of the processes that ``torchrun`` starts, the first one writes tables and documents for all.
        """
        env = os.environ
        if "UVCC_RUN_DIR" not in env or "UVCC_RUN" not in env:
            raise ConfigError("UVCC_RUN_DIR and UVCC_RUN are not set", "start this command through an agent")
        rank = launched_by_torchrun(env)
        return cls.open(
            env["UVCC_RUN_DIR"],
            env["UVCC_RUN"],
            int(env.get("UVCC_RANK", "0")) if rank is None else rank,
            env.get("UVCC_COORD", "p0r0s0t0"),
            lead=env.get("UVCC_LEAD", "1") == "1" and not rank,
            resume_step=resume_step,
        )

    def resume_at(self, step: int | None) -> None:
        """Set ``resume_step`` of :meth:`open` where it is known only later, but before the first row is written."""
        with self._lock:
            if self._tables:
                raise ConfigError("rows were written before the step to resume at was known")
            self._resume = step

    def rewind(self, step: int) -> None:
        """Training went back to ``step`` by itself: rows of later steps are cut off."""
        with self._lock:
            for table in self._tables.values():
                table.rewind(step)

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Write ``run.json`` and ``run.info``: resolved config, ids, versions, device, code hash."""
        code = {name: os.environ[variable] for name, variable in _CODE.items() if variable in os.environ}
        told = {"code": code, **facts} if code else facts
        write_run_facts(self.directory, {"run": self.run, "coord": self.coord, **told})

    def metrics(
        self,
        step: int,
        loss: float,
        lr: float,
        toks_per_s: float,
        samples_per_s: float | None = None,
        more: Mapping[str, float] | None = None,
    ) -> None:
        """One row of ``training.csv``. ``more``: further figures, by the names of their columns.

        A run gives ``samples_per_s`` and each name in ``more`` in every row or in none.
        """
        row: dict[str, float] = {"loss": loss, "lr": lr, "toks_per_s": toks_per_s}
        if samples_per_s is not None:
            row["samples_per_s"] = samples_per_s
        row |= more or {}
        with self._lock:
            self._carried.update(loss=loss, toks_per_s=toks_per_s)
            self._table(files.TRAINING, ("step", *row)).append(step, tuple(row.values()))

    def val(self, step: int, loss: float, ppl: float) -> None:
        """One row of ``val.csv``."""
        with self._lock:
            self._table(files.VAL, files.VAL_COLUMNS).append(step, (loss, ppl))

    def validated(self, step: int, values: Mapping[str, float], names: Collection[str]) -> None:
        """One row of ``val.csv`` with whatever was revealed of validation: ``val_accuracy`` in the column ``accuracy``.

        ``names``: those of a run's every row; one without a value leaves its cell empty.
        """
        columns = tuple(sorted(names))
        heads = tuple(name.removeprefix("val_") for name in columns)
        with self._lock:
            self._table(files.VAL, ("step", *heads)).append(step, tuple(values.get(name) for name in columns))

    def heartbeat(self, step: int, phase: str, msg: str = "", **extra: Any) -> bool:
        """Say that this rank lives. Call it as often as convenient, at least once a step and every 5 s.

        A new step, phase or halt nonce is written at once; a repeat of the same at most twice a second. ``extra``:
        fields of the contract (``halt_nonce``, ``waiting_on``, ``dt_fetch_s``, ...). Returns whether it was written.
        """
        with self._lock:
            self._carried |= {k: extra[k] for k in COUNTS if k in extra}
            record = {"step": step, "phase": phase, "msg": msg, **self._carried, **extra}
            now = self._clock()
            marks = ("step", "phase", "halt_nonce")
            same = bool(self._last) and all(record.get(k) == self._last.get(k) for k in marks)
            if same and 0 <= now - self._last_ts < SAME_STEP_EVERY_S:
                return False
            self._write_beat(now, record)
            return True

    def step(
        self,
        step: int,
        *,
        loss: float,
        lr: float = 0.0,
        toks_per_s: float = 0.0,
        samples_per_s: float | None = None,
        save: Callable[[], str | Path | None] | None = None,
    ) -> None:
        """A step is done: its row, its heartbeat, and whatever the operator asks for, in one call.

        Held, it returns when the run is released. Halted, it calls ``save``, which writes a checkpoint and returns its
        file or folder, says that the run halted, and raises :class:`TrainingHalted`, which ends the process with exit
        code 0 unless it is caught. SIGTERM halts as well. With ``torch.distributed`` every rank must call it at every
        step: all stop after the same one. Raises UvccError if something cannot be written.
        """
        self.metrics(step, loss=loss, lr=lr, toks_per_s=toks_per_s, samples_per_s=samples_per_s)
        self.heartbeat(step, "train", loss=loss)
        asked = self.obey(step)
        if asked is not None:
            raise TrainingHalted(step, self.halted(asked, step, save() if save is not None else None))

    def obey(self, step: int) -> HaltRequest | None:
        """Wait while the operator holds the run; the request if it is to halt now. The part of :meth:`step` for
        programs that save and stop in their own way; they say so by :meth:`halted`. SIGTERM halts as well."""
        return self._obeying.obey(step)

    def halted(self, asked: HaltRequest, step: int, checkpoint: str | Path | None = None) -> str:
        """Say that the run halted after ``step`` with this checkpoint, a file or a folder; returns its SHA-256."""
        return self._obeying.halted(asked, step, checkpoint)

    @property
    def last_beat(self) -> dict[str, Any]:
        """The newest heartbeat's fields and its time ``ts``; empty before the first."""
        with self._lock:
            return {**self._last, "ts": round(self._last_ts, 3)} if self._last else {}

    def beat_again(self, waiting: Waiting | None = None) -> bool:
        """Repeat the last heartbeat if it is nearly 5 s old, with whom this rank waits for. Returns if written.

        A rank that waits says so earlier, at 2 s, so that a slow pair has a name also where steps go on.
        """
        with self._lock:
            now = self._clock()
            age = WAIT_TOLD_S if waiting is not None else BEAT_EVERY_S * 0.8
            if not self._last or 0 <= now - self._last_ts < age:
                return False
            record = {k: v for k, v in self._last.items() if k not in ("waiting_on", "waiting_s")}
            self._write_beat(now, record | (waiting.fields() if waiting is not None else {}))
            return True

    def event(self, name: str, level: str = "info", **fields: Any) -> None:
        """One line of ``events.jsonl``; ``heard`` and ``told`` hear of it, in this thread."""
        with self._lock:
            self._events.append(name, level, fields)
        self.heard(name, fields)
        self.told(name, level, fields)

    def poll_halt(self) -> HaltRequest | None:
        """What the control file asks of this run now."""
        return self.control.poll(self._clock())

    def exit(
        self,
        status: str,
        *,
        step: int = -1,
        checkpoint: str = "",
        error: BaseException | str | None = None,
        **extra: Any,
    ) -> None:
        """Write ``exit.json``: how this rank ended. ``checkpoint`` = sha256 of the manifest that it left, or ""."""
        if status not in STATUSES:
            raise ConfigError(f"unknown exit status {status!r}", f"one of {', '.join(STATUSES)}")
        record: dict[str, Any] = {"run": self.run, "status": status, "step": step, "checkpoint": checkpoint}
        record |= {"coord": self.coord, "pid": os.getpid(), "ts": self._clock()}
        if (me := process(os.getpid())) is not None:
            record["starttime"] = me.starttime  # with the pid, whose record it is whatever the clock says
        if error is not None:
            record |= error_fields(error)
        path = self.directory / files.exit_name(self.rank, lead=self.lead)
        with self._lock:
            self._events.sync()
            files.write_json(path, {**record, **extra})

    def result(self, result_hash: str, values: Mapping[str, float], signature: str = "", **extra: Any) -> None:
        """Write ``result.json``: the final result's hash and what the policy reveals."""
        record = {"run": self.run, "coord": self.coord, "result_hash": result_hash, "values": dict(values)}
        path = self.directory / files.result_name(self.rank, lead=self.lead)
        files.write_json(path, {**record, "signature": signature, "ts": self._clock(), **extra})

    def close(self) -> None:
        with self._lock:
            self._events.close()
            self._beats.close()
            for table in self._tables.values():
                table.close()
            self._tables.clear()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _table(self, name: str, columns: tuple[str, ...]) -> Table:
        table = self._tables.get(name)
        if table is None:
            table = Table(self.directory / name, columns, resume_step=self._resume, active=self.lead)
            self._tables[name] = table
        return table

    def _write_beat(self, now: float, record: dict[str, Any]) -> None:
        whole = {"ts": round(now, 3), "rank": self.rank, "coord": self.coord, "pid": os.getpid()}
        whole |= record
        if "mem_mib" not in record:
            if not 0 <= now - self._memory[0] < MEMORY_EVERY_S:
                self._memory = (now, resident_mib())
            whole["mem_mib"] = self._memory[1]
        if self._beat_bytes > HEARTBEAT_KEEP_BYTES:
            self._beats.close()
            os.replace(self._beats.path, self._beats.path.with_name(self._beats.path.name + ".1"))
            self._beats = LineFile(self._beats.path)
            self._beat_bytes = 0
        line = json.dumps(whole, separators=(",", ":"), ensure_ascii=False)
        self._beats.append(line)
        self._beat_bytes += len(line) + 1
        self._last, self._last_ts = record, now


class Ticker:
    """A thread that keeps a rank's heartbeat fresh while its main thread waits, saying whom it waits for.

    It also answers for the rank's flight recorder.
    """

    def __init__(
        self, writer: RunWriter, waiting_on: Callable[[], Waiting | None] = lambda: None, *, period_s: float = 1.0
    ) -> None:
        self._writer = writer
        self._waiting_on = waiting_on
        self._period_s = period_s
        self._flight = FlightRecorder(writer.directory, writer.run, writer.coord)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self.error: UvccError | None = None

    def __enter__(self) -> Ticker:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            try:
                waiting = self._waiting_on()
                self._writer.beat_again(waiting)
                self._flight.look(waiting)
            except UvccError as error:
                self.error = error  # the main thread meets the same disk at its next line
                return


def error_fields(error: BaseException | str) -> dict[str, Any]:
    """``error``, ``hint`` and ``party`` as ``exit.json`` carries them."""
    if isinstance(error, str):
        return {"error": error}
    fields: dict[str, Any] = {"error": f"{type(error).__name__}: {error}"}
    if isinstance(error, UvccError):
        fields = {"error": error.what, "hint": error.hint}
    if isinstance(error, ProtocolError | PeerLostError) and error.party >= 0:
        fields["party"] = error.party
    return fields


def write_run_facts(directory: Path, facts: Mapping[str, Any]) -> None:
    """``run.json``, and the same as ``key: value`` lines with dotted keys in ``run.info``."""
    files.write_json(directory / files.RUN_JSON, facts)
    lines = "".join(f"{key}: {value}\n" for key, value in _flat(facts))
    files.write_atomic(directory / files.RUN_INFO, lines.encode())


def _flat(facts: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for key, value in facts.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)))
    return found
