"""``uvcc figures RUN``: plots of a run as PNG and SVG, with the same numbers as CSV."""

from __future__ import annotations

from pathlib import Path

from uvcc_console.cli import common


def run(argv: list[str]) -> int:
    parser = common.Parser("figures", "Draw a run's figures from its own events, into artifacts/figs.")
    parser.add_run()
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="another folder than artifacts/figs")
    parser.add_json()
    args = parser.parse_args(argv)
    run_dir = common.find_run(args.run)
    from uvcc_console.report.figures import write_figures

    made = write_figures(run_dir, args.output)
    if args.json:
        common.emit({"run": run_dir.name, "files": [str(p) for p in made.written], "skipped": dict(made.skipped)})
        return 0
    for path in made.written:
        common.show(str(path))
    for name, why in made.skipped.items():
        common.say(f"not drawn: {name} ({why})")
    return 0
