"""A resume of a run that nobody conducted for longer than the lease of its pods: they have halted meanwhile."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import pytest

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal
from uvcc_console.fleet.provider import Provider
from uvcc_console.plan.plan import make_plan
from uvcc_console.plan.profile import parse
from uvcc_console.rollout.bus import Bus
from uvcc_console.rollout.context import Member, Rollout
from uvcc_console.rollout.stages.training import phases
from uvcc_console.rollout.stages.training.silence import Trouble, before
from uvcc_engine.contract.errors import UvccError

COORD = "p0r0s0t0"
LEASE = Trouble("stopped", early=(COORD,))


def ended(at: float) -> ev.WorkerProcess:
    return ev.WorkerProcess(ts=at, pod="p0r0", coord=COORD, state="exited", pid=7, rc=0, engine_run="r.full")


@pytest.mark.parametrize(
    ("after", "running", "launches"),
    [(1.0, True, 2), (100.0, True, 1), (1.0, False, 1)],
    ids=["their lease had run out", "they stopped much later", "they were started just now"],
)
async def test_one_resume_goes_on_from_where_the_lease_halted_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: float, running: bool, launches: int
) -> None:
    """The journal had them running, so they were taken over, and the resume ended in "nobody here asked for it"."""
    raw = {"job": {"kind": "lm", "steps": 50}}
    plan = make_plan("r", "t", parse(raw))
    journal = Journal(tmp_path / "journal.sqlite", source="test")
    bus = Bus(journal, poll_s=0.001)
    members = {name: Member(name, request) for name, request in plan.requests.items()}
    ctx = Rollout(plan, tmp_path, bus, cast(Provider, None), cast(Any, None), members)
    created = ev.RunCreated(
        run="r",
        profile_name="t",
        job_kind="lm",
        replicas=1,
        pipeline_stages=1,
        tensor=1,
        stages=list(plan.stages),
        profile=raw,
    )
    started = ev.WorkerProcess(pod="p0r0", coord=COORD, state="started", pid=7, engine_run="r.full")
    bus.commit(created, ev.PhaseStarted(phase="full", engine_run="r.full", steps=50, sid_job=""), started)
    launched: list[int] = []

    async def launch(ctx: Rollout, phase: object) -> dict[str, int]:
        launched.append(len(launched))
        return {} if running and len(launched) == 1 else {COORD: 7}

    async def outcome(ctx: Rollout, phase: object) -> Trouble | None:
        bus.commit(ended(time.time() + after))
        return None if len(launched) == 2 else LEASE

    async def nothing(*_: object) -> None: ...

    monkeypatch.setattr(phases, "launch", launch)
    monkeypatch.setattr(phases, "outcome", outcome)
    monkeypatch.setattr(phases, "stop_workers", nothing)
    if launches == 2:
        assert await phases.to_the_end(ctx, "full", True) == "50 steps"
    else:
        with pytest.raises(UvccError, match="stopped"):
            await phases.to_the_end(ctx, "full", True)
    assert len(launched) == launches
    assert not before(bus.snapshot, LEASE, 0.0)
    assert not before(bus.snapshot, Trouble("a worker was killed", coord=COORD), time.time())
    journal.close()
