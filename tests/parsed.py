"""The sources of the project and its tests, read and parsed once for all tests of a process that look through them.

Whoever imports this is run beside the others that do (``units``), so that one process parses.
"""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
TESTS: Final = Path(__file__).parent
EVERY_SOURCE: Final = sorted(p for package in ("uvcc_engine", "uvcc_console") for p in (ROOT / package).rglob("*.py"))
ALONE: Final = "standalone_verify.py"  # a program that shares nothing with ours, on purpose
SOURCES: Final = [p for p in EVERY_SOURCE if p.name != ALONE]
EVERY_TEST: Final = sorted(TESTS.rglob("*.py"))


@cache
def text_of(path: Path) -> str:
    return path.read_text()


@cache
def tree_of(path: Path) -> ast.Module:
    """Nobody may change it: others look at it, too."""
    tree = ast.parse(text_of(path))
    gc.freeze()  # it lives until the end: the garbage collector need not look at it each time
    return tree


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """What ``ast.walk`` finds in a file."""
    return tuple(ast.walk(tree_of(path)))
