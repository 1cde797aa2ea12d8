"""How an operator lays the console out: borders that can be pulled and clicked, a jump to any panel, a kept layout."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from textual.events import Click, MouseUp
from textual.geometry import Region
from ui_desk import desk, modes
from ui_journals import RUN, Story

from uvcc_console.core import events as ev
from uvcc_console.ui.actions import layouts
from uvcc_console.ui.feed import kept_layout
from uvcc_console.ui.feed.kept_layout import ScreenLayout
from uvcc_console.ui.panels.charts import ChartsPanel
from uvcc_console.ui.panels.fleet import FleetPanel
from uvcc_console.ui.panels.ledger import LedgerPanel
from uvcc_console.ui.panels.log_view import LogView
from uvcc_console.ui.screens.borders import LEAST_LEFT, LEAST_LOG, LEAST_RIGHT, Borders, grip_at
from uvcc_console.ui.screens.help import HelpScreen
from uvcc_console.ui.screens.jump import JumpScreen, signs
from uvcc_console.ui.widgets.panel import action_of
from uvcc_console.ui.widgets.prompt import Prompt

BODY, RIGHT, LOG = Region(0, 2, 160, 33), Region(112, 2, 48, 33), Region(0, 35, 160, 14)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / RUN


def test_only_the_two_borders_can_be_pulled() -> None:
    assert {grip_at(x, 10, BODY, RIGHT, LOG) for x in (111, 112)} == {"column"}
    assert grip_at(110, 10, BODY, RIGHT, LOG) == grip_at(113, 10, BODY, RIGHT, LOG) == ""
    assert grip_at(5, 35, BODY, RIGHT, LOG) == "log"
    assert grip_at(5, 36, BODY, RIGHT, LOG) == ""


def test_no_side_is_pulled_away() -> None:
    usual = Borders()
    assert usual.pulled("column", 90, 10, RIGHT, LOG) == Borders(right=70)
    assert usual.pulled("column", 159, 10, RIGHT, LOG).right == LEAST_RIGHT
    assert usual.pulled("column", 0, 10, RIGHT, LOG).right == 160 - LEAST_LEFT
    assert usual.pulled("log", 5, 48, RIGHT, LOG).log == LEAST_LOG
    assert usual.pulled("log", 5, 30, RIGHT, LOG) == Borders(log=19)
    assert Borders(300, 90).fitting(160, 50) == Borders(120, 42)
    assert Borders(300, 90).fitting(30, 10) == Borders()


async def test_borders_follow_the_mouse_and_a_click_on_one_opens_its_panel(folder: Path) -> None:
    async with desk(Story().full(20), folder) as d:
        main, pilot = d.app.main, d.pilot
        right, log = main.query_one("#right"), main.query_one(LogView)
        x, y = right.region.x, right.region.y + 4
        await pilot.mouse_down(offset=(x, y))
        await pilot.hover(offset=(x - 20, y))
        assert right.region.width == 48, "a mouse that only passes pulls nothing"
        await pilot.mouse_down(offset=(x, y))
        await pilot._post_mouse_events([_move()], offset=(x - 20, y), button=1)
        await pilot.pause()
        assert right.region.width == 68
        assert main.query_one("#left").region.width == 160 - 68
        await pilot.mouse_up(offset=(x - 20, y))
        assert main.page == ""
        await pilot.click(offset=(10, log.region.y))
        await d.settle()
        assert main.page == "3"
        assert d.app.screen is main, "the click is no click on a line of what it brought there"
        assert log.region.height > 40, "alone it has all of the screen"
        await pilot.click(offset=(10, log.region.y))
        await d.settle()
        assert main.page == ""
        assert right.region.width == 68, "and comes back to what was pulled"
        await pilot.resize_terminal(100, 50)
        await d.settle()
        assert right.region.width == 100, "a narrow terminal has one column"


async def test_on_a_short_screen_the_log_is_pulled_as_well_and_a_result_has_its_room(folder: Path) -> None:
    async with desk(Story(steps=30).full(20), folder, size=(80, 24)) as d:
        main, pilot = d.app.main, d.pilot
        log = main.query_one(LogView)
        x, y = 40, log.region.y
        await pilot.mouse_down(offset=(x, y))
        await pilot._post_mouse_events([_move()], offset=(x, y - 4), button=1)
        await pilot.pause()
        await pilot.mouse_up(offset=(x, y - 4))
        assert log.region.y == y - 4
        assert main.shape == Borders(low=log.region.height), "what a tall screen has stays"
        await pilot.resize_terminal(80, 50)
        await d.settle()
        assert log.styles.inline.height is None, "as usual"
        await pilot.resize_terminal(80, 24)
        await d.settle()
        assert log.region.y == y - 4
        assert layouts.changes(layouts.taken(d.app)) == ["log_short"]
        main.add_class("-result")
        main.apply_shape()
        await d.settle()
        assert log.styles.inline.height is None, "nothing stands in the way of a result"


@pytest.mark.parametrize("size", [(80, 24), pytest.param((160, 50), marks=pytest.mark.ci(__file__))])
async def test_who_pulls_a_border_means_no_line_of_a_list(folder: Path, size: tuple[int, int]) -> None:
    async with desk(Story(replicas=2).full(20), folder, size=size) as d:
        log, fleet = d.app.main.query_one(LogView), d.app.main.query_one(FleetPanel)
        cursor = fleet.state.cursor
        for panel in (log, fleet):
            x, y = panel.region.x + 4, panel.region.y
            await d.pilot.mouse_down(offset=(x, y))
            await d.pilot._post_mouse_events([MouseUp, Click], offset=(x, y + 3), button=1)
            await d.settle()
            assert d.app.screen is d.app.main, "no line of the log was opened"
            assert fleet.state.cursor == cursor
        await d.pilot.click(offset=(log.region.x + 4, log.region.y + 3))
        await d.settle()
        assert d.app.screen is not d.app.main, "a click is one"


@pytest.mark.parametrize("size", [(80, 24), pytest.param((160, 50), marks=pytest.mark.ci(__file__))])
async def test_a_click_on_a_key_of_the_last_line_does_as_the_key_and_none_halts(
    folder: Path, size: tuple[int, int]
) -> None:
    async with desk(Story().full(20), folder, size=size) as d:

        async def click(word: str, by: int = 0) -> None:
            line = d.text.splitlines()[-1]
            await d.pilot.click("#footer", offset=(line.index(word) + by, 0))
            await d.settle()

        await click("F9", 1)
        await click("HALT", 1)
        assert modes(d) == []
        await click("? help", 3)
        assert isinstance(d.app.screen, HelpScreen)
        await d.press("escape")
        await click(": command")
        assert d.app.main.query_one(Prompt).display
        await d.press("escape")
        await click("r resume")
        assert "resume: " in d.toasts, "what is not possible now says why, as with the key"
        await d.press("2")
        await click("Esc back", 5)
        assert d.app.main.page == ""
        await click("q detach")
        assert any("the run goes on" in str(m) for m in d.app._exit_renderables)


async def test_a_click_goes_to_a_row_a_second_one_opens_it_and_one_on_a_heading_sorts(folder: Path) -> None:
    async with desk(Story(replicas=2).full(20), folder) as d:
        fleet = d.app.main.query_one(FleetPanel)
        lines = d.text.splitlines()
        row = next(i for i, line in enumerate(lines) if "p1r1s0t0" in line)
        for _ in range(2):
            await d.pilot.click(offset=(8, row))
            await d.settle()
        assert d.app.main.page == "pod"
        assert "p1r1" in d.text
        await d.press("escape")
        head = next(i for i, line in enumerate(lines) if "heartbeat" in line)
        await d.pilot.click(offset=(lines[head].index("loss") + 1, head))
        await d.settle()
        assert fleet.state.sort == "loss"


def _move() -> type:
    from textual.events import MouseMove

    return MouseMove


def test_a_panel_without_a_digit_gets_a_letter() -> None:
    assert signs({"fleet": "1", "halt": "", "pod": "pod", "log": "3"}) == {
        "fleet": "1",
        "halt": "a",
        "pod": "s",
        "log": "3",
    }


async def test_a_jump_takes_the_keyboard_to_a_panel_and_leaves_the_view(folder: Path) -> None:
    async with desk(Story().full(20), folder) as d:
        await d.press("J")
        assert isinstance(d.app.screen, JumpScreen)
        await d.press("5")
        assert isinstance(d.app.main.focused, LedgerPanel)
        assert d.app.main.page == ""
        await d.press("J", "t")
        assert isinstance(d.app.main.focused, LedgerPanel), "a key that is no sign only closes it"
        assert not d.asked(ev.Intent)
        await d.press("J", "f9")
        assert modes(d)[0][0] == "hold"
        assert not isinstance(d.app.screen, JumpScreen), "nothing stands before a halt"


async def test_a_layout_is_found_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UVCC_HOME", str(tmp_path / "home"))
    async with desk(Story().full(20), folder) as d:
        d.app.keeps_layout = True
        assert layouts.changes(layouts.taken(d.app)) == []
        await d.press("1", "O", "0")
        d.app.main.query_one(FleetPanel).show_columns(("pod", "gpu"))
        d.app.main.shape = Borders(60, 12)
        d.app.commands.line("theme uvcc-light")
        d.app.main.query_one(LogView).action_wrap()
        d.app.commands.line("layout")
        await d.settle()
        assert "columns" in d.toasts
        assert "kept when you leave" in d.toasts
        mine = layouts.taken(d.app)
        await d.press("q")
    assert kept_layout.load() == mine != ScreenLayout()
    async with desk(Story().full(20), tmp_path / "runs" / "other") as d:
        d.app.keeps_layout = True
        d.app.lay_out(kept_layout.load())
        await d.settle()
        assert layouts.taken(d.app) == mine
        assert d.app.main.query_one("#right").region.width == 60
        assert d.app.main.query_one(LogView).region.height == 12
        d.app.commands.line("layout usual")
        await d.settle()
        assert layouts.changes(layouts.taken(d.app)) == []
        assert d.app.main.query_one("#right").region.width == 48
        await d.press("q")
    assert not kept_layout.path().exists(), "the usual layout needs no file"


async def test_a_layout_that_cannot_be_kept_is_said_when_the_console_is_left(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UVCC_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("in the way")
    async with desk(Story().full(20), folder) as d:
        d.app.keeps_layout = True
        d.app.main.query_one(LogView).action_wrap()
        await d.press("q")
    said = capsys.readouterr().err
    assert "the layout is not kept" in said
    assert "detached" in said


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"right": true}', '{"right": -1}', '{"right": 1e9}', '{"columns": [1]}', '{"smooth": "x"}',
     '{"theme": "\\u001b[31m"}', '{"sort": 3, "board": [], "unknown": 1}', '{"smooth": true}'],
)  # fmt: skip
def test_a_file_that_is_damaged_lays_nothing_out(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UVCC_HOME", str(tmp_path))
    kept_layout.path().parent.mkdir()
    kept_layout.path().write_text(text)
    assert kept_layout.load() == ScreenLayout()


async def test_names_that_this_version_does_not_have_are_as_usual(folder: Path) -> None:
    odd = ScreenLayout(theme="x", sort="x", columns=("x", "gpu"), board="x", stamp="x", axis="x", smooth=0.5)
    async with desk(Story().full(20), folder) as d:
        d.app.lay_out(odd)
        assert layouts.taken(d.app) == ScreenLayout(columns=("gpu",))


def test_what_is_kept_is_plain_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UVCC_HOME", str(tmp_path))
    kept_layout.keep(ScreenLayout(right=60, columns=("pod",)))
    assert json.loads(kept_layout.path().read_text())["right"] == 60
    assert kept_layout.path().stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("panel", [ChartsPanel, FleetPanel, LogView], ids=lambda p: p.__name__)
def test_every_key_that_a_panels_page_names_is_one_of_its_own_and_in_its_help(panel: type[Any]) -> None:
    for key, _ in panel.hints:
        assert action_of(panel.BINDINGS, key), f"{key} does nothing in {panel.__name__}"
        assert re.search(rf"(?<![\w]){re.escape(key)}(?![\w])", panel.help), f"{key} is not in the help"


async def test_a_page_names_the_keys_of_its_panel_and_a_click_on_one_does_as_the_key(folder: Path) -> None:
    async with desk(Story().full(60), folder) as d:
        charts = d.app.main.query_one(ChartsPanel)
        assert "smooth" not in d.text.splitlines()[-1], "the overview has many panels"
        await d.press("2")
        line = d.text.splitlines()[-1]
        assert "j pick  enter alone  l log  e smooth" in line
        await d.pilot.click("#footer", offset=(line.index("l log") + 2, 0))
        assert charts.log_scale
        await d.press("2")
        assert "smooth" not in d.text.splitlines()[-1]
