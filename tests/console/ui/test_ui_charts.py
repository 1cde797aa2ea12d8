"""Charts: axes, smoothing, ticks, what moves and what does not, other runs; and the board before training."""

from __future__ import annotations

import math
import os
import re
from array import array
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from recorded_runs import recorded
from ui_desk import desk, typed
from ui_journals import RUN, Story

from uvcc_console.core import events as ev
from uvcc_console.core import pod_states
from uvcc_console.core.folding.state import fold
from uvcc_console.core.series import Series
from uvcc_console.ui.actions.compared import chosen, others
from uvcc_console.ui.drawing.paint import plain, width_of
from uvcc_console.ui.judging.view import View
from uvcc_console.ui.panels.board import board_lines
from uvcc_console.ui.panels.chart_grid import chart, grid_lines, overview_lines
from uvcc_console.ui.panels.charts import ChartsPanel
from uvcc_console.ui.panels.pod_page import pod_lines
from uvcc_console.ui.widgets.canvas import AxisScale, log_ticks, x_ticks, y_labels
from uvcc_console.ui.widgets.curves import TITLES, ChartLook, axis_of, constants, curves_of, names, smoothed
from uvcc_console.ui.widgets.legend import axis_words
from uvcc_engine.contract.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / RUN


def view_of(story: Story) -> View:
    return View(snap=fold(story.events), now=story.now)


def series(*ys: float, first: int = 1) -> Series:
    return Series(array("d", range(first, first + len(ys))), array("d", ys), len(ys))


def measured(**by_coord: dict[str, Series]) -> View:
    view = view_of(Story().full(3))
    return replace(view, snap=replace(view.snap, series=MappingProxyType(by_coord)))


def test_what_never_moves_is_told_and_not_drawn_and_what_is_zero_is_neither() -> None:
    view = measured(p0r0s0t0={"loss": series(3.0, 2.0), "toks_per_s": series(0.0, 0.0), "lr": series(0.1, 0.1)})
    assert names(view) == ["loss"]
    assert constants(view) == [("never moved", "lr", 0.1, 0.1)]
    text = "\n".join(map(plain, grid_lines(view, 100, 30)))
    assert "never moved: learning rate 0.1" in text
    assert "tokens/s" not in text


def test_what_was_measured_once_is_told_beside_what_is_drawn_and_drawn_where_nothing_else_is() -> None:
    once = {"val_loss": series(3.2, first=40)}
    view = measured(p0r0s0t0={"loss": series(3.0, 2.0), **once})
    assert names(view) == ["loss"]
    assert "measured once: validation loss 3.200" in "\n".join(map(plain, grid_lines(view, 100, 30)))
    assert names(measured(p0r0s0t0=once)) == ["val_loss"]


def test_what_moves_too_little_to_be_seen_beside_zero_is_told_and_a_loss_is_drawn_however_little_it_moves() -> None:
    still = {"bytes": series(363_000.0, 361_000.0), "mem_mib": series(200.0, 280.0), "loss": series(0.501, 0.5)}
    view = measured(p0r0s0t0=still, p1r0s0t0=still | {"bytes": series(2_540_000.0, 2_550_000.0)})
    assert names(view) == ["loss", "mem_mib"]
    text = "\n".join(map(plain, grid_lines(view, 100, 30)))
    assert "moved by less than 2%: bytes per step 361k to 2.55M from worker to worker" in text
    assert "never moved" not in text


@given(st.floats(-8, 8), st.floats(0.005, 9), st.integers(1, 14))
def test_marks_of_a_logarithmic_axis_are_round_numbers(low: float, span: float, wanted: int) -> None:
    ticks = log_ticks(low, low + span, wanted)
    assert len(ticks) <= 2 * max(2, wanted)
    assert len(ticks) == len(set(ticks))
    if len(ticks) > 1:
        assert all(low - 1e-9 <= tick <= low + span + 1e-9 for tick in ticks)
    if span > 1.1:
        assert len(ticks) > 1
        for tick in ticks:
            assert abs(10 ** (tick % 1) - round(10 ** (tick % 1))) < 1e-6, "1 to 9 times a power of ten"
    labels = y_labels(AxisScale(0, 1, low, low + span, True), 3 * wanted)
    assert len(set(labels.values())) == len(labels)


def test_a_log_chart_reads_as_people_count() -> None:
    labels = y_labels(AxisScale(0, 1, math.log10(0.06), math.log10(0.25), True), 15)
    assert list(labels.values()) == ["0.1", "0.2"]
    labels = y_labels(AxisScale(0, 1, math.log10(0.0003), math.log10(2.5), True), 12)
    assert list(labels.values()) == ["0.001", "0.01", "0.1", "1"]


@pytest.mark.parametrize(
    "size",
    [
        (60, 20),
        pytest.param((80, 24), marks=pytest.mark.ci(__file__)),
        pytest.param((160, 50), marks=pytest.mark.ci(__file__)),
        (200, 60),
    ],
    ids=lambda s: f"{s[0]}x{s[1]}",
)
async def test_the_crosshair_reads_every_value_at_every_size_and_those_of_the_run_laid_over(
    folder: Path, size: tuple[int, int]
) -> None:
    other = "other-20261120-0101-ef56"
    Story(seed=9, steps=60).finished().write(folder.parent / other)
    async with desk(Story(replicas=1).full(60), folder, size) as d:
        charts = d.app.main.query_one(ChartsPanel)
        await d.press("2", "c", "right", "left")
        read = " ".join(" ".join(map(plain, charts.reading(charts.view, size[0] - 4))).split())
        text = " ".join(re.sub(r"[│▅▆▇▄▃▂▁█]", " ", d.text).split())
        assert "step 59" in read
        for name in names(charts.view):
            assert TITLES.get(name, name) in read
        assert f"{other} " in read.replace("- ", "-"), "the value of the other run at this step"
        assert read in text, "all of it is on the screen"


def test_parties_are_compared_at_the_last_step_that_all_have() -> None:
    view = measured(
        p0r0s0t0={"loss": series(3.0, 2.0, 1.0)},
        p1r0s0t0={"loss": series(3.5, 2.5)},
        p2r0s0t0={"loss": series(3.1, 2.1, 1.1)},
    )
    head = plain(chart(view, "loss", 100, 10)[0])
    assert "P0 2.000  P1 2.500  P2 2.100 at step 2" in head
    ahead = {"loss": series(3.0, 2.0, 1.0)}
    view = measured(p0r0s0t0=ahead, p1r0s0t0={"loss": series(3.0, 2.0)}, p2r0s0t0=ahead)
    head = plain(chart(view, "loss", 44, 10)[0])
    assert "P0 ═ P1 ═ P2  2.000 at step 2" in head, "what all say alike is said once, though one is a step behind"


def test_a_heading_without_room_loses_words_before_it_loses_values() -> None:
    rates = {f"p{p}r0s0t0": {"samples_per_s": series(90.0, rate, rate)} for p, rate in enumerate((112.1, 113.6, 118.2))}
    rates["p1r0s0t0"] = {"samples_per_s": series(90.0, 113.6)}
    view = measured(**rates)

    def head(width: int) -> str:
        return " ".join(plain(chart(view, "samples_per_s", width, 10)[0]).split())

    assert head(60) == "samples/s P0 112.1 P1 113.6 P2 118.2 at step 2"
    assert head(46) == "samples/s P0 112.1 P1 113.6 P2 118.2 @ 2"
    assert head(32) == "samples/s 112.1 to 118.2 @ 2"
    assert head(26) == "samples/s 112.1 to 118.2"
    same = {"loss": series(3.0, 2.0)}
    view = measured(p0r0s0t0=same, p1r0s0t0=same, p2r0s0t0=same)
    assert plain(chart(view, "loss", 20, 10)[0]).split() == ["loss", "2.000"]


def test_an_axis_of_time_and_one_of_samples_come_from_the_run_itself() -> None:
    story = Story().full(40)
    view = view_of(story)
    to = axis_of(view.snap, "time")
    assert to is not None
    assert 0.12 * 38 * 0.8 < to(40) - to(2) < 0.12 * 38 * 1.5
    assert all(a <= b for a, b in zip(map(to, range(40)), map(to, range(1, 41)), strict=True))
    samples = axis_of(view.snap, "tokens")
    assert samples is not None
    assert samples(10) == 640
    timed, _, _ = curves_of(view, "loss", ChartLook(axis="time"))
    assert timed[0].xs[-1] == pytest.approx(to(40))
    assert axis_of(replace(view.snap, series=MappingProxyType({})), "time") is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.sampled_from([0.6, 0.9, 0.98]))
def test_smoothing_stays_between_the_extremes_and_leaves_a_constant_alone(ys: list[float], weight: float) -> None:
    found = smoothed(ys, weight)
    slack = 1e-6 * (1 + max(map(abs, ys)))
    assert all(min(ys) - slack <= y <= max(ys) + slack for y in found)
    assert found[0] == pytest.approx(ys[0], abs=slack)
    assert list(smoothed([5.0] * 9, weight)) == pytest.approx([5.0] * 9)
    assert not math.isnan(smoothed([1.0, math.nan, 2.0], weight)[-1])


@given(st.floats(0, 1e7), st.floats(1e-9, 1e7), st.integers(1, 30), st.sampled_from(["step", "time", "tokens"]))
@example(524288.0, 1.0000000000000003e-09, 11, "tokens")
def test_ticks_of_x_are_whole_steps_or_round_times_and_no_two_read_the_same(
    low: float, span: float, wanted: int, unit: str
) -> None:
    ticks = x_ticks(low, low + span, wanted, unit)
    assert len({value for value, _ in ticks}) == len(ticks)
    if unit == "step":
        assert all(value.is_integer() for value, _ in ticks)
    if unit == "step" or (unit == "tokens" and span > 1e-3 * low):
        assert len({text for _, text in ticks}) == len(ticks)


@given(st.floats(-1e5, 1e5), st.floats(1e-4, 1e5), st.integers(3, 40))
def test_labels_of_y_are_all_different(low: float, span: float, height: int) -> None:
    span = max(span, 1e-4 * abs(low))
    labels = y_labels(AxisScale(0, 1, low, low + span, False), height)
    assert len(set(labels.values())) == len(labels)


@given(st.floats(-5, 5), st.floats(0.1, 9.9), st.floats(0, 0.9), st.integers(3, 40))
def test_a_mark_reads_as_what_stands_at_its_row(power: float, size: float, low: float, height: int) -> None:
    span = size * 10**power
    scale = AxisScale(0, 1, low * span, (1 + low) * span, False)
    row = scale.rows(height * 4)
    for at, text in y_labels(scale, height).items():
        value = float(text[:-1]) * {"k": 1e3, "M": 1e6, "G": 1e9}[text[-1]] if text[-1] in "kMG" else float(text)
        assert row(value) >> 2 == at, (text, at)
    assert list(y_labels(AxisScale(0, 1, 0.002, 0.009, False), 10).values()) == ["0.0025", "0.0050", "0.0075"]


def test_a_language_models_axis_counts_tokens_as_its_worker_says_how_large_a_step_is() -> None:
    run = recorded("lm")
    events = list(run.events[: run.moments["full"]])
    facts = {"batch_size": 8, "accumulate": 2, "seq_len": 128, "coord": "p0r0s0t0"}
    assert axis_of(fold(events), "tokens") is None, "neither its plan nor its worker said so then"
    events.append(ev.EngineEvent(ts=events[-1].ts, pod="p0r0", level="info", event="run_facts", fields=facts))
    view = View(snap=fold(events), now=events[-1].ts)
    to = axis_of(view.snap, "tokens")
    assert to is not None
    assert to(10) == 10 * 8 * 2 * 128
    assert axis_words(view.snap, "tokens", to(10)) == "20.5k tokens"


@pytest.mark.parametrize("size", [(56, 10), (76, 20), (156, 46), (246, 76)])
def test_grid_and_overview_keep_to_their_size_and_use_it(size: tuple[int, int]) -> None:
    width, height = size
    view = view_of(Story(replicas=2).full(30))
    for lines in (overview_lines(view, width, height), grid_lines(view, width, height)):
        assert all(width_of(line) <= width for line in lines)
        assert max(width_of(line) for line in lines) > width - 8
    assert len(overview_lines(view, width, height)) <= height


async def test_keys_of_the_charts_pick_smooth_and_change_the_axis(folder: Path) -> None:
    async with desk(Story().full(60), folder) as d:
        charts = d.app.main.query_one(ChartsPanel)
        await d.press("2", "j", "j")
        assert charts.picked == names(charts.view)[1]
        await d.press("enter")
        assert sum("┼" in plain(line) for line in charts.lines) == 1
        await d.press("e", "a")
        assert "smoothed 0.6" in d.text
        assert "over time" in d.text
        await d.press("right", "left")
        assert "step 59" in d.text
        await d.press("a")
        assert "over samples" in d.text
        await d.press("backspace", "a")
        assert charts.look.axis == "step"


MANY_FIGURES = {
    f"layers.{i}.{part}/{what}": float(i) for i in range(6) for part in ("attn", "mlp") for what in ("lr", "norm")
}


def many(story: Story, steps: int = 5) -> Story:
    """As a trainer of somebody else's tells: the norms and rates of every layer."""
    for step in range(1, steps + 1):
        values = {name: value + 1 / step for name, value in MANY_FIGURES.items()}
        story.add(ev.Metric(coord="p0r0s0t0", step=step, values=values))
    return story


def headed(charts: ChartsPanel) -> str:
    """The headings of all charts that are drawn, in sight or not."""
    return "\n".join(plain(line) for line in charts.lines)


async def test_the_filter_narrows_the_page_of_charts_by_their_names_and_says_how_many_are_left(folder: Path) -> None:
    async with desk(many(Story().full(60)), folder) as d:
        charts = d.app.main.query_one(ChartsPanel)
        whole = len(names(charts.view))
        await d.press("2", "slash", *typed("/s.[01].*norm/"), "enter")
        assert f"4 of {whole} charts //s.[01].*norm/" in d.text
        assert "layers.1.mlp/norm" in headed(charts)
        assert "layers.2.mlp/norm" not in headed(charts)
        assert "learning rate" not in headed(charts)
        await d.press("j", "j", "enter")
        assert charts.picked == "layers.0.mlp/norm"
        d.app.commands.do_filter("learning")
        await d.press("enter")
        assert f"1 of {whole} charts /learning" in d.text, "known by its title, too"
        d.app.commands.do_filter("p1r0")
        await d.settle()
        assert "every chart /p1r0" in d.text, "what no chart is called by says nothing about charts"
        assert "layers.2.mlp/norm" in headed(charts)
        await d.press("escape")
        assert "charts /" not in d.text
        d.app.commands.do_filter("norm")
        await d.press("0")
        assert "loss" in headed(charts), "the overview keeps its charts"


async def test_of_many_charts_each_has_its_value_at_the_crosshair_in_its_heading_and_all_can_be_scrolled_to(
    folder: Path,
) -> None:
    async with desk(many(Story().full(60)), folder) as d:
        charts = d.app.main.query_one(ChartsPanel)
        await d.press("2")
        whole = len(charts.lines)
        await d.press("home", "right")
        assert "crosshair at step 2" in d.text
        assert len(charts.lines) == whole
        heading = next(line for line in headed(charts).splitlines() if "layers.3.mlp/norm" in line)
        assert "3.500" in heading
        await d.press("end")
        heading = next(line for line in headed(charts).splitlines() if "layers.3.mlp/norm" in line)
        assert "3.200 at step 5" in heading, "measured at an earlier step"


async def test_the_crosshair_begins_in_sight_crosses_a_long_run_in_few_moves_and_takes_the_window_along(
    folder: Path,
) -> None:
    async with desk(Story(steps=3000).full(60), folder) as d:
        charts = d.app.main.query_one(ChartsPanel)
        d.append(*(ev.Metric(coord="p0r0s0t0", step=step, values={"loss": 1 / step}) for step in range(61, 2001)))
        await d.settle()
        await d.press("2", "home")
        assert charts.cursor == 1
        await d.press("right", "right")
        assert charts.cursor == 21
        await d.press("backspace", "z", "z", "shift+left", "shift+left")
        frame = charts.frame()
        assert (round(frame.x0 or 0), round(frame.x1 or 0)) == (1250, 1750)
        await d.press("left")
        assert charts.cursor == 1750, "the newest step in sight, not of the run"
        await d.press("right")
        assert charts.cursor == 1752, "finer when zoomed in"
        frame = charts.frame()
        assert frame.x0 is not None
        assert frame.x1 is not None
        assert frame.x0 < 1752 < frame.x1


@pytest.mark.parametrize("axis", ["step", "samples"])
async def test_a_click_puts_the_crosshair_where_the_mouse_is_in_the_chart_under_it(folder: Path, axis: str) -> None:
    async with desk(many(Story().full(60)), folder) as d:
        charts = d.app.main.query_one(ChartsPanel)
        await d.press("2", *(["a", "a"] if axis == "samples" else []))
        d.app.commands.do_filter("/^loss|accuracy|learning/")
        await d.settle()
        assert names(charts.view)[:3] == ["loss", "val_accuracy", "lr"]
        await d.press("right")  # a crosshair at the newest step: its line is to be met by the mouse
        await d.press(*["left"] * 20)
        at = charts.cursor
        drawn = [plain(line) for line in charts.lines]
        x = next(x for x in range(12, 76) if all(line[x] != " " for line in drawn[2:6]))
        await d.press("backspace")
        await d.pilot.click(charts, offset=(x + 2, 4))
        await d.settle()
        assert charts.picked == "loss"
        assert charts.cursor is not None
        assert at is not None
        assert abs(charts.cursor - at) <= 1
        await d.pilot.click(charts, offset=(100, 30))
        await d.settle()
        assert charts.picked != "loss"
        picked = charts.picked, charts.cursor
        await d.pilot.click(charts, offset=(3, 4))  # beside every plane
        await d.settle()
        assert (charts.picked, charts.cursor) == picked


async def test_with_a_crosshair_the_chart_that_is_picked_comes_in_sight_also_where_few_charts_find_no_room(
    folder: Path,
) -> None:
    async with desk(Story(replicas=1).full(60), folder, (80, 24)) as d:
        charts = d.app.main.query_one(ChartsPanel)
        await d.press("2", "left", *["j"] * len(names(charts.view)))
        title = TITLES[names(charts.view)[-1]]
        assert any(plain(line).startswith(title) for line in charts.lines)
        assert "step 60" in d.text
        y = next(y for y, line in enumerate(charts.lines) if plain(line).startswith(title))
        await d.pilot.click(charts, offset=(40, y + 2))
        assert charts.picked == names(charts.view)[-1]
        assert 20 < (charts.cursor or 0) < 40, "half of the width, half of the steps"
        await d.press("enter", "backspace", "enter")
        await d.pilot.click(charts, offset=(20, 5))
        assert charts.picked == names(charts.view)[-1]
        assert 5 < (charts.cursor or 0) < 20


@pytest.mark.ci(__file__)
async def test_another_run_lies_over_the_charts_until_it_is_taken_away(folder: Path) -> None:
    other = Story(seed=9, steps=60).finished()
    other.write(folder.parent / "other-20261120-0101-ef56")
    async with desk(Story().full(30), folder) as d:
        charts = d.app.main.query_one(ChartsPanel)
        await d.press("2", "c")
        assert [name for name, _ in charts.look.others] == ["other-20261120-0101-ef56"]
        await d.press("c")
        assert charts.look.others == ()
        await d.press("2", "2", "colon", *typed("compare other"), "enter")
        await d.settle()
        assert "with other-20261120-0101-ef56" in d.text
        charts = d.app.main.query_one(ChartsPanel)
        curves, _, _ = curves_of(charts.view, "loss", charts.look)
        assert [c.name for c in curves][-1] == "other-20261120-0101-ef56"
        assert curves[-1].xs[-1] == 60
        await d.press("colon", *typed("compare othre"), "enter")
        assert "did you mean other-20261120-0101-ef56?" in d.toasts
        await d.press("colon", *typed("compare"), "enter")
        assert not charts.look.others


def test_another_run_is_named_by_its_beginning_or_its_end(tmp_path: Path) -> None:
    for name in ("a-1", "a-2", "b-3", "here"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "journal.sqlite").touch()
    assert chosen(tmp_path / "here", "b") == "b-3"
    assert chosen(tmp_path / "here", "2") == "a-2"
    with pytest.raises(ConfigError, match="the beginning of 2 runs"):
        chosen(tmp_path / "here", "a")


def test_runs_of_the_same_profile_are_the_first_to_be_compared(tmp_path: Path) -> None:
    names = (
        "demo-20261126-0101-aaaa",
        "demo-20261126-0102-bbbb",
        "other-20261126-0103-cccc",
        "demo-20261126-0104-dddd",
    )
    for age, name in enumerate(names):
        (tmp_path / name).mkdir()
        (tmp_path / name / "journal.sqlite").touch()
        os.utime(tmp_path / name / "journal.sqlite", (age, age))
    assert others(tmp_path / names[3]) == [names[1], names[0], names[2]]
    (tmp_path / names[0] / "number").write_text("7\n")  # a clock that was set back between them dates them falsely
    assert others(tmp_path / names[3]) == [names[0], names[1], names[2]]


def test_a_run_that_is_only_called_alike_is_no_run_of_the_same_profile(tmp_path: Path) -> None:
    """``uvcc demo --lm`` names its runs as ``uvcc demo`` does: its loss has nothing to do with theirs."""
    for name, profile in (("here", "demo"), ("lm", "local-lm-smoke"), ("before", "demo")):
        story = Story().planned()
        story.events[0] = replace(story.events[0], run=f"demo-20261126-01{len(name):02}-{name}", profile_name=profile)
        story.write(tmp_path / f"demo-20261126-0101-{name}")
    for age, name in enumerate(("here", "before", "lm")):
        os.utime(tmp_path / f"demo-20261126-0101-{name}" / "journal.sqlite", (age, age))
    assert others(tmp_path / "demo-20261126-0101-here") == ["demo-20261126-0101-before", "demo-20261126-0101-lm"]


def test_small_charts_have_two_marks_and_an_axis_that_a_run_does_not_know_is_steps() -> None:
    view = view_of(Story().full(60))
    for height in range(6, 20):
        lines = [plain(line) for line in chart(view, "samples_per_s", 40, height)]
        assert sum("┤" in line for line in lines) >= 2, "\n".join(lines)
    bare = replace(view, snap=replace(view.snap, profile=MappingProxyType({})))
    steps = [plain(line) for line in chart(bare, "loss", 76, 10)]
    assert [plain(line) for line in chart(bare, "loss", 76, 10, look=ChartLook(axis="tokens"))] == steps
    assert any("20" in line and "20.00" not in line for line in steps[-1:])


@pytest.mark.parametrize("size", [(56, 12), (76, 16), (150, 40), (240, 70)])
def test_before_training_a_board_shows_how_far_all_pods_are_in_each_stage(size: tuple[int, int]) -> None:
    width, height = size
    story = Story(replicas=8)
    view = view_of(story.provisioning())
    lines = board_lines(view, width, height)
    assert all(width_of(line) <= width for line in lines)
    assert len(lines) <= height
    text = "\n".join(map(plain, lines))
    assert "23/24" in text
    assert "0/24" in text
    assert "24 pods before training: provision running" in text
    text = "\n".join(map(plain, board_lines(view_of(Story(replicas=8).launched().phase("smoke", 2)), width, height)))
    assert "workers started" in text
    assert "24/24" in text
    assert board_lines(view_of(Story(events=[])), width, height) == []


def test_the_board_counts_the_pods_that_preflight_has_looked_at_and_those_that_hold_for_the_drill() -> None:
    story = Story(replicas=8).provisioning()
    story.add(story.pod_event(story.coords[-1], "ready"))
    story.add(ev.StageChanged(name="provision", status="ok"))
    for coord in story.coords:
        story.add(story.pod_event(coord, "agent"))
    story.add(ev.StageChanged(name="preflight", status="running"))

    def rows() -> str:
        return "\n".join(" ".join(plain(line).split()) for line in board_lines(view_of(story), 120, 30))

    assert "0/24 looked at" in rows()
    assert "held" not in rows()
    for coord in story.coords[:10]:
        story.add(story.pod_event(coord, "agent", pod_states.LOOKED_AT))
    assert "10/24 looked at" in rows()
    story.add(ev.StageChanged(name="preflight", status="ok"))
    assert "24/24 looked at" in rows()
    story.add(ev.StageChanged(name="drill", status="running"))
    story.add(ev.HaltRequested(nonce="d", mode="hold", by="drill", drill=True))
    for coord in story.coords[:7]:
        story.add(ev.HaltAck(pod=story.pod(coord), nonce="d", stage="held", step=1))
    story.add(ev.HaltAck(pod=story.pod(story.coords[8]), nonce="d", stage="seen"))
    assert "7/24 held" in rows()
    page = pod_lines(view_of(story), story.pod(story.coords[0]), 120, 30)
    assert pod_states.LOOKED_AT not in plain(page[0]), "what counts a stage is nothing to say of a pod"
    story.add(ev.StageChanged(name="drill", status="ok"))
    assert "24/24 held" in rows()


def test_the_board_of_a_domain_of_its_own_counts_its_own_workers() -> None:
    view = view_of(Story(replicas=2).launched().phase("full", 2))
    mine = {coord: w for coord, w in view.snap.workers.items() if coord.startswith("p0")}
    pods = {pod: p for pod, p in view.snap.pods.items() if p.party == 0}
    own = replace(view, snap=replace(view.snap, apart=True, workers=mine, pods=pods))
    rows = [" ".join(plain(line).split()) for line in board_lines(own, 150, 20)]
    assert any(row.endswith("2/2 workers started") for row in rows), rows
    assert any(row.endswith("0/2 first heartbeat") for row in rows), rows


def test_the_board_says_what_a_stage_waits_for_before_its_bars() -> None:
    story = Story().planned()
    said = "waits for stock until 2026-11-21 14:10 UTC, nothing is rented: no offer of runpod fits"
    story.add(ev.StageChanged(name="provision", status="running", detail=said))
    lines = board_lines(view_of(story), 78, 3)  # all that 80x24 leaves it
    assert " ".join("\n".join(map(plain, lines[1:3])).split()) == said
