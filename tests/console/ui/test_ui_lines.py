"""What is typed: history, completion, themes; and moments of a recording by their names."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.widgets import Input
from ui_desk import desk, typed
from ui_journals import RUN, T0, Story

from uvcc_console.core import events as ev
from uvcc_console.ui.feed.moments import moment
from uvcc_console.ui.feed.source import ReplaySource
from uvcc_console.ui.widgets.typed_lines import TypedLines, completed
from uvcc_engine.contract.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / RUN


def test_completion_goes_as_far_as_is_certain() -> None:
    assert completed("comp", ["compare", "columns", "command"]) == ("compare ", ["compare"])
    assert completed("co", ["compare", "columns", "command"]) == ("co", ["compare", "columns", "command"])
    assert completed("com", ["compare", "command"])[0] == "com"
    assert completed("columns pod s", ["step", "state", "pod"]) == ("columns pod st", ["step", "state"])
    assert completed("level", ["level>="]) == ("level>=", ["level>="])
    assert completed("x", ["a"]) == ("x", [])


def test_history_goes_back_and_forth_and_keeps_what_was_being_typed() -> None:
    h = TypedLines(["a", "b"])
    assert [h.move(-1, "new"), h.move(-1, ""), h.move(-1, "")] == ["b", "a", "a"]
    assert [h.move(1, ""), h.move(1, ""), h.move(1, "new")] == ["b", "new", "new"]
    h.add("a")
    assert [h.move(-1, ""), h.move(-1, "")] == ["a", "b"]


async def test_tab_completes_and_up_brings_the_last_line_back(folder: Path) -> None:
    async with desk(Story().full(5), folder) as d:
        await d.press("colon", *"led", "tab")
        assert d.app.main.query_one("#line", Input).value == "ledger "
        await d.press("enter")
        assert d.app.main.page == "5"
        await d.press("colon", "up")
        assert d.app.main.query_one("#line", Input).value == "ledger "
        await d.press("escape", "colon", *typed("pod p"), "tab")
        assert "p0r0 p1r0 p2r0" in d.text
        await d.press("escape", "slash", *"lev", "tab")
        assert d.app.main.query_one("#line", Input).value == "level>="
        await d.press("escape", "colon", *typed("theme nord"), "enter")
        assert d.app.theme == "nord"
        await d.press("colon", *typed("theme nrod"), "enter")
        assert "there are" in d.toasts


def test_moments_are_found_by_time_share_step_event_and_what_happened() -> None:
    story = Story().halted()
    recorded = list(enumerate(story.events, 1))
    end = story.now

    def at(text: str) -> float:
        return moment(text, recorded, T0, end, T0 + 5, utc=True)

    assert at("01:15:03") == T0 + 3
    assert at("01:16") == T0 + 60
    assert at("50%") == pytest.approx((T0 + end) / 2)
    assert at("-2") == T0 + 3
    assert (at("start"), at("end")) == (T0, end)
    asked = next(e.ts for e in story.events if isinstance(e, ev.HaltRequested) and not e.drill)
    assert at("halt") == asked
    first = next(e.ts for e in story.events if isinstance(e, ev.HeartbeatRead) and e.record["step"] >= 20)
    assert at("step 20") == first
    assert at("event 7") == story.events[6].ts
    for wrong in ("", "25:00:00", "step x", "yesterday", "fork", "%", "step 99999999999999"):
        with pytest.raises(ConfigError):
            at(wrong)


@pytest.mark.ci(__file__)
async def test_a_replay_goes_to_moments_and_marks_and_gives_no_past_advice(folder: Path) -> None:
    async with desk(Story().failed(), folder, replay=True) as d:
        source = d.app.source
        assert isinstance(source, ReplaySource)
        await d.press("p", "colon", *typed("goto failed"), "enter")
        assert "FAILED" in d.text
        assert "R retries" not in d.text
        assert "r resumes" not in d.text
        assert "t tear down" not in d.text
        assert "{ } marks" in d.text
        assert "? help" in d.text
        here = source.now()
        await d.press("left_curly_bracket")
        before = source.now()
        assert before < here
        await d.press("right_curly_bracket")
        assert before < source.now() <= here
        await d.press("colon", *typed("goto nowhere"), "enter")
        assert "no moment" in d.toasts


async def test_neither_log_nor_notices_nor_pages_of_a_replay_advise_what_could_have_been_done(folder: Path) -> None:
    advice = "F9; then uvcc resume RUN goes back", "raise the limit (uvcc plan)", "a stack dump may show it"
    story = Story().failed()
    for k, hint in enumerate(advice):
        alert = ev.Alert(level="error", name=f"alert{k}", text=f"trouble {k}", hint=hint, subject="p0r0")
        story.add(alert, 4.0)
    story.add(ev.StageChanged(name="full", status="failed", detail="it broke (retry with: uvcc resume r)"), 8.0)
    async with desk(story, folder, replay=True) as d:
        source = d.app.source
        assert isinstance(source, ReplaySource)
        seen = toasts = ""
        for back in (15.0, 11.0, 7.0, 0.0):
            source.seek(source.end - back)
            await d.settle()
            seen, toasts = seen + d.text + d.toasts, toasts + d.toasts
        for page in ("3", "6"):
            await d.press(page)
            seen += d.text
        assert all(f"trouble {k}" in toasts for k in range(3))
        assert "trouble 2" in seen
        assert "it broke" in seen
        assert not any(word in seen for word in ("goes back", "raise the limit", "stack dump", "uvcc resume"))
