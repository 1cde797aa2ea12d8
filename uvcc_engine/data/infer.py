"""A first schema of a table: what a look at the cells suggests, for the owner to read and change."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.data.csv_table import CsvTable, as_number, is_missing
from uvcc_engine.data.dates import looks_like_date, order_of
from uvcc_engine.data.decimal_commas import holds_decimal_commas, with_points
from uvcc_engine.data.schema import (
    BINARY,
    BINNED,
    CLASSES,
    COMMA,
    DAYS,
    DROP,
    EMBEDDED,
    MOST_CATEGORIES,
    MOST_EMBEDDED,
    NUMERIC,
    ONE_HOT,
    POINT,
    REAL,
    UNLABELLED,
    Schema,
    SchemaColumn,
    class_word,
    dimension_of,
)

_TARGETS: Final = ("target", "label", "class", "y", "diagnosis", "outcome")
_IDENTIFIER: Final = re.compile(
    r"(^|[_\s-])(id|key|uuid|number|no|nr)$|^(id|patient|name)([_\s-]|$)|^(row|index|rownames|unnamed: \d+)$",
    re.IGNORECASE,
)
_NUMBER_AS_TEXT: Final = re.compile(r"[-+]?[$€£¥]?\s?[-+]?\d+([ .,'\u00a0]\d+)*\s?[$€£¥%]?")
"""A number as people write it and programs do not read it: with a comma, a unit or gaps between thousands."""
_NAMED_MONTH: Final = re.compile(
    r"(\d{1,2}[-/. ]{1,2})?(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*[-/. ,]{1,2}(\d{1,2},? )?\d{4}",
    re.IGNORECASE,
)
_GROUPED: Final = re.compile(r"-?[1-9]\d{0,2}\.\d{3}")
_UNGROUPED: Final = re.compile(r"-?\d{1,3}")
_MOST_TOLD: Final = 4
_FAR: Final = 10.0  # deviations from the mean: a column with values beyond is clipped
_CLIPPED: Final = f"values beyond {_FAR:g} deviations are clipped"
_BY: Final = ", by which rows are split"
_FEW_MISSING: Final = 0.1
_FEW_ROWS: Final = 20  # below this, texts that all differ may still be categories


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A schema, and per column what it was decided by, where that is not plain to see."""

    schema: Schema
    notes: dict[str, str]


def infer(table: CsvTable, target: str | None = "", bins: int = 0, embed: int = 0) -> Suggestion:
    """Suggest a schema. Raises ConfigError for a table without a target of classes or without a column to learn from.

    Without ``target`` the column called so, or label, class, y, diagnosis or outcome, is; else the last one. With
    ``bins`` every feature is a bit, as trees take them, and a target of two classes is binary. With ``embed``
    columns of more categories than that are embedded. With a ``target`` of None nothing is: k-means learns none.
    """
    decimal = COMMA if holds_decimal_commas(table) else POINT
    table = with_points(table) if decimal == COMMA else table
    kind, values = UNLABELLED, tuple[str, ...]()
    if target is not None:
        target = target or next((n for n in table.columns if n.lower() in _TARGETS), list(table.columns)[-1])
        kind, values = _target(table, target)
    columns: list[SchemaColumn] = []
    notes: dict[str, str] = {}
    by = ""
    for name in table.columns:
        if name == target:
            continue
        column, note, identifies = _column(table, name, embed)
        if bins:
            column, note = _in_bits(column, note, bins)
        columns.append(column)
        if identifies and by:  # one column identifies rows, the first that does
            note = note.replace(_BY, "")
        by = by or (name if identifies else "")
        if note:
            notes[name] = note
    if all(column.kind == DROP for column in columns):
        beside = f" beside {target!r}" if target else ""
        raise ConfigError(f"{table.name} has no column to learn from{beside}", _why_none(columns, notes))
    kind = BINARY if bins and len(values) == 2 else kind
    return Suggestion(Schema(target or "", values, tuple(columns), by=by, kind=kind, decimal=decimal), notes)


def _why_none(columns: Sequence[SchemaColumn], notes: Mapping[str, str]) -> str:
    """Why each of these columns is left out, of the first few."""
    if not columns:
        return "it has one column, and the target is one; columns are separated by commas, semicolons, bars or tabs"
    told = [f"{one.name}: {notes[one.name].removesuffix(_BY)}" for one in columns[:_MOST_TOLD]]
    more = len(columns) - len(told)
    return "; ".join(told) + (f"; and {more} more" if more else "")


def _in_bits(column: SchemaColumn, note: str, bins: int) -> tuple[SchemaColumn, str]:
    """The column as bits: numbers in bins; a category that lacks is no bit, so its row is left out."""
    if column.kind in NUMERIC:
        few = 2 if column.kind == "minmax" else bins  # the column holds nothing but 0 and 1 then
        return replace(column, kind=BINNED, bins=few), note.rpartition(_CLIPPED)[2].removeprefix("; ")
    if column.kind == DAYS:
        return SchemaColumn(column.name, DROP), "dates are not brought into bins"
    if column.kind == ONE_HOT and column.missing == "indicator":
        return replace(column, missing="drop"), f"{note}; these rows are left out"
    return column, note


def _target(table: CsvTable, target: str) -> tuple[str, tuple[str, ...]]:
    """The kind of the target, and its classes: numbers of many values, or with fractions, are a real one."""
    cells = table.column(target)
    for row, cell in enumerate(cells):
        if is_missing(cell):
            raise ConfigError(f"{table.place(row, target)} is empty, and is the target", "fill it in, or take it out")
    words = set(map(class_word, cells))
    numbers = [as_number(word) for word in words]
    real = any(n is not None and n != math.floor(n) for n in numbers if n is not None and math.isfinite(n))
    if None not in numbers and (real or len(words) > MOST_CATEGORIES):
        return REAL, ()
    if len(words) > MOST_CATEGORIES:
        raise ConfigError(
            f"{table.name}: the target {target!r} holds {len(words)} different values",
            "name a column of classes or of numbers",
        )
    if len(words) < 2:
        raise ConfigError(f"{table.name}: the target {target!r} holds only {cells[0]!r}", "name a column of classes")
    return CLASSES, _sorted(words)


def _sorted(words: set[str]) -> tuple[str, ...]:
    """Numbers by size, before words by their letters."""

    def place(word: str) -> tuple[bool, float, str]:
        number = as_number(word)
        return number is None, number if number is not None else 0.0, word

    return tuple(sorted(words, key=place))


def _column(table: CsvTable, name: str, embed: int) -> tuple[SchemaColumn, str, bool]:
    """The column, why, and whether it identifies its row."""
    cells = table.columns[name]
    rows = [row for row, cell in enumerate(cells) if not is_missing(cell)]
    lacking = len(cells) - len(rows)
    words = {class_word(cells[row]) for row in rows}
    if len(words) <= 1 and not (words and lacking):
        return SchemaColumn(name, DROP), "constant" if words else "empty", False
    numeric = [row for row in rows if as_number(cells[row]) is not None]
    unique = len(words) == len(cells)
    if all(looks_like_date(cells[row]) for row in rows):
        return _dates(name, [cells[row] for row in rows], lacking, len(cells))
    if len(numeric) == len(rows):
        numbers = np.array([table.number(row, name) for row in rows], dtype=np.float64)
        if unique and _IDENTIFIER.search(name) and np.array_equal(numbers, np.floor(numbers)):
            return SchemaColumn(name, DROP), f"another number in every row: an identifier{_BY}", True
        if len(words) == 1:
            return (
                SchemaColumn(name, ONE_HOT, "indicator", tuple(words)),
                f"one value, missing in {lacking} rows",
                False,
            )
        column, note, identifies = _numbers(name, numbers, lacking, len(cells))
        return column, _joined(note, _thousands({cells[row].strip() for row in rows})), identifies
    if len(numeric) > len(rows) // 2:
        odd = next(row for row in rows if as_number(cells[row]) is None)
        raise ConfigError(
            f"{table.place(odd, name)} holds {cells[odd][:40]!r}, and {len(numeric)} other cells hold numbers",
            "mend the cell, or leave it empty; a column of categories has few numbers",
        )
    if unique and len(cells) >= _FEW_ROWS:
        named = bool(_IDENTIFIER.search(name))
        return (
            SchemaColumn(name, DROP),
            _joined("another text in every row" + (_BY if named else ""), _doubt(words)),
            named,
        )
    missing = "indicator" if lacking else "error"
    doubt = _doubt(words)
    if embed and embed < len(words) <= MOST_EMBEDDED:
        size = dimension_of(len(words))
        note = _joined(f"{len(words)} categories, a vector of {size} for each", _told(lacking), doubt)
        return SchemaColumn(name, EMBEDDED, missing, _sorted(words), dimension=size), note, False
    if len(words) > MOST_CATEGORIES:
        more = "; --embed 8 makes vectors of them" if len(words) <= MOST_EMBEDDED else ""
        note = f"{len(words)} different texts, too many to become features{more}"
        return SchemaColumn(name, DROP), _joined(note, doubt), False
    return SchemaColumn(name, ONE_HOT, missing, _sorted(words)), _joined(_told(lacking), doubt), False


def _thousands(words: set[str]) -> str:
    """What speaks for points between thousands: every number below a thousand has none, every other one has one."""
    grouped = [word for word in words if _GROUPED.fullmatch(word)]
    plain = [word for word in words if _UNGROUPED.fullmatch(word)]
    if not grouped or not plain or len(grouped) + len(plain) < len(words):
        return ""
    told = f"{max(grouped)!r} is read as a number below 1000, beside {max(plain)!r}"
    return f"{told}: if points part thousands, write {max(grouped).replace('.', '')}"


def _doubt(words: set[str]) -> str:
    """What speaks against these texts being categories as they stand, if anything."""
    if all(_NUMBER_AS_TEXT.fullmatch(word) for word in words):
        return f"texts like {min(words)!r} look like numbers: write 1234.5 for them to be learned as such"
    dates = [word for word in words if looks_like_date(word) or _NAMED_MONTH.fullmatch(word)]
    if 2 * len(dates) > len(words):
        few = [shape for shape in (looks_like_date, _NAMED_MONTH.fullmatch) if any(map(shape, dates))]
        likes = " and ".join(repr(min(filter(shape, dates))) for shape in few)
        return f"texts like {likes} look like dates: write all of them as 2024-12-31 for them to be learned as such"
    known: dict[str, str] = {}
    for word in sorted(words):
        other = known.setdefault(word.casefold(), word)
        if other != word:
            return f"{other!r} and {word!r} are two categories"
    return ""


def _joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))


def _dates(name: str, cells: list[str], lacking: int, rows: int) -> tuple[SchemaColumn, str, bool]:
    order = order_of(cells)
    if not order:
        told = "dates in no clear order: to learn from them, give kind: days and order: ymd, dmy or mdy"
        return SchemaColumn(name, DROP), told, False
    missing = "error" if not lacking else "mean" if lacking < _FEW_MISSING * rows else "indicator"
    note = "dates, as days since 1970; kind: date adds months and days of the week"
    return SchemaColumn(name, DAYS, missing, order=order), _joined(note, _told(lacking)), False


def _numbers(
    name: str, x: np.ndarray[tuple[int, ...], np.dtype[np.float64]], lacking: int, rows: int
) -> tuple[SchemaColumn, str, bool]:
    missing = "error" if not lacking else "mean" if lacking < _FEW_MISSING * rows else "indicator"
    if set(x.tolist()) <= {0.0, 1.0}:
        return SchemaColumn(name, "minmax", missing), _told(lacking), False
    spread = float(x.std())
    if spread and float(np.abs(x - x.mean()).max()) > _FAR * spread:
        note = _CLIPPED
        return SchemaColumn(name, "clip", missing), _joined(note, _told(lacking)), False
    return SchemaColumn(name, "standardise", missing), _told(lacking), False


def _told(lacking: int) -> str:
    return f"missing in {lacking} rows" if lacking else ""
