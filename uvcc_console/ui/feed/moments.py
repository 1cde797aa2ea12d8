"""Moments of a recording as an operator names them: a time of day, a share, a step, an event, a halt."""

from __future__ import annotations

import calendar
import re
import time
from collections.abc import Callable, Sequence

from uvcc_console.core import events as ev
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.parsing.untrusted import as_int

Recorded = Sequence[tuple[int, ev.Event]]
_TIME = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?")
_DAY = 86400.0
_ALSO = {"halted": "halt", "held": "halt", "resumed": "resume", "fail": "failed", "failure": "failed", "forked": "fork"}
HOW = "HH:MM[:SS], 50%, +30 or -30 seconds, step N, event N, halt, resume, failed, fork, start or end"


def moment(text: str, recorded: Recorded, start: float, end: float, at: float, *, utc: bool = False) -> float:
    """The time that is meant. Raises ConfigError."""
    word, _, rest = text.strip().partition(" ")
    if found := _TIME.fullmatch(word):
        return _time_of_day(found, start, end, utc)
    if word.endswith("%") and (part := _number(word[:-1])) is not None:
        return start + (end - start) * min(100.0, max(0.0, part)) / 100
    if word[:1] in "+-" and (seconds := _number(word)) is not None:
        return at + seconds
    if word in ("start", "end"):
        return start if word == "start" else end
    tests: dict[str, Callable[[int, ev.Event], bool]] = {
        "halt": lambda seq, e: isinstance(e, ev.HaltRequested) and not e.drill and e.mode != "release",
        "resume": lambda seq, e: isinstance(e, ev.PhaseStarted) and e.attempt > 0,
        "failed": lambda seq, e: isinstance(e, ev.StageChanged) and e.status == "failed",
        "fork": lambda seq, e: isinstance(e, ev.ForkDetected),
    }
    if word in ("step", "event") and rest.strip().isdecimal() and len(rest) < 12:
        n = int(rest)
        tests["step"] = lambda seq, e: isinstance(e, ev.HeartbeatRead) and (as_int(e.record.get("step")) or 0) >= n
        tests["event"] = lambda seq, e: seq >= n
    test = tests.get(_ALSO.get(word, word))
    if test is None:
        raise ConfigError(f"a recording knows no moment {text.strip()[:40]!r}", HOW)
    hit = next((e.ts for seq, e in recorded if test(seq, e)), None)
    if hit is None:
        raise ConfigError(f"the recording has no {text.strip()[:40]}", HOW)
    return hit


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"[+-]?\d{1,9}(\.\d{1,6})?", text) else None


def _time_of_day(found: re.Match[str], start: float, end: float, utc: bool) -> float:
    """That time on the recording's first day, or on the one day of it that has the time."""
    hour, minute, second = (int(g or 0) for g in found.groups())
    if hour > 23 or minute > 59 or second > 59:
        raise ConfigError(f"no time of day: {found.group()}", HOW)
    day = time.gmtime(start) if utc else time.localtime(start)
    parts = (day.tm_year, day.tm_mon, day.tm_mday, hour, minute, second, 0, 0, -1)
    ts = float(calendar.timegm(parts)) if utc else time.mktime(parts)
    while ts < start - 1 and ts + _DAY <= end + 1:
        ts += _DAY
    return ts
