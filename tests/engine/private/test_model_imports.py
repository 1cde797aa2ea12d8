"""No file of the room ``model`` needs a file that needs it, not even for its types."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import uvcc_engine.model

ROOM = Path(uvcc_engine.model.__file__).parent
PREFIX = "uvcc_engine.model"


def test_the_files_of_the_model_stand_in_an_order() -> None:
    names = {".".join([PREFIX, *path.relative_to(ROOM).with_suffix("").parts]): path for path in ROOM.rglob("*.py")}
    needs = {name: needed(path, set(names)) for name, path in names.items()}
    assert sum(map(len, needs.values())) > 100
    order = list(TopologicalSorter(needs).static_order())  # raises CycleError, naming the circle
    places = [order.index(f"{PREFIX}.{name}") for name in ("registry", "parts", "definition.specs")]
    assert places == sorted(places)


def needed(path: Path, names: set[str]) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PREFIX):
            found |= {f"{node.module}.{one.name}" for one in node.names} | {str(node.module)}
    return found & names
