"""Every endpoint of the API, asked through the client: the right method and path, typed answers, whole lists."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from primefake import KEY, PrimeFake
from virtualtime import VirtualClock

from uvcc_console.fleet.prime.client import PrimeClient
from uvcc_console.fleet.prime.key import Account
from uvcc_console.fleet.prime.models import (
    ApiPod,
    Disk,
    DiskOffer,
    HistoryItem,
    KeyOwner,
    MarketOffer,
    PodStatus,
    SshKey,
    Team,
    TeamMember,
)
from uvcc_engine.contract.errors import UnreachableError

DISK = {"name": "d", "size": 50, "cloudId": "disk-CANADA-1", "dataCenterId": "CANADA-1"}


@pytest.fixture
async def market() -> AsyncIterator[tuple[PrimeFake, PrimeClient]]:
    async with VirtualClock() as clock:
        fake = PrimeFake(clock.now)
        client = PrimeClient(Account(KEY, "http://prime.test"), transport=httpx.ASGITransport(fake.app), clock=clock)
        yield fake, client
        await client.close()


BODY = {
    "pod": {
        "name": "uvcc-x",
        "cloudId": "n3-H100x1",
        "gpuType": "H100_80GB",
        "socket": "PCIe",
        "gpuCount": 1,
        "image": "ubuntu_22_cuda_12",
        "dataCenterId": "CANADA-1",
        "maxPrice": 2.0,
    },
    "provider": {"type": "hyperstack"},
}
Call = Callable[[PrimeClient, str], Awaitable[Any]]
READS: list[tuple[str, str, Call, type]] = [
    ("GET", "/availability/gpus", lambda c, i: c.offers(), MarketOffer),
    ("GET", "/availability/multi-node", lambda c, i: c.offers(multi_node=True), MarketOffer),
    ("GET", "/availability/", lambda c, i: c.legacy_offers(), MarketOffer),
    ("GET", "/availability/clusters", lambda c, i: c.legacy_offers(clusters=True), MarketOffer),
    ("GET", "/availability/disks", lambda c, i: c.disk_offers(), DiskOffer),
    ("GET", "/pods/", lambda c, i: c.pods(), ApiPod),
    ("GET", "/pods/status", lambda c, i: c.statuses([i, i]), PodStatus),
    ("GET", "/ssh_keys/", lambda c, i: c.ssh_keys(), SshKey),
    ("GET", "/user/teams", lambda c, i: c.teams(), Team),
    ("GET", "/teams/t1/members", lambda c, i: c.team_members("t1"), TeamMember),
    ("GET", "/disks/", lambda c, i: c.disks(), Disk),
]


@pytest.mark.parametrize(("method", "path", "call", "kind"), READS, ids=[p for _, p, _, _ in READS])
async def test_lists_come_typed(
    market: tuple[PrimeFake, PrimeClient], method: str, path: str, call: Call, kind: type
) -> None:
    fake, client = market
    pod = await client.create(BODY)
    await client.add_ssh_key("k", "ssh-ed25519 AAAA me")
    await client.create_disk(DISK, "hyperstack")
    found = await call(client, pod.id)
    assert found
    assert all(isinstance(row, kind) for row in found)
    assert (method, path) in [(m, p) for m, p, _ in fake.requests]


async def test_a_pods_life_by_its_endpoints(market: tuple[PrimeFake, PrimeClient]) -> None:
    fake, client = market
    pod = await client.create(BODY)
    assert (await client.statuses([pod.id]))[0].pod_id == pod.id
    assert "ready" in await client.log(pod.id)
    await client.delete(pod.id)
    await client.clock.sleep(60.0)
    ended = await client.pod(pod.id)
    assert ended is not None
    assert ended.over
    history = await client.history()
    assert [(type(h), h.id) for h in history] == [(HistoryItem, pod.id)]
    await client.delete(pod.id)  # once more: it is not there, which is what was wanted
    asked = {(m, p) for m, p, _ in fake.requests}
    assert {("POST", "/pods/"), ("GET", f"/pods/{pod.id}/log"), ("DELETE", f"/pods/{pod.id}")} <= asked
    assert ("GET", "/pods/history") in asked


async def test_the_account_by_its_endpoints(market: tuple[PrimeFake, PrimeClient]) -> None:
    fake, client = market
    assert isinstance(await client.whoami(), KeyOwner)
    assert await client.wallet() == 100.0
    assert len(await client.teams()) == 150  # two pages
    assert set(await client.summary()) >= {"H100_80GB", "CPU_NODE"}
    assert await client.summary(multi_node=True)
    key = await client.add_ssh_key("k", "ssh-ed25519 AAAA me")
    await client.make_primary(key.id)
    await client.delete_ssh_key(key.id)
    assert await client.ssh_keys() == []
    disk = await client.create_disk(DISK, "hyperstack")
    assert (disk.size, disk.provider_type) == (50.0, "hyperstack")
    await client.rename_disk(disk.id, "e")
    there = await client.disk(disk.id)
    assert there is not None
    assert there.name == "e"
    await client.delete_disk(disk.id)
    assert await client.disk(disk.id) is None
    asked = {(m, p) for m, p, _ in fake.requests}
    assert {("PATCH", f"/ssh_keys/{key.id}"), ("PATCH", f"/disks/{disk.id}"), ("GET", "/billing/wallet")} <= asked


@pytest.mark.parametrize("call", ["teams", "ssh_keys", "disks", "history", "pods"])
async def test_no_list_goes_on_for_ever_and_none_is_half(market: tuple[PrimeFake, PrimeClient], call: str) -> None:
    fake, client = market
    fake.total_lies = 10_000
    before = len(fake.requests)
    await getattr(client, call)()
    assert len(fake.requests) - before <= 8
    fake.fail("GET", "/", "answer", status=200, body={"rows": []})
    with pytest.raises(UnreachableError, match="another form"):
        await getattr(client, call)()
