"""``uvcc teardown RUN``: delete the run's pods and prove it."""

from __future__ import annotations

from uvcc_console.cli import common
from uvcc_console.cli.follow import headless, teardown_order
from uvcc_console.cli.main import FAILED, OK
from uvcc_console.cli.steer import pods
from uvcc_engine.contract.text import counted


def run(argv: list[str]) -> int:
    parser = common.Parser("teardown", "End a run: delete its pods and wait for the proof that they are gone.")
    parser.add_run()
    parser.add_json()
    args = parser.parse_args(argv)
    run_dir = common.find_run(args.run)
    s = common.load_summary(run_dir)
    unwritten: list[str] | None = None
    if not s.ended:
        with headless.interruptible():  # an interrupt cannot make it safer: the proof is waited for
            given = teardown_order.order(run_dir)
            if given.noted:
                s = headless.follow(run_dir, given.child, [], progress=not args.json, until_failed=False).snapshot
            if not s.ended:
                written, unwritten = teardown_order.see_through(run_dir, s, given)
                s = common.load_summary(run_dir) if written else s
    elif s.leaks:  # what could not be proven when it ended may be proven now
        pods.settle(run_dir, s.leaks)
        s = common.load_summary(run_dir)
    if not s.ended and unwritten == []:
        if args.json:
            common.emit({"run": s.run, "status": s.status, "gone": True, "leaks": [], "journalled": False})
        else:
            common.show(f"{s.run}: every pod is gone, by its provider's list; the journal could not be written")
            common.say("  what they had recorded, and the disk here did not take, is gone with them")
            common.say(f"  when the disk takes something again, uvcc teardown {s.run} writes the run's end down")
        return OK
    kept = pods.end_kept(run_dir) if s.ended else []
    gone = bool(s.ended) and not s.leaks and not kept
    if args.json:
        common.emit({"run": s.run, "status": s.status, "gone": gone, "leaks": [*s.leaks, *kept]})
    elif gone and s.followed:
        common.show(f"{s.run}: no longer followed ({s.status}); nothing at {s.followed} was touched")
    elif gone:
        common.show(f"{s.run}: {counted(len(s.pods), 'pod')} proven gone ({s.status})")
    else:
        why = ", ".join([*s.leaks, *kept] or unwritten or ()) or s.detail or "the conductor died"
        common.say(f"{s.run}: NOT proven gone: {why}")
        for name in s.leaks:  # each with its reason and the command that ends it
            pod = s.pods.get(name.rpartition("-")[2])
            common.say(f"  {name}: {pod.detail if pod and pod.detail else f'end it with: uvcc pods --end {name}'}")
        common.say("  or look again with: uvcc pods --sweep")
    return OK if gone else FAILED
