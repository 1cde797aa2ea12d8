"""``uvcc serve`` as its user meets it: the verb, the address that it prints, a real browser, keys typed there."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import browser
import pytest
from ui_journals import RUN, Story

from uvcc_console.core import events as ev
from uvcc_console.core import paths
from uvcc_console.core.journal.journal import iter_events
from uvcc_console.fleet.procs import identify

pytest.importorskip("textual_serve")
pytestmark = [
    pytest.mark.ci("tests/console/ui/test_ui_serve.py"),
    pytest.mark.skipif(bool(browser.why_not()), reason=browser.why_not()),
]
F9, ENTER, ESCAPE = ("F9", 120, ""), ("Enter", 13, "\r"), ("Escape", 27, "")
PATIENCE_S = 500.0
AGAIN_S = 5.0  # until whoever means it presses Enter again


class Page:
    """A run's page in a browser."""

    def __init__(self, tab: browser.Tab, folder: Path) -> None:
        self.tab, self.folder = tab, folder

    def drawn(self, *words: str) -> None:
        """Wait until the server has sent all of these to be drawn since the last call."""
        end, got = time.monotonic() + PATIENCE_S, b""
        while time.monotonic() < end:
            self.tab.value("1")  # what the browser tells comes with an answer
            frames = [e for e in self.tab.events if e["method"] == "Network.webSocketFrameReceived"]
            got = b"".join(map(_payload, frames))
            if all(word.encode() in got for word in words):
                self.tab.events = [e for e in self.tab.events if e not in frames]
                return
            time.sleep(0.1)
        raise AssertionError(got[-2000:])

    def press(self, name: str, code: int, text: str) -> None:
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self.tab.ask("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code, **more)

    def type(self, text: str) -> None:
        """Slower than a paste comes, which a halt ignores."""
        for sign in text:
            self.tab.ask("Input.dispatchKeyEvent", type="char", text=sign)
            time.sleep(0.15)

    def halts(self) -> list[str]:
        events = iter_events(self.folder / paths.JOURNAL)
        return [e.mode for _, e in events if isinstance(e, ev.HaltRequested) and e.by.endswith(" browser")]


def _payload(frame: dict[str, dict[str, dict[str, str]]]) -> bytes:
    told = frame["params"]["response"]
    return base64.b64decode(told["payloadData"]) if told["opcode"] == 2 else told["payloadData"].encode()  # type: ignore[comparison-overlap]


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The verb at work; the address that it prints."""
    command = [sys.executable, "-m", "uvcc_console.cli.main", "serve", RUN, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()
    assert process.returncode == 0


def test_a_browser_shows_the_run_and_halts_it_only_by_its_typed_name(tmp_path: Path) -> None:
    folder = Story().full(5).write(paths.run_dir(RUN))
    me = identify(os.getpid())
    assert me is not None
    for name in ("conductor", "haltd"):  # this very process passes for both, so that nobody starts another
        (folder / f"{name}.json").write_text(json.dumps({"pid": me.pid, "starttime": me.starttime}))
    with served(folder) as url, browser.tab(tmp_path / "profile") as tab:
        page = Page(tab, folder)
        tab.ask("Emulation.setDeviceMetricsOverride", width=1400, height=900, deviceScaleFactor=1, mobile=False)
        tab.ask("Page.navigate", url=url)
        page.drawn("read-only", "Fleet", "p1r0")
        assert tab.value("location.href") == url.partition("#")[0], "the token does not stay in the address"
        assert tab.value("document.querySelector('.xterm-text-layer').width") > 800
        page.press(*F9)
        page.drawn("Every pod stops at the same step")
        assert page.halts() == [], "F9 alone halts nothing"
        page.type(RUN[:-1])
        page.press(*ENTER)
        page.type(RUN[-1])
        assert page.halts() == [], "nor does half a name"
        page.press(*ENTER)
        end, again = time.monotonic() + PATIENCE_S, time.monotonic() + AGAIN_S
        while not page.halts() and time.monotonic() < end:
            time.sleep(0.1)
            if time.monotonic() > again:  # as the screen asks where a busy machine handed over two keys at once
                page.press(*ENTER)
                again += AGAIN_S
        assert page.halts() == ["halt"]
        faults = [e for e in tab.events if e["method"] == "Runtime.exceptionThrown"]
        assert not faults
        asked = [e["params"]["request"]["url"] for e in tab.events if e["method"] == "Network.requestWillBeSent"]
        assert asked
        assert all(address.startswith(url.partition("#")[0]) for address in asked), "nothing from elsewhere"
