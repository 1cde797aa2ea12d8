"""Tells the operator what is new and matters: once, not again within a minute, and nothing that was there before.

``notify_command`` (see ``uvcc config``) names a program that gets the text as its last argument.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from typing import Final

from uvcc_console.core import settings
from uvcc_console.core.answers.holding import holding
from uvcc_console.core.answers.shown import CHANGED, Changes, shown
from uvcc_console.core.snapshot import EMPTY, LogEntry, Snapshot
from uvcc_console.core.words import halt_words
from uvcc_console.runs.notices import AGAIN_S, Note, NoticeWay

_ORDER: Final = re.compile(r"(?:teardown|stop) asked by ")
NAMED = 3  # subjects that a word names beside the first


def state_note(s: Snapshot, changed: Changes = EMPTY) -> Note | None:
    """What the run's present state is worth saying."""
    if s.fork:
        return Note("error", s.fork)
    if s.ended:
        if s.status == "ok":
            found = shown(s, "full", changed)
            if found.mark == CHANGED:
                return Note("error", f"{s.run}: done, {found.words()}")
            word = "VERIFIED" if found.verified else "not verified"
            return Note("info", f"{s.run}: done" + (f", {word}" if s.verdicts or s.proves else ""))
        text = f"{s.run}: ended {s.status.replace('_', ' ')}" + (f": {s.detail}" if s.detail else "")
        return Note("warn" if asked_to_end(s) else "error", text)
    if s.status == "failed" and not asked_to_end(s):
        return Note("error", f"{s.run}: FAILED {s.detail}")
    if s.status == "halted" and s.halt.done:
        level = "warn" if s.halt.verified == s.halt.total else "error"
        return Note(level, f"{s.run}: HALTED {halt_words(s.halt.verified, s.halt.total, s.halt.step)}")
    return None


def asked_to_end(s: Snapshot) -> bool:
    """Whether it is an operator's own order that a stage, or the run, ended by: that is no failure."""
    return _ORDER.match(s.detail) is not None


def together(alerts: Sequence[LogEntry]) -> list[tuple[LogEntry, list[str]]]:
    """The first alert of each name and level, with the others it is true of: one word for a fleet, not one a worker."""
    first: dict[tuple[str, str], tuple[LogEntry, list[str]]] = {}
    for a in alerts:
        kind = (a.alert or a.text, a.level)
        if kind in first:
            first[kind][1].append(a.source)
        else:
            first[kind] = (a, [])
    return list(first.values())


class Notifier:
    """Remembers what was said. ``say`` shows a note; ``send`` hands it to the operator's own program.

    ``recent_s``: alerts of so many seconds before the first look count as new, for who takes another's place: what came
    while that changed hands would be told by neither.
    """

    def __init__(self, say: Callable[[Note], None], send: NoticeWay | None = None, *, recent_s: float = 0.0) -> None:
        self._say = say
        self._recent_s = recent_s
        self._send = send
        self._state: Note | None = None
        self._alerts: tuple[LogEntry, ...] = ()
        self._said: dict[str, float] = {}
        self._started = False

    def look(self, s: Snapshot, now: float, changed: Changes = EMPTY) -> None:
        """Compare with what was seen before; the first look only takes note, but for recent alerts."""
        state, alerts = state_note(s, changed), s.alerts
        if not self._started and self._recent_s:
            self._started, self._state = True, state
            self._alerts = tuple(a for a in alerts if now - a.ts > self._recent_s)
        if self._started:
            if state is not None and state != self._state:
                self._tell(state, now)
            known = {(a.ts, a.text) for a in self._alerts}
            fresh = [a for a in alerts if (a.ts, a.text) not in known and a.level in ("warn", "error")]
            if holding(s, now) is not None:  # nothing covers a hold: they wait for its end
                fresh, alerts = [], self._alerts
            for a, also in together(fresh):
                others = also if len(also) <= NAMED else [*also[:NAMED], f"{len(also) - NAMED} more"]
                more = f" (and {', '.join(others)})" if others else ""
                self._tell(Note(a.level, f"{a.source}: {a.text}"), now, more)
        self._started = True
        self._state, self._alerts = state, alerts

    def forget(self) -> None:
        """What comes next was there before: a recording has been wound on or back."""
        self._started = False

    def _tell(self, note: Note, now: float, more: str = "") -> None:
        if now - self._said.get(note.text, float("-inf")) < AGAIN_S:
            return
        self._said[note.text] = now
        note = Note(note.level, note.text + more)
        self._say(note)
        if self._send is not None:
            self._send(note)


def operators_program() -> Callable[[str], None] | None:
    """Runs the operator's program detached, and lets it be; None when there is none. Raises ConfigError."""
    command = shlex.split(settings.text("notify_command"))
    if not command:
        return None

    def send(text: str) -> None:
        try:
            subprocess.Popen(
                [*command, text],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            return  # a missing program must not disturb the console; uvcc doctor names it

    return send
