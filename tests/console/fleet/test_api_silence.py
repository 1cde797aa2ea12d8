"""A provider's API that is silent: told within seconds, with its address and what to try, while it is asked again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from virtualtime import VirtualClock

from uvcc_console.core import events as ev
from uvcc_console.fleet.cloud.calls import Call, Calls
from uvcc_console.fleet.vendors.kubeconfig import Cluster, Who
from uvcc_console.fleet.vendors.kubernetes import KubernetesClient, KubernetesFleet
from uvcc_console.rollout import side_tasks
from uvcc_engine.contract.errors import UnreachableError

READ_S = 30.0
BEGUN = VirtualClock().now()


class Api:
    """Up or down; one that is down takes as long as a read may before it is given up."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock, self.up = clock, False

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.up:
            return httpx.Response(200, json={"items": []})
        await self.clock.sleep(READ_S)
        raise httpx.ReadTimeout("no answer", request=request)


class Asking(Calls):
    """As far as a vendor's client asks."""

    async def look(self) -> Any:
        return await self._send(Call("GET", "/pods", []))

    async def make(self) -> Any:
        return await self._send(Call("POST", "/pods", [], {}, repeat=False))


async def _silent_at(calls: Calls, clock: VirtualClock) -> float:
    """Seconds until it is told."""
    while not calls.silence()[0]:
        await clock.sleep(1.0)
    return clock.now() - BEGUN


async def test_it_is_told_while_the_first_try_still_waits() -> None:
    async with VirtualClock() as clock:
        api = Api(clock)
        calls = Asking("http://api.test:6443/v1", "key", transport=httpx.MockTransport(api), clock=clock)
        asking = asyncio.create_task(calls.look())
        assert await _silent_at(calls, clock) <= 15.0
        assert calls.silence()[0].startswith("http://api.test:6443 has given no usable answer for 1")
        await clock.sleep(READ_S)
        assert "ReadTimeout" in calls.silence()[0]
        with pytest.raises(UnreachableError, match=r"GET http://api\.test:6443/pods got no usable answer"):
            await asking
        assert calls.silence()[0]  # it has not come back
        api.up = True
        await calls.look()
        assert calls.silence() == ("", "")
        await calls.close()


async def test_a_create_may_take_its_time_and_who_gives_up_waiting_leaves_no_silence() -> None:
    async with VirtualClock() as clock:
        api = Api(clock)
        calls = Asking("http://api.test", "key", transport=httpx.MockTransport(api), clock=clock)
        making = asyncio.create_task(calls.make())
        await clock.sleep(20.0)
        assert calls.silence() == ("", "")
        asking = asyncio.create_task(calls.look())
        await clock.sleep(1.0)
        asking.cancel()
        await asyncio.wait({asking})
        await clock.sleep(8.0)
        assert calls.silence() == ("", "")
        with pytest.raises(UnreachableError):
            await making
        await calls.close()


async def test_one_that_asks_to_wait_is_told_with_its_own_words() -> None:
    async with VirtualClock() as clock:
        busy = httpx.Response(429, json={"error": "slow down"}, headers={"Retry-After": "60"})
        calls = Asking("http://api.test", "key", transport=httpx.MockTransport(lambda _: busy), clock=clock)
        asking = asyncio.create_task(calls.look())
        await clock.sleep(20.0)
        assert "(429 slow down); it is asked again" in calls.silence()[0]
        asking.cancel()
        await asyncio.wait({asking})
        await calls.close()


async def test_of_a_cluster_it_is_said_how_to_ask_it_by_hand() -> None:
    async with VirtualClock() as clock:
        fleet = KubernetesFleet(provider="kubernetes", kubeconfig="/home/me/kube conf", context="lab")
        cluster = Cluster("http://10.0.0.1:6443", "team", Who("k"), None, "lab")
        client = KubernetesClient(cluster, fleet, transport=httpx.MockTransport(Api(clock)), clock=clock)
        asking = asyncio.create_task(client.pods())
        await _silent_at(client, clock)
        what, hint = client.silence()
        assert what.startswith("lab http://10.0.0.1:6443 namespace team has given no usable answer")
        assert hint.startswith("kubectl --kubeconfig '/home/me/kube conf' --context lab -n team get pods asks the same")
        asking.cancel()
        await asyncio.wait({asking})
        await client.close()


async def test_the_operator_hears_of_it_once_and_when_it_is_over() -> None:
    told: list[ev.Alert] = []
    said = iter([("", ""), ("it is silent for 11 s", "try"), ("it is silent for 13 s", "try"), ("", ""), ("", "")])
    provider: Any = SimpleNamespace(silence=lambda: next(said))
    ctx: Any = SimpleNamespace(provider=provider, bus=SimpleNamespace(record=told.extend))

    async def sleep(seconds: float) -> None:
        return None

    with pytest.raises(RuntimeError):  # the story is over
        await side_tasks.tell_silence(ctx, sleep)
    assert [(a.level, a.name, a.text) for a in told] == [
        ("warn", "api", "it is silent for 11 s"),
        ("info", "api", "the provider's API answers again"),
    ]
    assert told[0].hint == "try"
