"""A schema as the YAML that :func:`uvcc_engine.data.schema.parse_schema` reads back unchanged."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

import yaml

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.job import owner_files
from uvcc_engine.contract.run_files import files
from uvcc_engine.data.dates import ORDERS
from uvcc_engine.data.schema import BINNED, CLASSES, EMBEDDED, POINT, UNLABELLED, Schema, SchemaColumn, Statistics


def schema_text(schema: Schema, about: str = "", notes: Mapping[str, str] | None = None) -> str:
    """The schema as YAML that ``parse_schema`` reads back unchanged; ``notes`` stand behind their columns."""
    split: dict[str, Any] = {"test": schema.test, "seed": schema.seed} | ({"by": schema.by} if schema.by else {})
    split |= {"validation": schema.validation} if schema.validation else {}
    lines = [f"# {line}" for line in about.splitlines()]
    if schema.text is not None:
        every = [chr(value) for value in range(256)]
        letters = "bytes" if list(schema.values) == every else list(schema.values)
        text: dict[str, Any] = {"positions": schema.text.positions, "stride": schema.text.stride}
        own = {"tokenizer": schema.text.tokenizer, "sha256": schema.text.sha256}
        text |= own if schema.text.tokenizer else {"letters": letters}
        return "\n".join([*lines, _line("text", text), _line("split", split)]) + "\n"
    lines += [_line("target", _target_to_json(schema))] if schema.kind != UNLABELLED else []
    lines.append(_line("split", split))
    lines += [f"weight: {_flow(schema.weight)}"] if schema.weight else []
    lines += [f"decimal: {_flow(schema.decimal)}"] if schema.decimal != POINT else []
    lines.append("columns:")
    for column in schema.columns:
        note = (notes or {}).get(column.name, "")
        if note:
            lines.append(f"  # {' '.join(note.split())}")
        lines.append(f"  {_line(column.name, _column_to_json(column))}")
    return "\n".join(lines) + "\n"


_ABOUT: Final = "The schema with the statistics of the training rows: the owner's, for predictions in clear."


def write_fitted(path: Path, schema: Schema) -> None:
    """Write what a training gives its owner, for the owner's eyes: the schema, and beside it a copy of the tokenizer
    that it names, so that the folder can be moved.

    Raises UnreadableError where the tokenizer cannot be read, ConfigError where it is another than the schema's.
    """
    text = schema.text
    if text is not None and text.tokenizer:
        own = Path(text.tokenizer)
        try:
            raw = own.read_bytes()
        except OSError as e:
            raise UnreadableError(f"cannot read {own}: {e.strerror}", "put the tokenizer back, and start again") from e
        if hashlib.sha256(raw).hexdigest() != text.sha256:
            raise ConfigError(f"{own} has changed since the schema was read", "start again")
        files.write_atomic(path.with_name(owner_files.TOKENIZER), raw, mode=0o600)
        schema = replace(schema, text=replace(text, tokenizer=owner_files.TOKENIZER))
    files.write_atomic(path, schema_text(schema, _ABOUT).encode(), mode=0o600)


class _OneLine(yaml.SafeDumper):
    """Writes texts that have line breaks with escapes, so that they stay on one line."""


def _text(dumper: _OneLine, text: str) -> yaml.Node:
    style = '"' if len(text.splitlines()) > 1 or text != text.strip() else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_OneLine.add_representer(str, _text)


def _line(name: str, value: Mapping[str, Any]) -> str:
    return f"{_flow(name)}: {_flow(dict(value))}"


def _flow(value: Any) -> str:
    """A value on one line."""
    given: dict[str, Any] = {"default_flow_style": True, "width": math.inf, "sort_keys": False, "allow_unicode": True}
    whole: str = yaml.dump([value], Dumper=_OneLine, **given)
    return whole.strip()[1:-1]  # without the brackets around the only one


def _target_to_json(schema: Schema) -> dict[str, Any]:
    found: dict[str, Any] = {"column": schema.target}
    found |= {"kind": schema.kind} if schema.kind != CLASSES else {}
    found |= {"values": list(schema.values)} if schema.values else {}
    return found | ({"scaling": _statistics_to_json(schema.scaling)} if schema.scaling is not None else {})


def _statistics_to_json(statistics: Statistics) -> dict[str, Any]:
    default = Statistics()
    told = {f.name: getattr(statistics, f.name) for f in fields(Statistics)}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in told.items() if v != getattr(default, k)}


def _column_to_json(column: SchemaColumn) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": column.kind}
    if column.values:
        found["values"] = list(column.values)
    if column.order != ORDERS[0]:
        found["order"] = column.order
    if column.kind == BINNED:
        found["bins"] = column.bins
    if column.kind == EMBEDDED:
        found["dimension"] = column.dimension
    if column.missing != "error":
        found["missing"] = column.missing
    if column.statistics is not None:
        found["statistics"] = _statistics_to_json(column.statistics)
    return found
