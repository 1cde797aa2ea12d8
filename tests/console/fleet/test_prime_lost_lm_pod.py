"""A provider takes the pod of a language model away in mid-run: another is rented, what came home is put onto it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from crashlife import PROFILE, Life
from primehost import PrimeHost

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import iter_events
from uvcc_console.core.snapshot import Snapshot
from uvcc_engine.contract.checkpoints import checkpoint
from uvcc_engine.contract.errors import UnreadableError

PATIENCE_S = 400.0
STEPS, SAVE_EVERY = 400, 20


def _snapshot(life: Life) -> Snapshot:
    try:
        return life.snapshot
    except UnreadableError:
        return Snapshot()  # its tables are being made


@pytest.mark.slow
@pytest.mark.timeout(0)
async def test_a_training_goes_on_from_home_without_being_asked(short: Path) -> None:
    (short / "market").mkdir()
    (short / "home").mkdir()
    profile = short / "lm-on-prime.yaml"
    local = (PROFILE.parent / "local-lm-smoke.yaml").read_text()
    assert "{provider: local}" in local
    profile.write_text(local.replace("{provider: local}", "{provider: prime, gpu: CPU_NODE, gpus: 1}"))
    async with PrimeHost(short / "market") as host:
        life = Life(short / "home", host, (), "")
        console = await life.begin(
            {
                "job.steps": STEPS,
                "job.plan.save_every": SAVE_EVERY,
                "job.overrides.train.save_every": SAVE_EVERY,
                "job.overrides.train.eval_every": 0,
                "limits.hourly": 2,
                "limits.total": 5,
                "limits.wait": "60s",
            },
            profile,
        )
        async with asyncio.timeout(PATIENCE_S):
            while _snapshot(life).home.get("p0r0", (0, ""))[0] < SAVE_EVERY:
                assert console.returncode is None, life.log
                await asyncio.sleep(0.05)
        (victim,) = [p for p in host.fake.living if p.record["name"].startswith(life.prefix)]
        host.fake.kill(victim)
        async with asyncio.timeout(PATIENCE_S):
            assert await console.wait() == 0, life.log
        assert host.fake.billing == []
    told = [e for _, e in iter_events(life.home / "runs" / life.run / "journal.sqlite")]
    (restored,) = [e for e in told if isinstance(e, ev.EngineEvent) and e.event == "pod_restored" and not e.pod]
    step = restored.fields["steps"]["p0r0"]
    assert restored.fields["pods"] == ["p0r0"]
    assert step >= SAVE_EVERY
    assert step % SAVE_EVERY == 0
    names = [e.name for e in told if isinstance(e, ev.Alert)]
    assert names.index("pod_lost") < names.index("pod_replaced")
    snapshot = life.snapshot
    assert (snapshot.status, snapshot.step) == ("ok", STEPS)
    home = life.home / "runs" / life.run / "artifacts" / "full" / "p0r0" / "checkpoints"
    assert checkpoint.steps_present(home)[0] == STEPS
