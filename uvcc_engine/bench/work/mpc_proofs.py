"""Rows of ``bench mpc --verify``: a piece of work with the proof of its products, beside the same without.

A product and its truncation are proved whole. Of a training step only the products are: comparisons, choices by bits,
exponentials and look-ups of the step have no proof, and the row's name says so.
"""

from __future__ import annotations

import resource
import statistics
import sys
from collections.abc import Sequence
from typing import Any, Final

from uvcc_engine.bench.work import mpc_links as links
from uvcc_engine.contract.machine.benchrows import Row, held, row
from uvcc_engine.mpc.foundation.claim_ledger import ClaimLedger
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.proofs.step_proof import prove_protocol

PASSIVE: Final = {
    "matmul_256_verified": "matmul_256",
    "mlp_step_products_verified": "mlp_step",
}
"""By the proved row: the passive one."""
# most times the passive row's seconds and bytes, most rounds of the proof alone, most times its memory
BARS: Final[dict[str, tuple[float, float, float, float]]] = {
    "matmul_256_verified": (5.0, 1.05, 6, 3.0),
    "mlp_step_products_verified": (5.0, 1.05, 6, 3.0),
}


def work_of(name: str) -> str:
    """The work of a row, without proof and link."""
    return links.work_of(PASSIVE.get(name, name))


def open_ledger(rt: Runtime, name: str) -> None:
    """Have a proved row's runtime file its products."""
    if name in PASSIVE:
        rt.ledger = ClaimLedger()


def prove(rt: Runtime) -> None:
    """Prove what was filed, if anything is to be."""
    if rt.ledger is not None:
        rt.run(prove_protocol(rt))


def peak_bytes() -> int:
    """The most memory that this process held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def rows_of(names: Sequence[str]) -> list[str]:
    """For passive rows: each, and the proved one after it."""
    proved = {passive: name for name, passive in PASSIVE.items()}
    return [row for name in names if name in proved for row in (name, proved[name])]


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
        rounds = float(plain[0]["rounds"])
        out.append(held(row(name, "rounds", "rounds", [float(mine[0]["rounds"])], rounds), rounds + most_rounds))
        peak, peak_before = (float(max(p["peak"] for p in parts)) for parts in (mine, plain))
        out.append(held(row(name, "peak_memory", "B", [peak], peak_before), most_memory * peak_before))
    return out
