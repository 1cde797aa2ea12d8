"""A console over a made-up run with a pilot at its keys: clocks, processes and key times are the test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from textual.pilot import Pilot

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal, iter_events
from uvcc_console.ui.actions.saved_screens import screen_text
from uvcc_console.ui.app import UvccApp, open_app
from uvcc_console.ui.judging.lamps import DEAD, MOVING, Lamp


class Keyboard:
    """Stamps keys one second apart, or ``gap`` seconds apart."""

    def __init__(self) -> None:
        self.at = 1000.0
        self.gap = 1.0

    def __call__(self, event: object) -> float:
        self.at += self.gap
        return self.at


class FakeProcesses:
    """Conductor and sidecar that live or not, as a test says; remembers what was started."""

    def __init__(self) -> None:
        self.living = {"conductor", "haltd"}
        self.lamps: dict[str, Lamp] = {}
        self.started: list[tuple[str, ...]] = []

    def alive(self, name: str) -> bool:
        return name in self.living

    def lamp(self, name: str) -> Lamp:
        return self.lamps.get(name) or Lamp(MOVING if name in self.living else DEAD)

    def start(self, name: str, *args: str) -> None:
        self.started.append((name, *args))
        self.living.add(name)


class OrderingApp:
    """An app over a made-up run, its pilot, and the journal to look into."""

    def __init__(self, app: UvccApp, pilot: Pilot[int], keys: Keyboard, folder: Path) -> None:
        self.app, self.pilot, self.keys, self.folder = app, pilot, keys, folder

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.settle()

    async def settle(self) -> None:
        await self.pilot.pause()
        await self.app.workers.wait_for_complete()
        self.app.tick()
        await self.pilot.pause()

    def asked(self, kind: type[ev.Event]) -> list[Any]:
        return [e for _, e in iter_events(self.folder / "journal.sqlite") if isinstance(e, kind)]

    def append(self, *events: ev.Event) -> None:
        journal = Journal(self.folder / "journal.sqlite", source="other")
        journal.append(*events)
        journal.close()
        self.app.tick()

    @property
    def text(self) -> str:
        return screen_text(self.app)

    @property
    def toasts(self) -> str:
        return " | ".join(n.message for n in self.app._notifications)


class Written(Protocol):
    """What an app is opened over: a made-up run, or a recorded one. ``now`` is the time of its last event."""

    now: float

    def write(self, folder: Path) -> Path:
        """Its journal, in this folder."""


@asynccontextmanager
async def desk(
    story: Written,
    folder: Path,
    size: tuple[int, int] = (160, 50),
    after: float = 1.0,
    prepare: Callable[[UvccApp], None] = lambda app: None,
    **options: Any,
) -> AsyncIterator[OrderingApp]:
    story.write(folder)
    keys = Keyboard()
    options = {"processes": FakeProcesses(), "key_time": keys, "utc": True, "tick_s": 3600, "budget_s": 60} | options
    app = open_app(folder, clock=lambda: story.now + after, **options)
    app.commands.urgent.repeat_wait = app.commands.paste_wait = 0.0
    prepare(app)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        yield OrderingApp(app, pilot, keys, folder)
    app.let_go()


def modes(d: OrderingApp) -> list[tuple[str, str]]:
    return [(e.mode, e.nonce) for e in d.asked(ev.HaltRequested) if not e.drill]


def typed(text: str) -> list[str]:
    """Key names for a text."""
    names = {"-": "minus", "=": "equals_sign", ">": "greater_than_sign", " ": "space"}
    return [names.get(c, c) for c in text]
