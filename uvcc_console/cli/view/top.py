"""``uvcc top RUN``: the fleet as a table that renews itself, without the console; once where nobody watches."""

from __future__ import annotations

import os
import shutil
import sys
import time

from uvcc_console.cli import common
from uvcc_console.core import settings
from uvcc_console.core.journal.journal import Follower, Journal
from uvcc_console.core.paths import JOURNAL
from uvcc_console.core.snapshot import Snapshot
from uvcc_engine.contract.errors import ConfigError


def picture(s: Snapshot, now: float, width: int, height: int, sort: str, columns: tuple[str, ...]) -> list[str]:
    """The lines of one moment: how the run stands, then its workers."""
    from uvcc_console.ui.drawing.glyphs import choose
    from uvcc_console.ui.drawing.paint import ascii_text, cut, plain
    from uvcc_console.ui.judging.view import View
    from uvcc_console.ui.panels.fleet import FleetState, fleet_lines
    from uvcc_console.ui.widgets.bars import header_line

    encoding = (sys.stdout.encoding or "").lower()
    glyphs = choose("utf" not in encoding or settings.truth("ascii"))
    view = View(snap=s, now=now, glyphs=glyphs)
    lines = [header_line(view, width), *fleet_lines(view, FleetState(sort=sort, columns=columns), width)]
    texts = [plain(cut(line, width)) for line in lines[: max(2, height)]]
    return texts if glyphs.braille else [ascii_text(text) for text in texts]


def run(argv: list[str]) -> int:
    parser = common.Parser(
        "top", "A run's workers as a table, worst first, renewed every few seconds until the run ends."
    )
    parser.add_run()
    parser.add_argument("--sort", default="worst", metavar="COLUMN", help="a column, worst or place")
    parser.add_argument("--columns", default="", metavar="NAMES", help="the columns to show, separated by commas")
    parser.add_argument("--every", type=float, default=2.0, metavar="S", help="seconds between two pictures (2)")
    parser.add_argument("--once", action="store_true", help="one picture")
    args = parser.parse_args(argv)
    from uvcc_console.ui.panels.fleet_columns import parsed

    columns = parsed(args.columns)
    sort = args.sort if args.sort in ("worst", "place") else (parsed(args.sort) or ("worst",))[0]
    if not 0.1 <= args.every <= 3600:
        raise ConfigError(f"--every {args.every:g} is no pause", "between 0.1 and 3600 seconds")
    run_dir = common.find_run(args.run)
    watched = sys.stdout.isatty() and not args.once
    journal = Journal(run_dir / JOURNAL, readonly=True)
    follower = Follower(journal, common.load_snapshot(run_dir))
    try:
        while True:
            while follower.poll():
                pass
            size = shutil.get_terminal_size((160, 50))
            width, height = (size.columns, size.lines - 1) if watched else (int(os.environ.get("COLUMNS", 160)), 10_000)
            lines = picture(follower.snapshot, time.time(), width, height, sort, columns)
            if watched:
                common.wipe()
            common.show("\n".join(lines))
            sys.stdout.flush()
            if not watched or follower.snapshot.ended:
                return 0
            time.sleep(args.every)
    finally:
        journal.close()
