"""``uvcc resume`` of a run that nobody conducts while its workers go on: it says whether they do."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from uvcc_console.cli.follow import headless
from uvcc_console.cli.main import main
from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal

RUN = "taken-1"
COORDS = ("p0r0s0t0", "p1r0s0t0", "p2r0s0t0")


def worker(coord: str, state: str, engine_run: str = "taken-1.full") -> ev.Event:
    return ev.WorkerProcess(pod=coord[:4], coord=coord, state=state, pid=7, rc=None, engine_run=engine_run)


def beat(phase: str = "train") -> ev.Event:
    return ev.HeartbeatRead(pod="p0r0", coord=COORDS[0], record={"phase": phase, "step": 9})


def entered(name: str, status: str, detail: str = "") -> ev.Event:
    return ev.StageChanged(name=name, status=status, detail=detail)


ADOPTED = [entered("adopt", "running"), entered("adopt", "ok")]
SMOKES = [worker(c, "exited", "taken-1.smoke") for c in COORDS]  # who attaches anew is told of them, too


@pytest.fixture
def journal() -> Journal:
    folder = Path(os.environ["UVCC_HOME"]) / "runs" / RUN
    folder.mkdir(parents=True)
    made = Journal(folder / "journal.sqlite", source="test")
    stages = ["smoke", "full"]
    made.append(
        ev.RunCreated(run=RUN, profile_name="d", job_kind="", replicas=1, pipeline_stages=1, tensor=1, stages=stages),
        ev.PhaseStarted(phase="full", engine_run="taken-1.full", steps=90, sid_job="ab"),
        *[worker(c, "started") for c in COORDS],
        entered("full", "running"),
    )
    return made


@pytest.mark.parametrize(
    ("told", "code", "said"),
    [
        ([*ADOPTED, *SMOKES, entered("full", "running"), beat()], 0, "taken-1 runs again: full attempt 0"),
        ([*ADOPTED, beat(), entered("full", "running"), beat()], 0, "taken-1 runs again: full attempt 0"),
        (
            [
                *ADOPTED,
                entered("full", "running"),
                worker(COORDS[1], "exited"),
                beat(),
                entered("full", "failed", "P1"),
            ],
            1,
            "taken-1 does not run: P1",
        ),
        ([*ADOPTED, entered("full", "running"), beat("halted")], 1, "nothing was heard of its workers in 1 s"),
        ([*ADOPTED, beat()], 1, "nothing was heard of its workers in 1 s"),
    ],
    ids=["they go on", "what was said before counts for nothing", "one had ended", "they halted", "of old alone"],
)
def test_workers_that_went_on_by_themselves_run_again(
    told: list[ev.Event],
    code: int,
    said: str,
    journal: Journal,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No phase begins where the workers run: for two minutes its beginning was waited for, and an empty reason told."""
    conductor = SimpleNamespace(poll=lambda: None)

    def take_up(*_: object, **__: object) -> SimpleNamespace:
        journal.append(*told)
        return conductor

    monkeypatch.setattr(headless, "ask", take_up)
    assert main(["resume", RUN, "--timeout", "1"]) == code
    shown = capsys.readouterr()
    assert said in shown.out + shown.err


def test_a_run_that_needs_a_key_is_taken_up_only_where_the_key_is(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("THEIR_TOKEN", raising=False)
    again = next(e for _, e in journal.since(0) if isinstance(e, ev.RunCreated))
    journal.append(replace(again, ts=0.0, profile={"secrets": ["THEIR_TOKEN"]}))
    assert main(["resume", RUN]) == 2
    said = capsys.readouterr().err
    assert "THEIR_TOKEN of the profile's secrets is not set here" in said
    assert "export THEIR_TOKEN=..." in said
    assert not (journal.path.parent / "conductor.log").exists()
