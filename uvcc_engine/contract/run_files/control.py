"""The control file ``.HALT`` of a run directory: how a run is held, halted and released. Standard library only.

An empty file means "halt now", so that a plain ``touch .HALT`` works; so does any text that is not JSON, since a
person wrote it and stopping can be taken back. JSON is ``{mode: hold|halt|release, nonce, run, deadline}`` and is
obeyed only when whole, and only by the run that it names. A hold whose deadline has passed is a halt.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Literal

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.parsing.untrusted import json_of
from uvcc_engine.contract.run_files import files

Mode = Literal["release", "hold", "halt"]
HOLD: Final = "hold"
HALT: Final = "halt"
RELEASE: Final = "release"
MODES: Final[tuple[Mode, ...]] = (RELEASE, HOLD, HALT)


def checked_mode(text: str) -> Mode:
    """The mode of that name. Raises ConfigError for any other text."""
    for mode in MODES:
        if text == mode:
            return mode
    raise ConfigError(f"unknown halt mode {text!r}", f"one of {', '.join(MODES)}")


@dataclass(frozen=True, slots=True)
class HaltRequest:
    """What the control file asks for. ``deadline`` is in seconds of this pod's wall clock; 0 = none."""

    mode: str
    nonce: str = ""
    run: str = ""
    deadline: float = 0.0

    @property
    def vote(self) -> int:
        """For the collective decision, where the largest vote wins: 0 go on, 1 hold, 2 halt."""
        return MODES.index(self.mode)


def in_force(asked: HaltRequest, now: float) -> HaltRequest:
    """What a request means at ``now``: a hold whose deadline has passed is a halt."""
    return replace(asked, mode=HALT) if asked.mode == HOLD and 0 < asked.deadline < now else asked


class HaltVerdict(StrEnum):
    """What becomes of a halt request, given the one in force."""

    OBEY = "obey"  # it is written, and its nonce is the one that evidence answers
    KNOWN = "known"  # it is in force already: nothing is written, so that a repeat cannot prolong a hold
    FINAL = "final"  # refused: the run is halting, and that is not taken back
    OVERTAKEN = "overtaken"  # refused: its own release was here before it
    OTHER = "other"  # refused: it would release a hold that somebody else asked for


def verdict(before: HaltRequest | None, asked: HaltRequest, now: float) -> HaltVerdict:
    """The one rule of which request may follow which, for every path by which requests arrive.

    Requests may come late, twice and out of order, over a channel of their own or through the relay. A halt is final;
    whoever asks for a further one is answered under the new nonce. A hold is released by its own nonce (one that a
    person wrote by hand has none, and anybody may release it), and never comes back after that. A release with nothing
    to release is written too: a hold of the same nonce that arrives after it is void. ``now`` is this pod's wall clock
    in seconds; a hold whose deadline has passed is a halt.
    """
    if before is None:
        return HaltVerdict.OBEY
    before = in_force(before, now)
    same = before.nonce == asked.nonce
    if before.mode == HALT:
        if asked.mode != HALT:
            return HaltVerdict.FINAL
        return HaltVerdict.KNOWN if same else HaltVerdict.OBEY
    if asked.mode == HALT:
        return HaltVerdict.OBEY
    if before.mode == asked.mode and same:
        return HaltVerdict.KNOWN
    if before.mode == HOLD and asked.mode == RELEASE and not same and before.nonce:
        return HaltVerdict.OTHER
    if before.mode == RELEASE and asked.mode == HOLD and same:
        return HaltVerdict.OVERTAKEN
    return HaltVerdict.OBEY


def write_halt(directory: Path, request: HaltRequest) -> None:
    """Write the control file atomically. Raises UvccError if it cannot be written."""
    value = {"mode": request.mode, "nonce": request.nonce, "run": request.run, "deadline": request.deadline}
    files.write_json(directory / files.HALT, value)


def read_halt(directory: Path, run: str) -> HaltRequest | None:
    """What the control file asks of ``run`` (deadline not applied); None if nothing, or of another run."""
    try:
        text = (directory / files.HALT).read_bytes().strip()
    except FileNotFoundError:
        return None
    return parse_halt(text, run)


def parse_halt(text: bytes, run: str) -> HaltRequest | None:
    """The same of the file's content, for whoever has read it elsewhere. Never raises."""
    text = text.strip()
    if not text.startswith(b"{"):
        return HaltRequest(HALT, run=run)
    try:
        found: Any = json_of(text)
        request = HaltRequest(
            str(found.get("mode", HALT)),
            str(found.get("nonce", "")),
            str(found.get("run", run)),
            float(found.get("deadline") or 0.0),
        )
    except (ValueError, TypeError):
        return None  # half written by hand: obeyed once it is whole
    if request.run != run:
        return None
    return request if request.mode in MODES else replace(request, mode=HALT)


class Control:
    """Reads the control file of one run; ``poll`` costs one ``stat`` while nothing changes."""

    def __init__(self, directory: Path | str, run: str) -> None:
        self._directory = Path(directory)
        self._path = os.fspath(self._directory / files.HALT)
        self._run = run
        self._seen: tuple[int, int, int] | None = None
        self._request: HaltRequest | None = None

    def poll(self, now: float) -> HaltRequest | None:
        """What is asked now (``now`` = wall clock, s): None before anything was asked; a release stays visible."""
        try:
            st = os.stat(self._path)
        except FileNotFoundError:
            self._seen = self._request = None
            return None
        mark = (st.st_ino, st.st_mtime_ns, st.st_size)
        if mark != self._seen:
            self._request = read_halt(self._directory, self._run)
            self._seen = mark
        return self._request and in_force(self._request, now)

    def clear(self) -> None:
        """Remove what an earlier attempt left behind. For the starter of a run, never for a running worker."""
        Path(self._path).unlink(missing_ok=True)
