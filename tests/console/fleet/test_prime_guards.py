"""What the client is careful with: where the key goes, when to ask again, lists that do not say how long they are."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from otherworld import first_site
from virtualtime import VirtualClock

from uvcc_console.fleet.cloud.intents import Intents, attempt_name, books_of
from uvcc_console.fleet.prime.client import CloudRefused, PrimeClient
from uvcc_console.fleet.prime.key import Account, find_account
from uvcc_console.fleet.prime.models import ApiPod
from uvcc_engine.contract.errors import ConfigError, UnreachableError

SECRET = "pi-very-secret-0123456789"
ENV = {"PRIME_API_KEY": SECRET}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
async def client_on() -> AsyncIterator[Callable[..., PrimeClient]]:
    made: list[PrimeClient] = []
    async with VirtualClock() as clock:

        def make(handler: Callable[[httpx.Request], Any]) -> PrimeClient:
            account = Account(SECRET, "https://api.test")
            made.append(PrimeClient(account, transport=httpx.MockTransport(handler), clock=clock))
            return made[-1]

        yield make
        for client in made:
            await client.close()


@pytest.mark.parametrize(
    "url",
    [
        "https://api.primeintellect.ai",
        "https://api.primeintellect.ai/api/v1/",
        "https://API.PrimeIntellect.ai",
        "http://127.0.0.1:8080",
        "http://localhost:1",
        "http://[::1]:9",
    ],
)
def test_the_key_goes_to_the_vendor_and_to_this_machine(url: str) -> None:
    assert find_account(url, env=ENV).base_url == url.rstrip("/").removesuffix("/api/v1")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://evil.example", "UVCC_PRIME_HOSTS=evil.example"),
        ("https://api.primeintellect.ai.evil.example", "UVCC_PRIME_HOSTS=api.primeintellect.ai.evil.example"),
        ("https://api.primeintellect.ai@evil.example", "more in it than a host"),
        ("https://evilapi.primeintellect.ai", "UVCC_PRIME_HOSTS"),
        ("http://api.primeintellect.ai", "plain HTTP"),
        ("http://10.0.0.1", "plain HTTP"),
        ("http://127.0.0.1.evil.example", "plain HTTP"),
        ("ftp://127.0.0.1", "not a URL"),
        ("https://", "not a URL"),
        ("https://[::1", "not a URL"),
        ("https://x:y", "not a URL"),
    ],
)
def test_no_profile_sends_the_key_anywhere_else(url: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_account(url, env=ENV)
    assert said in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_host_needs_the_users_own_word_and_even_then_https() -> None:
    allowed = {**ENV, "UVCC_PRIME_HOSTS": "other.example, proxy.example"}
    assert find_account("https://proxy.example", env=allowed).base_url == "https://proxy.example"
    with pytest.raises(ConfigError, match="plain HTTP"):
        find_account("http://proxy.example", env=allowed)
    own = {**ENV, "PRIME_API_BASE_URL": "https://mine.example/api/v1"}
    assert find_account("", env=own).base_url == "https://mine.example"
    with pytest.raises(ConfigError, match="plain HTTP"):
        find_account("", env={**ENV, "PRIME_BASE_URL": "http://mine.example"})


@pytest.mark.parametrize(
    "there",
    [
        "https://evil.test/api/v1/pods/",
        "http://api.test/api/v1/pods/",
        "https://api.test:8443/api/v1/pods/",
        "//evil.test/",
    ],
)
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_no_redirect_carries_the_key_or_an_order_elsewhere(
    client_on: Callable[..., PrimeClient], there: str, status: int
) -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(status, headers={"location": there})

    client = client_on(handler)
    for ask in (client.pods(), client.create({"pod": {}}), client.delete("a")):
        with pytest.raises(CloudRefused, match="test") as caught:
            await ask
        assert caught.value.stops_spending
    assert {(r.url.scheme, r.url.host, r.url.port) for r in seen} == {("https", "api.test", None)}


async def test_a_redirect_that_makes_another_order_of_it_is_not_followed(client_on: Callable[..., PrimeClient]) -> None:
    asked: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request.method)
        return httpx.Response(302, headers={"location": "/api/v1/pods"})

    with pytest.raises(CloudRefused):
        await client_on(handler).create({"pod": {}})
    assert asked == ["POST"]


@pytest.mark.parametrize(("with_date", "least"), [(True, 40.0), (False, 40.0)])
async def test_retry_after_may_be_a_date(client_on: Callable[..., PrimeClient], with_date: bool, least: float) -> None:
    times: list[float] = []

    def handler(request: httpx.Request) -> httpx.Response:
        now = client.clock.now()
        times.append(now)
        theirs = now - 9000.0 if with_date else now  # their clock may be another than ours
        headers = {"Retry-After": _http(theirs + 41.0)} | ({"Date": _http(theirs)} if with_date else {})
        return httpx.Response(429 if len(times) == 1 else 200, json={"id": "a"}, headers=headers)

    client = client_on(handler)
    await client.pod("a")
    assert least <= times[1] - times[0] <= 60.0


@pytest.mark.parametrize("said", ["soon", "nan", "-5", "inf", "Fri, 99 Foo 2026", "1e999"])
async def test_a_retry_after_that_means_nothing_holds_nobody_up(
    client_on: Callable[..., PrimeClient], said: str
) -> None:
    times: list[float] = []

    def handler(request: httpx.Request) -> httpx.Response:
        times.append(client.clock.now())
        return httpx.Response(429 if len(times) == 1 else 200, json={"id": "a"}, headers={"Retry-After": said})

    client = client_on(handler)
    await client.pod("a")
    assert times[1] - times[0] <= 120.0


def _http(at: float) -> str:
    return format_datetime(datetime.fromtimestamp(at, UTC), usegmt=True)


@pytest.mark.parametrize("total", [None, 0, -3, 100, 249, "lots", True])
async def test_a_list_is_read_to_its_end_whatever_its_total(client_on: Callable[..., PrimeClient], total: Any) -> None:
    rows = [{"id": f"{n}", "name": f"n{n}"} for n in range(250)]

    def handler(request: httpx.Request) -> httpx.Response:
        offset = int(request.url.params["offset"])
        page: dict[str, Any] = {"data": rows[offset : offset + 100]}
        return httpx.Response(200, json=page if total is None else {**page, "total_count": total})

    client = client_on(handler)
    assert len(await client.pods()) == 250
    assert len(await client.history()) == 250
    assert len(await client.ssh_keys()) == 250


async def test_a_list_that_gives_one_page_for_ever_is_no_list(client_on: Callable[..., PrimeClient]) -> None:
    rows = [{"id": f"{n}", "name": "n"} for n in range(100)]
    with pytest.raises(UnreachableError, match="same page"):
        await client_on(lambda request: httpx.Response(200, json={"data": rows})).pods()
    few = await client_on(lambda request: httpx.Response(200, json={"data": rows[:3]})).pods()
    assert len(few) == 3


async def test_ids_that_would_lead_elsewhere_are_not_asked_for(client_on: Callable[..., PrimeClient]) -> None:
    client = client_on(lambda request: pytest.fail("asked"))
    for bad in ("../ssh_keys/k1", "a/b", "", "x?y", "..", "a" * 200):
        with pytest.raises(UnreachableError, match="no id"):
            await client.delete(bad)
    listed = client_on(lambda request: httpx.Response(200, json={"data": [{"name": "n"}]}))
    with pytest.raises(UnreachableError, match="without an id"):
        await listed.pods()


@pytest.mark.parametrize("price", ["NaN", "inf", "-inf", None, "free", float("1e400")])
def test_a_price_that_is_no_number_is_no_price(price: Any) -> None:
    assert ApiPod.model_validate({"id": "x", "priceHr": price}).price_hr is None


def test_a_line_after_one_that_was_cut_short_is_not_lost(tmp_path: Path) -> None:
    intents = Intents(tmp_path / "i.jsonl")
    first, second = attempt_name("uvcc-run-p0r0"), attempt_name("uvcc-run-p0r0")
    intents.note(1.0, name=first, price_hr=2.0)
    with intents.path.open("a") as f:
        f.write('{"ts": 2, "na')  # a crash in the middle of a line
    intents.note(3.0, name=second, price_hr=3.0)
    assert set(intents.tries("uvcc-run-")) == {first, second}
    assert books_of(intents.tries().values(), 3603.0).hourly == 5.0


def test_a_second_pod_of_one_name_does_not_close_the_first(tmp_path: Path) -> None:
    intents = Intents(tmp_path / "i.jsonl")
    name = attempt_name("uvcc-run-p0r0")
    intents.note(1.0, name=name, price_hr=2.0)
    intents.note(2.0, name=name, id="one", held=True)
    intents.note(3.0, name=name, id="two", gone=True, billed=9.0)
    (only,) = intents.tries().values()
    assert (only.id, only.open, only.held, only.billed) == ("one", True, True, None)


async def test_a_host_that_is_not_the_vendors_is_shown_with_the_quote(run_dir: Path) -> None:
    async with first_site(run_dir) as (site, _fake):
        site.fleet["image"] = "cuda_12_6_pytorch_2_7"
        quote = await site.console().quote(site.requests())
    assert quote.funnel[0].constraint == "asked at https://market.test"
