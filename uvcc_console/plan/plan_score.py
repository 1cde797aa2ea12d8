"""The plan held against the run: what was foretold of a step of the full run, beside what was measured. Pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any, Final

from uvcc_console.core.snapshot import Snapshot, WorkerView
from uvcc_console.plan.forecast import step_times
from uvcc_engine.contract.job.rollout_phases import FULL
from uvcc_engine.contract.parsing.untrusted import as_float

WITHIN: Final = 0.25
"""A foretold number that is off by more of what was measured was missed."""


@dataclass(frozen=True, slots=True)
class ScoredFigure:
    """One figure of a step: ``name`` is rounds, bytes, seconds or dollars."""

    name: str
    foretold: float
    measured: float

    @property
    def off(self) -> float:
        """How far the foretold lies from what was measured, as a share of that; above it is positive."""
        return self.foretold / self.measured - 1.0

    @property
    def held(self) -> bool:
        return abs(self.off) <= WITHIN

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "foretold": self.foretold,
            "measured": self.measured,
            "off": round(self.off, 4),
            "held": self.held,
        }

    def words(self) -> str:
        """The figure for people: foretold, measured, and whether that held."""
        verdict = "held" if self.held else "MISSED"
        foretold, measured = _amount(self.name, self.foretold), _amount(self.name, self.measured)
        return f"{foretold} foretold, {measured} measured: {self.off:+.1%}, {verdict}"


def score(s: Snapshot) -> list[ScoredFigure]:
    """The plan's figures that can be held against the full run by now; none before it made two steps.

    Rounds: of a worker; bytes: of all workers, without frames; seconds: the workers' median; dollars: by the price of
    the pods, where there is one.
    """
    said = s.foretold
    if said is None or s.phase != FULL:
        return []
    told = list(s.workers.values())
    rounds, sent = _told(told, "step_rounds"), _told(told, "step_bytes")
    times = step_times(s)
    took = statistics.median(times) if times else 0.0
    a_second = _price(s) / 3600.0
    pairs = {
        "rounds": (said.rounds, max(rounds, default=0.0)),
        "bytes": (said.bytes, sum(sent) if len(sent) == len(told) else 0.0),
        "seconds": (said.seconds, took),
        "dollars": (said.seconds * a_second, took * a_second),
    }
    return [ScoredFigure(name, a, b) for name, (a, b) in pairs.items() if a > 0 and b > 0]


def _told(workers: list[WorkerView], name: str) -> list[float]:
    found = (as_float(w.beat.get(name)) for w in workers)
    return [value for value in found if value is not None and value > 0]


def _price(s: Snapshot) -> float:
    """Dollars an hour of the full run's pods; of those that are gone, as the smoke's forecast counted them."""
    if s.hourly or s.prediction is None or not s.prediction.seconds:
        return s.hourly
    return 3600.0 * s.prediction.cost / s.prediction.seconds


def _amount(name: str, value: float) -> str:
    if name == "bytes":
        return f"{value / 1e6:.3f} MB"
    return {"rounds": f"{value:.1f}", "seconds": f"{value:.3f} s", "dollars": f"${value:.6f}"}[name]


def lines(s: Snapshot) -> list[str]:
    """The score for people, one line a figure; what is not foretold is named."""
    found = score(s)
    if not found:
        return []
    told = [f"a step's {one.name:<8} {one.words()}" for one in found]
    if s.foretold is not None and not s.foretold.rounds:
        told.append("a step's rounds   not foretold: stages, tensor ranks and micro-batches share them out")
    return told
