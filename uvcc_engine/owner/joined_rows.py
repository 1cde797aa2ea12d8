"""What an owner shares where others hold other columns of the same rows: its columns of the rows that all have.

The rows stand in the order of their tags, and the job's public seed says which of them are tested: the schema's split
has no say, for every owner needs the same. The columns' statistics are of the training rows among them. Features are
held whole while they are put in order, 8 bytes a value; the table is read in parts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.job.column_join import ColumnJoin
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.run_files import files
from uvcc_engine.data.csv_table import CsvTable
from uvcc_engine.data.decimal_commas import as_read
from uvcc_engine.data.features import targets, transform
from uvcc_engine.data.fitting_pass import FittingPass, check_joint
from uvcc_engine.data.named_file import refuse_streams
from uvcc_engine.data.schema import DROP, EMBEDDED, UNLABELLED, Schema, load_schema
from uvcc_engine.data.sets import TEST, TRAIN, VALIDATION, Ints, Labels, check_split, target_rows
from uvcc_engine.data.table_batches import table_batches
from uvcc_engine.owner.key_tags import TAG_BYTES, order_digest, positions, tags_of
from uvcc_engine.owner.rows import AT_ONCE, Blocks, OwnerRows, public_sides
from uvcc_engine.sealing.inputs import encode_fixed
from uvcc_engine.sharding.validation import check_inputs, fit_model

KEY: Final = "key"
ORDER: Final = "order"
FOUND: Final = "found.json"
_PARTS: Final = (("train", TRAIN), ("test", TEST), ("val", VALIDATION))


@dataclass(frozen=True, slots=True)
class FoundRows:
    """What the owners found together: ``order``, the tags of the common rows; ``files``: SHA-256 of table and schema
    by which this owner's tags were made; ``digest``: what the owner signs of the order."""

    key: bytes
    order: dict[bytes, int]
    files: dict[str, str]
    digest: str

    @classmethod
    def load(cls, folder: Path) -> FoundRows:
        """Raises UnreadableError if the rows were not found yet."""
        try:
            key, data = (folder / KEY).read_bytes(), (folder / ORDER).read_bytes()
        except OSError as error:
            raise UnreadableError(
                f"{folder} holds no rows that were found: {error.strerror}", "uvcc owner share finds them first"
            ) from error
        tags = [data[at : at + TAG_BYTES] for at in range(0, len(data), TAG_BYTES)]
        told: Any = files.read_json(folder / FOUND)
        return cls(key, {tag: at for at, tag in enumerate(tags)}, dict(told["files"]), order_digest(tags, key))


def file_digests(data: Path, schema: Path) -> dict[str, str]:
    """What tells whether an owner's files are still those that its rows were found by. Raises UnreadableError."""
    try:
        found = {}
        for what, path in (("data", data), ("schema", schema)):
            refuse_streams(path)
            with path.open("rb") as file:
                found[what] = hashlib.file_digest(file, "sha256").hexdigest()
        return found
    except OSError as error:
        raise UnreadableError(f"cannot read {error.filename}: {error.strerror}", "check the path") from error


def column_schema(job: PrivateJob, join: ColumnJoin, number: int, path: Path | None) -> Schema:
    """The schema of owner ``number``'s columns. Raises ConfigError naming what does not fit the job."""
    if path is None:
        raise ConfigError("the job puts columns together, and no schema says what yours are", "name it with --schema")
    schema = load_schema(path, part=True)
    if schema.text is not None:
        raise ConfigError(f"{path.name} is of a text, and the job puts columns together")
    if any(column.kind == EMBEDDED for column in schema.used):
        what = f"{path.name} embeds a column, and the job puts several owners' columns together"
        raise ConfigError(what, "give it kind: one-hot")
    if schema.kind != UNLABELLED and number != join.label:
        what = f"{path.name} names the target {schema.target!r}, and the proposal takes owner {join.label}'s labels"
        raise ConfigError(what, f"you are owner {number}: leave target out, and give that column kind: drop")
    if number == join.label:
        model = fit_model(job)
        if schema.kind == UNLABELLED or schema.outputs != model.classes:
            what = "names no target" if schema.kind == UNLABELLED else f"has {schema.outputs} outputs"
            raise ConfigError(
                f"{path.name} {what}, and the proposal takes the labels from you, owner {number}",
                f"name the target; {model.name} has {model.classes} outputs",
            )
    kinds = {column.name: column.kind for column in schema.columns}
    if join.key == schema.target or kinds.get(join.key) != DROP:
        raise ConfigError(
            f"{path.name}: {join.key!r} is the key that rows are put together by",
            f"columns: {join.key}: {{kind: drop}}",
        )
    if schema.features != join.columns[number]:
        what = f"{path.name} gives {schema.features} features, the proposal takes {join.columns[number]}"
        raise ConfigError(f"{what} of owner {number}", "mend the schema, or have the coordinator propose it anew")
    for column in schema.used:
        if column.missing == "drop":
            raise ConfigError(
                f"{path.name}: column {column.name!r} drops rows, which the other owners would not",
                "give it missing: mean or missing: indicator, or take those rows out of the table",
            )
    check_joint(schema, job.standardise)
    return schema


def joined_rows(
    job: PrivateJob, join: ColumnJoin, number: int, data: Path, schema_path: Path, found: FoundRows
) -> OwnerRows:
    """The columns of owner ``number``, of the common rows in their order.

    Raises ConfigError naming what does not fit, or that the files are not those that the rows were found by.
    """
    schema = column_schema(job, join, number, schema_path)
    _check_unchanged(data, schema_path, found)
    held = (job.test_rows, job.val_rows)
    side = _sides(job, len(found.order))
    fitting = FittingPass(schema)
    for part, at in _common(data, join, found):
        fitting.add(as_read(part, schema), side[at])
    fitted = fitting.fitted(data.name)
    x = np.zeros((len(found.order), fitted.features), dtype=np.int64)
    y = np.zeros((len(found.order), fit_model(job).targets if number == join.label else 0), dtype=np.int64)
    for part, at in _common(data, join, found):
        _put(job, as_read(part, fitted), fitted, at, x, y)
    _check_unchanged(data, schema_path, found)
    many = dict(zip(("train", "test", "val"), (len(side) - sum(held), *held), strict=True))
    tensors = {"x": x, "y": y}
    shapes = {
        f"{of}_{name}": (rows, values.shape[1])
        for name, values in tensors.items()
        for of, rows in many.items()
        if rows and values.shape[1]
    }

    def blocks() -> Blocks:
        for of, one in _PARTS:
            where = np.flatnonzero(side == one)
            for start in range(0, len(where), step := max(1, AT_ONCE // (x.shape[1] + y.shape[1]))):
                some = where[start : start + step]
                for name, values in tensors.items():
                    if values.shape[1]:
                        yield f"{of}_{name}", values[some]

    return OwnerRows(dict(sorted(shapes.items())), blocks, fitted)


def _sides(job: PrivateJob, rows: int) -> Ints:
    check_split(rows, job.test_rows, job.val_rows)
    return public_sides(job.seed, rows, job.test_rows, job.val_rows)


def _check_unchanged(data: Path, schema: Path, found: FoundRows) -> None:
    now = file_digests(data, schema)
    for what, path in (("data", data), ("schema", schema)):
        if now[what] != found.files.get(what):
            raise ConfigError(
                f"{path.name} has changed since the owners put their rows together",
                "put the old file back, or have the domains begin another attempt",
            )


def _common(data: Path, join: ColumnJoin, found: FoundRows) -> Iterator[tuple[CsvTable, Ints]]:
    """The rows of each part of the table that all owners have, and where they stand in the order."""
    for part in table_batches(data):
        at = positions(tags_of(part, join, found.key), found.order)
        if (at >= 0).any():
            yield part.rows(np.flatnonzero(at >= 0).tolist()), at[at >= 0]


def _put(job: PrivateJob, part: CsvTable, fitted: Schema, at: Ints, x: Ints, y: Ints) -> None:
    """A part's features and labels, in fixed point, into their places."""
    if fitted.used:
        values = transform(part, fitted)
        check_inputs(job, "features", values)
        x[at] = encode_fixed("features", values, job.frac_bits)
    if not y.shape[1]:
        return
    labels: Labels = targets(part, fitted)
    if fitted.scaling is not None:
        labels = (labels.astype(np.float64) - fitted.scaling.shift) * fitted.scaling.scale
    y[at] = encode_fixed("labels", target_rows(labels, fitted.outputs), job.frac_bits)
