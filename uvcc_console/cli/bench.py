"""``uvcc bench console|demo``: measure, with the bar beside each figure."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def run(argv: Sequence[str]) -> int:
    """Print rows; exit 0 if they could be measured (a figure is never a verdict)."""
    parser = argparse.ArgumentParser(prog="uvcc bench", description="the console's own benchmarks")
    parser.add_argument("what", choices=["console", "demo"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    from uvcc_engine.contract import benchrows as rows

    if args.what == "demo":
        from uvcc_console.bench.demo import bench
    else:
        from uvcc_console.bench.console import bench
    found = bench(args.runs)
    sys.stdout.write((rows.to_json(found) if args.json else rows.to_text(found)) + "\n")
    return 0
