"""What an operator does to a language model run while it trains: stacks, flight recorders, restart, triage."""

from __future__ import annotations

import json
import time
from functools import partial

import pytest
from test_rollout_lm import Operator, operator  # noqa: F401

from uvcc_console.core import events as ev
from uvcc_console.core.answers import triage
from uvcc_console.core.journal.journal import Journal
from uvcc_console.core.snapshot import Snapshot

SETTINGS = ("job.steps=100000", "job.overrides.train.eval_every=0", "smoke.steps=20")

pytestmark = pytest.mark.timeout(900)


def _trains(s: Snapshot, attempt: int, after: float = 0.0) -> bool:
    """Whether every worker has made a step since ``after``; until then the last attempt's stand there."""
    stepped = all(w.state == "started" and w.phase == "train" and w.step_ts > after for w in s.workers.values())
    return s.phase == "full" and s.attempt == attempt and s.status == "running" and s.step > 0 and stepped


WORDS = {"0": "False", "1": "True"}


def _proven(me: Operator, attempt: int) -> list[dict[str, str]]:
    """What each rank of an attempt found where the environment acts: first the value, then where that is."""
    journal = Journal(me.run_dir / "journal.sqlite", readonly=True)
    found: list[dict[str, str]] = []
    at = -1
    for _, e in journal.since(0, kinds=(ev.PhaseStarted.kind, ev.EngineEvent.kind)):
        if isinstance(e, ev.PhaseStarted) and e.phase == "full":
            at = e.attempt
        if isinstance(e, ev.EngineEvent) and e.event == "environment_proven" and at == attempt:
            found.append({k: str(v).split()[0] for k, v in e.fields["values"].items()})
    journal.close()
    return found


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
    assert not [found for found in _proven(operator, 1) if "NSA_DDP_COMPRESS" in found]

    rungs = ["calm", "dynamic", "unused", "loud"]
    for attempt, rung in enumerate(rungs, 2):
        operator.run("pod", run, "triage")
        began = time.time()
        s = operator.wait(f"steps with {rung}", partial(_trains, attempt=attempt, after=began))
        assert [t.rung for t in s.triage][-1] == rung
        ranks = operator.wait("both ranks' word", lambda s, a=attempt: len(_proven(operator, a)) == 2) and _proven(
            operator, attempt
        )
        acts = {k: WORDS.get(v, v) if k.startswith("NSA_") else v for k, v in triage.BY_WORD[rung].env.items()}
        assert [found | acts for found in ranks] == ranks, f"{rung}: what is shown is what acts, in each rank"
    operator.run("pod", run, "restart", "p0r0")  # the loud window was for one attempt
    began = time.time()
    operator.wait("steps without the window", lambda s: _trains(s, 6, began))
    assert not [found for found in _proven(operator, 6) if "NCCL_DEBUG" in found]
    print("\n".join(triage.story(s)))
    assert "halted at step" in s.triage[0].outcome
    journal = Journal(operator.run_dir / "journal.sqlite", readonly=True)
    answers = [e for _, e in journal.since(0, kinds=(ev.ActionDone.kind,)) if isinstance(e, ev.ActionDone)]
    journal.close()
    assert [(a.action, a.ok) for a in answers] == [
        *[(action, True) for action in ("stackdump", "flight", "restart")],
        *[("triage", True)] * len(rungs),
        ("restart", True),
    ]
