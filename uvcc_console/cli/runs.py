"""``uvcc runs``: the runs of this machine."""

from __future__ import annotations

import time

from uvcc_console.cli import common, jsonview
from uvcc_console.core.shown import CHANGED
from uvcc_engine.contract.errors import UnreadableError


def run(argv: list[str]) -> int:
    parser = common.Parser(
        "runs",
        "List the runs of this machine, oldest first. VERIFIED holds only while the files are as they were verified.",
    )
    parser.add_json()
    args = parser.parse_args(argv)
    rows = []
    for run_dir in common.run_dirs():
        try:
            rows.append(jsonview.summary(common.load_snapshot(run_dir), run_dir))
        except UnreadableError as e:
            common.say(f"uvcc: {e}")
    if args.json:
        common.emit(rows)
        return 0
    if not rows:
        common.say("there are no runs yet; start one with: uvcc demo")
        return 0
    width = max(len(r["run"]) for r in rows)
    print(f"{'RUN':<{width}}  {'PROFILE':<16} {'STATUS':<10} {'STAGE':<14} {'STEP':>9}  {'VERIFIED':<8} CREATED")
    for r in rows:
        step = f"{min(max(r['step'] + 1, 0), r['steps'])}/{r['steps']}" if r["steps"] else "-"
        status = r["status"] if r["live"] or r["ended"] else f"{r['status']}?"
        word = {True: "yes", False: "NO", None: "-"}[r["verified"]]
        word = "CHANGED" if r["result"]["mark"] == CHANGED else word
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(r["created"]))
        print(f"{r['run']:<{width}}  {r['profile']:<16} {status:<10} {r['stage']:<14} {step:>9}  {word:<8} {when}")
    return 0
