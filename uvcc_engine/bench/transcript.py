"""``bench transcript``: what the transcript costs a step, and how fast an auditor goes through ten million leaves."""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from uvcc_engine.bench._rehearsal import make_policy
from uvcc_engine.contract.errors import VerificationError
from uvcc_engine.parallel.topology import PARTIES, Coord, Topology
from uvcc_engine.transcript import files, kinds
from uvcc_engine.transcript.evidence import WorkerEvidence
from uvcc_engine.transcript.identity import Identity
from uvcc_engine.transcript.leaf import Leaf
from uvcc_engine.transcript.replay import summarise
from uvcc_engine.transcript.store import TranscriptStore

_SID: Final = hashlib.sha256(b"bench").digest()
_KEYS: Final = {"own_key": bytes(32), "pair_keys": {1: b"1" * 32, 2: b"2" * 32}}
Row = dict[str, Any]


def row(name: str, metric: str, unit: str, runs: Sequence[float], reference: float | None = None) -> Row:
    """One result in the shape of every benchmark; ``value`` is the median."""
    value = statistics.median(runs)
    ratio = value / reference if reference else None
    spread = {"runs": len(runs), "min": min(runs), "max": max(runs)}
    return {
        "name": name,
        "metric": metric,
        "value": value,
        "unit": unit,
        **spread,
        "reference": reference,
        "ratio": ratio,
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
    plain = _timed(lambda: [hashlib.sha256(payload).digest() for _ in range(leaves)]) / leaves
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
        found += [_timed(partial(w.finish, epoch)) for w in workers]
        _agree(workers)
    return row("transcript.finish_epoch", "seconds", "s", found)


def write_leaves(path: Path, epochs: int, per_epoch: int) -> None:
    """A well-formed transcript of P0 with ``epochs`` x ``per_epoch`` leaves, written block by block."""
    with path.open("wb") as out:
        for epoch in range(epochs):
            pieces = []
            for op in range(per_epoch // 2):
                digest = hashlib.sha256(b"%d/%d" % (epoch, op)).digest()
                pieces.append(Leaf(0, kinds.OPEN, 0, 1 + op % 2, op, 0, 0, 64, digest).pack())
                pieces.append(Leaf(1, kinds.OPEN, 1 + op % 2, 0, op, 0, 0, 64, digest).pack())
            root = summarise(pieces, _SID, epoch, 0).root
            out.write(files.header(epoch, len(pieces), _SID, root) + b"".join(pieces))


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
                w.finish(epoch)

            found.append(_timed(work))
        _agree(workers)
    return row("transcript.demo_step", "seconds", "s", found)


def verify_rate(folder: Path, leaves: int, runs: int) -> list[Row]:
    """Leaves per second through the verifier's pass and the peak memory of its process, which does nothing else."""
    per_epoch = min(leaves, 1_000_000) // 2 * 2
    path = folder / files.LEAVES
    write_leaves(path, leaves // per_epoch, per_epoch)
    rates, peaks = [], []
    for _ in range(runs):
        command = [sys.executable, "-m", "uvcc_engine.bench.transcript", "--pass", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rate, peak = json.loads(done.stdout)
        rates.append(rate)
        peaks.append(peak)
    return [
        row("transcript.verify", "rate", "leaves/s", rates, 100_000.0),
        row("transcript.verify.memory", "bytes", "B", peaks),
    ]


def verifier_pass(path: Path) -> tuple[float, float]:
    """Go through a transcript as the verifier does: leaves per second, and this process's peak memory in bytes."""
    total = 0

    def work() -> None:
        nonlocal total
        for file, block in files.blocks(path):
            found = summarise(files.chunks(file, block), _SID, block.epoch, 0)
            if found.root != block.root:
                raise VerificationError("bench", f"epoch {block.epoch} has another root than was written")
            total += block.count

    seconds = _timed(work)
    return total / seconds, _peak_memory()


def _peak_memory() -> float:
    """VmHWM in bytes; getrusage would also count what the parent held when it forked."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024.0 for line in lines if line.startswith("VmHWM"))


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; ``--leaves`` scales the verifier's part (10 million take about a minute to write)."""
    made = argparse.ArgumentParser(prog="bench transcript", description=__doc__)
    made.add_argument("--leaves", type=int, default=1_000_000)
    made.add_argument("--runs", type=int, default=3)
    made.add_argument("--json", action="store_true")
    made.add_argument("--pass", dest="only", type=Path, help=argparse.SUPPRESS)
    args = made.parse_args(argv)
    if args.only:
        print(json.dumps(verifier_pass(args.only)))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [record_rate(folder, min(args.leaves, 20_000), size, args.runs) for size in (64, 4096, 1 << 16)]
        rows += [sign_time(folder, 20 * args.runs), step_time(folder, 10 * args.runs)]
        rows += verify_rate(folder, args.leaves, args.runs)
    if args.json:
        print(json.dumps(rows))
    else:
        for r in rows:
            print(f"{r['name']:28} {r['value']:14.6g} {r['unit']:9} ({r['min']:.6g} .. {r['max']:.6g})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
