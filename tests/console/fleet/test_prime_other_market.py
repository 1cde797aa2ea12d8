"""The second market, every quirk by itself: what the console makes of it, and that nothing is left or touched."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from marketschema import wrong_answer, wrong_body
from othermarket import OtherMarket, Quirks
from otherworld import RUN, Site, other_site

from uvcc_console.fleet.provider import Caps, Pod, PodRequest
from uvcc_engine.contract.errors import ConfigError, UvccError

Before = Callable[[OtherMarket], None]


@dataclass(frozen=True)
class Case:
    """A market, what is done to it before, and how many creates a fleet of three may take at most."""

    name: str
    quirks: Quirks = field(default_factory=Quirks)
    creates: int = 3
    before: Before = lambda market: None


def _strangers(market: OtherMarket) -> None:
    for party in range(3):
        market.stranger(f"{RUN}-p{party}r0xaaaaa{party}")
        market.stranger(f"{RUN}-p{party}r0")


def _crowd(market: OtherMarket) -> None:
    for n in range(130):
        market.stranger(f"someone-{n}", born=market.now() - 9999.0)


def _sold_out(market: OtherMarket) -> None:
    for row in market.offers:
        if row["provider"] == "latitude":
            row["stockStatus"] = "Unavailable"


def _free_bait(market: OtherMarket) -> None:
    market.offers[:0] = [
        {**market.offers[0], "cloudId": f"bait-{n}", "prices": {"onDemand": price, "currency": "USD"}}
        for n, price in enumerate((0.0, 0))
    ]


LAG = 100.0
CASES = [
    Case("plain"),
    Case("list lags", Quirks(list_lag=LAG)),
    Case("look-up lags", Quirks(get_lag=LAG)),
    Case("history lags", Quirks(history_lag=LAG)),
    Case("history lags beyond 180 s", Quirks(history_lag=400.0)),
    Case("history lags beyond 180 s, look-up forgets", Quirks(history_lag=400.0, after="404")),
    Case("list and look-up lag", Quirks(list_lag=LAG, get_lag=LAG)),
    Case("list and look-up lag 300 s", Quirks(list_lag=300.0, get_lag=300.0)),
    Case("everything lags", Quirks(list_lag=LAG, get_lag=LAG, history_lag=LAG)),
    Case("everything lags, deletes are blind", Quirks(list_lag=LAG, get_lag=LAG, history_lag=LAG, delete_blind=True)),
    Case("first create lost", Quirks(lost=frozenset({1}))),
    Case("all first creates lost", Quirks(lost=frozenset({1, 2, 3}))),
    Case("first create lost, shown late", Quirks(lost=frozenset({1}), lag_of=((1, 130.0),)), 4),
    Case(
        "first create lost, shown late, newest first",
        Quirks(lost=frozenset({1}), lag_of=((1, 130.0),), order="desc"),
        4,
    ),
    Case("two creates lost, shown late", Quirks(lost=frozenset({1, 4}), lag_of=((1, 200.0), (4, 200.0))), 5),
    Case("500 and made", Quirks(half=frozenset({2}))),
    Case("500 and not made", Quirks(failed=frozenset({2})), 4),
    Case("500 twice and not made", Quirks(failed=frozenset({1, 4})), 5),
    Case("creates without an id", Quirks(nameless=True)),
    Case("our names used by strangers", before=_strangers),
    Case("our names used by strangers, shuffled", Quirks(order="shuffled"), before=_strangers),
    Case("lists newest first", Quirks(order="desc")),
    Case("lists by name", Quirks(order="name")),
    Case("no total", Quirks(total="missing"), before=_crowd),
    Case("total zero", Quirks(total="zero"), before=_crowd),
    Case("total of the page", Quirks(total="page"), before=_crowd),
    Case("total too large", Quirks(total="huge"), before=_crowd),
    Case("pages of 40", Quirks(page_most=40), before=_crowd),
    Case("429 with a date", Quirks(busy=frozenset({2, 5, 7}))),
    Case("only what the schema requires", Quirks(bare=True)),
    Case("only what the schema requires, all late", Quirks(bare=True, list_lag=LAG, get_lag=LAG, history_lag=LAG)),
    Case("states backwards", Quirks(steps="backwards", boot_s=400.0)),
    Case("slow and silent: 25 minutes", Quirks(steps="silent", boot_s=1500.0)),
    Case("slow with percents: 80 minutes", Quirks(steps="percent", boot_s=4800.0)),
    Case("price zero at create", Quirks(first_price=0.0)),
    Case("deletes not answered", Quirks(delete_lost=frozenset({1, 2, 3}))),
    Case("deletes answered and not obeyed", Quirks(delete_idle=frozenset({1, 2, 3}))),
    Case("look-up forgets what has ended", Quirks(after="404")),
    Case("a provider sold out", before=_sold_out),
    Case("free bait", before=_free_bait),
]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=case.name,
            marks=pytest.mark.ci(__file__) if n % 3 or case.name == "slow with percents: 80 minutes" else (),
        )
        for n, case in enumerate(CASES)
    ],
)
async def test_a_fleet_comes_up_and_goes_whatever_the_market_is_like(run_dir: Path, case: Case) -> None:
    async with other_site(run_dir, case.quirks) as (site, market):
        case.before(market)
        provider = site.console()
        watching = asyncio.create_task(site.watch(provider))
        pods = await site.up(provider)
        assert len({p.provider for p in pods}) == 3
        assert {p.provider_id for p in pods} <= site.alive()
        assert all(p.price_hr >= 1.0 for p in pods)
        assert market.creates <= case.creates
        await site.clock.sleep(900.0)  # what came late is ended by the sweep, and nothing else is
        assert site.alive() == {p.provider_id for p in pods}
        assert await another_console_finds_them(site) == [p.provider_id for p in pods]
        watching.cancel()
        await site.down(provider)
        assert site.alive() == set()
        await site.after()
        assert not [t for t in provider.ends.tries().values() if t.open]


async def another_console_finds_them(site: Site) -> list[str]:
    """What a new process takes the run's pods to be, by what is on disk."""
    listed = {p.name: p for p in await site.console().list(f"{RUN}-")}
    return [listed[r.name].provider_id for r in site.requests()]


def test_there_are_enough_of_them() -> None:
    assert len({c.name for c in CASES}) == len(CASES) >= 33


def test_what_breaks_the_schema_is_noticed() -> None:
    pods = "/api/v1/pods/"
    assert wrong_answer("GET", pods, 200, {"data": [{"id": "x"}]})
    assert wrong_answer("GET", pods, 200, {"total_count": 0})
    assert wrong_answer("DELETE", f"{pods}x", 200, {"status": "ON_FIRE"})
    assert wrong_body("POST", pods, {"pod": {"brand": "new"}, "provider": {"type": "latitude"}})
    assert not wrong_answer("GET", pods, 200, {"data": []})


async def test_a_price_of_zero_starts_the_meter_at_the_offers_price(run_dir: Path) -> None:
    async with other_site(run_dir, Quirks(first_price=0.0)) as (site, market):
        provider = site.console()
        pods = await site.up(provider)
        assert provider.books().hourly == pytest.approx(sum(p.price for p in market.ours))
        await site.clock.sleep(3600.0)
        assert provider.books().spent == pytest.approx(market.spent(), rel=0.05)
        assert {round(p.price_hr, 4) for p in pods} == {round(p.price, 4) for p in market.ours}
        await site.down(provider)


async def test_a_price_that_is_higher_once_the_pod_runs_is_not_paid(run_dir: Path) -> None:
    async with other_site(run_dir, Quirks(first_price=1.0, price_factor=1.5)) as (site, _market):
        with pytest.raises(UvccError, match=r"were agreed to|no offer worked"):
            await site.up(site.console())
        await site.down(site.console())
        await site.after()
        assert site.alive() == set()


async def test_a_bill_that_is_larger_than_our_count_is_told_and_counts(run_dir: Path) -> None:
    async with other_site(run_dir, Quirks(bill_factor=3.0)) as (site, _market):
        provider = site.console()
        await site.up(provider)
        await site.clock.sleep(3600.0)
        assert provider.books().over == ()
        ours = provider.books().spent
        await site.down(provider)
        books = provider.books()
        assert len(books.over) == 3
        assert books.spent == pytest.approx(3 * ours, rel=0.05)


@pytest.mark.parametrize(
    ("caps", "said"),
    [(Caps(3.0, 100.0), "limits.hourly is 3.00"), (Caps(9.0, 0.04), "limits.total 0.04")],
)
async def test_the_caps_are_asked_before_each_create(run_dir: Path, caps: Caps, said: str) -> None:
    async with other_site(run_dir, Quirks()) as (site, market):
        site.caps = caps
        provider = site.console()
        with pytest.raises(UvccError, match=said):
            await site.up(provider)
        assert market.creates < 3
        await site.down(provider)


async def test_a_create_without_an_answer_counts_for_the_cap_until_it_is_proven(run_dir: Path) -> None:
    """There is room for three pods and no more: the fourth create waits for the lost one's fate."""
    async with other_site(run_dir, Quirks(lost=frozenset({1}), lag_of=((1, 300.0),))) as (site, market):
        site.caps = Caps(3.4, 100.0)
        provider = site.console()
        pods = await site.up(provider)
        assert market.creates == 3
        assert site.alive() == {p.provider_id for p in pods}
        await site.down(provider)


async def test_nothing_is_proven_absent_while_the_list_does_not_answer(run_dir: Path) -> None:
    async with other_site(run_dir, Quirks(lost=frozenset({1}), lag_of=((1, 1e9),))) as (site, market):
        provider = site.console()
        await site.up(provider)
        market.quirks = replace(market.quirks, busy=frozenset(range(len(market.asked), 10_000_000)))
        await site.clock.sleep(3000.0)
        with pytest.raises(UvccError):
            await provider.prove(ended=False)
        (silent,) = [t for t in provider.ends.tries().values() if not t.answered]
        assert silent.open
        market.quirks = replace(market.quirks, busy=frozenset(), lag_of=())
        await provider.prove(ended=False)
        assert silent.name not in {t.name for t in provider.ends.tries().values() if t.open}
        await site.down(provider)
        assert site.alive() == set()


async def test_what_comes_of_a_create_after_the_runs_end_is_ended(run_dir: Path) -> None:
    """The tear-down is through, the pod is shown later; who stays behind ends it."""
    async with other_site(run_dir, Quirks(lost=frozenset({3}), lag_of=((3, 300.0),))) as (site, _market):
        provider = site.console()
        await site.up(provider)
        left = await site.down(provider)
        assert len(left) == 1
        assert len(site.alive()) == 1
        await site.after()
        assert site.alive() == set()


async def test_of_a_run_that_keeps_its_pods_only_what_is_one_too_many_goes(run_dir: Path) -> None:
    async with other_site(run_dir, Quirks(lost=frozenset({1}), lag_of=((1, 400.0),))) as (site, market):
        provider = site.console()
        pods = await site.up(provider)
        await site.clock.sleep(400.0)
        keep = [p.name for p in pods]
        assert len(site.alive()) == 4
        assert await site.console().prove(ended=True, keep=keep) == []
        assert site.alive() == {p.provider_id for p in pods}
        await site.down(provider)
        assert market.ours == []


async def _strangers_pod(site: Site, market: OtherMarket) -> Pod:
    return Pod(f"{RUN}-p0r0", 0, 0, "latitude", market.stranger(f"{RUN}-p0r0xaaaaaa").id)


@pytest.mark.parametrize("make", [_strangers_pod])
async def test_a_strangers_pod_under_our_name_is_never_deleted(
    run_dir: Path, make: Callable[[Site, OtherMarket], Awaitable[Pod]]
) -> None:
    async with other_site(run_dir, Quirks()) as (site, market):
        provider = site.console()
        await site.up(provider)
        with pytest.raises(ConfigError, match="left alone"):
            await provider.delete(await make(site, market))
        await site.down(provider)
        assert [p.owner for p in market.pods.values() if p.dead is None] == ["user-stranger"]


@pytest.mark.ci(__file__)
async def test_24_pods_are_ready_soon_after_the_slowest_has_booted(run_dir: Path) -> None:
    """Answers take 0.2 to 1.2 s, creates 2 to 4 s, logins 2 s, boots 60 to 300 s."""
    boots = tuple((n, 60.0 + 240.0 * ((n * 7) % 24) / 23) for n in range(1, 25))
    quirks = Quirks(latency=0.7, create_s=3.0, boot_of=boots)
    async with other_site(run_dir, quirks) as (site, market):
        site.login_s = 2.0
        provider = site.console()
        requests = site.requests(8)
        await provider.quote(requests)
        began = site.clock.now()

        async def one(request: PodRequest) -> Pod:
            return await provider.wait_ready(await provider.create(request))

        pods = await asyncio.gather(*(one(r) for r in requests))
        took = site.clock.now() - began
        slowest = max(p.boot_s for p in market.ours)
        assert len({p.provider_id for p in pods}) == market.creates == 24
        print(f"24 pods: {took:.1f} s, the slowest boots for {slowest:.1f} s")
        assert took <= slowest + 20.0
        await asyncio.gather(*(provider.delete(p) for p in pods))
        assert site.alive() == set()
