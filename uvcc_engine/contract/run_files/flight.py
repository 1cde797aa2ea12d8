"""The flight recorder: what a worker's collectives and channels are at, told when asked, also while the worker hangs.

Whoever asks leaves the file ``.FLIGHT`` in the run directory; the thread that keeps each worker's heartbeat fresh looks
for it and answers with ``flight_<coord>.json``. The modules that do the waiting provide the tables. A question that was
there before the worker is not its to answer.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.parsing.untrusted import json_of
from uvcc_engine.contract.run_files import files
from uvcc_engine.contract.run_files.waiting import Waiting

REQUEST: Final = ".FLIGHT"
registered: dict[str, Callable[[], Any]] = {}


def name_of(coord: str) -> str:
    """The file with a worker's answer."""
    return f"flight_{coord}.json"


def provide(what: str, table: Callable[[], Any]) -> None:
    """From now on ``table()``, made of JSON's types, is part of this process's answers; the newest of a name counts."""
    registered[what] = table


def ask(directory: Path, run: str, nonce: str) -> None:
    """Have every worker of this run directory answer. Raises UvccError if it cannot be written."""
    files.write_atomic(directory / REQUEST, json.dumps({"run": run, "nonce": nonce}).encode(), durable=False)


class FlightRecorder:
    """Answers for one worker. ``look`` is cheap enough for every second."""

    def __init__(self, directory: Path, run: str, coord: str, *, clock: Callable[[], float] = time.time) -> None:
        self._directory, self._run, self._coord, self._clock = directory, run, coord, clock
        self._answered = self._asked()

    def _asked(self) -> str:
        found: Mapping[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            found = json_of((self._directory / REQUEST).read_bytes())
        return str(found.get("nonce", "")) if isinstance(found, dict) and found.get("run") == self._run else ""

    def look(self, waiting: Waiting | None) -> bool:
        """Answer a question that is new; whether there was one. Raises UvccError if the answer cannot be written."""
        nonce = self._asked()
        if not nonce or nonce == self._answered:
            return False
        self._answered = nonce
        answer = {"run": self._run, "coord": self._coord, "nonce": nonce, "ts": self._clock()}
        answer |= waiting.fields() if waiting is not None else {"waiting_on": ""}
        answer |= {"tables": {what: _read(table) for what, table in registered.items()}}
        data = json.dumps(answer, separators=(",", ":"), default=str).encode()
        files.write_atomic(self._directory / name_of(self._coord), data, durable=False)
        return True


def _read(table: Callable[[], Any]) -> Any:
    """A table that changes while it is read says so and does not take the others with it."""
    try:
        return table()
    except (RuntimeError, KeyError, ValueError, UvccError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
