"""Each page of a data flow names functions that are there, and each step hands on to the next as the page says."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

import pytest

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = sorted((ROOT / "docs" / "architecture").glob("*.md"))
ROW: Final = re.compile(r"^\| \d+ \| `(uvcc_\w+/[\w/]+\.py):([\w.]+)` \| (.+?) \| (.+?) \|$", re.MULTILINE)


class Step(NamedTuple):
    """A function, and how it hands on: by a call, by what it returns, or by a word that stands in both modules."""

    path: str
    name: str
    hands_on: str

    @property
    def module(self) -> ModuleType:
        return importlib.import_module(self.path.removesuffix(".py").replace("/", "."))

    def found(self) -> Any:
        place: Any = self.module
        for part in self.name.split("."):
            place = getattr(place, part)
        return place


def steps(page: Path) -> list[Step]:
    return [Step(path, name, how) for path, name, _, how in ROW.findall(page.read_text(encoding="utf-8"))]


def names_in(source: str) -> set[str]:
    """Every name, attribute and text of a piece of code."""
    nodes = list(ast.walk(ast.parse(textwrap.dedent(source))))
    found = {n.id for n in nodes if isinstance(n, ast.Name)} | {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    found |= {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    return found | {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def broken(found: list[Step]) -> list[str]:
    """Steps that do not hand on as they say."""
    wrong = []
    for here, there in pairwise(found):
        if here.hands_on in ("a call", "its return"):
            one, other = (here, there) if here.hands_on == "a call" else (there, here)
            if other.name.split(".")[-1] not in names_in(inspect.getsource(one.found())):
                wrong.append(f"{one.name} does not call {other.name}")
        else:
            words = re.findall(r"`([^`]+)`", here.hands_on)
            sources = [names_in(inspect.getsource(step.module)) for step in (here, there)]
            wrong += [f"{here.name}: no {word} at both ends" for word in words if any(word not in s for s in sources)]
            wrong += [] if words else [f"{here.name} does not say how it hands on"]
    return wrong


def test_there_is_a_page_for_each_flow() -> None:
    assert {p.stem for p in PAGES} == {
        "share-to-leaf",
        "heartbeat-to-cell",
        "f9-to-process-gone",
        "profile-key-to-argument",
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_each_step_hands_on_to_the_next(page: Path) -> None:
    found = steps(page)
    assert len(found) >= 8
    assert [s for s in found if not callable(s.found())] == []
    assert broken(found) == []
    assert found[-1].hands_on == "the end"


def test_a_step_that_hands_on_to_nobody_is_found() -> None:
    page = next(p for p in PAGES if p.stem == "share-to-leaf")
    found = steps(page)
    assert broken([found[0], found[-1]._replace(hands_on="the end")])
    assert broken([found[0]._replace(hands_on="by `no_such_word`"), found[1]])
    with pytest.raises(AttributeError):
        found[0]._replace(name="gone").found()


if str(ROOT) not in sys.path:  # also when this file is run alone
    sys.path.insert(0, str(ROOT))
