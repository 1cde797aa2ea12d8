"""JSON that somebody else wrote or a disk has damaged ends nothing with a traceback: a thousand lists in each other are
a RecursionError for ``json.loads``, which hardly anybody thinks of who catches a ValueError."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from parsed import ROOT, SOURCES, text_of, tree_of

from uvcc_console.runs import processes
from uvcc_engine.contract.agent_protocol import wire
from uvcc_engine.contract.parsing.untrusted import json_of

DEEP = "[" * 100_000
READS = ("json.loads", "json.load")


def guarded(node: ast.AST, caught: str = "") -> Iterator[tuple[ast.Call, str]]:
    """Each call that reads JSON, with what is caught around it in its own function."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in READS:
        yield node, caught
    for name, field in ast.iter_fields(node):
        inside = caught
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inside = ""
        elif isinstance(node, ast.Try) and name == "body":
            inside = " ".join(ast.unparse(handler.type) for handler in node.handlers if handler.type)
        elif isinstance(node, ast.With) and name == "body":
            inside += " ".join(ast.unparse(item.context_expr) for item in node.items)
        for one in field if isinstance(field, list) else [field]:
            if isinstance(one, ast.AST):
                yield from guarded(one, inside)


def test_who_catches_what_json_raises_catches_all_of_it() -> None:
    """Where the text may be wrong it is read with ``untrusted.json_of``, or RecursionError is caught, too."""
    for path in SOURCES:
        for call, caught in guarded(tree_of(path)) if "json.load" in text_of(path) else ():
            partly = "ValueError" in caught and "RecursionError" not in caught
            assert not partly, f"{path.relative_to(ROOT)}:{call.lineno} catches {caught}"


def test_what_is_nested_too_deeply_is_a_value_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        json_of(DEEP)
    with pytest.raises(ValueError, match="nested too deeply"):
        wire.decode(f'{{"op": {DEEP}')
    (tmp_path / "conductor.json").write_text(DEEP)
    assert not processes.running(tmp_path, processes.CONDUCTOR)
