"""A panel from outside: one file with its styles; keys, command, help and layout follow from the table."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from uvcc_console.ui.registry.panels import GROUP, PanelSpec, table
from uvcc_engine.contract.errors import ConfigError

PAGE = (Path(__file__).parents[3] / "docs" / "write-a-panel.md").read_text(encoding="utf-8")
FILES = {name: body for name, body in re.findall(r'```\w+ title="([\w.-]+)"\n(.*?)```', PAGE, re.DOTALL)}
STORY = """
import asyncio, importlib.metadata, sys
from pathlib import Path

points = importlib.metadata.entry_points
extra = importlib.metadata.EntryPoint(*sys.argv[2:4], "uvcc.panels")
importlib.metadata.entry_points = lambda **how: [extra] if how.get("group") == "uvcc.panels" else points(**how)

from ui_desk import desk
from ui_journals import Story
from uvcc_console.ui.registry.keys import ACTIONS, COMMANDS


async def main(folder):
    async with desk(Story().full(5), folder) as d:
        beside = d.app.main.query_one("#power").region.width
        await d.press("8")
        panel = d.app.main.query_one("#power")
        text = "".join(s for line in panel.lines for s, _ in line)
        print(d.app.main.page, text, panel.styles.text_style, 0 < beside < panel.region.width)
    print(ACTIONS["panel_power"].description, COMMANDS["power"].id)

asyncio.run(main(Path(sys.argv[1])))
"""


def test_it_has_its_place_its_key_and_its_page(tmp_path: Path) -> None:
    """The page "Write a panel", followed literally."""
    (tmp_path / "uvcc_power.py").write_text(FILES["uvcc_power.py"])
    ((name, where_it_is),) = tomllib.loads(FILES["pyproject.toml"])["project"]["entry-points"][GROUP].items()
    (tmp_path / "run").mkdir()
    where = os.pathsep.join([str(tmp_path), str(Path(__file__).parent), str(Path(__file__).parents[3])])
    env = {**os.environ, "PYTHONPATH": where}
    command = [sys.executable, "-c", STORY, str(tmp_path / "run"), name, where_it_is]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.fullmatch(r"8 drawn for \S+ italic True\nwhat the pods draw panel_power\n", done.stdout), done.stdout


def test_a_table_with_one_more() -> None:
    added = PanelSpec("power", "8", "Power", "what the pods draw", "right", "x:Y")
    assert table([added])[-1] is added
    assert len({p.key for p in table([added])}) == len(table([added]))


@pytest.mark.parametrize(("word", "key"), [("log", "8"), ("power", "3"), ("power", "x"), ("power", "0")])
def test_no_panel_takes_what_is_another_ones(word: str, key: str) -> None:
    with pytest.raises(ConfigError, match=word):
        table([PanelSpec(word, key, "Power", "", "right", "x:Y")])


def test_a_panel_that_cannot_be_loaded_is_named() -> None:
    with pytest.raises(ConfigError, match="the panel power cannot be loaded"):
        PanelSpec("power", "8", "Power", "", "right", "no_such_package:Y").load()
