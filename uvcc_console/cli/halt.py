"""``uvcc halt RUN``: the halt ladder from the command line; prints the evidence."""

from __future__ import annotations

import secrets
import signal
import time
from typing import Any

from uvcc_console.cli import common
from uvcc_console.cli.main import FAILED, OK, USAGE
from uvcc_console.core import events as ev
from uvcc_console.core.journal import Journal
from uvcc_console.rollout import spawn

POLL_S = 0.02


def run(argv: list[str]) -> int:
    parser = common.Parser(
        "halt",
        "Hold the run at once on every pod; when all hold, or after 3 s, halt it with a verified checkpoint. Ctrl-C "
        "while it holds releases it. Exits 0 only if every pod is verified.",
    )
    parser.add_run()
    parser.add_argument("--drill", action="store_true", help="hold and release, timed; the run goes on")
    parser.add_argument("--now", action="store_true", help="halt at once, without holding first")
    parser.add_argument("--release", action="store_true", help="release a hold")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="how long to wait for evidence")
    parser.add_argument("--reason", default="", help="goes into the journal")
    parser.add_json()
    args = parser.parse_args(argv)
    run_dir = common.find_run(args.run)
    s = common.load_snapshot(run_dir)
    if s.ended or not s.pods:
        what = f"has ended ({s.status})" if s.ended else "has no pods yet"
        common.say(f"uvcc: {run_dir.name} {what}; there is nothing to halt")
        return USAGE
    if not spawn.running(run_dir, spawn.HALTD):
        spawn.start(run_dir, spawn.HALTD)
    mode = "release" if args.release else "halt" if args.now else "hold"
    nonce = s.halt.nonce if args.release else secrets.token_hex(8)
    asked = ev.HaltRequested(nonce=nonce, mode=mode, by="cli", drill=args.drill, reason=args.reason)
    journal = Journal(run_dir / spawn.JOURNAL, source="cli")
    try:
        waiting = _Waiting(journal, asked, frozenset(s.pods))
        done = waiting.run(args.timeout)
    finally:
        journal.close()
    return _report(done, waiting.mode, asked, args.json)


class _Waiting:
    """From the request to its HaltDone; commits a hold as soon as every pod holds."""

    def __init__(self, journal: Journal, asked: ev.HaltRequested, pods: frozenset[str]) -> None:
        self._journal = journal
        self._asked = asked
        self._held: set[str] = set()
        self._pods = pods
        self.mode = asked.mode if asked.drill or asked.mode == "release" else "halt"
        self._committed = asked.drill or asked.mode != "hold"
        self._seq = journal.append(asked)

    def run(self, limit: float) -> ev.HaltDone | None:
        """None when there is no verdict within ``limit`` seconds; the ladder goes on by itself."""
        end = time.monotonic() + limit
        old = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            while time.monotonic() < end:
                try:
                    for seq, event in list(self._journal.since(self._seq)):
                        self._seq = seq
                        if isinstance(event, ev.HaltDone) and event.nonce == self._asked.nonce:
                            if event.mode == self.mode:
                                return event
                        elif isinstance(event, ev.RunEnded):
                            return None
                        self._see(event)
                    time.sleep(POLL_S)
                except KeyboardInterrupt:
                    if self._committed:
                        return None
                    self._ask("release")
                    self.mode = "release"
        finally:
            signal.signal(signal.SIGINT, old)
        return None

    def _ask(self, mode: str) -> None:
        self._committed = True
        self._journal.append(ev.HaltRequested(nonce=self._asked.nonce, mode=mode, by="cli"))

    def _see(self, event: ev.Event) -> None:
        if not isinstance(event, ev.HaltAck) or event.nonce != self._asked.nonce:
            return
        if event.gpu:
            return common.say(f"{event.pod:<8} {event.detail}")
        step = f" at step {event.step}" if event.step >= 0 else ""
        common.say(f"{event.pod:<8} {event.stage}{step} {event.detail}".rstrip())
        if event.stage in ("held", "halted", "gone"):
            self._held.add(event.pod)
        if not self._committed and self._held >= self._pods:
            self._ask("halt")


def _report(done: ev.HaltDone | None, mode: str, asked: ev.HaltRequested, as_json: bool) -> int:
    word = "DRILL" if asked.drill else mode.upper()
    if done is None:
        if as_json:
            common.emit({"nonce": asked.nonce, "mode": mode, "drill": asked.drill, "done": False})
        common.say(f"{word}: no verdict yet; the ladder goes on, see: uvcc status")
        return FAILED
    if as_json:
        row: dict[str, Any] = {"done": True, **ev.to_json(done)}
        common.emit(row)
    else:
        unknown = f", {done.total - done.verified} UNKNOWN" if done.verified < done.total else ""
        common.show(f"{word} {done.verified}/{done.total} verified{unknown} at step {done.step}, {done.seconds:.1f} s")
    return OK if done.verified == done.total else FAILED
