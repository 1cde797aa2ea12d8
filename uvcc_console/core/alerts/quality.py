"""Does it learn, fast enough, and is it the run that was planned?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from uvcc_console.core.alerts.finding import Finding, line, middle, step_time, training, usual_and_recent
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.core.words import value_words
from uvcc_engine.contract.parsing.untrusted import as_float

WINDOW = 50
FLAT = 1e-4
WORSE = 1.5
REGAINED = 0.05  # of what the loss had fallen: near zero it may double and mean nothing
HALF = 0.5
FETCH_SHARE = 0.3
COLLAPSED = 0.5
ENTROPY_FLOOR = 0.2


def _gates(s: Snapshot) -> Mapping[str, Any]:
    found = s.profile.get("gates")
    return found if isinstance(found, Mapping) else {}


def _job(s: Snapshot) -> Mapping[str, Any]:
    found = s.profile.get("job")
    return found if isinstance(found, Mapping) else {}


def throughput_below_floor(s: Snapshot, now: float) -> Iterator[Finding]:
    """Below the profile's floor, or half of what this run usually does."""
    floor = float(_gates(s).get("toks_per_s") or 0.0)
    for coord in s.series:
        for name in ("toks_per_s", "samples_per_s"):
            found = usual_and_recent(s, coord, name)
            least = max(floor if name == "toks_per_s" else 0.0, HALF * found[0]) if found else 0.0
            if found and found[1] < least and training(s):
                text = f"{found[1]:.0f} {name.replace('_per_s', '/s')}, floor is {least:.0f}"
                yield Finding("throughput_below_floor", text, "compare step time and fetch time in panel 2", coord)
                break


def loss_nan(s: Snapshot, now: float) -> Iterator[Finding]:
    """A loss that is no number."""
    for coord in s.series:
        last = line(s, coord, "loss").last
        if last and not math.isfinite(last[1]):
            hint = "F9; then uvcc resume RUN --from STEP goes back to a checkpoint before it"
            yield Finding("loss_nan", f"loss is {last[1]} at step {last[0]:.0f}", hint, coord, "error")


def numbers_overflow(s: Snapshot, now: float) -> Iterator[Finding]:
    """Numbers of a private training have left the fixed point: a count that all its workers know alike."""
    for coord in s.series:
        last = line(s, coord, "val_overflow").last
        if last and last[1] > 0:
            text = f"{last[1]:.0f} numbers were too large for the fixed point after step {last[0]:.0f}"
            hint = "F9; then a new run with job.clip_norm, a lower rate, features brought to scale, or fewer frac_bits"
            yield Finding("numbers_overflow", text, hint, coord, "error")
            return


def loss_course(s: Snapshot, now: float) -> Iterator[Finding]:
    """Flat over the last steps, or well above the best that was reached."""
    for coord in s.series:
        ys = line(s, coord, "loss").ys()
        if len(ys) < 2 * WINDOW or not all(math.isfinite(y) for y in ys[-WINDOW:]):
            continue
        recent, before = middle(ys[-WINDOW:]), middle(ys[-2 * WINDOW : -WINDOW])
        best = min(middle(ys[k : k + WINDOW]) for k in range(0, len(ys) - WINDOW, WINDOW))
        first = max(middle(ys[:WINDOW]), recent)
        if recent > WORSE * best and best > 0 and recent - best > REGAINED * (first - best):
            text = f"loss {recent:.3f} over the last {WINDOW} steps, best was {best:.3f}"
            hint = "F9; then uvcc resume RUN --from STEP goes back; a lower rate needs a new run"
            yield Finding("loss_diverging", text, hint, coord, "error")
        elif abs(recent - before) < FLAT * max(abs(before), FLAT) and max(ys[-WINDOW:]) - min(ys[-WINDOW:]) < FLAT:
            text = f"loss {recent:.4f} has not moved in {2 * WINDOW} steps"
            yield Finding("loss_flat", text, "is the learning rate zero, or the data the same batch?", coord)


def gate_collapse(s: Snapshot, now: float) -> Iterator[Finding]:
    """The attention gates have chosen one branch for good."""
    floor = float(_gates(s).get("gate_entropy") or 0.0) or ENTROPY_FLOOR
    for w in training(s):
        share, entropy = as_float(w.beat.get("gate_collapse_frac")), as_float(w.beat.get("gate_entropy_mean"))
        if (share is not None and share > COLLAPSED) or (entropy is not None and 0 <= entropy < floor):
            text = f"gate entropy {entropy}, {share} of the gates collapsed (floor {floor:g})"
            yield Finding("gate_collapse", text, "lower the learning rate or warm up longer", w.coord)


def slow_data(s: Snapshot, now: float) -> Iterator[Finding]:
    """A large part of a step goes into fetching its data."""
    usual = step_time(s)
    for w in training(s):
        fetch = as_float(w.beat.get("dt_fetch_s"))
        if fetch is not None and usual > 0 and fetch > FETCH_SHARE * usual:
            text = f"fetching takes {fetch:.3f} s of a step of {usual:.3f} s"
            yield Finding("slow_data", text, "more loader workers, or the data nearer to the pod", w.coord)


def checkpoint_overdue(s: Snapshot, now: float) -> Iterator[Finding]:
    """Twice the planned interval has passed without a checkpoint, or one was refused when it was read."""
    every = int(_job(s).get("checkpoint_every") or dict(_job(s).get("plan") or {}).get("save_every") or 0)
    written = max((step for step, _ in s.checkpoints.values()), default=s.first_step)  # or the one it went on from
    if every and training(s) and s.step - written > 2 * every:
        text = f"step {s.step}, last checkpoint at {written}, planned every {every}"
        yield Finding("checkpoint_overdue", text, "is the disk full? a halt writes one", level="error")
    for pod, why in s.refused_checkpoints.items():
        hint = "put it back as it was, or uvcc resume RUN --from STEP decides on an earlier one"
        yield Finding("checkpoint_unverified", why, hint, pod, "error")


def differing(planned: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """What runs otherwise than it was planned, of what both name: parameters, sequence length, precision, ..."""
    return [
        f"{k} is {value_words(facts[k])}, planned {value_words(planned[k])}"
        for k in sorted(planned)
        if k in facts and facts[k] != planned[k]
    ]


def not_as_planned(s: Snapshot, now: float) -> Iterator[Finding]:
    """What a worker said it runs differs from the profile's plan."""
    job = _job(s)
    planned = {**dict(job.get("plan") or {}), "steps": s.steps_planned}
    for coord, facts in s.facts.items():
        if wrong := differing(planned, facts):
            yield Finding("not_as_planned", "; ".join(wrong), "F9; fix the profile, then start again", coord, "error")


DETECTORS = (
    throughput_below_floor,
    loss_nan,
    numbers_overflow,
    loss_course,
    gate_collapse,
    slow_data,
    checkpoint_overdue,
    not_as_planned,
)
