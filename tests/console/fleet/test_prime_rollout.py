"""``uvcc rollout`` with a shipped profile against the market on a real port: its address differs, and its patience."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from primefake import KEY
from primehost import PrimeHost, gpu_market

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import iter_events

PROFILE = Path(__file__).parents[3] / "profiles" / "prime-smoke-r2.yaml"
PATIENCE_S = 400.0


@pytest.mark.parametrize(
    ("changed", "replicas"),
    [
        pytest.param({}, 2, id="unchanged", marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
        pytest.param(
            {"topology.replicas": 1, "smoke.replicas": 1, "job.test_rows": 200},
            1,
            id="smaller",
            marks=pytest.mark.ci("tests/console/fleet/test_fleet_bootstrap.py"),
        ),
    ],
)
async def test_a_shipped_profile_runs_on_rented_pods_and_leaves_nothing_billing(
    tmp_path: Path, short: Path, changed: dict[str, Any], replicas: int
) -> None:
    market = tmp_path / "market"
    market.mkdir()
    async with PrimeHost(market, gpu_market()) as host:
        foreign = host.fake.foreign("somebody-elses")
        command = [sys.executable, "-m", "uvcc_console.cli.main", "rollout", str(PROFILE), "--headless", "--json"]
        patient = {"halt.patience": "60s", "gates.halt_drill_s": 90}  # its pods share one busy machine
        # the pods are told to have GPUs, and compute with the torch of this machine
        settings = {"fleet.base_url": host.url, "job.device": "cpu", **patient, **changed}
        command += ["--yes", *(word for key, value in settings.items() for word in ("--set", f"{key}={value}"))]
        env = {k: v for k, v in os.environ.items() if not k.startswith(("UVCC_", "PRIME_"))}
        env |= {"UVCC_HOME": str(tmp_path / "home"), "UVCC_PRIME_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
        process = await asyncio.create_subprocess_exec(
            *command, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(PATIENCE_S):
            out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        summary = json.loads(out)
        assert (summary["verified"], summary["leaks"]) == (True, [])
        assert host.fake.billing == ["somebody-elses"]
        assert not [path for method, path, _ in host.fake.requests if method == "DELETE" and foreign in path]
        asked = host.fake.asked("POST", "/pods/")
        domains = sorted(["crusoecloud", "hyperstack", "lambdalabs"] * replicas)
        assert sorted(body["provider"]["type"] for body in asked) == domains
        assert {(body["pod"]["gpuType"], body["pod"]["image"]) for body in asked} == {
            ("H100_80GB", "cuda_12_6_pytorch_2_7")
        }
    run_dir = tmp_path / "home" / "runs" / summary["run"]
    events = [e for _, e in iter_events(run_dir / "journal.sqlite")]
    ready = [e for e in events if isinstance(e, ev.PodChanged) and e.state == "ready"]
    assert len({e.provider for e in ready}) == 3  # one domain each
    checked = [e for e in events if isinstance(e, ev.EngineEvent) and e.event == "dp_preflight_ok"]
    assert [e.fields["gpus"] for e in checked] == [["NVIDIA H100 80GB HBM3"]] * 3 * replicas
    # told, since secret shares are computed on processors
    said = [e for e in events if isinstance(e, ev.Alert) and e.name == "gpu_idle"]
    assert [e.text.partition(":")[0] for e in said] == [
        f"{3 * replicas} GPUs stay idle"
    ]  # told, since secret shares need none
    spent = [e for e in events if isinstance(e, ev.CostTick)][-1]
    assert 0 < spent.spent < 5.0
    texts = [p.read_bytes() for p in run_dir.rglob("*") if p.is_file()]
    assert not any(KEY.encode() in text for text in texts)
