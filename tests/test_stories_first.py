"""Every second of pytest's workers begins with a story, and no test is lost or torn from its module by that."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from stories_first import LONG_S, allowed_s, dealt

STORIES = {3: 300.0, 7: 900.0, 8: 600.0, 11: 400.0}


def modules() -> list[tuple[float, list[list[Any]]]]:
    """Twenty modules of one to twenty tests, each the name of its module and its number, and a unit of its own."""
    return [(STORIES.get(n, 0.0), [[(n, k)] for k in range(1 + n)]) for n in range(20)]


@pytest.mark.parametrize("workers", range(2, 8))
def test_stories_come_first_on_every_second_worker(workers: int) -> None:
    order: list[Any] = dealt(modules(), workers)
    assert sorted(order) == sorted(item for _, units in modules() for unit in units for item in unit)
    begin = [order[len(order) * n // workers][0] for n in range(workers)]
    assert begin[0] == 7  # the longest of all
    assert begin[1] not in STORIES
    whole = [module for module, _ in groupby(order, key=lambda item: item[0])]
    assert all(whole.count(story) == 1 for story in STORIES)
    assert len(whole) <= 20 + workers  # a module is cut where a worker's share ends, and nowhere else


def test_what_a_module_may_take_is_what_its_longest_test_may(request: pytest.FixtureRequest) -> None:
    assert allowed_s([request.node]) == 0.0
    request.node.add_marker(pytest.mark.timeout(LONG_S + 1))
    assert allowed_s([request.node]) == LONG_S + 1
