"""Follows one halt request on this pod until there is evidence: seen, held, halted, gone (or released).

``held`` and ``halted`` come from heartbeats that echo the nonce. ``gone`` means that the process is absent; it carries
a checkpoint hash only if its ``exit.json`` is of this run and process, says halted or done, and the checkpoint that it
names verifies byte by byte. Otherwise ``detail`` says what is missing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from uvcc_engine.agent.processes.workers import RUNNING, Worker, exit_record
from uvcc_engine.contract.agent_protocol.agent_messages import HaltStage, to_json
from uvcc_engine.contract.agent_protocol.wire import Lacks
from uvcc_engine.contract.checkpoints import checkpoint as checkpoints
from uvcc_engine.contract.errors import VerificationError
from uvcc_engine.contract.parsing.untrusted import as_float, scalar_text
from uvcc_engine.contract.run_files import files, records
from uvcc_engine.contract.run_files.control import HOLD, RELEASE, HaltRequest, HaltVerdict

SLICE_S: Final = 0.02
REFUSALS: Final[dict[HaltVerdict, Callable[[str], tuple[str, str]]]] = {
    HaltVerdict.FINAL: lambda run: (f"run {run} is already halting", "a halt is final; resume it afterwards"),
    HaltVerdict.OVERTAKEN: lambda run: (f"this hold of run {run} was released already", "hold it again"),
    HaltVerdict.OTHER: lambda run: (f"run {run} is held by another request", "release that one, or halt"),
}
"""Why a halt request is refused: what is wrong, and what to do."""
_ORDER: Final = ("", "held", "released", "halted", "gone")
Report = Callable[[dict[str, Any]], None]


@dataclass
class _Seen:
    stage: str = ""
    step: int = -1
    checkpoint: str = ""
    detail: str = ""
    lacks: Lacks = Lacks.NOTHING
    proof: Generator[None, None, checkpoints.CheckpointManifest] | None = None


@dataclass
class HaltWatch:
    """One request for one run. ``since`` = when its present mode was written (pod's wall clock, s)."""

    request: HaltRequest
    report: Report
    since: float = field(default_factory=time.time)
    _seen: dict[str, _Seen] = field(default_factory=dict)

    def upgrade(self, request: HaltRequest) -> None:
        """The same request moved on: hold, then release or halt."""
        if request.mode != self.request.mode:
            self.since = time.time()
            if request.mode == HOLD:
                self._seen.clear()
        self.request = request

    def retell(self) -> None:
        """Say all that is known again, for a console that asks again."""
        self.report(self._message("seen", "", _Seen()))
        for coord, seen in self._seen.items():
            if seen.stage:
                self.report(self._message(seen.stage, coord, seen))

    def check(self, workers: Sequence[Worker]) -> bool:
        """Look at heartbeats and processes; returns whether work remains that should not wait for the next tick."""
        busy = False
        for worker in workers:
            seen = self._seen.setdefault(worker.spec.coord, _Seen())
            if seen.stage != "gone" and seen.proof is None:
                self._heartbeat(worker, seen)  # also of one that is gone by now: it may have halted since the last look
            if worker.state != RUNNING and seen.stage != "gone":
                busy |= self._evidence(worker, seen)
        return busy

    def settled(self, workers: Sequence[Worker]) -> bool:
        """Whether nothing more can come: every worker has ended, or was released."""
        wanted = ("released", "gone") if self.request.mode == RELEASE else ("gone",)
        return all(self._seen.get(w.spec.coord, _Seen()).stage in wanted for w in workers)

    def _heartbeat(self, worker: Worker, seen: _Seen) -> None:
        beat = last_beat(Path(worker.spec.dir) / files.heartbeat_name(worker.spec.rank))
        if beat is None:
            return
        phase, step = beat.phase, beat.step
        echoed = beat.fields.get("halt_nonce") == self.request.nonce
        seen.checkpoint = scalar_text(beat.fields.get("checkpoint"), 128) or seen.checkpoint
        if echoed and phase == "halted":
            self._reach(worker, seen, "halted", step)
        elif echoed and phase in ("hold", "held") and self.request.mode != RELEASE:
            self._reach(worker, seen, "held", step)
        elif self.request.mode == RELEASE and phase not in ("hold", "held", "halted"):
            after = (as_float(beat.fields.get("ts")) or 0.0) >= self.since
            self._reach(worker, seen, "released" if after else "", step)

    def _evidence(self, worker: Worker, seen: _Seen) -> bool:
        """One slice of checking an absent worker's exit record and checkpoint; returns whether more is to do."""
        if seen.proof is None:
            found = exit_record(worker)
            if found is None:
                ended = worker.signal or f"code {worker.rc}"
                return self._gone(worker, seen, Lacks.NO_EXIT, f"ended by {ended} without an exit.json of this run")
            status, seen.step, named = found.status, found.step, found.checkpoint
            if status not in ("halted", "done"):
                return self._gone(worker, seen, Lacks.FAILED, f"{status}: {found.error}".rstrip(": "))
            if not named:
                lacks = Lacks.DONE if status == "done" else Lacks.NOT_NAMED
                return self._gone(worker, seen, lacks, f"{status} without a checkpoint")
            seen.checkpoint = named
            folder = checkpoints.step_dir(Path(worker.spec.dir) / files.CHECKPOINTS, seen.step)
            if worker.spec.kind == "command" and not folder.is_dir():
                return self._gone(worker, seen, Lacks.DAMAGED, "its checkpoint is the program's own: not checked here")
            seen.proof = checkpoints.verify_in_steps(folder, named)
        deadline = time.monotonic() + SLICE_S
        try:
            while time.monotonic() < deadline:
                next(seen.proof)
        except StopIteration:
            return self._gone(worker, seen, Lacks.NOTHING, "")
        except VerificationError as error:
            return self._gone(worker, seen, Lacks.DAMAGED, str(error))
        return True

    def _gone(self, worker: Worker, seen: _Seen, lacks: Lacks, detail: str) -> bool:
        seen.checkpoint = "" if lacks else seen.checkpoint
        seen.lacks, seen.detail, seen.proof = lacks, detail, None
        self._reach(worker, seen, "gone", seen.step)
        return False

    def _reach(self, worker: Worker, seen: _Seen, stage: str, step: int) -> None:
        if _ORDER.index(stage) > _ORDER.index(seen.stage):
            seen.stage, seen.step = stage, step
            self.report(self._message(stage, worker.spec.coord, seen))

    def _message(self, stage: str, coord: str, seen: _Seen) -> dict[str, Any]:
        reached = HaltStage(
            run=self.request.run,
            nonce=self.request.nonce,
            stage=stage,
            mode=self.request.mode,
            coord=coord,
            step=seen.step,
            checkpoint=seen.checkpoint,
            detail=seen.detail,
            lacks=seen.lacks,
            ts=round(time.time(), 3),
        )
        return to_json(reached)


def last_beat(path: Path) -> records.Heartbeat | None:
    """The heartbeat on the last whole line of a worker's file; None if there is none, or if it is no heartbeat."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        size = os.fstat(fd).st_size
        data = os.pread(fd, 16384, max(0, size - 16384))
    finally:
        os.close(fd)
    lines = data[: data.rfind(b"\n")].split(b"\n") if b"\n" in data else []
    if not lines:
        return None
    found = records.parse(path.name, lines[-1].decode(errors="replace"))
    return found if isinstance(found, records.Heartbeat) else None
