"""``uvcc bench console|demo|federation|...``: measure; a bar beside each figure, scaled to this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from uvcc_console.cli import common
from uvcc_console.cli.main import FAILED
from uvcc_engine.contract.machine.raising_parser import natural


def run(argv: Sequence[str]) -> int:
    """Print rows; exit 0 if they could be measured (a figure is never a verdict)."""
    parser = common.Parser("bench", "The console's own benchmarks.")
    parser.add_argument("what", choices=["console", "demo", "federation", "journal", "package", "scale", "ssh"])
    parser.add_argument("--runs", type=natural, default=3)
    parser.add_argument("--events", type=int, default=0, metavar="N", help="of the journal (journal: 10,000,000)")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="of the run (package: 192)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    from uvcc_console.bench.bars import BARS
    from uvcc_engine.contract.machine import benchrows as rows
    from uvcc_engine.contract.machine import calibration

    missing: list[str] = []
    speed = calibration.measure()
    if args.what == "demo":
        from uvcc_console.bench.demo import bench

        found = bench(args.runs)
    elif args.what == "federation":
        from uvcc_console.bench import federation

        found = federation.bench(args.runs)
    elif args.what == "journal":
        from uvcc_console.bench import longrun

        found = longrun.bench(args.runs, args.events or longrun.EVENTS)
    elif args.what == "package":
        from uvcc_console.bench import packing

        found = packing.bench(args.runs, args.workers or packing.WORKERS)
    elif args.what == "scale":
        from uvcc_console.bench import scale

        found = scale.bench(args.runs)
    elif args.what == "ssh":
        from uvcc_console.bench import ssh_links

        found = ssh_links.bench(args.runs)
    else:
        from uvcc_console.bench import console

        found = console.bench(args.runs, missing.append)
    found = calibration.with_bars(found, BARS, speed)
    sys.stdout.write((rows.to_json(found) if args.json else rows.to_text(found)) + "\n")
    for why in missing:
        common.say(f"uvcc: not measured: {why}")
    return FAILED if missing else 0
