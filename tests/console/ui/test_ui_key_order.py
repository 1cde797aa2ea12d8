"""Keys act one after another, in the order in which they were typed, however many came in while the screen was busy.

Textual gives a letter to the line that has the focus at once, and looks for what Enter or an arrow means only when the
key has gone up through all the panels: of "half a name, Enter, the last letter" it entered the whole name.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from textual import events
from textual.command import CommandPalette
from textual.keys import _character_to_key
from textual.widgets import Input
from ui_desk import OrderingApp, desk
from ui_journals import RUN, Story

from uvcc_console.core import events as ev
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


async def at_once(d: OrderingApp, *keys: str) -> None:
    """All of them before the screen has its turn, pressed a second apart."""
    for key in keys:
        name = key if key in NAMED else _character_to_key(key)
        d.app.post_message(events.Key(name, NAMED.get(key, key)))
    await d.settle()
    while d.app.pending.keeping:
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


async def test_enter_in_the_palette_waits_for_what_was_looked_for(folder: Path) -> None:
    """Its first line is HALT until something was found."""
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
