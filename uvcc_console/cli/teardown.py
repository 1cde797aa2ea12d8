"""``uvcc teardown RUN``: delete the run's pods and prove it."""

from __future__ import annotations

from uvcc_console.cli import common, headless
from uvcc_console.cli.main import FAILED, OK


def run(argv: list[str]) -> int:
    parser = common.Parser("teardown", "End a run: delete its pods and wait for the proof that they are gone.")
    parser.add_run()
    parser.add_json()
    args = parser.parse_args(argv)
    run_dir = common.find_run(args.run)
    s = common.load_snapshot(run_dir)
    if not s.ended:
        with headless.interruptible():  # an interrupt cannot make it safer: the proof is waited for
            child = headless.ask(run_dir, "teardown")
            watched = headless.follow(run_dir, child, [], progress=not args.json, until_failed=False)
        s = watched.snapshot
    gone = bool(s.ended) and not s.leaks
    if args.json:
        common.emit({"run": s.run, "status": s.status, "gone": gone, "leaks": list(s.leaks)})
    elif gone:
        common.show(f"{s.run}: {len(s.pods)} pods proven gone ({s.status})")
    else:
        common.say(f"{s.run}: NOT proven gone: {', '.join(s.leaks) or s.detail or 'the conductor died'}")
        for name in s.leaks:  # each with its reason and the command that ends it
            pod = s.pods.get(name.rpartition("-")[2])
            common.say(f"  {name}: {pod.detail if pod and pod.detail else f'end it with: uvcc pods --end {name}'}")
        common.say("  or look again with: uvcc pods --sweep")
    return OK if gone else FAILED
