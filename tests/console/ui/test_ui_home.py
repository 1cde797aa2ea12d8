"""The start screen and the way from a profile to a rollout."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
import tarfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from textual import events
from textual.command import CommandPalette
from textual.message import Message
from textual.pilot import Pilot
from textual.widgets import Input
from ui_desk import Keyboard, typed
from ui_journals import RUN, T0, Story

from uvcc_console.cli.main import main
from uvcc_console.core import events as ev
from uvcc_console.core import paths
from uvcc_console.fleet import provider_kinds
from uvcc_console.fleet.cloud.intents import Intents
from uvcc_console.fleet.procs import identify
from uvcc_console.fleet.provider import PodRequest, Quote, QuoteLine
from uvcc_console.plan.plan import make_plan
from uvcc_console.plan.profile import parse
from uvcc_console.runs import keeping
from uvcc_console.ui.drawing.glyphs import UNICODE
from uvcc_console.ui.drawing.paint import plain
from uvcc_console.ui.feed import home_model, kept_layout
from uvcc_console.ui.feed.home_model import Draft, draft_lines
from uvcc_console.ui.home.home_app import HomeApp, RunChoice
from uvcc_console.ui.panels.home import AboutPanel, ProfilesPanel, RunsPanel, fields_of
from uvcc_console.ui.panels.plan_fields import FieldsPanel, flat
from uvcc_console.ui.screens.confirm import ConfirmScreen
from uvcc_console.ui.screens.wizard import PlanPanel, WizardFooter, WizardScreen
from uvcc_engine.contract.errors import UvccError


def text_of(app: HomeApp) -> str:
    return "\n".join(strip.text for strip in app.screen._compositor.render_strips())


def conducted(folder: Path, by: str = "conductor") -> None:
    """Let this very test process pass for the run's conductor."""
    me = identify(os.getpid())
    assert me is not None
    (folder / f"{by}.json").write_text(json.dumps({"pid": me.pid, "starttime": me.starttime}))


@asynccontextmanager
async def home(size: tuple[int, int] = (160, 50)) -> AsyncIterator[tuple[HomeApp, Pilot[RunChoice | None]]]:
    app = HomeApp(now=lambda: T0 + 600, look_s=3600, utc=True, key_time=Keyboard())
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        await app.workers.wait_for_complete()
        await pilot.pause()
        yield app, pilot


async def settle(app: HomeApp, pilot: Pilot[RunChoice | None]) -> None:
    await pilot.pause()
    await app.workers.wait_for_complete()
    await pilot.pause()


async def test_no_key_is_on_its_way_through_the_panels_while_the_one_before_ends_the_screen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What such a key bubbles to may be gone by the time it gets there; here it waits for the next screen."""
    Story(steps=5).finished().write(paths.run_dir(RUN))
    given: list[str] = []
    post = RunsPanel.post_message

    def posted(self: RunsPanel, message: Message) -> bool:
        given.extend([message.key] if isinstance(message, events.Key) else [])
        return post(self, message)

    monkeypatch.setattr(RunsPanel, "post_message", posted)
    async with home() as (app, pilot):
        for key in ("enter", "slash", "w"):
            app.post_message(events.Key(key, None))
        await settle(app, pilot)
    assert given == ["enter"]
    assert app.return_value is not None
    assert [key.key for key in app.pending.take()] == ["slash", "w"]


async def test_without_runs_it_says_what_to_do() -> None:
    async with home() as (app, _):
        assert "no runs yet" in text_of(app)
        assert "demo" in {name for name, _ in app.screen.query_one(ProfilesPanel).profiles}


@pytest.mark.parametrize("size", [(160, 50), (80, 24)])
async def test_where_all_runs_were_packed_away_it_says_how_to_bring_one_back(size: tuple[int, int]) -> None:
    Story(steps=5).finished().write(paths.run_dir(RUN))
    keeping.archive(paths.run_dir(RUN))
    async with home(size) as (app, _):
        assert "no runs here, 1 packed away: uvcc runs --unpack brings one back" in text_of(app)


@pytest.mark.parametrize("size", [(160, 50), (80, 24)])
async def test_runs_are_listed_with_their_state(size: tuple[int, int]) -> None:
    Story(steps=5).finished().write(paths.run_dir(RUN))
    live = Story(seed=8).full(5).write(paths.run_dir("other-20261121-0116-cd34"))
    conducted(live)
    async with home(size) as (app, _):
        shown = text_of(app)
        assert "✓ VERIFIED" in shown
        assert f"2 {app.glyphs.dot} 1 live" in shown
        runs = {r.run_dir.name: r for r in app.screen.query_one(RunsPanel).runs}
        assert runs[RUN].snap.step == 5
        assert runs["other-20261121-0116-cd34"].live


async def test_a_copied_folder_is_listed_by_the_name_that_commands_find_it_by(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Story(steps=5).finished().write(paths.run_dir(RUN))
    shutil.copytree(folder, paths.run_dir("copy-of-it"))
    assert main(["runs", "--json"]) == 0
    assert {found["run"] for found in json.loads(capsys.readouterr().out)} == {RUN, "copy-of-it"}
    async with home() as (app, _):
        assert {run.snap.run for run in app.screen.query_one(RunsPanel).runs} == {RUN, "copy-of-it"}


async def test_a_run_without_conductor_is_not_called_running() -> None:
    Story().full(5).write(paths.run_dir(RUN))
    async with home() as (app, _):
        assert "UNCONDUCTED" in text_of(app)


async def test_a_run_that_was_just_made_waits_for_its_conductor_and_is_not_called_unconducted() -> None:
    Story(now=time.time() + 3600).planned().write(paths.run_dir(RUN))
    async with home() as (app, _):
        assert "UNCONDUCTED" not in text_of(app)
        assert "1 live" in text_of(app)
    shutil.rmtree(paths.run_dir(RUN))
    Story(now=time.time() - 3600).planned().write(paths.run_dir(RUN))
    async with home() as (app, _):
        assert "UNCONDUCTED" in text_of(app), "nobody has come up"


async def test_in_a_domains_console_its_own_sidecar_counts_as_who_conducts() -> None:
    folder = Story().full(5).write(paths.run_dir(RUN))
    (folder / paths.DOMAIN).write_text("{}")
    conducted(folder, "haltd")
    async with home() as (app, _):
        assert "UNCONDUCTED" not in text_of(app)


async def test_enter_opens_and_p_plays_back() -> None:
    folder = Story(steps=5).finished().write(paths.run_dir(RUN))
    for key, wanted in (("enter", RunChoice(folder)), ("p", RunChoice(folder, replay=True))):
        async with home() as (app, pilot):
            await pilot.press(key)
            await pilot.pause()
        assert app.return_value == wanted


async def test_f9_opens_the_live_run_and_holds_it() -> None:
    Story(steps=5).finished().write(paths.run_dir(RUN))
    folder = Story().full(5).write(paths.run_dir("live-20261121-0117-ef56"))
    async with home() as (app, pilot):
        await pilot.press("f9")
        assert app.return_value is None
        conducted(folder)
        app.look()
        await pilot.press("f9")
        await pilot.pause()
    assert app.return_value == RunChoice(folder, hold=True)


async def test_a_finished_run_is_read_once_and_a_growing_one_again() -> None:
    folder = Story().full(5).write(paths.run_dir(RUN))
    first = home_model.summarise(folder)
    assert first is not None
    assert home_model.summarise(folder, first) is first
    (folder / "broken").mkdir()
    assert home_model.summarise(folder / "broken") is None


async def test_a_profile_shows_its_plan_and_starts_nothing_by_itself() -> None:
    async with home() as (app, pilot):
        await pilot.press("n")
        await settle(app, pilot)
        assert isinstance(app.screen.query_one(AboutPanel).subject, home_model.Draft)
        await pilot.press("enter")
        await settle(app, pilot)
        assert isinstance(app.screen, WizardScreen)
        shown = text_of(app)
        assert "verify-full" in shown
        assert "$0.00/h for 3 pods" in shown
        await pilot.press("escape")
        await settle(app, pilot)
    assert not list(paths.runs_dir().glob("*"))


async def test_settings_change_the_plan_and_errors_name_the_key() -> None:
    async with home() as (app, pilot):
        app.push_screen(WizardScreen("demo"))
        await settle(app, pilot)
        screen = app.screen
        assert isinstance(screen, WizardScreen)
        await pilot.press("e", *typed("topology.replicas=2"), "enter")
        await settle(app, pilot)
        assert screen.plan.plan is not None
        assert len(screen.plan.plan.requests) == 6
        await pilot.press("e", *typed("job.stepz=9"), "enter")
        await settle(app, pilot)
        assert "job.stepz" in screen.plan.error
        assert "job.steps" in screen.plan.error
        await pilot.press("u")
        await settle(app, pilot)
        assert not screen.plan.error
        assert screen.plan.settings == ("topology.replicas=2",)


async def test_a_free_profile_starts_with_one_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[home_model.Draft] = []
    monkeypatch.setattr(home_model, "start", lambda draft: started.append(draft) or tmp_path)
    async with home() as (app, pilot):
        await pilot.press("n")
        await settle(app, pilot)
        await pilot.press("enter")
        await settle(app, pilot)
        await pilot.press("s")
        await settle(app, pilot)
    assert [d.profile for d in started] == ["demo"]
    assert app.return_value == RunChoice(tmp_path)


@pytest.mark.ci(__file__)
async def test_the_wizard_of_a_language_model_has_ranks_and_no_parties() -> None:
    async with home() as (app, pilot):
        app.push_screen(WizardScreen("local-lm-smoke"))
        await settle(app, pilot)
        assert isinstance(app.screen, WizardScreen)
        shown = "\n".join(plain(line) for line in app.screen.query_one(PlanPanel).lines)
        assert "2 ranks on one pod" in shown
        assert not re.search(r"\b(part(y|ies)|domains?|ledger|reveals|relay|root|link)\b", shown)
        fields = app.screen.query_one(FieldsPanel).fields
        assert "job.ranks" in fields
        of_parties = ("topology", "link", "nats", "consent", "gates.verifier", "gates.result_hashes", "job.reveal")
        assert not [name for name in fields if name.startswith(of_parties)]
        await pilot.press("e", *typed("link=direct"), "enter")
        await settle(app, pilot)
        assert app.screen.query_one(FieldsPanel).fields["link"] == "direct", "what was typed is never hidden"


async def test_the_price_is_the_providers_own_word_and_one_without_a_price_cannot_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    class Market:
        async def quote(self, requests: list[PodRequest]) -> Quote:
            asked.append(len(requests))
            if len(asked) == 1:
                raise UvccError("the market refuses the key", "set PRIME_API_KEY")
            return Quote(lines=tuple(QuoteLine(r, "prime", "eu", 2.5) for r in requests), at=0.0, wallet=40.0)

        async def close(self) -> None:
            asked.append(-1)

    monkeypatch.setattr(provider_kinds, "provider_for", lambda fleet, scratch: Market())
    async with home() as (app, pilot):
        app.push_screen(WizardScreen("demo"))
        await settle(app, pilot)
        assert "none: see below" in text_of(app)
        assert "the market refuses the key" in text_of(app)
        await pilot.press("s")
        assert isinstance(app.screen, WizardScreen)
        await pilot.press("e", *typed("job.steps=61"), "enter")
        await settle(app, pilot)
        assert "$7.50/h for 3 pods, wallet $40.00" in text_of(app)
    assert asked == [3, -1, 3, -1], "asked anew after each change"


async def test_a_click_moves_the_cursor_and_a_second_one_opens() -> None:
    Story(steps=5).finished().write(paths.run_dir(RUN))
    async with home((80, 24)) as (app, pilot):
        lines = text_of(app).splitlines()
        row = next(i for i, line in enumerate(lines) if "inventory-example" in line)
        for _ in range(2):
            await pilot.click(offset=(8, row))
            await settle(app, pilot)
        assert isinstance(app.screen, WizardScreen)
        await pilot.press("escape")
        row = next(i for i, line in enumerate(lines) if RUN in line)
        await pilot.click(offset=(8, row))
        await pilot.click(offset=(8, row))
        await settle(app, pilot)
    assert app.return_value == RunChoice(paths.run_dir(RUN))


async def test_where_money_is_spent_the_profiles_name_is_typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[home_model.Draft] = []
    monkeypatch.setattr(home_model, "start", lambda draft: started.append(draft) or tmp_path)
    monkeypatch.setattr(home_model.Draft, "free", property(lambda self: False))
    async with home() as (app, pilot):
        app.push_screen(WizardScreen("demo"))
        await settle(app, pilot)
        await pilot.press("s")
        await settle(app, pilot)
        assert isinstance(app.screen, ConfirmScreen)
        await pilot.press(*typed("yes"), "enter")
        assert not started
        app.screen.query_one(Input).value = "demo"
        await pilot.press("enter")
        await settle(app, pilot)
    assert len(started) == 1


# ---- search, compare, archive, delete


def three_runs() -> None:
    for name, story in (
        (RUN, Story(steps=30).finished()),
        ("failed-20261121-0116-cd34", Story().gave_up()),
        ("live-20261121-0117-ef56", Story(price=2.0, provider="prime").full(10)),
    ):
        story.write(paths.runs_dir() / name)


async def test_runs_are_searched_by_words_and_figures_and_sorted() -> None:
    three_runs()
    async with home() as (app, pilot):
        runs = app.screen.query_one(RunsPanel)
        await pilot.press("slash", *typed("status=failed"))
        assert [r.run_dir.name for r in runs.runs] == ["failed-20261121-0116-cd34"]
        assert "1 of 3" in text_of(app)
        await pilot.press("escape", "slash", *typed("status=f"), "tab")
        assert app.screen.query_one("#line", Input).value == "status=failed "
        await pilot.press("escape", "slash", *typed("nosuch"), "enter")
        assert "no run matches /nosuch" in text_of(app)
        await pilot.press("escape", "slash", *typed("step>20"), "enter")
        assert {r.run_dir.name for r in runs.runs} == {RUN, "failed-20261121-0116-cd34"}
        await pilot.press("escape", "o", "o", "o")
        assert runs.sort == "spent"
        assert runs.runs[0].run_dir.name.startswith("live")


async def test_a_run_is_held_beside_the_one_under_the_cursor() -> None:
    three_runs()
    async with home() as (app, pilot):
        await pilot.press("c", "j")
        await settle(app, pilot)
        text = text_of(app)
        assert "held beside" in text
        assert "status" in text
        assert re.search(r"step +\d+ +\d+ ", text), "steps are whole"
        assert " on this disk" not in text  # that is of one run
        shutil.rmtree(paths.runs_dir() / RUN)
        app.screen.query_one(RunsPanel).beside = RUN
        app.look()
        await settle(app, pilot)
        assert "held beside" not in text_of(app)
        assert " kB on this disk" in text_of(app)


async def test_a_theme_that_is_not_there_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UVCC_THEME", "nosuch")
    async with home() as (app, pilot):
        await settle(app, pilot)
        told = [note.message for note in app._notifications if "nosuch" in note.message]
    assert told == ["there is no theme 'nosuch': :theme lists those that there are"]


async def test_help_themes_and_what_a_read_only_start_screen_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    three_runs()
    app = HomeApp(now=lambda: T0 + 600, look_s=3600, utc=True, key_time=Keyboard(), keeps_layout=True)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(app, pilot)
        await pilot.press("question_mark")
        assert "A packs one away" in " ".join(text_of(app).split())
        await pilot.press("escape", "T")
        assert isinstance(app.screen, CommandPalette)
        await pilot.press("escape")
        app.theme = "nord"
        await pilot.press("q")
    assert kept_layout.load().theme == "nord"
    app = HomeApp(now=lambda: T0 + 600, look_s=3600, key_time=Keyboard(), keeps_layout=True, readonly=True)
    async with app.run_test(size=(160, 50)) as pilot:
        await settle(app, pilot)
        assert app.theme == "nord"
        shown = text_of(app)
        assert "archive" not in shown
        app.screen.query_one(RunsPanel).current = RUN
        for key in ("X", "n"):
            await pilot.press(key)
        await pilot.press("enter")
        assert len(app.screen_stack) == 1
        said = {n.message for n in app._notifications}
        assert said == {f"{what}: read-only: start uvcc without --read-only" for what in ("delete", "new run")}
        app.theme = "dracula"
        await pilot.press("q")
    assert kept_layout.load().theme == "nord"


async def test_a_run_that_ended_is_deleted_or_packed_after_its_name_was_typed_and_a_live_one_never(
    capsys: pytest.CaptureFixture[str],
) -> None:
    three_runs()
    async with home() as (app, pilot):
        runs = app.screen.query_one(RunsPanel)
        runs.current = "live-20261121-0117-ef56"
        await pilot.press("X")
        await settle(app, pilot)
        assert not isinstance(app.screen, ConfirmScreen)
        for key, name in (("X", "failed-20261121-0116-cd34"), ("A", RUN)):
            runs.current = name
            await pilot.press(key)
            await settle(app, pilot)
            assert isinstance(app.screen, ConfirmScreen)
            app.screen.query_one(Input).value = name
            await pilot.press("enter")
            await settle(app, pilot)
            assert not (paths.runs_dir() / name).exists()
        packed = paths.data_dir() / "archive" / f"{RUN}.tar.gz"
        with tarfile.open(packed) as found:
            assert f"{RUN}/journal.sqlite" in found.getnames()
        assert [p.name for p in paths.runs_dir().iterdir()] == ["live-20261121-0117-ef56"]
    assert main(["runs", "--archived"]) == 0
    assert main(["runs", "--unpack", RUN[:-4]]) == 0  # the beginning, as of every run
    assert (paths.run_dir(RUN) / "journal.sqlite").is_file()
    assert not packed.exists()
    assert main(["runs", "--unpack", RUN]) == 1  # nothing of that name is packed any more
    assert main(["runs", "--archive", "live-20261121-0117-ef56"]) == 1
    assert main(["runs", "--archive", RUN]) == 0
    with tarfile.open(paths.data_dir() / "archive" / "evil.tar.gz", "w:gz") as evil:
        member = tarfile.TarInfo("../../elsewhere")
        evil.addfile(member)
    assert main(["runs", "--unpack", "evil"]) == 2
    assert not (paths.data_dir() / "elsewhere").exists()
    assert {p.name for p in paths.runs_dir().iterdir()} == {"live-20261121-0117-ef56"}
    said = capsys.readouterr()
    assert f" kB  {RUN}" in said.out
    assert "not proven gone" in said.err


def test_runs_are_deleted_by_a_verb_once_their_names_were_typed_and_all_or_none_may_go(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    three_runs()
    failed, live = "failed-20261121-0116-cd34", "live-20261121-0117-ef56"

    def left() -> set[str]:
        return {p.name for p in paths.runs_dir().iterdir()}

    def typed(text: str) -> None:
        there = io.StringIO(text)
        monkeypatch.setattr(there, "isatty", lambda: True, raising=False)
        monkeypatch.setattr(sys, "stdin", there)

    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{failed}\n"))
    assert main(["runs", "--delete", failed]) == 2  # nobody sits there
    assert main(["runs", "--delete", "failed", "--yes"]) == 2  # not the whole name
    assert main(["runs", "--yes"]) == 2
    assert main(["runs", "--delete", failed, live, "--yes"]) == 1
    assert "live-20261121-0117-ef56 cannot be deleted" in capsys.readouterr().err
    assert left() == {RUN, failed, live}

    typed("failed\n")
    assert main(["runs", "--delete", "failed"]) == 1
    assert f"{failed} stays" in capsys.readouterr().err
    Intents.of(paths.run_dir(RUN)).note(1.0, name=f"uvcc-{RUN}-p0r0", offer={})
    typed(f"{RUN}\n")
    assert main(["runs", "--delete", RUN]) == 1
    assert "may still be there and cost money" in capsys.readouterr().err
    Intents.of(paths.run_dir(RUN)).note(2.0, name=f"uvcc-{RUN}-p0r0", absent="never made")
    assert left() == {RUN, failed, live}

    typed(f"{failed}\nnot this\n")
    assert main(["runs", "--delete", "failed", RUN]) == 1
    said = capsys.readouterr()
    assert left() == {RUN, live}
    assert f"{failed} is deleted, " in said.out
    assert f"{failed}, " in said.err
    assert "kB: its journal" in said.err
    assert main(["runs", "--delete", RUN, "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["run"] == RUN
    assert left() == {live}


# ---- settings as fields, profiles of one's own


@pytest.mark.ci(__file__)
async def test_enter_on_a_setting_changes_it_and_tab_completes_its_key() -> None:
    async with home() as (app, pilot):
        app.push_screen(WizardScreen("demo"))
        await settle(app, pilot)
        screen = app.screen
        assert isinstance(screen, WizardScreen)
        fields = screen.query_one(FieldsPanel)
        assert fields.fields["topology.replicas"] == "1"
        fields.current = "topology.replicas"
        await pilot.press("enter")
        assert screen.query_one("#line", Input).value == "topology.replicas=1"
        await pilot.press("backspace", "2", "enter")
        await settle(app, pilot)
        assert screen.plan.settings == ("topology.replicas=2",)
        assert (fields.fields["topology.replicas"], set(fields.changed)) == ("2", {"topology.replicas"})
        await pilot.press("e", *"topology.rep", "tab")
        assert screen.query_one("#line", Input).value == "topology.replicas="
        await pilot.press("0", "enter")
        await settle(app, pilot)
        assert fields.fields["topology.replicas"] == "0"  # wrong as it is, it stands where it was typed
        assert "topology.replicas" in screen.plan.error
        assert "topology.replicas" in text_of(app)
        assert not screen.query_one(WizardFooter).ready
        await pilot.press("e", *typed("job.optimizer=a"), "tab")
        assert screen.query_one("#line", Input).value == "job.optimizer=adam "
        await pilot.press("escape")
        fields.current = "job.optimizer"
        await pilot.press("enter")
        assert "sgd or adam." in text_of(app)  # what the setting means


def test_settings_are_written_as_they_are_typed() -> None:
    nested = {"a": {"b": 1, "c": [1, "x"], "d": None}, "e": True, "f": [{"g": 1}]}
    assert dict(flat(nested)) == {"a.b": "1", "a.c": "[1, x]", "a.d": "null", "e": "true"}


def test_the_plan_says_what_happens_without_stock() -> None:
    job = {"kind": "private", "model": "mlp-digits", "steps": 4}
    limits = {"hourly": 9, "total": 9}
    others = [{"provider": "lambda", "gpu": "A100"}, {"regions": ["EU-1"]}]
    one = {"provider": "runpod", "gpu": "H100", "fallbacks": others, "wait_for_stock": 2}
    text = _plan_text({"job": job, "fleet": one, "limits": limits})
    assert "else lambda (gpu A100), then runpod (regions EU-1); waits up to 2 h with nothing rented" in text
    parties = {
        "P0": {"provider": "runpod", "fallbacks": others[:1]},
        "P1": {"provider": "lambda"},
        "P2": {"provider": "vast"},
    }
    text = _plan_text({"job": job, "fleet": {"gpu": "H100", "parties": parties}, "limits": limits})
    assert "P0: else lambda (gpu A100)" in text
    assert "stock" not in _plan_text({"job": job, "fleet": {"provider": "local"}})


def _plan_text(raw: dict[str, object]) -> str:
    lines = draft_lines(Draft("x", plan=make_plan("x-1", "x", parse(raw))), 76, UNICODE)
    return " ".join(" ".join("".join(text for text, _ in line) for line in lines).split())


def test_the_loss_of_a_run_in_the_list_is_that_of_the_phase_that_trains(tmp_path: Path) -> None:
    """Not what the smoke ended with, fifty steps ago."""
    story = Story().full(30)
    smoke = ev.ResultReported(coord=story.coords[0], phase="smoke", result_hash="ab", values={"loss": 2.17})
    beats = [e for e in story.events if isinstance(e, ev.HeartbeatRead)]
    at = next(i for i, e in enumerate(story.events) if isinstance(e, ev.PhaseStarted) and e.phase == "full")
    story.events.insert(at, smoke)
    found = home_model.summarise(story.write(tmp_path / "run"))
    assert found is not None
    assert found.snap.results["smoke"]["loss"] == 2.17
    now = {e.record["loss"] for e in beats[-3:]}
    assert fields_of(found)["loss"] in now
    assert 2.17 not in now
    story.events = [e for e in story.events if not isinstance(e, ev.HeartbeatRead)]
    started = home_model.summarise(story.write(tmp_path / "started"))
    assert started is not None
    assert "loss" not in fields_of(started)  # its first step is not done
