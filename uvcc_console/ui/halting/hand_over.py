"""Keys that are typed while one screen closes and the next one opens belong to the next one.

Textual acts on them with the screen that closes, drops what its queue still holds, and flushes what the terminal has:
an F9 that was pressed right after Enter on the start screen was lost.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

from textual import events
from textual.driver import Driver

from uvcc_console.ui.halting.halt_switch import PASTE_WAIT_S, Cadence
from uvcc_console.ui.halting.keyboard import RawKeys, read

APART_S: Final = 1e-6  # two keys of one reading are so far apart, that their order is known


TypedInput = events.Key | events.Paste
"""What the keyboard gives: a key, or a text that the terminal says was pasted."""
ClickPart = events.MouseDown | events.MouseUp
"""It waits among the keys, for a click is meant for what they have opened; another screen has nothing at that place."""


@dataclass(frozen=True, slots=True)
class WaitingKey:
    """What was typed at ``at`` (monotonic seconds), so many places behind the first of a row of fast keys."""

    event: TypedInput | ClickPart
    at: float
    burst: int


def _afresh(event: TypedInput | ClickPart) -> TypedInput | ClickPart:
    """The key for an app that has not seen it. Until a terminal is ours it makes a line feed of Enter."""
    new: TypedInput
    if isinstance(event, ClickPart):
        return event
    if isinstance(event, events.Paste):
        new = events.Paste(event.text)
    else:
        new = events.Key("enter", "\r") if event.key == "ctrl+j" else events.Key(event.key, event.character)
    new.time = event.time
    return new


class PendingKeys:
    """The keys of one app that it has not acted on: before it is open, while it waits, and once it is left."""

    def __init__(self, before: Sequence[TypedInput]) -> None:
        self._kept: list[WaitingKey] = []
        rhythm = Cadence()
        for event in before:  # what was pasted into the app before is no less pasted here
            burst = rhythm.note(event.time) if isinstance(event, events.Key) else 0
            self._kept.append(WaitingKey(_afresh(event), event.time, burst))
        self._handed = len(before)
        self._newest = float("-inf")
        self.keeping = True  # keys are not acted on for now
        self.leaving = False  # nor until it is known whether this app is left
        self.left = False  # they never will be: the next app gets them

    def stamp(self, event: TypedInput | ClickPart) -> None:
        """Give what comes in a time of its own, after that of what came before."""
        event.time = self._newest = max(event.time, self._newest + APART_S)

    def keep(self, event: TypedInput | ClickPart, at: float = 0.0, burst: int = 0) -> bool:
        """Whether this key waits, as it must where nothing can act on it now."""
        waits = self.keeping or self.leaving or self.left
        if waits:
            self._kept.append(WaitingKey(event, at or event.time, burst))
        return waits

    def deal_with(self, urgent: Callable[[events.Key], bool]) -> None:
        """Let ``urgent`` see those that the app before left, without waiting for a picture; the others wait on."""
        handed, self._handed = self._kept[: self._handed], 0
        self._kept[: len(handed)] = [
            waiting for waiting in handed if not (isinstance(waiting.event, events.Key) and urgent(waiting.event))
        ]

    def next(self) -> tuple[WaitingKey, bool] | None:
        """What to act on now, and whether a key was pressed soon behind it; None where nothing waits any more, or
        nothing that waits is this app's.
        """
        if self.leaving or self.left:
            return None
        self._kept.sort(key=lambda waiting: waiting.event.time)
        self.keeping = bool(self._kept)
        if not self._kept:
            return None
        first = self._kept.pop(0)
        behind = next((waiting for waiting in self._kept if isinstance(waiting.event, events.Key)), None)
        followed = behind is not None and behind.at - first.at < PASTE_WAIT_S
        return WaitingKey(_afresh(first.event), first.at, first.burst), followed

    def take(self) -> list[TypedInput]:
        """All that waited, in the order in which it was typed."""
        typed = [waiting.event for waiting in self._kept if isinstance(waiting.event, TypedInput)]
        self._kept = []
        return sorted(typed, key=lambda event: event.time)


class HandingApp(Protocol):
    """What the driver asks of the app that it works for."""

    @property
    def hands_on(self) -> bool: ...


def handing_on(base: type[Driver]) -> type[Driver]:
    """The driver of this platform; where another app follows, it leaves in the terminal what was not read yet."""
    if not hasattr(base, "run_input_thread"):
        return base

    class HandingOn(base):  # type: ignore[misc,valid-type]
        def run_input_thread(self) -> None:
            keys = RawKeys(lambda at, n: None, lambda at: False, lambda: False)
            read(self, keys, self.fileno, self.exit_event)

        def _sigcont_application(self, *_: object) -> None:
            """Textual takes every SIGCONT for the end of a suspension. Who was stopped by a signal still has the
            terminal: a second thread would read it beside the first, and the keys come in any order or not at all.
            """
            if getattr(self, "_must_signal_resume", True):
                super()._sigcont_application()
            elif self._loop.is_running():
                self._loop.call_soon_threadsafe(self._app.refresh)

        def disable_input(self) -> None:
            app: Any = self._app
            if not cast(HandingApp, app).hands_on:
                super().disable_input()
            elif not self.exit_event.is_set():
                signal.signal(signal.SIGWINCH, signal.SIG_DFL)
                self._disable_mouse_support()
                self.exit_event.set()
                if self._key_thread is not None:
                    self._key_thread.join()
                self.exit_event.clear()

    return HandingOn
