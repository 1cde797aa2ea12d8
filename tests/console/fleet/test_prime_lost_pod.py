"""A provider takes a pod away in mid-run: the console rents another, and the run goes on to a verified end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from crashlife import Life
from primehost import PrimeHost

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import iter_events
from uvcc_engine.contract.errors import UnreadableError
from uvcc_engine.transcript.terms.policy import Policy

PATIENCE_S = 400.0
STEPS = 60


def _named(life: Life, event: str) -> list[ev.EngineEvent]:
    try:
        told = [e for _, e in iter_events(life.home / "runs" / life.run / "journal.sqlite")]
    except UnreadableError:
        return []  # its tables are being made
    return [e for e in told if isinstance(e, ev.EngineEvent) and e.event == event]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "lost",
    [
        pytest.param("p1r0", marks=pytest.mark.ci("tests/console/rollout/test_private_migration.py")),
        pytest.param("p0r0", marks=pytest.mark.slow),
    ],
)
async def test_a_run_goes_on_with_another_pod(short: Path, lost: str) -> None:
    (short / "market").mkdir()
    (short / "home").mkdir()
    async with PrimeHost(short / "market") as host:
        life = Life(short / "home", host, (), "")
        more = {"job.steps": STEPS, "job.checkpoint_every": 5, "limits.wait": "60s", "gates.halt_drill_s": 60}
        console = await life.begin(more)
        async with asyncio.timeout(PATIENCE_S):
            while not [e for e in _named(life, "checkpoint_committed") if int(e.fields["step"]) >= 5]:
                assert console.returncode is None, life.log
                await asyncio.sleep(0.05)
        (victim,) = [p for p in host.fake.living if p.record["name"].startswith(f"{life.prefix}{lost}x")]
        host.fake.kill(victim)
        async with asyncio.timeout(PATIENCE_S):
            assert await console.wait() == 0, life.log
        assert host.fake.billing == []
    artifacts = life.home / "runs" / life.run / "artifacts"
    before, after = (Policy.load(artifacts / name / "policy.json") for name in ("full-1", "full"))
    assert after.migration is not None
    assert (after.migration.of, after.migration.restored) == (before.hash.hex(), (int(lost[1]),))
    assert [e.fields["lost"] for e in _named(life, "succession")] == [[lost]]
    steps = {int(e.fields["step"]) for e in _named(life, "taken_over")}
    assert steps == {after.migration.step}
    snapshot = life.snapshot
    assert (snapshot.status, snapshot.verdicts["full"].ok) == ("ok", True)
    assert json.loads((artifacts / "full" / "proof_bundle.json").read_text())
