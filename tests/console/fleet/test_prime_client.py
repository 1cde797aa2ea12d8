"""The client's manners: both error shapes, paging that ends, repeats only where safe, and a key that nobody sees."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from virtualtime import VirtualClock

from uvcc_console.fleet.cloud.intents import Intents, attempt_name, base_of
from uvcc_console.fleet.prime.client import CloudRefused, PrimeClient, explain, kind_of
from uvcc_console.fleet.prime.key import Account, find_account
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UnreadableError, UvccError

SECRET = "pi-very-secret-0123456789"


@pytest.fixture
async def client_on() -> AsyncIterator[Callable]:
    made: list[PrimeClient] = []
    async with VirtualClock() as clock:

        def make(handler: Callable[[httpx.Request], Any], **account: str) -> PrimeClient:
            at = Account(SECRET, "https://api.test", **account)
            client = PrimeClient(at, transport=httpx.MockTransport(handler), clock=clock)
            made.append(client)
            return client

        yield make
        for client in made:
            await client.close()


def answers(*rows: tuple[int, Any]) -> tuple[Callable[[httpx.Request], httpx.Response], list[httpx.Request]]:
    """Each request gets the next answer, the last one for ever."""
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        status, body = rows[min(len(seen), len(rows)) - 1]
        if isinstance(body, Exception):
            raise body
        return httpx.Response(status, text=body) if isinstance(body, str) else httpx.Response(status, json=body)

    return handler, seen


async def test_a_read_is_repeated_and_a_create_never(client_on) -> None:
    handler, seen = answers((503, {"detail": "x"}), (0, httpx.ReadTimeout("slow")), (200, {"id": "a", "name": "n"}))
    pod = await client_on(handler).pod("a")
    assert pod is not None
    assert pod.name == "n"
    assert len(seen) == 3
    for trouble in (
        (500, {"detail": "Error during pod provisioning"}),
        (0, httpx.ReadTimeout("slow")),
        (502, "<html>"),
    ):
        handler, seen = answers(trouble, (200, {"id": "a"}))
        with pytest.raises(UnreachableError, match="unknown"):
            await client_on(handler).create({"pod": {}})
        assert len(seen) == 1
    handler, seen = answers((0, httpx.ConnectError("refused")), (429, {}), (200, {"id": "a"}))
    assert (await client_on(handler).create({"pod": {}})).id == "a"  # neither was obeyed, so both may be repeated
    assert len(seen) == 3


async def test_it_gives_up_on_reads_in_the_end(client_on) -> None:
    handler, seen = answers((503, {"detail": "maintenance"}))
    with pytest.raises(UnreachableError, match="maintenance"):
        await client_on(handler).pods()
    assert len(seen) == 5


async def test_retry_after_is_honoured(client_on) -> None:
    times: list[float] = []

    def handler(request: httpx.Request) -> httpx.Response:
        times.append(client.clock.now())
        return httpx.Response(429 if len(times) == 1 else 200, json={"id": "a"}, headers={"Retry-After": "17"})

    client = client_on(handler)
    await client.pod("a")
    assert times[1] - times[0] >= 17.0


@pytest.mark.parametrize(
    ("status", "body", "kind", "text"),
    [
        (400, {"detail": "Missing field: data_center_id not specified"}, "invalid", "data_center_id"),
        (400, {"detail": "Maximum number of instances reached. Limit: 4"}, "limit", "Limit: 4"),
        (400, {"detail": "No capacity for H100"}, "capacity", "capacity"),
        (400, {"message": "Insufficient balance"}, "payment", "balance"),
        (400, {"error": "GPU is out of stock"}, "capacity", "stock"),
        (401, {"detail": "Invalid token"}, "auth", "token"),
        (402, {"whatever": 1}, "payment", "whatever"),
        (403, {"detail": "no permission"}, "auth", "permission"),
        (422, {"errors": [{"param": "pod.x", "details": "Extra inputs are not permitted"}]}, "invalid", "pod.x: Extra"),
        (
            422,
            {"detail": [{"loc": ["body", "pod", "gpuCount"], "msg": "must be > 0"}]},
            "invalid",
            "pod.gpuCount: must",
        ),
        (400, "<html>bad</html>", "invalid", "<html>bad"),
        (400, ["odd"], "invalid", "odd"),
    ],
)
async def test_every_refusal_is_understood(client_on, status: int, body: Any, kind: str, text: str) -> None:
    handler, seen = answers((status, body))
    with pytest.raises(CloudRefused, match=str(status)) as caught:
        await client_on(handler).create({"pod": {}})
    assert caught.value.kind == kind
    assert text in caught.value.what
    assert len(seen) == 1
    assert caught.value.stops_spending == (kind in ("auth", "payment", "limit"))


def test_an_endless_error_text_is_cut() -> None:
    assert len(explain(httpx.Response(400, text="x" * 100_000))) <= 2048
    assert kind_of(404, "") == "missing"


async def test_pages_are_all_read_whatever_the_total_says(client_on) -> None:
    rows = [{"id": f"{n}", "name": f"n{n}"} for n in range(250)]

    def handler(request: httpx.Request) -> httpx.Response:
        offset = int(request.url.params["offset"])
        return httpx.Response(200, json={"total_count": 250, "data": rows[offset : offset + 100]})

    assert len(await client_on(handler).pods()) == 250

    def lying(request: httpx.Request) -> httpx.Response:  # a total that is never reached must not loop for ever
        offset = int(request.url.params["offset"])
        return httpx.Response(200, json={"total_count": 9999, "data": rows[offset : offset + 100]})

    assert len(await client_on(lying).pods()) == 250


async def test_a_list_that_shifts_while_it_is_read_misses_nobody(client_on) -> None:
    rows = [{"id": f"{n}", "name": "n"} for n in range(150)]
    calls = 0

    def handler(request: httpx.Request) -> httpx.Response:
        nonlocal calls
        calls += 1
        shown = rows[1:] if calls == 2 else rows  # one vanished between two pages, so another slipped by
        offset = int(request.url.params["offset"])
        return httpx.Response(200, json={"total_count": 150, "data": shown[offset : offset + 100]})

    assert len(await client_on(handler).pods()) == 150


async def test_a_truncated_list_is_an_error_not_a_list(client_on) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if int(request.url.params["offset"]):
            return httpx.Response(500, json={"detail": "x"})
        return httpx.Response(200, json={"total_count": 150, "data": [{"id": f"{n}"} for n in range(100)]})

    with pytest.raises(UnreachableError):
        await client_on(handler).pods()


async def test_an_empty_market_is_asked_again_before_it_is_believed(client_on) -> None:
    calls: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        calls.append(request.url.path)
        if request.url.path.endswith("gpu-summary"):
            return httpx.Response(200, json={"H100_80GB": {"1": {}}})
        rows = [{"gpuType": "H100_80GB", "provider": "x"}] if calls.count(request.url.path) > 3 else []
        return httpx.Response(200, json={"items": rows, "totalCount": len(rows)})

    assert len(await client_on(handler).offers(gpu_type="H100_80GB")) == 1
    handler2, _ = answers((200, {"items": [], "totalCount": 0}), (200, {"items": [], "totalCount": 0}), (200, {}))
    assert await client_on(handler2).offers(gpu_type="Z") == []


async def test_redirects_keep_method_body_and_key(client_on) -> None:
    seen: list[tuple[str, str, bytes, str | None]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append((request.method, request.url.path, request.content, request.headers.get("authorization")))
        if request.url.path.endswith("/pods/"):
            return httpx.Response(307, headers={"location": "https://api.test/api/v1/pods"})
        return httpx.Response(200, json={"id": "a"})

    await client_on(handler, team="t1").create({"pod": {"name": "n"}})
    assert [s[:2] for s in seen] == [("POST", "/api/v1/pods/"), ("POST", "/api/v1/pods")]
    assert json.loads(seen[1][2]) == {"pod": {"name": "n"}, "team": {"teamId": "t1"}}
    assert seen[1][3] == f"Bearer {SECRET}"


async def test_deleting_what_is_not_there_is_fine(client_on) -> None:
    handler, _ = answers((404, {"detail": "Pod not found"}))
    client = client_on(handler)
    await client.delete("x")
    assert await client.pod("x") is None


async def test_the_key_is_never_shown(client_on, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    handler, _ = answers((401, {"detail": "Invalid token"}))
    client = client_on(handler)
    with pytest.raises(CloudRefused) as caught:
        await client.whoami()
    shown = [repr(client.account), str(caught.value), repr(caught.value), caplog.text, repr(vars(client))]
    assert not [text for text in shown if SECRET in text]


async def test_odd_shapes_are_unreachable_not_a_crash(client_on) -> None:
    for body in ([], "text", {"data": None}, {"data": {"a": 1}}, None):
        handler, _ = answers((200, json.dumps(body)))
        with pytest.raises(UnreachableError):
            await client_on(handler).pods()
    handler, _ = answers((200, "<html>login</html>"))
    with pytest.raises(UnreachableError, match="where JSON was due"):
        await client_on(handler).pods()
    handler, _ = answers((500, "x"))
    assert await client_on(handler).wallet() is None


# the key


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def put(path: Path, text: str, mode: int = 0o600) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def test_the_environment_comes_before_files(home: Path) -> None:
    put(home / ".prime/config.json", json.dumps({"api_key": "file", "team_id": "t", "base_url": "https://b/api/v1/"}))
    put(home / ".uvcc/prime_api_key.txt", "seed\n")
    found = find_account(env={"PRIME_API_KEY": "env", "PRIME_TEAM_ID": " "})
    assert (found.key, found.team, found.base_url) == ("env", "t", "https://b")
    assert find_account(env={"UVCC_PRIME_API_KEY": "u"}).key == "u"
    assert find_account(env={}).key == "file"
    assert find_account("http://127.0.0.1:1", env={}).base_url == "http://127.0.0.1:1"
    (home / ".prime/config.json").unlink()
    assert find_account(env={}).key == "seed"


def test_a_key_that_others_can_read_is_refused(home: Path) -> None:
    put(home / ".uvcc/prime_api_key.txt", "seed", 0o644)
    with pytest.raises(ConfigError, match="others can read") as caught:
        find_account(env={})
    assert "chmod 600" in caught.value.hint


def test_no_key_and_a_broken_configuration_are_told(home: Path) -> None:
    with pytest.raises(ConfigError, match="no Prime Intellect API key"):
        find_account(env={})
    put(home / ".prime/config.json", "{broken")
    with pytest.raises(UnreadableError, match="not JSON"):
        find_account(env={})


# the write-ahead file


def test_an_intent_is_open_until_its_pod_is_refused_given_up_or_gone(tmp_path: Path) -> None:
    intents = Intents(tmp_path / "i.jsonl")
    names = [attempt_name("uvcc-run-p0r0") for _ in range(5)]
    for at, name in enumerate(names):
        intents.note(float(at), name=name, offer="x")
    intents.note(8.0, name=names[0], id="abc")
    intents.note(9.0, name=names[4], gone=True)
    intents.note(9.0, name=names[1], refused="capacity")
    intents.note(9.0, name=names[2], absent=True)
    assert intents.open("uvcc-run-p0r0") == {names[0]: 8.0, names[3]: 3.0}
    assert intents.open("uvcc-run-p0r1") == {}
    with (tmp_path / "i.jsonl").open("a") as f:
        f.write('{"ts": 10, "name": "uvcc-run-p0r0xabc')  # a crash in the middle of a line
    assert intents.open("uvcc-run-") == {names[0]: 8.0, names[3]: 3.0}
    with pytest.raises(UvccError, match="no pod was created"):
        Intents(tmp_path / "missing" / "i.jsonl").note(0.0, name="x")


def test_names_tell_whose_they_are() -> None:
    assert base_of(attempt_name("uvcc-demo-1-ab-p2r11")) == "uvcc-demo-1-ab-p2r11"
    assert len({attempt_name("uvcc-r-p0r0") for _ in range(100)}) == 100
    for foreign in ("uvcc-r-p0r0", "other-p0r0xabcdef", "uvcc-r-p0r0xABCDEF", "uvcc", ""):
        assert base_of(foreign) == ""
