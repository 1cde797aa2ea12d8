"""Who notifies of a run whose conductor is gone: the sidecar, of what nobody has told yet, and no longer than that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from uvcc_console.core.snapshot import LogEntry, Snapshot
from uvcc_console.fleet.pulse import DEAD, FROZEN, MOVING
from uvcc_console.haltd.stand_in import StandIn
from uvcc_console.runs import notices, notify
from uvcc_console.runs.notices import Note, SoleSender


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(notify, "operators_program", lambda: found.append)
    return found


def having(*texts: str, at: float = 100.0) -> Snapshot:
    return replace(Snapshot(), run="r", alerts=tuple(LogEntry(at, "error", "p0r0", text, alert=text) for text in texts))


def test_while_the_run_is_conducted_nothing_is_sent_and_the_place_is_free(tmp_path: Path, told: list[str]) -> None:
    stand_in = StandIn(tmp_path)
    stand_in.look(having(), MOVING, 100.0)
    stand_in.look(having("slow"), MOVING, 101.0)
    assert told == []
    assert SoleSender(tmp_path, notices.void).claim()


def test_what_the_conductor_had_no_time_to_tell_is_told_when_it_is_dead_and_nothing_twice(
    tmp_path: Path, told: list[str]
) -> None:
    stand_in, sent = StandIn(tmp_path), []
    conductor = SoleSender(tmp_path, sent.append)
    assert conductor.claim()
    stand_in.look(having(), MOVING, 100.0)
    stand_in.look(having("slow", "hot"), MOVING, 101.0)
    conductor(Note("error", "p0r0: slow (and p1r0)"))
    stand_in.look(having("slow", "hot", "late"), FROZEN, 102.0)
    assert told == []
    conductor.close()
    stand_in.look(having("slow", "hot", "late"), DEAD, 103.0)
    assert told == ["p0r0: hot", "p0r0: late"]
    stand_in.look(having("slow", "hot", "late"), DEAD, 104.0)
    assert len(told) == 2
    assert not conductor.claim()  # the place is taken
    stand_in.look(having("slow", "hot", "late", "back"), MOVING, 105.0)
    assert told[2:] == ["p0r0: back"]  # a conductor that has just come knows no better than that it was there before
    stand_in.look(having("slow", "hot", "late", "back"), MOVING, 110.0)
    assert conductor.claim()  # the place is given back


def test_what_is_seen_when_the_place_is_given_back_is_told(tmp_path: Path, told: list[str]) -> None:
    """The conductor that came may have looked while the place was not its own."""
    stand_in = StandIn(tmp_path)
    conductor = SoleSender(tmp_path, notices.void)
    stand_in.look(having(), DEAD, 100.0)
    stand_in.look(having("slow"), DEAD, 101.0)
    stand_in.look(having("slow", "late"), MOVING, 110.0)
    assert told == ["p0r0: slow", "p0r0: late"]
    assert conductor.claim()


def test_a_frozen_conductor_keeps_its_place(tmp_path: Path, told: list[str]) -> None:
    stand_in = StandIn(tmp_path)
    conductor = SoleSender(tmp_path, notices.void)
    assert conductor.claim()
    stand_in.look(having(), MOVING, 100.0)
    stand_in.look(having("slow"), FROZEN, 101.0)
    stand_in.look(having("slow"), MOVING, 200.0)  # it goes on, and tells itself
    conductor.close()
    stand_in.look(having("slow"), DEAD, 201.0)
    assert told == []


def test_the_end_of_a_run_is_told_by_who_ends_it(tmp_path: Path, told: list[str]) -> None:
    stand_in = StandIn(tmp_path)
    stand_in.look(having(), DEAD, 100.0)
    stand_in.look(replace(having("slow"), ended=101.0, status="ok"), DEAD, 101.0)
    assert told == []
    assert SoleSender(tmp_path, notices.void).claim()


def test_a_console_that_has_the_place_keeps_it(tmp_path: Path, told: list[str]) -> None:
    by_console: list[Note] = []
    console, stand_in = SoleSender(tmp_path, by_console.append), StandIn(tmp_path)
    stand_in.look(having(), DEAD, 100.0)
    console(Note("error", "p0r0: slow"))
    stand_in.look(having("slow"), DEAD, 101.0)
    assert (told, len(by_console)) == ([], 1)
    stand_in.look(having("slow", "hot"), DEAD, 102.0)
    assert told == []
    console.close()  # and had not told of it
    stand_in.look(having("slow", "hot"), DEAD, 103.0)
    assert told == ["p0r0: hot"]


def test_settings_that_cannot_be_read_send_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UVCC_NOTIFY_URL", "no address")
    stand_in = StandIn(tmp_path)
    stand_in.look(having("slow"), DEAD, 100.0)
    assert SoleSender(tmp_path, notices.void).claim()
