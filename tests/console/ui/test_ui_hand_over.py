"""Keys that are typed while one screen closes and the next one opens, in a real terminal.

The program tells the moments at which it stands still until keys were pressed, so that nothing here depends on time.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from textual import events

from uvcc_console.bench.live_console import live_run
from uvcc_console.bench.terminal import ESCAPE, F9, Terminal, python
from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal
from uvcc_console.ui.halting.hand_over import PendingKeys

PATIENCE_S = 500.0

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

STARTING = """
from uvcc_console.ui.feed import home_model
from uvcc_engine.contract.errors import UvccError
live = home_model.find_runs
home_model.find_runs = lambda known: [] if not (folder / "starting.go").exists() else live(known)

def start(draft):
    stand_still("starting")  # the rollout's process is being started, in a thread; the wizard is still shown
    if (folder / "refuse").exists():
        raise UvccError("the disk is full", "free some")
    return Path(os.environ["UVCC_HOME"]) / "runs" / "bench"
home_model.start = start
"""
"""Before the start no run is known: only the one that is started can be held."""


READERS = """
import signal
def count(*_):
    (folder / "part").write_text(str(sum(t.name == "textual-input" for t in threading.enumerate())))
    (folder / "part").rename(folder / "readers")
signal.signal(signal.SIGRTMIN, count)  # of signals that wait Python takes that with the lower number first
"""


def wait_for(there: Path) -> None:
    end = time.monotonic() + PATIENCE_S
    while not there.exists():
        assert time.monotonic() < end, f"{there.name} was never reached"
        time.sleep(0.01)


@contextmanager
def start_screen(folder: Path, more: str = "", ready: bytes = b"bench") -> Iterator[tuple[Terminal, Journal]]:
    folder.mkdir(exist_ok=True)
    with live_run(3) as run_dir:
        env = {"UVCC_HOME": str(run_dir.parents[1])}
        program = STOPPING.replace("\nfrom uvcc_console.cli.main", f"{more}\nfrom uvcc_console.cli.main")
        with Terminal(python("-c", program, str(folder)), env) as terminal:
            terminal.wait_for(ready, PATIENCE_S)
            journal = Journal(run_dir / "journal.sqlite", readonly=True)
            yield terminal, journal
            journal.close()


@contextmanager
def wizard(folder: Path) -> Iterator[tuple[Terminal, Journal]]:
    """The wizard of the demo, just after its start was asked for; the process that it starts is not there yet."""
    with start_screen(folder, STARTING, b"no runs yet") as (terminal, journal):
        terminal.wait_for(b"four-machines", PATIENCE_S)
        terminal.press(b"n")
        terminal.wait_for(b"Profile demo", PATIENCE_S)
        terminal.press(b"\r")
        terminal.wait_for(b" for 3 pods", PATIENCE_S)  # its price is known, so it can be started
        terminal.press(b"s")
        wait_for(folder / "starting")
        yield terminal, journal


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


@pytest.mark.parametrize("moment", ["left", "deaf", pytest.param("between", marks=pytest.mark.ci(__file__))])
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


def test_one_that_was_stopped_and_goes_on_reads_the_keyboard_once(tmp_path: Path) -> None:
    """Two threads read beside each other, each with a part of the keys, and leaving waited for one for ever."""
    folder = tmp_path / "moments"
    with start_screen(folder, READERS) as (terminal, _):
        for number in (signal.SIGSTOP, signal.SIGCONT, signal.SIGRTMIN):
            os.kill(terminal.pid, number)
        wait_for(folder / "readers")
        assert (folder / "readers").read_text() == "1"


def test_an_escape_and_a_letter_in_one_reading_are_two_keys_on_the_start_screen(tmp_path: Path) -> None:
    with start_screen(tmp_path / "moments") as (terminal, _):
        terminal.press(b"/wxw")
        terminal.wait_for(b"wxw", PATIENCE_S)
        terminal.press(b"\x1b?")  # leaves the search; in it, the letter would be text
        terminal.wait_for(b"1, 2, n, Tab", PATIENCE_S)


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


def test_f9_while_the_wizard_starts_a_run_holds_that_run(tmp_path: Path) -> None:
    moments = tmp_path / "moments"
    with wizard(moments) as (terminal, journal):
        terminal.press(F9)
        time.sleep(0.2)  # the wizard reads it; it is not acted on there
        assert not list(journal.since(0, kinds=(ev.HaltRequested.kind,)))
        (moments / "starting.go").touch()
        press_at(terminal, moments, {})
        assert asked(journal, "hold").by.endswith("tui")


@pytest.mark.ci(__file__)
def test_letters_typed_while_the_wizard_starts_a_run_arrive_there_in_order(tmp_path: Path) -> None:
    moments = tmp_path / "moments"
    with wizard(moments) as (terminal, _):
        terminal.press(b"/wx")
        time.sleep(0.2)
        (moments / "starting.go").touch()
        press_at(terminal, moments, {"left": b"y", "between": b"zz"})
        terminal.wait_for(b"wxyzz", PATIENCE_S)


@pytest.mark.ci(__file__)
def test_where_the_start_is_refused_the_wizard_acts_on_what_was_typed_meanwhile(tmp_path: Path) -> None:
    moments = tmp_path / "moments"
    moments.mkdir()
    (moments / "refuse").touch()
    with wizard(moments) as (terminal, journal):
        terminal.press(b"ejob.steps=7")
        time.sleep(0.2)
        assert b"job.steps=7" not in terminal.output
        (moments / "starting.go").touch()
        terminal.wait_for(b"the disk is full", PATIENCE_S)
        terminal.wait_for(b"job.steps=7", PATIENCE_S)
        assert not (moments / "left").exists(), "the wizard is still there"
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
