"""``uvcc handoff RUN``: the hand-over checklist, filled from facts."""

from __future__ import annotations

from pathlib import Path

from uvcc_console.cli import common
from uvcc_console.cli.main import FAILED, OK
from uvcc_engine.contract.errors import VerificationError


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
    refused, path = None, None
    try:
        path = write_handoff(run_dir, args.output, made)
    except VerificationError as e:  # the checklist says more about it than the refusal
        refused = e
    if args.json:
        common.emit({**made.to_json(), "file": str(path) if path else ""})
    else:
        common.show(made.text().rstrip("\n"))
    common.say(f"not written into the package: {refused}" if refused else str(path))
    return FAILED if refused else OK
