"""A pytest plugin: the long stories begin first, so that none of them is what everybody waits for in the end.

A story is a module with a test that may take more than ``LONG_S``, as its ``timeout`` says: whole rollouts, which wait
more than they compute. pytest's workers begin with equal runs of consecutive tests; every second one begins with
stories, the others compute beside them, and whoever is through takes from the others' ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final

import pytest

LONG_S: Final = 240.0


def allowed_s(items: Iterable[pytest.Item]) -> float:
    """The longest time that one of them may take; 0 where nothing is said."""
    marks = [mark for item in items for mark in item.iter_markers("timeout")]
    return max((float(mark.args[0]) for mark in marks if mark.args), default=0.0)


def dealt(modules: Sequence[tuple[float, list[pytest.Item]]], workers: int) -> list[pytest.Item]:
    """The tests of modules, with the seconds that they may take, in the order for so many workers."""
    stories = sorted((m for m in modules if m[0] > LONG_S), key=lambda m: -m[0])
    others = [item for allowed, items in modules if allowed <= LONG_S for item in items]
    streams = max(1, workers // 2)
    share = -(-sum(len(items) for _, items in modules) // workers)
    order: list[pytest.Item] = []
    for n in range(workers):
        begun = len(order)
        if n % 2 == 0:
            order += [item for _, items in stories[n // 2 :: streams] for item in items] if n // 2 < streams else []
        taken = max(0, share - (len(order) - begun))
        order += others[:taken]
        del others[:taken]
    return order + others


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        modules = [list(group) for _, group in groupby(items, key=lambda item: item.nodeid.partition("::")[0])]
        items[:] = dealt([(allowed_s(group), group) for group in modules], workers)
