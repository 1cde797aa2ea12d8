"""The keyboard's bytes as they come in: F9, and an Esc that undoes it, are found before any of them is parsed.

Parsing a paste and queueing its keys one by one takes the interpreter's lock thousands of times; whoever presses F9
behind it shall not wait for that. So one thread reads and looks, and another one parses what is left.
"""

from __future__ import annotations

import errno
import os
import re
import selectors
import signal
import stat
import threading
from codecs import getincrementaldecoder
from collections.abc import Callable
from itertools import zip_longest
from queue import Empty, SimpleQueue
from typing import Any, Final

from textual import events
from textual._time import get_time
from textual._xterm_parser import XTermParser
from textual.driver import Driver

F9: Final = b"\x1b[20~"
ESC: Final = b"\x1b"
PASTE, PASTED = b"\x1b[200~", b"\x1b[201~"
ALONE_S: Final = 0.05  # an escape byte that nothing follows for so long is the key
_IDLE_S: Final = 0.1
PASTE_GAP_S: Final = 0.020  # keys closer than this are pasted or scripted
FLOOD: Final = 64  # so many of them in a row are a paste: for fingers too many, also over a slow line
_TOKEN: Final = re.compile(rb"\x1b\[[0-9;:<?]*\$?[@-~]|\x1b[\[O]?|[^\x1b]", re.DOTALL)
_PARTIAL: Final = re.compile(rb"\x1b(\[[0-9;:<?]*\$?|O)?\Z")
_AFTER_ESC: Final = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789 /:?-=+.,\t\r\x7f")
"""With one of these behind it an escape byte is the key, read late together with the next one: no binding has Alt. What
begins a terminal's answer is not among them, for it must not undo a hold."""
_NO_KEY: Final = re.compile(rb"\x1b\[(<[\d;]*[Mm]|[IO]|\?.*|48;.*t|[\d;]*R)", re.DOTALL)  # mouse, focus, answers, sizes


class RawKeys:
    """Tells F9 and Esc from everything else in a stream of bytes.

    ``noted(at, n)``: so many keys came in at that moment; ``f9(at)`` and ``escape()``: True when the key is dealt with.
    ``takes_text()``: whether something on the screen takes what is pasted without brackets; else its keys end here,
    for thousands of them would keep the screen busy with nothing, and ``ignored(n)`` tells how many.
    """

    def __init__(
        self,
        noted: Callable[[float, int], None],
        f9: Callable[[float], bool],
        escape: Callable[[], bool],
        *,
        takes_text: Callable[[], bool] = lambda: True,
        ignored: Callable[[int], None] = lambda n: None,
    ) -> None:
        self._noted, self._f9, self._escape = noted, f9, escape
        self._takes_text, self._ignored = takes_text, ignored
        self._held = b""
        self._since = 0.0
        self._pasting = False
        self._last, self._run = float("-inf"), 0

    @property
    def waiting(self) -> bool:
        """Whether the next bytes, or their absence, decide about what came last."""
        return bool(self._held)

    def take(self, data: bytes, at: float) -> list[bytes]:
        """New bytes; what is left of them for the parser, in pieces: an escape byte by itself is the key."""
        data, self._held = self._held + data, b""
        if partial := _PARTIAL.search(data):
            data, self._held, self._since = data[: partial.start()], partial.group(), at
        pieces, out = [], bytearray()
        keys, plain = 0, 0
        tokens = _TOKEN.findall(data)
        flood = self._flood(tokens, at)
        for token, behind in zip_longest(tokens, tokens[1:], fillvalue=b""):
            if token in (PASTE, PASTED):
                self._pasting = token == PASTE
            elif token == ESC and not self._pasting and behind[:1] and behind[0] in _AFTER_ESC:
                self._noted(at, keys + 1)
                keys = 0
                if not self._escape():
                    pieces += [bytes(out), ESC]
                    out.clear()
                continue
            elif not self._pasting and token == F9:
                self._noted(at, keys + 1)
                keys = 0
                if self._f9(at):
                    continue
            elif not self._pasting and not _NO_KEY.match(token):
                keys += 1
                if flood and not token.startswith(ESC):
                    plain += 1
                    continue
            out += token
        if keys:
            self._noted(at, keys)
        if plain:
            self._ignored(plain)
        return [piece for piece in (*pieces, bytes(out)) if piece]

    def _flood(self, tokens: list[bytes], at: float) -> bool:
        """Whether these bytes belong to a paste that nobody takes."""
        keys = sum(not token.startswith(ESC) for token in tokens)
        self._run = keys + (self._run if at - self._last < PASTE_GAP_S else 0)
        if keys:
            self._last = at
        return self._run >= FLOOD and not self._takes_text()

    def idle(self, at: float) -> bytes:
        """Nothing came: whatever was held back is what it is."""
        if not self._held or at - self._since < ALONE_S:
            return b""
        held, self._held = self._held, b""
        if held == ESC and not self._pasting:
            self._noted(at, 1)
            if self._escape():
                return b""
        return held


def hang_up() -> None:
    """What the system does when a terminal goes that is the process's own; one under ``su -c`` is not, and has to see
    for itself that its terminal is gone. What goes on without a console has processes of its own."""
    os.kill(os.getpid(), signal.SIGHUP)


def _bytes_of(fileno: int) -> bytes:
    """What there is to read; nothing at the end, also of a terminal that is gone."""
    try:
        return os.read(fileno, 1 << 16)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return b""


def _hung_up(fileno: int) -> bool:
    """Whether this was a terminal: one that is gone is still a device, and no terminal any more."""
    device = os.fstat(fileno)
    return stat.S_ISCHR(device.st_mode) and device.st_rdev != os.stat(os.devnull).st_rdev and not os.isatty(fileno)


def read(driver: Driver, keys: RawKeys, fileno: int, ended: threading.Event) -> None:
    """Read the terminal until ``ended``; what the screen is to get is parsed in a thread of its own."""
    decode = getincrementaldecoder("utf-8")(errors="replace").decode
    left: SimpleQueue[tuple[str, float] | None] = SimpleQueue()
    parsing = threading.Thread(target=_parse, args=(driver, left), name="textual-parse", daemon=True)
    parsing.start()
    selector = selectors.SelectSelector()
    selector.register(fileno, selectors.EVENT_READ)
    try:
        while not ended.is_set():
            data = b""
            if selector.select(ALONE_S / 2 if keys.waiting else _IDLE_S):
                data = _bytes_of(fileno)
                if not data and _hung_up(fileno):
                    hang_up()
                    break
                if not data:  # nothing will come any more
                    ended.wait(_IDLE_S)
                    continue
            at = get_time()
            for piece in keys.take(data, at) if data else [keys.idle(at)]:
                if piece:
                    left.put((decode(piece), at))
        if held := keys.idle(float("inf")):  # an escape key pressed just before the end
            left.put((decode(held), get_time()))
    finally:
        selector.close()
        left.put(None)
        parsing.join(1.0)


def _parse(driver: Driver, left: SimpleQueue[tuple[str, float] | None]) -> None:
    """Every key bears the time at which its bytes came, however late it is parsed: a paste stays a paste."""
    parser: Any = XTermParser()
    try:
        while True:
            try:
                taken = left.get(timeout=_IDLE_S)
            except Empty:
                taken = ("", 0.0)
            if taken is None:
                return
            text, at = taken
            alone = [events.Key("escape", text)] if text == "\x1b" else None  # the parser would make alt+x of Esc and x
            for message in alone or (parser.feed(text) if text else ()):
                message.time = at
                driver.process_message(message)
            for message in parser.tick():
                driver.process_message(message)
    except BaseException:  # noqa: BLE001 - as the thread that this one stands in for: the app tells, and ends
        from rich.traceback import Traceback

        driver._app.call_later(driver._app.panic, Traceback())
