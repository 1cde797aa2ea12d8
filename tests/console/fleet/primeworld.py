"""One account, one console, one run, on the fake market and in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from primefake import KEY, PrimeFake
from virtualtime import VirtualClock

from uvcc_console.fleet.cloud.ready import Readiness
from uvcc_console.fleet.cloud.saga import CloudProvider
from uvcc_console.fleet.prime.access import SshTarget
from uvcc_console.fleet.prime.client import PrimeClient
from uvcc_console.fleet.prime.key import Account
from uvcc_console.fleet.provider import Pod, PodRequest

RUN = "uvcc-demo-20261121-0115-ab12"
FLEET = {"provider": "prime", "gpu": "H100_80GB", "gpus": 1, "image": "cuda_12_6_pytorch_2_7"}


@dataclass
class World:
    """One account, one console, one run."""

    clock: VirtualClock
    fake: PrimeFake
    run_dir: Path
    fleet: dict[str, Any]
    logins: dict[str, str]
    provider: CloudProvider
    faltering: dict[str, list[str]] = field(default_factory=dict)

    def requests(self, replicas: int = 1) -> list[PodRequest]:
        return [PodRequest(f"{RUN}-p{p}r{r}", p, r, max_price_hr=3.0) for r in range(replicas) for p in range(3)]

    async def login(self, at: SshTarget, gpu: bool) -> str:
        """What is wrong with this login; ``logins`` maps hosts to a complaint, the pods let ubuntu in.

        A host of ``faltering`` complains in this order before it behaves.
        """
        if self.faltering.get(at.host):
            return self.faltering[at.host].pop(0)
        if at.host in self.logins:
            return self.logins[at.host]
        return "" if at.user == "ubuntu" and at.port == 22 else "permission denied"

    def console(self) -> CloudProvider:
        """A console process: all it knows beyond the account is in the run's folder."""
        transport = httpx.ASGITransport(self.fake.app)
        client = PrimeClient(Account(KEY, "http://prime.test"), transport=transport, clock=self.clock)
        return CloudProvider(
            client, self.fleet, self.run_dir, readiness=Readiness(client, self.run_dir, "", self.login)
        )

    async def up(self, replicas: int = 1) -> list[Pod]:
        requests = self.requests(replicas)
        await self.provider.quote(requests)
        pods = await asyncio.gather(*(self.provider.create(r) for r in requests))
        return list(await asyncio.gather(*(self.provider.wait_ready(p) for p in pods)))

    async def down(self) -> None:
        for pod in await self.provider.list(f"{RUN}-"):
            await self.provider.delete(pod)

    def of(self, provider: str) -> list[dict[str, Any]]:
        return [o for o in self.fake.offers if o["provider"] == provider]

    def sim(self, provider: str, **how: Any) -> None:
        for row in self.of(provider):
            row["sim"] = how

    @property
    def ours(self) -> list[str]:
        """Names of our pods that still cost something."""
        return [p.record["name"] for p in self.fake.living if not p.foreign]


@asynccontextmanager
async def new_world(run_dir: Path) -> AsyncIterator[World]:
    async with VirtualClock() as clock:
        fake = PrimeFake(clock.now)
        made = World(clock, fake, run_dir, dict(FLEET), {}, None)  # type: ignore[arg-type]
        made.provider = made.console()
        yield made
        await made.provider.close()
