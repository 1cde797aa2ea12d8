"""What a data owner contributes, as named blocks of rows in fixed point: read in parts where the file's format lets it.

CSV, and any table with a schema, are read twice, to count and fit, then to share, arrays in ``.npz`` and ``.npy`` once:
memory stays bounded however long the file is. Whatever else there is (IDX, queries, a model's weights) is held whole.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.array_files import RowReader, StoredArray, stored_arrays
from uvcc_engine.data.csv_table import CsvTable
from uvcc_engine.data.data_files import features_and_labels
from uvcc_engine.data.decimal_commas import as_read
from uvcc_engine.data.features import complete_rows, row_weights, sides, targets, transform
from uvcc_engine.data.fitting_pass import FittingPass, check_joint
from uvcc_engine.data.named_file import refuse_streams
from uvcc_engine.data.schema import Schema, load_schema
from uvcc_engine.data.sets import TEST, TRAIN, VALIDATION, Floats, Ints, Labels, check_split, public_stream
from uvcc_engine.data.table_batches import table_batches
from uvcc_engine.data.weighted_targets import TRAIN_WEIGHTS, carries_weights, check_own, part_targets
from uvcc_engine.model.definition.column_embeddings import behind_embeddings
from uvcc_engine.model.definition.layer_list import check_labels
from uvcc_engine.model.definition.specs import ModelSpec
from uvcc_engine.owner.client import input_tensors
from uvcc_engine.sealing.components import Ring
from uvcc_engine.sealing.inputs import encode_fixed
from uvcc_engine.sharding.validation import check_held_out, check_inputs, check_tensors, fit_model

Blocks = Iterator[tuple[str, Ring]]
AT_ONCE: Final = 1 << 17
"""Values of one block."""


@dataclass(frozen=True, slots=True)
class OwnerRows:
    """``shapes`` of the whole tensors, their ``blocks``, and the fitted schema where there was one."""

    shapes: dict[str, tuple[int, ...]]
    blocks: Callable[[], Blocks]
    schema: Schema | None = None


def rows_of(job: PrivateJob, args: argparse.Namespace) -> OwnerRows:
    """What the owner's files give for this job. Raises ConfigError or UnreadableError naming what does not fit."""
    path: Path | None = args.data
    if job.task == "train" and path is not None and args.schema is not None:
        schema = load_schema(args.schema)
        return _by_schema(job, path, schema) if schema.text is None else _whole(job, args, schema)
    if job.task == "train" and path is not None and path.suffix.lower() == ".csv":
        if args.labels is not None:
            raise ConfigError(f"{path.name} holds its labels itself", "leave the labels file out")
        return _numeric_csv(job, path)
    if job.task == "train" and path is not None and _by_rows(path, args.labels):
        return _arrays(job, path, args.labels)
    return _whole(job, args)


def _whole(job: PrivateJob, args: argparse.Namespace, schema: Schema | None = None) -> OwnerRows:
    """What is held whole while it is shared."""
    tensors = input_tensors(job, args)

    def blocks() -> Blocks:
        for name, values in tensors.items():
            at_once = max(1, AT_ONCE // max(1, values[0].size if len(values) else 1))
            for start in range(0, len(values), at_once):
                yield name, values[start : start + at_once]

    return OwnerRows({name: values.shape for name, values in tensors.items()}, blocks, schema)


def _by_schema(job: PrivateJob, path: Path, schema: Schema) -> OwnerRows:
    check_joint(schema, job.standardise)
    model = behind_embeddings(schema, fit_model(job), whole=True)
    check_labels(model, schema.outputs)
    found = FittingPass(schema)
    for part in table_batches(path):
        found.add(as_read(part, schema))
    fitted = found.fitted(path.name)
    check_held_out(job, found.test, found.validation, some=schema.fixed)
    check_own(job, bool(schema.weight))
    shapes = _shapes(job, found.train, found.test, found.validation, schema.features, schema.outputs, path)

    def blocks() -> Blocks:
        for part in table_batches(path):
            x, y, own, side = _prepared(as_read(part, fitted), fitted)
            yield from _encoded(job, x, y, side, fitted.outputs, own)

    return OwnerRows(shapes, blocks, fitted)


def _prepared(part: CsvTable, schema: Schema) -> tuple[Floats, Labels, Floats | None, Ints]:
    """Features, targets and weights of the rows that are kept, and the side of each."""
    kept, side = complete_rows(part, schema), sides(part, schema)
    whole = part if kept.all() else part.rows(np.flatnonzero(kept).tolist())
    if not len(whole):
        return np.zeros((0, schema.features)), targets(whole, schema), row_weights(whole, schema), side[kept]
    y = targets(whole, schema)
    if schema.scaling is not None:
        y = (y.astype(np.float64) - schema.scaling.shift) * schema.scaling.scale
    return transform(whole, schema), y, row_weights(whole, schema), side[kept]


def _numeric_csv(job: PrivateJob, path: Path) -> OwnerRows:
    """A CSV file of numbers alone: features, then the class in the last column; the seed says which rows are tested."""
    model, header, count, width = _labelled(job), *_look(path)
    held = (job.test_rows, job.val_rows)
    check_split(count, *held)
    shapes = _shapes(job, count - sum(held), *held, width - 1, model.classes, path)
    side = public_sides(job.seed, count, *held)

    def blocks() -> Blocks:
        first = 0
        for table in _numbers(path, header, width):
            x, y = table[:, :-1], _targets(path, job, model, first, table[:, -1])
            yield from _encoded(job, x, y, side[first : first + len(y)], model.classes)
            first += len(y)

    return OwnerRows(shapes, blocks)


def _labelled(job: PrivateJob) -> ModelSpec:
    """The job's model, for rows whose file holds labels. Raises ConfigError for one that learns none."""
    check_labels(model := fit_model(job), 1)
    return model


def _targets(path: Path, job: PrivateJob, model: ModelSpec, first: int, labels: Floats) -> Labels:
    """The labels of the rows from ``first`` on, as they are meant. Raises ConfigError for one that is no class."""
    classes = 2 if job.objective == "binary" else model.classes
    if classes == 1:
        return labels
    with np.errstate(invalid="ignore"):
        whole = labels.astype(np.int64)
    if not np.array_equal(whole, labels) or whole.min() < 0 or whole.max() >= classes:
        raise ConfigError(
            f"{path.name}: a label in rows {first + 1} to {first + len(labels)} is no class of {classes}",
            "labels are classes 0, 1, 2, ...",
        )
    return whole


def _by_rows(path: Path, labels: Path | None) -> bool:
    kinds = [one.suffix.lower() for one in (path, labels) if one is not None]
    return kinds[0] == ".npz" or kinds in ([".npy"], [".npy", ".npy"])


def _arrays(job: PrivateJob, path: Path, labels: Path | None) -> OwnerRows:
    """Features (rows, ...) and labels (rows,) in arrays of one ``.npz``, or of two ``.npy``; rows as in a CSV file."""
    x, y = _two_arrays(path, labels)
    if x.ndim < 2 or y.ndim != 1 or len(x) != len(y) or not len(x):
        raise ConfigError(f"{path.name}: features {x.shape} and labels {y.shape} do not fit", "one label per row")
    for name, array in (("features", x), ("labels", y)):
        if array.dtype.kind not in "iufb":
            raise ConfigError(f"{path.name}: {name} are of type {array.dtype}", "use numbers")
    model, count, width = _labelled(job), len(x), math.prod(x.shape[1:])
    held = (job.test_rows, job.val_rows)
    check_split(count, *held)
    shapes = _shapes(job, count - sum(held), *held, width, model.classes, path)
    side, at_once = public_sides(job.seed, count, *held), max(1, AT_ONCE // max(1, width))

    def blocks() -> Blocks:
        with RowReader(x) as features, RowReader(y) as classes:
            for first in range(0, count, at_once):
                some = features.take(at_once)
                targets_ = _targets(path, job, model, first, classes.take(at_once).astype(np.float64))
                rows = some.reshape(len(some), -1).astype(np.float64)
                yield from _encoded(job, rows, targets_, side[first : first + len(some)], model.classes)

    return OwnerRows(shapes, blocks)


def _two_arrays(path: Path, labels: Path | None) -> tuple[StoredArray, StoredArray]:
    if path.suffix.lower() == ".npz":
        if labels is not None:
            raise ConfigError(f"{path.name} holds its labels itself", "leave the labels file out")
        x, y = features_and_labels(path, stored_arrays(path))
        return x, y
    if labels is None:
        raise ConfigError(f"{path.name} holds one array only", "name the labels file as well")
    return stored_arrays(path)[""], stored_arrays(labels)[""]


def public_sides(seed: int, rows: int, test_rows: int, val_rows: int) -> Ints:
    """The side of every row: those of the least public random words are for the test, the next ones for validation.

    Found in memory of the order of both.
    """
    held = test_rows + val_rows
    best = np.zeros((0, 2), np.uint64)
    for block in range(-(-rows // AT_ONCE)):
        many = min(AT_ONCE, rows - block * AT_ONCE)
        words = public_stream("split-rows", seed, block, many)
        more = np.stack([words, np.arange(many, dtype=np.uint64) + np.uint64(block * AT_ONCE)], 1)
        best = np.concatenate([best, more])
        if len(best) > held:
            best = best[np.argpartition(best[:, 0], held - 1)[:held]]
    order = best[np.argsort(best[:, 0], kind="stable"), 1].astype(np.int64)
    found = np.full(rows, TRAIN, np.int64)
    found[order[:test_rows]], found[order[test_rows:]] = TEST, VALIDATION
    return found


def _look(path: Path) -> tuple[int, int, int]:
    """(lines of header, rows, columns) of a numeric CSV file; nothing is converted but the first line."""
    count, header, width = 0, 0, 0
    refuse_streams(path)
    try:
        with path.open("rb") as lines:
            for line in lines:
                if not line.strip() or line.lstrip().startswith(b"#"):
                    continue
                if not width:
                    cells = line.strip().split(b",")
                    width, header = len(cells), 0 if all(map(_is_number, cells)) else 1
                count += 1
    except OSError as error:
        raise UnreadableError(f"cannot read {path}: {error.strerror}", "check the path") from error
    if width < 2:
        raise ConfigError(f"{path.name} has {width} column", "features first, the label last")
    return header, count - header, width


def _is_number(cell: bytes) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _numbers(path: Path, header: int, width: int) -> Iterator[Floats]:
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for _ in range(header):
                lines.readline()
            while True:
                at_once = max(1, AT_ONCE // width)
                with np.errstate(all="ignore"):
                    table: Floats = np.loadtxt(lines, delimiter=",", ndmin=2, max_rows=at_once)
                if table.size:
                    yield table
                if len(table) < at_once or not table.size:
                    return
    except (OSError, ValueError) as error:
        raise UnreadableError(f"cannot read {path}: {error}", "check the file and its format") from error


def _shapes(
    job: PrivateJob, train: int, test: int, validation: int, features: int, classes: int, path: Path
) -> dict[str, tuple[int, ...]]:
    model: ModelSpec = fit_model(job)
    if (features, classes) != (model.features, model.labels):
        raise ConfigError(
            f"{path.name} has {features} features and {classes} classes, {model.name} takes {model.features} and"
            f" {model.labels}",
            "choose a model that fits the data, or name the data file",
        )
    x, y = {"train": train, "test": test} | ({"val": validation} if validation else {}), model.targets
    found = {f"{part}_x": (rows, features) for part, rows in x.items()}
    found |= {f"{part}_y": (rows, y) for part, rows in x.items() if y}
    found |= {TRAIN_WEIGHTS: (train, 1)} if carries_weights(job) else {}
    check_tensors(found, job, model)
    return dict(sorted(found.items()))


def _encoded(job: PrivateJob, x: Floats, y: Labels, side: Ints, outputs: int, own: Floats | None = None) -> Blocks:
    """What is shared of these rows, part by part. ``own``: their weights, where the schema names some."""
    for part, one in (("train", TRAIN), ("test", TEST), ("val", VALIDATION)):
        if (chosen := side == one).any():
            check_inputs(job, f"{part} features", x[chosen])
            yield f"{part}_x", encode_fixed(f"{part} features", x[chosen], job.frac_bits)
            weights = None if own is None or one != TRAIN else own[chosen]
            for name, values in part_targets(job, part, y[chosen], outputs, weights).items():
                yield name, encode_fixed(f"{part} labels", values, job.frac_bits)
