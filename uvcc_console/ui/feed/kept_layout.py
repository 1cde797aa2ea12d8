"""How this operator last laid out the console: kept in a file of the installation, and believed only in parts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from uvcc_console.core import paths
from uvcc_engine.contract.errors import ConfigError, UvccError
from uvcc_engine.contract.parsing import strict
from uvcc_engine.contract.run_files.files import write_atomic
from uvcc_engine.transcript.formats import reading

FILE: Final = "layout.json"
_WIDEST: Final = 400
_NAMES: Final = 64


@dataclass(frozen=True, slots=True)
class ScreenLayout:
    """What an operator chose to see. Empty texts, ``()`` and 0 stand for the usual.

    ``right``: columns of the right-hand side; ``log``: lines of the log, ``log_short`` on a short screen.
    ``board``: "", "board" or "table".
    """

    theme: str = ""
    right: int = 0
    log: int = 0
    log_short: int = 0
    sort: str = ""
    reverse: bool = False
    columns: tuple[str, ...] = ()
    board: str = ""
    wrap: bool = False
    stamp: str = ""
    axis: str = ""
    smooth: float = 0.0

    def __post_init__(self) -> None:
        texts = (self.theme, self.sort, self.board, self.stamp, self.axis, *self.columns)
        sizes = all(0 <= size <= _WIDEST for size in (self.right, self.log, self.log_short))
        if (
            not sizes
            or not 0 <= self.smooth < 1
            or len(texts) > _NAMES
            or any(len(t) > _NAMES or not t.isprintable() for t in texts)
        ):
            raise ConfigError("that is no layout of a screen")


def parse(data: object) -> ScreenLayout:
    """What of ``data`` is a layout; every other part is as usual, for a screen must not hang on it."""
    found: dict[str, Any] = {}
    parts: dict[str, Any] = data if isinstance(data, dict) else {}
    for known in fields(ScreenLayout):
        if known.name in parts:
            try:
                part = strict.read(ScreenLayout, {known.name: parts[known.name]}, FILE)
            except ConfigError:
                continue
            found[known.name] = getattr(part, known.name)
    return ScreenLayout(**found)


def path() -> Path:
    """The path of the file that keeps the layout."""
    return paths.config_dir() / FILE


def load() -> ScreenLayout:
    """The layout that was kept, else the usual one: no halt waits for this file."""
    try:
        return parse(reading.read_json(path()))
    except UvccError:
        return ScreenLayout()


def keep(layout: ScreenLayout) -> None:
    """Write it down; the usual one needs no file. Raises UvccError."""
    where = path()
    if layout == ScreenLayout():
        try:
            where.unlink(missing_ok=True)
        except OSError as e:
            raise UvccError(f"cannot remove {where}: {e.strerror}") from e
        return
    paths.ensure(where.parent)
    write_atomic(where, json.dumps(asdict(layout), indent=1).encode() + b"\n", mode=0o600)
