"""A run's whole life on either fake market, in virtual time: rented, swept every minute, torn down, watched on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import othermarket
import primefake
from othermarket import ME, OtherMarket, Quirks
from primefake import PrimeFake
from virtualtime import VirtualClock

from uvcc_console.fleet.cloud.ready import Readiness
from uvcc_console.fleet.cloud.saga import CloudProvider
from uvcc_console.fleet.prime.access import SshTarget
from uvcc_console.fleet.prime.client import PrimeClient
from uvcc_console.fleet.prime.key import Account
from uvcc_console.fleet.provider import Caps, Pod, PodRequest
from uvcc_console.runs.sweep import sweep

RUN = "uvcc-sim-20261121-0115-ab12"
LATE_S = 60.0  # a pod may cost so long after its run's time to live


@dataclass
class Site:
    """A run's folder and the market that it rents from."""

    clock: VirtualClock
    run_dir: Path
    transport: httpx.AsyncBaseTransport
    key: str
    alive: Callable[[], set[str]]  # ids of our pods that cost money now
    fleet: dict[str, Any] = field(default_factory=lambda: {"provider": "prime", "gpu": "H100_80GB", "gpus": 1})
    caps: Caps | None = None
    login_s: float = 0.0
    consoles: list[CloudProvider] = field(default_factory=list)

    async def _login(self, at: SshTarget, gpu: bool) -> str:
        await self.clock.sleep(self.login_s)
        return "" if at.user == "ubuntu" else "permission denied"

    def console(self) -> CloudProvider:
        """A process of the console: all it knows beyond the market is in the run's folder."""
        client = PrimeClient(Account(self.key, "https://market.test"), transport=self.transport, clock=self.clock)
        made = CloudProvider(
            client, self.fleet, self.run_dir, readiness=Readiness(client, self.run_dir, "", self._login)
        )
        made.caps = self.caps
        self.consoles.append(made)
        return made

    def requests(self, replicas: int = 1) -> list[PodRequest]:
        return [PodRequest(f"{RUN}-p{p}r{r}", p, r, max_price_hr=3.0) for r in range(replicas) for p in range(3)]

    async def up(self, provider: CloudProvider, replicas: int = 1) -> list[Pod]:
        """Quote, create, wait until each can be logged in to."""
        requests = self.requests(replicas)
        await provider.quote(requests)

        async def one(request: PodRequest) -> Pod:
            return await provider.wait_ready(await provider.create(request))

        return list(await asyncio.gather(*(one(r) for r in requests)))

    async def watch(self, provider: CloudProvider) -> None:
        """What the conductor does beside the stages."""
        while True:
            await sweep(provider, f"{RUN}-", now=self.clock.now())
            await self.clock.sleep(60.0)

    async def down(self, provider: CloudProvider) -> list[str]:
        """What the last stage does; returns the tries that are still to be watched."""
        found = await provider.list(f"{RUN}-")
        await asyncio.gather(*(provider.delete(p) for p in found))
        return await provider.prove(ended=True)

    async def after(self) -> None:
        """What the keeper does: a process of its own, until everything is proven."""
        provider = self.console()
        while await provider.prove(ended=True):
            await self.clock.sleep(20.0)


@dataclass(frozen=True)
class Told:
    """How a life went."""

    deleted_in_use: set[str]
    billing_late: set[str]
    creates_open: int


async def life(site: Site, ttl_s: float) -> Told:
    """Live for ``ttl_s``, then end; what was deleted although it was in use, what still cost after the end."""
    born = site.clock.now()
    provider = site.console()
    watching = asyncio.create_task(site.watch(provider))
    pods = await site.up(provider)
    held = {p.provider_id for p in pods}
    lost: set[str] = set()
    while site.clock.now() < born + ttl_s:
        lost |= held - site.alive()
        await site.clock.sleep(min(30.0, max(0.1, born + ttl_s - site.clock.now())))
    watching.cancel()
    late: set[str] = set()

    async def clerk() -> None:
        await site.clock.sleep(max(0.0, born + ttl_s + LATE_S - site.clock.now()))
        late.update(site.alive())

    counting = asyncio.create_task(clerk())
    await site.down(provider)
    await site.after()
    await counting
    open_tries = [t for t in provider.ends.tries().values() if t.open]
    return Told(lost, late | site.alive(), len(open_tries))


@asynccontextmanager
async def other_site(run_dir: Path, quirks: Quirks) -> AsyncIterator[tuple[Site, OtherMarket]]:
    run_dir.mkdir(parents=True, exist_ok=True)
    async with VirtualClock() as clock:
        market = OtherMarket(clock.now, clock.sleep, quirks)
        site = Site(clock, run_dir, market, othermarket.KEY, lambda: {p.id for p in market.ours})
        yield site, market
        for console in site.consoles:
            await console.close()
        assert market.touched == []
        assert all(p.owner == ME for p in market.pods.values() if p.id in market.deleted)


@asynccontextmanager
async def first_site(run_dir: Path) -> AsyncIterator[tuple[Site, PrimeFake]]:
    run_dir.mkdir(parents=True, exist_ok=True)
    async with VirtualClock() as clock:
        fake = PrimeFake(clock.now)

        def alive() -> set[str]:
            fake.records_told()
            return {str(p.record["id"]) for p in fake.living if not p.foreign}

        site = Site(clock, run_dir, httpx.ASGITransport(fake.app), primefake.KEY, alive)
        yield site, fake
        for console in site.consoles:
            await console.close()
