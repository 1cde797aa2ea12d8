"""What a table's columns are and how they become features: ``schema.yaml``, read strictly and written readably.

    target: {column: diagnosis, values: [benign, malignant]}
    split: {test: 0.2, validation: 0.1, by: patient, seed: 7}
    weight: times_seen
    columns:
      age: {kind: standardise, missing: mean}
      smoker: {kind: one-hot, values: ['no', 'yes']}
      ward: {kind: embedding, values: [a1, a2, b1, b2], dimension: 2}
      patient: {kind: drop}

``weight`` names the column of what each row counts in the loss, 0 to 16. The same file, fitted, holds each column's
``statistics`` too: those of the training rows. It never leaves the owner.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import yaml

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.parsing import yaml_text
from uvcc_engine.contract.parsing.suggest import did_you_mean
from uvcc_engine.data.bins import BINS, MOST_BINS
from uvcc_engine.data.dates import MONTHS, ORDERS, WEEKDAYS
from uvcc_engine.data.named_file import refuse_streams
from uvcc_engine.data.own_tokenizer import tokenizer_of_hash

NUMERIC: Final = ("standardise", "minmax", "log", "clip")
DAYS: Final = "days"
DATE: Final = "date"
DATES: Final = (DAYS, DATE)
ONE_HOT: Final = "one-hot"
EMBEDDED: Final = "embedding"
CATEGORIES: Final = (ONE_HOT, EMBEDDED)
BINNED: Final = "bins"
DROP: Final = "drop"
KINDS: Final = (*NUMERIC, BINNED, *CATEGORIES, *DATES, DROP)
CLASSES, BINARY, REAL, COUNT = "classes", "binary", "real", "count"
NEXT: Final = "next-token"
UNLABELLED: Final = "none"
"""The kind of a target that another owner has, or that there is not: k-means learns none."""
TARGETS: Final = (CLASSES, BINARY, REAL, COUNT)
OBJECTIVE: Final = {
    **{CLASSES: "cross-entropy", BINARY: "binary", REAL: "mse", COUNT: "poisson", NEXT: "cross-entropy"},
    UNLABELLED: "inertia",
}
"""What is trained on for each kind of target, where a job does not say otherwise."""
MISSING: Final = ("error", "mean", "indicator", "drop")
MOST_CLASSES: Final = 2048
"""A softmax among more has no fixed point."""
MOST_CATEGORIES: Final = 64
"""More make a column of their own each, most of them nearly empty."""
MOST_EMBEDDED: Final = 1024
"""Categories of a column that is embedded: each is a feature of every row that is shared."""
MOST_DIMENSIONS: Final = 64
POINT, COMMA, _TOP = ".", ",", ("target", "split", "weight", "decimal", "columns")


@dataclass(frozen=True, slots=True)
class Statistics:
    """What the training rows say of one column. A number x, or ``fill`` where it is missing, is brought into
    [``low``, ``high``], through the logarithm if the kind is log, and becomes (x - shift) * scale. ``shares``: how
    often each category occurs, which stands in for one that is missing. ``edges``: of bins, at which each bit changes.
    """

    fill: float = 0.0
    low: float = -math.inf
    high: float = math.inf
    shift: float = 0.0
    scale: float = 1.0
    shares: tuple[float, ...] = ()
    edges: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class SchemaColumn:
    """One column: ``kind`` says how it becomes features, ``missing`` what stands for a value that there is not.

    Numbers: ``standardise`` to mean 0 and deviation 1, ``minmax`` to 0..1, ``log`` (of 1 + x) and ``clip`` (at the
    quantiles 0.01 and 0.99), both standardised afterwards; ``bins`` becomes a bit for each of ``bins`` - 1 quantiles,
    whether the number is at most that, for trees. ``one-hot``: a feature for each of ``values``; ``embedding``: the
    same, and the model begins by making ``dimension`` learned numbers of them. Dates, whose parts stand in ``order``:
    ``days`` since 1970, standardised, and ``date``, the same with a feature for each month and each day of the week.
    ``mean`` puts in the training rows' mean, ``indicator`` that and a feature that says so, ``drop`` leaves the row
    out, ``error`` refuses.
    """

    name: str
    kind: str
    missing: str = "error"
    values: tuple[str, ...] = ()
    statistics: Statistics | None = None
    order: str = ORDERS[0]
    bins: int = 0
    dimension: int = 0

    @property
    def categorical(self) -> bool:
        """Whether it has a feature for each of its values."""
        return self.kind in CATEGORIES

    @property
    def width(self) -> int:
        """How many features it becomes."""
        if self.kind == DROP:
            return 0
        if self.categorical:
            return len(self.values) + (self.missing == "indicator")
        one = {DATE: 1 + MONTHS + WEEKDAYS, BINNED: self.bins - 1}.get(self.kind, 1)
        return one + (self.missing == "indicator")


@dataclass(frozen=True, slots=True)
class TextPlan:
    """How a text becomes rows: windows of ``positions`` letters, a new one every ``stride`` letters.

    ``tokenizer``: the file by which the text is read as tokens in place of letters, ``sha256`` its hash.
    """

    positions: int
    stride: int
    tokenizer: str = ""
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class Schema:
    """A whole schema. ``values``: the classes in the order of their numbers, none of a real target or a count; ``by``:
    the column whose hash decides whether a row trains, tests or validates, the row's number if empty. ``scaling``: of
    a real target, by which it is brought to mean 0 and deviation 1. ``text``: of a text, whose letters ``values`` are;
    it has no columns. ``weight``: the column of what each row counts in the loss; all count once if empty."""

    target: str
    values: tuple[str, ...]
    columns: tuple[SchemaColumn, ...]
    test: float = 0.2
    by: str = ""
    seed: int = 7
    kind: str = CLASSES
    scaling: Statistics | None = None
    text: TextPlan | None = None
    validation: float = 0.0
    weight: str = ""
    decimal: str = POINT  # what parts a number's fraction, as written in the table

    @property
    def outputs(self) -> int:
        """Outputs of a model: one per class, or a single one; none where there is no target here."""
        if self.kind == UNLABELLED:
            return 0
        return len(self.values) if self.kind in (CLASSES, NEXT) else 1

    @property
    def positions(self) -> int:
        """At how many places of a row a model answers."""
        return 1 if self.text is None else self.text.positions

    @property
    def features(self) -> int:
        """Columns of what the network is fed."""
        if self.text is not None:
            return self.text.positions * len(self.values)
        return sum(column.width for column in self.columns)

    @property
    def used(self) -> tuple[SchemaColumn, ...]:
        """The columns that become features."""
        return tuple(column for column in self.columns if column.kind != DROP)

    @property
    def fixed(self) -> bool:
        """Whether its statistics are there already: they are kept, and not computed from other rows."""
        return bool(self.used) and all(column.statistics is not None for column in self.used)

    @property
    def unfitted(self) -> tuple[SchemaColumn, ...]:
        """The used columns whose statistics are still to be found."""
        return tuple(column for column in self.used if column.statistics is None)

    def fitted(self, statistics: Mapping[str, Statistics]) -> Schema:
        """The same with the statistics of its columns; those that a column has already stay."""
        found = (replace(c, statistics=c.statistics or statistics.get(c.name)) for c in self.columns)
        return replace(self, columns=tuple(found))


def load_schema(path: Path, *, part: bool = False) -> Schema:
    """Read a schema file; ``part``: of some columns, see :func:`parse_schema`. Raises UnreadableError, ConfigError."""
    refuse_streams(path)
    try:
        if (size := path.stat().st_size) > _MOST_BYTES:
            what = f"{path} is {size >> 20} MiB long, a schema at most {_MOST_BYTES >> 20}"
            raise ConfigError(what, f"a column has at most {MOST_CATEGORIES} categories: put rare ones together")
        found = yaml_text.load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableError(f"cannot read {path}: {error}", "uvcc data infer FILE writes one") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}", "mend that place") from error
    return parse_schema(found, path.name, part=part, folder=path.parent)


def parse_schema(found: object, where: str = "schema", *, part: bool = False, folder: Path = Path()) -> Schema:
    """A schema from plain values. ``part``: other owners have other columns of the table, so that the target may be
    another's, or no column a feature; ``folder``: in which a text's tokenizer is looked for. Raises ConfigError naming
    the place.
    """
    if isinstance(found, Mapping) and "columns" in found and "target" not in found and "text" not in found:
        found = {**found, "target": {"column": UNLABELLED, "kind": UNLABELLED}}
        _mapping(found, where, ("target", "split", "decimal", "columns"), ("columns",))
        return _of_columns(found, where, part=part, kinds=(UNLABELLED,))
    if isinstance(found, Mapping) and "text" in found:
        return _text_schema(found, where, folder)
    return _of_columns(found, where, part=part)


def _of_columns(found: object, where: str, *, part: bool, kinds: Sequence[str] = TARGETS) -> Schema:
    top = _mapping(found, where, _TOP, ("target", "columns"))
    target = _mapping(top["target"], f"{where}: target", ("column", "kind", "values", "scaling"), ("column",))
    split = _mapping(top.get("split") or {}, f"{where}: split", ("test", "validation", "by", "seed"), ())
    columns = top["columns"]
    if not isinstance(columns, Mapping) or not columns:
        raise ConfigError(f"{where}: columns is no mapping", "write NAME: {kind: standardise} for every column")
    schema = Schema(
        target="" if kinds == (UNLABELLED,) else _word(target["column"], f"{where}: target.column"),
        values=_classes(target["values"], f"{where}: target.values") if "values" in target else (),
        columns=tuple(_column(_word(k, f"{where}: columns"), v, f"{where}: columns.{k}") for k, v in columns.items()),
        test=_number(split.get("test", 0.2), f"{where}: split.test"),
        by=_word(split["by"], f"{where}: split.by") if split.get("by") is not None else "",
        seed=_seed(split.get("seed", 7), f"{where}: split.seed"),
        kind=_one_of(target.get("kind", CLASSES), kinds, f"{where}: target.kind"),
        scaling=_statistics(target["scaling"], (), f"{where}: target.scaling") if "scaling" in target else None,
        validation=_number(split.get("validation", 0.0), f"{where}: split.validation"),
        weight=_word(top["weight"], f"{where}: weight") if top.get("weight") is not None else "",
        decimal=_one_of(top.get("decimal", POINT), (POINT, COMMA), f"{where}: decimal"),
    )
    _check(schema, where, part)
    return schema


def _text_schema(found: object, where: str, folder: Path) -> Schema:
    top = _mapping(found, where, ("text", "split"), ("text",))
    known = ("positions", "stride", "letters", "tokenizer", "sha256")
    asked = _mapping(top["text"], f"{where}: text", known, ("positions",))
    split = _mapping(top.get("split") or {}, f"{where}: split", ("test", "validation", "seed"), ())
    if ("letters" in asked) == ("tokenizer" in asked) or ("sha256" in asked and "tokenizer" not in asked):
        raise ConfigError(f"{where}: text takes letters, or a tokenizer with its sha256", "write one of both")
    positions = _count(asked["positions"], f"{where}: text.positions")
    stride = _count(asked.get("stride", positions), f"{where}: text.stride")
    if "tokenizer" in asked:
        path = folder / Path(_word(asked["tokenizer"], f"{where}: text.tokenizer")).expanduser()
        own = tokenizer_of_hash(path, MOST_CLASSES, asked.get("sha256"), where)
        values, plan = own.tokens, TextPlan(positions, stride, str(path.absolute()), own.sha256)
    else:
        values, plan = _letters(asked["letters"], where), TextPlan(positions, stride)
    test = _number(split.get("test", 0.1), f"{where}: split.test")
    validation = _number(split.get("validation", 0.0), f"{where}: split.validation")
    _check_shares(test, validation, where)
    seed = _seed(split.get("seed", 7), f"{where}: split.seed")
    return Schema("next letter", values, (), test, seed=seed, kind=NEXT, text=plan, validation=validation)


def _letters(letters: object, where: str) -> tuple[str, ...]:
    if letters == "bytes":
        letters = [chr(value) for value in range(256)]
    if not isinstance(letters, list) or not all(isinstance(one, str) and len(one) == 1 for one in letters):
        raise ConfigError(f"{where}: text.letters is no list of single letters", "put each in quotes, or write bytes")
    if len(set(letters)) != len(letters) or not 2 <= len(letters) <= _MOST_LETTERS:
        raise ConfigError(f"{where}: text.letters has {len(letters)} letters", f"2 to {_MOST_LETTERS}, each once")
    return tuple(letters)


def _check_shares(test: float, validation: float, where: str) -> None:
    if not 0.0 < test < 1.0:
        raise ConfigError(f"{where}: split.test is {test:g}", "give the share of test rows, like 0.2")
    if not 0.0 <= validation < 1.0 - test:
        raise ConfigError(
            f"{where}: split.validation is {validation:g} beside a test of {test:g}",
            "give the share of rows for validation, like 0.1, and leave some for training",
        )


_MOST_BYTES: Final = 4 << 20
_MOST_LETTERS: Final = 4096
_MOST_POSITIONS: Final = 8192


def _count(found: object, where: str) -> int:
    if type(found) is int and 1 <= found <= _MOST_POSITIONS:
        return found
    raise ConfigError(f"{where} is {_short(found)}", f"it must be a whole number of 1 to {_MOST_POSITIONS}")


def _check(schema: Schema, where: str, part: bool) -> None:
    if schema.kind in (REAL, COUNT, UNLABELLED):
        if schema.values:
            raise ConfigError(f"{where}: a target of kind {schema.kind} has no values", "leave target.values out")
    elif len(schema.values) < 2 or (schema.kind == BINARY and len(schema.values) > 2):
        classes = len(schema.values)
        raise ConfigError(f"{where}: target.values has {classes} classes", "name at least two; just two if binary")
    _check_shares(schema.test, schema.validation, where)
    if any(column.name == schema.target for column in schema.used):
        raise ConfigError(f"{where}: the target {schema.target!r} is one of the features, too", "take it from columns")
    if schema.weight and schema.weight in (schema.target, schema.by, *(column.name for column in schema.columns)):
        what = f"{where}: the weight {schema.weight!r} is the target, split.by, or one of columns, too"
        raise ConfigError(what, "a column has one use: take it from there")
    if not schema.used and not part:
        raise ConfigError(f"{where}: every column is dropped", "give at least one another kind")


def _column(name: str, found: object, where: str) -> SchemaColumn:
    if isinstance(found, str):
        found = {"kind": found}
    known = ("kind", "missing", "values", "order", "bins", "dimension", "statistics")
    part = _mapping(found, where, known, ("kind",))
    kind, missing = _one_of(part["kind"], KINDS, f"{where}.kind"), part.get("missing", "error")
    values = _words(part["values"], f"{where}.values") if "values" in part else ()
    if (kind in CATEGORIES) != bool(values):
        what = f"{where} is of kind {kind} with {len(values)} values"
        raise ConfigError(what, "one-hot and embedding list their values, no other")
    most = MOST_EMBEDDED if kind == EMBEDDED else MOST_CATEGORIES
    if len(values) > most:
        raise ConfigError(
            f"{where} has {len(values)} categories, at most {most} become features",
            "put rare ones together in the data, or give it kind: drop"
            + (f"; kind: embedding takes {MOST_EMBEDDED}" if kind == ONE_HOT else ""),
        )
    if "order" in part and kind not in DATES:
        raise ConfigError(f"{where} is of kind {kind} and has an order", "leave it out; days and date have one")
    order = _one_of(part.get("order", ORDERS[0]), ORDERS, f"{where}.order")
    bins = _bins(part, kind, where)
    size = _dimension(part, kind, len(values), where)
    missing = _one_of(missing, MISSING, f"{where}.missing")
    column = SchemaColumn(name, kind, missing, values, order=order, bins=bins, dimension=size)
    if "statistics" not in part:
        return column
    return replace(column, statistics=_statistics(part["statistics"], column.values, f"{where}.statistics", bins))


def _dimension(part: Mapping[str, Any], kind: str, values: int, where: str) -> int:
    if kind != EMBEDDED and "dimension" in part:
        raise ConfigError(f"{where} is of kind {kind} and says a dimension", "leave it out, or give it kind: embedding")
    found = part.get("dimension", dimension_of(values)) if kind == EMBEDDED else 0
    if type(found) is not int or (kind == EMBEDDED and not 1 <= found <= MOST_DIMENSIONS):
        raise ConfigError(f"{where}.dimension is {_short(found)}", f"it is a whole number of 1 to {MOST_DIMENSIONS}")
    return found


def dimension_of(values: int) -> int:
    """Numbers of a category's vector where the schema does not say: half as many as categories, at most 16."""
    return min(16, (values + 1) // 2)


def _bins(part: Mapping[str, Any], kind: str, where: str) -> int:
    if kind != BINNED and "bins" in part:
        raise ConfigError(f"{where} is of kind {kind} and says bins", "leave them out, or give it kind: bins")
    found = part.get("bins", BINS) if kind == BINNED else 0
    if type(found) is not int or (kind == BINNED and not 2 <= found <= MOST_BINS):
        raise ConfigError(f"{where}.bins is {_short(found)}", f"it is a whole number of 2 to {MOST_BINS}")
    return found


def _statistics(found: object, values: Sequence[str], where: str, bins: int = 0) -> Statistics:
    names = [f.name for f in fields(Statistics)]
    part = dict(_mapping(found, where, names, ()))
    shares = part.pop("shares", [])
    if not isinstance(shares, list) or len(shares) != len(values):
        raise ConfigError(f"{where}.shares does not fit {len(values)} values", "take the fitted schema as it is")
    edges = part.pop("edges", [])
    if not isinstance(edges, list) or len(edges) != max(0, bins - 1):
        raise ConfigError(f"{where}.edges does not fit {bins} bins", "give one edge less than bins, or no statistics")
    numbers = {key: _number(value, f"{where}.{key}") for key, value in part.items()}
    both = [tuple(_number(s, f"{where}.{k}") for s in v) for k, v in (("shares", shares), ("edges", edges))]
    for key, value in [*numbers.items(), *(("shares", s) for s in both[0]), *(("edges", s) for s in both[1])]:
        if key not in ("low", "high") and not math.isfinite(value):
            raise ConfigError(f"{where}.{key} is {value}", "it must be finite; only low and high may lack a bound")
    return Statistics(**numbers, shares=both[0], edges=both[1])


def _mapping(found: object, where: str, known: Sequence[str], needed: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(found, Mapping):
        raise ConfigError(f"{where} is {_short(found)}", f"it is a mapping with {', '.join(known)}")
    for key in found:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {_short(key)}", did_you_mean(str(key), known))
    for key in needed:
        if key not in found:
            raise ConfigError(f"{where} lacks {key!r}", f"it needs {', '.join(needed)}")
    return found


def _one_of(found: object, known: Sequence[str], where: str) -> str:
    if isinstance(found, str) and found in known:
        return found
    raise ConfigError(
        f"{where} is {_short(found)}", did_you_mean(str(found), known, f"one of {', '.join(known)}", cutoff=0.5)
    )


def _word(found: object, where: str) -> str:
    if isinstance(found, bool) or not isinstance(found, str | int | float) or not str(found).strip():
        raise ConfigError(f"{where} is {_short(found)}", "YAML reads yes, no, on and off so: put words in quotes")
    return str(found).strip()


def _words(found: object, where: str) -> tuple[str, ...]:
    if not isinstance(found, list):
        raise ConfigError(f"{where} is {_short(found)}", "it is a list of the values that the column may hold")
    words = tuple(class_word(_word(item, where)) for item in found)
    if len(set(words)) != len(words):
        raise ConfigError(f"{where} names a value twice", "name each once")
    return words


def _classes(found: object, where: str) -> tuple[str, ...]:
    if isinstance(found, list) and len(found) > MOST_CLASSES:
        what = f"{where} names {len(found)} classes, at most {MOST_CLASSES} are told apart"
        raise ConfigError(what, "put rare ones together in the data, or give the target kind: real or count")
    return _words(found, where)


def class_word(cell: str) -> str:
    """A category as it is compared: 1, 1.0 and 01 are the same, as are all other numbers of one value."""
    try:
        number = float(cell)
    except ValueError:
        return cell
    return f"{number:.17g}" if math.isfinite(number) and "_" not in cell else cell


def _number(found: object, where: str) -> float:
    if isinstance(found, int | float) and not isinstance(found, bool) and not math.isnan(found):
        return float(found)
    raise ConfigError(f"{where} is {_short(found)}", "it must be a number")


def _seed(found: object, where: str) -> int:
    if isinstance(found, int) and not isinstance(found, bool) and 0 <= found < 2**63:
        return found
    raise ConfigError(f"{where} is {_short(found)}", "it must be a whole number that is not negative")


def _short(value: object) -> str:
    return repr(value)[:80] if isinstance(value, str | int | float | bool | None) else f"a {type(value).__name__}"
