"""``uvcc attach RUN``: the console on a live run; without a terminal, or with --json, a stream of snapshots."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from uvcc_console.cli import common
from uvcc_console.core.journal.journal import Follower, Journal
from uvcc_console.runs.processes import JOURNAL, conducted

POLL_S = 0.2


def stream(run_dir: Path) -> int:
    """One JSON snapshot a line, whenever something changed, until the run ends or nobody conducts it."""
    from uvcc_console.cli.follow import jsonview

    journal = Journal(run_dir / JOURNAL, readonly=True)
    follower, shown = Follower(journal), -1
    try:
        while True:
            quiet = not conducted(run_dir)
            while follower.poll():
                pass
            s = follower.snapshot
            if s.seq != shown:
                common.emit_line(jsonview.document(s, run_dir))
                sys.stdout.flush()
                shown = s.seq
            if s.ended or quiet:
                return 0
            time.sleep(POLL_S)
    finally:
        journal.close()


def run(argv: list[str]) -> int:
    parser = common.Parser("attach", "Show a run in the console; q detaches and the run goes on.")
    parser.add_run()
    parser.add_argument(
        "--read-only", action="store_true", help="watch only; halting stays possible, and releasing what was held here"
    )
    parser.add_argument("--headless", action="store_true", help="progress line instead of the console")
    parser.add_json()
    args = parser.parse_args(argv)
    run_dir = common.find_run(args.run)
    if args.json:
        return stream(run_dir)
    from uvcc_console.cli.screen.launch import has_terminal, show

    if has_terminal() and not args.headless:
        return show(run_dir, readonly=args.read_only)
    from uvcc_console.cli.follow import headless

    watched = headless.follow(run_dir, None, [], until_failed=False)
    return headless.report(watched, run_dir, as_json=False)
