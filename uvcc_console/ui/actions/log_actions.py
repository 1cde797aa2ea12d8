"""What is taken out of the log: lines for the clipboard or a file, and long texts to be read."""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from textual.screen import Screen

from uvcc_console.core.snapshot import LogEntry
from uvcc_console.ui.panels.log_view import LogView
from uvcc_console.ui.run_base import RunConsole
from uvcc_console.ui.widgets.log_lines import entry_text
from uvcc_console.ui.widgets.ring import RingLog
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.text import counted

_LONG: Final = ("stackdump", "flight")
_SUFFIXES: Final = (".txt", ".json", ".jsonl", ".log", ".csv", ".md")
_LARGEST: Final = 4 << 20


def is_long(entry: LogEntry) -> bool:
    """Whether the line is part of a stack dump or a flight record."""
    return any(word in entry.source.partition("/")[2] for word in _LONG)


def newest_dump(ring: RingLog) -> tuple[str, list[str]]:
    """(source, its lines) of the newest long text that pods wrote into the log; empty where there is none."""
    source = next((ring[at].source for at in range(len(ring) - 1, -1, -1) if is_long(ring[at])), "")
    return source, dump(ring, source) if source else []


def dump(ring: RingLog, source: str) -> list[str]:
    """The lines of one long text."""
    return [ring[at].text for at in range(len(ring)) if ring[at].source == source]


def texts(run_dir: Path) -> list[Path]:
    """The readable files among a run's artifacts, the newest first."""
    home = run_dir / "artifacts"
    found = [p for p in home.rglob("*") if p.suffix in _SUFFIXES and p.is_file() and not p.is_symlink()]
    return sorted((p for p in found if p.stat().st_size <= _LARGEST), key=lambda p: -p.stat().st_mtime)


class LogActions:
    """Part of ``Commands``: needs ``app`` and ``_open``."""

    app: RunConsole

    def _open(self, screen: Screen[Any]) -> None:
        raise NotImplementedError

    def take(self, lines: Sequence[str], save: bool) -> None:
        """Lines of the log: to the clipboard, or into a file of the run's folder."""
        if not save:
            self.app.copy_to_clipboard("\n".join(lines) + "\n")
            needs = "tmux needs set -g set-clipboard on" if os.environ.get("TMUX") else "the terminal must allow it"
            self.app.say(f"{counted(len(lines), 'line')} copied (OSC 52: {needs})")
            return
        if self.app.readonly:
            self.app.say("not saved: this console is read-only; y copies", "warning")
            return
        from uvcc_console.report.redact import checked

        name = time.strftime("log-%Y%m%dT%H%M%SZ.txt", time.gmtime(self.app.now()))
        try:
            collections.deque(checked(name, lines), maxlen=0)
            (self.app.run_dir / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        except (OSError, UvccError) as e:
            self.app.say(f"not saved: {e}", "error")
            return
        self.app.say(f"{counted(len(lines), 'line')} saved in {self.app.run_dir / name}")

    def read(self, entry: LogEntry) -> None:
        """One line whole, with what it leaves out in the log; of a stack dump or flight record all of it."""
        from uvcc_console.ui.screens.viewer import ViewerScreen

        if is_long(entry):
            self._open(ViewerScreen(entry.source, dump(self.app.main.query_one(LogView).ring, entry.source)))
            return
        detail = entry.detail.split(" ") if entry.detail else []
        self._open(ViewerScreen(f"{entry.level} {entry.source}", [entry_text(replace(entry, detail="")), *detail]))

    def do_view(self, text: str) -> None:
        """Read the newest stack dump or flight record, or the artifact that is named."""
        from uvcc_console.ui.screens.viewer import ViewerScreen

        word = text.strip()
        if not word:
            source, lines = newest_dump(self.app.main.query_one(LogView).ring)
            if lines:
                self._open(ViewerScreen(source, lines))
                return
        found = texts(self.app.run_dir)
        wanted = [p for p in found if (word or "flight") in str(p.relative_to(self.app.run_dir))]
        if not wanted:
            known = ", ".join(p.name for p in found[:6]) or "none yet: D and C make some"
            self.app.say(f"nothing to read{f' called {word}' if word else ''}; there are {known}", "warning")
            return
        lines = wanted[0].read_text(encoding="utf-8", errors="replace").splitlines()
        self._open(ViewerScreen(str(wanted[0].relative_to(self.app.run_dir)), lines))
