"""Rows of ``bench parallel``: what sealing the traffic between a party's own machines costs.

Two ranks on this machine add up a block as two replicas would their gradients, sealed over TCP and in clear by gloo
over TCP. ``sum_sealed`` is what each rank sends a second, held against the rate of AES-256-GCM on one core, in the same
run: each rank seals and opens as much as it sends, so that half of it is the most there can be. ``sum_cost`` is the
time sealed over that in clear; ``store_cost`` the same for a value set and read in the party's store.
"""

from __future__ import annotations

import statistics
from typing import Any, Final

from uvcc_engine.bench.launch.parties import said_by
from uvcc_engine.contract.machine.benchrows import Row, row
from uvcc_engine.contract.machine.free_ports import ports

BLOCK_BYTES: Final = 16 << 20  # gradients of a network of two million weights
_LIMIT_S: Final = 300.0


def traffic_rows(runs: int, block_bytes: int = BLOCK_BYTES) -> list[Row]:
    """Rates, times and ratios, sealed and in clear. Raises UvccError if a rank fails."""
    sealed, clear = (_said(runs, block_bytes, sealed=sealed) for sealed in (True, False))
    mb = block_bytes / 1e6
    aes = max(one["aes"] for one in sealed) / 1e6
    rates = {name: [mb / s for s in _slower(found, "sums")] for name, found in (("sealed", sealed), ("clear", clear))}
    times = {
        part: tuple(statistics.median(_slower(found, part)) for found in (sealed, clear))
        for part in ("sums", "small", "store")
    }
    return [
        row("machine_aes256", "rate", "MB/s", [aes]),
        row("sum_sealed", "rate", "MB/s", rates["sealed"], aes),
        row("sum_clear", "rate", "MB/s", rates["clear"]),
        row("sum_cost", "ratio", "x", [times["sums"][0] / times["sums"][1]], 1.0),
        row("small_sum_sealed", "p50", "us", [1e6 * times["small"][0]], 1e6 * times["small"][1]),
        row("store_sealed", "p50", "us", [1e6 * times["store"][0]], 1e6 * times["store"][1]),
        row("meet_sealed", "seconds", "s", _slower(sealed, "met"), max(_slower(clear, "met"))),
    ]


def _said(runs: int, block_bytes: int, *, sealed: bool) -> list[dict[str, Any]]:
    config = {"sealed": sealed, "port": ports(1)[0], "bytes": block_bytes, "runs": runs}
    return said_by("sister_rank", config, _LIMIT_S, count=2)


def _slower(ranks: list[dict[str, Any]], part: str) -> list[float]:
    """Of every run the rank that took longer; of what one rank did, that."""
    return [max(one) for one in zip(*(rank[part] for rank in ranks if rank[part]), strict=True)]
