"""Ways for a notice to reach the operator elsewhere: a program, an address that takes posts (ntfy), the desktop.

What a way does or fails to do is its own affair, but that it failed is said once on the screen.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

from uvcc_console.core import settings
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.text import clean

WAIT_S = 5.0
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Note:
    """What is to be told. ``level``: info | warn | error."""

    level: str
    text: str


NoticeWay = Callable[[Note], None]


def desktop(text: str, form: str = settings.OSC_9, *, in_tmux: bool = False) -> str:
    """The terminal's own notification: OSC 9 as iTerm2, kitty, WezTerm and ghostty take it, or OSC 777 as urxvt, foot
    and VTE do, which has a title. tmux hands it on where ``allow-passthrough`` is on.
    """
    said = clean(text, 200).replace(";", ",")
    code = f"\x1b]777;notify;uvcc;{said}\x07" if form == settings.OSC_777 else f"\x1b]9;{said}\x07"
    return "\x1bPtmux;" + code.replace("\x1b", "\x1b\x1b") + "\x1b\\" if in_tmux else code


def post(url: str, failed: Say) -> NoticeWay:
    """Posts each notice as text, in a thread of its own, one after the other. Raises ConfigError for no web address."""
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise ConfigError(f"notify_url {clean(url, 80)!r} is no web address", "like https://ntfy.sh/your-topic")
    thread = ThreadPoolExecutor(1, "notices")

    def send(note: Note) -> None:
        import httpx

        try:
            headers = {"Title": "uvcc", "Tags": "rotating_light" if note.level == "error" else "uvcc"}
            httpx.post(url, content=note.text.encode(), headers=headers, timeout=WAIT_S).raise_for_status()
        except httpx.HTTPError as e:
            failed(f"a notice did not reach {urlsplit(url).hostname}: {type(e).__name__}")

    return lambda note: void(thread.submit(send, note))


def void(_: object) -> None:
    """What comes of it is not waited for."""


def ways(program: Say | None, write: Say, failed: Say) -> NoticeWay | None:
    """All ways that the operator's settings name, as one; None where there is none. Raises ConfigError."""
    found: list[NoticeWay] = []
    if program is not None:
        found.append(lambda note: program(note.text))
    if url := settings.text("notify_url"):
        found.append(post(url, failed))
    if form := settings.text("notify_terminal"):
        in_tmux = bool(os.environ.get("TMUX"))
        found.append(lambda note: write(desktop(note.text, form, in_tmux=in_tmux)))
    if not found:
        return None

    def send(note: Note) -> None:
        for way in found:
            way(note)

    return send
