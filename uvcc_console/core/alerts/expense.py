"""What a run will have cost when it is done, at its own pace: none of its limits, which may be far above it."""

from __future__ import annotations

from statistics import median
from typing import Final

from uvcc_console.core.alerts.finding import step_time
from uvcc_console.core.folding.measures import AT
from uvcc_console.core.snapshot import Snapshot
from uvcc_engine.contract.job.rollout_phases import FULL

_PACED: Final = 20  # steps that the time left is reckoned by


def pace(s: Snapshot) -> float | None:
    """Seconds a step took lately by the console's clock, their median: a halt may lie between two of them."""
    lines = [line for by_name in s.series.values() if (line := by_name.get(AT)) and len(line) > _PACED]
    if not lines:
        return None
    line = max(lines, key=len)
    steps, times = line.recent_xs(_PACED + 1), line.recent(_PACED + 1)
    took = [(times[i + 1] - times[i]) / (steps[i + 1] - steps[i]) for i in range(_PACED)]
    return max(0.0, median(took))


def expected(s: Snapshot) -> float | None:
    """US dollars, with what is spent already; None where nothing is paid or no pace is known yet.

    Before the full run: what the smoke foretold of it.
    """
    if s.ended or s.hourly <= 0:
        return None
    if s.phase == FULL and s.steps_planned and (a_step := pace(s) or step_time(s)):
        return s.spent + s.hourly / 3600.0 * a_step * max(0, s.steps_planned - s.step)
    p = s.prediction
    return s.spent + p.cost if p is not None and not p.scored else None
