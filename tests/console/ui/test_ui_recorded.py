"""Every moment of two real runs, at five sizes: what an operator needs is there, whole, and no room lies empty."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from chaos_truth import Look, Truth, looked
from recorded_runs import MOMENTS, RUNS, SIZES, recorded, seen
from rich.cells import cell_len

from uvcc_console.core.answers.shown import final

EMPTY_COLUMNS = 40
ALWAYS = {("private", moment, SIZES[0]) for moment in ("planned", "held", "halted", "failed", "result")} | {
    ("lm", "full", SIZES[0]),
    ("private", "full", SIZES[2]),
}
"""Where room is shortest; all others are looked at by hand, and before a release."""
WORDS = {
    "planned": ("PROVISION", "planned, before training", "rented"),
    "bootstrap": ("BOOTSTRAP", "before training", "agents up"),
    "preflight": ("PREFLIGHT", "before training", "preflight running"),
    "smoke": ("SMOKE", "loss"),
    "verify": ("verify-smoke",),
    "full": ("FULL", "RUNNING", "loss"),
    "held": ("HOLD", "F9", "halts now", "Esc", "releases"),
    "halted": ("HALTED", "r resumes", "t tears down", "verified at step"),
    "resumed": ("FULL", "RUNNING", "live"),
    "failed": ("FAILED", "SIGKILL", "r resumes", "t tears down"),
    "result": ("global root", "result hash", "all gone"),
}


def widest_hole(rows: list[str], width: int) -> int:
    """The most columns side by side that no row uses."""
    used = {at for row in rows for at, sign in enumerate(row) if not sign.isspace()}
    hole = most = 0
    for at in range(width):
        hole = 0 if at in used else hole + 1
        most = max(most, hole)
    return most


def truth_at(name: str, moment: str) -> Truth:
    """What the raw events say up to a moment, by a judge that shares nothing with the console."""
    truth, run = Truth(), recorded(name)
    truth.tell(run.events[: run.moments[moment]])
    return truth


def test_both_recordings_hold_every_moment() -> None:
    for name in RUNS:
        assert set(recorded(name).moments) == set(MOMENTS)


@pytest.mark.parametrize(
    ("name", "moment", "size"),
    [
        pytest.param(
            name,
            moment,
            size,
            id=f"{name}-{moment}-{size[0]}x{size[1]}",
            marks=() if (name, moment, size) in ALWAYS else pytest.mark.slow,
        )
        for name in RUNS
        for moment in MOMENTS
        for size in SIZES
    ],
)
async def test_a_moment_fits_says_what_it_is_and_leaves_no_hole(
    tmp_path: Path, name: str, moment: str, size: tuple[int, int]
) -> None:
    width, height = size
    async with seen(name, moment, tmp_path, size) as d:
        rows = d.text.split("\n")[:height]
        snap = d.app.source.snapshot
        look = looked(d.app, truth_at(name, moment), d.app.main.view.now)
    assert look == Look(), "what is green or red is so by the raw events"
    assert max(map(cell_len, rows)) <= width
    assert rows[-1].startswith(" F9")
    flat = " ".join(re.sub(r"[│┃]", " ", row) for row in rows)
    for word in WORDS[moment]:
        if word != "global root" or name == "private":
            assert word in flat, word
    first = rows[0]
    if "$0.00" in first and snap.step >= 0:
        assert "%" in first.partition("$")[0], "how far it is comes before a cost of nothing"
    if snap.steps_planned and snap.step >= 0 and moment not in ("failed", "result"):
        assert f"{snap.step}/{snap.steps_planned}" in first
        assert f"{snap.step / snap.steps_planned:.0%}" in first
    if width >= 120:
        assert snap.run in first, "the name of the run is whole"
    if moment in ("full", "resumed", "held", "halted", "failed", "result"):
        for worker in snap.workers.values():
            assert any(worker.pod in row and str(worker.step) in row for row in rows), worker.coord
    if moment == "result":
        found = final(snap)
        for identifier in (*found.hashes, *filter(None, [found.global_root])):
            assert identifier in re.sub(r"[\s│┃]", "", "".join(rows)), "identifiers are whole"
    assert widest_hole(rows, width) < EMPTY_COLUMNS
