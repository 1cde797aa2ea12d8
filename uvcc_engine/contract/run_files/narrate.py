"""What a worker says on standard error, which the agent keeps as ``worker_<coord>.log``: its story, for people.

Every event of the worker is one line, ``2026-11-22T03:32:35.315Z info link_up kind=relay peer=2``, but for those that
come with every step: of the epochs one a second is told, of a step's own operations nothing. They are in
``events.jsonl``, figures in ``training.csv`` and in heartbeats.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, TextIO

from uvcc_engine.contract.run_files.event_names import NAMES

EPOCH: Final = "epoch_root"
EPOCH_EVERY_S: Final = 1.0
OF_EVERY_STEP: Final = ("fwd_open_ok", "bwd_open_ok", "pipeline_tick")
ONLY_TOLD: Final = ("worker_start", "policy_accepted")
"""Told before there is a training to write events of: these lines are the only word of it."""
_LONG: Final = 400
_TOLD: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (?:debug|info|warn|error) ([a-z0-9_]+)(?: |$)")


class Narrator:
    """Tells events as lines. ``out`` None: standard error as it is at the time."""

    def __init__(self, out: TextIO | None = None, clock: Callable[[], float] = time.time) -> None:
        self._out, self._clock = out, clock
        self._last_epoch = float("-inf")

    def tell(self, name: str, level: str, fields: Mapping[str, Any]) -> None:
        """One event. A log that cannot be written stops nobody: the event itself is in ``events.jsonl``."""
        now = self._clock()
        if name in OF_EVERY_STEP:
            return
        if name == EPOCH:
            if now - self._last_epoch < EPOCH_EVERY_S:
                return
            self._last_epoch = now
            fields = {k: v for k, v in fields.items() if k != "pairs"}
        out = self._out or sys.stderr
        try:
            print(line(now, name, level, fields), file=out, flush=True)
        except OSError:
            return


def line(ts: float, name: str, level: str, fields: Mapping[str, Any]) -> str:
    """An event as one line of text."""
    at = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(ts))}.{int(ts * 1000) % 1000:03d}Z"
    return " ".join([at, level, name, *(f"{k}={_short(v)}" for k, v in fields.items())])


def repeats_event(text: str) -> bool:
    """Whether a line of a worker's log tells an event of the run contract that ``events.jsonl`` holds as well."""
    found = _TOLD.match(text)
    return found is not None and found[1] in NAMES and found[1] not in ONLY_TOLD


def only_told(text: str) -> tuple[str, str, dict[str, str]] | None:
    """(name, level, fields as text) of a line that is the only word of an event; None for every other line."""
    if text[23:24] != "Z":  # most lines are none: no pattern is tried on these
        return None
    found = _TOLD.match(text)
    if found is None or found[1] not in ONLY_TOLD:
        return None
    fields = (part.partition("=") for part in text[found.end() :].split(" "))
    return found[1], text[25 : found.start(1) - 1], {name: value for name, sign, value in fields if sign}


def _short(value: Any) -> str:
    if isinstance(value, str) and value and not any(c.isspace() for c in value):
        text = value
    else:
        text = json.dumps(value, separators=(",", ":"), default=str)
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."
