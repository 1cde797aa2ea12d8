"""``uvcc`` without a verb, or with ``--read-only``: the TUI over all runs and profiles."""

from __future__ import annotations

import sys

from uvcc_console.cli.main import OK, USAGE, usage


def run(argv: list[str]) -> int:
    from uvcc_console.cli.screen.launch import has_terminal

    readonly = argv == ["--read-only"]
    if (argv and not readonly) or not has_terminal():
        sys.stderr.write(usage())
        return USAGE
    from uvcc_console.ui.app import run_home

    return int(run_home(readonly=readonly) or OK)
