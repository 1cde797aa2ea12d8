"""A run without a conductor: when it is left alone, when it is ended, and that it really is."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from uvcc_console.core import events as ev
from uvcc_console.core import paths
from uvcc_console.core.folding.state import fold
from uvcc_console.core.journal.journal import Journal, read_all
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.fleet import procs
from uvcc_console.fleet.local_provider import LocalProvider
from uvcc_console.fleet.provider import PodRequest
from uvcc_console.haltd import order_socket, service
from uvcc_console.haltd.journal_view import JournalView
from uvcc_console.haltd.reaper import AGAIN_S, Reaper
from uvcc_console.plan.own_resumes import order
from uvcc_console.plan.profile import load
from uvcc_console.runs import processes

RELEASE = ev.HaltRequested(nonce="now", mode="release", by="test")
LIMITS = {"hourly": 3.0, "total": 5.0, "ttl": 7200.0, "wait": 900.0}


def story(*states: str, price: float = 1.0) -> list[ev.Event]:
    created = ev.RunCreated(
        ts=0.0,
        run="r",
        profile_name="p",
        job_kind="private",
        replicas=1,
        pipeline_stages=1,
        tensor=1,
        stages=[],
        profile={"limits": LIMITS},
    )
    pods = [
        ev.PodChanged(ts=0.0, pod=f"p{n}r0", party=n, replica=0, provider="x", state=state, price_hr=price)
        for n, state in enumerate(states)
    ]
    return [created, *pods]


def reaper(events: list[ev.Event], now: list[float]) -> Reaper:
    made = Reaper()
    made.ledger.clock = lambda: now[0]
    for event in events:
        made.see(event)
    return made


def test_a_conducted_run_is_nobody_elses_business() -> None:
    events, now = story("agent"), [1e6]
    assert reaper(events, now).due(fold(events), conducted=True, now=1e6) == ""


def test_a_conductor_may_be_away_for_a_while() -> None:
    events, now = story("agent"), [100.0]
    made, s = reaper(events, now), fold(events)
    assert made.due(s, conducted=False, now=100.0) == ""
    assert made.due(s, conducted=False, now=999.0) == ""
    assert made.due(s, conducted=True, now=1000.0) == ""  # it came back: the count starts again
    assert made.due(s, conducted=False, now=1001.0) == ""
    assert made.due(s, conducted=False, now=1900.0) == ""
    assert "no conductor for 900 s" in made.due(s, conducted=False, now=1901.0)
    assert made.due(s, conducted=False, now=1902.0) == ""  # said once
    assert made.due(s, conducted=False, now=1901.0 + AGAIN_S) != ""


@pytest.mark.parametrize(
    ("price", "at", "why"),
    [(4.0, 100.0, "limits.hourly"), (2.6, 7000.0, "limits.total"), (0.0, 7201.0, "time to live")],
)
def test_caps_and_time_to_live_hold_at_once(price: float, at: float, why: str) -> None:
    events, now = story("agent", price=price), [at]
    assert why in reaper(events, now).due(fold(events), conducted=False, now=at)


def test_nothing_left_is_nothing_to_do() -> None:
    events, now = story("gone", "planned"), [1e6]
    assert reaper(events, now).due(fold(events), conducted=False, now=1e6) == ""


def test_limits_that_cannot_be_read_are_the_strictest() -> None:
    events, now = story("agent", price=0.5), [10.0]
    created = ev.RunCreated(**{**ev.to_json(events[0]), "profile": {"limits": {"hourly": "lots"}}})
    events = [created, *events[1:]]
    assert "limits.hourly 0.00" in reaper(events, now).due(fold(events), conducted=False, now=10.0)


TEARDOWN = ev.Intent(ts=0.0, action="teardown", by="cli")


@pytest.mark.parametrize(
    ("told", "ends"),
    [
        ([TEARDOWN], True),
        ([ev.StageChanged(ts=0.0, name="teardown", status="running")], True),
        ([TEARDOWN, ev.Intent(ts=0.0, action="resume", by="cli")], False),
        ([TEARDOWN, ev.ActionDone(ts=0.0, action="teardown", pod="", ok=False, detail="P1 has not signed")], False),
        ([TEARDOWN, ev.ActionDone(ts=0.0, action="teardown", pod="", ok=True, detail="")], True),
        ([TEARDOWN, ev.ActionDone(ts=0.0, action="bundle", pod="", ok=False, detail="full")], True),
    ],
    ids=["asked for", "under way", "somebody went on", "refused", "done but for a pod", "another refused"],
)
def test_a_teardown_whose_conductor_dies_is_not_waited_with(told: list[ev.Event], ends: bool) -> None:
    """The pods stayed and cost money for ``limits.wait``, a quarter of an hour, though somebody wanted them gone."""
    events, now = [*story("agent"), *told], [100.0]
    made, s = reaper(events, now), fold(events)
    assert made.due(s, conducted=False, now=100.0) == ""
    assert made.due(s, conducted=False, now=114.0) == ""
    assert ("before the teardown was done" in made.due(s, conducted=False, now=116.0)) is ends


RUNNING = ev.StageChanged(ts=0.0, name="full", status="running")
ASKED = ev.HaltRequested(ts=0.0, nonce="n", mode="hold", by="cli")
KILLED = ev.StageChanged(ts=0.0, name="full", status="failed", until=900.0)


def may_go_on(most: int, *told: ev.Event) -> list[ev.Event]:
    created, *pods = story("agent")
    profile = {"limits": LIMITS | {"resumes": most}}
    return [ev.RunCreated(**{**ev.to_json(created), "profile": profile, "stages": ["full"]}), *pods, *told]


def succession(made: Reaper, s: Snapshot, now: float) -> str:
    assert made.due(s, conducted=False, now=now) == ""
    return made.successor(s, now=now)


def test_a_run_that_may_go_on_gets_another_conductor_so_often_after_growing_pauses() -> None:
    events, now = may_go_on(2, RUNNING), [100.0]
    made, s = reaper(events, now), fold(events)
    assert [succession(made, s, at) for at in (100.0, 109.0)] == ["", ""]
    assert succession(made, s, 110.0) == "1 of 2"
    made.see(order())
    assert [succession(made, s, at) for at in (112.0, 129.0)] == ["", ""]  # it may just be starting
    assert succession(made, s, 130.0) == "2 of 2"
    made.see(order())
    assert succession(made, s, 800.0) == ""


@pytest.mark.parametrize(
    ("most", "told", "comes"),
    [
        (1, [RUNNING], True),
        (1, [replace(KILLED, again=108.0)], True),
        (0, [RUNNING], False),
        (1, [KILLED], False),
        (1, [RUNNING, TEARDOWN], False),
        (1, [RUNNING, ASKED], False),
        (1, [RUNNING, order()], False),
        (1, [], False),
    ],
    ids=[
        "it ran",
        "it was to go on",
        "not allowed",
        "it waits",
        "its end was asked for",
        "held",
        "used up",
        "no stage",
    ],
)
def test_another_conductor_decides_nothing_that_somebody_has_to(most: int, told: list[ev.Event], comes: bool) -> None:
    events, now = may_go_on(most, *told), [100.0]
    made, s = reaper(events, now), fold(events)
    assert succession(made, s, 100.0) == ""
    assert (succession(made, s, 114.0) != "") is comes


def test_one_domains_part_of_a_run_has_no_other_conductor() -> None:
    events = may_go_on(1, RUNNING)
    made = reaper(events, [100.0])
    made.resumable = False
    s = fold(events)
    made.due(s, conducted=False, now=100.0)
    assert made.successor(s, now=200.0) == ""


def test_a_domain_s_conductor_that_is_frozen_may_still_be_let_go_on_and_a_dead_one_may_not() -> None:
    events = may_go_on(1, RUNNING)
    s = fold(events)
    for frozen, patience in ((False, 5.0), (True, 60.0)):
        made = reaper(events, [100.0])
        made.resumable = False
        assert made.due(s, conducted=False, now=100.0, frozen=frozen) == ""
        assert made.due(s, conducted=False, now=99.0 + patience, frozen=frozen) == ""
        assert "no conductor for" in made.due(s, conducted=False, now=100.0 + patience, frozen=frozen)
    made = reaper(events, [100.0])
    made.resumable = False
    assert made.due(s, conducted=False, now=100.0, frozen=True) == ""
    assert made.due(s, conducted=True, now=130.0) == ""  # it was let go on
    assert made.due(s, conducted=False, now=170.0, frozen=True) == ""


def test_a_sidecar_knows_of_the_teardown_that_was_asked_for() -> None:
    """A sidecar folds a few kinds of events only."""
    run_dir = paths.run_dir("asked")
    run_dir.mkdir(parents=True)
    journal = Journal(run_dir / processes.JOURNAL, source="test")
    journal.append(*story("agent"), TEARDOWN)
    assert [e.kind for e in JournalView(journal).poll()][-1] == TEARDOWN.kind
    journal.close()


async def test_an_abandoned_run_is_torn_down_by_its_sidecar(monkeypatch: pytest.MonkeyPatch, short: Path) -> None:
    """Real pods, a real sidecar, a real second conductor; the first one was never there."""
    monkeypatch.setattr(service, "REAP_EVERY_S", 0.1)
    name, profile = load("demo", ["limits.wait=0.2", "limits.ttl=1h"])
    run_dir: Path = paths.run_dir("reap")
    run_dir.mkdir(parents=True)
    journal = Journal(run_dir / processes.JOURNAL, source="test")
    journal.append(
        ev.RunCreated(
            run="reap",
            profile_name=name,
            job_kind="private",
            replicas=1,
            pipeline_stages=1,
            tensor=1,
            stages=[],
            profile=profile.model_dump(mode="json"),
        )
    )
    provider = LocalProvider(run_dir, ttl_s=3600.0)
    pods = [await provider.create(PodRequest(f"uvcc-reap-p{p}r0", p, 0)) for p in range(2)]
    for pod in pods:
        pod = await provider.wait_ready(pod)
        journal.append(
            ev.PodChanged(
                pod=f"p{pod.party}r0", party=pod.party, replica=0, provider="local", state="ready", address=pod.address
            )
        )
    await asyncio.wait_for(service.Service(run_dir).run(), 120)  # it ends with the run, or a moment before it
    async with asyncio.timeout(120):
        while not (s := read_all(journal)).ended:
            await asyncio.sleep(0.05)
    assert s.status in ("failed", "torn_down")
    assert any("no conductor" in a.text for a in s.alerts)
    assert {p.state for p in s.pods.values()} <= {"gone", "planned"}
    assert not any(procs.marked(pod.provider_id) for pod in pods)
    assert await provider.list("uvcc-reap-") == []
    async with asyncio.timeout(120):
        while processes.running(run_dir, processes.CONDUCTOR):
            await asyncio.sleep(0.02)
    journal.close()


async def test_no_halt_of_a_long_runs_past_is_obeyed_again() -> None:
    """A sidecar that is started in its second day: more lies in the journal than is read at once."""
    run_dir = paths.run_dir("long")
    run_dir.mkdir(parents=True)
    journal = Journal(run_dir / processes.JOURNAL, source="test")
    phase = ev.PhaseStarted(phase="full", engine_run="r.full", steps=9, sid_job="")
    journal.append(*story("agent"), phase, *(ev.CostTick(hourly=1.0, spent=0.1) for _ in range(10_000)))
    done = ev.HaltDone(nonce="old", mode="halt", verified=1, total=1, step=3, seconds=1.0)
    journal.append(ev.HaltRequested(nonce="old", mode="halt", by="yesterday"), done, phase)  # it was resumed
    serving = asyncio.create_task(service.Service(run_dir).run())
    async with asyncio.timeout(240):
        while not await asyncio.to_thread(order_socket.ask, run_dir, RELEASE):  # it listens, and has acted on it
            await asyncio.sleep(0.02)
        journal.append(ev.RunEnded(status="ok", detail=""))
        await serving
    asked = [e for _, e in journal.since(0, kinds=(ev.HaltRequested.kind,)) if isinstance(e, ev.HaltRequested)]
    journal.close()
    assert [(e.nonce, e.mode) for e in asked] == [("old", "halt"), (RELEASE.nonce, "release")]


def test_the_sidecar_of_no_run_says_so(tmp_path: Path) -> None:
    env = {**os.environ, "UVCC_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "uvcc_console.haltd", "nowhere"], env=env, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 2
    assert "nowhere" in done.stderr
