"""``all_logs_explained.md``: one file that an auditor reads from the top.

What ran, who took part, the verifier's verdict, key figures, and every log with its SHA-256, each heading explained.
All text is checked by :mod:`redact` before it is written; one forbidden line and there is no bundle.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from uvcc_console.report import collector, metrics
from uvcc_console.report.artifacts import SIGNERS, write_artifacts
from uvcc_console.report.package import Package
from uvcc_console.report.record import RunRecord, address
from uvcc_console.report.redact import LONGEST, checked, checked_as_shown, lines_of
from uvcc_console.report.run_log import stamp
from uvcc_engine.contract.errors import UvccError, VerificationError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.run_files import files
from uvcc_engine.contract.text import clean_block, in_markdown, size_words
from uvcc_engine.transcript.formats import reading
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.proof import derived_files, manifest
from uvcc_engine.transcript.proof.bundle import NAME, Bundle
from uvcc_engine.transcript.proof.package import LAYOUT, RUN_LOG
from uvcc_engine.transcript.signing.sshsig import POLICY_NAMESPACE, RESULT_NAMESPACE, ROOT_NAMESPACE
from uvcc_engine.transcript.terms.commit_record import RECORDS

OUTPUT: Final = "all_logs_explained.md"
_ANY: Final = 2**60  # read piece by piece
# text that is quoted in full; everything else is listed with its hash only
QUOTED: Final = (
    RUN_LOG,
    LAYOUT,
    derived_files.DP_MATRIX,
    derived_files.AUDIT,
    "*.log",
    files.EVENTS,
    files.TRAINING,
    files.VAL,
    files.RUN_INFO,
    files.RUN_JSON,
    files.EXITS,
    files.RESULTS,
    files.METRICS,
    files.STACKDUMPS,
)
# never opened for quoting, whatever they are called elsewhere
UNQUOTED: Final = ("*.bin", "*.safetensors", leaf_file.OPENINGS, leaf_file.PEERS, leaf_file.ROOTS, NAME)
_AS_FETCHED: Final = (
    f"Each log is quoted without control characters, lines of more than {LONGEST} characters in parts; its SHA-256 is "
    "that of the file."
)
_EXPLAINED: Final = {
    RUN_LOG: "The rollout as the console saw it, one event a line: pods, stages, roots, results, verdicts.",
    LAYOUT: "Which pod belongs to which party and replica; for each phase its links, relays and groups.",
    derived_files.DP_MATRIX: "Replicas with their session ids and roots of the first epoch.",
    derived_files.AUDIT: "The last epoch's roots. Everything here follows from the signed proof bundle.",
    files.EVENTS: "What a pod's workers reported: links, checkpoints, errors, the result.",
    files.TRAINING: "One row a step, as the workers wrote it.",
    files.VAL: "Evaluations.",
    files.RUN_INFO: "The resolved configuration and versions of the pod.",
    files.RUN_JSON: "The same as JSON.",
    files.result_name(
        0
    ): "The outcome as this pod reported it, with its signature; what was verified stands in part 3.",
    files.exit_name(0): "How the worker ended.",
    RECORDS: "What three parties signed about each checkpoint that all of them had on disk.",
}
_WORKER: Final = "What one worker said: start, policy, links, epochs, checkpoints, result, errors."


@dataclass(frozen=True, slots=True)
class LogFile:
    """One file of the run. ``name`` is relative to the artifacts."""

    name: str
    path: Path
    size: int
    sha256: str
    quoted: bool


def write_bundle(
    run_dir: Path,
    out: Path | None = None,
    exclude: Sequence[str] = (),
    clock: Callable[[], float] = time.time,
    package: Package | None = None,
) -> list[Path]:
    """Write the bundle (default ``artifacts/all_logs_explained.md``) and, if zstandard is installed, its ``.zst``.

    ``exclude``: names (or patterns) of files to leave out; they are still listed. ``package``: the run, if it was read
    already. Raises RedactionError naming file and
    line if anything share-, key- or token-shaped would get in; then no bundle exists, not even an older one.
    """
    package = package or Package(RunRecord.load(run_dir), clock)
    record = package.record
    try:
        write_artifacts(run_dir, record=record)
    except VerificationError:  # into a package that does not hold nothing is written; elsewhere it is told of
        if out is None:
            raise
    path = out or record.artifacts / OUTPUT
    packed = path.with_name(path.name + ".zst")
    partial = path.with_name(path.name + ".part")
    with collector.around(run_dir, out) as written:
        written += (path, packed)
        try:
            for old in (path, packed, partial):
                old.unlink(missing_ok=True)
            logs = find_logs(record.artifacts, exclude)
            with partial.open("w") as file:
                for line in _document(package, logs):
                    file.write(clean_block(line) + "\n")
            os.replace(partial, path)
            return [path, *_compress(path, packed)]
        except OSError as e:
            raise UvccError(f"cannot write {path}: {e.strerror}", "free disk space, or name another file") from e
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()


def _compress(path: Path, packed: Path) -> list[Path]:
    try:
        import zstandard
    except ImportError:
        return []
    with path.open("rb") as source, packed.open("wb") as target:
        zstandard.ZstdCompressor(level=10).copy_stream(source, target)
    return [packed]


def find_logs(artifacts: Path, exclude: Sequence[str] = ()) -> list[LogFile]:
    """Every file of a run's artifacts with its hash, in order of name.

    But for what a service's library wrote for itself: it repeats figures, and is named by hexadecimal ids of its own.
    """
    found = []
    for name in reading.tree(artifacts, 2 * manifest.MOST_FILES).files:  # no link leads a log of elsewhere in here
        path = artifacts / name
        base = path.name
        if base.startswith((OUTPUT, manifest.NAME)) or "figs/" in name:  # the manifest lists this very file
            continue
        if not set(files.SINK_FOLDERS).isdisjoint(Path(name).parts[:-1]):
            continue
        left_out = any(fnmatch(name, x) or fnmatch(base, x) for x in exclude)
        quoted = not left_out and _matches(base, QUOTED) and not _matches(base, UNQUOTED)
        with reading.open_regular(path, _ANY) as f:
            digest = hashlib.file_digest(f, "sha256").hexdigest()
        found.append(LogFile(name, path, path.stat().st_size, digest, quoted))
    return found


def _matches(base: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(base, p) for p in patterns)


def _document(package: Package, logs: Sequence[LogFile]) -> Iterator[str]:
    yield from checked("(summary)", _summary(package))
    yield from checked("(list of files)", _files(logs))
    yield from ("", "# 6. Logs", "", _AS_FETCHED)
    for log in logs:
        if log.quoted and log.size:
            yield from _quote(log)


def _quote(log: LogFile) -> Iterator[str]:
    base = log.path.name
    yield ""
    yield f"## {in_markdown(log.name)}"
    yield ""
    why = _EXPLAINED.get(base) or (
        "What one worker said: start, policy, links, epochs, checkpoints, result, errors."
        if base.startswith("worker_")
        else ""
    )
    yield from ([why, ""] if why else [])
    yield f"SHA-256 `{log.sha256}`, {log.size} bytes"
    yield ""
    fence = "````"
    yield f"{fence}text"
    with io.TextIOWrapper(reading.open_regular(log.path, _ANY), errors="replace", newline="\n") as file:
        # a line that looks like our own fence would end the quotation early
        yield from (line.replace(fence, "` ` ` `") for line in checked_as_shown(log.name, lines_of(file)))
    yield fence


def _summary(package: Package) -> Iterator[str]:
    record = package.record
    s = record.snapshot
    parties = "3 parties x " if s.proves else ""
    size = size_words(s.replicas, s.pipeline_stages, s.tensor, parties)
    yield f"# {s.run}: all logs, explained"
    yield ""
    yield "This file holds every log of one run, with what to look at first. It was checked to hold no share, key or"
    if s.proves:
        yield "token. Nothing in it needs to be believed: the proof bundle is signed, and `uvcc verify` recomputes it."
    else:
        yield f"token. A job of kind {s.job_kind} signs no transcript: these are its logs, not a proof."
    yield ""
    yield "# 1. What ran"
    yield ""
    yield f"- Profile {in_markdown(s.profile_name)}, job kind {s.job_kind}, {size}"
    yield f"- Planned {stamp(s.created)}, last event {stamp(s.updated)}"
    yield f"- Status: {s.status}" + (f" ({in_markdown(s.detail)})" if s.detail else "")
    for v in s.stages:
        took = f", {v.ended - v.started:.1f} s" if v.ended > v.started > 0 else ""
        yield in_markdown(f"- Stage {v.name}: {v.status}{took}" + (f": {v.detail}" if v.detail else ""))
    yield ""
    yield "# 2. Who"
    yield ""
    if s.proves:
        yield "Three domains; each signs with a key of its own, born on its own pod."
        yield from ("", *(f"- {in_markdown(sentence)}" for sentence in s.operation))
    else:
        yield "The pods that the job ran on."
    yield ""
    yield "| party | replica | pod | provider | address | identity |"
    yield "|---|---|---|---|---|---|"
    for pod in record.pods:
        _, host, port = address(pod)
        cells = (pod.pod, pod.provider, f"{host}:{port}", pod.identity)
        yield f"| P{pod.party} | {pod.replica} | {' | '.join(map(in_markdown, cells))} |"
    yield ""
    yield "# 3. The verifier's verdict"
    yield ""
    yield f"Computed {stamp(package.clock())} from the files beside this one, not copied from a log."
    for phase in record.phases:
        yield from ("", f"## {phase}", "", "````text", *_verdict(package, phase), "````")
    if altered := package.altered():
        yield from ("", "## Files that are not as their pods sent them", "")
        yield from (f"- {in_markdown(f'{name} {wrong}')}" for name, wrong in altered.items())
    if s.proves and record.bundles:
        yield from _by_hand(record)
    yield ""
    yield "# 4. Key figures"
    yield ""
    yield "Counted from the events that the workers told; results that say nothing else are the certificate's."
    yield ""
    yield from key_figures(record)
    yield from _gates(record)


def _by_hand(record: RunRecord) -> Iterator[str]:
    """How somebody without this product checks the signatures."""
    phase = list(record.bundles)[-1]
    yield from ("", "## Without this product", "")
    yield f"`jq` and OpenSSH alone check who signed, in the folder `{phase}`. `{SIGNERS}` holds the identities that the"
    yield "pods showed when the operator first reached them; compare them with what each domain says that its key is."
    yield from ("", "````text", *hand_checks(record.bundles[phase]), "````")


_ASIDE: Final = "../../signature"  # outside of what a manifest covers: a file more in there would be one that was added


def hand_checks(bundle: Bundle) -> list[str]:
    """Shell commands for the folder of a phase: the policy by each party, one worker's last root, and its result."""
    lines = []
    check = f"ssh-keygen -Y verify -f {SIGNERS}"
    for party in range(PARTIES):
        lines.append(f"jq -j '.policy_signatures[\"{party}\"]' {NAME} > {_ASIDE}")
        lines.append(f"jq -cjS .policy {NAME} | {check} -I P{party} -n {POLICY_NAMESPACE} -s {_ASIDE}")
    for worker in bundle.workers:
        c = worker.coord
        if (c.stage, c.tensor) == (0, 0):
            who = f"P{c.party}" + (f"r{c.replica}" if c.replica else "")
            at = f'.workers[] | select(.coord == "{c}")'
            for part, namespace in ((".roots[-1]", ROOT_NAMESPACE), (".result", RESULT_NAMESPACE)):
                lines.append(f"jq -j '{at} | {part}.signature' {NAME} > {_ASIDE}")
                lines.append(f"jq -cjS '{at} | {part}.statement' {NAME} | {check} -I {who} -n {namespace} -s {_ASIDE}")
    return lines


def key_figures(record: RunRecord) -> Iterator[str]:
    """The table of key figures: of the whole run, and of each phase, which may have had another topology."""
    parts = [(phase, record.during(phase)) for phase in record.phases]
    tables = [dict(metrics.table(part)) for _, part in parts]
    for phase, part in parts:
        size = part.size
        yield f"- {phase}: {size_words(size.replicas, size.stages, size.tensor)}"
    yield from ("", f"| {' | '.join(['metric', 'whole run', *(phase for phase, _ in parts)])} |")
    yield "|---" * (2 + len(parts)) + "|"
    for name, value in (*metrics.table(record), *metrics.of_the_run(record)):
        by_phase = [table.get(name, "-") for table in tables]
        yield f"| {' | '.join(map(in_markdown, [name, value, *by_phase]))} |"


def _verdict(package: Package, phase: str) -> list[str]:
    kind = package.record.snapshot.job_kind
    if not package.record.snapshot.proves:
        return [f"nothing to verify: a job of kind {kind} has no proof bundle, only private training has one"]
    if not (package.record.artifacts / phase / NAME).is_file():
        return ["no proof bundle: this phase was not finished"]
    proof = package.proof(phase)
    if proof.certificate is None:
        return [proof.refusal, *proof.error.splitlines()]
    return proof.certificate.text().splitlines()


def _gates(record: RunRecord) -> Iterator[str]:
    if record.snapshot.gates:
        yield from ("", "## Gates", "", "| gate | wanted | measured | passed |", "|---|---|---|---|")
        for g in record.snapshot.gates:
            yield f"| {' | '.join(map(in_markdown, (g.name, g.wanted, g.measured)))} | {'yes' if g.ok else 'NO'} |"
    if record.snapshot.alerts:
        yield from ("", "## Alerts", "")
        yield from (f"- {stamp(a.ts)} {in_markdown(f'{a.level} {a.source}: {a.text}')}" for a in record.snapshot.alerts)


def _quoted(log: LogFile) -> str:
    return "empty" if not log.size else "yes" if log.quoted else "no"


def _files(logs: Sequence[LogFile]) -> Iterator[str]:
    yield from (
        "",
        "# 5. Every file of the run",
        "",
        "Files that are not quoted are evidence for tools, not for reading. What the libraries of services wrote for",
        f"themselves, in folders {' and '.join(f'`{name}`' for name in files.SINK_FOLDERS)}, is not listed; "
        "`MANIFEST.json` has it.",
        "",
    )
    yield "| file | bytes | SHA-256 | quoted below |"
    yield "|---|---|---|---|"
    for log in logs:
        yield f"| {in_markdown(log.name)} | {log.size} | `{log.sha256}` | {_quoted(log)} |"
