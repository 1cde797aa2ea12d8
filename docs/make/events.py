"""The page of events: what the console's journal holds, and what workers and agents say."""

from __future__ import annotations

import dataclasses

from docs.make.words import HEAD, cell, prose


def _type(annotation: object) -> str:
    return str(annotation).replace("dict[str, Any]", "mapping").replace(" | None", " or null")


def page() -> str:
    """Both registries."""
    from uvcc_console.core import events as ev
    from uvcc_engine.contract.run_files.event_names import NAMES

    lines = [
        "# Events",
        "",
        HEAD,
        "",
        "## Of pods",
        "",
        "One line of `events.jsonl` in a [run directory](../specifications/run-contract.md), by its name. A trainer of",
        "your own may write other names: the console shows them and decides nothing by them.",
        "",
        "| event | about | means |",
        "|---|---|---|",
    ]
    lines += [f"| `{name}` | {about.area} | {cell(about.means)} |" for name, about in NAMES.items()]
    lines += [
        "",
        "## Of the journal",
        "",
        "What the console did, saw and decided. `uvcc watch RUN` prints them as JSON lines: `seq`, `ts`, `kind` and",
        "the fields below. A field is only ever added, with a default.",
        "",
    ]
    for kind, found in sorted(ev.kinds().items()):
        lines += [f"### {kind}", "", cell(prose(found.__doc__)), ""]
        fields = [f for f in dataclasses.fields(found) if f.name != "ts"]
        if fields:
            lines += ["| field | type |", "|---|---|"]
            lines += [f"| `{f.name}` | {cell(_type(f.type))} |" for f in fields]
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"
