"""What the vendor's OpenAPI document says an answer must look like, held against answers of the fake markets."""

from __future__ import annotations

import json
import re
from datetime import datetime
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import jsonschema

_MOMENT = "2026-11-21T00:00:00+00:00"
_ISO = re.compile(r"\d{4}-\d\d-\d\dT[0-9:.]+(Z|[+-]\d\d:\d\d)")
FILE = Path(__file__).parent / "schemas" / "compute_api.json"
_formats = jsonschema.FormatChecker(formats=())


@_formats.checks("date-time", raises=ValueError)
def _is_moment(value: object) -> bool:
    return not isinstance(value, str) or datetime.fromisoformat(value).tzinfo is not None


@cache
def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


@cache
def _validator(text: str) -> jsonschema.Draft202012Validator:
    """For one schema of the document, whose references lead into its components."""
    schema = {**json.loads(text), "components": document()["components"]}
    return jsonschema.Draft202012Validator(schema, format_checker=_formats)


@cache
def operation(method: str, path: str) -> dict[str, Any] | None:
    """The document's entry for a request, where it has one: paths with the fewest placeholders come first."""
    asked = path.strip("/").split("/")
    fitting = []
    for name, entry in document()["paths"].items():
        verb, _, template = name.partition(" ")
        parts = template.strip("/").split("/")
        holes = sum(p.startswith("{") for p in parts)
        same = len(parts) == len(asked) and all(p.startswith("{") or p == a for p, a in zip(parts, asked, strict=False))
        if verb == method and same:
            fitting.append((holes, name, entry))
    return min(fitting)[2] if fitting else None


def _complaints(schema: dict[str, Any], value: Any) -> list[str]:
    return list(_judged(json.dumps(schema, sort_keys=True), json.dumps(_timeless(value), sort_keys=True)))


@lru_cache(maxsize=4096)
def _judged(schema: str, value: str) -> tuple[str, ...]:
    """What is wrong, worked out once for each answer that is the same but for its times."""
    errors = _validator(schema).iter_errors(json.loads(value))
    return tuple(f"{'/'.join(map(str, e.absolute_path))}: {e.message[:200]}" for e in errors)


def _timeless(value: Any) -> Any:
    """The value with every moment in it that can be read replaced by one and the same."""
    if isinstance(value, dict):
        return {k: _timeless(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_timeless(v) for v in value]
    return _MOMENT if isinstance(value, str) and _ISO.fullmatch(value) and _is_moment(value) else value


def wrong_answer(method: str, path: str, status: int, body: Any) -> list[str]:
    """What is wrong with an answer; empty also for requests and statuses of which the document gives no form."""
    entry = operation(method, path)
    schema = (entry or {"answers": {}})["answers"].get(str(status))
    return _complaints(schema, body) if schema else []


def wrong_body(method: str, path: str, body: Any) -> list[str]:
    """What is wrong with a request's body."""
    entry = operation(method, path)
    return _complaints(entry["body"], body) if entry and "body" in entry else []
