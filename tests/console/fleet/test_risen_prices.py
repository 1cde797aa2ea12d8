"""A pod whose price rises while it runs: what it has cost is the sum of what was paid at the time, to the cent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from primeworld import World, new_world

from uvcc_console.core.events import Alert, CostTick, Event, PodChanged
from uvcc_console.fleet.cloud.intents import VOLUMES_FILE, Intents, attempt_name, run_books
from uvcc_console.fleet.provider import Books
from uvcc_console.fleet.runclock import RunClock
from uvcc_console.fleet.spend_ledger import Ledger
from uvcc_console.plan.schema import LimitsPart
from uvcc_console.rollout.spending import Spending
from uvcc_console.runs.sweep import sweep
from uvcc_engine.contract.errors import UvccError

HOUR = 3600.0


@pytest.fixture
async def world(run_dir: Path) -> AsyncIterator[World]:
    async with new_world(run_dir) as made:
        yield made


def _raise(world: World, price: float) -> None:
    """Have the market charge so much for the pod of hyperstack from now on."""
    (pod,) = [p for p in world.fake.living if p.record["providerType"] == "hyperstack"]
    world.fake.reprice(pod, price)


async def test_a_price_that_rises_counts_from_when_the_market_tells_it(world: World) -> None:
    await world.up()
    begun = world.clock.now()
    before = world.provider.books()
    assert before.hourly == pytest.approx(1.90 + 2.10 + 2.49)
    await world.clock.sleep(HOUR)
    _raise(world, 3.80)
    own = "uvcc-demo-20261121-0115-ab12-"
    await sweep(world.provider, own, now=world.clock.now())
    assert world.provider.books().hourly == pytest.approx(6.49)  # it is asked again before it is believed
    await world.clock.sleep(60.0)
    await sweep(world.provider, own, now=world.clock.now())
    risen = world.provider.books()
    ((pod, first, now),) = risen.dearer
    assert risen.hourly == pytest.approx(3.80 + 2.10 + 2.49)
    assert (pod, first, now) == (f"{own}p0r0", pytest.approx(1.90), 3.80)
    assert risen.spent - before.spent == pytest.approx(6.49 * (world.clock.now() - begun) / HOUR, abs=0.005)
    at = world.clock.now()
    await world.clock.sleep(HOUR / 2)
    later = world.provider.books()
    assert later.spent - risen.spent == pytest.approx(8.39 * (world.clock.now() - at) / HOUR, abs=0.005)
    minute = 1.90 / 60
    assert later.spent == pytest.approx(world.fake.bill - minute, abs=0.005)
    await world.down()
    assert world.provider.books().dearer == ()
    assert -minute <= world.provider.books().spent - world.fake.bill + 0.005 < 0.02  # or the bill, which is larger


async def test_a_fleet_that_the_market_refuses_costs_nothing_however_long_that_takes(world: World) -> None:
    ledger = Ledger(9.0, 99.0, clock=world.clock.now)
    for request in world.requests():
        name = request.name.rpartition("-")[2]
        ledger.apply(PodChanged(pod=name, party=0, replica=0, provider="x", state="creating", price_hr=2.0), at=1.0)
    world.fake.fail("POST", "/pods", "answer", status=400, body={"detail": "no capacity"})
    await world.provider.quote(world.requests())
    ledger.books = world.provider.books()
    assert (ledger.hourly, ledger.spent()) == (0.0, 0.0)
    for request in world.requests():
        with pytest.raises(UvccError, match="no offer worked"):
            await world.provider.create(request)
    await world.clock.sleep(HOUR)
    ledger.books = world.provider.books()
    assert (ledger.hourly, ledger.spent(), world.fake.bill) == (0.0, 0.0, 0.0)


async def test_a_price_that_is_told_once_and_taken_back_ends_no_run(world: World) -> None:
    await world.up()
    _raise(world, 190.0)  # somebody has told cents
    await world.provider.list("uvcc-")
    await world.clock.sleep(60.0)
    _raise(world, 1.90)
    await world.provider.list("uvcc-")
    await world.clock.sleep(60.0)
    _raise(world, 1e308)
    await world.provider.list("uvcc-")
    assert world.provider.books().hourly == pytest.approx(6.49)


async def test_a_price_that_falls_is_left_to_the_bill(world: World) -> None:
    await world.up()
    _raise(world, 0.10)
    await world.provider.list("uvcc-")
    assert world.provider.books().hourly == pytest.approx(6.49)
    _raise(world, 1.90)
    await world.provider.list("uvcc-")
    assert world.provider.books().dearer == ()


def test_the_volumes_of_a_run_count_where_its_conductor_has_died(tmp_path: Path) -> None:
    pod, disk, named = (attempt_name("uvcc-run-p0r0") for _ in range(3))
    Intents.of(tmp_path).note(0.0, name=pod, price_hr=2.0)
    Intents(tmp_path / VOLUMES_FILE).note(0.0, name=disk, price_hr=0.5)
    Intents(tmp_path / VOLUMES_FILE).note(0.0, name=named, price_hr=9.0, given=True)
    books = run_books(tmp_path, HOUR)
    assert (books.hourly, books.spent) == (2.5, 2.5)


class _Rents:
    """As far as spending asks."""

    caps = None

    def __init__(self) -> None:
        self.told = Books()

    def books(self) -> Books:
        return self.told

    async def prove(self, *, ended: bool, keep: object = ()) -> list[str]:
        return []


def test_the_last_word_on_money_counts_the_end_and_says_that_nothing_is_paid_any_more(tmp_path: Path) -> None:
    provider = _Rents()
    spending = Spending(LimitsPart(hourly=9.0, total=99.0), provider, RunClock(tmp_path), 0.0)  # type: ignore[arg-type]
    at = RunClock(tmp_path).now()
    pod = PodChanged(ts=at, pod="p0r0", party=0, replica=0, provider="x", state="agent", price_hr=2.0)
    spending.heard(pod)
    provider.told = Books(5.0, 2.0, pods=frozenset({"p0r0"}))
    (tick,) = spending.look()
    assert isinstance(tick, CostTick)
    assert (tick.hourly, tick.spent) == (2.0, 5.0)
    again = Spending(LimitsPart(hourly=9.0, total=99.0), provider, RunClock(tmp_path), 0.0)  # type: ignore[arg-type]
    again.replay([pod, replace(tick, ts=tick.at)])  # another conductor, for the end
    for one in (spending, again):
        provider.told = Books(5.07, 0.0, pods=frozenset({"p0r0"}))
        one.heard(replace(pod, state="gone"))
        (last,) = one.look()
        assert isinstance(last, CostTick)
        assert (last.hourly, last.spent, last.forecast) == (0.0, 5.07, 5.07)
        assert one.look() == []


def test_the_operator_is_told_once_and_every_pod_shows_what_it_costs_now(tmp_path: Path) -> None:
    provider = _Rents()
    spending = Spending(LimitsPart(hourly=9.0, total=99.0), provider, RunClock(tmp_path), 0.0)  # type: ignore[arg-type]
    said = PodChanged(ts=1.0, pod="p0r1", party=0, replica=1, provider="x", state="agent", price_hr=2.0, detail="up")
    spending.heard(said)
    provider.told = Books(5.0, 3.0, (), (("uvcc-run-p0r1", 2.0, 3.0),), frozenset({"p0r1"}))
    first = spending.look()
    (alert,) = [e for e in first if isinstance(e, Alert)]
    assert (alert.name, alert.subject) == ("dearer", "p0r1")
    assert "costs 3.00 $/h now, 2.00 were agreed to" in alert.text
    (pod,) = [e for e in first if isinstance(e, PodChanged)]
    assert (pod.price_hr, pod.state) == (3.0, "agent")
    spending.heard(pod)
    again: list[Event] = spending.look()
    assert [type(e) for e in again] == [CostTick]
    spending.heard(said)  # a conductor that knows the price of before says it again
    assert [type(e) for e in spending.look()] == [PodChanged, CostTick]
