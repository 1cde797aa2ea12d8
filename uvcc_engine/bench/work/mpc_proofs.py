"""Rows of ``bench mpc --verify``: a piece of work with its proof, beside the same without.

Every message of ``mlp_step_verified`` and ``relu_1e6_verified`` is proved, as under ``verify: proofs``; products and
truncations alone in ``mlp_step_products_verified``; a matrix product has nothing else. ``mlp_step_covert`` is proved by
chance, as under ``verify: covert``: each of its runs is the mean of so many steps. A proved step computes by
protocols of its own, so it is timed in two parts: the protocol, and the proof with the opening of one number. The
floor of the second is what the three parties multiply in it, at this machine's rates, over its processors.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import torch

from uvcc_engine.bench.work import mpc_links as links
from uvcc_engine.bench.work.proof_floor import Multiplications, counting, machine_rates
from uvcc_engine.contract.job.proof_mode import AUDIT_ONE_IN
from uvcc_engine.contract.machine.benchrows import Row, held, row
from uvcc_engine.mpc.foundation.claim_ledger import ClaimLedger
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.products.arithmetic import public
from uvcc_engine.proofs.step_proof import prove_and_open

PASSIVE: Final = {
    "matmul_256_verified": "matmul_256",
    "matmul_1024_verified": "matmul_1024",
    "relu_1e6_verified": "relu_1e6",
    "mlp_step_verified": "mlp_step",
    "mlp_step_products_verified": "mlp_step",
    "mlp_step_covert": "mlp_step",
    "mlp_step_20ms_verified": "mlp_step_20ms",
}
"""By the proved row: the passive one."""
_EVERYTHING: Final = frozenset({"relu_1e6_verified", "mlp_step_verified", "mlp_step_covert", "mlp_step_20ms_verified"})
_AUDITED: Final = frozenset({"mlp_step_covert"})
STEPS: Final = 20
"""Of a run of a row that is audited by chance: some fourteen of them audit nobody."""
# most times the passive row's seconds and bytes, most rounds of the proof alone, most times its memory
BARS: Final[dict[str, tuple[float, float, float, float]]] = {
    "matmul_256_verified": (5.0, 1.05, 6, 3.0),
    "matmul_1024_verified": (1.5, 1.05, 6, 3.0),
    "relu_1e6_verified": (6.0, 1.05, 6, 3.0),
    "mlp_step_verified": (5.0, 1.05, 6, 3.0),
    "mlp_step_products_verified": (5.0, 1.05, 6, 3.0),
    "mlp_step_covert": (5.0, 1.05, 7, 3.0),  # one more says who is audited
    "mlp_step_20ms_verified": (5.0, 1.05, 6, 3.0),
}


def work_of(name: str) -> str:
    """The work of a row, without proof and link."""
    return links.work_of(PASSIVE.get(name, name))


def link_of(name: str) -> tuple[float, float]:
    """The link of a row, or of the one that it is the proved form of: see ``mpc_links.link_of``."""
    return links.link_of(PASSIVE.get(name, name))


def open_ledger(rt: Runtime, name: str) -> None:
    """Have a proved row's runtime file its products, or everything."""
    if name in PASSIVE:
        rt.ledger = ClaimLedger(everything=name in _EVERYTHING, audit_one_in=AUDIT_ONE_IN if name in _AUDITED else 0)


def steps_of(name: str) -> int:
    """Of how many steps a run of this row is the mean."""
    return STEPS if name in _AUDITED else 1


def floor_s(rt: Runtime) -> float:
    """Prove what was filed, if anything is to be, and open one number: the processor seconds that this party's
    multiplications in it take at least (``proof_floor``)."""
    if rt.ledger is None or not rt.on_processors:
        prove(rt)
        return 0.0
    kept, count = rt.kernels, Multiplications()
    rt.kernels = counting(kept, count)
    try:
        prove(rt)
    finally:
        rt.kernels = kept
    return machine_rates(kept).seconds(count)


def prove(rt: Runtime) -> tuple[float, int]:
    """Prove what was filed, if anything is to be, and open one number: seconds, and rounds but for that of the opening,
    in which the verdicts are told beside it."""
    if rt.ledger is None:
        return 0.0, 0
    begun, rounds = time.perf_counter(), rt.rounds
    prove_and_open(rt, [public(rt, torch.zeros(1))])
    return time.perf_counter() - begun, rt.rounds - rounds - 1


def peak_bytes() -> int:
    """The most memory that this process held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def rows_of(names: Sequence[str]) -> list[str]:
    """For passive rows: each, and the proved ones after it."""
    found: list[str] = []
    for name in names:
        proved = [row for row, passive in PASSIVE.items() if passive == name]
        found += [name, *proved] if proved else []
    return found


def table(measured: list[dict[str, Any]]) -> list[Row]:
    """Proved rows of a run, each held against the passive row of the same run."""
    out: list[Row] = []
    for name in (n for n in measured[0] if n in PASSIVE):
        mine, plain = [m[name] for m in measured], [m[PASSIVE[name]] for m in measured]
        most, most_bytes, most_rounds, most_memory = BARS[name]
        seconds, passive = (
            [max(run) for run in zip(*(p["seconds"] for p in parts), strict=True)] for parts in (mine, plain)
        )
        reference = statistics.median(passive)
        out.append(held(row(name, "seconds", "s", seconds, reference), most * reference))
        sent, before = (sum(p["bytes"] for p in parts) / 3 for parts in (mine, plain))
        out.append(held(row(name, "bytes_per_party", "B", [sent], before), most_bytes * before))
        proof = [max(run) for run in zip(*(p["proof"] for p in mine), strict=True)]
        out.append(row(name, "proof_seconds", "s", proof, statistics.median(seconds)))
        floor = sum(p["floor"] for p in mine) / min(os.cpu_count() or 1, len(mine))
        out.append(row(name, "proof_floor", "s", [floor], statistics.median(proof)))
        out.append(row(name, "rounds", "rounds", [float(mine[0]["rounds"])], float(plain[0]["rounds"])))
        out.append(held(row(name, "proof_rounds", "rounds", [float(mine[0]["proof_rounds"])]), most_rounds))
        peak, peak_before = (float(max(p["peak"] for p in parts)) for parts in (mine, plain))
        out.append(held(row(name, "peak_memory", "B", [peak], peak_before), most_memory * peak_before))
    return out
