"""The console in a real tmux: keys as terminals send them, pastes, a storm of resizes, and leaving."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from ui_journals import RUN, Story

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import iter_events
from uvcc_console.fleet.procs import identify

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
LIMIT_S = 120.0
LEFT = pytest.mark.ci(__file__)


class Tmux:
    """One tmux server of our own with one window."""

    def __init__(self, folder: Path, columns: int, rows: int) -> None:
        self.folder = folder
        self._sockets = tempfile.mkdtemp(prefix="ut-")  # a short path: sockets take no long ones
        self._base = ["tmux", "-S", f"{self._sockets}/s", "-f", "/dev/null"]
        code = (  # a hold may be released for as long as this machine needs to look at it
            "from pathlib import Path; from uvcc_console.core.answers import holding; holding.HOLD_S = 600.0;"
            f" from uvcc_console.ui.app import run_app; run_app(Path({str(folder)!r}))"
        )
        self.command = [sys.executable, "-c", code]
        self("new-session", "-d", "-x", str(columns), "-y", str(rows), *self.command)
        self("set-option", "remain-on-exit", "on")
        self.until(lambda: "F9" in self.screen and "agree" in self.screen)

    def __call__(self, *args: str) -> str:
        env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "TMUX")}
        done = subprocess.run([*self._base, *args], capture_output=True, text=True, check=False, env=env)
        return done.stdout

    @property
    def screen(self) -> str:
        return self("capture-pane", "-p")

    def keys(self, *keys: str) -> None:
        self("send-keys", *keys)

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < end, f"waited in vain; the screen:\n{self('capture-pane', '-p', '-S', '-')}"

    def asked(self, kind: type[ev.Event]) -> list[str]:
        """Modes of the halts asked for by an operator, or actions of the intents."""
        found = [e for _, e in iter_events(self.folder / "journal.sqlite") if isinstance(e, kind)]
        own = [e for e in found if not getattr(e, "drill", False)]
        return [e.mode if isinstance(e, ev.HaltRequested) else getattr(e, "action", "") for e in own]

    def close(self) -> None:
        self("kill-server")
        shutil.rmtree(self._sockets, ignore_errors=True)


def whole(screen: str) -> bool:
    """Whether all of the overview at 80 by 24 is there: first line, every panel, last line."""
    lines = screen.splitlines()
    shown = all(word in screen for word in ("1 Fleet", "2 Charts", "3 Log", "agree @ step 12"))
    return len(lines) == 24 and lines[0].startswith(" FULL") and "F9" in lines[-1] and shown


@pytest.fixture
def story_at(tmp_path: Path) -> Iterator[Callable[[Story, int, int], Tmux]]:
    """Writes a story whose last event is now, and opens it in tmux."""
    opened: list[Tmux] = []

    def make(story: Story, columns: int, rows: int) -> Tmux:
        late = time.time() - story.now
        for event in story.events:
            object.__setattr__(event, "ts", event.ts + late)
        folder = story.write(tmp_path / "runs" / RUN)
        me = identify(os.getpid())
        assert me is not None
        for name in ("conductor", "haltd"):  # this process passes for both, so that none is started
            (folder / f"{name}.json").write_text(json.dumps({"pid": me.pid, "starttime": me.starttime}))
        opened.append(Tmux(folder, columns, rows))
        return opened[-1]

    yield make
    for tmux in opened:
        tmux.close()


@pytest.mark.parametrize(("columns", "rows"), [pytest.param(160, 50, marks=LEFT), (80, 24)])
def test_f9_then_escape_in_a_real_terminal(story_at: Callable[..., Tmux], columns: int, rows: int) -> None:
    tmux = story_at(Story().full(12), columns, rows)
    tmux.keys("F9")
    tmux.until(lambda: tmux.asked(ev.HaltRequested) == ["hold"])
    tmux.until(lambda: "releases" in tmux.screen)
    tmux.keys("Escape")
    tmux.until(lambda: tmux.asked(ev.HaltRequested) == ["hold", "release"])


@pytest.mark.slow  # a loaded tmux may drop a key of three sent at once; the same is held without tmux in test_ui_halt
def test_f9_while_a_command_is_typed(story_at: Callable[..., Tmux]) -> None:
    tmux = story_at(Story().full(12), 80, 24)
    tmux.keys(":")
    tmux.until(lambda: "fleet charts" in tmux.screen or " :" in tmux.screen)
    tmux.keys("l", "e", "d")
    tmux.until(lambda: ":led" in tmux.screen)
    tmux.keys("F9")
    tmux.until(lambda: tmux.asked(ev.HaltRequested) == ["hold"])


@pytest.mark.parametrize(
    ("opens", "shows"),
    [pytest.param("C-p", "Search", marks=LEFT), pytest.param("t", "Type ", marks=LEFT), ("?", "Help")],
)
def test_f9_while_something_covers_the_screen(story_at: Callable[..., Tmux], opens: str, shows: str) -> None:
    """The palette, a question that wants a word typed, the help: a hold goes out from under each of them."""
    tmux = story_at(Story().full(12), 160, 50)
    tmux.keys(opens)
    tmux.until(lambda: shows in tmux.screen)
    tmux.keys("F9")
    tmux.until(lambda: tmux.asked(ev.HaltRequested) == ["hold"])


@pytest.mark.parametrize("bracketed", [pytest.param(True, marks=LEFT), False])
def test_pasted_text_never_acts(story_at: Callable[..., Tmux], bracketed: bool) -> None:
    tmux = story_at(Story().halted(), 160, 50)
    tmux("set-buffer", "rqtRxs!")
    tmux("paste-buffer", *(["-p"] if bracketed else []))
    tmux.keys("2")  # a page turn proves that everything before it has been handled
    tmux.until(lambda: "learning rate" in tmux.screen)
    assert tmux.asked(ev.Intent) == []
    assert "F9" in tmux.screen


@pytest.mark.ci(__file__)
def test_a_storm_of_resizes(story_at: Callable[..., Tmux]) -> None:
    tmux = story_at(Story().full(12), 160, 50)
    for columns, rows in itertools.islice(itertools.cycle([(40, 10), (200, 60), (80, 24), (12, 4), (110, 36)]), 40):
        tmux("resize-window", "-x", str(columns), "-y", str(rows))
    tmux("resize-window", "-x", "80", "-y", "24")
    tmux.until(lambda: whole(tmux.screen))


PICTURE = (" FULL ", "1 Fleet", "agree @ step 12", "3 Log", " F9  HALT")
HELP = ("╭─ Help ─", "Stale values are", "undo the hold, the run goes on", "─╯", " F9  HALT")


@pytest.mark.parametrize(("opens", "words"), [("", PICTURE), ("?", HELP)], ids=["overview", "help"])
def test_a_picture_that_the_terminal_lost_is_painted_again_at_the_same_size(
    story_at: Callable[..., Tmux], opens: str, words: Sequence[str]
) -> None:
    tmux = story_at(Story().full(12), 80, 24)
    if opens:
        tmux.keys(opens)
    tmux.until(lambda: all(word in tmux.screen for word in words))
    # What a terminal does that shrank and grew back before anyone looked. Both in one call: the console may paint
    # all of its picture for a reason of its own before a second one.
    lost = tmux("send-keys", "-R", ";", "capture-pane", "-p")
    assert words[-1] not in lost
    os.kill(int(tmux("display-message", "-p", "#{pane_pid}")), signal.SIGWINCH)
    tmux.until(lambda: all(word in tmux.screen for word in words))


def test_ctrl_z_gives_the_terminal_to_the_shell_that_waits_and_fg_takes_it_again(
    story_at: Callable[..., Tmux],
) -> None:
    tmux = story_at(Story().full(12), 80, 24)
    tmux.keys("C-z")  # tmux itself has started it: nobody would wake it
    tmux.until(lambda: "no shell waits for this console" in tmux.screen)
    tmux("respawn-pane", "-k", "env", "PS1=here> ", "bash", "--norc", "-i")
    tmux.until(lambda: "here>" in tmux.screen)
    tmux.keys(shlex.join(tmux.command), "Enter")
    tmux.until(lambda: whole(tmux.screen))
    tmux.keys("F9")
    tmux.until(lambda: "releases" in tmux.screen)
    tmux.keys("C-z")
    tmux.until(lambda: "a hold is open" in tmux.screen)
    tmux.keys("Escape")
    tmux.until(lambda: tmux.asked(ev.HaltRequested) == ["hold", "release"])
    for _ in range(2):
        tmux.keys("C-z")
        tmux.until(lambda: "Stopped" in tmux.screen)
        tmux.keys("echo $((6*7))", "Enter")
        tmux.until(lambda: "42" in tmux.screen.splitlines())
        tmux.keys("clear; fg", "Enter")
        tmux.until(lambda: "1 Fleet" in tmux.screen and "F9" in tmux.screen.splitlines()[-1])
    tmux.keys("q")
    tmux.until(lambda: "the run goes on" in tmux.screen)


def test_q_leaves_the_terminal_clean(story_at: Callable[..., Tmux]) -> None:
    tmux = story_at(Story().full(12), 80, 24)
    tmux.keys("q")
    tmux.until(lambda: "the run goes on" in tmux.screen)
    assert f"uvcc attach {RUN}" in tmux.screen.replace("\n", "")
