"""Following a run without the TUI: progress on standard error, the summary on standard output, Ctrl-C tears down."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TextIO

from uvcc_console.cli import common
from uvcc_console.cli.follow import jsonview, teardown_order
from uvcc_console.cli.main import FAILED, INTERRUPTED, OK
from uvcc_console.core import events as ev
from uvcc_console.core import pod_states
from uvcc_console.core.answers.shown import CHANGED, UNCHECKED, shown
from uvcc_console.core.journal.journal import Follower, Journal
from uvcc_console.core.snapshot import Snapshot, StageView
from uvcc_console.core.words import engine_words
from uvcc_console.plan.plan import FULL, RESUMABLE, SMOKE
from uvcc_console.report.recheck import recheck
from uvcc_console.runs import processes
from uvcc_console.runs.disk_space import cure, full_disk
from uvcc_engine.contract.run_files.files import STEPS_REPEATED
from uvcc_engine.contract.text import clean

POLL_S = 0.1
PHASE_OF = {"drill": SMOKE, SMOKE: SMOKE, FULL: FULL}
LINE_EVERY_S = 2.0
EXITS_S = 10.0
SUCCESSOR_S = 60.0


@dataclass
class ProgressLine:
    """What the progress line shows; fed with events and snapshots, knows no clock and no terminal."""

    first_step: float = 0.0
    pace: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=12))

    def see(self, event: ev.Event) -> None:
        """Take note of training steps as they are reported."""
        if isinstance(event, ev.PhaseStarted):
            self.pace.clear()
        elif isinstance(event, ev.Metric) and event.split == "train":
            self.first_step = self.first_step or event.ts
            if not self.pace or event.step > self.pace[-1][1]:
                self.pace.append((event.ts, event.step))

    @property
    def step_s(self) -> float | None:
        """Seconds per step over the last steps."""
        if len(self.pace) < 2 or self.pace[-1][0] <= self.pace[0][0]:
            return None
        return (self.pace[-1][0] - self.pace[0][0]) / (self.pace[-1][1] - self.pace[0][1])

    def line(self, s: Snapshot) -> str:
        """``full running  step 34/110  loss 0.4120  0.21 s/step  agreed 33``."""
        stage = s.stage
        parts = [f"{stage.name} {stage.status}" if stage else s.status]
        if stage and stage.name in RESUMABLE and s.phase == PHASE_OF[stage.name]:
            parts.append(f"step {max(s.step, s.first_step)}/{s.steps_planned}")
            loss = jsonview.last_value(s, "loss")
            parts += [f"loss {loss:.4f}"] if loss is not None else []
            parts += [f"{self.step_s:.2f} s/step"] if self.step_s is not None else []
            parts += [f"agreed {s.agreed_step}"] if s.agreed_epoch >= 0 else []
        elif stage and stage.detail:
            parts.append(stage.detail)
        elif stage and stage.status == "running":
            parts += [f"{p.pod}: {p.said}" for p in s.pods.values() if p.state == pod_states.BOOTING and p.said][:1]
        return "  ".join(parts)


class Printer:
    """Shows progress on ``out``: one line rewritten on a terminal, else a line for each change, not too many."""

    def __init__(self, out: TextIO | None) -> None:
        self._out = out
        self._tty = bool(out and out.isatty())
        self._last = ""
        self._stage = ""
        self._at = 0.0

    def show(self, line: str, stage: str, now: float) -> None:
        """``stage`` names the stage and its status: a change is always shown."""
        if self._out is None or line == self._last:
            return
        if self._tty:
            keep = "\n" if self._stage and stage != self._stage else ""
            self._out.write(f"{keep}\r\x1b[K{clean(line)}")
        elif stage != self._stage or now - self._at >= LINE_EVERY_S:
            self._out.write(clean(line) + "\n")
        else:
            return
        self._out.flush()
        self._last, self._stage, self._at = line, stage, now

    def note(self, text: str) -> None:
        """A whole line of its own."""
        if self._out is not None:
            self._out.write(("\n" if self._tty and self._last else "") + clean(text) + "\n")
            self._out.flush()
            self._last = ""


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM instead of dying of them; yields the list of those received."""
    received: list[int] = []

    def take(number: int, _frame: Any) -> None:
        received.append(number)

    old = {n: signal.signal(n, take) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def ask(run_dir: Path, action: str, **args: Any) -> subprocess.Popen[bytes] | None:
    """Write an intent down and see that a conductor acts on it: the live one, or a new one that adopts the run.

    For a teardown the journal is a courtesy, see ``teardown_order``.
    """
    if action == "teardown":
        return teardown_order.order(run_dir).child
    seq = _noted(run_dir, ev.Intent(action=action, by="cli", args=args))
    if processes.running(run_dir, processes.CONDUCTOR):
        return None
    return processes.start(run_dir, processes.CONDUCTOR, "--adopt", action, "--since", str(seq))


def _noted(run_dir: Path, intent: ev.Intent) -> int:
    journal = Journal(run_dir / processes.JOURNAL, source="cli")
    try:
        return journal.append(intent)
    finally:
        journal.close()


@dataclass
class Watched:
    """How following ended: the last snapshot, and whether it was interrupted or lost its conductor."""

    snapshot: Snapshot
    progress: ProgressLine
    interrupted: bool = False
    orphaned: bool = False


def follow(
    run_dir: Path,
    child: subprocess.Popen[bytes] | None,
    received: list[int],
    *,
    progress: bool = True,
    until_failed: bool = True,
    known: StageView | None = None,
) -> Watched:
    """Follow a run until it has ended or, with ``until_failed``, failed; an interrupt tears it down and waits.

    ``known`` is a failed stage that has just been resumed: its failure is no news.
    """
    journal = Journal(run_dir / processes.JOURNAL, readonly=True)
    follower, seen, began = Follower(journal), ProgressLine(), time.time()
    printer = Printer(sys.stderr if progress else None)
    watched, frozen, room = Watched(follower.snapshot, seen), "", ""
    alone = Alone()
    try:
        while True:
            lost = not processes.conducted(run_dir) and (child is None or child.poll() is not None)
            failed: list[ev.StageChanged] = []
            while batch := follower.poll():
                for event in batch:
                    seen.see(event)
                    tell_of_alert(printer, event, began)
                    failed += [event] if isinstance(event, ev.StageChanged) and event.status == "failed" else []
            s = watched.snapshot = follower.snapshot
            tell_of_failures(printer, failed, s.stage, began)
            stage = f"{s.stage.name} {s.stage.status}" if s.stage else ""
            printer.show(seen.line(s), stage, time.monotonic())
            frozen = tell_of_frozen(run_dir, printer, frozen)
            room = tell_of_full_disk(run_dir, printer, room)
            if s.ended:
                _wait_for_exits(run_dir, child)
                return watched
            if received and not watched.interrupted:
                watched.interrupted = True
                printer.note("interrupted: tearing down, waiting for proof that nothing is left")
                child = ask(run_dir, "teardown") or child
                continue
            if alone.look(run_dir, s, lost=lost, now=time.monotonic()):
                watched.orphaned = True
                return watched
            if until_failed and not watched.interrupted and s.stage != known and waits_for_decision(s):
                return watched
            time.sleep(POLL_S)
    finally:
        printer.note("") if printer._tty else None
        journal.close()


@dataclass(slots=True)
class Alone:
    """For how long a run has had no conductor, and whether another one is still to be expected."""

    since: float = -1.0

    def look(self, run_dir: Path, s: Snapshot, *, lost: bool, now: float) -> bool:
        """Whether nobody comes any more. Where ``limits.resumes`` is given, the sidecar starts another one."""
        if not lost:
            self.since = -1.0
            return False
        self.since = now if self.since < 0 else self.since
        limits = s.profile.get("limits")
        awaited = isinstance(limits, Mapping) and limits.get("resumes") and processes.running(run_dir, processes.HALTD)
        return not awaited or now - self.since > SUCCESSOR_S


_TOLD: Final = ("goes_on", "api", "dearer")  # it goes on by itself, it waits for others, it costs more


def tell_of_alert(printer: Printer, event: ev.Event, began: float) -> None:
    """A grave alert has a line of its own, as on the screen, and one of ``_TOLD``.

    Those from before ``began``, a time stamp, are old.
    """
    if isinstance(event, ev.Alert) and (event.level == "error" or event.name in _TOLD) and event.ts >= began:
        who = f"{event.subject}: " if event.subject else ""
        printer.note(f"alert {event.name}: {who}{event.text}" + (f" ({event.hint})" if event.hint else ""))


def tell_of_failures(printer: Printer, failed: Sequence[ev.StageChanged], now: StageView | None, began: float) -> None:
    """Why a stage failed has a line of its own where the run has gone on, to its teardown, before anybody looked. What
    failed before ``began``, a time stamp, is no news."""
    for event in failed:
        if event.ts >= began and (now is None or now.name != event.name):
            printer.note(f"{event.name} failed  {event.detail}")


def tell_of_frozen(run_dir: Path, printer: Printer, told: str) -> str:
    """Say once when the conductor stops moving, and when it moves again; the state that was told last."""
    conductor = processes.vital(run_dir, processes.CONDUCTOR)
    state = conductor.state if conductor.who is not None else ""
    if state == told or (not told and conductor.moving):
        return state
    if conductor.moving:
        printer.note("the conductor moves again")
    elif conductor.who is not None:
        printer.note(f"the conductor is frozen: {conductor.words()}")
        printer.note(
            f"  kill -CONT {conductor.who.pid} lets it go on; uvcc teardown {run_dir.name} ends it and the run"
        )
    return state


def tell_of_full_disk(run_dir: Path, printer: Printer, told: str) -> str:
    """Say once that the disk here takes nothing, which no journal can tell, and when it takes more; what was told."""
    found = full_disk(run_dir)
    if found and not told:
        printer.note(f"alert {found} ({cure(found)})")
    elif told and not found:
        printer.note(f"the disk of {run_dir} takes more again")
    return found


def _wait_for_exits(run_dir: Path, child: subprocess.Popen[bytes] | None) -> None:
    """The run has ended: its conductor and sidecar are on their way out; leave none behind the shell's prompt."""
    end = time.monotonic() + EXITS_S
    while time.monotonic() < end:
        if child is not None:
            child.poll()
        if not any(processes.running(run_dir, name) for name in (processes.CONDUCTOR, processes.HALTD)):
            return
        time.sleep(POLL_S / 5)


def waits_for_decision(s: Snapshot) -> bool:
    """Whether a stage failed and the pods are kept for a resume that somebody has to order; other failures end in the
    teardown by themselves."""
    stage = s.stage
    return stage is not None and stage.status == "failed" and stage.until > 0 and not stage.again


def outcome(watched: Watched, run_dir: Path) -> dict[str, Any]:
    """The summary of a run that ended, as one JSON document."""
    s = watched.snapshot
    changed = recheck(run_dir, s)
    found = shown(s, FULL, changed)
    first = watched.progress.first_step
    return jsonview.summary(s, run_dir, changed) | {
        "accuracy": found.values.get("accuracy"),
        "final_loss": found.values.get("loss"),
        "values": dict(found.values),
        "mark": found.mark,
        "caveat": found.caveat if found.values or found.hashes else "",
        "global_root": found.global_root,
        "result_hash": found.hashes[0] if len(found.hashes) == 1 else "",
        "sid_job": found.sid_job,
        "gates": {g.name: g.ok for g in s.gates},
        "drill_s": s.halt.last_drill_s,
        "seconds": (s.ended or s.updated) - s.created,
        "first_step_s": first - s.created if first else None,
        "artifacts": str(run_dir / "artifacts"),
        "exact_resume": engine_words(STEPS_REPEATED, s.repeated)[0] if s.repeated else "",
        "sample": s.sample,
        "leaks": list(s.leaks),
        "operation": list(s.operation),
    }


def render(o: dict[str, Any]) -> str:
    """The summary for a reader."""
    word = {True: "verified", False: "NOT VERIFIED", None: "not verified"}[o["verified"]]
    if o["mark"] in (CHANGED, UNCHECKED):
        word = o["result"]["words"]
    if o["verified"] is None and o["job"] in ("lm", "command"):
        word = f"nothing to verify (a job of kind {o['job']} has no proof bundle)"
    lines = [f"{o['run']}: {o['status']}, {word}" + (f" ({o['detail']})" if o["detail"] else "")]
    mark = f" ({o['caveat']})" if o["caveat"] else ""
    if o["accuracy"] is not None:
        lines.append(f"  accuracy     {100 * o['accuracy']:.2f} %{mark}")
    for name, value in sorted(o["values"].items()):
        if name not in ("accuracy", "loss"):
            lines.append(f"  {name:<12} {value:.6g}{mark}")
    if o["final_loss"] is not None:
        lines.append(f"  loss         {o['final_loss']:.4f}{mark}")
    for key in ("global_root", "result_hash", "sid_job"):
        if o[key]:
            lines.append(f"  {key.replace('_', ' '):<12} {o[key]}" + (mark if key == "result_hash" else ""))
    lines += [f"  operated     {sentence}" for sentence in o["operation"]]
    if o["drill_s"] is not None:
        lines.append(f"  halt drill   {o['drill_s']:.1f} s")
    lines += [f"  resume       {o['exact_resume']}"] if o["exact_resume"] else []
    first = f" (first training step after {o['first_step_s']:.1f} s)" if o["first_step_s"] is not None else ""
    lines.append(f"  time         {o['seconds']:.1f} s{first}")
    lines.append(f"  artifacts    {o['artifacts']}")
    lines += [f"  it writes    {o['sample']}"] if o["sample"] else []
    lines += [f"  LEFT BEHIND  {leak}" for leak in o["leaks"]]
    return "\n".join(lines)


def report(watched: Watched, run_dir: Path, *, as_json: bool) -> int:
    """Print the summary and what the operator can do next; returns the exit code."""
    s, run = watched.snapshot, run_dir.name
    o = outcome(watched, run_dir)
    if as_json:
        common.emit(o)
    else:
        common.show(render(o))
    if watched.orphaned and (full := full_disk(run_dir)):
        common.say(f"the conductor of {run} has ended, and {full}: how the run ended could not be written down")
        common.say(f"  uvcc pods lists what is left of it; make room there, then end it with: uvcc teardown {run}")
        return FAILED
    if watched.orphaned:
        common.say(f"the conductor of {run} died (see: uvcc logs {run})")
        if s.apart:  # no single domain can go on: the others name this one as gone, and end safe
            common.say(f"  end it here with: uvcc teardown {run}   then begin the next attempt: uvcc rollout --domain")
        else:
            common.say(f"  go on with: uvcc resume {run}   or end it with: uvcc teardown {run}")
        return FAILED
    if not s.ended and s.status == "failed":
        common.say(f"{run} failed: {s.detail}")
        until = s.stage.until if s.stage else 0.0
        kept = f" until {time.strftime('%H:%M', time.localtime(until))}" if until > 0 else ""
        common.say(f"  its pods wait{kept}: uvcc resume {run}   or end it with: uvcc teardown {run}")
        return FAILED
    if watched.interrupted:
        return INTERRUPTED
    unverified = s.job_kind == "private" and o["verified"] is not True
    return FAILED if s.status != "ok" or unverified or s.leaks else OK
