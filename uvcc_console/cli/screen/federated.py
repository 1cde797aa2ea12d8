"""``uvcc demo --federated``: the federated story on this machine, with a console of one domain, panes, or lines."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from uvcc_console.cli import common
from uvcc_console.cli.main import FAILED, INTERRUPTED
from uvcc_console.cli.screen.launch import has_terminal
from uvcc_console.federation.demo import demo_keeper, panes
from uvcc_console.federation.demo.pane import console
from uvcc_console.federation.demo.people import DOMAINS, set_up
from uvcc_console.federation.demo.story import Story, port, run_in
from uvcc_engine.contract.errors import UvccError

LOOK_S = 0.2


@dataclass(slots=True)
class _Lines:
    """What the story says: kept in a file, and shown, but not while a screen of its own is open."""

    kept: Path
    hidden: bool = False
    waiting: list[str] = field(default_factory=list)

    def say(self, line: str) -> None:
        with self.kept.open("a") as file:
            file.write(f"{line}\n")
        self.waiting.append(line)
        self.show()

    def show(self) -> None:
        while self.waiting and not self.hidden:
            common.show(self.waiting.pop(0))
            sys.stdout.flush()


@dataclass(slots=True)
class _Playing:
    """The story in a thread of its own, so that a screen can be shown meanwhile."""

    story: Story
    error: UvccError | None = None

    def run(self) -> None:
        try:
            self.story.play()
        except UvccError as e:
            self.error = e


def play(*, users: bool, tmux: bool, headless: bool, listen: str = "0") -> int:
    """Play the story; returns the exit code of ``uvcc verify`` at its end, 130 where it was interrupted.

    ``users``: only with OS users of their own. Raises ConfigError for what cannot be done here, UvccError naming who
    could not go on.
    """
    if tmux:
        panes.required()
    relay_port = port(listen)
    with _interruptible():
        stage = set_up(users=users)
        kept = demo_keeper.start(stage.folder, stage.temp, stage.claim)
        lines = _Lines(stage.folder / "story.log")
        playing = _Playing(Story(stage, lines.say, relay_port))
        thread = threading.Thread(target=playing.run, daemon=True)
        try:
            thread.start()
            if tmux:
                _show_panes(playing, lines, thread)
            elif has_terminal() and not headless:
                _show_console(playing, lines, thread)
            while thread.is_alive():
                thread.join(LOOK_S)
        except KeyboardInterrupt:
            common.say("ending: the conductors give back what they drive")
            playing.story.interrupt()
            return INTERRUPTED
        finally:
            assert kept.stdin is not None
            kept.stdin.close()
            left = kept.wait()
            lines.hidden = False
            lines.show()
            if left:
                common.say(f"some processes did not end; see the log files in {stage.folder}")
    if playing.error is not None:
        raise playing.error
    common.show(f"left         no process and no OS user; the homes are in {stage.folder}")
    return playing.story.code if not left else FAILED


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM and a closed terminal end the demo as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _show_console(playing: _Playing, lines: _Lines, thread: threading.Thread) -> None:
    """P0's own console, as P0's domain has it: its pods, and the others by what they signed."""
    person = playing.story.stage.people[DOMAINS[0]]
    while run_in(person) is None:
        thread.join(LOOK_S)
        if not thread.is_alive():
            return
    lines.say(f"{DOMAINS[0]:<12} opens its console; the others are in it by what they sign; q leaves it")
    lines.hidden = True
    size = os.get_terminal_size()
    shown = person.start(console(person, small=size.columns < 1 or size.lines < 1), terminal=True)
    shown.wait()
    lines.hidden = False
    lines.show()


def _show_panes(playing: _Playing, lines: _Lines, thread: threading.Thread) -> None:
    stage = playing.story.stage
    size = os.get_terminal_size() if has_terminal() else os.terminal_size((160, 50))
    panes.layout(stage, size.columns, size.lines)
    command = panes.server(stage)
    if not has_terminal():
        lines.say(f"panes        five; look at them with: {' '.join((*command[:3], 'attach'))}")
        return
    lines.hidden = True
    os.spawnvpe(os.P_WAIT, command[0], [*command, "attach"], {k: v for k, v in os.environ.items() if k != "TMUX"})
    lines.hidden = False
    lines.show()
