"""The hand-over checklist, filled from facts: what was delivered, where it ran, if it met the criteria.

Nothing is taken from the journal that a file can show: proofs are verified anew with the identities that the console
saw, files are held against the checksums that came with them, signatures are checked before anything is called
committed. What only the journal knows (prices, times, what went wrong) is said as what the console recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from uvcc_console.core import events as ev
from uvcc_console.core import pod_states
from uvcc_console.core.answers.shown import NOT_VERIFIED, shown
from uvcc_console.report import collector
from uvcc_console.report.criteria import (
    MET,
    NOT_MET,
    NOT_SHOWN,
    Criterion,
    NewestCheckpoint,
    bad_exit,
    checkpoints,
    criteria,
    once,
)
from uvcc_console.report.metrics import faults_injected
from uvcc_console.report.package import Package
from uvcc_console.report.recheck import digest
from uvcc_console.report.record import RunRecord
from uvcc_console.report.redact import checked
from uvcc_console.report.run_log import stamp
from uvcc_console.report.throughput import HEAD, Throughput, throughput
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.run_files import files
from uvcc_engine.contract.text import clean, counted, in_markdown, size_words
from uvcc_engine.transcript.formats import reading
from uvcc_engine.transcript.proof.bundle import NAME, POLICY_FILE
from uvcc_engine.transcript.proof.package import RUN_LOG
from uvcc_engine.transcript.terms.commit_record import RECORDS

__all__ = ["MET", "NOT_MET", "NOT_SHOWN", "Criterion", "Handoff", "handoff", "write_handoff"]
OUTPUT: Final = "handoff.md"


@dataclass(frozen=True, slots=True)
class Attached:
    """A file that is handed over. ``trouble``: why it is not what it is said to be; "" if it is."""

    name: str
    sha256: str
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Deviation:
    """Something that did not go as planned, and when."""

    ts: float
    text: str


@dataclass(frozen=True, slots=True)
class Handoff:
    """The filled checklist, as of ``at``. Names of files are relative to the artifacts."""

    run: str
    at: float
    attached: Sequence[Attached]
    missing: Sequence[str]
    facts: Sequence[tuple[str, str]]
    result: Sequence[tuple[str, str]]
    criteria: Sequence[Criterion]
    throughput: Sequence[Throughput]
    checkpoints: Sequence[NewestCheckpoint]
    deviations: Sequence[Deviation]

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "checked": stamp(self.at),
            "attached": [{"file": a.name, "sha256": a.sha256, "trouble": a.trouble} for a in self.attached],
            "missing": list(self.missing),
            "facts": dict(self.facts),
            "result": dict(self.result),
            "criteria": [{"name": c.name, "status": c.status, "fact": c.fact} for c in self.criteria],
            "throughput": [asdict(t) for t in self.throughput],
            "checkpoints": [
                {"pod": k.pod, "step": k.step, "sha256": k.sha256, "committed": k.committed, "word": k.word}
                for k in self.checkpoints
            ],
            "deviations": [{"ts": stamp(d.ts), "text": d.text} for d in self.deviations],
        }

    def text(self) -> str:
        """The checklist in Markdown."""
        lines = [
            f"# Hand-over of {self.run}",
            "",
            f"Files were read and checked {stamp(self.at)}.",
            "",
            "## Attached",
            "",
        ]
        lines += [
            f"- [{' ' if a.trouble else 'x'}] `{a.name}` SHA-256 `{a.sha256}`" + (f": {a.trouble}" if a.trouble else "")
            for a in self.attached
        ]
        lines += [f"- [ ] {name}: not there" for name in self.missing]
        lines += ["", "## Hardware and launch", ""]
        lines += [f"- {in_markdown(name)}: {in_markdown(value)}" for name, value in self.facts]
        lines += ["", "## Result", ""]
        lines += [f"- {name}: {in_markdown(value)}" for name, value in self.result] or ["- none"]
        lines += ["", "## Success criteria", "", "| criterion | status | fact |", "|---|---|---|"]
        lines += [f"| {in_markdown(c.name)} | {c.status} | {in_markdown(c.fact)} |" for c in self.criteria]
        lines += ["", "## Throughput, expected and measured", ""]
        lines += [HEAD, *(t.line() for t in self.throughput)] if self.throughput else ["- no training.csv"]
        lines += ["", "## Checkpoints", ""]
        lines += [f"- {k.pod}: step {k.step}, manifest SHA-256 `{k.sha256}`, {k.word}" for k in self.checkpoints] or [
            "- none"
        ]
        lines += ["", "## Deviations", ""]
        lines += [f"- {stamp(d.ts)} {in_markdown(d.text)}" for d in self.deviations] or ["- none"]
        return "\n".join(lines) + "\n"


def handoff(run_dir: Path, clock: Callable[[], float] = time.time, package: Package | None = None) -> Handoff:
    """Fill the checklist from a run's files and journal. ``package``: the run, if it was read already.

    Raises UnreadableError without a journal.
    """
    package = package or Package(RunRecord.load(run_dir), clock)
    record, clock = package.record, package.clock
    phase = record.phases[-1] if record.phases else ""
    attached, missing = _attached(package, phase)
    return Handoff(
        record.snapshot.run,
        clock(),
        attached,
        missing,
        _facts(package, phase),
        list(_result(package, phase)),
        list(criteria(package, phase)),
        list(throughput(package, phase)),
        checkpoints(package, phase),
        _deviations(package),
    )


def write_handoff(run_dir: Path, out: Path | None = None, made: Handoff | None = None) -> Path:
    """Write ``artifacts/handoff.md`` (or ``out``). Raises RedactionError for what must not leave; then nothing is.
    Raises UvccError where it cannot be written."""
    path = out or run_dir / "artifacts" / OUTPUT
    text = (made or handoff(run_dir)).text()
    for _ in checked("(handoff)", text.splitlines()):
        pass
    with collector.around(run_dir, out) as written:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise files.write_failed(path, e) from e
        files.write_atomic(path, text.encode())
        written.append(path)
    return path


def _attached(package: Package, phase: str) -> tuple[list[Attached], list[str]]:
    record = package.record
    wanted = [files.RUN_INFO, files.RUN_JSON, files.TRAINING, files.LOGS, RUN_LOG]
    if record.snapshot.proves:
        wanted += [POLICY_FILE, NAME, RECORDS]
    found, missing = [], []
    home = record.artifacts / phase
    for pattern in wanted:
        hits = sorted(home.glob(pattern)) or sorted(home.rglob(pattern)) if phase else []
        hits = hits or sorted(record.artifacts.glob(pattern))
        hits = [p for p in hits if p.is_file() and p.stat().st_size]
        if not hits:
            missing.append(pattern)
        for path in hits:
            found.append(Attached(path.relative_to(record.artifacts).as_posix(), digest(path), package.trouble(path)))
    return found, missing


def _words(value: object) -> str:
    """A fact as people write it: what has parts in brackets, its parts as name and value."""
    if isinstance(value, Mapping):
        return f"({', '.join(f'{k} {_words(v)}' for k, v in value.items())})"
    return f"({', '.join(map(_words, value))})" if isinstance(value, list) else str(value)


def _facts(package: Package, phase: str) -> list[tuple[str, str]]:
    record = package.record
    s, t = record.snapshot, record.size
    parties = f"{PARTIES} parties x " if s.proves else ""
    size = size_words(t.replicas, t.stages, t.tensor, parties)
    facts = [("profile", f"{s.profile_name} ({s.job_kind})"), ("topology", size)]
    facts += [("operated", sentence) for sentence in s.operation]
    for pod in record.pods:
        facts.append((f"pod {pod.pod}", f"{pod.provider}, {pod.price_hr:.2f} USD/h" if pod.price_hr else pod.provider))
    for event in record.engine_events("dp_preflight_ok", "dp_preflight_failed"):
        shown_facts = ", ".join(f"{k} {_words(v)}" for k, v in event.fields.items() if v not in (None, [], ""))
        facts.append((f"preflight {event.pod}", shown_facts or "passed"))
    facts += _launched(package, phase)
    if injected := {k: n for k, n in faults_injected(record).items() if n}:
        facts.append(("rehearsed faults", ", ".join(f"{k} {n}" for k, n in injected.items())))
    facts.append(("spent", f"{s.spent:.2f} USD by the console's ledger"))
    return facts


def _launched(package: Package, phase: str) -> list[tuple[str, str]]:
    """What every pod's run.info says of hardware, code and configuration; said once where all pods say the same.

    One that was changed is not quoted; what contradicts the signed policy is said to.
    """
    told: dict[str, dict[str, str]] = {}
    facts, infos = [], []
    for path in sorted((package.record.artifacts / phase).rglob(files.RUN_INFO)) if phase else []:
        if wrong := package.trouble(path):
            facts.append((f"{path.parent.name} run.info", f"not quoted: it {wrong}"))
            continue
        infos.append(path)
        for line in reading.read_file(path).decode(errors="replace").splitlines():
            key, colon, value = line.partition(": ")
            if colon and (key in _LAUNCH or key.startswith(_CONFIG)):
                told.setdefault(clean(key, 100), {})[path.parent.name] = clean(value, 500)
    for key, by_pod in told.items():
        if len(by_pod) == len(infos) and len(set(by_pod.values())) == 1:
            facts.append((key, f"{next(iter(by_pod.values()))} (all {counted(len(infos), 'pod')})"))
        else:
            facts += [(f"{pod} {key}", value) for pod, value in by_pod.items()]
    if (policy := package.policy(phase)) is not None:
        signed = {"policy_hash": policy.hash.hex(), "sid_job": policy.sid_job.hex(), "code_hash": policy.code_hash}
        for key, value in signed.items():
            for pod, other in told.get(key, {}).items():
                if other != value:
                    facts.append((f"{pod} {key}", f"contradicts the signed policy, which says {value}"))
    return facts


_CONFIG: Final = ("job.", "topology.", "config.")
_LAUNCH: Final = (
    "kind",
    "version",
    "policy_hash",
    "sid_job",
    "device",
    "backend",
    "gpu",
    "gpus",
    "gpu_model",
    "gpu_memory_mib",
    "driver",
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


def _result(package: Package, phase: str) -> Iterator[tuple[str, str]]:
    """The certificate's values as they were verified just now, else what the pods reported, and marked so."""
    s = package.record.snapshot
    found = shown(s, phase, package.record.changed)
    if not s.proves:
        yield from ((name, f"{value:.6g} ({NOT_VERIFIED})") for name, value in sorted(found.values.items()))
        yield from (("result hash", f"{h} ({NOT_VERIFIED})") for h in found.hashes)
        return
    proof = package.proof(phase) if phase else None
    if proof is None or proof.certificate is None:
        if found.mark and found.at:
            yield "verdict", found.words(utc=True)
        word = f"verified {stamp(proof.then)}, not by this release" if proof and proof.then else "NOT VERIFIED"
        yield from ((name, f"{value:.6g} ({word})") for name, value in sorted(found.values.items()))
        yield from (("result hash", f"{h} ({word})") for h in found.hashes)
        return
    c = proof.certificate
    word = f"verified {stamp(proof.at)}" if proof.whole else "signed, not fully verified"
    yield from ((name, f"{value:.6g} ({word})") for name, value in sorted(c.values.items()))
    yield from (("result hash", f"{h} ({word})") for h in c.result_hashes)
    yield from (("global root", c.global_root), ("run root", c.run_root), ("sid_job", c.sid_job))


# ---- deviations ----------------------------------------------------------------------------------------------------


def _deviations(package: Package) -> list[Deviation]:
    """What the console recorded while the run went on, then what the files show now."""
    found = [Deviation(e.ts, text) for e in once(package.record) if (text := _deviation(e))]
    now = package.clock()
    for name, wrong in package.altered().items():
        found.append(Deviation(now, f"{name} {wrong}"))
    for phase in package.record.phases if package.record.snapshot.proves else ():
        verdict, proof = package.record.snapshot.verdicts.get(phase), package.proof(phase)
        if verdict is not None and verdict.ok and proof.certificate is None:
            now_it = "this release cannot read it" if proof.then else "does not now"
            found.append(Deviation(proof.at, f"{phase} was verified {stamp(verdict.ts)}, {now_it}: {proof.error}"))
    return found


def _deviation(e: ev.Event) -> str:
    """What of an event is a deviation from the plan; "" if nothing."""
    if isinstance(e, ev.StageChanged) and e.status in ("failed", "skipped", "waiting"):
        return f"stage {e.name} {e.status}: {e.detail}".rstrip(": ")
    if isinstance(e, ev.GateMeasured) and not e.ok:
        return f"gate {e.name} not passed: wanted {e.wanted}, measured {e.measured}"
    if isinstance(e, ev.PodChanged) and e.state in pod_states.BROKEN:
        return f"pod {e.pod} {e.state}: {e.detail}".rstrip(": ")
    if isinstance(e, ev.PhaseStarted) and e.attempt:
        return f"{e.phase} resumed, attempt {e.attempt}"
    if isinstance(e, ev.WorkerProcess) and bad_exit(e):
        return f"worker {e.coord} ended with {e.signal or f'exit {e.rc}'}"
    if isinstance(e, ev.HaltRequested) and not e.drill:
        return f"{e.mode} asked by {e.by}" + (f": {e.reason}" if e.reason else "")
    if isinstance(e, ev.ForkDetected):
        return f"fork at epoch {e.epoch} between {' and '.join(f'P{p}' for p in e.parties)}"
    if isinstance(e, ev.PhaseVerdict) and not e.ok:
        return f"{e.phase} not verified: {e.detail}"
    if isinstance(e, ev.Alert) and e.level in ("warn", "error"):
        return f"{e.level} {e.name}: {e.text}"
    if isinstance(e, ev.RunEnded) and (e.status != "ok" or e.leaks):
        leaks = f"; left behind: {', '.join(e.leaks)}" if e.leaks else ""
        return f"run ended {e.status}: {e.detail}".rstrip(": ") + leaks
    return ""
