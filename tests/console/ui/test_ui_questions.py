"""Twelve questions of an operator: docs/console.md says with which keys, and the answer stands on the screen then."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from recorded_runs import CutOff, recorded, seen
from ui_desk import OrderingApp, desk
from ui_journals import RUN, Story

from uvcc_console.core import events as ev

MANUAL = Path(__file__).parents[3] / "docs" / "console.md"
MOST_KEYS = 3
_ROW = re.compile(r"^\| ([^|]+\?) \| ([^|]*)\| [^|]+ \|$", re.MULTILINE)
SIZE = (120, 40)


def keys_of_the_manual() -> dict[str, list[str]]:
    """question -> keys."""
    return {found[1]: re.findall(r"`([^`]+)`", found[2]) for found in _ROW.finditer(MANUAL.read_text())}


def paying() -> Story:
    return Story(price=2.5, provider="prime").full(40)


def checkpointed() -> Story:
    return Story().full(37)


def a_loud_end() -> Story:
    story = Story().full(30)
    story.add(ev.Alert(level="error", name="disk", text="p2r0 has 12 MiB left", hint="free space"))
    for step in range(200):
        story.add(ev.Alert(level="info", name="note", text=f"ordinary word {step}"), 0.01)
    return story


def one_killed() -> Story:
    story = Story(replicas=8).full(30)
    story.add(ev.WorkerProcess(pod="p1r2", coord="p1r2s0t0", state="exited", rc=-9, signal="SIGKILL"), 0.2)
    return story


def beaten() -> Story:
    return Story(steps=60).full(40)


ANSWERS: dict[str, tuple[Callable[[], Story], tuple[str, ...]]] = {
    "Which pod is slowest, and why?": (
        lambda: Story(replicas=3).full(30).hanging(),
        ("p1r1s0t0 is at #1840 all_gather, the others at #1841", "furthest behind: p1r1s0t0"),
    ),
    "What will it cost to the end?": (paying, ("when done", "at most $4.50", "of $120.00")),
    "What did P1 do in the last minute?": (lambda: Story().full(40), ("party=1", "last 1 min", "p1r0 link to P2 up")),
    "When is it done?": (lambda: Story().full(40), ("eta 19 s",)),
    "Who is not alive?": (one_killed, ("23/24 live", "1 killed", "p1r2 ", "SIGKILL")),
    "What failed, and what can I do?": (lambda: Story().failed(), ("FAILED", "r resumes", "t tears down")),
    "Would F9 reach every pod now?": (
        lambda: Story().full(40),
        ("conductor ●", "sidecar ●", "ssh ● 3/3", "relay ● 3/3", "lease ● 3/3"),
    ),
    "Do the parties agree, and up to which step?": (lambda: Story().full(40), ("agree @ step 40",)),
    "By how much did the smoke pass its gates?": (lambda: Story().full(40), ("loss_falls", "2.21", "want < 2.30")),
    "How much is lost if it stops now?": (checkpointed, ("every pod has one of step 20", "17 steps since then")),
    "What was the last error?": (a_loud_end, ("p2r0 has 12 MiB left",)),
    "Is this run better than the one before?": (beaten, ("with another-run", "another-run 1.8")),
}


def test_the_manual_names_twelve_and_three_keys_at_most() -> None:
    asked = keys_of_the_manual()
    assert list(asked) == list(ANSWERS)
    assert len(asked) == 12
    assert max(map(len, asked.values())) <= MOST_KEYS


async def pressed(d: OrderingApp, question: str) -> str:
    """What is on the screen once the manual's keys were pressed."""
    for key in keys_of_the_manual()[question]:
        await d.press(key)
    return " ".join(d.text.split())


@pytest.mark.parametrize("question", ANSWERS)
async def test_the_answer_stands_on_the_screen(tmp_path: Path, question: str) -> None:
    story, wanted = ANSWERS[question]
    other = Story(steps=60, seed=3).full(10)
    other.write(tmp_path / "runs" / "another-run")
    async with desk(story(), tmp_path / "runs" / RUN, SIZE) as d:
        text = await pressed(d, question)
        for words in wanted:
            assert words in text, f"{words!r} is not on the screen:\n{d.text}"


REAL: dict[str, dict[str, tuple[str, ...]]] = {
    "full": {
        "When is it done?": ("eta 1 m 19 s",),
        "Would F9 reach every pod now?": ("conductor ●", "sidecar ●", "ssh ● 3/3", "relay ● 3/3"),
        "Do the parties agree, and up to which step?": ("agree @ step 8",),
        "By how much did the smoke pass its gates?": ("halt_drill_s 2.4 s want <= 20 s",),
        "What will it cost to the end?": ("$0.00 spent", "local pods cost nothing"),
        "What did P1 do in the last minute?": ("party=1", "last 1 min", "p1r0", "link to P2 up (relay)"),
    },
    "failed": {
        "Who is not alive?": ("0/3 live", "3 killed", "SIGKILL"),
        "What failed, and what can I do?": ("worker p0r0s0t0 of P0 was killed by SIGKILL", "r resumes, t tears down"),
        "What was the last error?": ("ERROR rollout stage full failed: worker p0r0s0t0 of P0 was killed",),
    },
    "resumed": {
        "Which pod is slowest, and why?": ("whom is waited for most first", "P1 to P0", "waits"),
        "How much is lost if it stops now?": ("every pod has one of step 20; 7 steps since then",),
        "Is this run better than the one before?": ("with another-run", "another-run "),
    },
}
"""What the same keys show of a real run, at moments of it, the questions that narrow the view last."""


@pytest.mark.parametrize(
    "moment",
    [pytest.param(value, marks=pytest.mark.ci(__file__) if n % 3 != 1 else ()) for n, value in enumerate(REAL)],
)
async def test_the_answers_stand_on_the_screen_of_a_real_run(tmp_path: Path, moment: str) -> None:
    CutOff(recorded("private"), "result").write(tmp_path / "runs" / "another-run")
    async with seen("private", moment, tmp_path, SIZE) as d:
        for question, wanted in REAL[moment].items():
            text = await pressed(d, question)
            for words in wanted:
                assert words in text, f"{question} {words!r} is not on the screen:\n{d.text}"
            await d.press("0")


def test_every_question_is_asked_of_a_real_run() -> None:
    assert sorted(q for asked in REAL.values() for q in asked) == sorted(ANSWERS)
