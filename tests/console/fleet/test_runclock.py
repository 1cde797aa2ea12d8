"""The run's clock: set the machine's clock as you like, nothing ends early and nothing lives longer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from uvcc_console.core import events as ev
from uvcc_console.fleet.local_provider import LocalProvider
from uvcc_console.fleet.runclock import FILE, Machine, RunClock
from uvcc_console.fleet.spend_ledger import Ledger
from uvcc_console.plan.schema import LimitsPart
from uvcc_console.rollout.spending import Spending

BORN = 1_795_000_000.0
HOUR = 3600.0


@dataclass
class Times:
    """One machine: its boot, its counter since then, its wall clock."""

    boot: str = "boot-1"
    up: float = 5000.0
    wall: float = BORN

    def machine(self) -> Machine:
        return Machine(lambda: self.boot, lambda: self.up, lambda: self.wall)

    def goes_by(self, seconds: float) -> None:
        self.up += seconds
        self.wall += seconds


@pytest.mark.parametrize("jump", [5 * HOUR, -5 * HOUR, 365 * 24 * HOUR])
def test_a_jump_of_the_wall_clock_moves_nothing_in_any_process(run_dir: Path, jump: float) -> None:
    times = Times()
    first = RunClock(run_dir, times.machine())
    times.goes_by(100.0)
    times.wall += jump
    assert first.now() == BORN + 100.0
    assert RunClock(run_dir, times.machine()).now() == BORN + 100.0
    times.goes_by(50.0)
    assert first.now() == RunClock(run_dir, times.machine()).now() == BORN + 150.0


def test_after_a_reboot_the_wall_clock_counts_but_never_backwards(run_dir: Path) -> None:
    times = Times()
    clock = RunClock(run_dir, times.machine())
    times.goes_by(1000.0)
    assert clock.now() == BORN + 1000.0
    times.boot, times.up, times.wall = "boot-2", 20.0, BORN + 1300.0
    assert RunClock(run_dir, times.machine()).now() == BORN + 1300.0
    times.goes_by(10.0)
    assert RunClock(run_dir, times.machine()).now() == BORN + 1310.0
    times.boot, times.up, times.wall = "boot-3", 20.0, BORN - 9 * HOUR  # a dead battery
    assert RunClock(run_dir, times.machine()).now() >= BORN + 1300.0


@pytest.mark.parametrize("text", ["", "{", "[]", '{"boot": "boot-1", "up": "NaN", "at": 1, "last": 1}', "\x00"])
def test_a_broken_anchor_is_made_anew_and_no_error(run_dir: Path, text: str) -> None:
    (run_dir / FILE).write_text(text)
    times = Times()
    assert RunClock(run_dir, times.machine()).now() == BORN
    assert json.loads((run_dir / FILE).read_text())["boot"] == "boot-1"
    assert RunClock(run_dir / "nowhere", times.machine()).now() == BORN


def _spending(run_dir: Path, times: Times, **limits: float) -> Spending:
    part = LimitsPart(hourly=9.0, total=5.0, ttl=limits.get("ttl", HOUR))
    return Spending(part, LocalProvider(run_dir), RunClock(run_dir, times.machine()), BORN)


def _pod(state: str, ts: float, price: float = 1.0) -> ev.PodChanged:
    return ev.PodChanged(ts=ts, pod="p0r0", party=0, replica=0, provider="x", state=state, price_hr=price)


@pytest.mark.parametrize("jump", [7 * HOUR, -7 * HOUR])
def test_neither_the_time_to_live_nor_the_cap_is_met_by_a_jump(run_dir: Path, jump: float) -> None:
    times = Times()
    spending = _spending(run_dir, times)
    spending.heard(_pod("creating", times.wall))
    times.goes_by(600.0)
    times.wall += jump
    assert spending.over() == ""
    assert spending.ledger.spent() == pytest.approx(1.0 / 6)
    times.goes_by(HOUR - 601.0)
    assert spending.over() == ""
    times.goes_by(2.0)
    assert "time to live" in spending.over()


@pytest.mark.parametrize("jump", [7 * HOUR, -7 * HOUR])
def test_the_next_process_counts_on_from_a_journal_with_a_jump_in_it(run_dir: Path, jump: float) -> None:
    times = Times()
    spending = _spending(run_dir, times, ttl=24 * HOUR)
    journal: list[ev.Event] = []

    def say(event: ev.PodChanged) -> None:
        journal.append(event)
        spending.heard(event)

    def tick() -> None:
        (said,) = [e for e in spending.look() if isinstance(e, ev.CostTick)]
        journal.append(ev.CostTick(**{**ev.to_json(said), "ts": times.wall}))

    say(_pod("creating", times.wall))
    times.goes_by(600.0)
    tick()
    times.wall += jump
    times.goes_by(5.0)
    tick()
    say(_pod("gone", times.wall))
    say(_pod("creating", times.wall, 2.0))
    times.goes_by(1200.0)
    tick()
    successor = _spending(run_dir, times, ttl=24 * HOUR)
    successor.replay(journal)
    assert successor.ledger.spent() == pytest.approx(spending.ledger.spent(), rel=0.01)
    assert successor.over() == ""


def test_a_pod_without_a_price_is_metered_from_its_creation_once_the_price_is_known() -> None:
    now = HOUR
    ledger = Ledger(10.0, 10.0, clock=lambda: now)
    ledger.apply(_pod("creating", 0.0, 0.0))
    ledger.apply(_pod("ready", 1800.0, 2.0))
    assert ledger.spent() == pytest.approx(2.0)


def test_what_a_run_spends_is_told_while_it_has_a_pod_though_nothing_costs(run_dir: Path) -> None:
    """A console takes a journal that stands still for a conductor that does: a preflight that takes minutes is none."""
    spending = _spending(run_dir, Times())
    assert not spending.look()
    spending.heard(_pod("agent", BORN, price=0.0))
    assert [e.kind for e in spending.look()] == [ev.CostTick.kind]
    spending.heard(_pod("gone", BORN, price=0.0))
    assert not spending.look()
