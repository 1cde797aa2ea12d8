"""What may not stand between a key and its order: garbage collection, floods of pasted keys, storms of resizes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from textual import events
from textual.geometry import Size
from ui_desk import desk
from ui_journals import RUN, Story

from uvcc_console.ui.app_base import STORM, STORM_EVERY_S, Resizes
from uvcc_console.ui.halting.keyboard import FLOOD, RawKeys
from uvcc_console.ui.halting.pauses import NEVER, PATIENCE, Pauses, orders_first


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / RUN


@pytest.fixture
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


class Memory:
    def __init__(self) -> None:
        self.now, self.blocks, self.collected = 100.0, 1_000, 0

    def collect(self) -> int:
        self.collected += 1
        return 0

    def pauses(self) -> Pauses:
        return Pauses(lambda: self.now, lambda: self.blocks, self.collect)


def test_long_collections_wait_for_a_calm_moment_and_for_a_hold_to_be_over(thawed: None) -> None:
    m = Memory()
    pauses = m.pauses()
    assert pauses.look(0.0, True)  # with the first picture
    assert not pauses.look(0.0, True)  # nothing has grown
    for blocks, calm in PATIENCE:
        m.blocks += blocks
        if calm:
            assert not pauses.look(m.now - calm + 0.01, True)
        assert not pauses.look(m.now - calm, False)
        assert pauses.look(m.now - calm, True)
        assert not pauses.look(0.0, True)
    assert m.collected == 1 + len(PATIENCE)


def test_the_interpreter_is_as_it_was_when_the_run_leaves_the_screen() -> None:
    before = sys.getswitchinterval(), gc.get_threshold(), gc.get_freeze_count()
    with orders_first() as pauses:
        assert gc.get_threshold()[2] == NEVER
        pauses.look(0.0, True)
        assert gc.get_freeze_count() > 0
    assert (sys.getswitchinterval(), gc.get_threshold(), gc.get_freeze_count()) == before


def raw(takes: bool, told: list[int], noted: list[int]) -> RawKeys:
    return RawKeys(
        lambda at, n: noted.append(n), lambda at: True, lambda: False, takes_text=lambda: takes, ignored=told.append
    )


def test_a_flood_of_pasted_keys_ends_where_nothing_takes_text_and_f9_in_it_is_found() -> None:
    told: list[int] = []
    noted: list[int] = []
    keys = raw(False, told, noted)
    text = b"x" * FLOOD
    assert keys.take(text + b"\x1b[<35;10;5M" + b"\x1b[20~", 100.0) == [b"\x1b[<35;10;5M"]  # the mouse passes
    assert sum(noted) == FLOOD + 1
    assert told == [FLOOD]
    assert keys.take(b"tail of it", 100.01) == []
    assert keys.take(b"q", 101.0) == [b"q"]  # a key of its own, later


def test_what_takes_text_gets_it_and_few_keys_pass_anyway() -> None:
    told: list[int] = []
    assert raw(True, told, []).take(b"x" * 500, 100.0) == [b"x" * 500]
    slow_line = b"/" + b"party=1 loss>3"
    assert raw(False, told, []).take(slow_line, 100.0) == [slow_line]
    bracketed = b"\x1b[200~" + b"x" * 500 + b"\x1b[201~"
    assert raw(False, told, []).take(bracketed, 100.0) == [bracketed]
    assert not told


async def test_text_goes_to_a_prompt_and_nowhere_else(folder: Path) -> None:
    async with desk(Story().full(3), folder) as d:
        assert not d.app.takes_text()
        await d.press("slash")
        assert d.app.takes_text()


def test_a_storm_is_told_from_a_few_resizes() -> None:
    seen = Resizes()
    assert [seen.at_once(10.0 + 0.01 * i) for i in range(STORM)] == [True] * STORM
    assert not seen.at_once(10.05)
    assert seen.at_once(10.05 + STORM_EVERY_S)  # it is not put off for ever
    assert seen.at_once(20.0)


async def test_after_a_storm_the_screen_has_the_newest_size(folder: Path) -> None:
    async with desk(Story().full(3), folder, size=(100, 40)) as d:
        for i in range(30):
            size = Size(100 + i, 40)
            d.app.post_message(events.Resize(size, size))
        while d.app.main.size.width != 129:  # the newest one comes a moment later
            await d.pilot.pause(0.02)
        assert d.app.main.size == Size(129, 40)
