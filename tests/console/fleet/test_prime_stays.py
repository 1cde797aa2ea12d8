"""A real sidecar of a run that is over stays for a create that nobody ever answered, and ends what comes of it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
from primefake import KEY
from primehost import PrimeHost

from uvcc_console.core import events as ev
from uvcc_console.core import paths
from uvcc_console.core.journal.journal import Journal, read_all
from uvcc_console.fleet.cloud.intents import Intents, attempt_name
from uvcc_console.fleet.runclock import RunClock
from uvcc_console.haltd import leftovers
from uvcc_console.plan.profile import load
from uvcc_console.runs import processes

PROFILE = Path(__file__).parents[3] / "profiles" / "prime-smoke-r2.yaml"
# the sidecar's own program, only that it looks more often and believes sooner
SIDECAR = (
    "import sys; from uvcc_console.haltd import leftovers; leftovers.LOOK_S = 0.3\n"
    "from uvcc_console.fleet.cloud import ends; ends.UNKNOWN_S, ends.AGAIN_S = 2.0, 0.5\n"
    "from uvcc_console.haltd.__main__ import main; sys.exit(main(sys.argv[1:]))"
)


@pytest.mark.slow
async def test_a_sidecar_stays_until_a_create_without_an_answer_is_proven(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UVCC_HOME", str(short / "home"))
    (short / "market").mkdir()
    async with PrimeHost(short / "market") as host:
        name, profile = load(str(PROFILE), [f"fleet.base_url={host.url}", "fleet.gpu=CPU_NODE"])
        run_dir = paths.run_dir("late")
        run_dir.mkdir(parents=True)
        made = ev.RunCreated(
            run="late",
            profile_name=name,
            job_kind="private",
            replicas=1,
            pipeline_stages=1,
            tensor=1,
            stages=["provision", "teardown"],
            profile=profile.model_dump(mode="json"),
        )
        journal = Journal(run_dir / processes.JOURNAL, source="test")
        journal.append(made)
        asked = attempt_name("uvcc-late-p1r0")
        Intents.of(run_dir).note(RunClock(run_dir).now(), name=asked, price_hr=0.1)  # sent; the answer was lost
        journal.append(ev.RunEnded(status="failed", detail="no answer"))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            SIDECAR,
            "late",
            env={**os.environ, "UVCC_PRIME_API_KEY": KEY},
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(150):
                while sum(method == "GET" for method, _, _ in host.fake.requests) < 6:  # it has looked, and again
                    assert process.returncode is None, "it went although nothing is proven"
                    await asyncio.sleep(0.05)
                assert processes.recorded(run_dir, leftovers.KEEPER) is not None
                assert not processes.running(run_dir, processes.HALTD)  # a sidecar it is no more
                foreign = host.fake.foreign("somebody-elses")
                late = {"pod": {"name": asked, "gpuType": "CPU_NODE", "gpuCount": 1}}
                host.fake.born(late, host.fake.offers[0], True)
                assert asked in host.fake.billing
                while host.fake.billing != ["somebody-elses"]:
                    await asyncio.sleep(0.05)
                assert await process.wait() == 0  # with the proof there is nothing to stay for
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert not [p for method, p, _ in host.fake.requests if method == "DELETE" and foreign in p]
        (told,) = Intents.of(run_dir).tries().values()
        assert told.outcome == "gone"
        assert "uvcc-late-p1r0 was left when the run was over" in " ".join(a.text for a in read_all(journal).alerts)
        journal.close()
    assert json.loads((run_dir / "keeper.json").read_text())["pid"] == process.pid
