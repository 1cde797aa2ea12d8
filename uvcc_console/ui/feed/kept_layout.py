"""How this operator last laid out the console: kept in a file of the installation, and believed only in parts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from uvcc_console.core import paths
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.files import write_atomic
from uvcc_engine.transcript.formats import reading

FILE: Final = "layout.json"
_WIDEST: Final = 400
_NAMES: Final = 64


@dataclass(frozen=True, slots=True)
class ScreenLayout:
    """What an operator chose to see. Empty texts, ``()`` and 0 stand for the usual.

    ``right``: columns of the right-hand side; ``log``: lines of the log. ``board``: "", "board" or "table".
    """

    theme: str = ""
    right: int = 0
    log: int = 0
    sort: str = ""
    reverse: bool = False
    columns: tuple[str, ...] = ()
    board: str = ""
    wrap: bool = False
    stamp: str = ""
    axis: str = ""
    smooth: float = 0.0


def _names(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > _NAMES:
        raise ValueError
    return tuple(_name(v) for v in value)


def _name(value: object) -> str:
    if not isinstance(value, str) or len(value) > _NAMES or not value.isprintable():
        raise ValueError
    return value


def _cells(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _WIDEST:
        raise ValueError
    return value


def _truth(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _share(value: object) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1:  # type: ignore[operator]
        raise ValueError
    return float(value)  # type: ignore[arg-type]


_PARSE: Final[Mapping[str, Callable[[object], Any]]] = {
    "str": _name,
    "int": _cells,
    "bool": _truth,
    "float": _share,
    "tuple[str, ...]": _names,
}


def parse(data: object) -> ScreenLayout:
    """What of ``data`` is a layout; every other part is as usual."""
    found: dict[str, Any] = {}
    if isinstance(data, dict):
        for known in fields(ScreenLayout):
            if known.name in data:
                try:
                    found[known.name] = _PARSE[str(known.type)](data[known.name])
                except ValueError:
                    continue  # a part that cannot be read is as usual: a screen must not hang on it
    return ScreenLayout(**found)


def path() -> Path:
    """Where it lies."""
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
