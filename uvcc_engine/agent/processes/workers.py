"""The workers of this pod, kept in files so that another agent can take them over.

``state/<run>/<coord>.json`` holds ``{spec, id, started, state, rc, signal, ended}``. The worker itself writes the
first version before it does anything else; the agent adds how it ended.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from uvcc_engine.agent.processes.process import ProcessId, exit_of
from uvcc_engine.contract.errors import ConfigError, UnreadableError, UvccError
from uvcc_engine.contract.job.spec import WorkerSpec
from uvcc_engine.contract.parsing import strict
from uvcc_engine.contract.run_files import files, records

log = logging.getLogger(__name__)
RUNNING: Final = "running"
EXITED: Final = "exited"


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker process. ``adopted``: started under an earlier agent, so its exit status is not ours to read."""

    spec: WorkerSpec
    id: ProcessId
    started: float
    state: str = RUNNING
    rc: int | None = None
    signal: str = ""
    ended: float = 0.0
    adopted: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.spec.run, self.spec.coord

    def to_json(self) -> dict[str, Any]:
        return {
            "spec": self.spec.to_json(),
            "id": self.id.to_json(),
            "started": self.started,
            "state": self.state,
            "rc": self.rc,
            "signal": self.signal,
            "ended": self.ended,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Worker:
        """Raises UnreadableError for what is no state of a worker."""
        try:
            return strict.read(cls, data | {"adopted": True}, "a worker's state")
        except ConfigError as error:
            raise UnreadableError(error.what, error.hint) from error

    def summary(self) -> dict[str, Any]:
        """What consoles are told of it."""
        return {
            "coord": self.spec.coord,
            "pid": self.id.pid,
            "state": "started" if self.state == RUNNING else self.state,
            "rc": self.rc,
            "signal": self.signal,
            "attempt": self.spec.attempt,
        }


def state_path(root: Path, run: str, coord: str) -> Path:
    return root / "state" / run / f"{coord}.json"


def register(root: Path, spec: WorkerSpec) -> None:
    """Called by a worker about itself, first of all."""
    me = ProcessId.of(os.getpid())
    assert me is not None
    path = state_path(root, spec.run, spec.coord)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    files.write_json(path, Worker(spec, me, time.time()).to_json(), mode=0o600, durable=False)


def exit_record(worker: Worker) -> records.Exit | None:
    """The worker's ``exit.json``, if it is one, of this run and of this process.

    Whose it is says the process itself. A trainer in a child of the worker is known by its time, if no clock is set.
    """
    spec = worker.spec
    for lead in (spec.lead, not spec.lead):  # who leads a world may not lead its directory
        document = files.read_json_of_run(Path(spec.dir) / files.exit_name(spec.rank, lead=lead), spec.run)
        found = records.exit_record(document) if document is not None else None
        if isinstance(found, records.Exit) and found.coord in ("", spec.coord):
            own = (found.fields.get("pid"), found.fields.get("starttime")) == (worker.id.pid, worker.id.starttime)
            return found if own or found.ts >= worker.started - 1.0 else None
    return None


@dataclass
class WorkerTable:
    """All workers known here, by (run, coord)."""

    root: Path
    known: dict[tuple[str, str], Worker] = field(default_factory=dict)

    def load(self) -> list[Worker]:
        """Read the state files; returns the workers that are alive and hereby taken over."""
        adopted = []
        for path in sorted((self.root / "state").glob("*/*.json")):
            try:
                worker = Worker.from_json(files.read_json(path))
            except UnreadableError:
                continue  # cut short by a full disk: such a worker never began
            self.known[worker.key] = worker
            if worker.state == RUNNING and worker.id.alive():
                adopted.append(worker)
        return adopted

    def of_run(self, run: str) -> list[Worker]:
        return [w for w in self.known.values() if w.spec.run == run]

    def live(self, run: str | None = None) -> list[Worker]:
        return [w for w in self.known.values() if w.state == RUNNING and run in (None, w.spec.run)]

    def runs(self) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {}
        for worker in self.known.values():
            found.setdefault(worker.spec.run, []).append(worker.summary())
        return found

    def started(self, spec: WorkerSpec, who: ProcessId, at: float) -> Worker:
        """``at``: before its fork; when this is heard of it may have ended long ago, and its exit record is as old."""
        worker = Worker(spec, who, at)
        self.known[worker.key] = worker
        return worker

    def exited(self, pid: int, status: int) -> Worker | None:
        """The zygote has reaped a worker."""
        for worker in self.live():
            if worker.id.pid == pid and not worker.adopted:
                rc, name = exit_of(status)
                return self._ended(worker, rc, name)
        return None

    def orphaned(self) -> None:
        """The zygote is gone: its workers are nobody's children now."""
        for key, worker in self.known.items():
            self.known[key] = replace(worker, adopted=True)

    def check_adopted(self) -> list[Worker]:
        """Adopted workers that have ended since the last call; their exit code comes from ``exit.json``."""
        ended = []
        for worker in self.live():
            if worker.adopted and not worker.id.alive():
                found = exit_record(worker)
                rc = {"done": 0, "halted": 0, "failed": 1}.get(found.status) if found is not None else None
                ended.append(self._ended(worker, rc, "" if rc is not None else "unknown"))
        return ended

    def _ended(self, worker: Worker, rc: int | None, signal_name: str) -> Worker:
        ended = replace(worker, state=EXITED, rc=rc, signal=signal_name, ended=time.time())
        self.known[worker.key] = ended
        path = state_path(self.root, worker.spec.run, worker.spec.coord)
        try:
            files.write_json(path, ended.to_json(), mode=0o600, durable=False)
        except UvccError as error:
            log.error("the end of worker %s is not on disk: %s", worker.spec.coord, error)  # but everybody is told
        return ended
