"""F9 and Esc pass everything: they are taken in the thread that reads the keyboard, before any queue.

A paste of thousands of keys, a storm of resizes or a journal that is caught up with may keep the event loop busy for
long; an order to halt leaves all the same. What it came to is told on the screen when the loop has its turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Final, Protocol, cast

from textual import events
from textual.driver import Driver
from textual.message import Message

from uvcc_console.core import events as ev
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.ui.halting import keyboard
from uvcc_console.ui.halting.halt_switch import REPEAT_S, Cadence, Decision, HaltSwitch

READ_S: Final = 0.005  # nobody answers F9 sooner: an Esc of the same time was read with it, and pressed before
TAIL_S: Final = 0.05  # a key at the end of a paste counts when nothing follows it for so long


class OrderingApp(Protocol):
    """What the order needs of its app."""

    @property
    def snap(self) -> Snapshot: ...

    def now(self) -> float: ...

    def order(self, event: ev.HaltRequested) -> Future[str] | None: ...

    def may_release(self, nonce: str) -> bool: ...

    def meant_otherwise(self, nonce: str) -> bool: ...

    def told(self, text: str) -> None: ...


class UrgentKeys:
    """Turns presses of F9 and Esc into orders, from any thread. ``by`` names who asks."""

    def __init__(self, app: OrderingApp, by: Callable[[], str]) -> None:
        self._app, self._by = app, by
        self._lock = threading.RLock()
        self.switch = HaltSwitch()
        self.rhythm = Cadence()
        self.repeat_wait = REPEAT_S
        self.commit: threading.Timer | None = None
        self._tail: threading.Timer | None = None
        self._sent: tuple[ev.HaltRequested, Future[str]] | None = None
        self._f9_at = float("-inf")

    # ---- in the thread that reads the keyboard

    def noted(self, at: float, keys: int) -> None:
        """So many keys came in at that moment."""
        with self._lock:
            for _ in range(keys):
                self.rhythm.note(at)

    def key(self, event: events.Key, possible: Callable[[], bool], *, noted: bool = False) -> bool:
        """A key as it comes in; True when it is dealt with and nobody else shall see it."""
        with self._lock:
            if not noted:
                self.rhythm.note(event.time)
            if event.key == "escape":  # where it was noted before it is found once more, maybe after an F9 behind it
                return not (noted and self.before_f9(event.time)) and self.escape()
            return event.key == "f9" and self.f9(event.time, possible)

    def f9(self, at: float, possible: Callable[[], bool]) -> bool:
        """F9, noted already; False where it is nobody's business now."""
        with self._lock:
            if not possible():
                return False
            self._f9_at = at
            burst, count = self.rhythm.burst, self.rhythm.count
            if burst < 2:
                self.press(at, 0)
                return True
            self._stop("_tail")
            self._tail = self._later(TAIL_S, lambda: self.press(at, 0 if self.rhythm.count == count else burst))
            return True

    # ---- from anywhere

    def press(self, at: float, burst: int) -> None:
        """F9 was pressed."""
        with self._lock:
            self._tail, self._f9_at = None, max(at, self._f9_at)
            decision = self.switch.press(at, self._app.now(), self._app.snap, burst)
            self._stop("commit")  # a key that repeats is no second decision
            if decision.mode == "halt" and self.repeat_wait:
                self.commit = self._later(self.repeat_wait, lambda: self._order(decision))
            elif decision.mode:
                self._order(decision)
            elif decision.why:
                self._app.told(decision.why)

    def before_f9(self, at: float) -> bool:
        """Whether a key of that moment was pressed before the newest F9, which it then cannot be meant to undo."""
        return at < self._f9_at + READ_S

    def escape(self) -> bool:
        """Esc: take back what has not left yet, else release; False when there is nothing to undo."""
        with self._lock:
            if self._tail is not None:
                self._stop("_tail")
                self._app.told("F9 taken back before anything was sent")
                return True
            decision = self.switch.release(self._app.now(), self._app.snap)
            if not decision.mode or not self._app.may_release(decision.nonce):
                return False
            if self._app.meant_otherwise(decision.nonce):
                self._app.told("Esc closed what the hold has closed already: once more releases the hold")
                return True
            self._stop("commit")
            self._order(decision)
            return True

    def confirmed(self, at: float) -> None:
        """A halt that was asked for by the run's name: at once, without a hold before."""
        with self._lock:
            decision = self.switch.press(at, self._app.now(), self._app.snap, 0)
            if decision.mode:
                self._order(replace(decision, mode="halt"))
            elif decision.why:
                self._app.told(decision.why)

    def _order(self, decision: Decision) -> None:
        with self._lock:
            if self.commit is not None and decision.mode == "halt":
                self.commit = None
            event = ev.HaltRequested(nonce=decision.nonce or secrets.token_hex(8), mode=decision.mode, by=self._by())
            sent, self._sent = self._sent, None
            if event.mode == "release" and sent is not None and sent[0].mode == "hold" and sent[1].cancel():
                self._app.told("F9 taken back before anything was sent")
                return
            future = self._app.order(event)
            if future is not None:
                self._sent = event, future

    def _later(self, seconds: float, do: Callable[[], None]) -> threading.Timer:
        timer = threading.Timer(seconds, do)
        timer.daemon = True
        timer.start()
        return timer

    def _stop(self, name: str) -> None:
        timer: threading.Timer | None = getattr(self, name)
        if timer is not None:
            timer.cancel()
            setattr(self, name, None)


class KeyReadingApp(Protocol):
    """What the driver asks of the app that it reads for."""

    def raw_keys(self) -> keyboard.RawKeys: ...

    def urgent_key(self, event: events.Key, *, noted: bool) -> bool: ...


def watched(base: type[Driver]) -> type[Driver]:
    """The driver of this platform, which shows F9 and Esc to the app before they are queued.

    Where it reads a terminal by itself they are found among the bytes, else among the keys that it hands on.
    """
    reads = hasattr(base, "run_input_thread")

    class Watched(base):  # type: ignore[misc,valid-type]
        def run_input_thread(self) -> None:
            app = cast(KeyReadingApp, self._app)
            keyboard.read(self, app.raw_keys(), self.fileno, self.exit_event)

        def process_message(self, message: Message) -> None:
            app = cast(KeyReadingApp, self._app)
            if isinstance(message, events.Key) and app.urgent_key(message, noted=reads):
                return
            super().process_message(message)

    return Watched


def call_in_loop(loop: asyncio.AbstractEventLoop | None, do: Callable[..., Any], *args: Any) -> None:
    """Have the event loop do it when it has its turn; a loop that is gone needs no telling."""
    if loop is not None:
        with contextlib.suppress(RuntimeError):  # it is closed
            loop.call_soon_threadsafe(do, *args)
