"""``uvcc data infer FILE``: a first schema of a table or a text, and what a demo on it needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from uvcc_console.cli import common
from uvcc_console.cli.main import OK
from uvcc_console.plan.owndata import owners_program
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job import owner_files
from uvcc_engine.contract.parsing import yaml_text
from uvcc_engine.contract.text import clean, counted

# what suits a table of a few hundred rows: the profile's own values are for the digits
_FOR_TABLES = ("job.batch=64", "job.lr=0.1", "job.reveal=[loss, accuracy, weights]")
_FOR_TREES = ("job.momentum=0", "job.schedule=constant", "job.lr=0.3")
_BINS = 16
_FOR_KMEANS = (
    *("job.steps=10", "job.momentum=0", "job.schedule=constant", "job.lr=1"),
    "job.reveal=[loss, inertia, weights]",
)
_LAYERS = "[{linear: 16}, relu, linear]"
_OF_TEXT = (
    "[{embedding: 16}, {residual: [layer-norm, {attention: {heads: 2, causal: true}}]},"
    " {residual: [layer-norm, {linear: 32}, gelu, {linear: 16}]}, layer-norm, linear]"
)


def run(argv: list[str]) -> int:
    parser = common.Parser("data", "Your own data: what its columns are.")
    actions = parser.add_subparsers(dest="action", required=True, parser_class=common.VerbParser)
    infer = actions.add_parser("infer", help="read a table or a text and write a first schema beside it")
    infer.add_argument("file", type=Path)
    infer.add_argument("--target", default="", metavar="COLUMN", help="else target, label, ... or the last column")
    infer.add_argument("--no-target", action="store_true", help="learn no column: for k-means")
    infer.add_argument("--out", type=Path, metavar="FILE", help="the schema's file; NAME.schema.yaml without it")
    infer.add_argument("--bins", type=int, default=0, metavar="N", help="numbers as bits of N quantile bins, for trees")
    infer.add_argument("--embed", type=int, default=0, metavar="N", help="embed columns of more than N categories")
    infer.add_argument("--force", action="store_true", help="write over a schema that is there")
    infer.add_argument("--json", action="store_true", help="print JSON on standard output")
    args = parser.parse_args(argv)
    if args.no_target and args.target:
        parser.error("--target and --no-target say different things")
    target = None if args.no_target else args.target
    found = infer_schema(args.file, target, args.out, force=args.force, bins=args.bins, embed=args.embed)
    if args.json:
        common.emit(found)
    else:
        common.show(summary(found))
    return OK


def infer_schema(
    file: Path, target: str | None = "", out: Path | None = None, *, force: bool = False, bins: int = 0, embed: int = 0
) -> dict[str, Any]:
    """Have the owner's program write a schema, without a target if that is None; what it says of it. Raises
    UvccError."""
    command = ["infer", str(file), *(["--no-target"] if target is None else ["--target", target])]
    command += ["--out", str(out)] if out is not None else []
    command += ["--force"] if force else []
    command += ["--bins", str(bins)] if bins else []
    command += ["--embed", str(embed)] if embed else []
    found: dict[str, Any] = json.loads(owners_program(command))
    return found


def summary(found: dict[str, Any]) -> str:
    """A schema in a few lines, for people."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in found["columns"].items())
    of_kinds = f" ({kinds})" if kinds else ""  # a text has no columns
    lines = [
        f"{found['schema']}: {counted(found['rows'], 'row')}, {counted(found['features'], 'feature')}{of_kinds}",
        f"target {found['target']}: {', '.join(found['classes']) or found['kind']}" if found["target"] else "no target",
        *(["numbers have decimal commas, and no points"] if found["decimal"] == "," else []),
        *(f"{name}: {note}" for name, note in found["notes"].items()),
    ]
    return "\n".join(lines)


def _asks(word: str, model: str) -> bool:
    """Whether a list of layers has this one; a name, a file or no YAML at all has none, and is judged elsewhere."""
    try:
        layers = yaml_text.load(model)
    except yaml.YAMLError:
        return False
    return isinstance(layers, list) and any(one == word or (isinstance(one, dict) and word in one) for one in layers)


def _trees_in(model: str) -> int:
    """How many trees a list of layers asks for: one grows in a step. The demo's 20 where it does not say."""
    asked = next((one["trees"] for one in yaml_text.load(model) if isinstance(one, dict) and "trees" in one), None)
    count = asked.get("count") if isinstance(asked, dict) else asked
    return count if isinstance(count, int) and count > 0 else 20


def _training_rows(data: Path, schema: Path, model: str) -> int:
    """How many rows of the table are trained on. Raises UvccError where it, or the model, does not fit the schema."""
    asked = json.dumps(yaml_text.load(model))
    found = json.loads(owners_program(["plan", "--model", asked, "--data", str(data), "--schema", str(schema)]))
    rows: int = found["rows"]["train"]
    return rows


def _same_target(schema: Path, target: str) -> None:
    """Raises ConfigError where the schema that is there already learns another column than was asked for."""
    try:
        said = yaml_text.load(schema.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return  # whoever reads the table tells what is wrong with it
    learns = said.get("target") if isinstance(said, dict) else None
    column = learns.get("column") if isinstance(learns, dict) else learns
    if target and column != target:
        raise ConfigError(
            f"{schema} says that the target is {clean(str(column))}, not {target}",
            "leave --target out, or write it anew: uvcc data infer --force --target COLUMN FILE",
        )


def settings_for(data: str, schema: str = "", target: str = "", model: str = "") -> list[str]:
    """Settings that make the demo's profile one of this table; its schema is written beside it if there is none.

    ``model``: what was asked for; trees ask for a schema of bits and for another rate, k-means for one without a target
    and for steps of all rows.
    """
    trees, clusters = _asks("trees", model), _asks("kmeans", model)
    file = Path(data).expanduser().resolve()
    known = Path(schema).expanduser().resolve() if schema else owner_files.schema_beside(file)
    if target and clusters:
        raise ConfigError("k-means learns no target", "leave --target out")
    if known.exists():
        _same_target(known, target)
        common.say(f"schema: {known}")
    else:
        common.say(summary(infer_schema(file, None if clusters else target, known, bins=_BINS if trees else 0)))
    named = [f"job.data={json.dumps(str(file))}", f"job.schema={json.dumps(str(known))}"]
    return [
        *named,
        f"job.model={_OF_TEXT if file.suffix.lower() == '.txt' else _LAYERS}",
        *((*_FOR_KMEANS, f"job.batch={_training_rows(file, known, model)}") if clusters else _FOR_TABLES),
        *(
            (*_FOR_TREES, f"job.steps={_trees_in(model)}", f"job.batch={_training_rows(file, known, model)}")
            if trees
            else ()
        ),
    ]
