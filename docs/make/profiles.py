"""The profile's schema, for editors and as a page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from docs.make.words import HEAD, cell


def _schema() -> dict[str, Any]:
    """The schema of the providers that come with UVCC, whatever else is installed here."""
    from uvcc_console.plan.own_profiles import schema as found

    return found()


def schema() -> str:
    """What ``uvcc profiles schema`` prints."""
    return json.dumps(_schema(), indent=1) + "\n"


def _type(part: Mapping[str, Any]) -> str:
    if "const" in part:
        return f"`{part['const']}`"
    if "enum" in part:
        return " ".join(f"`{v}`" for v in part["enum"])
    if "anyOf" in part:
        kinds = [_type(p) for p in part["anyOf"]]
        return " or ".join(dict.fromkeys(kinds))
    if part.get("type") == "array":
        items = part.get("items", {})
        return f"list of {_type(items)}" if items else "list"
    kind = {"integer": "whole number", "number": "number", "boolean": "true or false", "string": "text"}
    found = kind.get(str(part.get("type")), "mapping" if part.get("type") == "object" else "any")
    bounds = {"minimum": "at least", "exclusiveMinimum": "more than", "maximum": "at most", "exclusiveMaximum": "below"}
    return ", ".join([found, *(f"{word} {part[bound]:g}" for bound, word in bounds.items() if bound in part)])


def _default(key: str, part: Mapping[str, Any], required: bool) -> str:
    if required:
        return "required"
    if "default" not in part:
        return ""
    value = part["default"]
    return "" if value in ("", [], {}) else f"`{json.dumps(value)}`"


def _rows(about: Mapping[str, Any]) -> Iterator[str]:
    yield "| key | value | default | means |"
    yield "|---|---|---|---|"
    for key, part in about.get("properties", {}).items():
        required = key in about.get("required", ())
        yield f"| `{key}` | {cell(_type(part))} | {_default(key, part, required)} | {part.get('description', '')} |"
    yield ""


def page() -> str:
    """Every key with its type, default and meaning, section by section."""
    from uvcc_console.plan.meanings import MEANINGS, section_of

    found = _schema()
    lines = [
        "# The profile",
        "",
        HEAD,
        "",
        "A profile is a YAML file that says what is computed, on which pods, and what must hold. An unknown key is an",
        "error that names the nearest known one. `uvcc profiles` lists the profiles that there are, `uvcc profiles new",
        "NAME --from PROFILE` begins one of your own, and `--set section.key=value` changes one key for one run.",
        "",
        "Your editor checks a profile against [the JSON Schema](profile.schema.json) when the file says where that is;",
        "`uvcc profiles new` writes the line for you, and `uvcc profiles schema` prints the schema:",
        "",
        "```yaml",
        "# yaml-language-server: $schema=./profile.schema.json",
        "```",
        "",
        "A duration is a number of seconds, or a text like `90s`, `15m` or `1h30m`.",
        "",
        "## At the top",
        "",
    ]
    parts = [(section_of(part, about), part, about) for part, about in found["$defs"].items()]
    known = {section for section, _, _ in parts if section}
    lines += _rows({"properties": {k: v for k, v in found["properties"].items() if k not in known}})
    kinds = {"PrivateJobSettings": "private", "LmJobSettings": "lm", "CommandJobSettings": "command"}
    fleets = {
        "FleetSettings": "every provider",
        "InventoryFleet": "inventory",
        "PrimeFleet": "prime",
        "PartiesFleet": "parties",
    }
    common = set(found["$defs"]["FleetSettings"]["properties"])
    order = ["job", "topology", "fleet", "nats", "smoke", "gates", "limits", "halt", "consent", "evidence"]
    for section in [*order, *sorted(known - set(order))]:
        for _, part, about in sorted(
            (p for p in parts if p[0] == section), key=lambda p: list(found["$defs"]).index(p[1])
        ):
            of = kinds.get(part) or fleets.get(part) or (part if section == "fleet" else "")
            lines += [f"## {section}" + (f" ({of})" if of else ""), "", MEANINGS.get(section, ""), ""]
            if section == "fleet" and part != "FleetSettings":
                own = {k: v for k, v in about["properties"].items() if k not in common}
                about = {**about, "properties": own}
                lines[-2] = "What this provider knows beside what every provider knows."
            lines += _rows(about)
    return "\n".join(lines).rstrip() + "\n"
