"""``bench mpc``: secret-shared arithmetic and training steps, three processes over sealed direct links on this host."""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from uvcc_engine.bench._parties import said_by
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.transcript.identity import Identity

ROWS: Final = (
    "matmul_1024",
    "matmul_512",
    "mul_1e6",
    "drelu_1e6",
    "relu_1e6",
    "relu_1e6_k32",
    "mlp_step",
    "mlp_step_20ms",
)


def run_parties(rows: Sequence[str], runs: int) -> list[dict[str, Any]]:
    """Start three party processes and return what each measured."""
    with tempfile.TemporaryDirectory() as folder:
        for p in range(3):
            Identity.create(Path(folder) / f"id{p}")
        config = {"folder": folder, "addresses": _addresses(), "rows": list(rows), "runs": runs}
        return said_by("_mpc_party", config)


def _addresses() -> dict[str, str]:
    """Three free ports of the loopback interface."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    found = {str(p): f"127.0.0.1:{s.getsockname()[1]}" for p, s in enumerate(held)}
    for s in held:
        s.close()
    return found


def table(measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows in the shape of every benchmark. A run took as long as its slowest party; so did the local arithmetic."""
    out: list[dict[str, Any]] = []
    for name in measured[0]:
        parts = [party[name] for party in measured]
        seconds = [max(run) for run in zip(*(p["seconds"] for p in parts), strict=True)]
        floors = [max(run) for run in zip(*(p["floors"] for p in parts), strict=True)]
        out.append(_row(name, "seconds", "s", seconds, statistics.median(floors) if floors else None))
        out.append(_row(name, "bytes_per_party", "B", [sum(p["bytes"] for p in parts) / 3], None))
        out.append(_row(name, "rounds", "rounds", [float(parts[0]["rounds"])], None))
    return out


def _row(name: str, metric: str, unit: str, runs: list[float], reference: float | None) -> dict[str, Any]:
    value = statistics.median(runs)
    return {
        "name": name,
        "metric": metric,
        "value": value,
        "unit": unit,
        "runs": len(runs),
        "min": min(runs),
        "max": max(runs),
        "reference": reference,
        "ratio": value / reference if reference else None,
    }


def main(argv: Sequence[str]) -> int:
    """Run the benchmark. The reference of a row with matrix products is those products alone, at the same time."""
    made = argparse.ArgumentParser(prog="bench mpc", description=__doc__)
    made.add_argument("--rows", default=",".join(ROWS), help="comma-separated row names")
    made.add_argument("--runs", type=int, default=5)
    made.add_argument("--json", action="store_true")
    args = made.parse_args(argv)
    names = args.rows.split(",")
    unknown = sorted(set(names) - set(ROWS))
    if unknown:
        raise ConfigError(f"unknown row {unknown[0]!r}", f"one of: {', '.join(ROWS)}")
    rows = table(run_parties(names, args.runs))
    if args.json:
        print(json.dumps(rows))
        return 0
    for r in rows:
        ratio = f"  {r['ratio']:.2f} x local arithmetic" if r["ratio"] else ""
        spread = f"({r['min']:.6g} .. {r['max']:.6g})"
        print(f"{r['name']:16} {r['metric']:16} {r['value']:14.6g} {r['unit']:7} {spread}{ratio}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
