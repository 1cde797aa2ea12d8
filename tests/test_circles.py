"""No file imports another that imports it, in one step or in many, inside a room or across rooms."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from parsed import ROOT, tree_of


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of every import that runs, at the top of a file or inside a function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue  # for the type checker alone
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        else:
            yield from _imports(node)


def _graph(package: Path) -> dict[str, set[str]]:
    """Which files each file imports; a package's own file only where something of it is meant."""
    files = {p.relative_to(package.parent).with_suffix(""): p for p in package.rglob("*.py")}
    modules = {".".join(path.parts).removesuffix(".__init__"): p for path, p in files.items()}
    found: dict[str, set[str]] = {}
    for module, path in modules.items():
        needed = set()
        for source, name in _imports(tree_of(path)):
            whole = f"{source}.{name}" if name else source
            needed.add(whole if whole in modules else source)
        found[module] = (needed & modules.keys()) - {module}
    return found


@pytest.mark.parametrize("package", ["uvcc_engine", "uvcc_console"])
def test_no_file_imports_itself_over_others(package: str) -> None:
    try:
        TopologicalSorter(_graph(ROOT / package)).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of files: {' -> '.join(error.args[1])}")


def test_a_circle_is_found(tmp_path: Path) -> None:
    room = tmp_path / "p"
    room.mkdir()
    (room / "__init__.py").write_text("")
    (room / "a.py").write_text("from p import b\n")
    (room / "b.py").write_text("def f() -> None:\n    from p.a import x\n")
    with pytest.raises(CycleError):
        TopologicalSorter(_graph(room)).prepare()
