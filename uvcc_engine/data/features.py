"""From a table and its schema to features and labels. Statistics are those of the training rows, and no others'."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

import numpy as np
from numpy.typing import NDArray

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.loss_weights import MOST_WEIGHT
from uvcc_engine.data.bins import bits_of, edges_of
from uvcc_engine.data.csv_table import CsvTable, is_missing
from uvcc_engine.data.dates import MONTHS, ORDERS, WEEKDAYS, date_of, days_of
from uvcc_engine.data.schema import (
    BINNED,
    COUNT,
    DATE,
    DATES,
    NUMERIC,
    REAL,
    UNLABELLED,
    Schema,
    SchemaColumn,
    Statistics,
    class_word,
)
from uvcc_engine.data.sets import TEST, TRAIN, VALIDATION, Dataset, Floats, Ints, Labels

RowMask = NDArray[np.bool_]
CLIP_AT: Final = (0.01, 0.99)
MOST_COUNTED: Final = 1000
"""The largest count that fixed point takes; rates are cut at e^4."""
LEAST_SPREAD: Final = 1e-9
"""Of a column's size: less than this between its values is rounding, not data."""
LEAST_STEP: Final = 2.0**-16
"""A step of the fixed point, as a job has it that does not say otherwise."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A data set as the network sees it, and the schema with the statistics that made it so."""

    data: Dataset
    schema: Schema


def prepare(table: CsvTable, schema: Schema) -> Prepared:
    """Split, fit on the training rows, and turn every row into features. Raises ConfigError naming row and column.

    Columns, and a target, that have statistics already keep them: so several owners share rows of one scale.
    """
    check_columns(table, schema)
    side, kept = sides(table, schema), whole_rows(table, schema)
    table, side = table.rows(np.flatnonzero(kept).tolist()), side[kept]
    train = side == TRAIN
    y = targets(table, schema)
    check_sides(table.name, schema, side_counts(side))
    fixed = schema.fixed
    scaling = schema.scaling if fixed or schema.scaling else _scaling(table, schema, y[train])
    for at, value in enumerate(schema.values):
        if not fixed and not (y[train] == at).any():
            raise ConfigError(
                f"{table.name} has no training row of class {value!r}", "take it from target.values, or add such rows"
            )
    fresh = schema if fixed else schema.fitted({c.name: _fit(table, c, train) for c in schema.unfitted})
    fitted = replace(fresh, scaling=scaling)
    x = transform(table, fitted)
    if scaling is not None:
        given = y.astype(np.float64)
        y = (given - scaling.shift) * scaling.scale
        if _near(y[train]):
            _check_told(table, SchemaColumn(schema.target, "standardise"), given, y, train)
    _check_columns_told(table, schema, x, train)
    return Prepared(Dataset.of_sides(x, y, side, schema.outputs, row_weights(table, schema)), fitted)


def _check_columns_told(table: CsvTable, schema: Schema, x: Floats, train: RowMask) -> None:
    """Refuse (ConfigError naming the column) numbers of which next to nothing would be left in fixed point."""
    at = 0
    for column in schema.used:
        if column.kind in (*NUMERIC, *DATES) and _near(x[train, at]):
            given = numbers(table, column)
            _check_told(table, column, given, x[:, at], train & ~np.isnan(given))
        at += column.width


def _near(x: Floats) -> bool:
    """Whether half of these numbers lie within a step of their median."""
    return float(np.median(np.abs(x - np.median(x)))) < LEAST_STEP


def _check_told(table: CsvTable, column: SchemaColumn, given: Floats, x: Floats, train: RowMask) -> None:
    """Refuse (ConfigError) numbers ``given`` [rows] that differ, and half of which do not as the network sees them."""
    values, where = np.unique(given[train], return_index=True)
    if len(values) < 2 or not _near(x[train][where]):
        return
    if column.statistics is not None:
        what = f"{table.name}: the statistics of column {column.name!r} make one number of most of its training rows"
        raise ConfigError(what, "mend low, high, shift and scale, or leave the statistics out")
    row = int(np.flatnonzero(train)[np.argmax(np.abs(given[train] - np.median(values)))])
    raise ConfigError(
        f"{table.place(row, column.name)} holds {given[row]:g}, beside which most others are one number in fixed point",
        f"mend the cell, take the row out, or give the column kind: {'log' if column.kind == 'clip' else 'clip'}",
    )


def side_counts(side: Ints) -> tuple[int, int, int]:
    """How many rows train, test and validate."""
    train, test, validation = (int((side == one).sum()) for one in (TRAIN, TEST, VALIDATION))
    return train, test, validation


def check_sides(file: str, schema: Schema, counts: tuple[int, int, int], what: str = "rows") -> None:
    """Refuse (ConfigError) a split that leaves a side without rows. ``counts``: see :func:`side_counts`."""
    train, test, validation = counts
    rows = train + test + validation
    if not test or not train:
        raise ConfigError(
            f"{file}: {test} of {rows} {what} are for the test", "change split.test in the schema, or bring more rows"
        )
    if schema.validation and not validation:
        raise ConfigError(
            f"{file}: none of {rows} {what} is for validation", "change split.validation in the schema, or leave it out"
        )


def whole_rows(table: CsvTable, schema: Schema) -> RowMask:
    """Which rows ``[rows]`` have a value wherever the schema drops those that have none.

    Raises ConfigError if there are none.
    """
    kept = complete_rows(table, schema)
    if not kept.any():
        raise ConfigError(f"{table.name}: every row lacks a value that the schema drops rows for", "drop a column")
    return kept


def complete_rows(table: CsvTable, schema: Schema) -> RowMask:
    """As :func:`whole_rows`, ``[rows]``, of a part of a table, in which there may be none."""
    kept = np.ones(len(table), dtype=np.bool_)
    for column in schema.used:
        if column.missing == "drop":
            cells = table.column(column.name)
            kept &= np.array([not is_missing(c) or class_word(c) in column.values for c in cells], dtype=np.bool_)
    return kept


def transform(table: CsvTable, schema: Schema) -> Floats:
    """Features (rows, ``schema.features``) by the statistics of a fitted schema. Raises ConfigError as ``prepare``."""
    parts: list[Floats] = []
    for column in schema.used:
        if column.statistics is None:
            raise ConfigError(
                f"the schema has no statistics of column {column.name!r}",
                "take the fitted one that lies beside the opened weights",
            )
        parts += _one_hot(table, column) if column.categorical else _scaled(table, column)
    return np.stack(parts, axis=1)


def feature_names(schema: Schema) -> list[str]:
    """What each feature is called, in the order of :func:`transform`'s: as many as ``schema.features``."""
    found: list[str] = []
    for column in schema.used:
        name = column.name
        found += _own_names(column)
        if column.kind == DATE:
            found += [f"{name} month {i + 1}" for i in range(MONTHS)]
            found += [f"{name} weekday {i + 1}" for i in range(WEEKDAYS)]
        found += [f"{name} missing"] if column.missing == "indicator" else []
    return found


def _own_names(column: SchemaColumn) -> list[str]:
    if column.categorical:
        return [f"{column.name}={value}" for value in column.values]
    if column.kind == BINNED and column.statistics is not None:
        return [f"{column.name} <= {edge:g}" for edge in column.statistics.edges]
    return [f"{column.name} bit {k + 1}" for k in range(column.bins - 1)] if column.kind == BINNED else [column.name]


def targets(table: CsvTable, schema: Schema) -> Labels:
    """Every row's class, or its number as the file has it; nothing (rows, 0) where the schema names no target."""
    if schema.kind == UNLABELLED:
        return np.zeros((len(table), 0))
    return class_numbers(table, schema) if schema.values else target_numbers(table, schema)


def target_numbers(table: CsvTable, schema: Schema) -> Floats:
    """The number of every row. Raises ConfigError naming a row whose target is missing, or no number or count."""
    found = np.zeros(len(table))
    table.column(schema.target)
    for row in range(len(table)):
        number = table.number(row, schema.target)
        if number is None:
            raise ConfigError(f"{table.place(row, schema.target)} is empty", "fill it in or take the row out")
        if schema.kind == COUNT and (number < 0 or number != int(number) or number > MOST_COUNTED):
            raise ConfigError(
                f"{table.place(row, schema.target)} holds {number:g}, which is no count of 0 to {MOST_COUNTED}",
                "mend the cell, or give the target kind: real",
            )
        found[row] = number
    return found


def row_weights(table: CsvTable, schema: Schema) -> Floats | None:
    """What every row counts in the loss [rows], None where all count once. Raises ConfigError naming the row."""
    if not schema.weight:
        return None
    found = np.zeros(len(table))
    table.column(schema.weight)
    for row in range(len(table)):
        number = table.number(row, schema.weight)
        if number is None or not 0.0 <= number <= MOST_WEIGHT:
            what = "has no value" if number is None else f"holds {number:g}"
            raise ConfigError(
                f"{table.place(row, schema.weight)} {what}, and the schema takes it for the row's weight",
                f"weights are 0 to {MOST_WEIGHT:g}: fill it in, or divide all by the same number",
            )
        found[row] = number
    return found


def _scaling(table: CsvTable, schema: Schema, y: Labels) -> Statistics | None:
    """What brings a real target to mean 0 and deviation 1, from the training rows."""
    if schema.kind not in (REAL, COUNT):
        return None
    spread = float(y.std())
    if spread <= LEAST_SPREAD * max(1.0, float(np.abs(y).max())):
        raise ConfigError(
            f"{table.name}: the target {schema.target!r} is constant in the training rows", "name another target"
        )
    return Statistics(shift=float(y.mean()), scale=1.0 / spread) if schema.kind == REAL else None


def class_numbers(table: CsvTable, schema: Schema) -> Ints:
    """The class of every row. Raises ConfigError naming a row whose target is missing or of no class."""
    numbers = {value: at for at, value in enumerate(schema.values)}
    found = np.zeros(len(table), dtype=np.int64)
    for row, cell in enumerate(table.column(schema.target)):
        at = numbers.get(class_word(cell))
        if at is None:
            what = "is empty" if is_missing(cell) else f"holds {cell[:40]!r}, which is none of the target's values"
            raise ConfigError(
                f"{table.place(row, schema.target)} {what}",
                f"fill it in or take the row out; the values are {', '.join(schema.values[:8])}",
            )
        found[row] = at
    return found


def sides(table: CsvTable, schema: Schema) -> Ints:
    """Where every row is, ``[rows]``: a hash of its id, or of its number, decides, so that it stays on its side.

    More validation takes rows from training and none from the test.
    """
    ids = table.column(schema.by) if schema.by else [str(table.first + row) for row in range(len(table))]
    return np.array([side_of(schema, one) for one in ids], dtype=np.int64)


def side_of(schema: Schema, one: str) -> int:
    """The side of the row, or the piece of a text, with this id: ``TRAIN``, ``TEST`` or ``VALIDATION``."""
    drawn = draw(schema.seed, one)
    if drawn < schema.test:
        return TEST
    return VALIDATION if drawn < schema.test + schema.validation else TRAIN


def draw(seed: int, one: str) -> float:
    """A public number from 0 to 1 that a row's id and the seed decide."""
    digest = hashlib.sha256(f"UVCC_SPLIT_V1|{seed}|{one}".encode()).digest()
    return int.from_bytes(digest[:8], "little") / 2.0**64


def check_columns(table: CsvTable, schema: Schema) -> None:
    """Raises ConfigError, naming the column, unless a table has those of the schema and no others."""
    known = {column.name for column in schema.columns} | {schema.target, schema.weight}
    for column in schema.columns:
        table.column(column.name)
    for name in table.columns:
        if name not in known:
            raise ConfigError(
                f"{table.name} has a column {name!r} of which the schema says nothing",
                f"add it to columns, with kind: {'drop'} if it is not to be used",
            )


def numbers(table: CsvTable, column: SchemaColumn) -> Floats:
    """The column's numbers, nan where one is missing and may be. Raises ConfigError naming row and column."""
    cells = table.column(column.name)
    if column.kind in DATES:
        return np.array([np.nan if one is None else days_of(one) for one in _moments(table, column)])
    plain = _plain_numbers(cells, above=-1.0 if column.kind == "log" else -np.inf)
    if plain is not None:
        return plain
    found = np.full(len(cells), np.nan)
    for row in range(len(cells)):
        number = table.number(row, column.name)
        if number is None:
            _may_miss(table, row, column)
        elif column.kind == "log" and number <= -1.0:
            raise ConfigError(
                f"{table.place(row, column.name)} holds {number:g}, the logarithm of 1 + x needs more than -1",
                "give the column kind: standardise or kind: clip",
            )
        else:
            found[row] = number
    return found


def _moments(table: CsvTable, column: SchemaColumn) -> list[datetime | None]:
    """The column's dates, None where one is missing and may be. Raises ConfigError naming row and column."""
    found: list[datetime | None] = []
    for row, cell in enumerate(table.column(column.name)):
        moment = date_of(cell, column.order)
        if moment is None and not is_missing(cell):
            raise ConfigError(
                f"{table.place(row, column.name)} holds {cell[:40]!r}, which is no date in the order {column.order}",
                f"mend the cell, or give the column another order: {', '.join(ORDERS)}; years have four digits",
            )
        if moment is None:
            _may_miss(table, row, column)
        found.append(moment)
    return found


def _date_parts(table: CsvTable, column: SchemaColumn) -> list[Floats]:
    """A feature for each month and each day of the week, Monday first; none of them where the date is missing."""
    moments = _moments(table, column)
    months = np.array([-1 if one is None else one.month - 1 for one in moments])
    weekdays = np.array([-1 if one is None else one.weekday() for one in moments])
    parts = [(months == k) for k in range(MONTHS)] + [(weekdays == k) for k in range(WEEKDAYS)]
    return [part.astype(np.float64) for part in parts]


def _plain_numbers(cells: list[str], above: float) -> Floats | None:
    """The numbers of a column in which none is missing or odd, as most are: at a tenth of the cost of a cell each."""
    try:
        found = np.array(list(map(float, cells)))
    except ValueError:
        return None
    plain = bool(np.isfinite(found).all()) and bool((found > above).all()) and "_" not in "".join(cells)
    return found if plain else None


def _may_miss(table: CsvTable, row: int, column: SchemaColumn) -> None:
    if column.missing in ("error", "drop"):
        ways = "missing: mean" + ("" if column.statistics else " or missing: indicator")  # a feature more once fitted
        raise ConfigError(f"{table.place(row, column.name)} has no value", f"fill it in, or give the column {ways}")


def _other_value(column: SchemaColumn) -> str:
    """What to do with a category that the schema does not name: once it is fitted, the model knows no other."""
    empty = "leave it empty" if column.missing in ("mean", "indicator") else "leave it empty with missing: mean"
    if column.statistics is None:
        return f"add it to the column's values in the schema, mend the cell, or {empty}"
    return f"the model has learned no other: mend the cell, or {empty}"


def categories(table: CsvTable, column: SchemaColumn) -> Ints:
    """The number of every row's category, -1 where it is missing and may be. Raises ConfigError with the place."""
    numbers = {value: at for at, value in enumerate(column.values)}
    found = np.full(len(table), -1, dtype=np.int64)
    for row, cell in enumerate(table.column(column.name)):
        if is_missing(cell) and class_word(cell) not in numbers:
            _may_miss(table, row, column)
            continue
        at = numbers.get(class_word(cell))
        if at is None:
            raise ConfigError(
                f"{table.place(row, column.name)} holds {cell[:40]!r}, which is none of the column's values",
                _other_value(column),
            )
        found[row] = at
    return found


def _fit(table: CsvTable, column: SchemaColumn, train: RowMask) -> Statistics:
    if column.categorical:
        seen = categories(table, column)[train]
        counts = np.bincount(seen[seen >= 0], minlength=len(column.values))
        check_categories(table.name, column, counts, int((seen < 0).sum()))
        return Statistics(shares=tuple((counts / max(1, counts.sum())).tolist()))
    known = numbers(table, column)[train]
    known = known[~np.isnan(known)]
    if not known.size:
        raise ConfigError(f"{table.name}: column {column.name!r} has no value in a training row", "give it kind: drop")
    low, high = -np.inf, np.inf
    if column.kind == "clip":
        low, high = (float(q) for q in np.quantile(known, CLIP_AT))
    x = np.clip(known, low, high)
    x = np.log1p(x) if column.kind == "log" else x
    if float(np.ptp(x)) <= LEAST_SPREAD * max(1.0, float(np.abs(x).max())):
        raise _constant(table.name, column)
    if column.kind == BINNED:
        return Statistics(float(known.mean()), edges=edges_of(known, column.bins))
    with np.errstate(over="ignore"):
        shift, spread = (x.min(), np.ptp(x)) if column.kind == "minmax" else (x.mean(), x.std())
    check_spread(table.name, column, float(spread))
    return Statistics(float(known.mean()), float(low), float(high), float(shift), 1.0 / float(spread))


def check_categories(file: str, column: SchemaColumn, counts: Floats | Ints, lacking: int) -> None:
    """Refuse (ConfigError) a column all of whose training rows hold the same. ``counts``: how many hold each value,
    ``[values]``."""
    told = column.missing == "indicator" and 0 < lacking < lacking + int(counts.sum())
    if np.count_nonzero(counts) < 2 and not told:
        raise _constant(file, column)


def check_spread(file: str, column: SchemaColumn, spread: float) -> None:
    """Refuse (ConfigError) numbers so far apart that they have no deviation."""
    if not math.isfinite(spread):
        what = f"{file}: column {column.name!r} holds numbers too far apart to be brought to one scale"
        raise ConfigError(what, "mend the cells, or give the column kind: clip")


def _constant(file: str, column: SchemaColumn) -> ConfigError:
    return ConfigError(f"{file}: column {column.name!r} is constant in the training rows", "give it kind: drop")


def _scaled(table: CsvTable, column: SchemaColumn) -> list[Floats]:
    s = column.statistics
    assert s is not None
    x = numbers(table, column)
    lacking = np.isnan(x)
    if column.kind == "log" and max(s.low, s.fill) <= -1.0 and lacking.any():
        what = f"the statistics of column {column.name!r} put {s.fill:g} where a value is missing"
        raise ConfigError(f"{what}, and the logarithm of 1 + x needs more than -1", "give fill the column's mean")
    told = [lacking.astype(np.float64)] if column.missing == "indicator" else []
    if column.kind == BINNED:
        return [*bits_of(np.where(lacking, s.fill, x), s.edges), *told]
    x = np.clip(np.where(lacking, s.fill, x), s.low, s.high)
    x = ((np.log1p(x) if column.kind == "log" else x) - s.shift) * s.scale
    parts = _date_parts(table, column) if column.kind == DATE else []
    return [x, *parts, *told]


def _one_hot(table: CsvTable, column: SchemaColumn) -> list[Floats]:
    s = column.statistics
    assert s is not None
    at = categories(table, column)
    rows = np.concatenate([np.eye(len(column.values)), [s.shares]])[at]  # the last line is that of -1
    lacking = [(at < 0).astype(np.float64)] if column.missing == "indicator" else []
    return [*rows.T, *lacking]
