"""Which hosts of an inventory a run may hold a claim on, on disk before the host hears of it. Survives ``kill -9``.

So a host that is off, or refuses us, is somebody's trouble only if a claim was ever asked for there; and a claim that
may still be there is known without asking every host of the inventory.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from uvcc_console.core import paths
from uvcc_engine.contract.parsing.untrusted import json_of
from uvcc_engine.contract.run_files.files import append_synced

FILE = "inventory_claims.jsonl"
_NAME = re.compile(r"uvcc-(?P<run>.+)-p[0-9]{1,6}r[0-9]{1,6}")
_PREFIX = re.compile(r"uvcc-(?P<run>.+)-(p[0-9]{1,6}(r[0-9]{0,6})?)?")


@dataclass(frozen=True, slots=True)
class Claims:
    """Append-only, fsynced. Lines: {ts, name, host} before a claim is asked for, then {..., over: why}."""

    path: Path

    @classmethod
    def of(cls, run_dir: Path) -> Claims:
        return cls(run_dir / FILE)

    def note(self, name: str, host: str, over: str = "") -> None:
        """Raises UvccError if the disk refuses; then no claim may be made."""
        row = {"ts": round(time.time(), 3), "name": name, "host": host} | ({"over": over} if over else {})
        append_synced(self.path, row, "free disk space; no host was claimed")

    def open(self, prefix: str = "") -> list[tuple[str, str]]:
        """(name, host) of every claim that may be there, in the order they were asked for."""
        try:
            lines = self.path.read_text(errors="replace").splitlines()
        except OSError:
            return []
        found: dict[tuple[str, str], bool] = {}
        for line in lines:
            try:
                row = json_of(line)
                key = (str(row["name"]), str(row["host"]))
            except (ValueError, KeyError, TypeError):
                continue  # a line cut short by a crash: nothing was sent
            found[key] = not row.get("over")
        return [key for key, there in found.items() if there and key[0].startswith(prefix)]


def book_for(prefix: str, run_dir: Path) -> Claims | None:
    """The claims of the run that this name or prefix belongs to; None where it names no run that this folder knows."""
    found = _NAME.fullmatch(prefix) or _PREFIX.fullmatch(prefix)
    if found is None:
        return None
    run = found["run"]
    if run == run_dir.name:
        return Claims.of(run_dir)
    book = Claims.of(paths.run_dir(run))
    return book if book.path.exists() else None


def books() -> Iterator[Claims]:
    """The claims of every run of this data folder."""
    for path in sorted(paths.runs_dir().glob(f"*/{FILE}")):
        yield Claims(path)
