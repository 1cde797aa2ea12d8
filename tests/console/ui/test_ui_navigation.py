"""The way around: a path with a way back, the page of a pod, filters that speak of one panel, a cursor that stays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from ui_desk import desk, typed
from ui_journals import RUN, Story

from uvcc_console.core import events as ev
from uvcc_console.core.state import fold
from uvcc_console.ui.drawing.paint import plain, width_of
from uvcc_console.ui.judging.filters import parse
from uvcc_console.ui.judging.view import View
from uvcc_console.ui.screens.trail import Spot, Trail
from uvcc_console.ui.widgets.fleet import FleetPanel, FleetState, fleet_lines, followed, visible_rows
from uvcc_console.ui.widgets.log_view import LogView
from uvcc_console.ui.widgets.pod_page import pod_lines

GPU = {
    "index": 0, "name": "H100", "utilization_gpu": 93, "memory_used": 61_000, "memory_total": 81_559,
    "temperature_gpu": 66.0, "power_draw": 512.3, "power_limit": 700.0,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / RUN


def with_vitals(story: Story, looks: int = 4) -> Story:
    for i in range(looks):
        for n, coord in enumerate(story.coords):
            gpus = [{**GPU, "utilization_gpu": 93 - 5 * n - i}]
            vitals = ev.PodTelemetry(pod=story.pod(coord), cpu=0.5, mem_mib=9e3, disk_free_mib=5e4 - i, gpus=gpus)
            story.add(vitals, 0.01)
    return story


def test_a_trail_leads_back_without_circles_and_to_the_last_view() -> None:
    t = Trail()
    assert t.back() is None
    assert t.last() is None
    t.go(Spot("1"))
    t.go(Spot("pod", "p0r0"))
    t.go(Spot("3", filter="pod=p0r0"))
    assert [s.page for s in t.path] == ["", "1", "pod", "3"]
    t.go(Spot("1"))  # it is on the path already
    assert [s.page for s in t.path] == ["", "1"]
    assert t.last() == Spot("3", filter="pod=p0r0")
    assert t.last() == Spot("1")
    assert t.back() == Spot()


async def test_enter_opens_the_pod_and_escape_restores_every_view_behind_it(folder: Path) -> None:
    async with desk(with_vitals(Story().full(20)), folder) as d:
        log, main = d.app.main.query_one(LogView), d.app.main
        await d.press("slash", *typed("p1r0"), "enter")
        narrowed = len(log.ring)
        await d.press("1", "enter")
        assert "Pod p1r0" in d.text
        assert "overview > Fleet > p1r0" in d.text
        assert "GPU 0" in d.text
        await d.press("l")
        assert (main.page, d.app.filter.source) == ("3", "pod=p1r0")
        await d.press("escape")
        assert (main.page, d.app.filter.source) == ("pod", "p1r0")
        await d.press("escape", "escape")
        assert (main.page, d.app.filter.source, len(log.ring)) == ("", "p1r0", narrowed)
        await d.press("escape")  # at the end of the way Esc takes the filter away
        assert d.app.filter.source == ""
        await d.press("minus")
        assert main.page == "1"
        await d.press("minus")
        assert main.page == ""


async def test_actions_on_a_pods_page_act_on_that_pod_and_arrows_go_to_its_neighbours(folder: Path) -> None:
    async with desk(Story().full(5), folder) as d:
        await d.press("colon", *typed("pod p2r0"), "enter")
        await d.press("D")
        await d.press("left", "D")
        assert [e.args["pod"] for e in d.asked(ev.Intent)] == ["p2r0", "p1r0"]
        await d.press("escape")
        assert d.app.main.page == ""
        assert d.app.main.query_one(FleetPanel).state.pod == "p1r0"


def test_a_filter_of_levels_hides_no_worker_and_one_of_steps_no_line() -> None:
    story = Story().full(5)
    view = View(snap=fold(story.events), now=story.now)
    assert len(visible_rows(replace(view, filter=parse("level>=warn")), FleetState())) == 3
    assert len(visible_rows(replace(view, filter=parse("level>=warn party=1")), FleetState())) == 1
    log = LogView()
    log.ring.extend(view.snap.log)
    log.ring.set_filter(parse("step>2 party=1"))
    assert 0 < len(log.ring) < log.ring.total
    assert all("p1" in log.ring[i].source for i in range(len(log.ring)))


def test_the_cursor_stays_on_its_pod_when_pods_become_workers_and_back() -> None:
    before, after = Story().launched(), Story().full(3)
    pods = visible_rows(View(snap=fold(before.events), now=before.now), FleetState())
    workers = visible_rows(View(snap=fold(after.events), now=after.now), FleetState())
    state = followed(FleetState(cursor="p1r0", marked=frozenset({"p1r0", "p2r0"})), pods)
    assert state.pod == "p1r0"
    state = followed(state, workers)
    assert (state.cursor, state.marked) == ("p1r0s0t0", {"p1r0s0t0", "p2r0s0t0"})
    state = followed(state, pods)
    assert (state.cursor, state.marked) == ("p1r0", {"p1r0", "p2r0"})


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_pods_page_keeps_to_its_width_and_names_what_is_measured(width: int) -> None:
    story = with_vitals(Story(replicas=2).full(20))
    view = View(snap=fold(story.events), now=story.now + 1)
    lines = pod_lines(view, "p1r1", width, 40)
    assert all(width_of(line) <= width for line in lines)
    text = "\n".join(map(plain, lines))
    for word in ("P1 replica 1", "CPU", "memory", "disk", "GPU 0", "66 °C", "512/700 W", "ssh up", "stack dump"):
        assert word in text, word
    assert len(lines) <= 40
    assert "no pod nowhere" in plain(pod_lines(view, "nowhere", width, 40)[0])


def test_the_fleet_fits_at_every_width() -> None:
    story = with_vitals(Story(replicas=4).full(10))
    view = View(snap=fold(story.events), now=story.now)
    for width in range(40, 260, 7):
        assert all(width_of(line) <= width for line in fleet_lines(view, FleetState(), width))
