"""A pytest plugin: ``--shift 2/3`` runs the dearer tests of every third file only, and all others.

The dearer ones are those marked ``ci`` or ``slow``. The files that have some are dealt by their names, one to each
shift in turn; the others' tests are deselected. ``.ci/run`` takes another shift with another commit.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

import pytest

DEARER: Final = ("ci", "slow")


def read_shift(text: str) -> tuple[int, int]:
    """(number, of how many) as ``2/3`` says it; raises ``pytest.UsageError`` for what is no shift."""
    found = re.fullmatch(r"([1-9]\d?)/([1-9]\d?)", text)
    if found is None or int(found[1]) > int(found[2]):
        raise pytest.UsageError(f"--shift {text}: write the number of a shift and of how many, such as 2/3")
    return int(found[1]), int(found[2])


def dealt(files: Collection[str], shift: tuple[int, int]) -> set[str]:
    """What a shift takes of the files."""
    number, shifts = shift
    return set(sorted(files)[number - 1 :: shifts])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shift", metavar="N/M", help="of the tests marked ci or slow only those of the N-th of M shifts")


def pytest_report_header(config: pytest.Config) -> str | None:
    asked: str | None = config.getoption("shift")
    return asked and f"shift {asked}: of {read_shift(asked)[1]} files with tests marked ci or slow, those of one"


@pytest.hookimpl(trylast=True)  # behind -m, which says what is selected at all
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked: str | None = config.getoption("shift")
    if asked is None:
        return
    dearer = {item: str(item.path) for item in items if any(item.get_closest_marker(name) for name in DEARER)}
    ours = dealt(set(dearer.values()), read_shift(asked))
    left = [item for item, file in dearer.items() if file not in ours]
    gone = set(left)
    items[:] = [item for item in items if item not in gone]
    config.hook.pytest_deselected(items=left)
