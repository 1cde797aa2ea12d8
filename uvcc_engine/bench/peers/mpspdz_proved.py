"""MP-SPDZ beside the proved rows of ``bench mpc --verify``: the same work under its security against a malicious party.

UVCC_MPSPDZ names its folder, in which ``make sy-rep-ring-party.x`` has been run. Its numbers have 64 bits and 40 more,
in which a change of one is missed with a probability of 2^-40; truncation is probabilistic at 16 fractional bits. It
checks as it goes, and what is still unchecked before anything is opened: each run ends with one number that is opened,
as ours does. A run's cost is that of a process with so many runs, less that of one without, by so many: so it includes
what is drawn and checked in advance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from uvcc_engine.bench.peers import mpspdz, mpspdz_training
from uvcc_engine.bench.peers.mpspdz import RunCost
from uvcc_engine.contract.machine.benchrows import Row, held, row

ProvedCosts = Mapping[str, RunCost]
PROGRAMS: Final = {
    "matmul_1024_verified": "matmul 1024",
    "matmul_256_verified": "matmul 256",
    "relu_1e6_verified": "relu 1000000",
    "mlp_step_verified": "secureml",
}
_TRAINED: Final = "secureml"
_BATCH: Final = 128
_BAR: Final = 1.0
"""Most of the peer's time that ours may take."""
_PROGRAM: Final = """
program.options_from_args()
sfix.set_precision(16, 31)
op, n, reps = program.args[1], int(program.args[2]), int(program.args[3])
if op == 'matmul':
    a, b, c = (sfix.Matrix(n, n) for _ in range(3))
    a.assign_all(0.75)
    b.assign_all(-0.5)
    def work():
        c.assign_vector(a.direct_mul(b))
        print_ln('%s', c[0][0].reveal())
else:
    x, y = sfix.Array(n), sfix.Array(n)
    x.assign_all(0.75)
    def work():
        v = x.get_vector()
        y.assign_vector((v > 0).if_else(v, 0))
        print_ln('%s', y[0].reveal())
work()
@for_range(reps)
def _(i):
    work()
"""


def measured(rows: Sequence[str], runs: int) -> tuple[ProvedCosts, str]:
    """What a run of each row costs, and why some or all are missing."""
    home, absent = mpspdz.home(mpspdz.PROVED_PARTY)
    if home is None:
        return {}, absent
    found: dict[str, RunCost] = {}
    for name in (name for name in rows if name in PROGRAMS):
        costs = []
        for count in (0, runs):
            file, program, args = _program(PROGRAMS[name], count)
            cost, why = mpspdz.proved(home, file, program, args)
            if cost is None:
                return found, f"{name} {why}"
            costs.append(cost)
        found[name] = costs[1].more_than(costs[0], runs)
    lacking = [name for name in rows if name not in PROGRAMS]
    return found, f"no program for {', '.join(lacking)}" if lacking else ""


def _program(work: str, runs: int) -> tuple[str, str, list[str]]:
    """The name, text and arguments of a program that does the work so often."""
    if work == _TRAINED:
        args = [work, str(runs), str(_BATCH), "split3", mpspdz_training.OPENED]
        return "uvcc_proved_training", mpspdz_training.PROGRAM, args
    return "uvcc_proved", _PROGRAM, [*work.split(), str(runs), "split3"]


def compared(peer: str, found: ProvedCosts, ours: Sequence[Row]) -> list[Row]:
    """For each proved row that both have: the peer's seconds, bytes and rounds, and our seconds as a share of its."""
    out = []
    for mine in ours:
        if mine.metric == "seconds" and mine.name in found:
            name, cost = f"{mine.name}_{peer}", found[mine.name]
            share = row(f"{mine.name}_to_{peer}", "ratio", peer, [mine.value / cost.seconds])
            out += [
                row(name, "seconds", "s", [cost.seconds]),
                row(name, "bytes_per_party", "B", [cost.bytes_per_party]),
                row(name, "rounds", "rounds", [cost.rounds]),
                held(share, _BAR),
            ]
    return out
