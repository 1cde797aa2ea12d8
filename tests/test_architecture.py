"""The architecture page and its list of rooms name what is there, in the order that the import contracts hold."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest

from uvcc_console.plan.plan import stage_names
from uvcc_console.plan.profile import load

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
NAMED = sorted(set(re.findall(r"`(uvcc_(?:engine|console)/[\w/]+\.py)(?::(\w+))?`", PAGE)))


@pytest.mark.parametrize(("path", "name"), NAMED, ids=lambda v: v)
def test_what_the_page_names_is_there(path: str, name: str) -> None:
    assert (ROOT / path).is_file()
    if name:
        assert hasattr(importlib.import_module(path.removesuffix(".py").replace("/", ".")), name)


def test_every_file_of_ours_that_the_manual_names_is_there() -> None:
    """Many a sentence, of the pages on security first of all, says which test or module holds the code to it."""
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / f"{name}.md" for name in ("README", "SECURITY", "CONTRIBUTING"))]
    named = {
        (page.relative_to(ROOT).as_posix(), path)
        for page in pages
        for path in re.findall(r"`((?:tests|uvcc_engine|uvcc_console)/[\w./-]*\w)", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 100
    assert sorted((page, path) for page, path in named if not (ROOT / path).exists()) == []


def test_the_page_lists_the_stages_of_the_main_job() -> None:
    listed = re.search(r"`uvcc_console/rollout/stage_runner\.py:StageRunner`\): ([^.]+)\.", PAGE)
    assert listed is not None
    assert re.split(r",\s+", listed[1]) == list(stage_names(load("demo")[1]))


@pytest.mark.parametrize("package", ["uvcc_engine", "uvcc_console"])
def test_the_page_lists_every_room_below_those_that_may_import_it(package: str) -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [c["layers"] for c in contracts if c.get("containers") == [package]]
    height = {room: n for n, layer in enumerate(layers) for room in layer.split(" | ")}
    block = PAGE[PAGE.index(f"\n{package}/ ") :].split("\n```")[0]
    lines = block.split("\n")[2:]
    own = [line for line in lines[: next((n for n, x in enumerate(lines) if not x.startswith("  ")), len(lines))]]
    rooms = [room for line in own for room in re.findall(r"(\w+)/", line[:16])]
    assert set(rooms) == {r for r in height if (ROOT / package / r).is_dir()}
    assert [height[r] for r in rooms] == sorted(height[r] for r in rooms)
