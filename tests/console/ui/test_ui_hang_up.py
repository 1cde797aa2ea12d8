"""A console whose terminal goes away ends, also where the system does not tell it: under ``su -c`` it has no session's
terminal, and nobody sends it SIGHUP."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from uvcc_console.ui.halting import keyboard
from uvcc_console.ui.halting.keyboard import RawKeys


def _reading(fileno: int, ended: threading.Event, typed: threading.Event | None = None) -> threading.Thread:
    seen = typed or threading.Event()
    driver = cast(Any, SimpleNamespace(process_message=lambda message: seen.set()))
    keys = RawKeys(lambda at, n: None, lambda at: False, lambda: False)
    thread = threading.Thread(target=keyboard.read, args=(driver, keys, fileno, ended))
    thread.start()
    return thread


def test_who_reads_a_terminal_that_goes_away_hangs_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    monkeypatch.setattr(keyboard, "hang_up", lambda: told.append(True))
    master, terminal = pty.openpty()
    typed = threading.Event()
    try:
        thread = _reading(terminal, threading.Event(), typed)
        os.write(master, b"q\n")
        assert typed.wait(120)
        os.close(master)
        thread.join(120)
        assert not thread.is_alive()
        assert told == [True]
    finally:
        os.close(terminal)


def test_the_end_of_what_is_no_terminal_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyboard, "hang_up", lambda: pytest.fail("it was no terminal"))
    waited, ended = threading.Event(), threading.Event()
    begins, ends = os.pipe()
    os.close(ends)

    class Watched(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.set()
            return ended.wait(timeout)

        def is_set(self) -> bool:
            return ended.is_set()

    thread = _reading(begins, Watched())
    assert waited.wait(120)  # it has met the end
    ended.set()
    thread.join(120)
    assert not thread.is_alive()
    os.close(begins)


@pytest.mark.ci(__file__)
def test_a_console_without_a_session_of_its_terminal_ends_when_that_is_gone(tmp_path: Path) -> None:
    master, terminal = pty.openpty()
    env = {k: v for k, v in os.environ.items() if not k.startswith("UVCC_")}
    env |= {"HOME": str(tmp_path), "UVCC_HOME": str(tmp_path / "home"), "TERM": "xterm-256color"}
    start = [sys.executable, "-c", "from uvcc_console.cli.main import main; raise SystemExit(main([]))"]
    console = subprocess.Popen(start, stdin=terminal, stdout=terminal, stderr=terminal, env=env, start_new_session=True)
    try:
        os.close(terminal)
        seen = b""
        while b"\x1b[?1049h" not in seen:  # the screen is up
            seen += os.read(master, 1 << 16)
        os.close(master)
        assert console.wait(120) == -signal.SIGHUP
    finally:
        console.kill()
        console.wait()
