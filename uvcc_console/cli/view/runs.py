"""``uvcc runs``: the runs of this machine."""

from __future__ import annotations

import time

from uvcc_console.cli import common
from uvcc_console.cli.follow import jsonview
from uvcc_console.core.shown import CHANGED


def run(argv: list[str]) -> int:
    parser = common.Parser(
        "runs",
        "List the runs of this machine, oldest first. VERIFIED holds only while the files are as they were verified.",
    )
    parser.add_json()
    args = parser.parse_args(argv)
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
