"""The success criteria of a hand-over, each decided by files that were read and checked now.

A criterion is met, not met, or not shown; nothing counts as met because somebody said so, and nothing because the
journal says that it was so once.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from uvcc_console.core import events as ev
from uvcc_console.plan.measurable import STEP_MARK
from uvcc_console.report.package import Package, object_of, text_of
from uvcc_console.report.record import RunRecord
from uvcc_console.report.run_log import stamp
from uvcc_engine.contract.checkpoints import checkpoint as ck
from uvcc_engine.contract.errors import UnreadableError, VerificationError
from uvcc_engine.contract.job.topology import Coord
from uvcc_engine.contract.run_files import files
from uvcc_engine.contract.text import counted
from uvcc_engine.transcript.leaves import leaf_file

MET, NOT_MET, NOT_SHOWN = "met", "NOT MET", "not shown"
# a rate is stable if the middle half of its values lies this close around the median
_STABLE: Final = 0.25
WARM_UP: Final = 0.1
_PILOT_S: Final = 2 * 3600.0
_REPORTED: Final = "as the pods reported it, not signed"
_EQUAL: Final = 1e-6  # training.csv keeps nine digits


@dataclass(frozen=True, slots=True)
class Criterion:
    """One success criterion with the fact that decides it."""

    name: str
    status: str
    fact: str


def criteria(package: Package, phase: str) -> Iterator[Criterion]:
    """Every criterion that applies to this run."""
    record = package.record
    yield _ran_through(package, phase)
    yield _pilot_length(record, phase)
    curves, altered = training_tables(package, phase)
    yield _loss_falls(package, phase, curves, altered)
    yield _throughput(curves, altered)
    yield _checkpoint_saved(package, phase)
    yield _resumed(package, phase)
    if record.snapshot.proves:
        yield _verified(package, phase)
    for gate in record.snapshot.gates:
        yield _gate(package, gate.name, gate.ok, gate.wanted, gate.measured)


def _ran_through(package: Package, phase: str) -> Criterion:
    """No worker failed, and that each came to the last step stands in what it signed, else in its exit document."""
    name, record = "runs to the planned step without a hang or a lost worker", package.record
    starts = [e for e in record.of(ev.PhaseStarted) if e.phase == phase]
    if not starts:
        return Criterion(name, NOT_SHOWN, "no phase was started")
    ends = [e for e in _since(record, starts[-1]) if isinstance(e, ev.WorkerProcess)]
    failed = [e for e in ends if bad_exit(e)]
    if failed:
        return Criterion(
            name, NOT_MET, f"{counted(len(failed), 'worker')} failed, first {failed[0].coord} at {stamp(failed[0].ts)}"
        )
    steps, policy = starts[-1].steps, package.policy(phase)
    if policy is not None and policy.steps == steps:
        workers = len(list(policy.topology.coords()))
        after = (
            f"at most {counted(steps, 'step')}, as their validation decided"
            if policy.job.get("patience")
            else counted(steps, "step")
        )
        return Criterion(name, MET, f"{counted(workers, 'worker')} signed a result after {after}, {steps} planned")
    done = {e.coord for e in ends if e.rc == 0}
    proven = _exits(package, phase, steps)
    if done and done <= proven:
        return Criterion(name, MET, f"{len(done)} workers' exit documents say done at step {steps}, {steps} planned")
    lacking = f"{len(done & proven)} of {len(done)} workers' ends at step {steps} are in the package"
    return Criterion(name, NOT_SHOWN, lacking if done else "no worker ended")


def _exits(package: Package, phase: str, steps: int) -> set[str]:
    """Workers whose unchanged exit document says that they were done at this step."""
    found = set()
    for path in sorted((package.record.artifacts / phase).glob("*/exit*.json")):
        said = object_of(text_of(path)) if package.sound(path) else {}
        if said.get("status") == "done" and said.get("step") == steps:
            found.add(str(said.get("coord")))
    return found


def _since(record: RunRecord, start: ev.Event) -> Sequence[ev.Event]:
    found = once(record)
    return found[found.index(start) :]


def once(record: RunRecord) -> list[ev.Event]:
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


def bad_exit(e: ev.WorkerProcess) -> bool:
    """Whether a process ended otherwise than well."""
    return e.state == "exited" and e.rc != 0


def _pilot_length(record: RunRecord, phase: str) -> Criterion:
    """Only a language-model pilot has to run for hours."""
    name = "runs for at least 2 hours"
    starts = [e.ts for e in record.of(ev.PhaseStarted) if e.phase == phase]
    ends = [e.ts for e in record.of(ev.WorkerProcess) if e.state == "exited"]
    if record.snapshot.job_kind != "lm" or not starts or not ends:
        return Criterion(name, NOT_SHOWN, "asked of language-model pilots only")
    took = max(ends) - min(starts)
    return Criterion(name, MET if took >= _PILOT_S else NOT_MET, f"{took / 3600:.2f} h by the console's clock")


Curves = dict[str, list[dict[str, float]]]
_MOST_TABLES: Final = 6  # that one line quotes


def training_tables(package: Package, phase: str) -> tuple[Curves, list[str]]:
    """Rows of every training.csv of a phase, by file, and those that were changed: they are not read.

    Raises UnreadableError for one that is as its pod sent it, and damaged.
    """
    found: Curves = {}
    altered = []
    artifacts = package.record.artifacts
    for path in sorted((artifacts / phase).rglob(files.TRAINING)) if phase else []:
        name = path.relative_to(artifacts).as_posix()
        if wrong := package.trouble(path):
            altered.append(f"{name} {wrong}")
            continue
        try:
            with path.open(newline="") as f:
                rows = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(f)]
        except (ValueError, TypeError) as e:
            raise UnreadableError(f"{path} is damaged: {e}", "fetch it again") from e
        found[name] = rows
    return found, altered


def _loss_falls(package: Package, phase: str, curves: Curves, altered: list[str]) -> Criterion:
    """The median of the last tenth lies below that of the first tenth, on every worker that wrote a table.

    A table that ends otherwise than the certificate says is refuted by it.
    """
    name, facts, good = "loss falls", list[str](), True
    certificate = package.proof(phase).certificate if package.record.snapshot.proves else None
    final = certificate.values.get("loss") if certificate else None
    for file, rows in curves.items():
        if len(rows) >= 2:
            part = max(1, len(rows) // 10)
            first = statistics.median(r["loss"] for r in rows[:part])
            last = statistics.median(r["loss"] for r in rows[-part:])
            good = good and last < first
            at = len(facts) if last < first else 0  # what speaks against it stands first
            facts.insert(at, f"{file}: {first:.4f} -> {last:.4f} in {len(rows)} rows")
            if final is not None and abs(rows[-1]["loss"] - final) > _EQUAL * max(1.0, abs(final)):
                good = False
                facts.insert(0, f"{file} ends at {rows[-1]['loss']:g}, the certificate says {final:g}")
    return _of_tables(name, facts, good, altered)


def _throughput(curves: Curves, altered: list[str]) -> Criterion:
    """Non-zero after the warm-up, and half of all values within a quarter around the median."""
    name, facts, good = "throughput is non-zero and stable", list[str](), True
    for file, rows in curves.items():
        column = "samples_per_s" if rows and rows[0].get("samples_per_s") else "toks_per_s"
        rates = sorted(r.get(column, 0.0) for r in rows[int(len(rows) * WARM_UP) :])
        if rates:
            middle = statistics.median(rates)
            low, high = rates[len(rates) // 4], rates[(3 * len(rates)) // 4]
            stable = middle > 0 and high - low <= 2 * _STABLE * middle
            good = good and stable
            at = len(facts) if stable else 0
            facts.insert(at, f"{file}: {middle:.1f} {column}, middle half {low:.1f} to {high:.1f}")
    return _of_tables(name, facts, good, altered)


def _of_tables(name: str, facts: list[str], good: bool, altered: list[str]) -> Criterion:
    if len(facts) > _MOST_TABLES:
        facts = [*facts[:_MOST_TABLES], f"and {len(facts) - _MOST_TABLES} more"]
    if altered:
        return Criterion(name, NOT_MET if not good else NOT_SHOWN, "; ".join([*altered, *facts]))
    if not facts:
        return Criterion(name, NOT_SHOWN, "no training.csv")
    return Criterion(name, MET if good else NOT_MET, f"{'; '.join(facts)} ({_REPORTED})")


@dataclass(frozen=True, slots=True)
class NewestCheckpoint:
    """The newest checkpoint that a pod reported. ``word``: whose word it is, and what it stands on."""

    pod: str
    step: int
    sha256: str
    committed: bool
    word: str


def checkpoints(package: Package, phase: str) -> list[NewestCheckpoint]:
    """Of each pod the newest that it reported as durable, with what in the package bears it out."""
    newest: dict[str, tuple[int, str]] = {}
    record = package.record
    for event in record.engine_events("checkpoint_written"):
        step, sha = event.fields.get("step"), str(event.fields.get("sha256", ""))
        if isinstance(step, int) and step >= newest.get(event.pod, (-1, ""))[0]:
            newest[event.pod] = (step, sha)
    signed = package.committed(phase) if phase and record.snapshot.proves else {}
    return [_kept(package, phase, pod, *at, signed) for pod, at in sorted(newest.items())]


def _kept(
    package: Package, phase: str, pod: str, step: int, sha: str, signed: dict[tuple[str, int], set[str]]
) -> NewestCheckpoint:
    view = package.record.snapshot.pods.get(pod)
    if package.record.snapshot.proves:
        lead = str(Coord(view.replica, view.party, 0, 0)) if view is not None else ""
        held = signed.get((lead, step), set())
        if sha in held:
            return NewestCheckpoint(pod, step, sha, True, "committed with three parties' signatures")
        word = "reported by the pod; no record with three parties' signatures bears it out"
        return NewestCheckpoint(pod, step, sha, False, f"{word}, one names another manifest" if held else word)
    folder = ck.step_dir(package.record.artifacts / phase / pod / files.CHECKPOINTS, step)
    try:
        ck.verify(folder, sha)
    except VerificationError as e:
        word = "reported by the pod, it was not fetched" if not folder.is_dir() else f"does not verify: {e.what}"
        return NewestCheckpoint(pod, step, sha, False, word)
    return NewestCheckpoint(pod, step, sha, True, "every byte of it was read and is as its manifest says")


def _checkpoint_saved(package: Package, phase: str) -> Criterion:
    name, found = "a checkpoint was saved", checkpoints(package, phase)
    if not found:
        return Criterion(name, NOT_MET, "none was reported")
    sure = [k for k in found if k.committed]
    if len(sure) < len(found) or not sure:
        lacking = next(k for k in found if not k.committed)
        return Criterion(name, NOT_SHOWN, f"{len(sure)} of {counted(len(found), 'pod')}; {lacking.pod}: {lacking.word}")
    return Criterion(
        name, MET, f"newest at step {max(k.step for k in sure)} on {counted(len(sure), 'pod')}: {sure[0].word}"
    )


def _resumed(package: Package, phase: str) -> Criterion:
    """A resume verifies the checkpoint it loads, so its event in the pod's own log is the proof."""
    told = [int(e.fields.get("step", -1)) for e in package.record.engine_events("resumed")]
    steps = [f.get("step") for fields in package.reported(phase, "resumed").values() for f in fields]
    refused = sum(1 for _ in package.record.engine_events("checkpoint_refused"))
    also = f"; {refused} damaged checkpoints refused" if refused else ""
    name = "a resume from a checkpoint succeeded"
    if not told:
        return Criterion(name, NOT_SHOWN, "nothing was resumed in this run" + also)
    if not steps:
        return Criterion(name, NOT_SHOWN, f"{len(told)} resumes were streamed, no pod's unchanged log has one" + also)
    return Criterion(
        name, MET, f"{counted(len(steps), 'worker')} resumed, last from step {steps[-1]} ({_REPORTED})" + also
    )


def _verified(package: Package, phase: str) -> Criterion:
    """The verifier's word now, on the files that are handed over."""
    name, proof = "the proof bundle verifies", package.proof(phase)
    at = f"checked {stamp(proof.at)}"
    if proof.certificate is None:
        absent = not (package.record.artifacts / phase / leaf_file.BUNDLE).exists()
        then = f"verified {stamp(proof.then)}; " if proof.then else ""
        return Criterion(name, NOT_SHOWN if absent or then else NOT_MET, f"{then}{at}: {proof.error}")
    found = proof.certificate
    if not proof.pinned:
        return Criterion(
            name, NOT_SHOWN, f"{at}: it holds by itself, but no pod showed its identity to hold it against"
        )
    if not proof.whole:
        return Criterion(name, NOT_SHOWN, f"{at}: its signatures hold, but the transcripts are not in the package")
    many = f"{counted(found.epochs, 'epoch')}, {counted(found.leaves, 'leaf', 'leaves')}"
    said = f"{many} recomputed, identities as the console saw them"
    return Criterion(name, MET, f"{at}: {said}, global root {found.global_root}")


def _gate(package: Package, gate: str, ok: bool, wanted: str, measured: str) -> Criterion:
    """A gate was measured before the full run; those that files can show again are measured again."""
    figure, _, step = gate.partition(STEP_MARK)
    when = f"at step {step} of the full run" if step else "before the full run"
    name, fact = f"gate {figure}" + f" at step {step}" * bool(step), f"wanted {wanted}, measured {measured} {when}"
    status = MET if ok else NOT_MET
    if gate not in ("verifier", "result_hashes"):
        return Criterion(name, status, fact)
    proof = package.proof("smoke")
    if proof.certificate is None:
        return Criterion(name, status if proof.then else NOT_MET, f"{fact}; now: {proof.error}")
    if gate == "result_hashes" and str(len(proof.certificate.result_hashes)) != measured:
        return Criterion(name, NOT_MET, f"{fact}; now {len(proof.certificate.result_hashes)}")
    return Criterion(name, status, f"{fact}, the same at {stamp(proof.at)}")
