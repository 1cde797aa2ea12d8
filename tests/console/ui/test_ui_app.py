"""The running console under Textual's pilot: every key, pages, filters, help, palette, evidence, replay."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from textual.command import CommandList, CommandPalette
from textual.widgets import Input
from ui_desk import desk, typed
from ui_journals import RUN, Story

from uvcc_console.core import events as ev
from uvcc_console.ui.app import open_app
from uvcc_console.ui.panels.charts import ChartsPanel
from uvcc_console.ui.panels.fleet import FleetPanel
from uvcc_console.ui.panels.log_view import LogView
from uvcc_console.ui.registry.keys import ACTIONS, bindings, markdown_table
from uvcc_console.ui.screens.help import HelpScreen


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / RUN


# ---- resume, teardown, confirm, detach


async def test_resume_when_halted(folder: Path) -> None:
    async with desk(Story().halted(), folder) as d:
        await d.press("r")
        assert [(e.action, "tui" in e.by) for e in d.asked(ev.Intent)] == [("resume", True)]


async def test_resume_while_running_says_why_not(folder: Path) -> None:
    async with desk(Story().full(5), folder) as d:
        await d.press("r")
        assert not d.asked(ev.Intent)
        assert "the run is running, not halted" in d.toasts


async def test_resume_after_a_failure(folder: Path) -> None:
    async with desk(Story().failed(), folder) as d:
        assert "FAILED" in d.text
        await d.press("r")
        assert [e.action for e in d.asked(ev.Intent)] == ["resume"]


async def test_teardown_wants_the_runs_name(folder: Path) -> None:
    async with desk(Story().full(5), folder) as d:
        await d.press("t")
        assert "This deletes 3 pods" in d.text
        await d.press("y", "e", "s", "enter")
        assert not d.asked(ev.Intent)
        d.app.screen.query_one(Input).value = RUN
        await d.press("enter")
        assert [e.action for e in d.asked(ev.Intent)] == ["teardown"]


async def test_a_failed_gate_can_be_skipped_by_its_name_or_retried(folder: Path) -> None:
    story = Story().smoke()
    async with desk(story, folder) as d:
        await d.press("x", "R")
        assert not d.asked(ev.Intent)
        d.append(ev.StageChanged(name="gate", status="failed", detail="loss_falls: wanted < 2.3, measured 2.4"))
        await d.settle()
        assert "x skips" in d.text
        await d.press("x")
        await d.press("g", "a", "t", "enter")
        assert not d.asked(ev.Intent)
        await d.press("e", "enter")
        await d.press("R")
        assert sorted(e.action for e in d.asked(ev.Intent)) == ["retry", "skip"]


async def test_a_failed_full_cannot_be_skipped(folder: Path) -> None:
    async with desk(Story().failed(), folder) as d:
        await d.press("x")
        assert "full cannot be skipped" in d.toasts


async def test_q_leaves_and_says_that_the_run_goes_on(folder: Path) -> None:
    async with desk(Story().full(5), folder) as d:
        await d.press("q")
        assert d.app.return_code == 0
        assert any("the run goes on" in str(m) for m in d.app._exit_renderables)


async def test_ctrl_c_ends_nothing(folder: Path) -> None:
    async with desk(Story().full(5), folder) as d:
        await d.press("ctrl+c")
        assert d.app.is_running
        assert "q leaves" in d.toasts


# ---- panels, help, palette, command line


@pytest.mark.parametrize("size", [pytest.param((160, 50), marks=pytest.mark.ci(__file__)), (80, 24)])
async def test_each_number_shows_its_panel_alone_and_back(folder: Path, size: tuple[int, int]) -> None:
    async with desk(Story().full(5), folder, size) as d:
        for action in (a for a in ACTIONS.values() if a.group == "panels" and a.keys != "0"):
            await d.press(action.keys)
            shown = [p for p in d.app.main.panels() if p.region.height > 0]
            assert [p.number for p in shown] == [action.keys], action.name
            assert "F9" in d.text
            await d.press(action.keys)
        assert d.app.main.page == ""
        assert d.app.main.query_one(FleetPanel).region.height > 2
        assert d.app.main.query_one(LogView).region.height > 2


async def test_the_manual_opens_from_the_help_and_by_a_command(folder: Path) -> None:
    from uvcc_console.ui.screens.manual_screen import ManualScreen

    async with desk(Story().full(5), folder) as d:
        await d.press("question_mark")
        await d.press("m")
        await d.settle()
        assert isinstance(d.app.screen, ManualScreen)
        await d.press("escape")
        d.app.commands.line("docs loss_nan")
        await d.settle()
        assert isinstance(d.app.screen, ManualScreen)


async def test_the_manual_opens_at_the_newest_alert(folder: Path) -> None:
    from textual.containers import VerticalScroll

    from uvcc_console.ui.screens.manual_screen import ManualScreen

    story = Story().full(5)
    story.add(ev.Alert(level="error", name="path_dead", text="path ssh down", subject="p0r0"))
    story.add(ev.Alert(level="info", name="link", text="auto chose relay: the parties cannot all reach each other"))
    async with desk(story, folder) as d:
        await d.press("question_mark")
        await d.press("m")
        await d.settle()
        assert isinstance(d.app.screen, ManualScreen)
        assert d.app.screen.query_one("#manual-text", VerticalScroll).border_subtitle == "runbooks/alerts#path_dead"


async def test_help_shows_the_focused_panel_first(folder: Path) -> None:
    async with desk(Story().full(5), folder) as d:
        d.app.main.query_one(ChartsPanel).focus()
        await d.press("question_mark")
        assert isinstance(d.app.screen, HelpScreen)
        text = d.text
        assert text.index("Loss per party") < text.index("HALT   ") if "HALT   " in text else "Loss per party" in text
        assert "not now: the run is running, not halted" in text
        await d.press("escape")
        assert not isinstance(d.app.screen, HelpScreen)


async def test_the_palette_runs_an_action(folder: Path) -> None:
    async with desk(Story().halted(), folder) as d:
        await d.press("ctrl+p")
        await d.press(*"resume")
        found = d.app.screen.query_one(CommandList)
        while not found.option_count or "resume" not in str(found.get_option_at_index(0).prompt).lower():
            await d.pilot.pause(0.02)
        await d.press("enter")
        await d.settle()
        assert [e.action for e in d.asked(ev.Intent)] == ["resume"]


async def test_commands_are_typed_after_a_colon(folder: Path) -> None:
    async with desk(Story().full(5), folder) as d:
        await d.press("colon", *"ledger", "enter")
        assert d.app.main.page == "5"
        await d.press("colon", *"ledgre", "enter")
        assert "did you mean ledger?" in d.toasts
        await d.press("colon", *"xyzzy", "enter")
        assert "no command 'xyzzy': ? lists them" in d.toasts


async def test_the_filter_narrows_fleet_and_log_while_typing_and_escape_puts_it_back(folder: Path) -> None:
    async with desk(Story(replicas=2).full(5), folder) as d:
        before = len(d.app.main.query_one(LogView).ring)
        await d.press("slash", *typed("pod=p1r0"))
        log = d.app.main.query_one(LogView)
        assert 0 < len(log.ring) < before
        assert len(d.app.main.query_one(FleetPanel).lines) == 2
        await d.press("escape")
        assert len(log.ring) == before
        await d.press("slash", *typed("party=2"), "enter")
        assert d.app.filter.source == "party=2"
        assert "/party=2" in d.text


async def test_search_goes_back_from_the_end(folder: Path) -> None:
    async with desk(Story().full(45), folder) as d:
        await d.press("colon", *typed("find checkpoint"), "enter")
        log = d.app.main.query_one(LogView)
        assert not log.following
        assert log.ring[log.hit].text.startswith("checkpoint written")
        first = log.hit
        await d.press("N")
        assert log.hit < first


async def test_the_log_stops_following_and_counts_what_is_new(folder: Path) -> None:
    async with desk(Story().full(25), folder) as d:
        log = d.app.main.query_one(LogView)
        log.focus()
        await d.press("k", "k")
        assert not log.following
        d.append(*(ev.EngineEvent(pod="p0r0", level="info", event="note", fields={"n": i}) for i in range(7)))
        await d.settle()
        assert log.unseen == 7
        assert "+7 new" in d.text
        await d.press("f")
        assert log.following
        assert "n=6" in d.text


async def test_enter_on_a_pod_opens_its_page_and_l_there_its_log(folder: Path) -> None:
    async with desk(Story().full(5), folder) as d:
        await d.press("j", "enter")
        assert d.app.main.page == "pod"
        await d.press("l")
        assert d.app.main.page == "3"
        assert d.app.filter.source.startswith("pod=p")


async def test_fleet_cursor_marks_and_sorting(folder: Path) -> None:
    async with desk(Story(replicas=2).full(5), folder) as d:
        fleet = d.app.main.query_one(FleetPanel)
        await d.press("j", "space", "space")
        assert len(fleet.state.marked) == 2
        before = fleet.state.sort
        await d.press("o")
        assert fleet.state.sort != before


async def test_charts_zoom_log_and_crosshair(folder: Path) -> None:
    async with desk(Story().full(60), folder) as d:
        charts = d.app.main.query_one(ChartsPanel)
        charts.focus()
        await d.press("l", "plus", "left")
        assert charts.log_scale
        assert charts.window == 0.5
        assert charts.cursor == 60
        assert "step 60" in d.text


# ---- evidence


async def test_a_snapshot_is_kept_with_its_hashes_and_in_the_journal(folder: Path) -> None:
    async with desk(Story().full(5), folder) as d:
        await d.press("s")
        kept = folder / "artifacts" / "evidence"
        files = {p.suffix: p for p in kept.iterdir() if p.name != "SHA256SUMS"}
        assert set(files) == {".svg", ".txt", ".json"}
        sums = dict(reversed(line.split("  ")) for line in (kept / "SHA256SUMS").read_text().splitlines())  # type: ignore[misc]
        assert {n: hashlib.sha256((kept / n).read_bytes()).hexdigest() for n in sums} == sums
        assert json.loads(files[".json"].read_text())["agreed_epoch"] == 5
        intent = d.asked(ev.Intent)[-1]
        assert intent.action == "snapshot"
        assert intent.args == sums


# ---- live and replay


async def test_a_run_grows_on_the_screen(folder: Path) -> None:
    story = Story().full(5)
    later = Story().full(9)
    async with desk(story, folder) as d:
        assert "agree @ step 5" in d.text
        d.append(*later.events[len(story.events) :])
        await d.settle()
        assert "agree @ step 9" in d.text


async def test_a_whole_story_from_planned_to_halted_never_breaks_the_screen(folder: Path) -> None:
    events = [*Story().halted(unknown=1).events]
    first = Story()
    first.planned()
    async with desk(first, folder, (80, 24)) as d:
        rest = events[len(first.events) :]
        for i in range(0, len(rest), 60):
            d.append(*rest[i : i + 60])
            await d.pilot.pause()
            assert "F9" in d.text
        assert "UNKNOWN" in d.text


@pytest.mark.ci(__file__)
async def test_replay_pauses_jumps_and_changes_speed(folder: Path) -> None:
    story = Story().halted()
    clock = [0.0]
    story.write(folder)
    app = open_app(folder, replay=True, clock=lambda: clock[0], utc=True, tick_s=3600, budget_s=60)
    async with app.run_test(size=(120, 40)) as pilot:
        assert app.snap.status == "planned" or app.snap.seq <= 20
        clock[0] = 3.0
        app.tick()
        early = app.snap.seq
        assert early > 0
        await pilot.press("p")
        clock[0] = 9.0
        app.tick()
        assert app.snap.seq == early, "paused"
        await pilot.press("right_square_bracket")
        assert app.snap.seq > early
        await pilot.press(*["right_square_bracket"] * 20)
        assert app.snap.status == "halted"
        await pilot.press(*["left_square_bracket"] * 15)
        await pilot.pause()
        assert app.snap.status != "halted"
        shown = app.main.query_one(LogView).ring
        assert shown[len(shown) - 1] == app.snap.log[-1]
        await pilot.press("greater_than_sign")
        assert app.source.speed == 2.0
    app.source.close()


# ---- the registry


def test_every_action_has_a_handler_a_description_and_a_free_key() -> None:
    from uvcc_console.ui.actions.commands import Commands

    keys = [k for a in ACTIONS.values() for k in a.keys.split(",") if k]
    assert len(keys) == len(set(keys)) + 1  # Esc releases inside a hold, and leads back outside of one
    for a in ACTIONS.values():
        assert callable(getattr(Commands, f"do_{a.id.split('_')[0]}")), a.id
        assert a.description
    assert {b.key for b in bindings()} == set(keys)
    assert [b.key for b in bindings() if b.priority] == ["f9", "escape"]


def test_the_key_table_for_the_readme_names_every_action() -> None:
    table = markdown_table()
    assert all(f"`{a.label}`" in table for a in ACTIONS.values())


@pytest.mark.ci(__file__)
async def test_a_change_of_theme_repaints_everything(folder: Path) -> None:
    async with desk(Story().full(5), folder) as d:
        before = d.app.export_screenshot()
        await d.press("colon", *typed("theme"), "enter")
        assert isinstance(d.app.screen, CommandPalette)  # the list of all, searched by typing
        await d.press("escape")
        assert d.app.theme == "uvcc-dark"
        await d.press("colon", *typed("theme light"), "enter")
        assert d.app.theme == "uvcc-light"
        after = d.app.export_screenshot()
        assert "#d5d9e3" in before, "the dark theme's text"
        assert "#d5d9e3" not in after


@pytest.mark.ci(__file__)
async def test_the_settings_name_a_theme_as_the_command_does_and_a_wrong_one_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for word, theme in (("light", "uvcc-light"), ("dark", "uvcc-dark"), ("nord", "nord"), ("nosuch", "uvcc-dark")):
        monkeypatch.setenv("UVCC_THEME", word)
        async with desk(Story().full(5), folder) as d:
            assert d.app.theme == theme
            assert ("there is no theme 'nosuch'" in d.toasts) == (word == "nosuch")
