"""The way around: a path with a way back, the page of a pod, filters that speak of one panel, a cursor that stays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from textual.widgets import Input
from ui_desk import desk, typed
from ui_journals import RUN, Story

from uvcc_console.core import events as ev
from uvcc_console.core.folding.state import fold
from uvcc_console.core.series import Series
from uvcc_console.ui.drawing.paint import plain, width_of
from uvcc_console.ui.judging.filters import parse
from uvcc_console.ui.judging.view import View
from uvcc_console.ui.panels.fleet import FleetPanel, FleetState, fleet_lines, followed, visible_rows
from uvcc_console.ui.panels.fleet_columns import COLUMNS, ordered, parsed
from uvcc_console.ui.panels.log_view import LogView
from uvcc_console.ui.panels.pod_page import pod_lines
from uvcc_console.ui.screens.trail import Spot, Trail
from uvcc_console.ui.widgets.heat import heat_lines
from uvcc_engine.contract.errors import ConfigError

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


@pytest.mark.ci(__file__)
async def test_actions_on_a_pods_page_act_on_that_pod_and_arrows_go_to_its_neighbours(folder: Path) -> None:
    async with desk(Story().full(5), folder) as d:
        await d.press("colon", *typed("pod p2r0"), "enter")
        await d.press("D")
        await d.press("left", "D")
        assert [e.args["pod"] for e in d.asked(ev.Intent)] == ["p2r0", "p1r0"]
        await d.press("escape")
        assert d.app.main.page == ""
        assert d.app.main.query_one(FleetPanel).state.pod == "p1r0"


async def test_no_action_goes_to_a_pod_that_a_filter_hides(folder: Path) -> None:
    """The cursor of the fleet stays where it was while the log has the keyboard."""
    async with desk(Story().full(5), folder) as d:
        assert d.app.main.query_one(FleetPanel).state.cursor.startswith("p0r0")
        d.app.main.query_one(LogView).focus()
        await d.press("slash", *typed("party=1"), "enter", "D")
        assert not d.asked(ev.Intent)
        assert "put the cursor of the fleet on a pod" in d.toasts
        await d.press("escape", "D")
        assert [e.args["pod"] for e in d.asked(ev.Intent)] == ["p0r0"]


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


def test_a_small_page_of_a_pod_names_its_processes_and_every_action() -> None:
    story = with_vitals(Story().full(20))
    view = View(snap=fold(story.events), now=story.now + 1)
    workers = dict(view.snap.workers)
    for coord, pid in (("p1r0s0t0", 4711), ("p1r0s1t0", 4712)):
        workers[coord] = replace(workers["p1r0s0t0"], coord=coord, beat={"pid": pid, "mem_mib": 99.0})
    view = replace(view, snap=replace(view.snap, workers=workers))
    for width, height in ((58, 16), (78, 20)):
        lines = pod_lines(view, "p1r0", width, height)
        text = "\n".join(map(plain, lines))
        assert len(lines) <= height
        assert all(width_of(line) <= width for line in lines)
        assert [line.split()[0] for line in map(plain, lines) if "process " in line] == ["p1r0s0t0", "p1r0s1t0"]
        assert "process 4712  99 MiB" in text
        for word in ("W restart", "P replace pod", "! shell", "B TensorBoard"):
            assert word in text, word
        assert "┤" in text, "a chart"
        assert ("newest lines of p1r0" in text) == (height >= 20)


async def test_the_cursor_stays_in_sight_when_the_fleet_is_sorted_another_way(folder: Path) -> None:
    async with desk(Story(replicas=16).full(5), folder, (100, 24)) as d:
        fleet = d.app.main.query_one(FleetPanel)
        await d.press("1", "v")
        assert fleet.state.cursor == "p0r0s0t0"
        for keys in (("O",), ("o",), ("O",), ("colon", *typed("sort worker desc"), "enter")):
            await d.press(*keys)
            (at,) = [i for i, line in enumerate(fleet.lines) if any("sel" in role for _, role in line)]
            assert fleet.scroll_offset.y <= at < fleet.scroll_offset.y + fleet.content_region.height, keys


@pytest.mark.parametrize("size", [(60, 20), (80, 24)], ids=lambda s: f"{s[0]}x{s[1]}")
async def test_a_small_page_of_the_fleet_describes_the_worker_below_the_table(
    folder: Path, size: tuple[int, int]
) -> None:
    async with desk(Story().full(5), folder, size) as d:
        await d.press("1", "j")
        assert "p1r0s0t0 on p1r0" in d.text
        assert "samples/s" in d.text
        assert "tokens/s" not in d.text, "a private run has none"
        assert not [row for row in d.text.split("\n") if len(row) > size[0]]


def test_the_fleet_fits_at_every_width() -> None:
    story = with_vitals(Story(replicas=4).full(10))
    view = View(snap=fold(story.events), now=story.now)
    for width in range(40, 260, 7):
        assert all(width_of(line) <= width for line in fleet_lines(view, FleetState(), width))


# ---- columns, order, marks, heat


def test_every_column_sorts_both_ways_and_what_has_no_value_comes_last() -> None:
    story = with_vitals(Story(replicas=2).full(20))
    view = View(snap=fold(story.events), now=story.now)
    rows = visible_rows(view, FleetState(sort="place"))
    for name, column in COLUMNS.items():
        for reverse in (False, True):
            found = ordered(rows, name, reverse=reverse)
            assert sorted(map(id, found)) == sorted(map(id, rows)), name
            values = [v for r in found if (v := column.value(r)) is not None]
            falls = column.falls != reverse
            assert values == sorted(values, key=lambda v: (isinstance(v, str), v), reverse=falls), name
            assert [column.value(r) is None for r in found] == sorted(column.value(r) is None for r in found), name
    assert ordered(rows, "temp")[0].vitals["temp"] == 66.0
    assert [r.vitals["gpu"] for r in ordered(rows, "gpu")] == sorted(r.vitals["gpu"] for r in rows)


def test_columns_are_named_by_key_or_heading_and_a_wrong_name_names_the_nearest() -> None:
    assert parsed("pod, GPU temp heartbeat pod") == ("pod", "gpu", "temp", "beat")
    with pytest.raises(ConfigError, match="no column 'poewr'") as e:
        parsed("poewr")
    assert "power" in str(e.value.hint)
    story = with_vitals(Story().full(9))
    view = View(snap=fold(story.events), now=story.now)
    shown = plain(fleet_lines(view, FleetState(columns=("pod", "gpu", "power")), 60)[0])
    assert shown.split() == ["pod", "GPU", "power"]
    assert "90 %" in plain(fleet_lines(view, FleetState(columns=("pod", "gpu", "power")), 60)[1])
    assert "root" not in plain(fleet_lines(replace(view, snap=replace(view.snap, job_kind="lm")), FleetState(), 140)[0])


@pytest.mark.ci(__file__)
async def test_o_and_a_command_sort_and_c_offers_the_columns_that_are_shown(folder: Path) -> None:
    async with desk(with_vitals(Story(replicas=2).full(20)), folder) as d:
        fleet = d.app.main.query_one(FleetPanel)
        await d.press("colon", *typed("sort gpu desc"), "enter")
        used = [r.vitals["gpu"] for r in fleet.rows_in_order()]
        assert used == sorted(used, reverse=True)
        assert "by GPU" in d.text
        await d.press("O")
        assert [r.vitals["gpu"] for r in fleet.rows_in_order()] == sorted(used)
        await d.press("c")
        assert "columns pod coord" in d.text
        await d.press("escape", "colon", *typed("columns pod step gpu"), "enter")
        assert fleet.state.columns == ("pod", "step", "gpu")
        await d.press("colon", *typed("columns gpuu"), "enter")
        assert "did you mean gpu?" in d.toasts


async def test_an_action_acts_on_every_marked_pod_and_asks_once(folder: Path) -> None:
    async with desk(Story(replicas=2).full(5), folder) as d:
        await d.press("1", "v", "space", "space", "D")
        first = [e.args["pod"] for e in d.asked(ev.Intent)]
        assert len(set(first)) == 2
        await d.press("W")
        assert "Restart 2 pods" in d.text
        d.app.screen.query_one(Input).value = "restart 2 pods"
        await d.press("enter")
        assert [e.args["pod"] for e in d.asked(ev.Intent) if e.action == "restart"] == first


def test_a_large_fleet_has_a_strip_of_heat_in_which_the_slow_one_stands_out() -> None:
    story = Story(replicas=64).launched().phase("full", 50)
    view = View(snap=fold(story.events), now=story.now)
    rows = visible_rows(view, FleetState(sort="place"))
    times = {r.coord: 0.1 for r in rows} | {"p1r7s0t0": 0.9}
    series = {c: {"step_s": Series().append(1, s)} for c, s in times.items()}
    view = replace(view, snap=replace(view.snap, series=series))
    for width in (60, 80, 200):
        lines = heat_lines(view, rows, width)
        assert all(width_of(line) <= width for line in lines)
        cells = sum(len(text) for line in lines for text, _ in line[1:])
        assert cells == 192
        assert sum(text == view.glyphs.heat[-1] for line in lines for text, _ in line) == 1
    assert "slowest p1r7s0t0 0.90 s" in plain(lines[-1])
    assert heat_lines(view, rows[:9], 80) == []
