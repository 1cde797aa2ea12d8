"""The console over a run whose words hold escapes, overrides and markup: nothing is obeyed, everything is drawn."""

from __future__ import annotations

import json
import os
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from ui_desk import OrderingApp, desk, typed
from ui_journals import RUN, Story

from uvcc_console.core import events as ev
from uvcc_console.core import paths
from uvcc_console.ui.actions.saved_screens import snapshot_json
from uvcc_console.ui.drawing.paint import literal
from uvcc_console.ui.home.home_app import HomeApp
from uvcc_console.ui.screens.confirm import ConfirmScreen

POISON = (
    "\x1b[31mevil\x1b]0;t\x07\x9b2J\x9d0;t\x9c\x08\x7f\x85\u202e\u2066\u200b\u2028\ufeff\r\n[red]b[/red][/][@click=app.bell]x[/]"
    "[link=http://e]y[/link][bold"
)
BAD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
KEPT = ("run", "job_kind", "phase", "engine_run", "state", "coord", "pod", "mode", "stage", "nonce", "split", "level")
KEPT += ("status", "root", "sid_job", "event")


def poisoned(value: Any, key: str = "") -> Any:
    if isinstance(value, str):
        return value if key in KEPT else value + POISON
    if isinstance(value, dict):
        return {k: poisoned(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [poisoned(v, key) for v in value]
    return value


class Poisoned(Story):
    """A story as a journal tells it whose writer did not clean what pods and providers said."""

    def write(self, folder: Path) -> Path:
        super().write(folder)
        db = sqlite3.connect(folder / "journal.sqlite", isolation_level=None)
        db.execute("DELETE FROM events")
        last, x = self.now, POISON
        more: list[ev.Event] = [
            ev.PodChanged(
                ts=last, pod=f"p9{POISON}", party=9, replica=0, provider=POISON, state="agent", address=POISON
            ),
            ev.LinkChanged(ts=last, pod="p0r0", path=POISON, up=False, detail=POISON),
            ev.HeartbeatRead(
                ts=last,
                pod="p0r0",
                coord="p0r0s0t0",
                record={"step": 41, "phase": x, "msg": x, x: x},
            ),
            ev.HeartbeatRead(
                ts=last, pod=POISON, coord=POISON, record={"step": 41, "phase": "train", "waiting_on": POISON}
            ),
            ev.EngineEvent(ts=last, pod=POISON, level=POISON, event=POISON, fields={POISON: POISON}),
            ev.LogLines(ts=last, pod=POISON, src=POISON, lines=[POISON]),
            ev.Alert(ts=last, level="error", name=POISON, text=POISON, hint=POISON, subject=POISON),
            ev.FlightRead(ts=last, folder=POISON, newest={POISON: POISON}, silent=[POISON], findings=[POISON]),
            ev.Metric(ts=last, coord="p0r0s0t0", step=41, values={POISON: 1.0, "loss": float("nan")}),
        ]
        for event in [*self.events, *more]:
            data = poisoned(ev.to_json(event)) if event in self.events else ev.to_json(event)
            row = (event.ts, "x", event.kind, json.dumps(data))
            db.execute("INSERT INTO events(ts, source, kind, data) VALUES (?,?,?,?)", row)
        db.close()
        return folder


def clean_screen(d: OrderingApp) -> str:
    shown = d.text
    assert [hex(ord(m.group())) for m in BAD.finditer(shown)] == []
    svg = d.app.export_screenshot()
    assert [hex(ord(m.group())) for m in BAD.finditer(svg)] == []
    assert "http://e" not in svg.replace("[link=http://e", "")
    return shown


@pytest.mark.parametrize(
    "state",
    [
        "full",
        pytest.param("hanging", marks=pytest.mark.ci(__file__)),
        *(pytest.param(s, marks=pytest.mark.ci(__file__)) for s in ("halted", "failed", "fork", "finished")),
    ],
)
async def test_every_page_draws_it_and_obeys_none_of_it(state: str, tmp_path: Path) -> None:
    story = Poisoned(replicas=2, steps=41)
    story = getattr(story.full(40), "hanging")() if state == "hanging" else getattr(story, state)()  # noqa: B009
    async with desk(story, tmp_path / RUN) as d:
        seen = ""
        for key in "12345670":
            await d.press(key)
            seen += clean_screen(d)
        assert "evil" in seen
        await d.press("1", "j", "j", "question_mark")
        clean_screen(d)
        await d.press("escape", "ctrl+p", *typed("halt"))
        clean_screen(d)


async def test_notes_and_questions_show_markup_as_it_is(tmp_path: Path) -> None:
    async with desk(Story().full(20), tmp_path / RUN) as d:
        d.append(ev.Alert(level="error", name="x", text="[red]evil[/red]\x1b[2J[/]", subject="p0"))
        await d.settle()
        d.app.say("a [/] b\x1b[2J\u202e [bold")
        d.app.push_screen(ConfirmScreen("t [/] [red]", ["do [/] it\x1b[2J [bold", "\\[x]"], "w[/]ord"))
        await d.settle()
        shown = clean_screen(d)
        for text in ("t [/] [red]", "do [/] it", "\\[x]", "w[/]ord"):
            assert text in shown
        assert "a [/] b" in d.toasts


async def test_the_start_screen_lists_what_cannot_be_read_and_shows_the_rest() -> None:
    Poisoned().full(20).write(paths.run_dir(RUN))
    broken = Path(os.environ["UVCC_HOME"]) / "runs" / "broken[red]"
    broken.mkdir(parents=True)
    (broken / "journal.sqlite").write_bytes(b"no database \x1b[2J" * 100)
    app = HomeApp(now=lambda: 1_795_300_000.0, look_s=3600, utc=True)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        await app.workers.wait_for_complete()
        await pilot.pause()
        strips = app.screen._compositor.render_strips()
        shown = "\n".join(s.text for s in strips)
        assert [hex(ord(m.group())) for m in BAD.finditer(shown)] == []
        assert "broken[red]" in shown
        assert "UNREADABLE" in shown
        assert RUN in shown
        await pilot.press("j", "enter")
        await pilot.pause()
        assert any("cannot be read" in n.message for n in app._notifications)
        assert app.is_running


async def test_malformed_lines_are_counted_on_the_fleet_panel(tmp_path: Path) -> None:
    async with desk(Story().full(20), tmp_path / RUN) as d:
        assert "malformed" not in d.text
        d.append(ev.LinesMalformed(where="p1r0", count=12, src="events.jsonl", sample="{half"))
        d.append(ev.LinesMalformed(where="p1r0", count=3, src="events.jsonl"))
        await d.settle()
        assert "malformed lines: 15" in d.text
        assert "malformed line (events.jsonl): {half" in d.text
        await d.press("1")
        clean_screen(d)
        assert json.loads(snapshot_json(d.app.snap))["malformed"] == {"p1r0": 15}


def test_a_label_is_its_text() -> None:
    from textual.content import Content

    for text in ("[red]", "[/]", "\\[x]", "a\\", "[@click=app.bell]x[/]", "[[", "]"):
        assert Content.from_markup(literal(text)).plain == text
