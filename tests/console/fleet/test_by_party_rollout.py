"""A rollout with three different providers, one per party: a market, a host that somebody owns, and this machine."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import asyncssh
import pytest
import yaml
from primefake import KEY
from primehost import PrimeHost

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import iter_events
from uvcc_console.fleet import podhome
from uvcc_console.fleet.local_provider import LocalProvider
from uvcc_console.fleet.provider import PodRequest

PATIENCE_S = 500.0
PROFILE: dict[str, Any] = {
    "job": {"kind": "private", "model": "mlp-digits", "steps": 4, "batch": 64, "lr": 0.5, "seed": 7, "test_rows": 200},
    "smoke": {"replicas": 1, "steps": 0},
    "gates": {"loss_falls": False, "result_hashes": 1, "verifier": "ok", "halt_drill_s": 0},
    "limits": {"hourly": 1, "total": 1, "ttl": "20m", "wait": "2m"},
}


async def _uvcc(env: dict[str, str], *args: str) -> tuple[int, Any, str]:
    command = [sys.executable, "-m", "uvcc_console.cli.main", *args, "--json"]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, env=env, stdout=pipe, stderr=pipe)
    async with asyncio.timeout(PATIENCE_S):
        out, err = await process.communicate()
    return process.returncode or 0, json.loads(out) if out else None, err.decode()


async def test_three_parties_on_three_providers_end_verified_and_leave_nothing(
    tmp_path: Path, short: Path, client_key: asyncssh.SSHKey
) -> None:
    own_key = tmp_path / "mine"
    own_key.write_bytes(client_key.export_private_key("openssh"))
    own_key.chmod(0o600)
    (tmp_path / "host").mkdir()
    (tmp_path / "market").mkdir()
    owned = LocalProvider(tmp_path / "host", ttl_s=3600.0, key_file=str(own_key))
    machine = await owned.create(PodRequest("somebody-s", 1, 7))
    machine = await owned.wait_ready(machine)
    try:
        async with PrimeHost(tmp_path / "market") as host:
            entry = {"host": machine.host, "port": machine.port, "user": podhome.USER, "key": str(own_key)}
            (tmp_path / "ours.yaml").write_text(yaml.safe_dump({"hosts": [{**entry, "domain": "owned"}]}))
            fleet = {
                "parties": {
                    "P0": {"provider": "prime", "gpu": "CPU_NODE", "base_url": host.url, "account": "lab-a"},
                    "P1": {"provider": "inventory", "hosts": "ours.yaml"},
                    "P2": {"provider": "local"},
                }
            }
            (tmp_path / "three.yaml").write_text(yaml.safe_dump({**PROFILE, "fleet": fleet}))
            env = {k: v for k, v in os.environ.items() if not k.startswith(("UVCC_", "PRIME_"))}
            env |= {"UVCC_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
            env["UVCC_PRIME_KEY_LAB_A"] = KEY  # the account's own; there is no other key
            code, summary, err = await _uvcc(env, "rollout", str(tmp_path / "three.yaml"), "--headless", "--yes")
            assert code == 0, err
            assert (summary["verified"], summary["leaks"]) == (True, [])
            assert (host.fake.billing, len(host.fake.asked("POST", "/pods/"))) == ([], 1)
            swept, rows, err = await _uvcc(env, "pods", "--sweep")
            assert (swept, rows) == (0, []), err
        home = Path(machine.provider_id)
        assert not [p for p in (home / ".uvcc", home / ".uvcc-claim") if os.path.lexists(p)]
        run_dir = tmp_path / "home" / "runs" / summary["run"]
        events = [e for _, e in iter_events(run_dir / "journal.sqlite")]
        ready = {e.pod: e.provider for e in events if isinstance(e, ev.PodChanged) and e.state == "ready"}
        assert ready == {"p0r0": "hyperstack", "p1r0": "owned", "p2r0": "local"}
        stages = [e for e in events if isinstance(e, ev.StageChanged) and e.name == "quote" and e.status == "ok"]
        assert "P0 prime/lab-a 0.10 $/h, P1 inventory 0.00 $/h, P2 local 0.00 $/h" in stages[-1].detail
        bundle = json.loads(next(run_dir.rglob("proof_bundle.json")).read_text())
        assert "owned" in json.dumps(bundle)  # the policy that all three signed names who ran each party
    finally:
        await owned.delete(machine)


# a whole rollout: CI runs it beside the default set
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
