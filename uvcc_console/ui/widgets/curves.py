"""What charts are drawn from: a curve per party with the range over its replicas, smoothed, over steps, time or tokens,
beside curves of other runs."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from uvcc_console.core.folding.measures import AT
from uvcc_console.core.series import Series
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.ui.judging.view import View, coord_parts, party_role
from uvcc_console.ui.widgets.canvas import Band, Curve, Numbers
from uvcc_engine.contract.parsing.untrusted import as_int

TITLES: Final = {
    "loss": "loss",
    "val_loss": "validation loss",
    "val_accuracy": "test accuracy",
    "accuracy": "accuracy",
    "val_ppl": "validation perplexity",
    "lr": "learning rate",
    "toks_per_s": "tokens/s",
    "toks_per_s_rank": "tokens/s per rank",
    "mfu": "share of the GPU's peak (MFU)",
    "tflops_rank": "10^12 operations/s per rank",
    "samples_per_s": "samples/s",
    "gate_entropy_mean": "gate entropy",
    "gate_collapse_frac": "gates collapsed",
    "dt_fetch_s": "fetching data, s",
    "step_s": "step time, s",
    "bytes": "bytes per step",
    "mem_mib": "memory, MiB",
    "gpu_mem_alloc_mib": "GPU memory, MiB",
    "gpu": "GPU use, %",
    "cpu": "CPU use, %",
}
FIGURE_ORDER: Final = tuple(TITLES)
AXES: Final = ("step", "time", "tokens")
SMOOTH: Final = (0.0, 0.6, 0.9, 0.98)
_OTHERS: Final = ("warn", "ok", "bad", "mix")
VITALS: Final = ("gpu", "cpu")
FROM_ZERO: Final = ("samples_per_s", "toks_per_s", "mem_mib", "bytes", "step_s", "gpu", "cpu")
"""What is drawn from zero on."""
HARDLY: Final = 0.02
"""By so much of its size what is drawn from zero may change, and still be a flat line."""


@dataclass(frozen=True, slots=True)
class ChartLook:
    """How charts are looked at: the x axis, how much is smoothed away, other runs to compare with by their name."""

    axis: str = "step"
    smooth: float = 0.0
    others: tuple[tuple[str, Snapshot], ...] = ()


def by_party(view: View, name: str) -> dict[int, list[Series]]:
    """Series of one name, grouped by the party of their worker."""
    if name in VITALS:
        return _vitals(view, name)
    found: dict[int, list[Series]] = {}
    for coord in sorted(view.snap.series):
        series = view.snap.series[coord].get(name)
        if series is not None and len(series):
            found.setdefault(coord_parts(coord)[0] if view.snap.proves else -1, []).append(series)
    return found


def _vitals(view: View, name: str) -> dict[int, list[Series]]:
    """What pods measure over time, at the steps that their workers were at."""
    steps = clock_of(view.snap)
    found: dict[int, list[Series]] = {}
    if steps is None:
        return found
    xs, ts = steps
    for pod in view.snap.pods.values():
        line = pod.gpu if name == "gpu" else pod.cpu
        inside = [(interpolated(ts, xs, t), v) for t, v in line if ts[0] <= t <= ts[-1]]
        if len(inside) > 1:
            scale = 100.0 if name == "cpu" else 1.0
            points = array("d", (x for x, _ in inside)), array("d", (scale * v for _, v in inside))
            found.setdefault(pod.party, []).append(Series(*points, len(inside)))
    return found


def _flat(name: str, lines: list[Series]) -> bool:
    """Whether nothing moves, or too little to be seen beside zero: a chart would tell no more than a value."""
    least = HARDLY if name in FROM_ZERO else 0.0
    for line in lines:
        low, high = min(line.ys()), max(line.ys())
        if len(line) < 2 or not high - low <= least * max(abs(low), abs(high)):
            return False
    return True


def _known(view: View) -> dict[str, list[Series]]:
    found: dict[str, list[Series]] = {}
    for by_name in view.snap.series.values():
        for name, line in by_name.items():
            if name != AT and len(line):
                found.setdefault(name, []).append(line)
    for name in VITALS:
        if lines := [line for group in by_party(view, name).values() for line in group]:
            found[name] = lines
    return found


def _order(name: str) -> tuple[int, str]:
    return FIGURE_ORDER.index(name) if name in FIGURE_ORDER else len(FIGURE_ORDER), name


def names(view: View) -> list[str]:
    """Everything measured that moves, in a steady order."""
    known = _known(view)
    lone = _alone(known)
    return sorted((n for n, lines in known.items() if n not in lone and not _flat(n, lines)), key=_order)


def _alone(known: dict[str, list[Series]]) -> set[str]:
    """What was measured once so far, where others were more often: a chart of one point is an empty one."""
    once = {name for name, lines in known.items() if all(len(line) == 1 for line in lines)}
    return once if len(once) < len(known) else set()


NEVER, HARDLY_EVER, ONCE = "never moved", f"moved by less than {HARDLY:.0%}", "measured once"


def constants(view: View) -> list[tuple[str, str, float, float]]:
    """What was measured and is not drawn: (why, name, least, most). What never moved from zero is not told either."""
    found: list[tuple[str, str, float, float]] = []
    known = _known(view)
    lone = _alone(known)
    for name, lines in sorted(known.items(), key=lambda pair: _order(pair[0])):
        last = [line.ys()[-1] for line in lines]
        if name in lone:
            found.append((ONCE, name, min(last), max(last)))
        elif _flat(name, lines) and any(last):
            moved = any(min(line.ys()) != max(line.ys()) for line in lines)
            found.append((HARDLY_EVER if moved else NEVER, name, min(last), max(last)))
    return found


def mean_and_band(lines: list[Series]) -> tuple[Series, Band | None]:
    """The mean over replicas at the steps that all have, and the band around it.

    The band is lowest to highest for a few replicas, from five on the tenth to the ninetieth percentile.
    """
    if len(lines) == 1:
        return lines[0], None
    xs = lines[0].xs()
    columns = [line.ys() for line in lines]
    if any(line.xs() != xs for line in lines[1:]):
        tables = [dict(line) for line in lines]
        xs = array("d", sorted(set.intersection(*(set(t) for t in tables))))
        columns = [array("d", [t[x] for x in xs]) for t in tables]
    cut_off = len(lines) // 10 if len(lines) < 10 else round(len(lines) * 0.1)
    if len(lines) >= 5:
        cut_off = max(1, cut_off)
    low, high, mean = array("d"), array("d"), array("d")
    for values in zip(*columns, strict=True):
        ranked = sorted(values)
        low.append(ranked[cut_off])
        high.append(ranked[-1 - cut_off])
        mean.append(sum(ranked) / len(ranked))
    return Series(xs, mean, len(xs)), Band(xs, low, high)


def smoothed(ys: Numbers, weight: float) -> array[float]:
    """An exponential moving average without the pull towards zero at its beginning."""
    out, last, scale = array("d"), 0.0, 0.0
    for y in ys:
        if y - y == 0.0:  # finite
            last = last * weight + (1 - weight) * y
            scale = scale * weight + (1 - weight)
        out.append(last / scale if scale else y)
    return out


# ---- the x axis


def clock_of(s: Snapshot) -> tuple[array[float], array[float]] | None:
    """(steps, the console's time at each), both ascending, of the worker that told most; None before there are two."""
    lines = [line for by_name in s.series.values() if (line := by_name.get(AT)) and len(line) > 1]
    best = max(lines, key=len, default=None)
    if best is None:
        return None
    ts = best.ys()
    for i in range(1, len(ts)):
        ts[i] = max(ts[i], ts[i - 1])
    return best.xs(), ts


def interpolated(xs: Numbers, ys: Numbers, x: float) -> float:
    """The y at an x, on straight lines between the points and beyond the outer ones."""
    i = min(len(xs) - 1, max(1, bisect_right(xs, x)))
    span = xs[i] - xs[i - 1]
    return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / span if span else ys[i]


def per_step(s: Snapshot) -> tuple[int, str]:
    """(how many tokens, or samples, a step takes in, and which of the two); 0 where neither worker nor plan says it."""
    for told in s.facts.values():
        rows, length = as_int(told.get("batch_size"), 1), as_int(told.get("seq_len"), 1)
        if rows and length:
            return rows * (as_int(told.get("accumulate"), 1) or 1) * length, "tokens"
    job = s.profile.get("job")
    if not isinstance(job, Mapping):
        return 0, ""
    plan = job.get("plan")
    plan = plan if isinstance(plan, Mapping) else {}
    batch = as_int(job.get("batch"), 1) or as_int(plan.get("batch"), 1) or as_int(plan.get("batch_size"), 1)
    length = as_int(job.get("seq_len"), 1) or as_int(plan.get("seq_len"), 1) or as_int(plan.get("block_size"), 1)
    if not batch:
        return 0, ""
    return (batch * length, "tokens") if length else (batch, "samples")


def axis_of(s: Snapshot, axis: str) -> Callable[[float], float] | None:
    """What turns a step into the axis's unit; None where that is not known for this run."""
    if axis == "time":
        known = clock_of(s)
        if known is None:
            return None
        xs, ts = known
        zero = interpolated(xs, ts, 0.0) if xs[0] <= 1 else ts[0]
        return lambda step: max(0.0, interpolated(xs, ts, step) - zero)
    if axis == "tokens":
        count, _ = per_step(s)
        return (lambda step: step * count) if count else None
    return lambda step: step


def _moved(curve: Curve, to: Callable[[float], float]) -> Curve:
    return replace(curve, xs=array("d", map(to, curve.xs)))


# ---- curves


def curves_of(view: View, name: str, look: ChartLook | None = None) -> tuple[list[Curve], list[Band], bool]:
    """One curve per party with its band over replicas; one neutral curve when all parties hold the very same values.

    Curves of other runs come last, each with its run's name; a smoothed curve has its measured one behind it.
    """
    look = look or ChartLook()
    groups = by_party(view, name)
    means: dict[int, tuple[Series, Band | None]] = {p: mean_and_band(lines) for p, lines in groups.items()}
    first = next(iter(means.values()), None)
    same = first is not None and len(means) == 3 and all(m[0] == first[0] for m in means.values())
    if same and first is not None:
        means = {-1: first}
    curves = [Curve(m.xs(), m.ys(), "accent" if p < 0 else party_role(p), f"P{p}") for p, (m, _) in means.items()]
    bands = [band for _, band in means.values() if band]
    to = axis_of(view.snap, look.axis) if look.axis != "step" else None
    if to is not None:
        curves = [_moved(c, to) for c in curves]
        bands = [Band(array("d", map(to, b.xs)), b.low, b.high, b.role) for b in bands]
    for i, (run, snap) in enumerate(look.others):
        if other := _of_another(snap, name, run, _OTHERS[i % len(_OTHERS)], look.axis):
            curves.append(other)
    if look.smooth:
        raw = [replace(c, role="faint", name="") for c in curves]
        curves = [*raw, *(replace(c, ys=smoothed(c.ys, look.smooth)) for c in curves)]
    return curves, bands, same


def _of_another(s: Snapshot, name: str, run: str, role: str, axis: str) -> Curve | None:
    """Another run's mean over all of its workers."""
    lines = [line for by_name in s.series.values() if (line := by_name.get(name)) is not None and len(line)]
    to = axis_of(s, axis)
    if not lines or to is None:
        return None
    mean, _ = mean_and_band(lines)
    return Curve(array("d", map(to, mean.xs())), mean.ys(), role, run) if len(mean) else None


def last_common(curves: list[Curve]) -> float | None:
    """The last x that every curve has reached."""
    ends = [c.xs[-1] for c in curves if len(c.xs)]
    return min(ends, default=None)


def read_at(curve: Curve, x: float) -> tuple[float, float] | None:
    """(x, value) of the point at this x, or of the last one before it; None before the first."""
    i = bisect_right(curve.xs, x) - 1
    return (curve.xs[i], curve.ys[i]) if i >= 0 else None
