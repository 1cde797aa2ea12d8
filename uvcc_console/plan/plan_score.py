"""The plan held against the run: what was foretold of a step of the full run, beside what was measured. Pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any, Final

from uvcc_console.core.snapshot import Snapshot, WorkerView
from uvcc_console.plan.forecast import step_times
from uvcc_engine.contract.job.rollout_phases import FULL
from uvcc_engine.contract.parsing.untrusted import as_float

BY_SMOKE: Final = "seconds by the smoke"
WITHIN: Final = 0.25
"""A foretold number that is off by more of what was measured was missed."""


@dataclass(frozen=True, slots=True)
class ScoredFigure:
    """One figure of a step: ``name`` is rounds, bytes, seconds, dollars, or ``BY_SMOKE``: seconds by the smoke's steps.

    ``low`` and ``high``: the range that was said with it, 0 where none was.
    """

    name: str
    foretold: float
    measured: float
    low: float = 0.0
    high: float = 0.0

    @property
    def off(self) -> float:
        """How far the foretold lies from what was measured, as a share of that; above it is positive."""
        return self.foretold / self.measured - 1.0

    @property
    def held(self) -> bool:
        return abs(self.off) <= WITHIN

    @property
    def in_range(self) -> bool:
        """Whether what was measured lies in the range that was said."""
        return self.low <= self.measured <= self.high

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "foretold": self.foretold,
            "measured": self.measured,
            "off": round(self.off, 4),
            "held": self.held,
        } | ({"low": self.low, "high": self.high, "in_range": self.in_range} if self.high else {})

    def words(self) -> str:
        """The figure for people: foretold, measured, and whether that held."""
        verdict = "held" if self.held else "MISSED"
        foretold, measured = _amount(self.name, self.foretold), _amount(self.name, self.measured)
        said = f"{foretold} foretold, {measured} measured: {self.off:+.1%}, {verdict}"
        if not self.high:
            return said
        place = "in" if self.in_range else "outside of"
        return f"{said}, {place} its range of {self.low:.3f} to {self.high:.3f} s"


def score(s: Snapshot) -> list[ScoredFigure]:
    """The plan's figures that can be held against the full run by now; none before it made two steps.

    Rounds: of the worker that has most, those of its microbatches added up; bytes: of all workers, without frames; both
    of as many audits as were drawn, where some are (``verify: covert``); seconds: the workers' median; dollars: by the
    price of the pods, where there is one.
    """
    said = s.foretold
    if said is None or s.phase != FULL:
        return []
    told = list(s.workers.values())
    rounds, sent = _told(told, "step_rounds"), _told(told, "step_bytes")
    times = step_times(s)
    took = statistics.median(times) if times else 0.0
    a_second = _price(s) / 3600.0
    by_smoke = s.prediction
    smoke_s = (
        (by_smoke.seconds - by_smoke.beside_s) / by_smoke.steps if by_smoke is not None and by_smoke.steps else 0.0
    )
    ranges = {"seconds": (said.low, said.high)}
    audits, audited = _drawn(told)
    pairs = {
        "rounds": (said.rounds + said.audit_rounds * (audited - said.audited), max(rounds, default=0.0)),
        "bytes": (
            said.bytes + said.audit_bytes * (audits - said.audits),
            sum(sent) if len(sent) == len(told) and not s.apart else 0.0,
        ),
        "seconds": (said.seconds, took),
        BY_SMOKE: (smoke_s, took),
        "dollars": (said.seconds * a_second, took * a_second),
    }
    return [ScoredFigure(name, a, b, *ranges.get(name, ())) for name, (a, b) in pairs.items() if a > 0 and b > 0]


def _drawn(workers: list[WorkerView]) -> tuple[float, float]:
    """How many audits a step had on average, and the share of the steps that had one: all workers tell the same."""
    return max(_told(workers, "step_audits"), default=0.0), max(_told(workers, "step_audited"), default=0.0)


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
    return {"rounds": f"{value:.1f}", "dollars": f"${value:.6f}"}.get(name, f"{value:.3f} s")


def lines(s: Snapshot) -> list[str]:
    """The score for people, one line a figure; what is not foretold is named."""
    found = score(s)
    if not found:
        return []
    told = [f"a step's {one.name:<8} {one.words()}" for one in found]
    if s.foretold is not None and not s.foretold.rounds:
        told.append("a step's rounds   not foretold: a party has more workers than one machine rehearses")
    if s.apart:
        told.append("a step's bytes    not scored: a domain hears of its own party's workers only")
    return told
