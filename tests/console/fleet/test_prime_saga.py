"""Every failure of the market's life: what the console did, pods left billing (none), money over the cap (none)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from primefake import KEY, FakePod, PrimeFake, offer
from virtualtime import VirtualClock

from uvcc_console.fleet.prime.access import Target
from uvcc_console.fleet.prime.client import PrimeClient, PrimeRefused
from uvcc_console.fleet.prime.key import Account
from uvcc_console.fleet.prime.provider import PrimeProvider
from uvcc_console.fleet.prime.ready import Readiness
from uvcc_console.fleet.provider import Pod, PodRequest
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UvccError

RUN = "uvcc-demo-20261121-0115-ab12"
FLEET = {"provider": "prime", "gpu": "H100_80GB", "gpus": 1, "image": "cuda_12_4_pytorch_2_4"}


@dataclass
class World:
    """One account, one console, one run."""

    clock: VirtualClock
    fake: PrimeFake
    run_dir: Path
    fleet: dict[str, Any]
    logins: dict[str, str]
    provider: PrimeProvider

    def requests(self, replicas: int = 1) -> list[PodRequest]:
        return [PodRequest(f"{RUN}-p{p}r{r}", p, r, max_price_hr=3.0) for r in range(replicas) for p in range(3)]

    async def login(self, at: Target, gpu: bool) -> str:
        """What is wrong with this login; ``logins`` maps hosts to a complaint, the pods let ubuntu in."""
        if at.host in self.logins:
            return self.logins[at.host]
        return "" if at.user == "ubuntu" and at.port == 22 else "permission denied"

    def console(self) -> PrimeProvider:
        """A console process: all it knows beyond the account is in the run's folder."""
        transport = httpx.ASGITransport(self.fake.app)
        client = PrimeClient(Account(KEY, "http://prime.test"), transport=transport, clock=self.clock)
        return PrimeProvider(
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


@pytest.fixture
async def world(run_dir: Path) -> AsyncIterator[World]:
    async with VirtualClock() as clock:
        fake = PrimeFake(clock.now)
        made = World(clock, fake, run_dir, dict(FLEET), {}, None)  # type: ignore[arg-type]
        made.provider = made.console()
        yield made
        await made.provider.close()


async def test_three_parties_get_three_providers_and_nothing_is_left_behind(world: World) -> None:
    foreign = world.fake.foreign("somebody-elses")
    quote = await world.provider.quote(world.requests())
    assert [line.provider for line in quote.lines] == ["hyperstack", "crusoecloud", "lambdalabs"]
    assert quote.hourly == pytest.approx(1.90 + 2.10 + 2.49)
    assert quote.wallet == 100.0
    assert quote.runway_h == pytest.approx(100.0 / 6.49)
    pods = await world.up()
    assert {p.provider for p in pods} == {"hyperstack", "crusoecloud", "lambdalabs"}
    assert all((p.user, p.host, p.port) == ("ubuntu", "10.0.0.1", 22) for p in pods)
    assert [p.name for p in pods] == [r.name for r in world.requests()]
    body = world.fake.asked("POST", "/pods/")[0]
    assert body["pod"]["dataCenterId"]
    assert body["pod"]["autoRestart"] is False
    assert body["pod"]["maxPrice"] >= 1.9
    assert set(body["pod"]["sshKeyId"]) <= set("0123456789abcdef")
    await world.down()
    assert world.fake.billing == ["somebody-elses"]
    assert world.fake.keys == {}  # the run's key went with its last pod
    assert not [p for m, p, _ in world.fake.requests if m == "DELETE" and foreign in p]


async def test_replicas_follow_their_party_to_one_provider(world: World) -> None:
    pods = await world.up(replicas=4)
    by_party = {party: {p.provider for p in pods if p.party == party} for party in range(3)}
    assert [len(v) for v in by_party.values()] == [1, 1, 1]
    assert len(set.union(*by_party.values())) == 3
    await world.down()
    assert world.fake.billing == []


async def test_the_funnel_names_what_leaves_nothing(world: World) -> None:
    quote = await world.provider.quote(world.requests())
    steps = {s.constraint: s.removed for s in quote.funnel}
    assert steps["no prepayment"] == 1
    assert steps["on demand"] == 1
    assert steps["in stock"] == 1
    assert steps["priced in USD"] == 1
    assert steps["image cuda_12_4_pytorch_2_4"] == 1
    world.fleet["socket"] = "SXM5"
    with pytest.raises(ConfigError, match=r"socket SXM5 removed the last \d+ offers"):
        await world.console().quote(world.requests())
    world.fleet.pop("socket")
    world.fleet["per_party"] = ["hyperstack", "hyperstack", "lambdalabs"]
    with pytest.raises(ConfigError, match="names a provider twice"):
        await world.console().quote(world.requests())


def stock_gone(w: World) -> None:
    w.of("hyperstack")[0]["sim"] = {"capacity": 0}


def all_stock_gone(w: World) -> None:
    w.sim("hyperstack", capacity=0)


def price_up(w: World) -> None:
    w.of("crusoecloud")[0]["sim"] = {"price_factor": 1.5}


def wrong_provider(w: World) -> None:
    w.of("lambdalabs")[0]["sim"] = {"provider": "hyperstack"}


def create_500_committed(w: World) -> None:
    w.fake.fail("POST", "/pods", "commit_then_500", 1)


def create_500(w: World) -> None:
    w.fake.fail("POST", "/pods", "answer", 1, 2, status=500)


def create_timeout_committed(w: World) -> None:
    w.fake.fail("POST", "/pods", "commit_then_timeout", 2)


def create_timeout_committed_and_invisible(w: World) -> None:
    w.fake.visible_after = 25.0
    w.fake.fail("POST", "/pods", "commit_then_timeout", 2)


def create_html(w: World) -> None:
    w.fake.fail("POST", "/pods", "html", 1)


def busy(w: World) -> None:
    w.fake.fail("POST", "/pods", "answer", 1, status=429, body={"detail": "slow down"}, headers={"Retry-After": "7"})
    w.fake.fail("GET", "/pods", "answer", 2, 3, status=429, body={"detail": "slow down"})


def flaky_reads(w: World) -> None:
    w.fake.fail("GET", "/", "answer", *range(2, 200, 5), status=503)
    w.fake.fail("GET", "/", "timeout", *range(3, 200, 7))


def market_blinks(w: World) -> None:
    w.fake.fail("GET", "/availability/gpus", "answer", 1, 2, status=200, body={"items": [], "totalCount": 0})


def invisible_at_first(w: World) -> None:
    w.fake.visible_after = 25.0


def stuck(w: World) -> None:
    w.of("hyperstack")[0]["sim"] = {"boot_s": 1e9}


def errs(w: World) -> None:
    w.of("hyperstack")[0]["sim"] = {"timeline": [(30.0, {"status": "ERROR", "installationFailure": "no driver"})]}


def install_fails(w: World) -> None:
    w.of("hyperstack")[0]["sim"] = {"timeline": [(100.0, {"installationStatus": "ERROR"})]}


def install_hangs(w: World) -> None:
    hang = {"installationStatus": "ACTIVE", "installationProgress": 99}
    w.of("hyperstack")[0]["sim"] = {"timeline": [(100.0, hang)]}


def vanishes(w: World) -> None:
    w.of("hyperstack")[0]["sim"] = {"vanish_s": 70.0}


def no_address(w: World) -> None:
    w.of("hyperstack")[0]["sim"] = {"ssh": [None], "ip": None}


def placeholder_address(w: World) -> None:
    w.of("hyperstack")[0]["sim"] = {"ssh": "ubuntu@ -p 22", "ip": None}


def only_an_ip(w: World) -> None:
    w.sim("crusoecloud", ssh=None, ip=["10.0.0.7", None])


def wrong_user(w: World) -> None:
    w.sim("crusoecloud", ssh="root@{host} -p 22")


def login_fails(w: World) -> None:
    w.of("hyperstack")[0]["sim"] = {"at": ("ubuntu", "10.6.6.6", 22)}
    w.logins["10.6.6.6"] = "nvidia-smi failed: no devices were found"


def unknown_for_a_while(w: World) -> None:
    flap = [(40.0, {"status": "UNKNOWN"}), (100.0, {"status": "PENDING"}), (200.0, {"status": "ACTIVE"})]
    w.sim("hyperstack", timeline=flap)


def unknown_for_ever(w: World) -> None:
    w.of("hyperstack")[0]["sim"] = {"timeline": [(40.0, {"status": "UNKNOWN"})]}


def strange_values(w: World) -> None:
    w.sim("hyperstack", timeline=[(10.0, {"status": "WARMING_UP", "brandNew": {"x": 1}, "gpuCount": "1"})], boot_s=20.0)
    for row in w.of("hyperstack"):
        row["sim"]["timeline"].append((40.0, {"status": "ACTIVE"}))
    w.fake.offers.append({"provider": None, "prices": None, "images": "none"})


def delete_500(w: World) -> None:
    w.sim("crusoecloud", refuse_deletes=3)


def delete_ignored(w: World) -> None:
    w.fake.fail("DELETE", "/pods", "ignore", 1, 2)


def delete_slow(w: World) -> None:
    w.sim("lambdalabs", delete_s=100.0)


def delete_timeouts(w: World) -> None:
    w.fake.fail("DELETE", "/pods", "timeout", 1, 2, 3)


def many_pods(w: World) -> None:
    w.fake.max_instances = 500
    for n in range(250):
        w.fake.foreign(f"other-{n}")


def scope_missing_is_unknown(w: World) -> None:
    w.fake.scope = {}


def market_has_decoys(w: World) -> None:
    w.fake.offers[:0] = [
        offer("dc_new", "trap", "X", 0.01, stockStatus="Unavailable"),
        offer("dc_new", "trap", "Y", 0.01, prepaidTime=24),
        offer("dc_new", "trap", "Z", 0.01, isSpot=True),
    ]


SURVIVED = [
    stock_gone,
    all_stock_gone,
    price_up,
    wrong_provider,
    create_500_committed,
    create_500,
    create_timeout_committed,
    create_timeout_committed_and_invisible,
    create_html,
    busy,
    flaky_reads,
    market_blinks,
    invisible_at_first,
    stuck,
    errs,
    install_fails,
    install_hangs,
    vanishes,
    no_address,
    placeholder_address,
    only_an_ip,
    wrong_user,
    login_fails,
    unknown_for_a_while,
    unknown_for_ever,
    strange_values,
    delete_500,
    delete_ignored,
    delete_slow,
    delete_timeouts,
    many_pods,
    scope_missing_is_unknown,
    market_has_decoys,
]


@pytest.mark.parametrize("injure", SURVIVED, ids=lambda f: f.__name__)
async def test_the_fleet_comes_up_all_the_same_and_goes_without_a_trace(
    world: World, injure: Callable[[World], None]
) -> None:
    injure(world)
    pods = await world.up()
    assert len({p.provider for p in pods}) == 3
    ours = [n for n in world.fake.billing if n.startswith("uvcc-")]
    assert len(ours) == 3  # no double, no ghost
    assert (
        world.fake.dearest - _foreign_cost(world) <= 3 * 3.0 + 3.0
    )  # a doubtful one runs beside its successor at most
    await world.down()
    assert [n for n in world.fake.billing if n.startswith("uvcc-")] == []


def _foreign_cost(world: World) -> float:
    return sum(p.record["priceHr"] for p in world.fake.pods.values() if not p.record["name"].startswith("uvcc-"))


def no_money(w: World) -> None:
    w.fake.fail("POST", "/pods", "answer", 3, status=402, body={"detail": "Insufficient balance"})


def key_revoked(w: World) -> None:
    w.fake.fail("POST", "/pods", "answer", 2, status=403, body={"detail": "Permission denied"})


def too_many(w: World) -> None:
    w.fake.max_instances = 2


def nothing_in_stock(w: World) -> None:
    for row in w.fake.offers:
        row["sim"] = {"capacity": 0}


def every_pod_fails(w: World) -> None:
    for row in w.fake.offers:
        row["sim"] = {"timeline": [(30.0, {"status": "ERROR"})]}


@pytest.mark.parametrize("injure", [no_money, key_revoked, too_many, nothing_in_stock, every_pod_fails])
async def test_what_cannot_work_stops_and_leaves_nothing(world: World, injure: Callable[[World], None]) -> None:
    injure(world)
    with pytest.raises(UvccError) as caught:
        await world.up()
    assert caught.value.what
    await world.down()
    assert world.fake.billing == []


async def test_a_refusal_of_money_or_permission_stops_creating_but_not_deleting(world: World) -> None:
    pods = await world.up()
    world.fake.fail("POST", "/pods", "answer", status=402, body={"detail": "Payment required"})
    world.fake.fail("DELETE", "/pods", "answer", 1, 2, status=401, body={"detail": "Invalid token"})
    creates = len(world.fake.asked("POST", "/pods"))
    with pytest.raises(PrimeRefused) as caught:
        await world.provider.create(PodRequest(f"{RUN}-p0r9", 0, 9, max_price_hr=3.0))
    assert caught.value.kind == "payment"
    assert len(world.fake.asked("POST", "/pods")) == creates + 1
    for pod in pods:
        await world.provider.delete(pod)
    assert world.fake.billing == []


async def test_an_unproven_end_is_an_error_not_a_success(world: World) -> None:
    pods = await world.up()
    world.fake.fail("GET", "/pods/history", "answer", status=500)
    world.fake.fail("GET", f"/pods/{pods[0].provider_id}", "answer", status=500)
    with pytest.raises(UnreachableError, match="not proven gone"):
        await world.provider.delete(pods[0])


async def test_a_pod_that_is_not_ours_is_never_deleted(world: World) -> None:
    foreign = world.fake.foreign("precious")
    with pytest.raises(ConfigError, match="left alone"):
        await world.provider.delete(Pod(f"{RUN}-p0r0", 0, 0, "hyperstack", foreign))
    with pytest.raises(ConfigError, match="no pod of ours"):
        await world.provider.delete(Pod("precious", 0, 0, "hyperstack", foreign))
    assert world.fake.billing == ["precious"]
    assert world.fake.asked("DELETE", "/pods") == []


async def test_the_price_cap_holds_for_what_comes_back(world: World) -> None:
    world.sim("hyperstack", price_factor=2.0)
    world.sim("crusoecloud", price_factor=2.0)
    world.sim("lambdalabs", price_factor=2.0)
    world.sim("datacrunch", price_factor=2.0)
    with pytest.raises(UvccError, match="quoted were"):
        await world.up()
    assert world.fake.billing == []


async def test_a_price_above_the_quote_is_refused_though_the_cap_would_allow_it(world: World) -> None:
    world.of("crusoecloud")[0]["sim"] = {"price_factor": 1.2}
    pods = await world.up()
    (crusoe,) = [p for p in pods if p.provider == "crusoecloud"]
    assert crusoe.price_hr == pytest.approx(2.20)
    await world.down()


async def test_an_empty_wallet_takes_the_pods_and_the_console_sees_it(world: World) -> None:
    pods = await world.up()
    world.fake.balance = 0.001
    await world.clock.sleep(600.0)
    assert await world.provider.list(f"{RUN}-") == []
    for pod in pods:
        await world.provider.delete(pod)


async def test_another_console_adopts_what_the_first_left(world: World) -> None:
    pods = await world.up()
    successor = world.console()
    again = [await successor.create(r) for r in world.requests()]
    assert [p.provider_id for p in again] == [p.provider_id for p in pods]
    assert len(world.fake.asked("POST", "/pods")) == 3
    assert sorted(p.name for p in await successor.list(f"{RUN}-")) == sorted(p.name for p in pods)
    assert await successor.list("uvcc-other-") == []
    await world.down()


async def test_a_key_without_permissions_is_told_before_anything_is_spent(world: World) -> None:
    world.fake.scope["instances"] = {"read": True, "write": False}
    with pytest.raises(ConfigError, match="instances:write"):
        await world.provider.quote(world.requests())


async def test_twenty_four_pods(world: World) -> None:
    pods = await world.up(replicas=8)
    assert len({p.provider_id for p in pods}) == 24
    await world.down()
    assert world.fake.billing == []


def test_the_fake_knows_how_long_a_pod_lives() -> None:
    now = 0.0
    fake = PrimeFake(lambda: now)
    pod: FakePod = fake.pods[fake.foreign("x")]
    now = 3600.0
    fake.kill(pod)
    assert fake.spent == pytest.approx(1.90)
