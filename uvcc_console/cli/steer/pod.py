"""``uvcc pod RUN ACTION [POD]``: what the console's pod keys do, without a screen."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

from uvcc_console.cli import common
from uvcc_console.cli.follow import headless
from uvcc_console.cli.main import FAILED, OK
from uvcc_console.core import events as ev
from uvcc_console.core.answers import triage
from uvcc_console.core.journal.journal import Journal
from uvcc_console.runs import processes
from uvcc_engine.contract.errors import ConfigError

ACTIONS = ("stackdump", "flight", "fetch", "restart", "replace", "triage", "nccl_debug")
ALONE = ("flight", "triage", "nccl_debug")
POLL_S = 0.1


def run(argv: list[str]) -> int:
    parser = common.Parser("pod", "Have something done to a pod of a live run, through its conductor.")
    parser.add_run()
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("pod", nargs="?", default="", metavar="POD", help="for all but flight, triage and nccl_debug")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="how long to wait for its answer")
    parser.add_json()
    args = parser.parse_args(argv)
    run_dir = common.find_run(args.run)
    s = common.load_snapshot(run_dir)
    if s.ended:
        raise ConfigError(f"{run_dir.name} has ended ({s.status})", f"what came of it: uvcc status {run_dir.name}")
    if not processes.running(run_dir, processes.CONDUCTOR):
        raise ConfigError(f"nobody conducts {run_dir.name}", f"take it up first: uvcc resume {run_dir.name}")
    if args.action not in ALONE and args.pod not in s.pods:
        raise ConfigError(f"{run_dir.name} has no pod {args.pod!r}", f"pods: {', '.join(s.pods)}")
    if args.action == "triage" and not triage.impossible(s):
        common.say("\n".join([*triage.story(s), f"next: {getattr(triage.propose(s), 'change', 'nothing is left')}"]))
    order = secrets.token_hex(4)
    headless.ask(run_dir, args.action, pod=args.pod, order=order)
    done = _answer(run_dir / processes.JOURNAL, s.seq, order, args.timeout)
    if args.json:
        common.emit({"run": s.run, "action": args.action, "pod": args.pod, **done})
    else:
        common.say(str(done["detail"]))
    return OK if done["ok"] else FAILED


def _answer(path: Path, seq: int, order: str, limit: float) -> dict[str, object]:
    """The conductor's word on this order in the journal; somebody else may have asked for the same."""
    journal = Journal(path, readonly=True)
    end = time.monotonic() + limit
    try:
        while time.monotonic() < end:
            for _, event in journal.since(seq, kinds=(ev.ActionDone.kind,)):
                if isinstance(event, ev.ActionDone) and event.order == order:
                    return {"ok": event.ok, "detail": event.detail}
            time.sleep(POLL_S)
    finally:
        journal.close()
    return {"ok": False, "detail": f"no answer in {limit:g} s; it may still happen: uvcc status"}
