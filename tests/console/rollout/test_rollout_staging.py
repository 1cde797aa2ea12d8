"""The full run's pods come after the smoke's gates, also when the conductor dies in between: real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from demorun import Event, Uvcc, user_at

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
FIRST, LATER = {"p0r0", "p1r0", "p2r0"}, {"p0r1", "p1r1", "p2r1"}


@pytest.fixture
def uvcc(tmp_path: Path) -> Iterator[Uvcc]:
    with user_at(tmp_path / "home") as user:
        yield user


def created(events: list[Event]) -> set[str]:
    return {e["pod"] for e in events if e["kind"] == "pod" and e["state"] == "creating"}


@pytest.mark.parametrize("dies_in", ["provision-full", "bootstrap-full", "preflight-full"])
def test_later_pods_are_rented_after_the_gates_and_survive_their_conductor(uvcc: Uvcc, dies_in: str) -> None:
    started = uvcc.start("rollout", "local-smoke-r2", "--headless", "--json", "--set", "job.steps=3")
    assert started.stderr is not None
    run = started.stderr.readline().split()[1]

    def entered(e: Event) -> bool:
        return bool(e["kind"] == "stage" and e["name"] == dies_in and e["status"] == "running")

    events = uvcc.events(run, entered)
    passed = next(
        n for n, e in enumerate(events) if e["kind"] == "stage" and (e["name"], e["status"]) == ("gate", "ok")
    )
    assert created(events[:passed]) == FIRST
    if dies_in != "provision-full":
        assert created(events[passed:]) == LATER
    os.kill(uvcc.json("status", run)["conductor"], signal.SIGKILL)
    started.communicate(timeout=500)
    done = uvcc.run("resume", run, "--wait", "--json")
    assert done.returncode == 0, done.stderr
    shown = uvcc.json("status", run)
    assert shown["status"] == "ok"
    assert {p["pod"] for p in shown["pods"]} == FIRST | LATER
    assert {p["state"] for p in shown["pods"]} == {"gone"}
    assert {w["coord"][:4] for w in shown["workers"]} == FIRST | LATER
    whole = uvcc.events(run, lambda e: e["kind"] == "run_ended")
    assert created(whole) == FIRST | LATER
    assert not uvcc.processes()
