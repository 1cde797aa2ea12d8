"""A provider's API that means harm: answers that drip, swell, nest or tell of another pod end nothing but the call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from virtualtime import VirtualClock

from uvcc_console.fleet.cloud import calls
from uvcc_console.fleet.cloud.calls import CloudRefused, explain, value_of
from uvcc_console.fleet.cloud.vendor import Cloud
from uvcc_console.fleet.prime.client import PrimeClient
from uvcc_console.fleet.prime.key import Account
from uvcc_console.fleet.vendors.lambda_cloud import LambdaClient
from uvcc_console.fleet.vendors.runpod import RunPodClient
from uvcc_console.fleet.vendors.vast import VastClient
from uvcc_engine.contract.errors import UnreachableError

AT = "https://api.test"


@dataclass
class _Dripping(httpx.AsyncByteStream):
    """A body in small pieces that never ends, each of them soon enough for a limit over one read."""

    piece: bytes = b" "
    closed: bool = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0)
            yield self.piece

    async def aclose(self) -> None:
        self.closed = True


def _client(answer: Any, clock: VirtualClock) -> PrimeClient:
    def handler(request: httpx.Request) -> httpx.Response:
        return answer if isinstance(answer, httpx.Response) else answer(request)

    return PrimeClient(Account("key", AT), transport=httpx.MockTransport(handler), clock=clock)


@pytest.mark.parametrize("piece", [b" ", bytes(1 << 16)], ids=["drips", "swells"])
async def test_an_answer_without_end_ends_the_call(piece: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waited would otherwise wait for ever, or hold it all in memory."""
    monkeypatch.setattr(calls, "WHOLE_S", 0.05 if len(piece) == 1 else 3600.0)
    monkeypatch.setattr(calls, "LARGEST", 1 << 20)
    body = _Dripping(piece)
    async with VirtualClock() as clock:
        client = _client(lambda _: httpx.Response(200, stream=body), clock)
        with pytest.raises(UnreachableError, match=r"ReadTimeout|more than 1 MiB"):
            await client.create({"pod": {}})
        await client.close()
    assert body.closed


@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize("depth", [calls.DEEPEST + 1, 700, 100_000])
async def test_an_answer_that_is_nested_too_deeply_is_none(status: int, depth: int) -> None:
    text = "[" * depth + "]" * depth
    async with VirtualClock() as clock:
        client = _client(lambda _: httpx.Response(status, text=text), clock)
        with pytest.raises(UnreachableError if status == 200 else CloudRefused):
            await client.pod("a")
        await client.close()
    with pytest.raises(ValueError, match="too deeply"):
        value_of(httpx.Response(200, text=text))
    value_of(httpx.Response(200, text="[" * calls.DEEPEST + "]" * calls.DEEPEST))


@pytest.mark.parametrize("loc", [5, None, {"a": 1}, "body", [[]], True])
def test_whatever_a_refusal_names_as_its_place_is_told_or_left_out(loc: object) -> None:
    said = explain(httpx.Response(422, json={"detail": [{"loc": loc, "msg": "must be > 0"}]}))
    assert said.endswith("must be > 0")


def _of_another(kind: str) -> tuple[type[Any], Any]:
    return {
        "vast": (VastClient, {"instances": {"id": 8, "label": "n"}}),
        "lambda": (LambdaClient, {"data": {"id": "8", "name": "n", "status": "terminated"}}),
        "runpod": (RunPodClient, {"id": "8", "name": "n", "desiredStatus": "TERMINATED"}),
        "prime": (PrimeClient, {"id": "8", "name": "n", "status": "TERMINATED"}),
    }[kind]


@pytest.mark.parametrize("kind", ["vast", "lambda", "runpod", "prime"])
async def test_another_pod_than_was_looked_up_proves_nothing(kind: str) -> None:
    """Else the end of one would stand for that of another, which goes on and costs money."""
    made, body = _of_another(kind)

    async with VirtualClock() as clock:
        how = {"transport": httpx.MockTransport(lambda _: httpx.Response(200, json=body)), "clock": clock}
        client: Cloud = made(Account("key", AT), **how) if made is PrimeClient else made(AT, "key", **how)
        found = await client.pod("8")
        assert found is not None
        assert found.id == "8"
        with pytest.raises(UnreachableError, match="tells of '8'"):
            await client.pod("7")
        await client.close()
