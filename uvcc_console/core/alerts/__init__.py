"""Detectors: what is wrong with a run, each finding with its evidence and a hint. Pure; thresholds are the run's own.

A detector is ``(snapshot, now) -> findings``. ``detect`` runs all of them; ``Watch`` remembers what it has told.
"""

from __future__ import annotations

from collections.abc import Sequence

from uvcc_console.core import events as ev
from uvcc_console.core.alerts import cards, fleet, progress, quality
from uvcc_console.core.alerts.finding import Detector, Finding, step_time
from uvcc_console.core.folding import bad_records
from uvcc_console.core.snapshot import Snapshot

DETECTORS: tuple[Detector, ...] = (*progress.DETECTORS, *quality.DETECTORS, *fleet.DETECTORS, *cards.DETECTORS)
AGAIN_S = 600.0
STEPPED_S = 5.0  # between two looks: somebody set the clock, or the machine slept
GONE_S, GONE_STEPS = 60.0, 10  # a warning is often of what steps measure, and hovers as long as they take
SETTLES_S = 30.0  # until what is compared with the clock was written by it


def detect(s: Snapshot, now: float) -> list[Finding]:
    """Everything that is wrong now; a run that has ended, or has no workers yet, is judged by its fleet alone."""
    if s.ended:
        return []
    return [found for detector in DETECTORS for found in _asked(detector, s, now)]


_OF_THE_MOMENT = {detector.__name__: detector for detector in progress.DETECTORS}


def lasts(s: Snapshot, now: float, name: str, subject: str) -> bool:
    """Whether what an alert told of how a run gets on is still so; what else was told counts as lasting."""
    detector = _OF_THE_MOMENT.get(name)
    return detector is None or any((f.subject or f.name) == subject for f in _asked(detector, s, now))


def _asked(detector: Detector, s: Snapshot, now: float) -> list[Finding]:
    """What one detector says. Data that it cannot judge keeps no other from judging; that it could not is a finding."""
    try:
        return list(detector(s, now))
    except bad_records.ERRORS as e:
        if bad_records.strict():
            raise
        name = getattr(detector, "__name__", "a detector")
        text = f"{name} cannot judge what the pods report: {type(e).__name__}"
        return [Finding("detector_failed", text, "uvcc status counts malformed lines by pod", name)]


class Watch:
    """Turns findings into alerts: each once, and again only if it was gone for long or ten minutes have passed.

    What hovers at its limit is found, and not found, by turns: that it was missing for a moment is nothing new.
    """

    def __init__(self) -> None:
        self._told: dict[tuple[str, str], float] = {}
        self._counts: dict[tuple[str, str], float] = {}  # until when, by the counter, what was found is not gone yet
        self._ahead: float | None = None  # of the machine's counter, at the last look
        self._settled = float("-inf")

    def look(self, s: Snapshot, now: float, up: float) -> Sequence[ev.Event]:
        """``now``: the wall clock, by which events are dated; ``up``: seconds of a counter that nobody sets.

        After a step of the one against the other nothing is judged for a while: each heartbeat looks hours old.
        """
        ahead, self._ahead = self._ahead, now - up
        if ahead is not None and abs(now - up - ahead) > STEPPED_S:
            self._settled = up + SETTLES_S
        if up < self._settled:
            return []
        found = {(f.name, f.subject): f for f in detect(s, now)}
        counts = {key: up + _missing_s(f, s) for key, f in found.items()}
        self._counts = {key: until for key, until in self._counts.items() if up <= until} | counts
        self._told = {key: at for key, at in self._told.items() if key in self._counts}
        fresh = [f for key, f in found.items() if up - self._told.get(key, float("-inf")) >= AGAIN_S]
        self._told |= {(f.name, f.subject): up for f in fresh}
        return [ev.Alert(level=f.level, name=f.name, text=f.text, hint=f.hint, subject=f.subject) for f in fresh]


def _missing_s(f: Finding, s: Snapshot) -> float:
    """How long a finding has to be missing until it is gone, and would be a new one."""
    return GONE_S if f.level == "error" else min(AGAIN_S, max(GONE_S, GONE_STEPS * step_time(s)))


__all__ = ["AGAIN_S", "DETECTORS", "SETTLES_S", "Finding", "Watch", "detect", "lasts"]
