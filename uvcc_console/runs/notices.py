"""Ways for a notice to reach the operator elsewhere: a program, an address that takes posts (ntfy), the desktop.

What a way does or fails to do is its own affair, but that it failed is said once, on the screen or in the log.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from uvcc_console.core import settings
from uvcc_engine.contract.machine import host_names
from uvcc_engine.contract.parsing.untrusted import as_object, as_timestamp
from uvcc_engine.contract.text import clean

WAIT_S = 5.0
AGAIN_S: Final = 60.0  # the same is not said again within so long
TOLD: Final = "notices.jsonl"
_LAST: Final = 1 << 16
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
    """Posts each notice as text, in a thread of its own, one after the other. ``url`` is one that settings take."""
    thread = ThreadPoolExecutor(1, "notices")

    def send(note: Note) -> None:
        import httpx

        try:
            headers = {"Title": "uvcc", "Tags": "rotating_light" if note.level == "error" else "uvcc"}
            body = note.text.encode()
            with httpx.stream("POST", url, content=body, headers=headers, timeout=WAIT_S) as answer:
                answer.raise_for_status()  # what else is said is not read: it may never end
        except httpx.HTTPStatusError as e:
            failed(f"a notice did not reach {urlsplit(url).hostname}: it answered {e.response.status_code}")
        except httpx.TimeoutException:
            failed(f"a notice did not reach {urlsplit(url).hostname}: no answer within {WAIT_S:g} s")
        except (httpx.HTTPError, httpx.InvalidURL) as e:
            failed(f"a notice did not reach {urlsplit(url).hostname}: {host_names.why(e, url)}")

    return lambda note: void(thread.submit(send, note))


def void(_: object) -> None:
    """What comes of it is not waited for."""


def outside(program: Say | None, failed: Say) -> NoticeWay | None:
    """The operator's program and address, as one way; None where there is neither. Raises ConfigError."""
    found: list[NoticeWay] = []
    if program is not None:
        found.append(lambda note: program(note.text))
    if url := settings.text("notify_url"):
        found.append(post(url, failed))
    send = _one_after_another(found)
    if send is None:
        return None
    return lambda note: send(Note(note.level, clean(note.text)))  # pods have a say in it: a name may hold anything


def ways(program: Say | None, write: Say, failed: Say, run_dir: Path | None = None) -> NoticeWay | None:
    """All ways that the operator's settings name, as one; None where there is none. Raises ConfigError.

    What leaves this machine's screens does so once for a run (``run_dir``), whoever else looks at it.
    """
    found: list[NoticeWay] = []
    if (out := outside(program, failed)) is not None:
        found.append(SoleSender(run_dir, out) if run_dir is not None else out)
    if form := settings.text("notify_terminal"):
        in_tmux = bool(os.environ.get("TMUX"))
        found.append(lambda note: write(desktop(note.text, form, in_tmux=in_tmux)))
    return _one_after_another(found)


def _one_after_another(found: Sequence[NoticeWay]) -> NoticeWay | None:
    def send(note: Note) -> None:
        for way in found:
            way(note)

    return send if found else None


def _about(note: Note) -> str:
    """What tells a notice from others, whoever else was named in it as well."""
    return note.text.partition(" (and ")[0]


class SoleSender:
    """Of all that look at a run one hands its notices on: the conductor from its start, else the first that had one.

    Whoever it is holds a lock on the run's folder, which ends with the process; then the next one that has a notice
    takes its place. Every other one keeps silent. What was sent is written down beside the journal, so that who takes
    over does not send it again.
    """

    def __init__(self, run_dir: Path, send: NoticeWay) -> None:
        self._run_dir, self._send = run_dir, send
        self._fd = -1

    def __call__(self, note: Note) -> None:
        if self.claim() and not self._told(note):
            self._send(note)
            self._note(note)  # after: of one who is killed in between it comes twice, rather than never

    def _told(self, note: Note) -> bool:
        """Whether one who had this place has just sent it."""
        try:
            with (self._run_dir / TOLD).open("rb") as f:
                f.seek(max(0, f.seek(0, os.SEEK_END) - _LAST))
                lines = f.read(_LAST).splitlines()
        except OSError:
            return False
        return any(
            read.get("about") == _about(note) and abs(time.time() - (as_timestamp(read.get("at")) or 0.0)) < AGAIN_S
            for read in map(as_object, lines)
            if read is not None
        )

    def _note(self, note: Note) -> None:
        """Write down what was sent; on a disk that takes nothing the next one may send it again."""
        line = json.dumps({"at": round(time.time(), 3), "about": _about(note), "text": note.text}) + "\n"
        with contextlib.suppress(OSError), (self._run_dir / TOLD).open("ab") as f:
            f.write(line.encode())

    @property
    def held(self) -> bool:
        """Whether this process has the place already."""
        return self._fd >= 0

    def claim(self) -> bool:
        """Whether this process is the one, or becomes it now."""
        if self._fd < 0:
            try:
                fd = os.open(self._run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError:
                return False  # the run has been deleted
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                return False
            except OSError:  # a file system without locks: rather told twice than not at all
                os.close(fd)
                return True
            self._fd = fd
        return True

    def close(self) -> None:
        """Let another one take over."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Unsent:
    """Notices of one who conducts a run, kept while another one still has the place to send them.

    The sidecar of a conductor that died gives its place back some seconds after the next one came: of what came in
    that moment each might think that the other one tells it. ``keep_s`` is less than what is not said again for
    (``AGAIN_S``), so nothing is said twice.
    """

    def __init__(self, sender: SoleSender, keep_s: float = AGAIN_S / 2) -> None:
        self._sender, self._keep_s = sender, keep_s
        self._waiting: list[tuple[float, Note]] = []

    def add(self, note: Note) -> None:
        """Take a notice; ``hand_on`` sends it."""
        self._waiting.append((time.time(), note))

    def hand_on(self) -> bool:
        """Send what waits if the place is this process's or free; returns whether nothing is left to send."""
        if self._waiting and self._sender.claim():
            waiting, self._waiting = self._waiting, []
            for _, note in waiting:
                self._sender(note)
        now = time.time()
        self._waiting = [(at, note) for at, note in self._waiting if abs(now - at) < self._keep_s]
        return not self._waiting
