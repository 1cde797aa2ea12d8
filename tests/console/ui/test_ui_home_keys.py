"""The keys of the start screen and the wizard that start or halt something: none acts on what is not shown yet."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from textual.pilot import Pilot
from ui_desk import Keyboard, typed
from ui_journals import RUN, T0, Story

from uvcc_console.core import paths
from uvcc_console.fleet.procs import identify
from uvcc_console.ui.feed import home_model
from uvcc_console.ui.feed.home_model import Draft
from uvcc_console.ui.home.home_app import HomeApp, RunChoice
from uvcc_console.ui.panels.home import RunsPanel
from uvcc_console.ui.screens.wizard import WizardScreen


@asynccontextmanager
async def home() -> AsyncIterator[tuple[HomeApp, Pilot[RunChoice | None]]]:
    app = HomeApp(now=lambda: T0 + 600, look_s=3600, utc=True, key_time=Keyboard())
    async with app.run_test(size=(160, 50)) as pilot:
        await settle(app, pilot)
        yield app, pilot


async def settle(app: HomeApp, pilot: Pilot[RunChoice | None]) -> None:
    await pilot.pause()
    await app.workers.wait_for_complete()
    await pilot.pause()


async def test_s_starts_no_plan_of_before_the_setting_that_was_typed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """While the plan is made anew the one of before is shown, with its price; nothing spends by it."""
    started: list[Draft] = []
    may = threading.Event()
    make = home_model.make_draft

    def slow(profile: str, settings: Sequence[str]) -> Draft:
        assert not settings or may.wait(300)
        return make(profile, settings)

    monkeypatch.setattr(home_model, "start", lambda draft: started.append(draft) or tmp_path)
    monkeypatch.setattr(home_model, "make_draft", slow)
    async with home() as (app, pilot):
        app.push_screen(WizardScreen("demo"))
        await settle(app, pilot)
        await pilot.press("e", *typed("job.steps=61"), "enter", "s")
        await pilot.pause()
        early = list(started)
        may.set()
        assert not early
        assert "not yet" in " ".join(n.message for n in app._notifications)
        await settle(app, pilot)
        await pilot.press("s")
        await settle(app, pilot)
    assert [draft.settings for draft in started] == [("job.steps=61",)]


@pytest.mark.parametrize("over", ["question_mark", "X", "T", "slash"])
async def test_f9_holds_the_live_run_from_under_whatever_is_open(over: str) -> None:
    """The help, a question, the list of themes, the search."""
    Story(steps=5).finished().write(paths.run_dir(RUN))
    folder = Story().full(5).write(paths.run_dir("live-20261121-0117-ef56"))
    me = identify(os.getpid())
    assert me is not None
    (folder / "conductor.json").write_text(f'{{"pid": {me.pid}, "starttime": {me.starttime}}}')
    async with home() as (app, pilot):
        app.look()
        app.screen.query_one(RunsPanel).current = RUN
        await pilot.press(over)
        await pilot.pause()
        await pilot.press("f9")
        await pilot.pause()
    assert app.return_value == RunChoice(folder, hold=True)


async def test_enter_opens_no_run_that_a_search_has_hidden() -> None:
    """No run was shown, and Enter opened the one that the cursor had been on."""
    folder = Story(steps=5).finished().write(paths.run_dir(RUN))
    async with home() as (app, pilot):
        await pilot.press("slash", *typed("zzz"), "enter", "enter")
        await settle(app, pilot)
        assert app.return_value is None
        assert "no run matches" in "\n".join(strip.text for strip in app.screen._compositor.render_strips())
        await pilot.press("escape", "enter")
        await settle(app, pilot)
    assert app.return_value == RunChoice(folder)
