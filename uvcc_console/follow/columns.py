"""Columns of a stranger's table by name: what is the step, what the loss, and what any other number is called. Pure.

Tables are CSV (comma, semicolon or tab) and JSON lines. Whatever a line holds, nothing here raises: it gives a row or
is counted.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from uvcc_engine.contract.parsing.untrusted import STEPS, as_float, as_int, as_object

MOST_NAMES: Final = 64
MOST_COLUMNS: Final = 256
DEEPEST: Final = 2
STEP: Final = "step"
_STEPS: Final = ("step", "globalstep", "trainerglobalstep", "trainstep", "iteration", "iter", "it", "steps")
_EPOCHS: Final = ("epoch", "epochs")
_TIMES: Final = ("ts", "time", "timestamp", "walltime", "datetime", "date", "runtime", "elapsed", "createdat", "pid")
_MEANINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "loss": ("loss", "trainloss", "trainingloss", "losstrain", "trainlossstep"),
    "lr": ("lr", "learningrate", "trainlearningrate", "trainlr", "lradamw", "lrsgd"),
    "toks_per_s": ("tokspers", "tokss", "tokenss", "tokenspersec", "tokenspersecond", "tokspersec", "tps"),
    "samples_per_s": ("sampless", "samplespers", "samplespersec", "samplespersecond", "trainsamplespersecond"),
    "val_loss": ("valloss", "evalloss", "validloss", "validationloss", "testloss", "validationepochloss"),
    "val_ppl": ("valppl", "evalppl", "perplexity", "evalperplexity", "valperplexity", "ppl"),
    "val_accuracy": ("valaccuracy", "evalaccuracy", "valacc", "evalacc", "testaccuracy", "validationaccuracy"),
    "accuracy": ("accuracy", "acc", "trainaccuracy", "trainacc"),
}
_BY_SPELLING: Final = {spelling: name for name, spellings in _MEANINGS.items() for spelling in spellings}
_NUMBER: Final = re.compile(r"[-+]?(\d+\.?\d*([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?|nan|inf|infinity)", re.IGNORECASE)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def is_step(name: str) -> bool:
    """Whether a column counts the steps."""
    return _plain(name) in _STEPS


def called(name: str) -> str:
    """What a column's figure is called here: the console's own name for what it means, else its own, made safe."""
    known = _BY_SPELLING.get(_plain(name))
    return known if known is not None else _safe(name)


def _safe(name: str) -> str:
    safe = re.sub(r"[^A-Za-z0-9_./%-]+", "_", name.strip()).strip("_./-%")[:48]
    return safe if safe[:1].isalpha() else f"x_{safe}"[:48] if safe else ""


class FigureNames:
    """Which file a figure is of: one that two files have is the first one's, and has the file's name before it else."""

    def __init__(self) -> None:
        self._owners: dict[str, str] = {}
        self.refused: set[str] = set()

    def of(self, src: str, label: str, name: str) -> str:
        """The name for one file's figure; "" where there are too many already."""
        wanted = called(name)
        whole = f"{label}/{name}"
        for one in (wanted, called(whole), _safe(whole)):  # of a file named training the loss means the same, too
            if not one:
                continue
            owner = self._owners.get(one)
            if owner == src:
                return one
            if owner is None:
                if len(self._owners) >= MOST_NAMES:
                    break
                self._owners[one] = src
                return one
        self.refused.add(wanted or name[:48])
        return ""


@dataclass(frozen=True, slots=True)
class FigureRow:
    """One row: its step and its figures, by the names that their columns have."""

    step: int
    values: Mapping[str, float]


@dataclass(slots=True)
class _Counting:
    """Steps where no column counts them: the rows do."""

    rows: int = 0

    def step_of(self, given: Mapping[str, float], names: Sequence[str]) -> int | None:
        """The row's step; None where it has a column of steps with no step in it."""
        for name in names:
            if is_step(name):
                return as_int(given.get(name), 0, STEPS)
        self.rows += 1
        return self.rows


@dataclass(slots=True)
class DelimitedTable:
    """A table with a line of names on top; one without has its columns counted. ``bad`` counts rows of no use."""

    names: tuple[str, ...] = ()
    delimiter: str = ","
    bad: int = 0
    counting: _Counting = field(default_factory=_Counting)

    def rows(self, lines: Sequence[str]) -> list[FigureRow]:
        """What these lines hold."""
        return [row for line in lines if line.strip() and (row := self._row(line)) is not None]

    def header(self, line: str) -> bool:
        """Take a line for the table's top if it may be one."""
        if not line.strip():
            return False
        line = line.removeprefix("\ufeff")
        delimiter = max(",;\t", key=line.count)
        cells = _cells(line, delimiter)
        if not cells or len(cells) > MOST_COLUMNS:
            return False
        numbers = sum(1 for c in cells if _number(c) is not None)
        if numbers == len(cells):  # a table without a line of names: its first column may count
            self.delimiter = delimiter
            self.names = tuple(f"column_{i}" for i in range(1, len(cells) + 1))
            return False
        if numbers or all(_plain(c) == "" for c in cells):
            return False
        self.delimiter, self.names = delimiter, tuple(c.strip().lstrip("#").strip() for c in cells)
        return True

    def _row(self, line: str) -> FigureRow | None:
        if not self.names or line[:1].isalpha() or line[:1] in "#\"'":
            if self.header(line):
                return None
            if not self.names:
                self.bad += 1
                return None
        cells = _cells(line, self.delimiter)
        given = {
            name: value for name, cell in zip(self.names, cells, strict=False) if (value := _number(cell)) is not None
        }
        step = self.counting.step_of(given, self.names) if given and len(cells) <= MOST_COLUMNS else None
        if step is None:
            self.bad += 1
            return None
        return FigureRow(step, _figures(given))


def _cells(line: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:
        return []


def _number(text: str) -> float | None:
    text = text.strip()
    return float(text) if len(text) <= 40 and _NUMBER.fullmatch(text) else None


def _figures(given: Mapping[str, float]) -> dict[str, float]:
    """All but what says when the row was written."""
    return {k: v for k, v in given.items() if not is_step(k) and _plain(k) not in (*_TIMES, *_EPOCHS)}


@dataclass(slots=True)
class JsonLinesTable:
    """One JSON object a line; objects inside it are reached by names with a slash."""

    bad: int = 0
    counting: _Counting = field(default_factory=_Counting)

    def rows(self, lines: Sequence[str]) -> list[FigureRow]:
        """What these lines hold; an object without a number is no row, and no mistake."""
        found = []
        for line in lines:
            if not line.strip():
                continue
            read = as_object(line)
            if read is None:
                self.bad += 1
                continue
            given: dict[str, float] = {}
            _flatten(read, "", DEEPEST, lambda name, value, into=given: into.setdefault(name, value))  # type: ignore[misc]
            figures = _figures(given)
            if not figures:
                continue
            step = self.counting.step_of(given, [*given, *list(read)[:MOST_COLUMNS]])
            if step is None:
                self.bad += 1
            else:
                found.append(FigureRow(step, figures))
        return found


def _flatten(read: Mapping[str, Any], before: str, depth: int, take: Callable[[str, float], object]) -> None:
    for key, value in list(read.items())[:MOST_COLUMNS]:
        name = f"{before}{key}"[:100]
        if isinstance(value, Mapping):
            if depth:
                _flatten(value, f"{name}/", depth - 1, take)
        elif isinstance(value, float) and value != value:
            take(name, value)
        elif (number := as_float(value)) is not None:
            take(name, number)
