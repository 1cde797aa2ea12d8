"""Renting as a saga: three providers, replicas that follow, refusals, proofs of the end, and a second console."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from primefake import FakePod, PrimeFake
from primeworld import RUN, World, new_world

from uvcc_console.fleet.cloud.ends import LAG_S
from uvcc_console.fleet.cloud.intents import Intents
from uvcc_console.fleet.prime.client import CloudRefused, PrimeClient
from uvcc_console.fleet.prime.models import ApiPod
from uvcc_console.fleet.provider import Pod, PodRequest
from uvcc_console.runs.sweep import sweep
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UvccError


@pytest.fixture
async def world(run_dir: Path) -> AsyncIterator[World]:
    async with new_world(run_dir) as made:
        yield made


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
    assert steps["image cuda_12_6_pytorch_2_7"] == 1
    world.fleet["socket"] = "SXM5"
    with pytest.raises(ConfigError, match=r"socket SXM5 removed the last \d+ offers"):
        await world.console().quote(world.requests())
    world.fleet.pop("socket")
    world.fleet["per_party"] = ["hyperstack", "hyperstack", "lambdalabs"]
    with pytest.raises(ConfigError, match="names a provider twice"):
        await world.console().quote(world.requests())


async def test_a_refusal_of_money_or_permission_stops_creating_but_not_deleting(world: World) -> None:
    pods = await world.up()
    world.fake.fail("POST", "/pods", "answer", status=402, body={"detail": "Payment required"})
    world.fake.fail("DELETE", "/pods", "answer", 1, 2, status=401, body={"detail": "Invalid token"})
    creates = len(world.fake.asked("POST", "/pods"))
    with pytest.raises(CloudRefused) as caught:
        await world.provider.create(PodRequest(f"{RUN}-p0r9", 0, 9, max_price_hr=3.0))
    assert caught.value.kind == "payment"
    assert len(world.fake.asked("POST", "/pods")) == creates + 1
    for pod in pods:
        await world.provider.delete(pod)
    assert world.fake.billing == []


LISTED = 2  # from then on no list answers: the first is asked before anything is rented


async def test_lists_that_do_not_answer_end_the_wait_for_unanswered_creates(world: World) -> None:
    """The market goes on answering, so that nothing else would end it; a third create could be a third bill."""
    request = world.requests()[0]
    await world.provider.quote([request])
    world.fake.fail("POST", "/pods", "commit_then_timeout", 1, 2)
    world.fake.fail("GET", "/pods", "answer", *range(LISTED, 10_000), status=500)
    began = world.clock.now()
    with pytest.raises(UnreachableError, match="may still exist"):
        await world.provider.create(request)
    assert world.clock.now() - began < 3 * LAG_S
    assert len(world.fake.asked("POST", "/pods/")) <= 2
    world.fake.faults.clear()
    await world.down()
    await world.provider.prove(ended=True)
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


async def test_a_create_that_is_answered_with_another_pod_holds_what_was_made_and_no_pod_twice(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one machine would be two pods of the run, and the one that was made would be nobody's."""
    create, first = PrimeClient.create, []

    async def answered(client: PrimeClient, body: dict[str, Any]) -> ApiPod:
        first.append(await create(client, body))
        return first[0]

    monkeypatch.setattr(PrimeClient, "create", answered)
    pods = await world.up()
    assert len({pod.provider_id for pod in pods}) == 3
    assert {pod.provider_id for pod in pods} == {made.id for made in first}
    await world.down()
    assert world.fake.billing == []


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


async def test_a_sweep_ends_a_late_second_try_and_not_the_pod_beside_it(world: World) -> None:
    await world.up()
    twin = next(n for n in world.ours if "-p1r0x" in n)[:-6] + "aaaaaa"
    Intents.of(world.run_dir).note(world.clock.now(), name=twin, price_hr=2.1)
    late = world.fake.pods[world.fake.foreign(twin)]
    late.foreign = False  # a create of ours that showed up long after it was given up
    gone = await sweep(world.provider, f"{RUN}-", now=world.clock.now())
    assert [p.name for p in gone] == [twin]
    assert late.dead is not None
    assert len(world.ours) == 3
    assert await sweep(world.provider, f"{RUN}-", now=world.clock.now()) == []
    await world.down()
    assert world.ours == []


async def test_a_sweep_meanwhile_does_not_give_up_a_create_that_is_still_asked_for(world: World) -> None:
    world.fake.visible_after = 40.0
    world.fake.fail("POST", "/pods", "commit_then_timeout", 1, 2, 3)

    async def sweeping() -> None:
        while True:
            await sweep(world.provider, f"{RUN}-", now=world.clock.now())
            await world.clock.sleep(10.0)

    beside = asyncio.create_task(sweeping())
    pods = await world.up()
    beside.cancel()
    assert len(pods) == len(world.ours) == 3
    assert len(world.fake.asked("POST", "/pods/")) == 3
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
