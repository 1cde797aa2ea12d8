"""What an operator does to a language model run while it trains: stacks, flight recorders, restart, triage."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any

import pytest
from test_rollout_lm import Operator, operator  # noqa: F401

from uvcc_console.core import events as ev
from uvcc_console.core import triage
from uvcc_console.core.journal import Journal
from uvcc_console.core.snapshot import Snapshot

SETTINGS = ("job.steps=100000", "job.overrides.train.eval_every=0", "smoke.steps=20")

pytestmark = pytest.mark.timeout(900)


def _trains(s: Snapshot, attempt: int, after: float = 0.0) -> bool:
    """Whether every worker has made a step since ``after``; until then the last attempt's stand there."""
    stepped = all(w.state == "started" and w.phase == "train" and w.step_ts > after for w in s.workers.values())
    return s.phase == "full" and s.attempt == attempt and s.status == "running" and s.step > 0 and stepped


def _environment(me: Operator) -> dict[str, Any]:
    """What the running attempt's lead rank says of the variables that steer it."""
    facts = [json.loads(p.read_text()) for p in me.home.glob("uvcc-*/p0r0/.uvcc/runs/*.full/run.json")]
    assert len(facts) == 1, facts
    return dict(facts[0]["environment"])


@pytest.mark.slow
def test_actions_and_triage_on_a_run_that_trains(operator: Operator) -> None:  # noqa: F811
    sets = [x for setting in SETTINGS for x in ("--set", setting)]
    operator.start("rollout", "local-lm-smoke", "--headless", "--yes", "--quiet", *sets)
    operator.wait("steps", lambda s: _trains(s, 0) and s.step >= 45)
    run = operator.run_dir.name

    operator.run("pod", run, "stackdump", "p0r0")
    operator.wait("stacks in the log", lambda s: any("stackdump_" in e.source for e in s.log))
    said = json.loads(operator.run("pod", run, "flight", "--json"))
    assert said["detail"].startswith("2 of 2 workers answered: nothing differs"), said
    s = operator.wait("a reading", lambda s: s.flight)
    assert s.flight is not None
    assert all(" #" in text for text in s.flight.newest.values()), s.flight.newest
    assert len(list((operator.run_dir / s.flight.folder).iterdir())) == 2

    operator.run("pod", run, "restart", "p0r0")
    began = time.time()
    operator.wait("steps after the restart", lambda s: _trains(s, 1, began))
    assert "NSA_DDP_COMPRESS" not in _environment(operator)

    for attempt, rung in ((2, "calm"), (3, "dynamic")):
        operator.run("pod", run, "triage")
        began = time.time()
        s = operator.wait(f"steps with {rung}", partial(_trains, attempt=attempt, after=began))
        assert [t.rung for t in s.triage][-1] == rung
        shown = _environment(operator)
        assert {k: v.split()[0] for k, v in shown.items()} | triage.BY_WORD[rung].env == {
            k: v.split()[0] for k, v in shown.items()
        }
    print("\n".join(triage.story(s)))
    assert "halted at step" in s.triage[0].outcome
    journal = Journal(operator.run_dir / "journal.sqlite", readonly=True)
    answers = [e for _, e in journal.since(0, kinds=(ev.ActionDone.kind,)) if isinstance(e, ev.ActionDone)]
    journal.close()
    assert [(a.action, a.ok) for a in answers] == [
        ("stackdump", True), ("flight", True), ("restart", True), ("triage", True), ("triage", True)
    ]  # fmt: skip
