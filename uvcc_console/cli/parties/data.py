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

# what suits a table of a few hundred rows: the profile's own values are for the digits
_FOR_TABLES = ("job.batch=64", "job.lr=0.1", "job.reveal=[loss, accuracy, weights]")
_FOR_TREES = ("job.momentum=0", "job.schedule=constant", "job.lr=0.3")
_BINS = 16
_LAYERS = "[{linear: 16}, relu, linear]"
_OF_TEXT = (
    "[{embedding: 16}, {residual: [layer-norm, {attention: {heads: 2, causal: true}}]},"
    " {residual: [layer-norm, {linear: 32}, gelu, {linear: 16}]}, layer-norm, linear]"
)


def run(argv: list[str]) -> int:
    parser = common.Parser("data", "Your own data: what its columns are.")
    actions = parser.add_subparsers(dest="action", required=True, parser_class=common.RaisingParser)
    infer = actions.add_parser("infer", help="read a table or a text and write a first schema beside it")
    infer.add_argument("file", type=Path)
    infer.add_argument("--target", default="", metavar="COLUMN", help="else target, label, ... or the last column")
    infer.add_argument("--out", type=Path, metavar="FILE", help="the schema's file; NAME.schema.yaml without it")
    infer.add_argument("--bins", type=int, default=0, metavar="N", help="numbers as bits of N quantile bins, for trees")
    infer.add_argument("--embed", type=int, default=0, metavar="N", help="embed columns of more than N categories")
    infer.add_argument("--force", action="store_true", help="write over a schema that is there")
    infer.add_argument("--json", action="store_true", help="print JSON on standard output")
    args = parser.parse_args(argv)
    found = infer_schema(args.file, args.target, args.out, force=args.force, bins=args.bins, embed=args.embed)
    if args.json:
        common.emit(found)
    else:
        common.show(summary(found))
    return OK


def infer_schema(
    file: Path, target: str = "", out: Path | None = None, *, force: bool = False, bins: int = 0, embed: int = 0
) -> dict[str, Any]:
    """Have the owner's program write a schema; what it says of it. Raises UvccError."""
    command = ["infer", str(file), "--target", target]
    command += ["--out", str(out)] if out is not None else []
    command += ["--force"] if force else []
    command += ["--bins", str(bins)] if bins else []
    command += ["--embed", str(embed)] if embed else []
    found: dict[str, Any] = json.loads(owners_program(command))
    return found


def summary(found: dict[str, Any]) -> str:
    """A schema in a few lines, for people."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in found["columns"].items())
    lines = [
        f"{found['schema']}: {found['rows']} rows, {found['features']} features ({kinds})",
        f"target {found['target']}: {', '.join(found['classes']) or found['kind']}",
        *(f"{name}: {note}" for name, note in found["notes"].items()),
    ]
    return "\n".join(lines)


def _asks_trees(model: str) -> bool:
    """Whether a list of layers has trees; a name, a file or no YAML at all asks for none, and is judged elsewhere."""
    try:
        layers = yaml_text.load(model)
    except yaml.YAMLError:
        return False
    return isinstance(layers, list) and any(
        one == "trees" or (isinstance(one, dict) and "trees" in one) for one in layers
    )


def settings_for(data: str, schema: str = "", target: str = "", model: str = "") -> list[str]:
    """Settings that make the demo's profile one of this table; its schema is written beside it if there is none.

    ``model``: what was asked for; trees ask for a schema of bits and for another rate.
    """
    trees = _asks_trees(model)
    file = Path(data).expanduser().resolve()
    known = Path(schema).expanduser().resolve() if schema else owner_files.schema_beside(file)
    if target and known.exists():
        raise ConfigError(f"{known} says what the target is", "leave --target out, or edit the schema")
    if known.exists():
        common.say(f"schema: {known}")
    else:
        common.say(summary(infer_schema(file, target, known, bins=_BINS if trees else 0)))
    named = [f"job.data={json.dumps(str(file))}", f"job.schema={json.dumps(str(known))}"]
    return [
        *named,
        f"job.model={_OF_TEXT if file.suffix.lower() == '.txt' else _LAYERS}",
        *_FOR_TABLES,
        *(_FOR_TREES if trees else ()),
    ]
