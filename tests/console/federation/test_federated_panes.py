"""The five panes of ``uvcc demo --federated --tmux``, in a real tmux: who is where, and what fits at two sizes."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from uvcc_console.bench import feeder
from uvcc_console.core.journal.journal import Journal
from uvcc_console.federation.demo import demo_keeper, panes, people
from uvcc_console.runs import processes

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
WHO = ("alpha", "beta", "gamma", "north and south", "auditor")


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[people.Scene]:
    """Everybody's home; alpha has a run under way, the two others have begun none yet."""
    monkeypatch.setenv("UVCC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")  # a test runner's: a pane has its own size
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    made = people.set_up(users=False)
    run = made.people["alpha"].home / "runs" / "ward"
    run.mkdir(parents=True)
    journal = Journal(run / processes.JOURNAL, source="test")
    journal.append(*feeder.opening(3), *feeder.beat(3, 7))
    journal.close()
    (run / "conductor.json").write_text("{}")
    (made.folder / "beta.log").write_text("$ uvcc domain init\n")
    (made.folder / "north.log").write_text("$ uvcc owner share: north shared\n")
    (made.folder / "auditor.log").write_text("VERIFIED by the auditor\n\x1b]0;a title\x07")
    yield made
    subprocess.run([*panes.server(made), "kill-server"], check=False, capture_output=True)
    assert demo_keeper.sweep(made.folder, made.temp) == set()


def _shown(stage: people.Scene, holds: Callable[[list[str]], bool]) -> list[str]:
    """What each pane shows, in order, once it is what is waited for."""
    end = time.monotonic() + 120.0
    while True:
        ids = subprocess.check_output([*panes.server(stage), "list-panes", "-F", "#{pane_id}"], text=True).split()
        ids.sort(key=lambda one: int(one[1:]))
        shown = [
            subprocess.check_output([*panes.server(stage), "capture-pane", "-p", "-t", one], text=True) for one in ids
        ]
        if holds(shown):
            return shown
        assert time.monotonic() < end, "\n-----\n".join(shown)
        time.sleep(0.2)


def _sizes(stage: people.Scene) -> dict[str, tuple[int, int]]:
    told = subprocess.check_output(
        [*panes.server(stage), "list-panes", "-F", "#{@who}|#{pane_width}|#{pane_height}"], text=True
    )
    return {who: (int(w), int(h)) for who, w, h in (line.split("|") for line in told.splitlines())}


def test_three_consoles_fit_where_there_is_room(stage: people.Scene) -> None:
    panes.layout(stage, 160, 50)
    sizes = _sizes(stage)
    assert set(sizes) == set(WHO)
    assert all(w >= 60 and h >= 20 for w, h in (sizes[name] for name in WHO[:3])), sizes
    shown = _shown(stage, lambda s: "F9" in s[0] and "north shared" in s[3] and "VERIFIED by the auditor" in s[4])
    assert "Fleet" in shown[0]
    assert [text.splitlines()[0] for text in shown[1:]] == ["beta", "gamma", "north and south", "auditor"]
    _shown(stage, lambda s: "$ uvcc domain init" in s[1])  # what it does before it has a run to show
    subprocess.run([*panes.server(stage), "send-keys", "-t", "demo:0.0", "?"], check=True)  # its keys reach it
    _shown(stage, lambda s: "Esc" in s[0] and s[0] != shown[0])


@pytest.mark.ci(__file__)
def test_where_a_console_does_not_fit_its_progress_is_told_in_lines(stage: people.Scene) -> None:
    panes.layout(stage, 80, 24)
    assert set(_sizes(stage)) == set(WHO)
    shown = _shown(stage, lambda s: "resume ward" in s[0] and "north shared" in s[3] and "VERIFIED" in s[4])
    assert "F9" not in shown[0]
