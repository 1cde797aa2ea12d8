"""What the smoke says of the full run, with an error bar, and how good that was afterwards. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

from uvcc_console.core import events as ev
from uvcc_console.core import pod_states
from uvcc_console.core.snapshot import Snapshot
from uvcc_engine.contract.parsing.untrusted import as_float

LEAST_ERROR = 0.10  # of the value: two steps of a smoke know nothing of the next hour's network
WARM_UP = 1
FEW_STEPS = 4
"""A smoke of no more steps has measured hardly any but a run's first ones."""
EARLY_ERROR = 0.5  # of the value: by how much those may be slower than what follows, where no rehearsal says it

BESIDE_ERROR = 0.5  # of what starting and ending took once


def _steps(s: Snapshot, name: str, first: int = WARM_UP) -> list[float]:
    """The measured values of every worker from the one numbered ``first`` on: the one before pays for starting."""
    found: list[float] = []
    for by_name in s.series.values():
        line = by_name.get(name)
        found += line.ys()[first:] if line is not None else ()
    return [y for y in found if math.isfinite(y) and y > 0]


def step_times(s: Snapshot) -> list[float]:
    """Seconds a step, as the workers' heartbeats tell, or of a smoke too short for that, as its rate tells. Those of
    first steps stand for the others only where nothing else was measured."""
    job = s.profile.get("job")
    batch = float(job.get("batch") or 0) if isinstance(job, Mapping) else 0.0
    for first in (WARM_UP, 0):
        if found := _steps(s, "step_s", first):
            return found
        if batch and (rates := _steps(s, "samples_per_s", first)):
            return [batch / rate for rate in rates]
    return []


def _extrapolate(values: Sequence[float], steps: int) -> tuple[float, float]:
    """Mean per step times steps. The mean's own error grows with the steps; it is never below a tenth."""
    if not values:
        return 0.0, 0.0
    mean = statistics.fmean(values)
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else mean
    return mean * steps, max(error * steps, LEAST_ERROR * mean * steps)


def volume(s: Snapshot) -> tuple[float, float]:
    """Bytes that a worker sends in a step, on average over the workers, and the error of that.

    As counted between heartbeats, or in a smoke too short for that, since its start. That one party's workers deal for
    the others, and so send many times as much, is no error: each worker's own steps say how sure its volume is.
    """
    lines = [list(line.ys()) for by_name in s.series.values() if (line := by_name.get("bytes")) is not None]
    found = [steps for line in lines if (steps := line[WARM_UP:] or line)]
    if not found:
        beats = ((as_float(w.beat.get("sent_bytes")) or 0.0, w.step) for w in s.workers.values())
        found = [[sent / step] for sent, step in beats if sent > 0 and step > 0]
    if not found:
        return 0.0, 0.0
    mean = statistics.fmean(map(statistics.fmean, found))
    errors = [statistics.stdev(steps) / math.sqrt(len(steps)) for steps in found if len(steps) > 1]
    return mean, max(math.hypot(*errors) / len(found), LEAST_ERROR * mean)


def moved(s: Snapshot) -> float:
    """Bytes that the running phase's workers sent over all its steps; steps that no two heartbeats enclose count as
    the others."""
    total = 0.0
    for by_name in s.series.values():
        line = by_name.get("bytes")
        if line is None or not len(line):
            continue
        xs, ys = list(line.xs()), list(line.ys())
        weights = [1.0, *(b - a for a, b in itertools.pairwise(xs))]
        total += sum(w * y for w, y in zip(weights, ys, strict=True)) / sum(weights) * xs[-1]
    return total


def settled(s: Snapshot) -> list[float]:
    """Seconds of a step of the full run by those of the smoke.

    The few steps of a short smoke are a run's first ones, which take longer than those that follow: how much longer,
    the plan's rehearsal says, and what the full run's replicas add on processors that they share. On the processors
    that were rehearsed on, so few steps are believed within the plan's range only.
    """
    said, times = s.foretold, step_times(s)
    if said is None:
        return times
    few = _is_short(s)
    found = [one / (said.early if few else 1.0) + said.more for one in times]
    return [min(max(one, said.low), said.high) for one in found] if few and said.here and said.high else found


def _is_short(s: Snapshot) -> bool:
    return max((w.step for w in s.workers.values()), default=0) <= FEW_STEPS


def beside(s: Snapshot) -> float:
    """Seconds of the smoke that were no steps: its workers' start and end, the first step's delay included.

    0 of a smoke that was resumed, which says nothing of a run that is not.
    """
    steps = max((w.step for w in s.workers.values()), default=0)
    times = step_times(s)
    if s.attempt or not s.phase_began or not times or not steps:
        return 0.0
    return max(0.0, s.updated - s.phase_began - steps * statistics.fmean(times))


def predict(s: Snapshot, steps: int, workers: int = 0, pods: int = 0) -> ev.Forecast | None:
    """The forecast for ``steps`` steps of ``workers`` on ``pods`` (0: as many) from the smoke; None if that measured no
    step. Pods that the smoke did not need cost what its own cost on average."""
    seconds, error = _extrapolate(settled(s), steps)
    if not seconds:
        return None
    if s.foretold is None and _is_short(s):
        error = max(error, EARLY_ERROR * seconds)
    more = beside(s)
    seconds, error = seconds + more, math.hypot(error, BESIDE_ERROR * more)
    sent, sent_error = volume(s)
    workers = workers or max(1, len(s.workers))
    paid = sum(p.state not in pod_states.ABSENT for p in s.pods.values())
    an_hour = s.hourly / 3600.0 * (pods / paid if pods and paid else 1.0)
    return ev.Forecast(
        steps=steps,
        seconds=seconds,
        seconds_error=error,
        cost=seconds * an_hour,
        cost_error=error * an_hour,
        bytes=sent * steps * workers,
        bytes_error=sent_error * steps * workers,
        beside_s=more,
    )


def score(s: Snapshot, seconds: float) -> ev.ForecastScored | None:
    """Hold the forecast against what the full run took; None without one."""
    if s.prediction is None:
        return None
    p, volume = s.prediction, moved(s)
    off = abs(seconds - p.seconds) / max(p.seconds_error, 1e-9)
    bytes_off = abs(volume - p.bytes) / p.bytes_error if volume and p.bytes_error else 0.0
    cost = seconds * s.hourly / 3600.0
    return ev.ForecastScored(seconds=seconds, cost=cost, bytes=volume, sigmas=off, bytes_sigmas=bytes_off)
