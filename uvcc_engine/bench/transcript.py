"""``bench transcript``: what the transcript costs a step, and how fast an auditor verifies ten million leaves."""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from blake3 import blake3

from uvcc_engine.bench.scenarios import transcript_share
from uvcc_engine.bench.timing.peak import peak_memory
from uvcc_engine.bench.work.rehearsal import make_policy, rehearse, revealed
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.topology import PARTIES, Coord, Topology
from uvcc_engine.contract.machine import calibration
from uvcc_engine.contract.machine.benchrows import Row, row, to_json, to_text
from uvcc_engine.contract.machine.by_itself import exit_code
from uvcc_engine.contract.machine.calibration import BenchBar
from uvcc_engine.contract.machine.raising_parser import RaisingParser, natural
from uvcc_engine.transcript.exchange.evidence import WorkerEvidence
from uvcc_engine.transcript.formats import kinds
from uvcc_engine.transcript.leaves.leaf import BLIND
from uvcc_engine.transcript.leaves.store import TranscriptStore
from uvcc_engine.transcript.proof.verification_certificate import Certificate
from uvcc_engine.transcript.proof.verifier import verify
from uvcc_engine.transcript.signing.identity import Identity

_SID: Final = hashlib.sha256(b"bench").digest()
_EPOCH_LEAVES: Final = 65_536  # of one worker
_KEYS: Final = {"own_key": bytes(32), "pair_keys": {1: b"1" * 32, 2: b"2" * 32}}
BARS: Final[calibration.BenchBars] = {
    ("transcript.verify", "rate"): BenchBar(100_000, "python", at_least=True),
    ("transcript.step.demo.slowdown", "ratio"): BenchBar(transcript_share.SLOWDOWN_BAR),
    ("transcript.step.demo.slowdown_cpu", "ratio"): BenchBar(transcript_share.SLOWDOWN_BAR),
    **{(f"transcript.step.{job}.recording", "share"): BenchBar(transcript_share.BAR) for job in transcript_share.JOBS},
    **{(f"transcript.step.{job}.agreeing", "share"): BenchBar(transcript_share.BAR) for job in transcript_share.JOBS},
}


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def record_rate(folder: Path, leaves: int, size: int, runs: int) -> Row:
    """Seconds per leaf from recording to the finalised root, payload hash included; reference: that hash alone."""
    payload = bytes(size)
    store = TranscriptStore(folder / f"record{size}", party=0, sid_sub=_SID, **_KEYS)  # type: ignore[arg-type]
    found = []
    for epoch in range(runs):

        def work(epoch: int = epoch) -> None:
            store.begin_epoch(epoch)
            for op in range(leaves // 2):
                store.record(0, 1, (epoch, 0, op, kinds.OPEN), payload)
                store.record(1, 2, (epoch, 0, op, kinds.OPEN), payload)
            store.finalize_epoch()

        found.append(_timed(work) / leaves)
    store.close()
    key = bytes(BLIND)
    plain = _timed(lambda: [blake3(payload, key=key).digest() for _ in range(leaves)]) / leaves
    return row(f"transcript.record.{size}B", "seconds", "s/leaf", found, plain)


def _three(folder: Path, steps: int) -> list[WorkerEvidence]:
    """The three workers of one subsession."""
    identities = [Identity.create_seeded(folder / f"id{p}", b"%d" % p) for p in range(PARTIES)]
    policy = make_policy(identities, Topology(), steps)
    return [WorkerEvidence.open(folder / f"w{p}", i, policy, Coord(0, p, 0, 0)) for p, i in enumerate(identities)]


def _agree(workers: Sequence[WorkerEvidence]) -> None:
    for w in workers:
        for v in workers:
            if v is not w:
                v.check(w.coord.party, w.agreement(v.coord.party))


def sign_time(folder: Path, runs: int) -> Row:
    """Seconds to finalise, sign and log one epoch of 60 leaves."""
    workers = _three(folder / "sign", runs)
    found = []
    for epoch in range(runs):
        for w in workers:
            w.begin(epoch)
            for peer in (p for p in range(PARTIES) if p != w.coord.party):
                for op in range(15):
                    w.recorder.record(0, peer, (epoch, 0, op, kinds.OPEN), b"a share")
                    w.recorder.record(1, peer, (epoch, 0, op, kinds.OPEN), b"a share")
        found += [_timed(partial(w.finish, epoch, revealed(w.policy, epoch))) for w in workers]
        _agree(workers)
    return row("transcript.finish_epoch", "seconds", "s", found)


def step_time(folder: Path, runs: int) -> Row:
    """Seconds that the transcript takes of one step of the demonstration job: 84 leaves of 22 KB, signed at its end."""
    workers = _three(folder / "step", runs)
    payload = bytes(22_000)
    found = []
    for epoch in range(runs):
        for w in workers:
            w.begin(epoch)
            peers = [p for p in range(PARTIES) if p != w.coord.party]

            def work(w: WorkerEvidence = w, epoch: int = epoch, peers: list[int] = peers) -> None:
                for op in range(84):
                    w.recorder.record(op & 1, peers[op >> 1 & 1], (epoch, 0, op >> 2, kinds.OPEN), payload)
                w.finish(epoch, revealed(w.policy, epoch))

            found.append(_timed(work))
        _agree(workers)
    return row("transcript.demo_step", "seconds", "s", found)


def write_run(folder: Path, leaves: int) -> Path:
    """A whole run's evidence with about so many leaves over its three workers; returns its bundle."""
    epochs = max(2, -(-leaves // (PARTIES * _EPOCH_LEAVES)))
    ops = max(1, leaves // (epochs * PARTIES * 4))  # an operation leaves four leaves with every worker

    def traffic(workers: Mapping[int, WorkerEvidence], epoch: int, **_: object) -> None:
        for src, worker in workers.items():
            for dst in workers.keys() - {src}:
                for op in range(ops):
                    payload = b"%d/%d" % (epoch, op)
                    worker.recorder.record(0, dst, (epoch, 0, op, kinds.RESHARE), payload)
                    workers[dst].recorder.record(1, src, (epoch, 0, op, kinds.RESHARE), payload)

    return rehearse(folder, steps=epochs - 1, traffic=traffic).bundle


def verify_rate(folder: Path, leaves: int, runs: int) -> list[Row]:
    """Leaves per second through a whole ``verify`` (signatures, roots, SEND paired with RECV) and its peak memory."""
    bundle = write_run(folder, leaves)
    rates, peaks = [], []
    for _ in range(runs):
        command = [sys.executable, "-m", "uvcc_engine.bench.transcript", "--pass", str(bundle)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rate, peak = json.loads(done.stdout)
        rates.append(rate)
        peaks.append(peak)
    return [
        row("transcript.verify", "rate", "leaves/s", rates, 100_000.0),
        row("transcript.verify.memory", "bytes", "B", peaks),
    ]


def verifier_pass(bundle: Path) -> tuple[float, float]:
    """Verify a run: leaves per second, and this process's peak memory in bytes."""
    found: list[Certificate] = []
    seconds = _timed(lambda: found.append(verify(bundle)))
    return found[0].leaves / seconds, peak_memory()


def fill_pass(folder: Path, leaves: int) -> float:
    """Record one epoch of so many leaves and finalise it: this process's peak memory in bytes."""
    store = TranscriptStore(folder, party=0, sid_sub=_SID, **_KEYS)  # type: ignore[arg-type]
    store.begin_epoch(0)
    for op in range(leaves // 2):
        store.record(0, 1, (0, 0, op, kinds.OPEN), b"a share")
        store.record(1, 2, (0, 0, op, kinds.OPEN), b"a share")
    store.finalize_epoch()
    store.close()
    return peak_memory()


def epoch_memory(folder: Path, leaves: int) -> Row:
    """Peak memory of a process that records so many leaves in one epoch; reference: that of a tenth of them."""
    peaks = []
    for count in (leaves // 10, leaves):
        command = [sys.executable, "-m", "uvcc_engine.bench.transcript", "--leaves", str(count)]
        words = [*command, "--fill", str(folder / str(count))]
        peaks.append(float(subprocess.run(words, capture_output=True, text=True, check=True).stdout))
    return row("transcript.epoch.memory", "bytes", "B", peaks[1:], peaks[0])


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; ``--leaves`` scales the verifier's part (10 million take about two minutes to write)."""
    made = RaisingParser(prog="uvcc-engine bench transcript", description=__doc__)
    made.add_argument("--leaves", type=int, default=1_000_000)
    made.add_argument("--runs", type=natural, default=3)
    made.add_argument("--json", action="store_true")
    made.add_argument("--rounds", type=natural, default=20, help="training steps with and without the transcript")
    made.add_argument("--jobs", default=",".join(transcript_share.JOBS), help="which jobs' steps are measured")
    made.add_argument("--pass", dest="only", type=Path, help=argparse.SUPPRESS)
    made.add_argument("--fill", type=Path, help=argparse.SUPPRESS)
    args = made.parse_args(argv)
    jobs = [job for job in args.jobs.split(",") if job]
    if unknown := sorted(set(jobs) - set(transcript_share.JOBS)):
        raise ConfigError(f"unknown job {unknown[0]!r}", f"one of: {', '.join(transcript_share.JOBS)}")
    if args.fill:
        print(fill_pass(args.fill, args.leaves))
        return 0
    if args.only:
        print(json.dumps(verifier_pass(args.only)))
        return 0
    speed = calibration.measure()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [record_rate(folder, min(args.leaves, 20_000), size, args.runs) for size in (64, 4096, 1 << 16)]
        rows += [sign_time(folder, 20 * args.runs), step_time(folder, 10 * args.runs)]
        rows += [r for job in jobs for r in transcript_share.share_rows(job, args.rounds)]
        rows.append(epoch_memory(folder, args.leaves))
        rows += verify_rate(folder / "run", args.leaves, args.runs)
    rows = calibration.with_bars(rows, BARS, speed)
    if args.json:
        print(to_json(rows))
    else:
        print(to_text(rows))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
