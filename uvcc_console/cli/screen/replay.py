"""``uvcc replay RUN``: the console on a recorded run, with a time scrubber."""

from __future__ import annotations

from uvcc_console.cli import common
from uvcc_console.cli.main import USAGE


def run(argv: list[str]) -> int:
    parser = common.Parser("replay", "Play a recorded run back in the console.")
    parser.add_run()
    args = parser.parse_args(argv)
    run_dir = common.find_run(args.run)
    from uvcc_console.cli.screen.launch import has_terminal, show

    if not has_terminal():
        common.say(f"uvcc: replay needs a terminal\n  the same events as text: uvcc watch {run_dir.name}")
        return USAGE
    return show(run_dir, readonly=True, replay=True)
