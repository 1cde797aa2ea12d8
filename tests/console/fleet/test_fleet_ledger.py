from __future__ import annotations

import pytest

from uvcc_console.core.events import PodChanged
from uvcc_console.fleet.provider import Books
from uvcc_console.fleet.spend_ledger import Ledger


def changed(pod: str, state: str, at: float, price: float = 0.0) -> PodChanged:
    return PodChanged(ts=at, pod=pod, party=0, replica=0, provider="x", state=state, price_hr=price)


def test_a_pod_costs_from_its_creation_until_it_is_proven_gone() -> None:
    now = 0.0
    ledger = Ledger(10.0, 100.0, clock=lambda: now)
    for event in (
        changed("p0r0", "planned", 0.0, 2.0),
        changed("p0r0", "creating", 100.0, 2.0),
        changed("p0r0", "ready", 400.0),
        changed("p0r0", "failed", 1000.0),
        changed("p0r0", "deleting", 2000.0),
    ):
        ledger.apply(event)
    now = 3700.0
    assert ledger.hourly == 2.0
    assert ledger.spent() == pytest.approx(2.0)
    ledger.apply(changed("p0r0", "gone", 3700.0))
    now = 9999.0
    assert ledger.hourly == 0.0
    assert ledger.spent() == pytest.approx(2.0)


def test_the_price_that_came_back_counts_if_it_is_higher_and_a_second_life_adds_up() -> None:
    now = 3600.0
    ledger = Ledger(10.0, 100.0, clock=lambda: now)
    ledger.apply(changed("p0r0", "creating", 0.0, 1.0))
    ledger.apply(changed("p0r0", "ready", 10.0, 3.0))
    assert ledger.spent() == pytest.approx(3.0)
    ledger.apply(changed("p0r0", "gone", 3600.0))
    ledger.apply(changed("p0r0", "creating", 3600.0, 1.0))
    now = 7200.0
    assert ledger.spent() == pytest.approx(4.0)


def test_a_price_that_rises_says_nothing_of_the_hours_before() -> None:
    now = 2 * 3600.0
    ledger = Ledger(10.0, 100.0, clock=lambda: now)
    ledger.apply(changed("p0r0", "creating", 0.0, 1.0))
    ledger.apply(changed("p0r0", "agent", 60.0, 1.0))
    ledger.apply(changed("p0r0", "agent", 3600.0, 3.0))
    assert ledger.hourly == 3.0
    assert ledger.spent() == pytest.approx(1.0 + 3.0)
    ledger.apply(changed("p0r0", "agent", 3700.0, 1.0))  # it may be one that is remembered
    assert ledger.spent() == pytest.approx(1.0 + 3.0)
    ledger.apply(changed("p0r0", "gone", now))
    now = 9 * 3600.0
    assert ledger.spent() == pytest.approx(1.0 + 3.0)


def test_of_a_rented_pod_only_what_is_known_of_its_tries_counts() -> None:
    now = 7200.0
    ledger = Ledger(10.0, 100.0, clock=lambda: now)
    ledger.apply(changed("p0r0", "creating", 0.0, 2.0))
    ledger.apply(changed("p1r0", "creating", 0.0, 2.0))
    ledger.apply(changed("p2r0", "creating", 0.0, 2.0))
    ledger.apply(changed("p2r0", "agent", 3600.0, 2.0))  # it was taken over: another run's books tell of it
    ledger.books = Books(pods=frozenset())
    assert (ledger.hourly, ledger.spent()) == (2.0, pytest.approx(4.0))  # of the others nobody has asked for any yet
    ledger.books = Books(0.5, 0.0, pods=frozenset({"p0r0"}))  # its provider has ended it
    assert (ledger.hourly, ledger.spent()) == (2.0, pytest.approx(4.5))
    ledger.books = Books(0.5, 0.0)
    assert (ledger.hourly, ledger.spent()) == (6.0, pytest.approx(12.0))  # whose they are is not told


def test_caps_forecast_and_runway() -> None:
    now = 0.0
    ledger = Ledger(5.0, 8.0, wallet=12.0, clock=lambda: now)
    assert ledger.allows(6.0) == "6.00 $/h is over limits.hourly 5.00"
    assert "over limits.total" in ledger.allows(5.0, hours=2.0)
    assert ledger.allows(4.0, hours=2.0) == ""
    assert ledger.allows(0.0, hours=99.0) == ""
    ledger.apply(changed("p0r0", "creating", 0.0, 4.0))
    tick = ledger.tick(remaining_s=1800.0)
    assert (tick.hourly, tick.forecast, tick.runway_h) == (4.0, pytest.approx(2.0), pytest.approx(3.0))
    assert ledger.tick(remaining_s=9 * 3600.0).forecast == 8.0  # it is torn down at its cap
    assert ledger.breach() == ""
    now = 2 * 3600.0 - 59.0
    assert "reaches limits.total" in ledger.breach()
    poor = Ledger(50.0, 80.0, wallet=1.0, clock=lambda: now)
    assert "wallet" in poor.allows(4.0, hours=2.0)


def test_nothing_may_be_spent_where_the_caps_are_zero_but_free_pods_are_free() -> None:
    ledger = Ledger(clock=lambda: 50.0)
    ledger.apply(changed("p0r0", "creating", 0.0, 0.0))
    assert ledger.breach() == ""
    assert ledger.spent() == 0.0
    ledger.apply(changed("p1r0", "creating", 0.0, 0.01))
    assert "limits.hourly" in ledger.breach()
