"""``uvcc pod``: the answer that it prints is the one to its own order."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "ui"))
from ui_journals import RUN, Story

from uvcc_console.cli.main import main
from uvcc_console.core import events as ev
from uvcc_console.core import paths
from uvcc_console.core.journal.journal import Journal
from uvcc_console.runs import processes


@pytest.mark.parametrize("ok", [True, False])
def test_two_who_ask_for_the_same_of_one_pod_hear_each_their_own_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ok: bool
) -> None:
    """The one whose replacing went on printed the refusal of the other, and failed."""
    folder = Story(steps=30).full(20).write(paths.runs_dir() / RUN)
    orders: list[str] = []

    def ask(run_dir: Path, action: str, **args: Any) -> None:
        orders.append(args["order"])
        told = [("the other's", not ok, "0" * 8), ("our own", ok, args["order"])]
        journal = Journal(folder / processes.JOURNAL, source="test")
        for detail, well, order in told:
            journal.append(ev.ActionDone(action=action, pod=args["pod"], ok=well, detail=detail, order=order))
        journal.close()

    monkeypatch.setattr(processes, "running", lambda run_dir, name: True)
    monkeypatch.setattr("uvcc_console.cli.follow.headless.ask", ask)
    assert main(["pod", RUN, "replace", "p0r0", "--json"]) == (0 if ok else 1)
    assert json.loads(capsys.readouterr().out)["detail"] == "our own"
    assert main(["pod", RUN, "stackdump", "p0r0"]) == (0 if ok else 1)
    assert len(set(orders)) == 2


def test_of_a_run_that_has_ended_nobody_is_sent_to_take_it_up(capsys: pytest.CaptureFixture[str]) -> None:
    """It said to resume the run, and resuming said that it had ended."""
    Story(steps=5).finished().write(paths.runs_dir() / RUN)
    assert main(["pod", RUN, "stackdump", "p0r0"]) == 2
    assert capsys.readouterr().err == f"error: {RUN} has ended (ok) (what came of it: uvcc status {RUN})\n"
