"""``uvcc runs``: the runs of this machine."""

from __future__ import annotations

import argparse
import time

from uvcc_console.cli import common
from uvcc_console.cli.follow import jsonview
from uvcc_console.core.shown import CHANGED
from uvcc_engine.contract.errors import UvccError


def run(argv: list[str]) -> int:
    parser = common.Parser(
        "runs",
        "List the runs of this machine, oldest first. VERIFIED holds only while the files are as they were verified.",
    )
    parser.add_json()
    apart = parser.add_mutually_exclusive_group()
    apart.add_argument("--archived", action="store_true", help="list the runs that were packed away, with their sizes")
    apart.add_argument("--archive", metavar="RUN", help="pack a run that has ended into one file, and its folder away")
    apart.add_argument("--unpack", metavar="RUN", help="bring a run back that was packed away")
    args = parser.parse_args(argv)
    if args.archived or args.archive or args.unpack:
        return _kept(args)
    rows = []
    for run_dir in common.run_dirs():
        s, why = common.read_snapshot(run_dir)
        rows.append(jsonview.summary(s, run_dir))
        if why:
            common.say(f"uvcc: {run_dir.name} is unreadable: {why}")
    if args.json:
        common.emit(rows)
        return 0
    if not rows:
        common.say("there are no runs yet; start one with: uvcc demo")
        return 0
    width = max(len(r["run"]) for r in rows)
    common.show(f"{'RUN':<{width}}  {'PROFILE':<16} {'STATUS':<10} {'STAGE':<14} {'STEP':>9}  {'VERIFIED':<8} CREATED")
    for r in rows:
        step = f"{min(max(r['step'] + 1, 0), r['steps'])}/{r['steps']}" if r["steps"] else "-"
        known = r["live"] or r["ended"] or r["status"] == "unreadable"
        status = r["status"] if known else f"{r['status']}?"
        word = {True: "yes", False: "NO", None: "-"}[r["verified"]]
        word = "CHANGED" if r["result"]["mark"] == CHANGED else word
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(r["created"])) if r["created"] else "-"
        common.show(
            f"{r['run']:<{width}}  {r['profile']:<16} {status:<10} {r['stage']:<14} {step:>9}  {word:<8} {when}"
        )
    return 0


def _kept(args: argparse.Namespace) -> int:
    """What is done with runs that are packed away: list them, pack one, bring one back. Raises UvccError."""
    from uvcc_console.runs import keeping, processes

    if args.archived:
        found = keeping.archived()
        if args.json:
            common.emit([{"run": run, "bytes": size} for run, size in found.items()])
        for run, size in () if args.json else found.items():
            common.show(f"{keeping.size_words(size):>8}  {run}")
        if not found:
            common.say("no run was packed away")
        return 0
    if args.archive:
        run_dir = common.find_run(args.archive)
        s, _ = common.read_snapshot(run_dir)
        if why := keeping.cannot_go(s, bool(processes.running(run_dir, processes.CONDUCTOR))):
            raise UvccError(f"{run_dir.name} cannot be packed away: {why}")
        made = keeping.archive(run_dir)
        size = made.stat().st_size
        said: dict[str, str | int] = {"run": run_dir.name, "path": str(made), "bytes": size}
        words = f"{run_dir.name} is packed in {made}, {keeping.size_words(size)}"
    else:
        made = keeping.unpack(args.unpack)
        said = {"run": args.unpack, "path": str(made)}
        words = f"{args.unpack} is back in {made}"
    if args.json:
        common.emit(said)
    else:
        common.show(words)
    return 0
