"""The halt drill, entered again by a conductor that follows another: there must be something left to be held."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from uvcc_console.core import events as ev
from uvcc_console.core.folding.state import fold
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.plan.plan import Phase, make_plan
from uvcc_console.plan.profile import load
from uvcc_console.rollout.context import Rollout
from uvcc_console.rollout.stages.training import phases

COORDS = ["p0r0s0t0", "p1r0s0t0", "p2r0s0t0"]
PLAN = make_plan("demo-1", "demo", load("demo")[1])


class Launched(Exception):
    """The workers would be started now."""


def smoke(*ended: str) -> Snapshot:
    """The smoke under way; the workers of ``ended`` came to its end and told their result."""
    found: list[ev.Event] = [ev.PhaseStarted(phase="smoke", engine_run="demo-1.smoke", steps=2, sid_job="ab")]
    for n, c in enumerate(COORDS):
        found.append(ev.WorkerProcess(pod=c[:4], coord=c, state="started", pid=n + 1))
    for c in ended:
        found.append(ev.ResultReported(coord=c, phase="smoke", result_hash="h", values={}))
        found.append(ev.WorkerProcess(pod=c[:4], coord=c, state="exited", rc=0))
    return fold(found)


async def start_of(
    snapshot: Snapshot,
    patch: pytest.MonkeyPatch,
    *,
    resumed: bool = True,
    chosen: int | None = None,
    alone: bool = True,
) -> tuple[int | None, list[str]]:
    """The step from which a drill that is entered starts the workers, and what it says before."""
    said: list[ev.Event] = []
    ctx: Any = SimpleNamespace(
        plan=PLAN,
        bus=SimpleNamespace(snapshot=snapshot),
        federated=None if alone else object(),
        start_from=chosen,
        say=lambda *events: said.extend(events),
    )

    async def launch(ctx: Rollout, phase: Phase) -> dict[str, int]:
        raise Launched

    patch.setattr(phases, "launch", launch)
    with pytest.raises(Launched):
        await phases.drill(cast(Rollout, ctx), resumed)
    return ctx.start_from, [e.text for e in said if isinstance(e, ev.Alert)]


async def test_a_smoke_that_ended_while_nobody_conducted_starts_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its workers would go on at the last step, and end before a hold reached them, however often one resumes."""
    start, said = await start_of(smoke(*COORDS), monkeypatch)
    assert start == 0
    assert said == ["the smoke had ended before it was held: it starts over"]


async def test_a_smoke_that_did_not_end_goes_on_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await start_of(smoke(), monkeypatch) == (None, [])
    assert await start_of(smoke(*COORDS[:2]), monkeypatch) == (None, [])


async def test_a_step_that_was_chosen_stays_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await start_of(smoke(*COORDS), monkeypatch, chosen=1) == (1, [])


async def test_one_domain_among_three_does_not_start_over_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await start_of(smoke(*COORDS), monkeypatch, alone=False) == (None, [])
