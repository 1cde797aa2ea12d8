"""The hand-over checklist of seed 001, filled from facts: what was delivered, where it ran, if it met the criteria.

A criterion is met, not met, or not shown; nothing counts as met because somebody said so.
"""

from __future__ import annotations

import csv
import hashlib
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from uvcc_console.core import events as ev
from uvcc_console.report.eventlog import stamp
from uvcc_console.report.record import RunRecord
from uvcc_console.report.redact import checked
from uvcc_engine.contract.errors import UnreadableError
from uvcc_engine.parallel.topology import PARTIES
from uvcc_engine.transcript.bundle import NAME, POLICY_FILE

OUTPUT: Final = "handoff.md"
MET, NOT_MET, NOT_SHOWN = "met", "NOT MET", "not shown"
# a rate is stable if the middle half of its values lies this close around the median
_STABLE: Final = 0.25
_WARM_UP: Final = 0.1
_PILOT_S: Final = 2 * 3600.0


@dataclass(frozen=True, slots=True)
class Criterion:
    """One success criterion with the fact that decides it."""

    name: str
    status: str
    fact: str


@dataclass(frozen=True, slots=True)
class Deviation:
    """Something that did not go as planned, and when."""

    ts: float
    text: str


@dataclass(frozen=True, slots=True)
class Handoff:
    """The filled checklist. ``attached``: (file relative to the artifacts, SHA-256)."""

    run: str
    attached: Sequence[tuple[str, str]]
    missing: Sequence[str]
    facts: Sequence[tuple[str, str]]
    criteria: Sequence[Criterion]
    checkpoints: Sequence[tuple[str, int, str]]
    deviations: Sequence[Deviation]
    committed: frozenset[tuple[str, int]] = frozenset()

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "attached": [{"file": name, "sha256": digest} for name, digest in self.attached],
            "missing": list(self.missing),
            "facts": dict(self.facts),
            "criteria": [{"name": c.name, "status": c.status, "fact": c.fact} for c in self.criteria],
            "checkpoints": [
                {"pod": pod, "step": step, "sha256": sha, "committed": (pod, step) in self.committed}
                for pod, step, sha in self.checkpoints
            ],
            "deviations": [{"ts": stamp(d.ts), "text": d.text} for d in self.deviations],
        }

    def text(self) -> str:
        """The checklist in Markdown."""
        lines = [f"# Hand-over of {self.run}", "", "## Attached", ""]
        lines += [f"- [x] `{name}` SHA-256 `{digest}`" for name, digest in self.attached]
        lines += [f"- [ ] {name}: not there" for name in self.missing]
        lines += ["", "## Hardware and launch", ""]
        lines += [f"- {name}: {value}" for name, value in self.facts]
        lines += ["", "## Success criteria", "", "| criterion | status | fact |", "|---|---|---|"]
        lines += [f"| {c.name} | {c.status} | {c.fact} |" for c in self.criteria]
        lines += ["", "## Checkpoints", ""]
        signed = {True: ", committed with three parties' signatures", False: ""}
        lines += [
            f"- {pod}: step {step}, manifest SHA-256 `{sha}`{signed[(pod, step) in self.committed]}"
            for pod, step, sha in self.checkpoints
        ] or ["- none"]
        lines += ["", "## Deviations", ""]
        lines += [f"- {stamp(d.ts)} {d.text}" for d in self.deviations] or ["- none"]
        return "\n".join(lines) + "\n"


def handoff(run_dir: Path) -> Handoff:
    """Fill the checklist from a run's journal and artifacts. Raises UnreadableError without a journal."""
    record = RunRecord.load(run_dir)
    phase = record.phases[-1] if record.phases else ""
    attached, missing = _attached(record, phase)
    return Handoff(
        record.snapshot.run,
        attached,
        missing,
        _facts(record, phase),
        list(_criteria(record, phase)),
        _checkpoints(record),
        _deviations(record),
        frozenset((e.pod, int(e.fields.get("step", -1))) for e in record.engine_events("checkpoint_committed")),
    )


def write_handoff(run_dir: Path, out: Path | None = None) -> Path:
    """Write ``artifacts/handoff.md`` (or ``out``). Raises RedactionError for what must not leave; then nothing is."""
    path = out or run_dir / "artifacts" / OUTPUT
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    text = handoff(run_dir).text()
    for _ in checked("(handoff)", text.splitlines()):
        pass
    temporary.write_text(text)
    os.replace(temporary, path)
    return path


def _attached(record: RunRecord, phase: str) -> tuple[list[tuple[str, str]], list[str]]:
    wanted = ["run.info", "run.json", "training.csv", "worker_*.log", "run_full.log"]
    if record.snapshot.proves:
        wanted += [POLICY_FILE, NAME]
    found, missing = [], []
    home = record.artifacts / phase
    for pattern in wanted:
        hits = sorted(home.glob(pattern)) or sorted(home.rglob(pattern)) if phase else []
        hits = hits or sorted(record.artifacts.glob(pattern))
        if not hits:
            missing.append(pattern)
        for path in hits:
            with path.open("rb") as f:
                digest = hashlib.file_digest(f, "sha256").hexdigest()
            found.append((path.relative_to(record.artifacts).as_posix(), digest))
    return found, missing


def _facts(record: RunRecord, phase: str) -> list[tuple[str, str]]:
    s = record.snapshot
    t = record.size
    parties = f"{PARTIES} parties x " if s.proves else ""
    size = f"{t.replicas} replicas x {parties}{t.stages} stages x {t.tensor} tensor ranks"
    facts = [("profile", f"{s.profile_name} ({s.job_kind})"), ("topology", size)]
    for pod in record.pods:
        facts.append((f"pod {pod.pod}", f"{pod.provider}, {pod.price_hr:.2f} USD/h" if pod.price_hr else pod.provider))
    for event in record.engine_events("dp_preflight_ok", "dp_preflight_failed"):
        shown = ", ".join(f"{k} {v}" for k, v in event.fields.items() if v not in (None, [], ""))
        facts.append((f"preflight {event.pod}", shown or "passed"))
    facts += _launched(sorted((record.artifacts / phase).rglob("run.info")) if phase else [])
    facts.append(("spent", f"{s.spent:.2f} USD"))
    return facts


def _launched(infos: Sequence[Path]) -> list[tuple[str, str]]:
    """What every pod's run.info says of hardware, code and configuration; said once where all pods say the same."""
    said: dict[str, dict[str, str]] = {}
    for path in infos:
        for line in path.read_text(errors="replace").splitlines():
            key, colon, value = line.partition(": ")
            if colon and (key in _LAUNCH or key.startswith(_CONFIG)):
                said.setdefault(key, {})[path.parent.name] = value
    facts = []
    for key, by_pod in said.items():
        if len(by_pod) == len(infos) and len(set(by_pod.values())) == 1:
            facts.append((key, f"{next(iter(by_pod.values()))} (all {len(infos)} pods)"))
        else:
            facts += [(f"{pod} {key}", value) for pod, value in by_pod.items()]
    return facts


_CONFIG: Final = ("job.", "topology.", "config.")
_LAUNCH: Final = (
    "kind",
    "version",
    "policy_hash",
    "device",
    "gpu",
    "gpus",
    "gpu_model",
    "gpu_memory_mib",
    "vram",
    "torch",
    "cuda",
    "world",
    "argv",
    "launch",
    "model",
    "config",
    "code_hash",
)


# ---- criteria ------------------------------------------------------------------------------------------------------


def _criteria(record: RunRecord, phase: str) -> Iterator[Criterion]:
    yield _ran_through(record, phase)
    yield _pilot_length(record, phase)
    curves = _training(record, phase)
    yield _loss_falls(curves)
    yield _throughput(curves)
    yield _checkpoint_saved(record)
    yield _resumed(record)
    if record.snapshot.proves:
        yield _verified(record, phase)
    for gate in record.snapshot.gates:
        fact = f"wanted {gate.wanted}, measured {gate.measured}"
        yield Criterion(f"gate {gate.name}", MET if gate.ok else NOT_MET, fact)


def _ran_through(record: RunRecord, phase: str) -> Criterion:
    name = "runs to the planned step without a hang or a lost worker"
    starts = [e for e in record.of(ev.PhaseStarted) if e.phase == phase]
    if not starts:
        return Criterion(name, NOT_SHOWN, "no phase was started")
    ends = [e for e in _since(record, starts[-1]) if isinstance(e, ev.WorkerProcess)]
    failed = [e for e in ends if _bad_exit(e)]
    done = {e.coord for e in ends if e.rc == 0}
    if failed:
        return Criterion(
            name, NOT_MET, f"{len(failed)} workers failed, first {failed[0].coord} at {stamp(failed[0].ts)}"
        )
    fact = f"{len(done)} workers ended well, {starts[-1].steps} steps planned"
    return Criterion(name, MET if done else NOT_SHOWN, fact)


def _since(record: RunRecord, start: ev.Event) -> Sequence[ev.Event]:
    found = _once(record)
    return found[found.index(start) :]


def _once(record: RunRecord) -> list[ev.Event]:
    """All events, but each process's end only where it was first told: whoever attaches again hears of it again."""
    told: set[tuple[str, int]] = set()
    found = []
    for e in record.events:
        if isinstance(e, ev.WorkerProcess) and e.state == "exited" and e.pid:
            if (e.coord, e.pid) in told:
                continue
            told.add((e.coord, e.pid))
        found.append(e)
    return found


def _bad_exit(e: ev.WorkerProcess) -> bool:
    return e.state == "exited" and e.rc != 0


def _pilot_length(record: RunRecord, phase: str) -> Criterion:
    """Only a language-model pilot has to run for hours."""
    name = "runs for at least 2 hours"
    starts = [e.ts for e in record.of(ev.PhaseStarted) if e.phase == phase]
    ends = [e.ts for e in record.of(ev.WorkerProcess) if e.state == "exited"]
    if record.snapshot.job_kind != "lm" or not starts or not ends:
        return Criterion(name, NOT_SHOWN, "asked of language-model pilots only")
    took = max(ends) - min(starts)
    return Criterion(name, MET if took >= _PILOT_S else NOT_MET, f"{took / 3600:.2f} h")


def _training(record: RunRecord, phase: str) -> dict[str, list[dict[str, float]]]:
    """Rows of every training.csv of a phase, by file. Raises UnreadableError for a damaged one."""
    found = {}
    for path in sorted((record.artifacts / phase).rglob("training.csv")) if phase else []:
        try:
            with path.open(newline="") as f:
                rows = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(f)]
        except (ValueError, TypeError) as e:
            raise UnreadableError(f"{path} is damaged: {e}", "fetch it again") from e
        found[path.relative_to(record.artifacts).as_posix()] = rows
    return found


def _loss_falls(curves: dict[str, list[dict[str, float]]]) -> Criterion:
    """The median of the last tenth lies below that of the first tenth, on every worker that wrote a table."""
    name, facts, good = "loss falls", [], True
    for file, rows in curves.items():
        if len(rows) >= 2:
            part = max(1, len(rows) // 10)
            first = statistics.median(r["loss"] for r in rows[:part])
            last = statistics.median(r["loss"] for r in rows[-part:])
            good = good and last < first
            facts.append(f"{file}: {first:.4f} -> {last:.4f} in {len(rows)} rows")
    return Criterion(name, (MET if good else NOT_MET) if facts else NOT_SHOWN, "; ".join(facts) or "no training.csv")


def _throughput(curves: dict[str, list[dict[str, float]]]) -> Criterion:
    """Non-zero after the warm-up, and half of all values within a quarter around the median."""
    name, facts, good = "throughput is non-zero and stable", [], True
    for file, rows in curves.items():
        column = "samples_per_s" if rows and rows[0].get("samples_per_s") else "toks_per_s"
        rates = sorted(r.get(column, 0.0) for r in rows[int(len(rows) * _WARM_UP) :])
        if rates:
            middle = statistics.median(rates)
            low, high = rates[len(rates) // 4], rates[(3 * len(rates)) // 4]
            good = good and middle > 0 and high - low <= 2 * _STABLE * middle
            facts.append(f"{file}: {middle:.1f} {column}, middle half {low:.1f} to {high:.1f}")
    return Criterion(name, (MET if good else NOT_MET) if facts else NOT_SHOWN, "; ".join(facts) or "no training.csv")


def _checkpoints(record: RunRecord) -> list[tuple[str, int, str]]:
    """The newest checkpoint that each pod reported as durable."""
    newest: dict[str, tuple[int, str]] = {}
    for event in record.engine_events("checkpoint_written"):
        step, sha = int(event.fields.get("step", -1)), str(event.fields.get("sha256", ""))
        if step >= newest.get(event.pod, (-1, ""))[0]:
            newest[event.pod] = (step, sha)
    return [(pod, step, sha) for pod, (step, sha) in sorted(newest.items())]


def _checkpoint_saved(record: RunRecord) -> Criterion:
    found = _checkpoints(record)
    fact = f"newest at step {max(step for _, step, _ in found)} on {len(found)} pods" if found else "none was reported"
    return Criterion("a checkpoint was saved", MET if found else NOT_MET, fact)


def _resumed(record: RunRecord) -> Criterion:
    """A resume verifies the checkpoint it loads, so its event is the proof."""
    steps = [int(e.fields.get("step", -1)) for e in record.engine_events("resumed")]
    refused = sum(1 for _ in record.engine_events("checkpoint_refused"))
    fact = f"{len(steps)} workers resumed, last from step {steps[-1]}" if steps else "nothing was resumed in this run"
    return Criterion(
        "a resume from a checkpoint succeeded",
        MET if steps else NOT_SHOWN,
        fact + (f"; {refused} damaged checkpoints refused" if refused else ""),
    )


def _verified(record: RunRecord, phase: str) -> Criterion:
    verdict = record.snapshot.verdicts.get(phase)
    if verdict is None:
        return Criterion("the proof bundle verifies", NOT_SHOWN, "no verdict")
    fact = f"global root {verdict.global_root}" if verdict.ok else verdict.detail
    return Criterion("the proof bundle verifies", MET if verdict.ok else NOT_MET, fact)


# ---- deviations ----------------------------------------------------------------------------------------------------


def _deviations(record: RunRecord) -> list[Deviation]:
    return [Deviation(e.ts, text) for e in _once(record) if (text := _deviation(e))]


def _deviation(e: ev.Event) -> str:
    """What of an event is a deviation from the plan; "" if nothing."""
    if isinstance(e, ev.StageChanged) and e.status in ("failed", "skipped", "waiting"):
        return f"stage {e.name} {e.status}: {e.detail}".rstrip(": ")
    if isinstance(e, ev.GateMeasured) and not e.ok:
        return f"gate {e.name} not passed: wanted {e.wanted}, measured {e.measured}"
    if isinstance(e, ev.PodChanged) and e.state in ("lost", "failed"):
        return f"pod {e.pod} {e.state}: {e.detail}".rstrip(": ")
    if isinstance(e, ev.PhaseStarted) and e.attempt:
        return f"{e.phase} resumed, attempt {e.attempt}"
    if isinstance(e, ev.WorkerProcess) and _bad_exit(e):
        return f"worker {e.coord} ended with {e.signal or f'exit {e.rc}'}"
    if isinstance(e, ev.HaltRequested) and not e.drill:
        return f"{e.mode} asked by {e.by}" + (f": {e.reason}" if e.reason else "")
    if isinstance(e, ev.ForkDetected):
        return f"fork at epoch {e.epoch} between {' and '.join(f'P{p}' for p in e.parties)}"
    if isinstance(e, ev.Verdict) and not e.ok:
        return f"{e.phase} not verified: {e.detail}"
    if isinstance(e, ev.Alert) and e.level in ("warn", "error"):
        return f"{e.level} {e.name}: {e.text}"
    if isinstance(e, ev.RunEnded) and (e.status != "ok" or e.leaks):
        leaks = f"; left behind: {', '.join(e.leaks)}" if e.leaks else ""
        return f"run ended {e.status}: {e.detail}".rstrip(": ") + leaks
    return ""
