"""A list of providers for one party: the next where one cannot, never two at a time, whenever it is killed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cloudfake import CloudFake, LambdaFake, RunPodFake
from cloudworld import RUN
from virtualtime import VirtualClock

from uvcc_console.fleet.by_party import PartyProviders
from uvcc_console.fleet.cloud import intents
from uvcc_console.fleet.cloud.ready import Readiness
from uvcc_console.fleet.cloud.saga import CloudProvider
from uvcc_console.fleet.cloud.vendor import SshTarget
from uvcc_console.fleet.failover import failover_choice, failover_provider
from uvcc_console.fleet.failover.failover_choice import chosen
from uvcc_console.fleet.failover.failover_provider import FailoverProvider
from uvcc_console.fleet.provider import Caps, NoOffer, PodRequest
from uvcc_console.fleet.provider_kinds import alternatives, provider_for, sections
from uvcc_console.fleet.vendors.lambda_cloud import LambdaClient
from uvcc_console.fleet.vendors.runpod import RunPodClient
from uvcc_console.plan.profile import parse
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UvccError

JOB = {"kind": "private", "model": "mlp-digits", "steps": 2}
FLEET: dict[str, Any] = {
    "provider": "runpod",
    "gpu": "H100",
    "max_price": 3.0,
    "party": 0,
    "fallbacks": [{"provider": "lambda", "gpu": "H100"}],
}
MINE = PodRequest(f"{RUN}-p0r0", 0, 0, gpu="H100", gpu_count=1, max_price_hr=3.0)
MORE = PodRequest(f"{RUN}-p0r1", 0, 1, gpu="H100", gpu_count=1, max_price_hr=3.0)


class Killed(BaseException):
    """What ``kill -9`` comes to here: nothing in the product catches it."""


class Two:
    """Two vendors, one run of one party, in virtual time. ``deaths``: effects until the console dies; 0: it lives."""

    def __init__(self, clock: VirtualClock, run_dir: Path, party: int = 0) -> None:
        self.clock, self.run_dir, self.party = clock, run_dir, party
        self.first, self.second = RunPodFake(clock.now), LambdaFake(clock.now)
        self.told: list[str] = []

    async def _login(self, at: SshTarget, gpu: bool) -> str:
        return ""

    def console(self) -> FailoverProvider:
        """A console process: all it knows is in the run's folder."""
        at: Any = {"clock": self.clock}
        clients = (
            RunPodClient("http://runpod.test/api/v2", "test-key", transport=self.first.transport, **at),
            LambdaClient("http://lambda.test/api/v1", "test-key", transport=self.second.transport, **at),
        )
        made = [
            (s, CloudProvider(c, s, self.run_dir, readiness=Readiness(c, self.run_dir, "", self._login)))
            for s, c in zip(alternatives(FLEET | {"party": self.party}), clients, strict=True)
        ]
        found = FailoverProvider(made, self.run_dir, self.party)
        found.caps = Caps(hourly=5.0, total=50.0)
        found.tell = self.told.append
        return found

    @property
    def billing(self) -> tuple[list[str], list[str]]:
        return self.first.billing, self.second.billing

    async def up(self, console: FailoverProvider) -> str:
        await console.quote([MINE])
        return (await console.wait_ready(await console.create(MINE))).provider_id

    async def down(self, console: FailoverProvider) -> None:
        for pod in await console.list(f"{RUN}-"):
            await console.delete(pod)
        for _ in range(30):
            if not await console.prove(ended=True):
                break
            await self.clock.sleep(60.0)
        assert self.billing == ([], [])
        await console.close()


@asynccontextmanager
async def _two(run_dir: Path) -> AsyncIterator[Two]:
    async with VirtualClock() as clock:
        yield Two(clock, run_dir)


@pytest.fixture
def own_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UVCC_HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / "runs" / RUN.removeprefix("uvcc-")
    folder.mkdir(parents=True)
    return folder


def _down(fake: CloudFake) -> None:
    for op in ("market", "list", "create"):
        fake.fail(op, "refuse")


def _trouble(kind: str, two: Two) -> None:
    """What is wrong with the first of the list."""
    if kind == "no stock":
        two.first.stock = 0
    elif kind == "down":
        _down(two.first)
    elif kind == "quota":
        two.first.quota = 0
    elif kind == "lost":
        two.first.fail("create", "refuse")
    elif kind == "broken":
        two.first.born_state = "ERROR"


@pytest.mark.parametrize("kind", ["no stock", "down", "quota", "lost", "broken"])
async def test_where_one_cannot_the_next_is_asked(own_run: Path, kind: str) -> None:
    async with _two(own_run) as two:
        _trouble(kind, two)
        console = two.console()
        await two.up(console)
        assert [len(those) for those in two.billing] == [0, 1]
        assert len(two.told) == 1
        assert two.told[0].startswith("party 0 goes to lambda H100 instead of runpod H100: ")
        assert chosen(FLEET, own_run)["provider"] == console.name == "lambda"
        await two.down(console)


async def test_each_party_goes_along_a_list_of_its_own(own_run: Path) -> None:
    """One party's provider has no stock: that party goes to its next, and the others stay where they are."""
    own = {k: v for k, v in FLEET.items() if k != "party"}
    whole = parse({"job": JOB, "fleet": {"parties": dict.fromkeys(("P0", "P1", "P2"), own)}, "limits": {"hourly": 9}})
    parts = sections(whole.model_dump(mode="json")["fleet"])
    assert [[one["provider"] for one in alternatives(part)] for part in parts] == [["runpod", "lambda"]] * 3
    async with VirtualClock() as clock:
        three = [Two(clock, own_run, party) for party in range(3)]
        three[1].first.stock = 0
        console = PartyProviders([two.console() for two in three], ["P0", "P1", "P2"])
        console.caps = Caps(hourly=9.0, total=50.0)
        requests = [replace(MINE, name=f"{RUN}-p{p}r0", party=p) for p in range(3)]
        await console.quote(requests)
        for request in requests:
            await console.wait_ready(await console.create(request))
        assert [[len(those) for those in two.billing] for two in three] == [[1, 0], [0, 1], [1, 0]]
        assert [len(two.told) for two in three] == [0, 1, 0]
        assert three[1].told[0].startswith("party 1 goes to lambda H100 instead of runpod H100: ")
        names = [chosen(FLEET | {"party": party}, own_run)["provider"] for party in range(3)]
        assert names == ["runpod", "lambda", "runpod"]
        for pod in await console.list(f"{RUN}-"):
            await console.delete(pod)
        assert [two.billing for two in three] == [([], [])] * 3
        await console.close()


def _wallets(monkeypatch: pytest.MonkeyPatch, first: float | None, second: float | None) -> None:
    for client, money in ((RunPodClient, first), (LambdaClient, second)):

        async def wallet(self: Any, money: float | None = money) -> float | None:
            return money

        monkeypatch.setattr(client, "wallet", wallet)


async def test_a_wallet_that_does_not_last_is_passed_over(own_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _wallets(monkeypatch, 0.5, 100.0)
    async with _two(own_run) as two:
        console = two.console()
        assert (await console.quote([MINE])).wallet == 100.0
        await two.up(console)
        assert [len(those) for those in two.billing] == [0, 1]
        assert "its wallet holds 0.50 $, the run may cost 2.00" in two.told[0]
        await two.down(console)


@pytest.mark.parametrize("kind", ["quota", "broken"])
async def test_after_the_quote_the_next_one_s_wallet_and_price_are_looked_at_again(
    own_run: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first wallet was held against the run when it was planned; the second is when it comes to that."""
    _wallets(monkeypatch, 100.0, 0.5)
    async with _two(own_run) as two:
        console = two.console()
        await console.quote([MINE])
        _trouble(kind, two)
        with pytest.raises(UvccError, match=r"lambda H100: its wallet holds 0\.50 \$, the run may cost"):
            await console.wait_ready(await console.create(MINE))
        assert two.second.asked("create") == []
        _wallets(monkeypatch, 100.0, None)
        two.second.PRICE = 5.5  # type: ignore[misc]  (dearer than limits.hourly)
        monkeypatch.setitem(FLEET["fallbacks"][0], "max_price", 9.0)
        dear = two.console()
        with pytest.raises(UvccError, match=r"lambda H100: costs 5\.50 \$/h, limits\.hourly is 5\.00"):
            await dear.wait_ready(await dear.create(MINE))
        assert two.second.asked("create") == []
        await two.down(console)


async def test_the_books_hold_what_both_cost(own_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _wallets(monkeypatch, None, None)
    async with _two(own_run) as two:
        two.first.born_state = "ERROR"
        console = two.console()
        await two.up(console)
        books = console.books()
        assert books.hourly == pytest.approx(2.0)
        assert books.spent > 0.0
        before = books.spent
        await two.clock.sleep(3600.0)
        assert console.books().spent == pytest.approx(before + 2.0)
        tries = intents.Intents.of(own_run).tries().values()
        assert {t.provider for t in tries} == {"runpod", "lambda"}
        assert before > sum(t.cost(two.clock.now()) for t in tries if t.provider == "lambda") - 2.0  # the first's, too
        await two.down(console)


async def test_the_first_of_the_list_is_taken_where_it_can(own_run: Path) -> None:
    async with _two(own_run) as two:
        console = two.console()
        await two.up(console)
        assert ([len(those) for those in two.billing], two.told) == ([1, 0], [])
        await two.down(console)


async def test_nobody_at_all_names_every_reason_and_creates_nothing(own_run: Path) -> None:
    async with _two(own_run) as two:
        two.first.stock = two.second.stock = 0
        console = two.console()
        with pytest.raises(NoOffer, match=r"runpod H100: .*; lambda H100: ") as error:
            await console.quote([MINE])
        assert error.value.passing
        assert [*two.first.asked("create"), *two.second.asked("create")] == []
        await console.close()


async def test_a_party_that_has_a_pod_goes_nowhere_else(own_run: Path) -> None:
    async with _two(own_run) as two:
        console = two.console()
        await two.up(console)
        two.first.quota = 0
        with pytest.raises(UvccError, match="runpod H100 runs pods of this fleet"):
            await console.create(MORE)
        assert [len(those) for those in two.billing] == [1, 0]
        await two.down(console)


async def test_what_may_still_exist_keeps_the_next_from_being_asked(own_run: Path) -> None:
    async with _two(own_run) as two:
        console = two.console()
        await console.quote([MINE])
        two.first.fail("create", "commit_then_timeout")
        two.first.fail("market", "refuse")
        two.first.fail("list", "refuse", *range(2, 9999))  # the first look comes before the create
        with pytest.raises(UnreachableError, match="may still exist at runpod H100"):
            await console.create(MINE)
        assert two.second.asked("create") == []
        two.first.faults.clear()
        await two.down(console)


async def test_another_console_goes_on_where_the_last_one_was(own_run: Path) -> None:
    async with _two(own_run) as two:
        two.first.stock = 0
        pod = await two.up(two.console())
        two.first.stock = 9
        again = two.console()
        assert await two.up(again) == pod
        assert [len(those) for those in two.billing] == [0, 1]
        await two.down(again)


@pytest.mark.parametrize(
    "kind", ["quota", pytest.param("broken", marks=pytest.mark.slow), pytest.param("lost", marks=pytest.mark.slow)]
)
async def test_killed_between_any_two_steps_it_never_has_two_fleets(
    own_run: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [0]
    written = intents.append_synced

    def count() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    def noted(path: Path, row: Any, hint: str) -> None:
        written(path, row, hint)
        count()

    monkeypatch.setattr(intents, "append_synced", noted)
    monkeypatch.setattr(failover_provider, "append_synced", noted)
    deaths = 0
    for step in range(1, 200):
        folder = own_run
        for name in (intents.FILE, failover_choice.FILE):
            (folder / name).unlink(missing_ok=True)
        async with _two(folder) as two:
            _trouble(kind, two)
            for fake in (two.first, two.second):
                fake.transport.handler = _then(fake.serve, count, fake)  # type: ignore[method-assign]
            left[0] = step
            died = False
            try:
                await two.up(two.console())
            except Killed:
                died = True
            left[0] = 0
            after = two.console()
            await two.up(after)
            assert [len(those) for those in two.billing] == [0, 1], (step, two.billing)
            await two.down(after)
        deaths += died
        if not died:
            break
    assert deaths > 8


def _then(serve: Any, count: Any, fake: CloudFake) -> Any:
    """Only creates and deletes change anything: the console dies once the vendor has obeyed, before it hears of it."""

    def answer(request: Any) -> Any:
        found = serve(request)
        if request.method != "GET":
            count()
        return found

    return answer


def test_a_fallback_is_checked_like_a_fleet_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fleet(**more: Any) -> dict[str, Any]:
        return {"job": JOB, "fleet": {"provider": "runpod", **more}}

    assert parse(fleet(fallbacks=[{"regions": ["EU-1"]}, {"provider": "lambda"}])).fleet.fallbacks
    wrong: list[tuple[dict[str, Any], str]] = [
        (fleet(fallbacks=[{"provider": "lamda"}]), "did you mean lambda"),
        (fleet(fallbacks=[{"provider": "lambda", "socket": "SXM"}]), "socket"),
        (fleet(fallbacks=[{"provider": "local"}]), "rents nothing"),
        (fleet(fallbacks=[{"fallbacks": [{}]}]), "fallbacks of its own"),
        ({"job": JOB, "fleet": {"fallbacks": [{"provider": "runpod"}]}}, "local rents nothing"),
        (
            {"job": JOB, "fleet": {"parties": {p: {} for p in ("P0", "P1", "P2")}, "fallbacks": [{}]}},
            "one party's",
        ),
    ]
    for raw, said in wrong:
        with pytest.raises(ConfigError, match=said):
            parse(raw)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RUNPOD_API_KEY", "one")
    monkeypatch.delenv("LAMBDA_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="lambda") as error:
        provider_for(parse(fleet(fallbacks=[{"provider": "lambda"}])).fleet.model_dump(mode="json"), tmp_path)
    assert "LAMBDA_API_KEY" in error.value.hint


def test_names_of_a_vendor_stay_with_it() -> None:
    section = {"provider": "runpod", "gpu": "A", "regions": ["r"], "account": "x", "max_price": 2.0}
    same, other = {"regions": ["s"]}, {"provider": "lambda", "gpu": "B"}
    assert alternatives({**section, "fallbacks": [same, other]}) == [
        section,
        {**section, "regions": ["s"]},
        {"provider": "lambda", "gpu": "B", "max_price": 2.0},
    ]


@pytest.mark.parametrize(
    "line", ["", "{", '{"party": 0}', '{"party": 0, "choice": 7}', '{"party": 0, "choice": "x"}', "[]"]
)
def test_a_broken_line_of_the_choice_does_not_count(own_run: Path, line: str) -> None:
    (own_run / failover_choice.FILE).write_text(f'{{"party": 0, "choice": 1}}\n{line}\n')
    assert chosen(FLEET, own_run)["provider"] == "lambda"
