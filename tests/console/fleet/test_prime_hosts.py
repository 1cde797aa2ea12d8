"""The market on a real port with real pods behind it: rented, logged into, bootstrapped, gone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from primefake import KEY
from primehost import PrimeHost

from uvcc_console.fleet import ssh_keys
from uvcc_console.fleet.bootstrap import bootstrap_all
from uvcc_console.fleet.provider import PodRequest
from uvcc_console.fleet.provider_kinds import provider_for
from uvcc_console.fleet.runclock import RunClock
from uvcc_console.fleet.ssh import PodLink
from uvcc_console.fleet.wheel import build_wheel

RUN = "uvcc-hosts-20261121-0115-ab12"


class Hurried(RunClock):
    """Real time, but the market's own pauses are a hundredth."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 100)


@pytest.mark.ci("tests/console/fleet/test_fleet_bootstrap.py")
async def test_rented_pods_are_driven_like_any_others(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("UVCC_PRIME_API_KEY", KEY)
    monkeypatch.delenv("PRIME_API_KEY", raising=False)
    monkeypatch.setattr("uvcc_console.fleet.prime.RunClock", Hurried)
    async with PrimeHost(tmp_path) as host:
        fleet = {"provider": "prime", "gpu": "CPU_NODE", "gpus": 1, "base_url": host.url}
        provider = provider_for(fleet, run_dir)
        requests = [PodRequest(f"{RUN}-p{p}r0", p, 0, max_price_hr=1.0) for p in range(3)]
        quote = await provider.quote(requests)
        assert quote.hourly == pytest.approx(0.10 + 0.11 + 0.12)
        pods = await asyncio.gather(*(provider.create(r) for r in requests))
        pods = await asyncio.gather(*(provider.wait_ready(p) for p in pods))
        assert len({p.provider for p in pods}) == 3
        links = [PodLink(p.name, p.address, ssh_keys.operator_key(run_dir)) for p in pods]
        found = await bootstrap_all(links, build_wheel(tmp_path / "wheel"), preload="none")
        assert len({b.agent["identity"]["ed25519"] for b in found}) == 3
        for link in links:
            await link.close()
        await asyncio.gather(*(provider.delete(p) for p in pods))
        assert host.fake.billing == []
        assert await provider.list(f"{RUN}-") == []
        await provider.close()
    assert KEY not in "".join(p.read_text(errors="replace") for p in run_dir.iterdir() if p.is_file())
