"""What a walk through the screens found ugly: holes, cut ids, hashes, hints that stand still, advice of the past."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from recorded_runs import recorded, seen
from ui_desk import desk
from ui_journals import RUN, Story

from uvcc_console.core.folding.state import fold
from uvcc_console.ui.drawing.paint import plain
from uvcc_console.ui.feed.home_model import RunSummary
from uvcc_console.ui.feed.moments import moment
from uvcc_console.ui.judging.lamps import DEAD, Lamp
from uvcc_console.ui.judging.past import as_told
from uvcc_console.ui.judging.rechecks import Rechecks
from uvcc_console.ui.judging.view import View
from uvcc_console.ui.panels.fleet import FleetState, fleet_lines
from uvcc_console.ui.panels.home import RunsPanel, run_lines
from uvcc_console.ui.panels.pod_page import pod_lines
from uvcc_console.ui.widgets.bars import banner_lines
from uvcc_console.ui.widgets.prompt import Prompt
from uvcc_engine.contract.errors import ConfigError


def at(name: str, moment: str) -> View:
    run = recorded(name)
    events = run.events[: run.moments[moment]]
    return View(snap=fold(events), now=events[-1].ts + 1)


@pytest.mark.parametrize("width", [58, 78, 108, 158, 198, 248])
def test_no_column_of_the_fleet_leaves_a_hole(width: int) -> None:
    for name in ("private", "lm"):
        for line in fleet_lines(at(name, "full"), FleetState(), width):
            text = plain(line)
            assert len(text) <= width
            assert " " * 24 not in text.strip(), text


@pytest.mark.parametrize("width", [44, 60, 92])
def test_the_list_of_runs_keeps_ids_whole_and_drops_what_matters_less(width: int, tmp_path: Path) -> None:
    panel = RunsPanel()
    ids = ("local-lm-smoke-20261125-0758-147b", "demo-20261125-0724-7e19")
    snaps = (at("lm", "full"), at("private", "full"))
    panel.known = [
        RunSummary(tmp_path / run, view.snap, True, 1, Rechecks(tmp_path)) for run, view in zip(ids, snaps, strict=True)
    ]
    view = View(now=snaps[0].now)
    (head,) = panel.head(view, width)
    rows = [plain(line) for _, line in panel.rows(view, width)]
    longest = max(map(len, ids)) if width > 50 else 26
    for run, row in zip(ids, rows, strict=True):
        assert run[:longest] in row if len(run) <= longest else run[: longest - 1] in row
        assert len(row) <= width - 2
    assert "$" not in "".join(rows), "nothing was spent: no column says so"
    assert ("step" in plain(head)) == (width > 60)


def test_a_language_model_has_ranks_and_no_parties(tmp_path: Path) -> None:
    view = at("lm", "full")
    summary = RunSummary(tmp_path / "lm-1", view.snap, True, 1, Rechecks(tmp_path))
    told = "\n".join(plain(line) for line in run_lines(summary, view, 60))
    assert "2 ranks" in told
    assert "parties" not in told
    page = "\n".join(plain(line) for line in pod_lines(view, "p0r0", 78, 20))
    assert "replica" not in page


def test_a_small_page_of_a_pod_has_its_curve_and_no_hashes() -> None:
    view = at("private", "full")
    page = [plain(line) for line in pod_lines(view, "p0r0", 78, 20)]
    assert len(page) <= 20
    assert any(line.startswith("loss ") for line in page)
    assert "newest lines of p0r0" in "\n".join(page)
    for width, height in ((58, 16), (78, 20), (158, 45)):
        told = "\n".join(plain(line) for line in pod_lines(view, "p0r0", width, height))
        assert "manifests=" not in told
        assert "sha256=" not in told


def test_what_all_ranks_say_is_one_line_of_the_pods_page() -> None:
    page = [plain(line) for line in pod_lines(at("lm", "full"), "p0r0", 158, 60)]
    begins = [line for line in page if "training starts" in line]
    assert len(begins) == 2, "one for both ranks, in the smoke and in the full run"


@pytest.mark.parametrize("size", [(60, 20), (80, 24)], ids=lambda s: f"{s[0]}x{s[1]}")
async def test_what_a_stop_would_lose_is_told_first_on_the_page_of_the_rollout(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    async with seen("private", "resumed", tmp_path, size) as d:
        await d.press("6")
        assert "every pod has one of step 20; 7 steps since then" in " ".join(d.text.split())


@pytest.mark.parametrize("name", ["private", "lm"])
def test_step_times_of_each_worker_are_drawn_from_120_columns_on(name: str) -> None:
    view = at(name, "full")
    head, *rows = (plain(line) for line in fleet_lines(view, FleetState(), 116))
    assert "step time" in head
    assert len(rows) == len(view.snap.workers)
    assert all(set(row) & set(view.glyphs.heat) for row in rows), "a sparkline each"


def test_a_recording_repeats_no_advice_of_its_time() -> None:
    view = at("private", "failed")
    live = " ".join(plain(line) for line in banner_lines(view, 158))
    past = " ".join(plain(line) for line in banner_lines(replace(view, replay="50% x1"), 158))
    assert "uvcc resume" in live
    assert "was killed by SIGKILL" in past
    assert not any(word in past for word in ("uvcc", "resume", "pods kept", "left"))
    told = "p0r1s0t0: no heartbeat for 15 s (last step 80, limit 15 s) (look at its pod: log, shell; F9 if it stays)"
    assert as_told(view, told) == told
    assert as_told(replace(view, replay="x"), told) == "p0r1s0t0: no heartbeat for 15 s (last step 80, limit 15 s)"


def test_a_read_only_console_advises_no_key_that_it_refuses() -> None:
    view = at("private", "failed")
    banner = " ".join(plain(line) for line in banner_lines(replace(view, readonly=True), 158))
    assert "resumes" in " ".join(plain(line) for line in banner_lines(view, 158))
    assert not any(word in banner for word in ("resumes", "retries", "tears down"))
    assert f"uvcc attach {view.snap.run}" in banner
    alone = replace(view, snap=fold(Story().full(5).events), conductor=Lamp(DEAD), readonly=True)
    assert "F9 starts another" in " ".join(
        plain(line) for line in banner_lines(replace(alone, sidecar=Lamp(DEAD)), 158)
    )


def test_a_recording_goes_to_what_an_operator_calls_it() -> None:
    run = recorded("private")
    events = tuple(enumerate(run.events, 1))
    start, end = run.events[0].ts, run.events[-1].ts

    def when(text: str) -> float:
        return moment(text, events, start, end, start)

    assert when("halted") == when("halt")
    assert when("halt") < when("resumed") < when("failed") or when("resume") == when("resumed")
    with pytest.raises(ConfigError, match="knows no moment 'yesterday'"):
        when("yesterday")


async def test_hints_narrow_while_a_command_is_typed_and_help_names_the_log_plainly(tmp_path: Path) -> None:
    async with desk(Story().full(5), tmp_path / RUN, (120, 40)) as d:
        await d.press("3", "question_mark")
        assert "3 Log" in d.text
        assert "[$" not in d.text
        await d.press("escape", "colon")
        prompt = d.app.screen.query_one(Prompt)

        def hint() -> str:
            return str(prompt.query_one("#hint").render())

        await d.press("s", "o")
        assert "sort" in hint()
        assert "halt" not in hint()
        await d.press("r", "t", "space", "l")
        assert "loss" in hint()
        assert "worst" not in hint()
