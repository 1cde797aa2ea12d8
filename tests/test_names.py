"""A public class has a name of its own in both packages, and so has a module, apart from those listed here."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Final

from parsed import ROOT, SOURCES, tree_of

MODULES: Final = frozenset(
    {
        "app",
        "attention",
        "cli",
        "client",
        "commands",
        "config",
        "decode",
        "fabric",
        "fleet",
        "flight",
        "main",
        "package",
        "schema",
        "selection",
        "selftest",
        "service",
        "store",
        "table",
    }
)
"""Found in several rooms: what a program begins with (``main``, ``cli``, ``config``), the two ends of one thing
(``fabric``, ``flight``, ``package``), and what is named after the thing that it computes or shows.
"""
BY_VERB: Final = frozenset({"cli", "bench"})
"""Rooms whose files are named after the verb that they run, or after what they measure; rooms inside them are not."""


def _by_verb(path: Path) -> bool:
    parts = path.relative_to(ROOT).parts
    return parts[1] in BY_VERB and (len(parts) == 3 or parts[1] == "cli")


@cache
def _named() -> tuple[tuple[tuple[str, Path], ...], tuple[tuple[str, Path], ...]]:
    """(name, file) of every class and of every alias of a type at the top of a file."""
    classes: list[tuple[str, Path]] = []
    aliases: list[tuple[str, Path]] = []
    for path in SOURCES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                classes.append((node.name, path))
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if name[0].isupper() and not name.isupper() and "TypeVar" not in ast.unparse(node.value):
                    aliases.append((name, path))
    return tuple(classes), tuple(aliases)


def test_no_two_public_classes_share_a_name() -> None:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name, path in _named()[0]:
        if not name.startswith("_"):
            found[name].append(str(path.relative_to(ROOT)))
    twice = {name: places for name, places in found.items() if len(places) > 1}
    assert twice == {}


def test_no_public_type_alias_has_the_name_of_a_class_elsewhere() -> None:
    classes, aliases = dict(_named()[0]), _named()[1]
    assert [f"{p.relative_to(ROOT)}:{n}" for n, p in aliases if n in classes and classes[n] != p] == []


def test_no_two_modules_share_a_name() -> None:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in SOURCES:
        if not path.stem.startswith("__") and not _by_verb(path):
            found[path.stem.lstrip("_")].append(str(path.relative_to(ROOT)))
    twice = {name: places for name, places in found.items() if len(places) > 1}
    assert {name: places for name, places in twice.items() if name not in MODULES} == {}
    assert twice.keys() >= MODULES
