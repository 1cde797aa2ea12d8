"""A pytest plugin: pytest's workers get, and take from each other, whole units of tests.

A file that makes something once for all of its tests (a run of half a minute, say) is a unit: torn apart, each of two
workers would make it. The files that read all sources of the project are a unit together (``parsed``). Of other files
each test is a unit of its own.
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from unit_scheduling import UnitScheduling

ROOT: Final = Path(__file__).parents[1]
FOR_ALL: Final = re.compile(r'^@pytest\.fixture\(.*scope="(?:module|package)"', re.MULTILINE)
READS_ALL: Final = re.compile(r"^from parsed import ", re.MULTILINE)


@functools.cache
def unit_of_file(path: Path) -> str | None:
    """The unit that a file's tests are in, all of them; None where each is one of its own."""
    try:
        text = path.read_text()
    except OSError:  # an item of another kind, which some plugin made up
        return None
    if READS_ALL.search(text):
        return "all sources"
    return str(path) if FOR_ALL.search(text) else None


def unit(test: str, root: Path = ROOT) -> str:
    """The unit of a test, by the id that pytest gives it."""
    return unit_of_file(root / test.partition("::")[0]) or test


def ends(units: Sequence[str]) -> list[int]:
    """Where a row of tests may be cut: behind which numbers of them a unit ends, the last one included."""
    return [n for n, (one, other) in enumerate(pairwise(units), 1) if one != other] + [len(units)] * bool(units)


def share(units: Sequence[str], workers: int) -> int:
    """How many of the tests of these units the first of so many workers gets: up to the end of a unit."""
    wanted = len(units) // workers
    found = ends(units)
    return found[bisect_left(found, wanted)] if wanted else 0


@pytest.hookimpl(tryfirst=True, optionalhook=True)  # xdist's own has an answer, too
def pytest_xdist_make_scheduler(config: pytest.Config) -> UnitScheduling | None:
    if config.getvalue("dist") != "worksteal":
        return None
    from unit_scheduling import UnitScheduling  # only where tests are shared out: not everybody has xdist

    return UnitScheduling(config, functools.partial(unit, root=config.rootpath))
