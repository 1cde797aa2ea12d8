"""The statistics of a table's training rows in one pass over its parts, as ``features.prepare`` finds them of a whole.

Means and deviations are merged part by part (Chan, Golub and LeVeque, 1983). Of a column of kind clip or bins,
quantiles and what follows from them are of all its values while they are at most ``SAMPLE``, else of that many, evenly
spread.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.data.bins import edges_of
from uvcc_engine.data.csv_table import CsvTable
from uvcc_engine.data.features import (
    CLIP_AT,
    LEAST_SPREAD,
    RowMask,
    categories,
    check_categories,
    check_columns,
    check_sides,
    check_spread,
    complete_rows,
    numbers,
    sides,
    targets,
)
from uvcc_engine.data.schema import BINNED, COUNT, EMBEDDED, REAL, Schema, SchemaColumn, Statistics
from uvcc_engine.data.sets import TEST, TRAIN, VALIDATION, Floats, Ints

SAMPLE: Final = 1 << 20


@dataclass(slots=True)
class _Moments:
    """Count, mean, sum of squared deviations, least and greatest of what was seen."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    least: float = np.inf
    greatest: float = -np.inf

    def add(self, x: Floats) -> None:
        if not x.size:
            return
        mean, total = float(x.mean()), self.count + x.size
        apart = mean - self.mean
        self.squares += float(((x - mean) ** 2).sum()) + apart * apart * self.count * x.size / total
        self.mean += apart * x.size / total
        self.count = total
        self.least, self.greatest = min(self.least, float(x.min())), max(self.greatest, float(x.max()))

    @property
    def deviation(self) -> float:
        return float(np.sqrt(self.squares / self.count))

    @property
    def constant(self) -> bool:
        size = max(abs(self.least), abs(self.greatest), 1.0)
        return self.greatest - self.least <= LEAST_SPREAD * size


@dataclass(slots=True)
class _Sample:
    """Every ``step``-th value of a long series, and never more than ``SAMPLE``."""

    step: int = 1
    seen: int = 0
    kept: list[Floats] = field(default_factory=list)

    def add(self, x: Floats) -> None:
        first = -self.seen % self.step
        self.kept.append(x[first :: self.step].copy())
        self.seen += x.size
        while sum(part.size for part in self.kept) > SAMPLE:
            self.kept, self.step = [np.concatenate(self.kept)[::2]], 2 * self.step

    def values(self) -> Floats:
        return np.concatenate(self.kept) if self.kept else np.zeros(0)


@dataclass(slots=True)
class _Column:
    column: SchemaColumn
    plain: _Moments = field(default_factory=_Moments)
    changed: _Moments = field(default_factory=_Moments)
    sample: _Sample = field(default_factory=_Sample)
    counts: Floats = field(default_factory=lambda: np.zeros(0))
    lacking: int = 0

    def add(self, table: CsvTable, train: RowMask) -> None:
        if self.column.categorical:
            seen = categories(table, self.column)[train]
            found = np.bincount(seen[seen >= 0], minlength=len(self.column.values)).astype(np.float64)
            self.counts = found + self.counts if self.counts.size else found
            self.lacking += int((seen < 0).sum())
            return
        x = numbers(table, self.column)[train]
        x = x[~np.isnan(x)]
        self.plain.add(x)
        if self.column.kind in ("clip", BINNED):
            self.sample.add(x)
        elif self.column.kind == "log":
            self.changed.add(np.log1p(x))

    def statistics(self, file: str) -> Statistics:
        c = self.column
        if c.categorical:
            check_categories(file, c, self.counts, self.lacking)
            return Statistics(shares=tuple((self.counts / max(1.0, float(self.counts.sum()))).tolist()))
        if not self.plain.count:
            raise ConfigError(f"{file}: column {c.name!r} has no value in a training row", "give it kind: drop")
        low, high, of = -np.inf, np.inf, self.changed if c.kind == "log" else self.plain
        if c.kind == "clip":
            values = self.sample.values()
            low, high = (float(q) for q in np.quantile(values, CLIP_AT))
            of = _Moments()
            of.add(np.clip(values, low, high))
        if of.constant:
            raise ConfigError(f"{file}: column {c.name!r} is constant in the training rows", "give it kind: drop")
        if c.kind == BINNED:
            return Statistics(self.plain.mean, edges=edges_of(self.sample.values(), c.bins))
        shift, spread = (of.least, of.greatest - of.least) if c.kind == "minmax" else (of.mean, of.deviation)
        check_spread(file, c, float(spread))
        return Statistics(self.plain.mean, low, high, shift, 1.0 / spread)


class FittingPass:
    """Takes the parts of a table in turn; :meth:`fitted` is the schema with the statistics of their training rows."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._columns = [_Column(c) for c in schema.unfitted]
        self._classes = np.zeros(len(schema.values))
        self._target = _Moments()
        self._given = False
        self.train = self.test = self.validation = 0

    def add(self, part: CsvTable, side: Ints | None = None) -> None:
        """``side``: on which each row is, where the schema does not decide that.

        Raises ConfigError naming row and column of what does not fit the schema.
        """
        schema = self._schema
        check_columns(part, schema)
        self._given = side is not None
        side, kept = sides(part, schema) if side is None else side, complete_rows(part, schema)
        train = kept & (side == TRAIN)
        self.train += int(train.sum())
        self.test += int((kept & (side == TEST)).sum())
        self.validation += int((kept & (side == VALIDATION)).sum())
        if schema.fixed:
            return
        whole = part.rows(np.flatnonzero(kept).tolist()) if not kept.all() else part
        y = targets(whole, schema)[train[kept]]
        if schema.values:
            self._classes += np.bincount(y.astype(np.int64), minlength=len(schema.values))
        elif schema.kind in (REAL, COUNT):
            self._target.add(y.astype(np.float64))
        for column in self._columns:
            column.add(whole, train[kept])

    def fitted(self, file: str) -> Schema:
        """Raises ConfigError as ``features.prepare``."""
        schema = self._schema
        if not self._given:
            check_sides(file, schema, (self.train, self.test, self.validation))
        if schema.fixed:
            return schema
        for value, count in zip(schema.values, self._classes.tolist(), strict=True):
            if not count:
                raise ConfigError(
                    f"{file} has no training row of class {value!r}", "take it from target.values, or add such rows"
                )
        scaling = schema.scaling
        if schema.kind in (REAL, COUNT) and scaling is None:
            if self._target.constant:
                raise ConfigError(
                    f"{file}: the target {schema.target!r} is constant in the training rows", "name another target"
                )
            of = self._target
            scaling = Statistics(shift=of.mean, scale=1.0 / of.deviation) if schema.kind == REAL else None
        made = schema.fitted({c.column.name: c.statistics(file) for c in self._columns})
        return replace(made, scaling=scaling)


def check_joint(schema: Schema, standardise: bool) -> None:
    """Refuse (ConfigError) a schema that takes statistics of one owner's rows where the parties take all owners'."""
    if standardise and any(column.kind == EMBEDDED for column in schema.used):
        what = "job.standardise, and a schema that embeds a column"
        raise ConfigError(what, "give it kind: one-hot, or leave job.standardise out")
    if standardise and schema.used and not schema.fixed:
        raise ConfigError(
            "job.standardise, and a schema whose statistics would be of these rows alone",
            "give each column the units that all owners agree on: statistics: {scale: 0.01}, or statistics: {}",
        )
