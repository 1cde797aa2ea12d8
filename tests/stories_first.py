"""A pytest plugin: the long stories begin first, so that none of them is what everybody waits for in the end.

A story is a module with a test that may take more than ``LONG_S``, as its ``timeout`` says: whole rollouts, which wait
more than they compute. pytest's workers begin with about equal runs of consecutive tests, of whole units (``units``);
every second one begins with stories, the others compute beside them, and whoever is through takes from others' ends.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Final

import pytest
from units import unit

LONG_S: Final = 240.0


def allowed_s(items: Iterable[pytest.Item]) -> float:
    """The longest time that one of them may take; 0 where nothing is said."""
    marks = [mark for item in items for mark in item.iter_markers("timeout")]
    return max((float(mark.args[0]) for mark in marks if mark.args), default=0.0)


def dealt(modules: Sequence[tuple[float, list[list[pytest.Item]]]], workers: int) -> list[pytest.Item]:
    """The tests of modules, by units, with the seconds that they may take, in the order for so many workers."""
    stories = sorted((m for m in modules if m[0] > LONG_S), key=lambda m: -m[0])
    others = deque(unit for allowed, units in modules if allowed <= LONG_S for unit in units)
    streams = max(1, workers // 2)
    left = sum(len(unit) for _, units in modules for unit in units)
    order: list[pytest.Item] = []
    for n in range(workers):
        mine: list[pytest.Item] = []
        if n % 2 == 0 and n // 2 < streams:
            mine += [item for _, units in stories[n // 2 :: streams] for unit in units for item in unit]
        while others and len(mine) < left // (workers - n):
            mine += others.popleft()
        order += mine
        left -= len(mine)
    return order + [item for unit in others for item in unit]


def by_units(items: Iterable[pytest.Item], unit: Callable[[str], str]) -> list[list[list[pytest.Item]]]:
    """The tests by files, and in a file by units; of a unit of several files, all are where the first of them is."""
    found: dict[str, dict[str, list[pytest.Item]]] = {}
    homes: dict[str, str] = {}
    for item in items:
        name = unit(item.nodeid)
        home = homes.setdefault(name, item.nodeid.partition("::")[0])
        found.setdefault(home, {}).setdefault(name, []).append(item)
    return [list(units.values()) for units in found.values()]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        modules = by_units(items, partial(unit, root=config.rootpath))
        items[:] = dealt([(allowed_s(chain(*units)), units) for units in modules], workers)
