"""``uvcc bench package``: a finished run of many workers is packed for its auditor, and checked as he checks it.

Rows: ``package_build`` (``uvcc package``, of a run whose reports were never written; by the clock, and processor time,
which other work on the machine does not change), ``package_size``,
``package_standalone`` (``verify.py`` of the unpacked package on one core) and ``package_verify`` (``uvcc verify``). The
run's evidence is genuine: every worker's transcript, with real keys, signatures and agreement, of messages that have
the form of its job. Its journal and its pods' files are as many and as long as such a run leaves them.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from uvcc_console.bench.scratch import scratch
from uvcc_console.bench.terminal import python
from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal
from uvcc_console.core.paths import JOURNAL
from uvcc_console.report import collector
from uvcc_console.report.received import unpacked
from uvcc_console.report.recheck import digests
from uvcc_console.report.record import RunRecord
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.job.topology import AXES, PARTIES, Coord, Topology
from uvcc_engine.contract.machine.benchrows import Row, row
from uvcc_engine.contract.run_files import files
from uvcc_engine.transcript.proof.bundle import NAME, Bundle, read_bundle
from uvcc_engine.transcript.proof.derived_files import signed_losses
from uvcc_engine.transcript.signing.sshsig import write_allowed_signers

WORKERS: Final = 192
RUN: Final = "packed"
STEPS, OPS = 4, 36  # 288 leaves of a worker in each of five epochs: 276,000 of 192 workers
TICKS: Final = 32  # microbatches of a step, forward and backward
_START: Final = 1_700_000_000.0
_REHEARSAL: Final = "uvcc_engine.bench.work.rehearsal"
_CODE: Final = "import sys; from uvcc_console.cli.main import main; sys.exit(main())"


def topology_of(workers: int) -> Topology:
    """The grid of a fleet of about so many workers: four stages and two ranks where replicas of them fit."""
    for stages, tensor in ((4, 2), (2, 2), (1, 1)):
        if workers >= PARTIES * stages * tensor:
            return Topology(workers // (PARTIES * stages * tensor), stages, tensor)
    return Topology()


def write_run(run_dir: Path, size: Topology, *, steps: int = STEPS, ops: int = OPS) -> None:
    """A run's folder as a finished rollout leaves it, before anything of it was reported."""
    full = run_dir / "artifacts" / "full"
    full.mkdir(parents=True)
    grid = [str(n) for n in (size.replicas, size.stages, size.tensor, steps, ops)]
    subprocess.run(python("-m", _REHEARSAL, str(full), *grid), check=True, timeout=900)
    shutil.rmtree(full / "identity")  # private keys are no part of a package
    bundle = read_bundle(full / NAME, lambda policy: True)
    for coord in size.coords():
        home = full / _pod(coord)
        home.mkdir(exist_ok=True)
        transcript = f"transcript_{coord}"
        (full / f"pod{coord.party}" / transcript).rename(home / transcript)
    for party in range(PARTIES):
        shutil.rmtree(full / f"pod{party}")
    told = list(_workers_words(size, steps))
    for pod in sorted({_pod(c) for c in size.coords()}):
        _pod_files(full / pod, signed_losses(bundle), [e for e in told if e.pod == pod])
    journal = Journal(run_dir / JOURNAL, source="bench")
    journal.append(*_story(run_dir, size, steps, bundle, told))
    journal.close()


def _pod(coord: Coord) -> str:
    return f"p{coord.party}r{coord.replica}"


def _workers_words(size: Topology, steps: int) -> Iterator[ev.EngineEvent]:
    """What every worker told of itself while it ran."""

    def said(at: float, name: str, **fields: Any) -> ev.EngineEvent:
        return ev.EngineEvent(ts=at, pod=_pod(coord), level="info", event=name, fields={"coord": str(coord)} | fields)

    for coord in size.coords():
        yield said(_START, "party_start", party=coord.party, step=0, attempt=0)
        for group in reversed(AXES):
            yield said(_START + 1, "uid_wait", group=group)
            yield said(_START + 2, "group_ready", group=group, backend="unix", seconds=0.2 + coord.stage / 8)
        yield said(_START + 3, "dp_ready")
        yield said(_START + 3, "dp_ok")
        for step in range(steps):
            at = _START + 10 * step
            for microbatch in range(TICKS):
                for phase, begin in (("F", at), ("B", at + 5.0)):
                    start = begin + 0.1 * (microbatch + coord.stage)
                    tick = {"step": step, "phase": phase, "microbatch": microbatch, "start": start, "end": start + 0.1}
                    yield said(at + 10, "pipeline_tick", **tick)
            yield said(at + 10, "fwd_open_ok", step=step, count=TICKS)
            yield said(at + 10, "bwd_open_ok", step=step, count=TICKS)
        for peer in (p for p in range(PARTIES) if p != coord.party):
            counted = dict.fromkeys(("messages", "frames_in", "frames_out", "bytes_in", "bytes_out"), 1 << 16)
            none = dict.fromkeys(("retransmits", "duplicates", "rejected", "stale"), 0)
            yield said(_START + 10 * steps, "plane_counters", began=_START, peer=peer, **counted, **none)


def _pod_files(folder: Path, losses: Mapping[int, float], told: list[ev.EngineEvent]) -> None:
    """The files that a pod sends beside its workers' transcripts, and their checksums."""
    rows = (f"{step},{loss:.9g},0.1,0,100\n" for step, loss in sorted(losses.items()))
    (folder / files.TRAINING).write_text("step,loss,lr,toks_per_s,samples_per_s\n" + "".join(rows))
    lines = [{"ts": e.ts, "seq": n, "level": e.level, "event": e.event, "fields": e.fields} for n, e in enumerate(told)]
    (folder / files.EVENTS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / files.RUN_INFO).write_text(f"run: {RUN}.full\ndevice: cpu\nmodel: logistic-digits\n")
    (folder / files.RUN_JSON).write_text("{}")
    for coord in sorted({e.fields["coord"] for e in told}):
        own = [e for e in told if e.fields["coord"] == coord and e.event != "pipeline_tick"]
        text = "".join(f"info {e.event} {' '.join(f'{k}={v}' for k, v in e.fields.items())}\n" for e in own)
        (folder / files.log_name(coord)).write_text(text)
    every = sorted(p for p in folder.rglob("*") if p.is_file())
    sums = (f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.relative_to(folder).as_posix()}\n" for p in every)
    (folder / "SHA256SUMS").write_text("".join(sums))


def _story(run_dir: Path, size: Topology, steps: int, bundle: Bundle, told: list[ev.EngineEvent]) -> Iterator[ev.Event]:
    """The journal, in order of time."""
    sid, result = bundle.policy.sid_job.hex(), bundle.result_hashes[0]
    values = dict(bundle.workers[0].result[1].values)
    yield ev.RunCreated(
        ts=_START - 60,
        run=RUN,
        profile_name=RUN,
        job_kind="private",
        replicas=size.replicas,
        pipeline_stages=size.stages,
        tensor=size.tensor,
        stages=["provision", "full", "verify-full", "teardown"],
        profile={"job": {"kind": "private", "steps": steps}, "fleet": {"provider": "local"}},
    )
    for pod in sorted({_pod(c) for c in size.coords()}):
        at = Coord.parse(f"{pod}s0t0")
        who: dict[str, Any] = {"pod": pod, "party": at.party, "replica": at.replica, "provider": "local"}
        shown = bundle.policy.public(at.party).ed25519
        yield ev.PodChanged(ts=_START - 50, **who, state="agent", address="pod@127.0.0.1:22", identity=shown)
    yield ev.PhaseStarted(ts=_START - 1, phase="full", engine_run=f"{RUN}.full", steps=steps, sid_job=sid)
    for c in size.coords():
        yield ev.WorkerProcess(ts=_START, pod=_pod(c), coord=str(c), state="started", pid=100)
    yield from sorted(told, key=lambda e: e.ts)
    end = _START + 10 * steps
    for worker in bundle.workers:
        coord, pod = str(worker.coord), _pod(worker.coord)
        for step in range(steps):
            yield ev.HeartbeatRead(ts=end, pod=pod, coord=coord, record={"step": step, "phase": "train"})
            yield ev.Metric(ts=end, coord=coord, step=step, values={"loss": 2 / (step + 1), "samples_per_s": 100.0})
        for _, signed in worker.roots:
            yield ev.RootReported(ts=end, coord=coord, epoch=signed.root.epoch, root=signed.root.root.hex())
        yield ev.ResultReported(ts=end, pod=pod, coord=coord, phase="full", result_hash=result, values=values)
        yield ev.WorkerProcess(ts=end, pod=pod, coord=coord, state="exited", pid=100, rc=0)
    yield ev.PhaseVerdict(
        ts=end + 10,
        phase="full",
        ok=True,
        global_root=str(bundle.epochs[-1]["global_root"]),
        sid_job=sid,
        bundle=str(run_dir / "artifacts" / "full" / NAME),
        values=values,
        result_hashes=list(bundle.result_hashes),
        run_root=bundle.run_root,
        level="transcripts",
        pinned=True,
        files=digests(run_dir / "artifacts" / "full"),
    )
    yield ev.RunEnded(ts=end + 20, status="ok")


# ---- measuring -----------------------------------------------------------------------------------------------------


def bench(runs: int = 1, workers: int = WORKERS) -> list[Row]:
    """Every row, of a run of ``workers`` workers. Raises UvccError if a package does not verify."""
    with scratch() as home, _data_folder(home):
        size = topology_of(workers)
        run_dir = home / "runs" / RUN
        write_run(run_dir, size)
        signers, archive = home / "allowed_signers", home / f"{RUN}.uvcc.tar.zst"
        built, standalone, verified = [], [], []
        for n in range(max(1, runs)):
            fresh = home / "runs" / f"{RUN}{n}"
            shutil.copytree(run_dir, fresh, copy_function=shutil.copy2)
            built.append(_timed(python("-c", _CODE, "package", fresh.name, "--output", str(archive))))
            write_allowed_signers(signers, RunRecord.load(fresh).signers("full"), collector.public_line())
            shutil.rmtree(fresh)
            pinned = ("--allowed-signers", str(signers))
            verified.append(_timed(python("-c", _CODE, "verify", str(archive), *pinned)))
            with unpacked(archive) as folder:
                command = [sys.executable, "-I", str(folder / "verify.py"), str(folder), *pinned]
                standalone.append(_timed(command, one_core=True))
        mib = archive.stat().st_size / (1 << 20)
        return [
            row("package_build", "seconds", "s", [wall for wall, _ in built]),
            row("package_build", "cpu", "s", [cpu for _, cpu in built]),
            row("package_size", "bytes", "MiB", [mib]),
            row("package_standalone", "seconds", "s", [wall for wall, _ in standalone]),
            row("package_verify", "seconds", "s", [wall for wall, _ in verified]),
            row("package_workers", "count", "workers", [float(size.workers)]),
        ]


@contextmanager
def _data_folder(home: Path) -> Iterator[None]:
    """Another data folder, here and in every process that is started."""
    before = os.environ.get("UVCC_HOME")
    os.environ["UVCC_HOME"] = str(home)
    try:
        yield
    finally:
        if before is None:
            del os.environ["UVCC_HOME"]
        else:
            os.environ["UVCC_HOME"] = before


def _to_one_core() -> Callable[[], None] | None:
    """What keeps a child on one core before it runs; None where the system has no such call."""
    if sys.platform != "linux":
        return None
    core = min(os.sched_getaffinity(0))
    return lambda: os.sched_setaffinity(0, {core})


def _timed(command: list[str], *, one_core: bool = False) -> tuple[float, float]:
    """Seconds of a command that must succeed: by the clock, and of the processor."""
    start, before = time.perf_counter(), _children_s()
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
        preexec_fn=_to_one_core() if one_core else None,
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-400:]
        raise UvccError(f"{' '.join(command[-4:])} ended with {done.returncode}: {said}")
    return time.perf_counter() - start, _children_s() - before


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
