"""Other systems on the same work as ``bench mpc``, where they are installed; one that is absent is named.

**SPU** (SecretFlow; ABY3 over a 64-bit ring): UVCC_SPU_PYTHON names a Python that has it. In a virtual environment of
its own: ``pip install spu==0.9.5 "jax[cpu]<0.5"``. **MP-SPDZ** (replicated ring, semi-honest): UVCC_MPSPDZ names its
folder, in which ``make replicated-ring-party.x`` and ``Scripts/setup-ssl.sh 3`` have been run. Both compute with three
processes over loopback, at 16 fractional bits with probabilistic truncation, and their own clocks say how long.
Beside proved rows stand MP-SPDZ's programs that bear a malicious party (``mpspdz_proved``).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from uvcc_engine.bench.peers import mpspdz, mpspdz_proved, mpspdz_training
from uvcc_engine.bench.peers.mpspdz_proved import ProvedCosts
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.machine.benchrows import Row, held, row
from uvcc_engine.contract.machine.free_ports import ports
from uvcc_engine.contract.parsing.untrusted import json_of

SPU_PYTHON: Final = "UVCC_SPU_PYTHON"
Seconds = Mapping[str, list[float]]
_LIMIT_S: Final = 900
# most of a peer's time that ours may take; 1 where nothing more is asked
BARS: Final = {
    ("spu", "matmul_1024"): 0.5,
    ("spu", "matmul_512"): 0.4,
    ("mpspdz", "mlp_step"): 0.35,
}


@dataclass(frozen=True, slots=True)
class Peer:
    """``measured(rows, runs)``: seconds by row, and why some or all are missing; ``proved``: the whole cost of proved
    rows, and why some or all are missing."""

    name: str
    measured: Callable[[Sequence[str], int], tuple[Seconds, str]]
    proved: Callable[[Sequence[str], int], tuple[ProvedCosts, str]]


def chosen(names: str) -> list[Peer]:
    """The peers of a comma-separated list. ConfigError for an unknown one."""
    wanted = [name for name in names.split(",") if name]
    if unknown := sorted(set(wanted) - set(PEERS)):
        raise ConfigError(f"unknown peer {unknown[0]!r}", f"one of: {', '.join(PEERS)}")
    return [PEERS[name] for name in wanted]


def compared(peer: str, found: Seconds, ours: Sequence[Row]) -> list[Row]:
    """A row for each piece of work that both did: our seconds, the peer's beside them, and the bar."""
    out = []
    for mine in ours:
        if mine.metric == "seconds" and mine.name in found:
            theirs = row(f"{mine.name}_{peer}", "seconds", "s", found[mine.name])
            share = row(f"{mine.name}_to_{peer}", "ratio", peer, [mine.value / theirs.value])
            out += [theirs, held(share, BARS.get((peer, mine.name), 1.0))]
    return out


def beside(peer: Peer, names: Sequence[str], runs: int, ours: Sequence[Row], proved: Sequence[Row]) -> list[Row]:
    """The rows of a peer on the same work, passive beside passive and proved beside proved. What is absent is named on
    standard error."""
    with_proof = {one.name for one in proved}
    found, absent = peer.measured([name for name in names if name not in with_proof], runs)
    costs, lacking = peer.proved([name for name in names if name in with_proof], runs) if with_proof else ({}, "")
    for what, why in ((peer.name, absent), (f"{peer.name}, proved", lacking)):
        if why:
            print(f"{what}: {why}", file=sys.stderr)
    return compared(peer.name, found, ours) + mpspdz_proved.compared(peer.name, costs, proved)


def _spu(rows: Sequence[str], runs: int) -> tuple[Seconds, str]:
    python = os.environ.get(SPU_PYTHON, "")
    if not python:
        return {}, f"absent: {SPU_PYTHON} names no Python that has it (pip install spu==0.9.5 'jax[cpu]<0.5')"
    script = Path(__file__).with_name("spu_peer.py")
    places = ",".join(str(port) for port in ports(PARTIES))
    words = [python, str(script), ",".join(rows), str(runs), places]
    return _said("spu", words, None)


def _said(name: str, words: Sequence[str], folder: Path | None) -> tuple[Seconds, str]:
    """What a process printed as JSON, or why not."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_LIMIT_S, cwd=folder)
        found = json_of(done.stdout.splitlines()[-1]) if done.returncode == 0 and done.stdout else None
    except (OSError, ValueError, subprocess.TimeoutExpired) as why:
        return {}, f"could not be run: {why}"
    if not isinstance(found, dict):
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        return {}, f"failed with exit code {done.returncode}: {last[0]}"
    return {str(work): [float(s) for s in seconds] for work, seconds in found.items()}, ""


_PROGRAMS: Final = {
    "matmul_256": "matmul 256",
    "matmul_1024": "matmul 1024",
    "matmul_512": "matmul 512",
    "mul_1e6": "mul 1000000",
    "drelu_1e6": "drelu 1000000",
    "relu_1e6": "relu 1000000",
}
_PROGRAM: Final = """
program.options_from_args()
sfix.set_precision(16, 31)
op, n, reps = program.args[1], int(program.args[2]), int(program.args[3])
if op == 'matmul':
    a, b, c = (sfix.Matrix(n, n) for _ in range(3))
    a.randomize(-1, 1)
    b.randomize(-1, 1)
    def work():
        c.assign_vector(a.direct_mul(b))
else:
    x, y, z = sfix.Array(n), sfix.Array(n), sint.Array(n)
    x.randomize(-1, 1)
    def work():
        v = x.get_vector()
        if op == 'drelu':
            z.assign_vector(v > 0)
        elif op == 'relu':
            y.assign_vector((v > 0).if_else(v, 0))
        else:
            y.assign_vector(v * v)
work()
@for_range(reps)
def _(i):
    start_timer(1)
    work()
    stop_timer(1)
"""


def _mpspdz(rows: Sequence[str], runs: int) -> tuple[Seconds, str]:
    home, absent = mpspdz.home()
    if home is None:
        return {}, absent
    found: dict[str, list[float]] = {}
    for name in (name for name in rows if name in _PROGRAMS):
        args = [*_PROGRAMS[name].split(), str(runs), "trunc_pr", "split3"]
        seconds, why = mpspdz.seconds(home, "uvcc_bench", _PROGRAM, args)
        if why:
            return found, f"{name} {why}"
        found[name] = [seconds / runs]
    if "mlp_step" in rows:
        seconds, why = mpspdz_training.step_seconds("secureml", 128)
        if why:
            return found, f"mlp_step: {why}"
        found["mlp_step"] = [seconds]
    lacking = [name for name in rows if name not in _PROGRAMS and name != "mlp_step"]
    return found, f"no program for {', '.join(lacking)}" if lacking else ""


def _passive_alone(rows: Sequence[str], _: int) -> tuple[ProvedCosts, str]:
    return {}, "its three parties trust each other to follow the protocol: nothing stands beside the proved rows"


PEERS: Final = {
    peer.name: peer for peer in (Peer("spu", _spu, _passive_alone), Peer("mpspdz", _mpspdz, mpspdz_proved.measured))
}
