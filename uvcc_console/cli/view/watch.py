"""``uvcc watch RUN``: events as JSON lines, the recorded ones first, then the new ones until the run ends."""

from __future__ import annotations

import sys
import time

from uvcc_console.cli import common
from uvcc_console.core import events as ev
from uvcc_console.core.journal import Journal
from uvcc_console.core.paths import JOURNAL
from uvcc_console.runs.processes import conducted

POLL_S = 0.1


def run(argv: list[str]) -> int:
    parser = common.Parser(
        "watch",
        "A run's events as JSON lines: {seq, ts, kind, ...}. Ends with the run, and where nothing conducts it any "
        "more. A result that a pod streams is marked as reported; the verified one is in the event of kind verdict.",
    )
    parser.add_run()
    parser.add_json()
    parser.add_argument("--since", type=int, default=0, metavar="SEQ", help="only events after this sequence number")
    parser.add_argument("--kind", action="append", default=[], metavar="KIND", help="only this kind (repeatable)")
    parser.add_argument("--no-follow", action="store_true", help="stop at the newest event")
    args = parser.parse_args(argv)
    run_dir = common.find_run(args.run)
    journal = Journal(run_dir / JOURNAL, readonly=True)
    seq, ended = args.since, False
    try:
        while True:
            # asked before reading: an event written between the two is found by the next round
            quiet = not conducted(run_dir)
            batch = list(journal.since(seq))
            for seq, event in batch:
                ended = ended or isinstance(event, ev.RunEnded)
                if not args.kind or event.kind in args.kind:
                    common.emit_line(common.event_row(seq, event))
            sys.stdout.flush()
            if batch:
                continue
            if ended or quiet or args.no_follow:
                return 0
            time.sleep(POLL_S)
    finally:
        journal.close()
