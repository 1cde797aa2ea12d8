"""Keys that are typed while one screen closes and the next one opens belong to the next one.

Textual acts on them with the screen that closes, drops what its queue still holds, and flushes what the terminal has:
an F9 that was pressed right after Enter on the start screen was lost.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, cast

from textual import events
from textual.driver import Driver

from uvcc_console.ui.halting.keyboard import RawKeys, read

APART_S: Final = 1e-6  # two keys of one reading are so far apart, that their order is known


def _afresh(key: events.Key) -> events.Key:
    """The key for an app that has not seen it. Until a terminal is ours it makes a line feed of Enter."""
    new = events.Key("enter", "\r") if key.key == "ctrl+j" else events.Key(key.key, key.character)
    new.time = key.time
    return new


class PendingKeys:
    """The keys of one app that it has not acted on: before it is open, while it waits, and once it is left."""

    def __init__(self, before: Sequence[events.Key]) -> None:
        self._kept = [_afresh(key) for key in before]
        self._handed = len(before)
        self._newest = float("-inf")
        self.keeping = True  # keys are not acted on for now
        self.leaving = False  # nor until it is known whether this app is left
        self.left = False  # they never will be: the next app gets them

    def stamp(self, key: events.Key) -> None:
        """Give a key that comes in a time of its own, after that of the one before."""
        key.time = self._newest = max(key.time, self._newest + APART_S)

    def keep(self, key: events.Key) -> bool:
        """Whether this key waits, as it must where nothing can act on it now."""
        waits = self.keeping or self.leaving or self.left
        if waits:
            self._kept.append(key)
        return waits

    def deal_with(self, urgent: Callable[[events.Key], bool]) -> None:
        """Let ``urgent`` see those that the app before left, without waiting for a picture; the others wait on."""
        handed, self._handed = self._handed, 0
        self._kept[:handed] = [key for key in self._kept[:handed] if not urgent(key)]

    def next(self) -> events.Key | None:
        """The key to act on now; None where none waits any more, or none of them is this app's."""
        if self.leaving or self.left:
            return None
        waiting = self.take()
        self.keeping, self._kept = bool(waiting), waiting[1:]
        return _afresh(waiting[0]) if waiting else None

    def take(self) -> list[events.Key]:
        """All that waited, in the order in which they were typed."""
        taken, self._kept = sorted(self._kept, key=lambda key: key.time), []
        return taken


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
