"""Every stage at every size, private and LM: nothing breaks, F9 is there, the first line says how far it is."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from ui_desk import desk
from ui_journals import RUN, Story

from uvcc_console.bench import longrun
from uvcc_console.core import events as ev
from uvcc_console.core.folding.state import fold
from uvcc_console.ui.drawing.paint import plain, width_of
from uvcc_console.ui.judging.lamps import MOVING, Lamp
from uvcc_console.ui.judging.view import View, fleet_rows
from uvcc_console.ui.panels.fleet import FleetState, fleet_lines, visible_rows
from uvcc_console.ui.panels.fleet_grid import grid_lines
from uvcc_console.ui.widgets.bars import header_line, track_line
from uvcc_console.ui.widgets.heat import heat_lines

SIZES = ((60, 20), (80, 24), (120, 40), (160, 50), (200, 60), (250, 80))


class LmStory(Story):
    """The same run as a language model's: ranks, no transcript."""

    def add(self, event: ev.Event, after: float = 0.0) -> None:
        if isinstance(event, ev.RunCreated):
            event = replace(event, job_kind="lm", profile={"job": {"kind": "lm", "batch": 8, "seq_len": 512}})
        if not isinstance(event, ev.RootReported):
            super().add(event, after)


@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("kind", [Story, LmStory])
async def test_the_overview_of_a_run_of_any_kind_fits_and_uses_its_room(
    tmp_path: Path, kind: type[Story], size: tuple[int, int]
) -> None:
    async with desk(kind(replicas=8).full(12), tmp_path / "runs" / RUN, size) as d:
        rows = d.text.split("\n")
        assert "F9" in rows[size[1] - 1]
        assert "12/200" in rows[0]
        assert "24/24 live" in rows[0]
        assert all(len(row) <= size[0] for row in rows)
        text = d.text
        assert ("agree" in text) == (kind is Story)
        assert ("root @ epoch" in text) <= (kind is Story)
        long_rows = [row for row in rows[2:-2] if len(row.rstrip()) > size[0] * 3 // 4]
        assert len(long_rows) > size[1] // 3


@pytest.mark.parametrize("width", [size[0] for size in SIZES])
def test_how_far_it_is_stands_before_a_cost_of_nothing(width: int) -> None:
    story = Story().full(60)
    view = View(snap=fold(story.events), now=story.now + 0.5)
    line = header_line(view, width)
    assert width_of(line) <= width
    text = plain(line)
    assert "30%" in text
    assert "eta" in text
    crumbs = track_line(replace(view, crumbs=("overview", "Fleet", "p0r0")), width)
    assert width_of(crumbs) <= width
    assert ("overview > Fleet > p0r0" if width > 70 else "p0r0") in plain(crumbs)
    far = track_line(replace(view, crumbs=("overview", "Fleet", "Charts", "Log", "NCCL & plane", "Ledger")), width)
    assert width_of(far) <= width
    assert " Ledger " in plain(far)
    for lamp in ("cond ", "haltd ", "ssh ", "relay ", "lease "):  # however far one went
        assert lamp.replace("cond ", "cond" if width < 150 else "conductor") in plain(far) or width >= 150


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("price", [0.0, 2.5])
def test_a_narrow_first_line_keeps_how_far_it_is_and_how_long_it_takes(width: int, price: float) -> None:
    """The clock goes first: the time of day is told elsewhere."""
    story = Story(price=price, provider="prime" if price else "local", steps=1000).full(100)
    view = View(snap=fold(story.events), now=story.now + 0.5)
    text = plain(header_line(view, width))
    assert ("1 operator" in text) == (width == 80)
    assert "100/1000 10% eta 1 m" in text
    past = plain(header_line(replace(view, replay="50% x1"), width))
    assert "50% x1" in past, "a recording says where it stands"


def test_of_192_workers_on_24_pods_each_is_told_apart_and_the_worst_is_named_at_every_size() -> None:
    born, who = 1_000_000.0, longrun.coords()
    slow, killed, silent = "p1r3s2t0", "p0r6s0t0", "p2r7"
    events = longrun.opening(born)
    for step in range(6):
        for coord in who:
            pod, ts = coord.split("s")[0], born + 3.0 * step
            if pod != silent or step < 3:
                record = {"ts": ts + (0.8 * step if coord == slow else 0.0), "step": step, "phase": "train"}
                events.append(ev.HeartbeatRead(ts=ts, pod=pod, coord=coord, record=record))
    events.append(ev.WorkerProcess(ts=born + 15, pod="p0r6", coord=killed, state="exited", rc=-9, signal="SIGKILL"))
    s = fold(events)
    view = View(snap=s, now=s.updated + 1, conductor=Lamp(MOVING), sidecar=Lamp(MOVING))
    for width in (58, 78, 108, 158):
        lines = [plain(line) for line in fleet_lines(view, FleetState(), width)]
        assert all(len(line) <= width for line in lines)
        rows = [line.split() for line in lines[1:]]
        assert killed in rows[0]
        assert "SIGKILL" in rows[0]
        assert all(silent in row[0] and "late" in row for row in rows[1:9])
        assert len({next(w for w in row if w in who) for row in rows}) == len(who) == 192
        board = [plain(line) for line in grid_lines(view, visible_rows(view, FleetState()), width)]
        assert f"1 SIGKILL {killed}" in board[0]
        assert f"8 late {silent}" in board[2]
        heat = heat_lines(view, fleet_rows(view), width)
        signs = Counter(text for line in heat[:-1] for text, _ in line if len(text) == 1)
        assert signs[view.glyphs.heat[-1]] == 1  # a quarter slower than the others, which are well below it
        assert view.glyphs.heat[-2] not in signs
        assert f"slowest {slow}" in plain(heat[-1])


@pytest.mark.parametrize(
    "size",
    [pytest.param(value, marks=pytest.mark.ci(__file__) if n % 2 else ()) for n, value in enumerate(SIZES[:2])],
    ids=lambda s: f"{s[0]}x{s[1]}",
)
@pytest.mark.parametrize("end", ["finished", pytest.param("halted", marks=pytest.mark.ci(__file__)), "failed"])
async def test_each_panel_s_page_has_the_room_that_an_ended_run_leaves(
    tmp_path: Path, end: str, size: tuple[int, int]
) -> None:
    """The overview of a small terminal has no curves beside a result; who asks for their page gets them."""
    story = Story().full(30)
    getattr(story, end)()
    async with desk(story, tmp_path, size=size) as d:
        for number in "1234567":
            await d.press(number)
            (paged,) = [p for p in d.app.screen.query(".-paged") if p.display]
            assert paged.region.height >= 4, (number, paged.region)
            assert paged.region.width == size[0], (number, paged.region)
            await d.press("0")
