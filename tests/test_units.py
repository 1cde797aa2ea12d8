"""What is made once for a file's tests is made in one of pytest's workers, whoever takes tests from whom."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import pytest
from stories_first import by_units, dealt
from unit_scheduling import KEPT, UnitScheduling, to_take
from units import ROOT, ends, share, unit

HERE: Final = Path(__file__).parent
WHOLE: Final = """
import os, pytest
@pytest.fixture(scope="module")
def made():
    with open("made", "a") as file:
        file.write(f"{__name__}\\n")
@pytest.mark.parametrize("n", range(9))
def test_with_it(made, n): pass
"""
APART: Final = "import pytest\n@pytest.mark.parametrize('n', range(30))\ndef test_alone(n): pass\n"


def test_a_file_with_something_for_all_of_its_tests_is_one_unit() -> None:
    whole = "tests/engine/train/test_lm_export.py"
    assert unit(f"{whole}::test_one") == unit(f"{whole}::test_other[3]") == str(ROOT / whole)
    assert unit("tests/test_shifts.py::test_a_shift_is_read") == "tests/test_shifts.py::test_a_shift_is_read"
    assert unit("tests/test_nowhere.py::test_x") == "tests/test_nowhere.py::test_x"


def test_files_that_read_all_sources_are_one_unit_and_are_brought_together() -> None:
    names = ["tests/test_words.py::a", "tests/test_shifts.py::b", "tests/test_names.py::c", "tests/test_shifts.py::d"]
    assert unit(names[0]) == unit(names[2])
    items: list[Any] = [Node(name) for name in names]
    found = [[[item.nodeid[-1] for item in part] for part in file] for file in by_units(items, unit)]
    assert found == [[["a", "c"]], [["b"], ["d"]]]


def test_a_row_is_cut_where_a_unit_ends() -> None:
    assert ends([]) == []
    assert ends(list("aaabcc")) == [3, 4, 6]
    assert share(list("aaabcc"), 3) == 3
    assert share(list("aaabcc"), 1) == 6
    assert share(list("a"), 2) == 0


def test_about_half_is_taken_but_nothing_that_was_begun() -> None:
    assert to_take(list("abcdefgh")) == 4
    assert to_take(list("abccccccc")) == 7  # the second begins when the first is through
    assert to_take(list("aaaaaab")) == 1
    assert to_take(list("aaaaaa")) == 0
    assert to_take(list("ab")) == 0


class Node:
    """A test, by its id; and a worker that runs what it is sent, as far as the scheduler sees it."""

    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid
        self.queue: list[int] = []
        self.ran: list[int] = []
        self.asked: list[int] | None = None
        self.shutting_down = False

    def send_runtest_some(self, tests: list[int]) -> None:
        self.queue += tests

    def send_steal(self, tests: list[int]) -> None:
        self.asked = tests

    def shutdown(self) -> None:
        self.shutting_down = True


def run(units: list[str], workers: int, seed: int) -> list[list[str]]:
    """What each worker ran, with a seeded order of who is how fast."""
    chance = random.Random(seed)
    scheduler: Any = UnitScheduling.__new__(UnitScheduling)
    nodes = [Node(str(n)) for n in range(workers)]
    scheduler.collection, scheduler.pending = [f"{name}::{n}" for n, name in enumerate(units)], [*range(len(units))]
    scheduler.node2pending, scheduler.steal_requested_from_node = {node: [] for node in nodes}, None
    scheduler.unit = lambda test: test.partition("::")[0]
    scheduler.check_schedule()
    while able := [n for n in nodes if n.asked or len(n.queue) >= KEPT or (n.queue and n.shutting_down)]:
        node = chance.choice(able)
        if node.asked and chance.random() < 0.5:
            gone = set(node.asked) if set(node.asked) <= set(node.queue[1:]) else set()  # all of them, or none
            node.queue, node.asked = [t for t in node.queue if t not in gone], None
            scheduler.remove_pending_tests_from_node(node, sorted(gone))
        elif node.queue:
            node.ran.append(node.queue.pop(0))
            scheduler.mark_test_complete(node, node.ran[-1])
    return [[units[test] for test in node.ran] for node in nodes]


@pytest.mark.parametrize("workers", [1, 2, 4, 7])
def test_each_unit_is_run_by_one_worker_and_every_test_once(workers: int) -> None:
    for seed in range(40):
        chance = random.Random(seed)
        sizes = [chance.choice([1, 1, 1, 1, 5, 30]) for _ in range(60)]
        units = [name for n, size in enumerate(sizes) for name in [f"u{n}"] * size]
        ran = run(units, workers, seed)
        assert sorted(name for one in ran for name in one) == sorted(units)
        torn = [name for n, size in enumerate(sizes) if sum((name := f"u{n}") in one for one in ran) != 1]
        assert torn == []
        assert all(len([*groupby(one)]) == len(set(one)) for one in ran)  # one after the other


@pytest.mark.parametrize("workers", range(2, 8))
def test_a_worker_begins_where_the_order_that_has_stories_first_meant_it_to(workers: int) -> None:
    sizes = [1 + n % 7 for n in range(200)]
    modules: list[Any] = [(500.0 * (n % 40 == 0), [[f"u{n}"] * size]) for n, size in enumerate(sizes)]
    left: list[Any] = dealt(modules, workers)
    stories = {name for allowed, ((name, *_),) in modules if allowed}
    for n in range(workers):
        assert (left[0] in stories) == (n % 2 == 0 and n // 2 < workers // 2)
        del left[: share(left, workers - n)]
    assert left == []


def test_a_fixture_of_a_module_is_made_once(tmp_path: Path) -> None:
    for n in range(4):
        (tmp_path / f"test_whole_{n}.py").write_text(WHOLE)
        (tmp_path / f"test_apart_{n}.py").write_text(APART)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "3", "--dist", "worksteal", "-p", "no:cacheprovider"]
    env = os.environ | {"PYTHONPATH": str(HERE), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [*command, "-p", "xdist.plugin", "-p", "units", "-p", "stories_first", "."],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert "156 passed" in done.stdout, done.stdout + done.stderr
    assert sorted((tmp_path / "made").read_text().split()) == [f"test_whole_{n}" for n in range(4)]
