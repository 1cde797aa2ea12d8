"""A data owner's own table: a schema from it, whether a job fits it, what is shared of it, and predictions in clear.

``uvcc-engine table infer|plan|answers|predict``; ``share`` prepares a table by :func:`prepared`. None of this is sent
anywhere.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from uvcc_engine.contract.errors import ConfigError, UnreadableError, UvccError
from uvcc_engine.contract.job import owner_files
from uvcc_engine.contract.job.private_job import HIGHEST_LOG_RATE
from uvcc_engine.contract.machine import extras
from uvcc_engine.contract.machine.raising_parser import RaisingParser
from uvcc_engine.contract.run_files import files
from uvcc_engine.data.bins import MOST_BINS, check_bits
from uvcc_engine.data.data_files import read_arrays, read_rows
from uvcc_engine.data.decimal_commas import as_read
from uvcc_engine.data.features import Prepared, feature_names, prepare, transform
from uvcc_engine.data.infer import infer
from uvcc_engine.data.sample_text import load_text
from uvcc_engine.data.schema import COUNT, OBJECTIVE, Schema, load_schema
from uvcc_engine.data.schema_text import schema_text
from uvcc_engine.data.sets import Dataset, Floats, load_digits
from uvcc_engine.data.table_files import read_table
from uvcc_engine.data.text_windows import infer_text, text_dataset
from uvcc_engine.model.definition.column_embeddings import behind_embeddings, embedded_width
from uvcc_engine.model.definition.layer_list import (
    NO_TARGET,
    check_labels,
    is_module_file,
    model_of_json,
    model_of_list,
    model_to_json,
)
from uvcc_engine.model.definition.specs import ModelSpec, find_model
from uvcc_engine.model.layer_types.trees import trees_of
from uvcc_engine.owner.base_plan import alone, answers, around_base
from uvcc_engine.sealing.inputs import check_range

WEIGHTS, MODEL, FITTED = owner_files.WEIGHTS, owner_files.MODEL, owner_files.PREPROCESSING
"""What an owner holds after a training: opened weights, the model, and the fitted schema."""


def prepared(data: Path, schema: Path, pin: Path | None = None) -> Prepared:
    """The table as the network sees it. Raises ConfigError if ``pin`` says that it is not what was planned with."""
    made, now = _ready(data, schema)
    if pin is not None:
        then = files.read_json(pin)
        text = made.schema.text
        held = [("data", data), ("schema", schema)]
        held += [("tokenizer", Path(text.tokenizer))] if text is not None and text.tokenizer else []
        for what, path in held:
            if now[what] != then.get(what):
                raise ConfigError(
                    f"{path.name} has changed since the run was planned", "put the old file back, or start a new run"
                )
    return made


def _ready(data: Path, schema: Path) -> tuple[Prepared, dict[str, str]]:
    """The rows that a schema makes of a table or a text, and what a plan holds both files to."""
    plan = load_schema(schema)
    if plan.text is not None:
        rows, digest = text_dataset(data, plan)
        own = {"tokenizer": plan.text.sha256} if plan.text.sha256 else {}
        return Prepared(rows, plan), digests(digest, schema) | own
    table = read_table(data)
    return prepare(as_read(table, plan), plan), digests(table.digest, schema)


def digests(data: str, schema: Path) -> dict[str, str]:
    """What a plan holds the owner's files to. It stays with the owner: a digest of small data gives it away."""
    try:
        return {"data": data, "schema": hashlib.sha256(schema.read_bytes()).hexdigest()}
    except OSError as error:
        raise UnreadableError(f"cannot read {schema}: {error.strerror}", "check the path") from error


def infer_schema(args: argparse.Namespace) -> dict[str, Any]:
    """Write a first schema beside the table; never over one that is there already, unless that is asked for."""
    out: Path = args.out or owner_files.schema_beside(args.file)
    if args.bins and not 2 <= args.bins <= MOST_BINS:
        raise ConfigError(f"--bins {args.bins}", f"2 to {MOST_BINS}")
    if out.exists() and not args.force:
        raise ConfigError(f"{out} exists already", "edit it, give --out another name, or --force to write a new one")
    if args.file.suffix.lower() == ".txt":
        return _infer_text(args.file, out)
    table = read_table(args.file)
    if args.embed and (args.bins or args.embed < 1):
        raise ConfigError(f"--embed {args.embed}", "how many categories are one-hot at most; leave --bins out")
    if args.no_target and args.target:
        raise ConfigError(f"--target {args.target} beside --no-target", "leave one of both out")
    found = infer(table, None if args.no_target else args.target, args.bins, args.embed)
    prepare(as_read(table, found.schema), found.schema)  # what is written can be trained on, or is refused here
    about = f"{table.name}: {len(table)} rows. Read by `uvcc data infer`; change what it took wrongly.\n" + _HOW
    files.write_atomic(out, schema_text(found.schema, about, found.notes).encode(), mode=0o600)
    kinds = [c.kind for c in found.schema.columns]
    return {
        "schema": str(out),
        "rows": len(table),
        "features": found.schema.features,
        "target": found.schema.target,
        "kind": found.schema.kind,
        "decimal": found.schema.decimal,
        "classes": list(found.schema.values),
        "columns": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "notes": found.notes,
    }


def _infer_text(file: Path, out: Path) -> dict[str, Any]:
    schema, notes = infer_text(file)
    data, _ = text_dataset(file, schema)  # what is written can be trained on, or is refused here
    about = f"{file.name}: a text, of which a model learns the letter that comes next.\n"
    files.write_atomic(out, schema_text(schema, about).encode(), mode=0o600)
    rows = sum(len(x) for x, _ in data.parts.values())
    told = {"text": f"windows of {schema.positions} of {len(schema.values)} letters", **notes}
    found = {"schema": str(out), "rows": rows, "features": schema.features, "target": schema.target}
    return found | {"kind": schema.kind, "decimal": schema.decimal, "classes": [], "columns": {}, "notes": told}


_HOW: Final = """Kinds: standardise, minmax, log, clip (numbers), bins (numbers as bits, for trees), one-hot (with
values), embedding (with values and dimension: a learned vector for each), days, date (with order), drop.
missing: error (the default), mean, indicator, drop (the row).
target.kind: classes (the default), binary, real, count; target.values are the classes 0, 1, ...
weight: the column of what each row counts in the loss, 0 to 16; it stands in no other place then.
decimal: "," where the table has numbers like 1234,5; no number may have a point then.
split.by: the column whose hash puts a row into training, test or validation (split.validation, like 0.1)."""


def plan(args: argparse.Namespace) -> dict[str, Any]:
    """What a profile leaves to the data: the model with all its shapes, and the number of test rows."""
    asked = _asked(args.model)
    args.schema = owner_files.named_schema(args.data, args.schema)
    if args.elsewhere and args.base is not None and args.data is None and not args.columns:
        return alone(args)
    found: dict[str, Any] = {}
    positions, names = 1, list[str]()
    schema: Schema | None = None
    bits: Floats | None = None
    if args.schema is not None:
        if args.data is None:
            raise ConfigError("there is a schema, and no data that it describes", "name the table with --data")
        ready, pin = _ready(args.data, args.schema)
        schema = ready.schema
        features, classes, positions = schema.features, schema.outputs, schema.positions
        rows = {part: len(x) for part, (x, _) in ready.data.parts.items()}
        found = {"rows": rows, "pin": pin, "objective": OBJECTIVE[ready.schema.kind], "weight": ready.schema.weight}
        found["tokenizer"] = pin.get("tokenizer", "")
        bits, names = ready.data.train_x, feature_names(ready.schema) if ready.schema.text is None else []
        _check_ranges(args.data.name, ready.data, names)
    elif args.columns:
        features, classes = args.columns, args.outputs
    elif args.data is not None:
        x, y = read_rows(args.data, args.labels)
        found["total"] = len(x)
        check_range(f"{args.data.name}: a feature", x)
        if (least := int(y.min())) < 0:
            raise ConfigError(f"{args.data.name}: a label is {least}", "labels are classes 0, 1, 2, ...")
        features, classes, bits = x.shape[1], int(y.max()) + 1, x
    elif args.elsewhere and args.base is None:
        features, classes = _named_sizes(asked)  # how many rows its owners have is theirs to know
    else:
        packaged = _packaged(asked)
        found["total"] = len(packaged.train_x) + len(packaged.test_x)
        features, classes = packaged.train_x.shape[1], packaged.classes
    width = features if schema is None else embedded_width(schema)
    whole = args.base or (asked if isinstance(asked, str) and is_module_file(asked) else None)
    if schema is not None and not classes and whole is not None:
        raise ConfigError(f"the schema names no target, and {whole} learns one", NO_TARGET)
    if args.base is not None:
        if width != features:
            raise ConfigError("a schema that embeds a column, and a public base", "give the column kind: one-hot")
        return found | around_base(args, (features, classes, positions))
    if isinstance(asked, str) and is_module_file(asked):
        extras.require("torch", "job.model names a torch module")
        from uvcc_engine.model.definition.torch_module import model_of_file

        made = model_of_file(asked, width, classes, positions)
        model = made.model if schema is None else behind_embeddings(schema, made.model, whole=False)
        return found | {"model": model_to_json(model), "notes": list(made.notes)}
    if isinstance(asked, list):
        model = model_of_list(asked, width, classes, positions)
    else:
        model = find_model(asked) if isinstance(asked, str) else model_of_json(asked)
    if schema is not None:
        model = behind_embeddings(schema, model, whole=not isinstance(asked, list))
    check_labels(model, classes)
    if (model.features, model.labels) != (features, classes):
        raise ConfigError(
            f"the data has {features} features and {classes} classes, {model.name} takes {model.features} and"
            f" {model.labels}",
            "give a model whose shapes follow the data, like job.model: [{linear: 16}, relu, linear]",
        )
    if bits is not None and trees_of(model) is not None:
        check_bits(bits, names, args.data.name)
    return found | {"model": asked if isinstance(asked, str) else model_to_json(model)}


def _named_sizes(asked: Any) -> tuple[int, int]:
    """Features and classes of a model whose rows nobody here has. Raises ConfigError where it leaves these open."""
    if isinstance(asked, list) or (isinstance(asked, str) and is_module_file(asked)):
        raise ConfigError(
            "the shapes of job.model follow the data, and its owners have that elsewhere",
            "name every size, like job.model: {features: 4, classes: 2, layers: [{type: dense, inputs: 4, outputs: 2}]}"
            ", or let job.data name rows of the same columns",
        )
    model = find_model(asked) if isinstance(asked, str) else model_of_json(asked)
    return model.features, model.labels


def _packaged(asked: Any) -> Dataset:
    """The rows that are trained on where a job names none: a text for a model that answers at several positions."""
    named = find_model(asked) if isinstance(asked, str) and not is_module_file(asked) else None
    model = model_of_json(asked) if isinstance(asked, dict) else named
    return load_digits(0) if model is None or model.positions == 1 else load_text(0, 1, model.positions)


def _check_ranges(file: str, data: Dataset, names: Sequence[str]) -> None:
    """Refuse (ConfigError naming the column) what could not be shared once pods are there."""
    hint = "mend the cells or the statistics, or give the column kind: clip"
    for part, (x, y) in sorted(data.parts.items()):
        for at, name in enumerate(names):
            check_range(f"{file}: column {name!r}, as the network would see its {part} rows,", x[:, at], hint)
        check_range(f"{file}: the target's {part} rows", np.asarray(y, dtype=np.float64), "mend the cells")


def _asked(text: str) -> Any:
    """A name, or JSON: a list of layers or a model."""
    if not text.startswith(("[", "{")):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the model is no JSON: {str(error)[:80]}", "give a name, or a list of layers") from error


def predict(args: argparse.Namespace) -> dict[str, Any]:
    """Predict in clear with opened weights: a CSV with each row's class and every class's probability, or a number, or
    its cluster and how far the centroid is."""
    weights, model, schema = _trained(args)
    if schema.text is not None:
        raise ConfigError("a model of a text predicts letters, not columns", "use its weights in a program of yours")
    table = as_read(read_table(args.data), schema)
    x = _to_scale(args.model, transform(table, schema))
    names, said, summary = _said(schema, model, x, _outputs(model, weights, x))
    ids = table.columns.get(schema.by) if schema.by else None
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow([schema.by if ids else "row", *names])
    for row, cells in enumerate(said):
        lines.writerow([ids[row] if ids else row + 1, *cells])
    if args.out is None:
        sys.stdout.write(out.getvalue())
    else:
        files.write_atomic(args.out, out.getvalue().encode(), mode=0o600)
    return {"rows": len(table)} | summary


def _said(
    schema: Schema, model: ModelSpec, x: Floats, outputs: Floats
) -> tuple[list[str], list[list[str]], dict[str, Any]]:
    """What the columns of predictions are called, the cells of each row, and a summary. ``x``: [rows, features]."""
    if model.unsupervised:
        nearest, squares = outputs.argmax(1), np.square(x).sum(1) - 2.0 * outputs.max(1)
        cells = [[str(k), f"{d:.6g}"] for k, d in zip(nearest, np.sqrt(np.maximum(squares, 0.0)), strict=True)]
        counts = np.bincount(nearest, minlength=outputs.shape[1]).tolist()
        return ["cluster", "distance"], cells, {"clusters": {str(k): n for k, n in enumerate(counts)}}
    if not schema.values:
        numbers = numbers_of(schema, outputs)
        least, most = (numbers.min(), numbers.max()) if numbers.size else (0.0, 0.0)
        ends = {"from": float(least), "to": float(most)}
        return [schema.target], [[f"{one:.9g}"] for one in numbers], ends
    chances = _chances(outputs)
    cells = [[schema.values[int(row.argmax())], *(f"{one:.6f}" for one in row)] for row in chances]
    counts = np.bincount(chances.argmax(1), minlength=len(schema.values)).tolist()
    classes = {"classes": dict(zip(schema.values, counts, strict=True))}
    return [schema.target, *(f"p({value})" for value in schema.values)], cells, classes


def _chances(outputs: Floats) -> Floats:
    """Every class's probability; of a single output, those of the two classes."""
    if outputs.shape[1] == 1:
        outputs = np.concatenate([np.zeros_like(outputs), outputs], 1)
    powers = np.exp(outputs - outputs.max(1, keepdims=True))
    chances: Floats = powers / powers.sum(1, keepdims=True)
    return chances


def numbers_of(schema: Schema, outputs: Floats) -> Floats:
    """The number that is expected of every row, in the target's own units."""
    if schema.kind == COUNT:
        return np.exp(np.minimum(outputs[:, 0], HIGHEST_LOG_RATE))
    if schema.scaling is None:
        raise ConfigError("the schema has no scaling of its target", f"take the {FITTED} beside the opened weights")
    numbers: Floats = outputs[:, 0] / schema.scaling.scale + schema.scaling.shift
    return numbers


def _trained(args: argparse.Namespace) -> tuple[list[Floats], ModelSpec, Schema]:
    """Weights, model and fitted schema. Raises ConfigError if they do not belong together."""
    folder = args.model if args.model.is_dir() else args.model.parent
    arrays = read_arrays(folder / WEIGHTS if args.model.is_dir() else args.model)
    try:
        said = json.loads((folder / MODEL).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UnreadableError(f"cannot read {folder / MODEL}: {error}", "`uvcc owner open RUN` writes it") from error
    model = find_model(said) if isinstance(said, str) else model_of_json(said)
    wanted = {f"weight.{i}": spec.weight_shape for i, spec in enumerate(model.weights)}
    if {name: array.shape for name, array in arrays.items()} != wanted:
        raise ConfigError(f"the weights are not those of {folder / MODEL}", "open the run's results again")
    schema = load_schema(args.schema or folder / FITTED, part=True)
    if (schema.features, schema.outputs) != (model.features, model.labels):
        raise ConfigError(
            f"the schema gives {schema.features} features and {schema.outputs or 'no'} outputs, the model takes"
            f" {model.features} and {model.labels}",
            f"take the {FITTED} of the same training; if owners held different columns, name a schema with the columns"
            " of all in the proposal's order and with the target: --schema",
        )
    return [arrays[name] for name in wanted], model, schema


def _to_scale(model: Path, x: Floats) -> Floats:
    """Rows as the network was trained on them, where the parties standardised them and the owner holds how."""
    path = (model if model.is_dir() else model.parent) / owner_files.STATISTICS
    if not path.exists():
        return x
    found = read_arrays(path)
    named = next((pair for pair in owner_files.STATISTIC_WORDS.values() if set(pair) == found.keys()), None)
    if named is None or any(array.shape != x.shape[1:] for array in found.values()):
        raise ConfigError(f"{path} is not of these {x.shape[1]} features", "open the run's results again")
    scaled: Floats = (x - found[named[0]]) / found[named[1]]
    return np.clip(scaled, 0.0, 1.0) if named[0] == "lower" else scaled


def _outputs(model: ModelSpec, weights: list[Floats], x: Floats) -> Floats:
    extras.require("torch", "predictions are computed with it")
    import torch

    from uvcc_engine.model.learning.plaintext import forward

    with torch.no_grad():
        found: Floats = forward(model, [torch.from_numpy(w) for w in weights], torch.from_numpy(x)).numpy()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """``uvcc-engine table``: returns the exit code; a summary goes to standard output as one JSON line."""
    parser = RaisingParser(prog="uvcc-engine table", description="The data owner's own table, in clear.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    first = verbs.add_parser("infer", help="write a first schema of a CSV file")
    first.add_argument("file", type=Path)
    first.add_argument("--target", default="", help="the column to learn; else target, label, ... or the last one")
    first.add_argument("--no-target", action="store_true", help="learn no column: for k-means")
    first.add_argument("--out", type=Path, help="the schema's file; FILE.schema.yaml without it")
    first.add_argument("--bins", type=int, default=0, help="numbers become bits of so many quantile bins, for trees")
    first.add_argument("--embed", type=int, default=0, help="columns of more categories than that are embedded")
    first.add_argument("--force", action="store_true", help="write over a schema that is there")
    fits = verbs.add_parser("plan", help="the model's shapes and the rows, as the data gives them")
    fits.add_argument("--model", required=True, help="a name, a list of layers or a model, both as JSON")
    fits.add_argument("--base", type=Path, help="a public base; --model counts for nothing then")
    fits.add_argument("--base-sha256", default="", help="the hash that the base must have")
    fits.add_argument("--adapters", default="{}", help="what of the base is trained, as JSON")
    fits.add_argument("--data", type=Path)
    fits.add_argument("--labels", type=Path)
    fits.add_argument("--schema", type=Path)
    fits.add_argument("--columns", type=int, default=0, help="so many features, of owners whose files are not read")
    fits.add_argument("--outputs", type=int, default=2, help="with --columns: classes, or 1")
    fits.add_argument("--elsewhere", action="store_true", help="owners share from their own machines: no file is read")
    around = verbs.add_parser("answers", help="the model that answers queries around a public base")
    around.add_argument("--base", type=Path, required=True, help="the public base of the training")
    around.add_argument("--base-sha256", default="", help="the hash that the base must have")
    around.add_argument("--adapters", default="{}", help="what of the base was trained, as JSON")
    around.add_argument("--weights", type=Path, help="what was trained: adapters.safetensors")
    use = verbs.add_parser("predict", help="predict in clear with opened weights")
    use.add_argument("--model", type=Path, required=True, help=f"the folder with {WEIGHTS}, {MODEL} and {FITTED}")
    use.add_argument("--schema", type=Path, help=f"a fitted schema, if it is not the {FITTED} beside the weights")
    use.add_argument("--data", type=Path, required=True, help="a CSV file with the schema's columns")
    use.add_argument("--out", type=Path, help="the predictions' CSV file; standard output without it")
    args = parser.parse_args(argv)
    try:
        done = {"infer": infer_schema, "plan": plan, "answers": answers, "predict": predict}[args.verb](args)
    except UvccError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if args.verb != "predict" or args.out is not None:
        print(json.dumps(done))
    return 0
