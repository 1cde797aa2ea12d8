"""``uvcc handoff RUN``: the hand-over checklist, filled from facts."""

from __future__ import annotations

from pathlib import Path

from uvcc_console.cli import common


def run(argv: list[str]) -> int:
    parser = common.Parser(
        "handoff", "Write and print the hand-over checklist of a run. Proofs are verified anew and every file is read."
    )
    parser.add_run()
    parser.add_argument("--output", type=Path, metavar="FILE", help="another file than artifacts/handoff.md")
    parser.add_json()
    args = parser.parse_args(argv)
    run_dir = common.find_run(args.run)
    from uvcc_console.report.handoff import handoff, write_handoff

    made = handoff(run_dir)
    path = write_handoff(run_dir, args.output, made)
    if args.json:
        common.emit({**made.to_json(), "file": str(path)})
    else:
        common.show(path.read_text().rstrip("\n"))
        common.say(str(path))
    return 0
