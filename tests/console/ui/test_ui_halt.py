"""F9 wherever the keyboard is, what is pasted, and what happens when the run's own processes are gone."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from textual.widgets import Input
from ui_desk import FakeProcesses, desk, modes, typed
from ui_journals import RUN, Story

from uvcc_console.cli.screen import attach
from uvcc_console.core import events as ev
from uvcc_console.ui.feed.source import JournalWriter
from uvcc_console.ui.halting import uncover
from uvcc_console.ui.panels.halt_panel import HaltPanel
from uvcc_console.ui.screens.confirm import ConfirmScreen


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / RUN


# ---- F9


async def test_f9_holds_at_once_and_a_second_press_halts_with_the_same_nonce(folder: Path) -> None:
    async with desk(Story().full(5), folder) as d:
        await d.press("f9")
        assert [m for m, _ in modes(d)] == ["hold"]
        assert "Esc  releases" in d.text
        await d.press("f9")
        (hold, first), (halt, second) = modes(d)
        assert (hold, halt) == ("hold", "halt")
        assert first == second


async def test_a_key_from_before_the_first_picture_is_for_no_line_of_text(folder: Path) -> None:
    """The console ended with a traceback: no screen has the keyboard yet."""
    found: list[tuple[bool, bool | None]] = []
    async with desk(
        Story().full(5),
        folder,
        prepare=lambda app: found.append((app.in_a_line("n"), app.check_action("order", ("release",)))),
    ):
        assert found == [(False, False)]


async def test_a_key_that_repeats_is_no_second_press(folder: Path) -> None:
    async with desk(Story().full(5), folder) as d:
        await d.press("f9")
        d.keys.gap = 0.03
        await d.press("f9", "f9", "f9")
        assert [m for m, _ in modes(d)] == ["hold"]


async def test_a_key_held_down_never_commits(folder: Path) -> None:
    """The first repeat comes half a second after the press, so a commit waits until it is sure to be alone."""
    async with desk(Story().full(5), folder) as d:
        d.app.commands.urgent.repeat_wait = 3600.0
        await d.press("f9")
        await d.press("f9")
        assert d.app.commands.urgent.commit is not None
        d.keys.gap = 0.03
        await d.press("f9")
        assert d.app.commands.urgent.commit is None
        assert [m for m, _ in modes(d)] == ["hold"]


async def test_escape_releases_inside_three_seconds(folder: Path) -> None:
    async with desk(Story().full(5), folder) as d:
        await d.press("f9", "escape")
        assert [m for m, _ in modes(d)] == ["hold", "release"]
        assert len({n for _, n in modes(d)}) == 1


async def test_after_three_seconds_escape_no_longer_releases(folder: Path) -> None:
    async with desk(Story().full(5).halt("hold", acks=False), folder, after=4.0) as d:
        await d.press("escape")
        assert [m for m, _ in modes(d)] == ["hold"]


async def test_f9_in_a_text_field(folder: Path) -> None:
    async with desk(Story().full(5), folder) as d:
        await d.press("colon")
        assert isinstance(d.app.focused, Input)
        await d.press("f9")
        assert [m for m, _ in modes(d)] == ["hold"]


async def test_f9_in_a_modal_closes_it_so_that_the_halt_is_seen(folder: Path) -> None:
    async with desk(Story().full(5), folder) as d:
        await d.press("t")
        assert isinstance(d.app.screen, ConfirmScreen)
        await d.press("f9")
        assert [m for m, _ in modes(d)] == ["hold"]
        assert not isinstance(d.app.screen, ConfirmScreen)
        assert "0/3 held" in d.text
        await d.press("t")  # typed into what has just been closed
        assert not isinstance(d.app.screen, ConfirmScreen)
        await d.press("escape")
        assert [m for m, _ in modes(d)] == ["hold", "release"]


async def test_a_panel_that_comes_back_shows_nothing_of_the_halt_before(folder: Path) -> None:
    """Not even for the one frame in which it has no size yet."""
    story = Story().halted()
    async with desk(story, folder) as d:
        panel = d.app.main.query_one(HaltPanel)
        assert "3/3 verified" in "".join(text for text, _ in panel.lines[0])
        phase = {"phase": "full", "engine_run": f"{RUN}.full", "steps": 200, "sid_job": "ab" * 32}
        d.append(
            ev.StageChanged(ts=story.now, name="full", status="running"),
            ev.PhaseStarted(ts=story.now, attempt=1, **phase),  # type: ignore[arg-type]
        )
        await d.settle()
        assert not panel.display
        d.append(ev.HaltRequested(ts=story.now, nonce="bb11bb11", mode="hold", by="somebody else"))
        assert panel.display
        assert "verified" not in "".join(text for line in panel.lines for text, _ in line)
        assert "bb11bb11"[:6] in str(panel.border_subtitle)
        await d.settle()
        assert "0/3 held" in d.text


async def test_f9_with_the_palette_open(folder: Path) -> None:
    async with desk(Story().full(5), folder) as d:
        await d.press("ctrl+p")
        assert type(d.app.screen).__name__ == "CommandPalette"
        await d.press("f9")
        assert [m for m, _ in modes(d)] == ["hold"]
        assert "0/3 held" in d.text
        await d.press("ctrl+p")
        assert type(d.app.screen).__name__ != "CommandPalette"


@pytest.mark.parametrize("opening", [["ctrl+p"], ["colon", *"docs", "enter"], ["colon", *"theme", "enter"]])
async def test_what_a_halt_does_not_let_open_is_not_typed_into_the_run(folder: Path, opening: list[str]) -> None:
    """``q`` for the manual that did not come left the console; ``tear`` for the palette asked to tear down."""
    async with desk(Story().full(5), folder) as d:
        await d.press("f9")
        await d.press(*opening)
        assert "a halt is under way and would be covered" in d.toasts
        for key in "trq":
            await d.press(key)
        assert d.app.is_running
        assert len(d.app.screen_stack) == 1
        assert not d.asked(ev.Intent)
        assert "detach: ignored, a halt has closed what you typed into" in d.toasts


@pytest.mark.parametrize("key", ["ctrl+p", "t", "question_mark"])
async def test_an_esc_for_what_somebodys_hold_has_closed_does_not_release_it(folder: Path, key: str) -> None:
    story = Story().full(5)
    async with desk(story, folder) as d:
        await d.press(key)
        assert len(d.app.screen_stack) == 2
        d.append(ev.HaltRequested(ts=story.now, nonce="theirs", mode="hold", by="somebody else"))
        assert len(d.app.screen_stack) == 1
        await d.press("escape")
        assert modes(d) == [("hold", "theirs")]
        await d.settle()
        assert "once more releases the hold" in d.toasts
        await d.press("escape")
        assert modes(d) == [("hold", "theirs"), ("release", "theirs")]


@pytest.mark.parametrize("sign", ["colon", "slash"])
async def test_an_esc_within_a_line_of_text_leaves_somebodys_hold_alone(folder: Path, sign: str) -> None:
    story = Story().full(5)
    async with desk(story, folder) as d:
        await d.press(sign, "x")
        d.append(ev.HaltRequested(ts=story.now, nonce="theirs", mode="hold", by="somebody else"))
        await d.press("escape")
        assert modes(d) == [("hold", "theirs")]
        assert not isinstance(d.app.focused, Input)
        await d.press("escape")
        assert modes(d) == [("hold", "theirs"), ("release", "theirs")]


async def test_who_presses_f9_over_a_dialog_releases_with_the_first_esc(folder: Path) -> None:
    async with desk(Story().full(5), folder) as d:
        await d.press("ctrl+p")
        await d.press("f9")
        await d.press("escape")
        assert [m for m, _ in modes(d)] == ["hold", "release"]


def test_who_types_on_without_a_pause_is_not_heard_by_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uncover, "HUSH_S", 1.5)
    seen = uncover.Uncover(clock=lambda: 100.0)
    heard = []
    seen.gone()
    for at in (100.1, 101.4, 102.7, 104.1, 105.7, 105.8):
        seen.typed(at)
        heard.append(not seen.hushed)
    assert heard == [False, False, False, False, True, True]
    seen.gone()
    for step in range(200):  # a key that repeats all the time is not ignored for ever
        seen.typed(100.0 + 0.1 * step)
    assert not seen.hushed


@pytest.mark.parametrize("key", ["t", "question_mark", "ctrl+p"])
@pytest.mark.parametrize("size", [(80, 24), pytest.param((160, 50), marks=pytest.mark.ci(__file__))])
async def test_a_dialog_stands_beside_the_halt(folder: Path, size: tuple[int, int], key: str) -> None:
    async with desk(Story().halted(), folder, size=size) as d:
        await d.press(key)
        assert len(d.app.screen_stack) == 2
        assert "3/3 verified at step 40" in d.text
        assert d.text.count("@40") >= 6


async def test_read_only_still_halts_and_does_nothing_else(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with desk(Story().halted(), folder, readonly=True) as d:
        await d.press("r")
        assert not d.asked(ev.Intent)
        toasts = d.toasts
    flag = re.search(r"read-only: attach without (\S+)", toasts)
    with pytest.raises(SystemExit):
        attach.run(["--help"])
    assert flag
    assert f"{flag[1]} " in capsys.readouterr().out
    other = folder.with_name("other")
    async with desk(Story().full(5), other, readonly=True) as d:
        await d.press("f9")
        assert [m for m, _ in modes(d)] == ["hold"]


async def test_the_disk_refusing_is_said_loudly_with_the_way_around(folder: Path) -> None:
    async with desk(Story().full(5), folder) as d:
        (folder / "journal.sqlite").chmod(0o400)
        assert d.app.writer is not None
        d.app.writer = JournalWriter(folder / "missing" / "journal.sqlite", "test")
        await d.press("f9")
        assert "NOT DONE" in d.toasts
        assert f"uvcc halt {RUN}" in d.toasts


async def test_a_replay_cannot_be_halted(folder: Path) -> None:
    async with desk(Story().full(5), folder, replay=True) as d:
        await d.press("f9")
        assert "this is a recording" in d.toasts
        assert modes(d) == []


# ---- pastes


async def test_pasted_text_triggers_nothing(folder: Path) -> None:
    async with desk(Story().halted(), folder) as d:
        d.keys.gap = 0.001
        await d.press("y", "r", "t", "R", "q", "s")
        assert not d.asked(ev.Intent)
        assert d.app.is_running
        assert "pasted" in d.toasts


async def test_the_first_key_of_a_paste_waits_for_what_follows(folder: Path) -> None:
    async with desk(Story().halted(), folder) as d:
        d.app.commands.paste_wait = 0.03
        d.app.action_do("resume")
        d.app.cadence.note(d.keys.at + 0.001)
        d.app.cadence.note(d.keys.at + 0.002)
        await d.pilot.pause(0.06)
        await d.settle()
        assert not d.asked(ev.Intent)


async def test_a_pasted_name_is_not_entered_by_its_own_newline(folder: Path) -> None:
    async with desk(Story().halted(), folder) as d:
        await d.press("t")
        d.keys.gap = 0.001
        await d.press(*typed(RUN), "enter")
        assert not d.asked(ev.Intent)
        assert isinstance(d.app.screen, ConfirmScreen)
        d.keys.gap = 1.0
        await d.press("enter")
        assert [e.action for e in d.asked(ev.Intent)] == ["teardown"]


# ---- when the run's own processes are gone


async def test_a_halt_starts_the_sidecar_when_it_is_gone(folder: Path) -> None:
    processes = FakeProcesses()
    processes.living.clear()
    async with desk(Story().full(5), folder, processes=processes) as d:
        await d.press("f9")
        assert [m for m, _ in modes(d)] == ["hold"]
        assert processes.started == [("haltd",)]
        assert "started" in d.toasts


async def test_a_run_without_conductor_says_so_and_r_takes_it_up(folder: Path) -> None:
    processes = FakeProcesses()
    async with desk(Story().full(5), folder, after=9.0, processes=processes) as d:
        d.app.check_processes()
        await d.settle()
        assert "NOBODY CONDUCTS" not in d.text
        for left, told in (({"haltd"}, "its sidecar ends it soon"), (set(), "its pods go on until their lease ends")):
            processes.living = left
            d.app.check_processes()
            d.app.redraw()
            await d.settle()
            assert f"NOBODY CONDUCTS THIS RUN: {told}" in d.text
        await d.press("r")
        seq = d.app.snap.seq
        assert processes.started == [("conductor", "--adopt", "resume", "--since", str(seq))]


@pytest.mark.parametrize("size", [(160, 50), (80, 24)])
async def test_of_a_run_without_conductor_it_is_told_how_long_its_sidecar_waits(
    folder: Path, size: tuple[int, int]
) -> None:
    processes = FakeProcesses()
    story = Story().full(5)
    story.events[0] = replace(story.events[0], profile={"limits": {"wait": 900.0}})
    async with desk(story, folder, size=size, after=9.0, processes=processes) as d:
        processes.living = {"haltd"}
        d.app.check_processes()
        d.app.redraw()
        await d.settle()
        assert "NOBODY CONDUCTS THIS RUN: its sidecar ends it after 15 m 00 s" in d.text
        died = ev.Alert(ts=d.app.now() - 61.0, level="error", name="conductor", text="the conductor has died")
        d.append(died)
        await d.settle()
        assert "NOBODY CONDUCTS THIS RUN: its sidecar ends it in 13 m 59 s" in d.text


async def test_what_halted_is_halted_though_nobody_conducts(folder: Path) -> None:
    """It said "halted 0/3" beside a halt that all three had proved: nobody had read how the workers ended."""
    processes = FakeProcesses()
    async with desk(Story().full(5), folder, after=12.0, processes=processes) as d:
        processes.living = {"haltd"}
        d.app.check_processes()
        d.append(ev.HaltRequested(nonce="n", mode="halt", by="me"))
        for pod, stage in (("p0r0", "gone"), ("p1r0", "halted"), ("p2r0", "gone")):
            d.append(ev.HaltAck(nonce="n", pod=pod, stage=stage, step=4, path="agent"))
        d.append(ev.HaltDone(nonce="n", mode="halt", verified=3, total=3, step=4, seconds=1.0))
        d.app.tick()
        d.app.redraw()
        await d.settle()
        assert "halted 3/3" in d.text
        assert "late" not in d.text
        assert "silent" not in d.text


async def test_an_ended_run_offers_nothing_that_cannot_be_done(folder: Path) -> None:
    async with desk(Story().gave_up(), folder) as d:
        await d.press("r", "t", "x", "f9")
        assert not d.asked(ev.Intent)
        assert modes(d) == []
        assert "has ended" in d.toasts


@pytest.mark.parametrize("size", [(80, 24), (60, 18)])
async def test_what_is_typed_into_a_question_and_what_is_said_of_it_stand_on_a_small_screen(
    folder: Path, size: tuple[int, int]
) -> None:
    """Beside a halt only the list of pods had room: neither the word that was typed could be seen, nor that it was
    wrong."""
    async with desk(Story(replicas=4).halted(), folder, size=size) as d:
        await d.press("t")
        assert isinstance(d.app.screen, ConfirmScreen)
        assert "This deletes 12 pods" in d.text
        assert "press Enter" in d.text
        await d.press(*"wrong", "enter")
        assert "wrong" in d.text.split("press Enter")[1]
        assert "that is not it; nothing was done" in d.text
