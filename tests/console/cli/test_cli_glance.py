"""``uvcc top``, ``status --line``, and ``config``: what they print."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "ui"))
from ui_journals import RUN, Story

from uvcc_console.cli.machine import profiles
from uvcc_console.cli.main import main
from uvcc_console.cli.view import status, status_line
from uvcc_console.core import events as ev
from uvcc_console.core import paths
from uvcc_console.core.answers.shown import clock
from uvcc_console.core.folding.state import fold
from uvcc_console.plan.profile import available, load

Out = pytest.CaptureFixture[str]


def written(story: Story) -> Path:
    return story.write(paths.runs_dir() / RUN)


def test_top_shows_the_fleet_once_where_nobody_watches(capsys: Out) -> None:
    written(Story(replicas=2).full(12))
    assert main(["top", RUN, "--columns", "pod,step,state", "--sort", "step"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1].split()[:2] == ["pod", "step▲"]
    assert len(out) == 2 + 6
    assert "\x1b" not in "".join(out)
    assert main(["top", RUN, "--sort", "stepp"]) == 2
    assert "did you mean step?" in capsys.readouterr().err


def test_of_a_worker_that_tells_no_step_none_is_told(capsys: Out) -> None:
    """A command that knows nothing of the run contract was told of as "step -1"."""
    story = Story().full(0)
    story.events = [e for e in story.events if not isinstance(e, ev.HeartbeatRead)]
    written(story)
    assert main(["status", RUN]) == 0
    out = capsys.readouterr().out
    assert "step -     heartbeat -" in out
    assert "step -1" not in out


def test_a_run_is_proposed_only_for_a_name_that_is_like_it(capsys: Out) -> None:
    written(Story(steps=30).finished())
    assert main(["status", "nothing-like-it"]) == 2
    assert capsys.readouterr().err == "error: no run 'nothing-like-it' (see: uvcc runs)\n"
    assert main(["status", RUN[1:]]) == 2
    assert f"did you mean {RUN}? see: uvcc runs" in capsys.readouterr().err


def test_a_run_without_pods_has_no_tensorboard_to_forward_and_is_told_what_has_its_curves(capsys: Out) -> None:
    written(Story(steps=30).finished())
    assert main(["tensorboard", RUN]) == 2
    said = capsys.readouterr().err
    assert f"{RUN} has no live pod whose TensorBoard could be forwarded (its curves are in the console" in said


def test_ages_by_a_clock_that_is_behind_are_not_told(tmp_path: Path) -> None:
    """A heartbeat of -3600 s said that something was wrong, and not what."""
    story = Story().full(20)
    text = status.text(fold(story.events), tmp_path, story.now - 3600)
    assert "CLOCK    this machine's clock is 1 h 00 m behind that of the newest event" in text
    assert "heartbeat -  " in text
    assert "-3600" not in text
    text = status.text(fold(story.events), tmp_path, story.now - 1)
    assert "CLOCK" not in text
    assert "heartbeat 0 s" in text


def test_agreement_and_the_other_domains_are_told_as_far_as_they_are_known(tmp_path: Path) -> None:
    """A domain has its own party's roots alone, and of the others what was heard last; a command has none."""
    story = Story().finished()
    heard = ev.DomainReported(ts=story.now, party=1, stage="full", status="running", step=60, steps=60)
    ok = ev.DomainReported(ts=story.now, party=2, stage="full", status="ok")
    done = fold([*story.events[:-1], heard, ok, story.events[-1]])
    assert {e.level for e in done.log if "its domain says" in e.text} == {"info"}
    (tmp_path / "artifacts/full").mkdir(parents=True)
    (tmp_path / "artifacts/full/proof_bundle.json").write_text("full")
    own = replace(done, apart=True, agreed_epoch=-1)
    text = status.text(own, tmp_path, story.now)
    assert "agreed   in every epoch, as verified\n" in text
    assert f"P1 full running, step 60 of 60 when last heard, at {clock(heard.ts)}\n" in text
    (tmp_path / "artifacts/full/proof_bundle.json").write_text("other")
    assert "agreed " not in status.text(own, tmp_path, story.now)
    open_yet = replace(own, verdicts={}, ended=0.0)
    assert "agreed   not told yet: the others' roots come at the end\n" in status.text(open_yet, tmp_path, story.now)
    assert "agreed " not in status.text(replace(own, job_kind="command", apart=False), tmp_path, story.now)


def test_a_halt_that_is_not_over_names_the_pods_that_it_waits_for(tmp_path: Path) -> None:
    """``uvcc halt`` that got no verdict in its time sends here."""
    story = Story().full(20).halt(unknown=1)
    text = status.text(fold(story.events), tmp_path, story.now)
    assert "2/3 verified at step 17" in text
    assert "\n         p0r0 p1r0: processes ended at step 17, checkpoint verified\n" in text
    assert "\n         p2r0: UNKNOWN, nothing proved\n" in text
    held = Story().full(20).halt("hold")
    acked = ev.HaltAck(ts=held.now, pod="p1r0", nonce="7c01f3a9d2e4b856", stage="halted", step=17)
    text = status.text(fold([*held.events, acked]), tmp_path, held.now)
    assert "hold by ada@ops tui: under way\n         p0r0 p2r0: paused at step 17\n" in text
    assert "p1r0: halted at step 17, proof awaited" in text
    over = Story().full(20).halt()
    assert "p0r0:" not in status.text(fold(over.events), tmp_path, over.now)


def test_one_line_for_a_status_bar_is_green_only_where_it_is_so(capsys: Out, tmp_path: Path) -> None:
    written(Story(steps=30).finished())
    assert main(["status", RUN, "--line"]) == 0
    assert "VERIFIED" in capsys.readouterr().out
    story = Story().full(20)
    (tmp_path / "conductor.json").write_text("{}")  # there was one
    live = status_line.line(fold(story.events), tmp_path, story.now + 1, colours=True)
    assert "20/200 10%" in live
    assert "fg=red" in live  # nobody conducts it
    assert "fg=green" not in live
    late = status_line.line(fold(story.events), tmp_path, story.now + 400)
    assert "eta" not in late
    (tmp_path / "conductor.json").unlink()
    story = Story().planned()
    assert "fg=red" not in status_line.line(fold(story.events), tmp_path, story.now + 1, colours=True)
    assert "fg=red" in status_line.line(fold(story.events), tmp_path, story.now + 60, colours=True)


def test_what_is_printed_is_plain_ascii_where_the_settings_ask_for_it(
    capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(Story(steps=30).full(12))
    for verb in (("status", RUN, "--line"), ("status", RUN, "--tmux"), ("top", RUN)):
        monkeypatch.delenv("UVCC_ASCII", raising=False)
        assert main([*verb]) == 0
        assert not capsys.readouterr().out.isascii(), verb
        monkeypatch.setenv("UVCC_ASCII", "1")
        assert main([*verb]) == 0
        assert capsys.readouterr().out.isascii(), verb


def test_a_pod_or_a_kind_of_event_that_is_not_there_is_said_instead_of_printing_nothing(capsys: Out) -> None:
    written(Story().full(3))
    assert main(["logs", RUN, "--pod", "p9r0"]) == 2
    assert "the run has no pod 'p9r0' (did you mean p" in capsys.readouterr().err
    assert main(["logs", RUN, "--pod", "p1r0"]) == 0
    assert main(["watch", RUN, "--no-follow", "--kind", "stages"]) == 2
    assert "'stages' is no kind of event (did you mean stage?)" in capsys.readouterr().err


def test_config_tells_every_setting_and_where_it_came_from(capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UVCC_THEME", "nord")
    assert main(["config"]) == 0
    assert "theme            nord                     $UVCC_THEME" in capsys.readouterr().out
    assert main(["config", "--json"]) == 0
    rows = {r["key"]: r for r in json.loads(capsys.readouterr().out)["settings"]}
    assert rows["theme"]["source"] == "$UVCC_THEME"
    assert rows["utc"]["source"] == "default"


def test_what_a_profile_is_about_stands_whole_below_its_row_in_a_narrow_terminal() -> None:
    about = "three local domains train a private digit classifier on 1,797 pictures"
    row = profiles.line("demo", about, {"job": "private", "pods": 3, "cap": 0, "hours": 1})
    assert profiles.fitting(row, about, 0) == profiles.fitting(row, about, 200) == [row]
    first, *below = profiles.fitting(row, about, 70)
    assert first.split() == ["demo", "private", "3", "nothing", "1", "h"]
    assert " ".join(" ".join(below).split()) == about
    unusable = profiles.line("mine", about, {"error": "fleet.providr is no key of a profile (did you mean provider?)"})
    lines = profiles.fitting(unusable, about, 70)
    assert max(map(len, (first, *below, *lines))) < 70
    assert "did you mean provider?" in " ".join(" ".join(lines).split())


def test_profiles_are_a_table_and_one_of_your_own_goes_before_a_packaged_one(capsys: Out) -> None:
    assert main(["profiles", "new", "mine", "--from", "demo"]) == 0
    made = paths.config_dir() / "profiles" / "mine.yaml"
    assert str(made) in capsys.readouterr().out
    assert main(["profiles", "show", "mine"]) == 0
    capsys.readouterr()
    assert main(["profiles"]) == 0
    rows = {row.split()[0]: row for row in capsys.readouterr().out.splitlines()}
    assert rows["mine"].split()[1:4] == rows["demo"].split()[1:4] == ["private", "3", "nothing"]
    assert main(["profiles", "new", "mine"]) == 2
    assert main(["profiles", "new", "../evil"]) == 2
    made.write_text("job: {kind: privat}\n")
    capsys.readouterr()
    assert main(["profiles"]) == 0
    assert "mine                         cannot be used: job.kind is 'privat'" in capsys.readouterr().out


def test_a_profile_for_hosts_of_your_own_begins_with_a_list_of_its_own_that_is_not_written_over(capsys: Out) -> None:
    assert main(["profiles", "new", "mine", "--from", "inventory-example"]) == 0
    hosts = paths.profiles_dir() / "inventory-hosts-example.yaml"
    assert load("mine")[1].fleet.model_dump()["hosts"] == str(hosts), "not the packaged one, and not a name alone"
    hosts.write_text("hosts: [{host: 203.0.113.7, user: root}]\n")
    assert main(["profiles", "new", "other", "--from", "inventory-example"]) == 0
    assert "203.0.113.7" in hosts.read_text()
    assert main(["profiles"]) == 0
    assert "\ninventory-hosts" not in capsys.readouterr().out, "a list of hosts is no profile"


def test_the_schema_that_lies_beside_a_profile_takes_every_packaged_one(capsys: Out) -> None:
    assert main(["profiles", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    import yaml

    assert {"job", "fleet", "limits"} <= set(schema["properties"])
    jsonschema.Draft202012Validator.check_schema(schema)
    holds = jsonschema.Draft202012Validator(schema)  # once: the schema is large
    for profile in available():
        holds.validate(yaml.safe_load(profile.path.read_text()))
