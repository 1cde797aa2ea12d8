"""What the start screen and the run screen have in common: themes, signs, the rhythm of the keys, short words."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, TypeVar

from textual import events
from textual.app import App
from textual.binding import Binding, BindingType
from textual.command import CommandPalette
from textual.driver import Driver
from textual.errors import NoWidget
from textual.message import Message
from textual.message_pump import MessagePump
from textual.screen import Screen

from uvcc_console.core import settings
from uvcc_console.ui.drawing.glyphs import choose
from uvcc_console.ui.drawing.paint import Palette
from uvcc_console.ui.drawing.theme import DARK, LIGHT, THEMES, theme_named
from uvcc_console.ui.halting.halt_switch import Cadence
from uvcc_console.ui.halting.hand_over import ClickPart, PendingKeys, TypedInput, WaitingKey, handing_on
from uvcc_console.ui.halting.suspending import STAYS, shell_waits
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.text import clean_block

Severity = Literal["information", "warning", "error"]
Result = TypeVar("Result")
KeyTime = Callable[[events.Key], float]


def own(key: str) -> str | bool:
    """One of the operator's settings; its default where they cannot be read, for a halt must not hang on a file."""
    try:
        return settings.effective()[key].value
    except UvccError:
        return next(known.default for known in settings.KNOWN if known.key == key)


def ascii_wanted() -> bool:
    """Whether the operator's settings ask for plain ASCII."""
    return own("ascii") is True


STORM_EVERY_S: Final = 0.2
STORM: Final = 3  # resizes, each soon after the one before


class Resizes:
    """Tells a storm of resizes: laying out for each of a hundred a second, nothing else would get its turn."""

    def __init__(self) -> None:
        self._last = self._done = float("-inf")
        self._row = 0

    def at_once(self, now: float) -> bool:
        """Whether to follow the resize that comes at ``now`` (monotonic seconds), or else the newest one later."""
        self._row = self._row + 1 if now - self._last < STORM_EVERY_S else 1
        self._last = now
        if self._row > STORM and now - self._done < STORM_EVERY_S:
            return False
        self._done = now
        return True


LOOKS_S: Final = 0.02  # so often it is looked whether what a key was given to is still there
PASSES: Final = 25  # so many looks the next key waits for what became of the one before, at most
OPENS: Final = 250  # and so many for the screen that it has opened, or for what a list finds; a run's F9 never waits
"""Looks and not seconds: while all stand still (a fold, a slow disk) nobody has a turn, and nothing is waited for."""
ROUNDS: Final = 3  # a key, the line that it enters, what the prompt tells of that


class KeyPassed(Message):
    """Goes the way of ``key``, from the panel that has the focus up to the app, right behind it, and then again:
    what the key has set off there (a line that was entered) is on that way by then, and is dealt with before.
    """

    def __init__(self, key: TypedInput | ClickPart, target: MessagePump, rounds: int = 1) -> None:
        super().__init__()
        self.key, self.target, self.rounds = key, target, rounds


class ConsoleApp(App[Result]):
    """Base of the console's apps. ``key_time`` tells when a key was pressed; tests have their own.

    ``typed_before``: the keys that the app before this one has left to it.
    """

    TITLE = "UVCC"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+z", "suspend_process", "suspend", show=False)]
    CSS_PATH: ClassVar[Path] = Path(__file__).parent / "screens" / "run.tcss"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (110, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (36, "-tall")]  # noqa: RUF012

    def __init__(
        self,
        *,
        ascii_only: bool = False,
        utc: bool = False,
        key_time: KeyTime = lambda event: event.time,
        typed_before: Sequence[TypedInput] = (),
    ) -> None:
        super().__init__()
        self.cadence = Cadence()
        self.resizes = Resizes()
        self.pending = PendingKeys(typed_before)
        self.acted = float("inf")  # when the key was pressed that is acted on now
        self._passing: TypedInput | ClickPart | None = None
        self._behind: MessagePump = self  # what the key that passes was given to
        self._seen: Screen[Any] | None = None  # the screen that was shown then
        self._looking = False  # a list looks for what was typed
        self._patience = 0  # looks
        self.hands_on = False  # another app follows, which gets the keys that are typed from now on
        self._newest_size: events.Resize | None = None
        self.key_time = key_time
        self.glyphs = choose(ascii_only)
        self.utc = utc
        self.palette = Palette({})
        for theme in THEMES:
            self.register_theme(theme)
        wanted = theme_named(str(own("theme")))
        self.theme = wanted if wanted in self.available_themes else DARK.name
        if ascii_only:
            self.add_class("-ascii")

    def get_theme_variable_defaults(self) -> dict[str, str]:
        base = DARK if self.current_theme.dark else LIGHT
        return {key: value for key, value in base.variables.items() if key.startswith("uvcc-")}

    def on_mount(self) -> None:
        try:
            settings.effective()
        except UvccError as e:
            self.call_later(self.say, str(e), "warning")
        wanted = str(own("theme"))
        if wanted and theme_named(wanted) not in self.available_themes:
            self.call_later(self.say, f"there is no theme {wanted!r}: :theme lists those that there are", "warning")
        self.theme_changed_signal.subscribe(self, lambda _: self.recolour())

    def recolour(self) -> None:
        """Resolve the roles again after a change of theme, and draw."""
        self.palette = Palette(self.theme_variables, colour=not self.no_color, ascii_only=not self.glyphs.braille)
        self.redraw()
        self.screen.query("*").refresh()

    def redraw(self) -> None:
        """Give the screen a new view."""

    def get_driver_class(self) -> type[Driver]:
        return handing_on(super().get_driver_class())

    def exit(self, result: Result | None = None, return_code: int = 0, message: Any = None) -> None:
        """Leave; no key is acted on from now on."""
        self.pending.left = True
        super().exit(result, return_code, message)

    def post_message(self, message: Message) -> bool:
        """Also after the end of this app: a key that still comes in then is kept for the next one."""
        if isinstance(message, TypedInput) and not message.is_forwarded:
            self.pending.stamp(message)
            if self.pending.left:
                return self.pending.keep(message)
        elif isinstance(message, ClickPart) and not message.is_forwarded:
            self.pending.stamp(message)
        return super().post_message(message)

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.Resize) and not self._resize(event):
            return
        if isinstance(event, TypedInput):
            at, burst = event.time, 0
            if isinstance(event, events.Key) and not event.is_forwarded:
                at = self.key_time(event)
                burst = self.cadence.note(at)
            if (not event.is_forwarded or self._passing is None) and self.pending.keep(event, at, burst):
                return
            if not event.is_forwarded:
                await self._act_on(WaitingKey(event, at, burst), followed=False)
                return
        if isinstance(event, ClickPart) and not event.is_forwarded:
            if self._passing is not None and self.pending.keep(event):
                return
            if isinstance(event, events.MouseUp) and not self.pending.keeping:
                await self._act_on(WaitingKey(event, event.time, 0), followed=False)
                return
        await super().on_event(event)

    def opened(self) -> None:
        """There is something that keys can act on: from now on they do, those first that were typed before.

        On a busy machine the first picture takes seconds, and a key that finds no list, or nothing in it, is lost.
        """
        if self.pending.keeping and self._passing is None:
            self.call_next(self._act_on_early)

    async def _act_on_early(self) -> None:
        """Act on the next key that waits. What it opens is there, and has the focus, before the one after it comes."""
        waiting = self.pending.next()
        if waiting is not None:
            await self._act_on(waiting[0], followed=waiting[1])

    async def _act_on(self, waiting: WaitingKey, *, followed: bool) -> None:
        key = waiting.event
        self.pending.keeping, self._passing, self._seen = True, key, self.screen
        if isinstance(key, TypedInput):
            self.cadence.begin(waiting.burst, followed)
            self.acted = waiting.at
        target = self._receiver(key)
        await super().on_event(key)
        self._send_behind(key, target, PASSES, ROUNDS)

        def look() -> None:
            self._patience -= 1
            if self._passing is not key or self.pending.left:
                timer.stop()
            elif self._patience < 0:
                self._passed()
            elif not self._behind.is_attached or self._looking:  # a dialog that the key closed tells nothing
                self._done_with(key)

        timer = self.set_interval(LOOKS_S, look)

    def _receiver(self, event: TypedInput | ClickPart) -> MessagePump:
        """What is given it: the panel that has the keyboard, or the one under the mouse."""
        if isinstance(event, TypedInput):
            return self.focused or self.screen
        try:
            return self.screen.get_widget_at(int(event.x), int(event.y))[0]
        except NoWidget:
            return self.screen

    def _send_behind(self, key: TypedInput | ClickPart, target: MessagePump, patience: int, rounds: int = 1) -> None:
        self._behind, self._patience = target, patience
        target.post_message(KeyPassed(key, target, rounds))

    def on_key_passed(self, event: KeyPassed) -> None:
        """Whatever a key was given to has done with it, or is gone."""
        if event.key is not self._passing or event.target is not self._behind:
            return
        if event.rounds > 1 and event.target.is_attached:
            event.target.post_message(KeyPassed(event.key, event.target, event.rounds - 1))
        else:
            self._done_with(event.key)

    def _done_with(self, key: TypedInput | ClickPart) -> None:
        """The next key may come; one that a new screen is to have, when that is mounted and has taken the keyboard."""
        if self.screen is not self._seen:
            self._seen = self.screen
            self._looking = False
            self._send_behind(key, self.screen, OPENS)
        elif self._looks_up():
            if not self._looking:
                self._looking, self._patience = True, OPENS
        else:
            self._passed()

    def _looks_up(self) -> bool:
        """Whether the palette still looks for what was typed: until it has, its first line is one that Enter was not
        meant for.
        """
        screen = self.screen
        return isinstance(screen, CommandPalette) and any(
            worker.node is screen and not worker.is_finished for worker in self.workers
        )

    def _passed(self) -> None:
        self._passing, self._looking, self.acted = None, False, float("inf")
        self.call_later(self._act_on_early)

    def _resize(self, event: events.Resize) -> bool:
        """Whether to lay out for it now; of a storm of them only the newest is, a few times a second."""
        if self.resizes.at_once(time.monotonic()):
            self._newest_size = None
            return True
        if self._newest_size is None:
            self.set_timer(STORM_EVERY_S, self._resize_to_newest)
        self._newest_size = event
        return False

    def _resize_to_newest(self) -> None:
        if self._newest_size is not None:
            self.post_message(events.Resize(self._newest_size.size, self._newest_size.virtual_size))

    def on_resize(self) -> None:
        """Paint everything again, at the same size too: a terminal that shrank and grew back has lost its picture.

        Textual paints nothing where the size is what it was. tmux hands on only the first and the last size of a storm.
        """
        self.call_later(self.refresh)

    def why_stay(self) -> str:
        """Why the console does not give its terminal away now; empty where it does."""
        return "" if shell_waits() else STAYS

    def action_suspend_process(self) -> None:
        if why := self.why_stay():
            self.say(why, "warning")
        else:
            super().action_suspend_process()

    def say(self, text: str, severity: Severity = "information") -> None:
        """A short word to the operator; one that still stands there is not said again below it."""
        said = clean_block(text)
        if not any(note.message == said for note in self._notifications):
            self.notify(said, severity=severity, timeout=4 if severity == "information" else 7, markup=False)
