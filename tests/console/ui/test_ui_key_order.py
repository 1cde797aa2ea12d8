"""Keys act one after another, in the order in which they were typed, however many came in while the screen was busy.

Textual gives a letter to the line that has the focus at once, and looks for what Enter or an arrow means only when the
key has gone up through all the panels: of "half a name, Enter, the last letter" it entered the whole name.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
from textual import events
from textual.command import CommandPalette
from textual.keys import _character_to_key
from textual.widgets import Input
from ui_desk import OrderingApp, desk
from ui_journals import RUN, Story

from uvcc_console.core import events as ev
from uvcc_console.report import manual
from uvcc_console.ui.panels.log_view import LogView
from uvcc_console.ui.screens.confirm import ConfirmScreen
from uvcc_console.ui.screens.help import HelpScreen
from uvcc_console.ui.screens.manual_screen import ManualScreen
from uvcc_console.ui.widgets.prompt import Prompt

NAMED = {"enter": "\r", "backspace": "\x08", "escape": "\x1b", "tab": "\t"} | dict.fromkeys(
    ("left", "home", "f9", "ctrl+p")
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / RUN


def key_of(key: str) -> events.Key:
    return events.Key(key if key in NAMED else _character_to_key(key), NAMED.get(key, key))


async def at_once(d: OrderingApp, *keys: str | events.Paste) -> None:
    """All of them before the screen has its turn, pressed a second apart."""
    for key in keys:
        d.app.post_message(key if isinstance(key, events.Paste) else key_of(key))
    await d.settle()
    while d.app.pending.keeping and d.app.is_running:
        await d.pilot.pause(0.01)
    await d.settle()


def orders(d: OrderingApp) -> list[str]:
    return [e.mode for e in d.asked(ev.HaltRequested) if not e.drill]


async def test_enter_before_the_last_letter_enters_half_a_name(folder: Path) -> None:
    async with desk(Story().halted(), folder) as d:
        await at_once(d, "t", *RUN[:-1], "enter", RUN[-1])
        assert not d.asked(ev.Intent)
        assert isinstance(d.app.screen, ConfirmScreen)
        assert "that is not it" in d.text
        assert d.app.screen.query_one(Input).value == RUN
        await at_once(d, "enter")
        assert [e.action for e in d.asked(ev.Intent)] == ["teardown"]


async def test_a_page_halts_by_a_whole_name_only(folder: Path) -> None:
    async with desk(Story().full(5), folder) as d:
        d.app.by_name = True
        d.app.action_do("halt")
        await d.settle()
        await at_once(d, *RUN[:-1], "enter", RUN[-1])
        assert not orders(d)
        await at_once(d, "enter")
        assert orders(d) == ["halt"]


async def test_a_letter_is_taken_back_where_it_was_typed(folder: Path) -> None:
    async with desk(Story().halted(), folder) as d:
        await at_once(d, "t", *RUN[:-1], "x", "backspace", RUN[-1], "enter")
        assert [e.action for e in d.asked(ev.Intent)] == ["teardown"]


async def test_what_is_typed_behind_a_colon_is_its_line(folder: Path) -> None:
    async with desk(Story().full(5), folder) as d:
        await at_once(d, ":", *"hel", "left", "x")
        line = d.app.screen.query_one(Prompt)
        assert line.display
        assert line.query_one(Input).value == "hexl"
        assert not d.asked(ev.Intent)


async def test_what_is_typed_behind_enter_is_for_what_it_has_opened(folder: Path) -> None:
    async with desk(Story().halted(), folder) as d:
        await at_once(d, "t", *RUN, "enter", "?")
        assert [e.action for e in d.asked(ev.Intent)] == ["teardown"]
        assert isinstance(d.app.screen, HelpScreen), "the dialog is closed before the next key comes"


async def test_enter_in_the_palette_steers_nothing_before_anything_is_typed(folder: Path) -> None:
    async with desk(Story().full(5), folder) as d:
        await at_once(d, "ctrl+p", "enter")
        assert not isinstance(d.app.screen, CommandPalette)
        assert not orders(d)
        assert not d.asked(ev.Intent)


async def test_enter_in_the_palette_waits_for_what_was_looked_for(folder: Path) -> None:
    async with desk(Story().full(5), folder) as d:
        await at_once(d, "ctrl+p", *"charts", "enter")
        assert d.app.main.page == "2"
        await at_once(d, "ctrl+p", *"zzz", "enter")
        assert isinstance(d.app.screen, CommandPalette), "nothing is called so, and nothing was done"
        assert not orders(d)
        await at_once(d, "escape", ":", *"theme", "enter", *"nord", "enter")
        assert d.app.theme == "nord"


@pytest.mark.parametrize("keys", [("?", "m"), (":", *"docs", "enter")], ids=["help", "command"])
async def test_what_is_typed_before_the_manual_is_there_is_for_the_manual(folder: Path, keys: tuple[str, ...]) -> None:
    """A search for quorum closed it by its first letter, and the others were keys of the run."""
    async with desk(Story().full(5), folder) as d:
        await at_once(d, *keys, "/", *"quorum")
        assert isinstance(d.app.screen, ManualScreen)
        assert d.app.screen.query_one(Input).value == "quorum"
        assert not d.toasts


async def test_a_text_that_the_terminal_calls_pasted_keeps_its_place_among_the_keys(folder: Path) -> None:
    async with desk(Story().full(5), folder) as d:
        await at_once(d, "/", "l", events.Paste("oss>"), "3", "enter")
        assert d.app.filter.source == "loss>3"


async def test_keys_wait_for_a_screen_also_where_all_stood_still_for_longer_than_they_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that takes its time for the manual's pages: nobody had a turn meanwhile, so nothing was waited for."""
    pages = manual.pages
    monkeypatch.setattr(manual, "pages", lambda: time.sleep(0.7) or pages())
    async with desk(Story().full(5), folder) as d:
        await at_once(d, "?", "m", "/", *"quorum")
        assert isinstance(d.app.screen, ManualScreen)
        assert d.app.screen.query_one(Input).value == "quorum"


async def test_a_click_is_for_what_was_opened_by_the_keys_before_it_and_so_are_the_keys_behind(folder: Path) -> None:
    async with desk(Story().full(5), folder) as d:
        log = d.app.screen.query_one(LogView)
        at = (log.region.x + 4, log.region.y + 3, 0, 0, 1, False, False, False)
        line = d.app.screen.query_one(Prompt).query_one(Input)
        for event in (*map(key_of, "/loss"), events.MouseDown(None, *at), events.MouseUp(None, *at), key_of("escape")):
            d.app.post_message(event)
        await at_once(d)
        assert line.value == "loss"
        assert d.app.screen is d.app.main, "the line of the log was opened and closed again"
        assert d.app.focused is log


PASTED_S, TYPED_S = 0.001, 1.0


async def test_a_key_is_pasted_that_came_so_also_where_one_was_typed_before_it_was_acted_on(folder: Path) -> None:
    """A paste in two packets of a slow line: its Enter stood at the end of the first."""
    times = itertools.accumulate([TYPED_S, TYPED_S, *[PASTED_S] * len(RUN), TYPED_S])
    async with desk(Story().halted(), folder, key_time=lambda _: next(times)) as d:
        await at_once(d, "t")
        await at_once(d, *RUN, "enter", "left")
        assert not d.asked(ev.Intent)
        assert "faster than fingers" in d.text


async def test_a_guarded_key_is_no_key_where_another_followed_soon_while_both_waited(folder: Path) -> None:
    times = itertools.accumulate([TYPED_S, TYPED_S, 0.05])
    async with desk(Story().halted(), folder, key_time=lambda _: next(times)) as d:
        await at_once(d, "2", "r", "3")
        assert not d.asked(ev.Intent)
        assert "pasted" in d.toasts
        assert d.app.main.page == "3"


async def test_what_was_pasted_into_the_start_screen_is_no_less_pasted_on_that_of_the_run(folder: Path) -> None:
    keys = [key_of(key) for key in (*":resume", "enter")]
    async with desk(Story().halted(), folder, typed_before=keys) as d:
        await at_once(d)
        assert not d.asked(ev.Intent)
        assert "faster than fingers" in d.toasts
    keys[-1].time += TYPED_S
    async with desk(Story().halted(), folder / "typed", typed_before=keys) as d:
        await at_once(d)
        assert [e.action for e in d.asked(ev.Intent)] == ["resume"]


async def test_an_esc_that_still_waits_does_not_undo_the_f9_behind_it(folder: Path) -> None:
    async with desk(Story().full(5), folder) as d:
        await at_once(d, "2")
        assert d.app.main.page == "2"
        d.app.post_message(key_of("escape"))
        d.app.commands.urgent.press(d.keys.at + 10.0, 0)  # taken by the thread that reads the keyboard
        await at_once(d)
        assert orders(d) == ["hold"]
        assert d.app.main.page == "", "it leaves the page"
        d.keys.at += 20.0
        await at_once(d, "escape")
        assert orders(d) == ["hold", "release"]
