"""``uvcc halt RUN``: the halt ladder from the command line; prints the evidence.

The order goes to the run's sidecar by its own door, without a look at the whole journal and without writing to it: a
day of events, a full disk or a conductor frozen in the middle of a commit delay nothing.
"""

from __future__ import annotations

import secrets
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from uvcc_console.cli import common
from uvcc_console.cli.main import FAILED, OK
from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal
from uvcc_console.core.paths import ADOPTED
from uvcc_console.core.words import halt_words
from uvcc_console.haltd import order_socket
from uvcc_console.haltd.halt_snapshot import halt_snapshot
from uvcc_console.runs import processes
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UvccError

POLL_S = 0.02
START_S = 5.0
FOLLOWER_S = 60.0  # nobody else can halt what is only followed, and a busy machine starts a process slowly
LAST_S = 15.0
QUIET_S = 5.0
_TOO_LATE = ("the hold had become a halt before: a release comes too late", "uvcc resume goes on from its checkpoint")


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
    s = halt_snapshot(run_dir)
    if s.ended or not s.pods:
        what = f"has ended ({s.status})" if s.ended else "has no pods yet"
        raise ConfigError(f"{run_dir.name} {what}; there is nothing to halt", f"see: uvcc status {run_dir.name}")
    if s.no_halt:
        raise ConfigError(f"nothing can be halted at {s.followed}: {s.no_halt}", "end it there, by hand")
    if args.release and (not s.halt.nonce or (s.halt.done and s.halt.mode != "halt")):
        raise ConfigError(f"nothing is held at {run_dir.name}", f"uvcc halt {run_dir.name} holds it")
    if args.release and s.halt.done:
        raise UvccError(*_TOO_LATE)
    mode = "release" if args.release else "halt" if args.now else "hold"
    nonce = s.halt.nonce if args.release else secrets.token_hex(8)
    asked = ev.HaltRequested(nonce=nonce, mode=mode, by="cli", drill=args.drill, reason=args.reason)
    way = open_route(run_dir)
    try:
        waiting = WaitedHalt(way, asked, frozenset(s.pods))
        done = waiting.run(args.timeout)
        if done is None and not args.json:
            common.say(_without_verdict(run_dir, asked, ended=waiting.ended))
        return report(done, waiting.mode, asked, args.json, waiting.gone, "" if s.followed else run_dir.name)
    finally:
        way.close()  # only now: the verdict is told before its evidence is all written


class HaltRoute(Protocol):
    """How a request reaches whoever halts, and how its evidence comes back."""

    def ask(self, request: ev.HaltRequested) -> None:
        """Hand it over. Raises UvccError if that is impossible."""

    def poll(self) -> Sequence[ev.Event]:
        """What has happened since."""

    def close(self) -> None: ...


def open_route(run_dir: Path) -> HaltRoute:
    """The sidecar's door; a sidecar is started if none lives, and where that fails this process halts by itself."""
    if (run_dir / ADOPTED).exists():
        return _follower(run_dir)
    try:
        found = processes.vital(run_dir, processes.HALTD)
        if found.who is not None and (found.stopped or not found.moving):
            common.say("uvcc: the halt sidecar is frozen; this process halts by itself")
            return _Alone(run_dir)
        if found.who is None:
            processes.start(run_dir, processes.HALTD)
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            try:
                return _Sidecar(run_dir)
            except UnreachableError:
                if not processes.running(run_dir, processes.HALTD) and (run_dir / f"{processes.HALTD}.json").exists():
                    break  # it ended at once
                time.sleep(POLL_S)
        common.say("uvcc: no halt sidecar listens; this process halts by itself")
    except (UvccError, OSError) as e:
        common.say(f"uvcc: no halt sidecar could be started ({e}); this process halts by itself")
    return _Alone(run_dir)


def _follower(run_dir: Path) -> HaltRoute:
    """The door of who follows a run that was adopted; started if nobody does. What is only followed has no agents that
    this process could ask. Raises UvccError.
    """
    by_hand = "write .HALT into its folder by hand: touch .HALT halts it"
    found = processes.vital(run_dir, processes.HALTD)
    if found.who is not None and (found.stopped or not found.moving):
        what = f"who follows {run_dir.name} is frozen: pid {found.who.pid}"
        raise UnreachableError(what, f"kill -CONT {found.who.pid} lets it go on; or {by_hand}")
    child = processes.start(run_dir, processes.HALTD) if found.who is None else None
    end = time.monotonic() + FOLLOWER_S
    while time.monotonic() < end:
        try:
            return _Sidecar(run_dir)
        except UnreachableError:
            if (child is None or child.poll() is not None) and not processes.running(run_dir, processes.HALTD):
                break  # it ended at once
            time.sleep(POLL_S)
    raise UnreachableError(f"nobody follows {run_dir.name}, and nobody could be started", by_hand)


class _Sidecar:
    """By the sidecar's door; should the sidecar die meanwhile, the journal tells on.

    What that one had not written down when it died is asked of the next one again.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._line = order_socket.OrderClient(run_dir)
        self._journal: Journal | None = None
        self._seq = 0
        self._seen: list[ev.Event] = []
        self._asked: list[ev.HaltRequested] = []
        self._instead: HaltRoute | None = None

    def ask(self, request: ev.HaltRequested) -> None:
        """One that took the call but says nothing is not waited for: this process gives the same order itself.

        Who follows an adopted run finds it in the journal: nobody else can obey it.
        """
        self._asked.append(request)
        if self._instead is not None:
            return self._instead.ask(request)
        try:
            self._seen += self._line.ask(request)
        except UnreachableError as e:
            if (self._run_dir / ADOPTED).exists():
                common.say(f"uvcc: {e.what}; the order is in the journal")
                journal = Journal(self._run_dir / processes.JOURNAL, source="cli")
                journal.append(request)
                return journal.close()
            common.say(f"uvcc: {e.what}; this process halts by itself")
            self._instead = _Alone(self._run_dir)
            self._instead.ask(request)

    def poll(self) -> Sequence[ev.Event]:
        found, self._seen = self._seen, []
        if self._instead is not None:
            return [*found, *self._instead.poll()]
        if not self._line.closed:
            return [*found, *self._line.poll()]
        if self._journal is None:
            self._journal = Journal(self._run_dir / processes.JOURNAL, readonly=True)
            if lost := self._unwritten(self._journal):
                common.say("uvcc: the halt sidecar died before it wrote the order down; it is given again")
                self._instead = open_route(self._run_dir)
                for request in lost:
                    self._instead.ask(request)
                return found
            processes.start(self._run_dir, processes.HALTD)  # it takes up what the last one left
        for seq, event in self._journal.since(self._seq, kinds=_KINDS):
            self._seq = seq
            found.append(event)
        return found

    def _unwritten(self, journal: Journal) -> list[ev.HaltRequested]:
        """What was asked for and is unknown to the journal; nothing where it knows the newest order."""
        known = (e for _, e in journal.since(0, kinds=(ev.HaltRequested.kind,)) if isinstance(e, ev.HaltRequested))
        written = {(e.nonce, e.mode) for e in known}
        newest = self._asked[-1]
        if (newest.nonce, newest.mode) in written:
            return []
        return [asked for asked in self._asked if (asked.nonce, asked.mode) not in written]

    def close(self) -> None:
        self._line.close()
        if self._instead is not None:
            self._instead.close()
        if self._journal is not None:
            self._journal.close()


_KINDS = (ev.HaltAck.kind, ev.HaltDone.kind, ev.RunEnded.kind)


class _Alone:
    """The ladder in this very process, in a thread of its own: for when no other can be started."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._heard: list[ev.Event] = []
        self._again: Callable[[ev.HaltRequested], object] | None = None
        self._thread: threading.Thread | None = None
        self._done = False

    def ask(self, request: ev.HaltRequested) -> None:
        if self._again is not None:
            self._again(request)
        else:
            self._thread = threading.Thread(target=self._halt, args=(request,), name="halt", daemon=True)
            self._thread.start()

    def _halt(self, request: ev.HaltRequested) -> None:
        import asyncio

        from uvcc_console.haltd.service import Service

        async def climb() -> None:
            service = Service(self._run_dir, request=request, hear=self._hear)
            loop = asyncio.get_running_loop()
            self._again = lambda more: loop.call_soon_threadsafe(service.asked, more)
            await service.run()

        try:
            asyncio.run(climb())
        except UvccError as e:
            common.say(f"uvcc: {e}")

    def _hear(self, events: Sequence[ev.Event]) -> None:
        self._done = self._done or any(isinstance(event, ev.HaltDone) for event in events)
        self._heard.extend(events)

    def poll(self) -> Sequence[ev.Event]:
        count = len(self._heard)
        found = self._heard[:count]
        del self._heard[:count]
        return found

    def close(self) -> None:
        """Behind a verdict the look at the GPUs and the last events have time to be written; the process ends then."""
        if self._thread is not None and self._done:
            self._thread.join(LAST_S)


class WaitedHalt:
    """From the request to its HaltDone; commits a hold as soon as every pod holds."""

    def __init__(self, way: HaltRoute, asked: ev.HaltRequested, pods: frozenset[str]) -> None:
        self._way = way
        self._asked = asked
        self._stages: dict[str, str] = {}
        self._pods = pods
        self.mode = asked.mode if asked.drill or asked.mode == "release" else "halt"
        self._committed = asked.drill or asked.mode != "hold"
        self._heard = time.monotonic()
        self.ended = False  # the run was over before there was a verdict
        way.ask(asked)

    @property
    def gone(self) -> int:
        """Pods of which it is proven that no worker runs there, with a checkpoint or without."""
        return sum(stage == "gone" for stage in self._stages.values())

    def run(self, limit: float) -> ev.HaltDone | None:
        """None when there is no verdict within ``limit`` seconds; the ladder goes on by itself.

        Raises UvccError for a release that comes too late: what is held is halted three seconds after it was asked for.
        """
        end = time.monotonic() + limit
        old = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            while time.monotonic() < end:
                try:
                    for event in self._way.poll():
                        if isinstance(event, ev.HaltDone) and event.nonce == self._asked.nonce:
                            if self.mode == "release" and event.mode == "halt":
                                raise UvccError(*_TOO_LATE)
                            self.mode = event.mode  # somebody else may have released it, or a drill met a halt
                            return event
                        elif isinstance(event, ev.Alert) and event.name == "halt_release_late":
                            raise UvccError(*_TOO_LATE)
                        elif isinstance(event, ev.RunEnded):
                            self.ended = True
                            return None
                        self._see(event)
                    self._tell_of_waiting(end)
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
        self._way.ask(ev.HaltRequested(nonce=self._asked.nonce, mode=mode, by="cli"))

    def _tell_of_waiting(self, end: float) -> None:
        """Nothing was heard for a while: say of whom, so that nobody takes the silence for a verb that hangs."""
        now = time.monotonic()
        if now - self._heard >= QUIET_S:
            self._heard = now
            slow = ", ".join(sorted(self._pods - self._stages.keys())) or "the verdict"
            common.say(f"waiting for {slow}, for {max(0.0, end - now):.0f} s more at most")

    def _see(self, event: ev.Event) -> None:
        if not isinstance(event, ev.HaltAck) or event.nonce != self._asked.nonce:
            return
        self._heard = time.monotonic()
        if event.gpu:
            return common.say(f"{event.pod:<8} {event.detail}")
        step = f" at step {event.step}" if event.step >= 0 else ""
        common.say(f"{event.pod:<8} {event.stage}{step} {event.detail}".rstrip())
        if event.stage in ("held", "halted", "gone"):
            self._stages[event.pod] = event.stage
        if not self._committed and self._stages.keys() >= self._pods and "held" in self._stages.values():
            self._ask("halt")  # where none holds any more the sidecar has committed it already


def _without_verdict(run_dir: Path, asked: ev.HaltRequested, *, ended: bool) -> str:
    """Why there is none: the run is over, another order took this one's place, or the ladder goes on."""
    word, now = "DRILL" if asked.drill else asked.mode.upper(), halt_snapshot(run_dir)
    if ended or now.ended:
        return f"{word}: no verdict, the run has ended; see: uvcc status {run_dir.name}"
    if now.halt.nonce not in ("", asked.nonce):
        return f"{word}: no verdict, {now.halt.by} asked for another halt since; see: uvcc status {run_dir.name}"
    return f"{word}: no verdict yet; the ladder goes on, see: uvcc status {run_dir.name}"


def _next_of(run: str, *, all_stopped: bool) -> str:
    """What is to be done after a halt that is not verified on every pod."""
    if all_stopped:
        return f"uvcc resume {run} goes back to the last common checkpoint; uvcc teardown {run} ends the run"
    again = f"uvcc halt {run} repeats the order to those that are unknown"
    return f"{again}; uvcc pod {run} restart POD kills workers that hang, and resumes; uvcc teardown {run} ends the run"


def report(done: ev.HaltDone | None, mode: str, asked: ev.HaltRequested, as_json: bool, gone: int, run: str) -> int:
    """Tell the verdict. ``run``: the run that can go on after it, "" where this console cannot have it go on."""
    overtaken = asked.drill and done is not None and not done.drill
    word = "DRILL" if asked.drill and not overtaken else mode.upper()
    if overtaken:
        common.say("somebody holds or halts the run: nothing was drilled, and this is how it ended")
    if done is None:
        if as_json:
            common.emit({"nonce": asked.nonce, "mode": mode, "drill": asked.drill, "done": False})
        return FAILED
    if as_json:
        row: dict[str, Any] = {"done": True, **ev.to_json(done)}
        common.emit(row)
    else:
        known = max(gone, done.verified)
        unknown = f", {known - done.verified} without a checkpoint" if done.verified < known else ""
        unknown += f", {done.total - known} UNKNOWN" if known < done.total else ""
        common.show(f"{word} {halt_words(done.verified, done.total, done.step, unknown)}, {done.seconds:.1f} s")
        if run and done.verified < done.total and done.mode == "halt" and not done.drill:
            common.say(_next_of(run, all_stopped=known >= done.total))
    return OK if done.verified == done.total and not overtaken else FAILED
