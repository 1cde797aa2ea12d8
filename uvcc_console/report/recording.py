"""``recording.jsonl`` of a package: the run's journal as lines, from which a console elsewhere plays the run back.

It is what the operator's console was told, under the collector's signature like every file of the package; what the
three domains signed is checked by ``uvcc verify``. Fields that are named like secrets and paths of the operator's
machine are left out, and a line that looks like a share or a key refuses the whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal
from uvcc_console.core.paths import JOURNAL
from uvcc_console.report import received
from uvcc_console.report.record import ARTIFACTS, RunRecord
from uvcc_console.report.redact import checked
from uvcc_console.report.run_log import without_secrets
from uvcc_engine.contract.errors import UnreadableError
from uvcc_engine.contract.parsing.untrusted import without_nan
from uvcc_engine.transcript.formats import reading

NAME: Final = "recording.jsonl"
CastPlaces = dict[re.Pattern[str], str]
_LARGEST: Final = 512 * reading.MIB
_LONGEST: Final = 8 * reading.MIB
_PAGE: Final = 2000
_LEFT_OUT: Final = ("cursor",)  # where in whose file the console reads on: nothing that happened


def recording(record: RunRecord) -> bytes:
    """The lines of a run. Raises RedactionError."""
    here, home = (re.escape(str(place)) for place in (record.run_dir, Path.home()))
    places = {re.compile(rf"(?<![\w./-]){place}(?![\w.-])"): name for place, name in ((here, "."), (home, "~"))}
    return "".join(f"{line}\n" for line in checked(NAME, _lines(record.events, places))).encode()


def _lines(events: Iterable[ev.Event], places: CastPlaces) -> Iterator[str]:
    for event in events:
        if event.kind not in _LEFT_OUT:
            data = _moved(without_secrets(ev.to_json(event)), places)
            row = {"data": data, "kind": event.kind, "ts": event.ts}
            yield json.dumps(without_nan(row), sort_keys=True, separators=(",", ":"), default=str)


def _moved(value: Any, places: CastPlaces) -> Any:
    """``value`` with other names for these folders."""
    if isinstance(value, str):
        for place, name in places.items():
            value = place.sub(name, value)
        return value
    if isinstance(value, dict):
        return {key: _moved(inner, places) for key, inner in value.items()}
    return [_moved(inner, places) for inner in value] if isinstance(value, (list, tuple)) else value


def is_package(path: Path) -> bool:
    """Whether a path is a package, packed or not, rather than a run's name."""
    return received.is_archive(path) or os.path.isfile(path / NAME)


@contextlib.contextmanager
def played(path: Path) -> Iterator[Path]:
    """A run folder, with a journal of its own, that shows what a package recorded; it is removed afterwards.

    Raises UnreadableError if the package holds no recording.
    """
    with contextlib.ExitStack() as folders:
        home = folders.enter_context(received.unpacked(path)) if received.is_archive(path) else path
        if not (home / NAME).is_file():
            raise UnreadableError(f"{reading.shown(path)} holds no {NAME}", "it was packed by an older uvcc package")
        folder = Path(folders.enter_context(tempfile.TemporaryDirectory(prefix="uvcc-replay-")))
        run_dir = folder / home.resolve().name
        run_dir.mkdir()
        (run_dir / ARTIFACTS).symlink_to(home.resolve())
        journal = Journal(run_dir / JOURNAL, source="package")
        try:
            page: list[ev.Event] = []
            for event in _events(home / NAME):
                page.append(event)
                if len(page) == _PAGE:
                    journal.append(*page)
                    page.clear()
            if page:
                journal.append(*page)
        finally:
            journal.close()
        yield run_dir


def _events(path: Path) -> Iterator[ev.Event]:
    """The events of a recording, which a stranger may have written. Raises UnreadableError."""
    with reading.open_regular(path, _LARGEST) as file:
        number = 0
        while line := file.readline(_LONGEST):
            number += 1
            found = reading.parse_json(line, f"line {number} of {NAME}")
            if not isinstance(found, dict) or not isinstance(kind := found.get("kind"), str):
                raise UnreadableError(f"line {number} of {NAME} is no event", "fetch the package again")
            event = ev.from_json(kind, found.get("ts"), found.get("data"))
            if event is not None:
                yield event
