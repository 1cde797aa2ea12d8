"""What may come next on the ``:`` and ``/`` lines."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from uvcc_console.ui.actions import compared
from uvcc_console.ui.actions.keys import COMMANDS
from uvcc_console.ui.actions.log_actions import texts
from uvcc_console.ui.run_base import RunConsole
from uvcc_console.ui.widgets.fleet_columns import COLUMNS
from uvcc_console.ui.widgets.ring import FLEET_ONLY

FIELDS = ("level>=", "pod=", "party=", "source=", "file=", *(f"{name}=" for name in sorted(FLEET_ONLY)))
_PODS = ("pod", "stackdump", "fetch", "restart", "replace", "tensorboard")
MOST = 40


def words(app: RunConsole, kind: str, text: str) -> list[str]:
    """What the last word of the line may be."""
    if kind == "filter":
        last = text.rpartition(" ")[2].lstrip("!")
        if last.startswith("level>="):
            return [f"level>={level}" for level in ("info", "warn", "error")]
        if last.startswith("pod="):
            return [f"pod={name}" for name in app.snap.pods]
        return list(FIELDS)
    command, given, _ = text.partition(" ")
    if not given:
        return sorted(COMMANDS)
    if command in _PODS:
        return list(app.snap.pods)
    if command in ("sort", "columns"):
        return [*(("worst", "place", "desc") if command == "sort" else ("usual",)), *COLUMNS]
    if command == "compare":
        return compared.others(app.run_dir)
    if command == "theme":
        return sorted(app.available_themes)
    if command == "view":
        return [str(p.relative_to(app.run_dir / "artifacts")) for p in texts(app.run_dir)[:MOST]]
    if command == "goto":
        return ["step ", "event ", "halt", "failed", "fork", "start", "end"]
    return []


def completed(text: str, offered: Iterable[str]) -> tuple[str, list[str]]:
    """(the line as far as it is certain, all that its last word may be)."""
    before, space, last = text.rpartition(" ")
    found = [word for word in offered if word.startswith(last)]
    if not found:
        return text, []
    certain = os.path.commonprefix(found)
    end = " " if len(found) == 1 and not certain.endswith(("=", " ")) else ""
    return f"{before}{space}{certain}{end}", found


class History:
    """Lines that were typed, the newest last; no line twice."""

    def __init__(self, lines: Sequence[str] = ()) -> None:
        self._lines = list(lines)
        self._at = len(self._lines)
        self._draft = ""

    def add(self, line: str) -> None:
        """A line was meant."""
        if line.strip():
            self._lines = [*(x for x in self._lines if x != line), line][-200:]
        self.rewind()

    def rewind(self) -> None:
        """Back to the end, where a new line is typed."""
        self._at, self._draft = len(self._lines), ""

    def move(self, by: int, now: str) -> str:
        """The line before (-1) or after (1) the one that is shown; ``now`` is what stands there."""
        if self._at == len(self._lines):
            self._draft = now
        self._at = min(len(self._lines), max(0, self._at + by))
        return self._lines[self._at] if self._at < len(self._lines) else self._draft
