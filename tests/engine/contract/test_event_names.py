"""One registry of event names: the engine writes no other, and the registry holds none that is never written."""

from __future__ import annotations

import ast
import re
from functools import cache

from parsed import EVERY_SOURCE, ROOT, nodes_of, text_of

from uvcc_engine.contract.run_files.event_names import NAMES

CALLS = {"event", "_on_event", "on_event", "_note", "_note_in", "Notice", "tell", "told"}
SOME_CALL = re.compile(rf"\b({'|'.join(sorted(CALLS))})\(")
SOURCES = [p for p in EVERY_SOURCE if p.is_relative_to(ROOT / "uvcc_engine")]


def literals(call: ast.Call) -> list[str]:
    """The texts of an event call that can be its name: the first that is a plain word."""
    texts = [a.value for a in call.args[:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return [t for t in texts if t.isidentifier() and t not in ("info", "warn", "error", "debug")][:1]


@cache
def written() -> dict[str, str]:
    found = {}
    for path in SOURCES:
        if "bench" in path.parts or path.name == "event_names.py":
            continue
        for node in nodes_of(path) if SOME_CALL.search(text_of(path)) else ():
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if name in CALLS:
                    found |= {text: f"{path.name}:{node.lineno}" for text in literals(node)}
    return found


def test_every_event_that_the_engine_writes_is_registered() -> None:
    assert {n: at for n, at in written().items() if n not in NAMES} == {}
    assert len(written()) > 30


def test_the_registry_holds_no_name_that_is_never_written() -> None:
    texts = "".join(text_of(p) for p in SOURCES if p.name != "event_names.py")
    assert [n for n in NAMES if f'"{n}"' not in texts] == []
