"""``uvcc replay RUN``: the console on a recorded run, or on a package, with a time scrubber; ``--json``: as lines."""

from __future__ import annotations

import contextlib
from pathlib import Path

from uvcc_console.cli import common
from uvcc_console.cli.main import OK
from uvcc_console.core.paths import JOURNAL
from uvcc_engine.contract.errors import ConfigError


def run(argv: list[str]) -> int:
    parser = common.Parser(
        "replay",
        "Play a recorded run back in the console: one of your own, or one out of a package (uvcc package), packed or "
        "unpacked. A package shows what its operator's console was told; what was signed is for uvcc verify to say.",
    )
    parser.add_argument(
        "run",
        nargs="?",
        default="last",
        metavar="RUN",
        help="run id, unique prefix, last, or a package's file or folder",
    )
    parser.add_argument(
        "--json", action="store_true", help="no screen: every event as a JSON line, as uvcc watch has it"
    )
    args = parser.parse_args(argv)
    from uvcc_console.report import recording

    with contextlib.ExitStack() as folders:
        package = Path(args.run)
        is_package = recording.is_package(package)
        run_dir = folders.enter_context(recording.played(package)) if is_package else common.find_run(args.run)
        if args.json:
            return _print(run_dir)
        from uvcc_console.cli.screen.launch import has_terminal, show

        if not has_terminal():
            raise ConfigError("replay needs a terminal", f"the same events as text: uvcc replay {args.run} --json")
        return show(run_dir, readonly=True, replay=True)


def _print(run_dir: Path) -> int:
    from uvcc_console.core.journal.journal import iter_events

    for seq, event in iter_events(run_dir / JOURNAL):
        common.emit_line(common.event_row(seq, event))
    return OK
