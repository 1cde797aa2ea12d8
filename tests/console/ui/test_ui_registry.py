"""One registry: bindings, palette, help, command-line verbs and the manual say the same, and cannot drift apart."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from ui_desk import desk
from ui_journals import Story

from uvcc_console.cli.main import VERBS
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.ui.actions.palette import ActionProvider
from uvcc_console.ui.registry.keys import ACTIONS, COMMANDS, Context, bindings, markdown_table
from uvcc_console.ui.screens.help import HelpScreen, help_lines

ROOT = Path(__file__).parents[3]
README = ROOT / "README.md"
BY_ITSELF = ("palette", "release")  # opening the palette from itself; a release that must not need two keys


async def test_bindings_palette_and_help_offer_every_action(tmp_path: Path) -> None:
    async with desk(Story().full(5), tmp_path) as d:
        bound = {str(b.id) for b in bindings()}
        assert bound == {a.id for a in ACTIONS.values() if a.keys}
        provider = ActionProvider(d.app.screen, cast(Any, None))
        offered = {hit.text async for hit in provider.discover()}
        assert offered == {f"{a.name} ({a.label})" for a in ACTIONS.values() if a.id not in BY_ITSELF}
        await d.press("question_mark")
        assert isinstance(d.app.screen, HelpScreen)
        text = "".join(span for line in help_lines(Context(Snapshot(), replay=True), "", "", 200) for span, _ in line)
        missing = [a.label for a in ACTIONS.values() if a.label not in text]
        assert missing == []


def test_a_reason_that_many_keys_share_is_said_once() -> None:
    ended = Context(replace(Snapshot(), ended=1.0, status="ok"))
    reasons = Counter(why for a in ACTIONS.values() if a.group != "replay" and (why := a.reason(ended)))
    (often, times), (seldom, _), *_ = reasons.most_common()
    assert times > 4
    text = ["".join(span for span, _ in line) for line in help_lines(ended, "", "", 400)]
    assert [line for line in text if often in line] == [f"not now, where no more is said: {often}"]
    assert sum(line.endswith("  not now") for line in text) == times
    assert any(line.endswith(f"  not now: {seldom}") for line in text)


def test_every_verb_that_the_registry_names_exists() -> None:
    for a in ACTIONS.values():
        for verb in re.findall(r"^uvcc ([a-z]+)", a.cli):
            assert verb in VERBS, f"{a.id}: uvcc {verb}"
        assert not a.command or COMMANDS[a.command] is a


def test_the_manual_carries_the_registrys_own_table() -> None:
    assert markdown_table() in (ROOT / "docs/reference/keys.md").read_text(), "run: python -m docs.make"


def test_the_readmes_pictures_are_the_baselines_that_the_tests_hold() -> None:
    shown = re.findall(r"\]\(([^)\s]+\.svg)\)", README.read_text())
    shown = [name for name in shown if name != "docs/demo.svg"]  # a recorded run, see docs/make/recording.py
    assert shown
    for name in shown:
        assert name.startswith("tests/console/ui/__snapshots__/test_ui_snapshots/"), name
        assert (ROOT / name.replace("%5B", "[").replace("%5D", "]")).exists(), name


@pytest.mark.parametrize("action", ACTIONS.values(), ids=lambda a: a.id)
def test_a_disabled_action_says_why(action: Any) -> None:
    ended = Snapshot(run="r", status="ok", ended=1.0)
    reasons = [
        action.reason(Context(ended)),
        action.reason(Context(ended, readonly=True)),
        action.reason(Context(Snapshot(), has_run=False)),
    ]
    assert all(isinstance(r, str) for r in reasons)
    if action.group == "pods" and not action.id.startswith(("panel", "overview")):
        assert all(reasons), f"{action.id} is possible on a run that has ended"


def test_nothing_that_the_app_is_made_of_imports_the_app() -> None:
    parts = ("actions.commands", "actions.palette", "actions.saved_screens", "actions.forwarding", "run_base")
    code = f"import sys; [__import__('uvcc_console.ui.' + name) for name in {parts!r}]"
    code += "; print('uvcc_console.ui.app' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    named = {
        p.name for p in (ROOT / "uvcc_console/ui").rglob("*.py") if re.search(r"uvcc_console\.ui\.app\b", p.read_text())
    }
    assert named <= {"home_app.py", "page_viewer.py"}
