"""Keys that are typed while one screen closes and the next one opens, in a real terminal.

The program tells the moments at which it stands still until keys were pressed, so that nothing here depends on time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from textual import events

from uvcc_console.bench.live_console import live_run
from uvcc_console.bench.terminal import ESCAPE, F9, Terminal, python
from uvcc_console.core import events as ev
from uvcc_console.core.journal import Journal
from uvcc_console.ui.halting.hand_over import PendingKeys

PATIENCE_S = 90.0

STOPPING = """
import os, sys, threading, time
from pathlib import Path
folder = Path(sys.argv[1])

def stand_still(moment):
    reached = folder / moment
    if reached.exists():
        return
    reached.touch()
    while not (folder / (moment + ".go")).exists():
        time.sleep(0.01)

from uvcc_console.ui import app as apps
from uvcc_console.ui.home.home_app import HomeApp

leave = HomeApp.exit
def exit(self, result=None, *rest, **more):
    leave(self, result, *rest, **more)
    if result is not None:
        stand_still("left")  # the loop does not turn; the keyboard is still read
HomeApp.exit = exit

join = threading.Thread.join
def joined(self, *rest):
    join(self, *rest)
    if self.name == "textual-input" and (folder / "left").exists():
        stand_still("deaf")  # nobody reads any more, and the terminal is still as the start screen had it
threading.Thread.join = joined

opened = apps.open_app
def open_app(*rest, **more):
    stand_still("between")  # the terminal is as the shell had it
    return opened(*rest, **more)
apps.open_app = open_app

from uvcc_console.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


def wait_for(there: Path) -> None:
    end = time.monotonic() + PATIENCE_S
    while not there.exists():
        assert time.monotonic() < end, f"{there.name} was never reached"
        time.sleep(0.01)


@contextmanager
def start_screen(folder: Path) -> Iterator[tuple[Terminal, Journal]]:
    folder.mkdir(exist_ok=True)
    with live_run(3) as run_dir:
        env = {"UVCC_HOME": str(run_dir.parents[1])}
        with Terminal(python("-c", STOPPING, str(folder)), env) as terminal:
            terminal.wait_for(b"bench", PATIENCE_S)
            journal = Journal(run_dir / "journal.sqlite", readonly=True)
            yield terminal, journal
            journal.close()


def press_at(terminal: Terminal, folder: Path, keys: dict[str, bytes]) -> None:
    """At each moment press the keys that belong to it, and let the program go on."""
    for moment in ("left", "deaf", "between"):
        wait_for(folder / moment)
        if pressed := keys.get(moment):
            terminal.press(pressed)
            if moment == "left":  # they are under way to a screen that closes once they were read
                time.sleep(0.1)
        (folder / f"{moment}.go").touch()


def asked(journal: Journal, mode: str) -> ev.HaltRequested:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        for _, event in journal.since(0, kinds=(ev.HaltRequested.kind,)):
            if isinstance(event, ev.HaltRequested) and event.mode == mode:
                return event
        time.sleep(0.01)
    raise AssertionError(f"nobody asked for {mode!r}")


@pytest.mark.parametrize("moment", ["left", "deaf", "between"])
def test_f9_holds_the_run_that_is_about_to_be_shown(tmp_path: Path, moment: str) -> None:
    with start_screen(tmp_path / "moments") as (terminal, journal):
        terminal.press(b"\r")
        press_at(terminal, tmp_path / "moments", {moment: F9})
        assert asked(journal, "hold").by.endswith("tui")


def test_letters_arrive_whole_and_in_order_whenever_they_were_typed(tmp_path: Path) -> None:
    with start_screen(tmp_path / "moments") as (terminal, _):
        terminal.press(b"\r/w")  # in one reading with the Enter that opens the run
        press_at(terminal, tmp_path / "moments", {"left": b"xy", "deaf": b"zz", "between": b"yx"})
        terminal.wait_for(b"wxyzzyx", PATIENCE_S)


def test_an_escape_behind_that_f9_takes_it_back(tmp_path: Path) -> None:
    with start_screen(tmp_path / "moments") as (terminal, journal):
        terminal.press(b"\r")
        press_at(terminal, tmp_path / "moments", {"deaf": F9 + ESCAPE})
        end = time.monotonic() + PATIENCE_S
        while b"taken back before anything was sent" not in terminal.output:  # or it had left: then it is released
            found = [e for _, e in journal.since(0, kinds=(ev.HaltRequested.kind,)) if isinstance(e, ev.HaltRequested)]
            if [e.mode for e in found] == ["hold", "release"]:
                assert found[0].nonce == found[1].nonce
                return
            assert time.monotonic() < end
            time.sleep(0.01)
        assert not list(journal.since(0, kinds=(ev.HaltRequested.kind,)))


def test_keys_come_out_as_they_were_typed_even_where_one_went_a_longer_way() -> None:
    pending = PendingKeys([events.Key("z", "z")])
    first, second = events.Key("a", "a"), events.Key("b", "b")
    second.time = first.time
    pending.stamp(first)
    pending.stamp(second)
    assert pending.keep(second)  # the first one went to a panel, and came back
    assert pending.keep(first)
    assert [key.key for key in pending.take()] == ["z", "a", "b"]
    assert pending.take() == []
    assert pending.next() is None
    assert not pending.keep(first)
    pending.left = True
    assert pending.keep(first)
    assert pending.next() is None
    assert pending.take() == [first]
