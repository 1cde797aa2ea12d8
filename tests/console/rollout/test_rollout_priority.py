"""Workers of local pods give way to the console that watches them."""

from __future__ import annotations

import pytest

from uvcc_console.rollout.priority import NICE, SHARED_BY, environment, give_way, niceness, stretch
from uvcc_engine.agent.processes import child
from uvcc_engine.worker import compute_setup


@pytest.mark.parametrize(("workers", "cores", "level"), [(1, 2, 0), (2, 2, 0), (3, 2, 2), (24, 2, 11), (192, 2, 19)])
def test_all_workers_together_weigh_as_much_as_one_process_a_core(workers: int, cores: int, level: int) -> None:
    assert niceness(workers, cores) == level
    weight = 1.25**-level * workers / cores  # as a share of an ordinary process on that core
    assert weight <= 1.5


def test_only_local_pods_share_the_machine() -> None:
    assert environment("local", 192, 8, 2) == {NICE: "19", SHARED_BY: "192"}
    assert environment("local", 2, 1, 2) == {SHARED_BY: "2"}
    assert environment("prime", 192, 8, 2) == {SHARED_BY: "8"}
    assert NICE == child.NICE
    assert SHARED_BY == compute_setup.SHARED_BY


def test_what_a_bootstrap_starts_on_all_pods_at_once_gives_way_too() -> None:
    assert give_way("local", 24, 2) == niceness(24, 2) > 0
    assert give_way("inventory", 24, 2) == give_way("prime", 24, 2) == 0


def test_time_limits_grow_where_many_share_the_cores_and_only_there() -> None:
    assert stretch("local", 3, 2) == stretch("local", 6, 2) == stretch("prime", 192, 1) == 1.0
    assert stretch("local", 24, 2) == 4.0
    assert stretch("local", 24, 1) == stretch("local", 192, 2) == 8.0
