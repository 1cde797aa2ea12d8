"""F9 and Esc pass everything: pastes, resizes, a picture that is behind, an event loop that has no turn."""

from __future__ import annotations

import fcntl
import json
import os
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest
from textual import events
from ui_desk import desk, modes
from ui_journals import RUN, Story

from uvcc_console.bench.live_console import live_run
from uvcc_console.bench.terminal import ESCAPE, F9, Terminal, python
from uvcc_console.core import events as ev
from uvcc_console.core.folding.state import fold
from uvcc_console.core.journal.journal import Journal
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.fleet.procs import identify
from uvcc_console.ui.halting import urgent as urgent_module
from uvcc_console.ui.halting.keyboard import RawKeys
from uvcc_console.ui.halting.own_halt import OwnHaltRequest
from uvcc_console.ui.halting.urgent import UrgentKeys


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / RUN


class Order:
    """An app without a screen: keeps what was ordered, and lays it over the picture as the console does."""

    def __init__(self, snap: Snapshot, now: float) -> None:
        self.at, self.base, self.clock = now, snap, now
        self.asked = OwnHaltRequest(lambda: self.clock)
        self.orders: list[ev.HaltRequested] = []
        self.words: list[str] = []
        self.done = True
        self.ordered = threading.Event()

    @property
    def snap(self) -> Snapshot:
        return self.asked.over(self.base, self.now())

    def now(self) -> float:
        return self.clock

    def order(self, event: ev.HaltRequested) -> Future[str]:
        self.asked.note(event)
        self.orders.append(event)
        future: Future[str] = Future()
        if self.done:
            future.set_result("")
        self.ordered.set()
        return future

    def may_release(self, nonce: str) -> bool:
        return True

    def meant_otherwise(self, nonce: str) -> bool:
        return False

    def told(self, text: str) -> None:
        self.words.append(text)

    @property
    def modes(self) -> list[str]:
        return [o.mode for o in self.orders]


def made() -> tuple[Order, UrgentKeys]:
    story = Story().full(5)
    app = Order(fold(story.events), story.now)
    urgent = UrgentKeys(app, lambda: "ada@ops tui")
    urgent.repeat_wait = 0.0
    return app, urgent


def key(name: str, at: float) -> events.Key:
    event = events.Key(name, None)
    event.time = at
    return event


def always() -> bool:
    return True


# ---- without a screen


def test_f9_then_esc_hold_and_release_though_the_picture_never_moves() -> None:
    app, urgent = made()
    assert urgent.key(key("f9", 100.0), always)
    assert urgent.key(key("escape", 100.4), always)
    assert app.modes == ["hold", "release"]
    assert len({o.nonce for o in app.orders}) == 1


def test_a_second_press_halts_the_same_nonce_though_the_journal_shows_nothing_yet() -> None:
    app, urgent = made()
    urgent.key(key("f9", 100.0), always)
    urgent.key(key("f9", 101.0), always)
    assert app.modes == ["hold", "halt"]
    assert len({o.nonce for o in app.orders}) == 1


def test_an_esc_after_an_f9_that_has_not_left_cancels_it() -> None:
    app, urgent = made()
    app.done = False
    urgent.key(key("f9", 100.0), always)
    assert urgent.key(key("escape", 100.2), always)
    assert app.modes == ["hold"]
    assert "taken back" in app.words[0]


def test_f9_at_the_end_of_a_paste_counts_and_esc_takes_it_back_before(monkeypatch: pytest.MonkeyPatch) -> None:
    app, urgent = made()
    for i in range(40):
        assert not urgent.key(key("x", 100.0 + i / 1000), always)
    assert urgent.key(key("f9", 100.041), always)
    assert app.ordered.wait(120.0)
    assert app.modes == ["hold"]
    app, urgent = made()
    monkeypatch.setattr(urgent_module, "TAIL_S", 600.0)  # the Esc comes before
    for i in range(40):
        urgent.key(key("x", 100.0 + i / 1000), always)
    urgent.key(key("f9", 100.041), always)
    assert urgent.key(key("escape", 100.3), always)
    assert not app.orders


def test_f9_inside_a_paste_is_ignored_and_said() -> None:
    app, urgent = made()
    told = threading.Event()
    app.told = lambda text: (app.words.append(text), told.set())  # type: ignore[assignment,func-returns-value]
    for i in range(40):
        urgent.key(key("f9" if i == 20 else "x", 100.0 + i / 1000), always)
    assert told.wait(120.0)
    assert not app.orders
    assert "pasted" in app.words[0]


def test_esc_without_a_hold_belongs_to_whatever_has_the_keyboard() -> None:
    _, urgent = made()
    assert not urgent.key(key("escape", 100.0), always)
    assert not urgent.key(key("f9", 101.0), lambda: False)


# ---- among the bytes


def raw(urgent: UrgentKeys) -> RawKeys:
    return RawKeys(urgent.noted, lambda at: urgent.f9(at, always), urgent.escape)


def test_f9_is_found_among_the_bytes_and_nobody_parses_it() -> None:
    app, urgent = made()
    keys = raw(urgent)
    assert keys.take(b"\x1b[20~", 100.0) == []
    assert keys.take(b"\x1b[2", 101.0) == []  # the rest of it is still on its way
    assert keys.take(b"0~", 101.01) == []
    assert app.modes == ["hold", "halt"]


def test_an_escape_byte_is_the_key_when_nothing_follows_it() -> None:
    app, urgent = made()
    keys = raw(urgent)
    keys.take(b"\x1b[20~", 100.0)
    assert keys.take(b"\x1b", 101.0) == []
    assert keys.waiting
    assert keys.idle(101.01) == b""
    assert app.modes == ["hold"]
    assert keys.idle(101.06) == b""
    assert app.modes == ["hold", "release"]
    keys.take(b"\x1b", 102.0)
    assert keys.idle(103.0) == b"\x1b"  # nothing to undo: it belongs to whatever has the keyboard


def test_an_escape_that_is_read_together_with_a_letter_is_the_key_and_what_begins_an_answer_is_not() -> None:
    app, urgent = made()
    keys = raw(urgent)
    keys.take(b"\x1b[20~", 100.0)
    assert keys.take(b"a\x1bq", 101.0) == [b"aq"]
    assert app.modes == ["hold", "release"]
    assert keys.take(b"a\x1bq\x1b/", 102.0) == [b"a", b"\x1b", b"q", b"\x1b", b"/"]  # nothing to undo
    keys.take(b"\x1b[20~", 110.0)
    for answer in (b"\x1b]11;rgb:00/00/00\x1b\\", b"\x1bP1+r\x1b\\", b"\x1b[I", b"\x1b[200~\x1bq\x1b[201~"):
        assert keys.take(answer, 111.0) == [answer]
    assert app.modes == ["hold", "release", "hold"]


def test_an_escape_that_was_read_just_before_f9_does_not_undo_it() -> None:
    app, urgent = made()
    keys = raw(urgent)
    assert keys.take(b"\x1b\x1b[20~", 100.0) == [b"\x1b"]  # parsed later, when the hold stands already
    assert app.modes == ["hold"]
    assert not urgent.key(key("escape", 100.0), always, noted=True)
    assert app.modes == ["hold"]
    assert keys.take(b"\x1b", 101.0) == []
    keys.idle(101.06)
    assert app.modes == ["hold", "release"]


def test_f9_inside_a_bracketed_paste_is_text_and_the_moving_mouse_is_no_typing() -> None:
    app, urgent = made()
    keys = raw(urgent)
    pasted = b"\x1b[200~some \x1b[20~ text\x1b[201~"
    assert keys.take(pasted, 100.0) == [pasted]
    assert not app.orders
    moved = b"\x1b[<35;10;4M" * 30
    assert keys.take(moved + b"\x1b[20~", 101.0) == [moved]
    assert app.modes == ["hold"]


def test_every_other_byte_reaches_the_parser_however_it_is_cut() -> None:
    _, urgent = made()
    data = "a\x1b[A\x1bOPé漢\x1b[200~x\x1b[20~\x1b[201~\x1bx\x1b[1;5C\x1b[48;50;160;800;1600t".encode()
    for size in range(1, len(data) + 1):
        keys, out = raw(urgent), b""
        for i in range(0, len(data), size):
            out += b"".join(keys.take(data[i : i + size], 100.0))
        assert out + keys.idle(101.0) == data


# ---- what is shown meanwhile


def test_a_fresh_hold_never_shows_the_proof_of_an_earlier_halt() -> None:
    story = Story().full(30).halt("release", nonce="aa00", step=30)
    old = fold(story.events)
    asked = OwnHaltRequest(lambda: 7.0)
    asked.note(ev.HaltRequested(nonce="bb11", mode="hold", by="me"))
    s = asked.over(old, story.now)
    assert (s.halt.nonce, s.halt.done, dict(s.halt.acks)) == ("bb11", False, {})
    story.add(ev.HaltRequested(nonce="bb11", mode="hold", by="me"))
    new = fold(story.events)
    assert asked.over(new, story.now) is new
    assert asked.over(old, story.now) is old  # once the journal has shown it, the journal counts


async def test_the_panel_shows_the_new_nonce_while_the_journal_is_behind(folder: Path) -> None:
    story = Story().full(30).halt("halt", nonce="aa00aa00", step=30)
    story.add(ev.StageChanged(name="full", status="waiting"))
    story.phase("full", 200, attempt=1).train(31, 60)
    async with desk(story, folder) as d:
        poll = d.app.source.poll
        d.app.source.poll = lambda: []  # type: ignore[method-assign]
        await d.press("f9")
        nonce = modes(d)[-1][1]
        assert nonce[:8] in d.text
        assert "0/3 held" in d.text
        assert "verified at step" not in d.text.split("Fleet")[0]
        d.app.source.poll = poll  # type: ignore[method-assign]
        await d.settle()
        assert nonce[:8] in d.text


# ---- in a real terminal


@contextmanager
def resizing(terminal: Terminal) -> Iterator[None]:
    stop = threading.Event()

    def storm() -> None:
        for i in range(100_000):
            if stop.wait(0.01):
                return
            size = struct.pack("HHHH", 30 + i % 21, 90 + i % 71, 0, 0)
            fcntl.ioctl(terminal.fd, termios.TIOCSWINSZ, size)

    thread = threading.Thread(target=storm)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _asked(journal: Journal, mode: str, since: int, until: Callable[[], bool]) -> ev.HaltRequested | None:
    while not until():
        for _, event in journal.since(since, kinds=(ev.HaltRequested.kind,)):
            if isinstance(event, ev.HaltRequested) and event.mode == mode:
                return event
        time.sleep(0.002)
    return None


def test_f9_and_esc_in_a_terminal_after_a_paste_and_during_a_storm_of_resizes() -> None:
    with live_run(24) as run_dir:
        me = identify(os.getpid())
        assert me is not None
        spawned = json.dumps({"pid": me.pid, "starttime": me.starttime})
        (run_dir / "haltd.json").write_text(spawned)  # this process passes for the sidecar: none makes a halt of a hold
        code = (  # and a hold may be released for as long as this machine needs to look at it
            "import sys; from uvcc_console.core.answers import holding; holding.HOLD_S = 600.0;"
            " from uvcc_console.cli.main import main; sys.exit(main())"
        )
        args = python("-c", code, "attach", "bench")
        with Terminal(args, {"UVCC_HOME": str(run_dir.parents[1])}) as terminal:
            terminal.wait_for(b"Ledger", 120.0)
            journal = Journal(run_dir / "journal.sqlite", readonly=True)
            line = b"the quick brown fox jumps over the lazy dog, and over all of this text\r"
            with resizing(terminal):
                for i in range(3):
                    since = journal.last_seq()
                    terminal.press(30 * line)
                    time.sleep(0.3)
                    begun = time.monotonic()
                    terminal.press(F9)
                    held = _asked(journal, "hold", since, lambda begun=begun: time.monotonic() - begun > 60.0)  # type: ignore[misc]
                    took = time.monotonic() - begun
                    assert held is not None, f"press {i}: nothing was held within {took:.1f} s"
                    print(f"F9 to the journal {1000 * took:.0f} ms")
                    terminal.press(ESCAPE)
                    released = _asked(journal, "release", since, lambda begun=begun: time.monotonic() - begun > 60.0)  # type: ignore[misc]
                    assert released is not None
                    assert released.nonce == held.nonce
            journal.close()


def test_keys_that_are_typed_before_the_first_picture_are_acted_on() -> None:
    """Not even Python has started when they are: the terminal keeps them, and makes a line feed of Enter."""
    code = "import sys; from uvcc_console.cli.main import main; sys.exit(main())"
    with live_run(3) as run_dir:
        env = {"UVCC_HOME": str(run_dir.parents[1])}
        with Terminal(python("-c", code), env) as terminal:
            terminal.press(b"\r")  # opens the first run of the list, which is not there yet, nor has it the focus
            terminal.wait_for(b"Ledger", 120.0)
        with Terminal(python("-c", code, "attach", "bench"), env) as terminal:
            terminal.press(F9)
            journal = Journal(run_dir / "journal.sqlite", readonly=True)
            end = time.monotonic() + 300.0
            assert _asked(journal, "hold", 0, lambda: time.monotonic() > end) is not None
            journal.close()
