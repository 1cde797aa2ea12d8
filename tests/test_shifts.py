"""Every dearer test is in one shift, and all shifts have the others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from shifts import dealt, read_shift

HERE = Path(__file__).parent
TESTS = """
import pytest
dear = pytest.mark
def test_cheap(): pass
@pytest.mark.ci(__file__)
def test_left_to_ci(): pass
@dear.slow
@pytest.mark.parametrize("n", range(2))
def test_slow(n): pass
"""
CHEAP = "def test_cheap(): pass\n"
INI = "[pytest]\nmarkers = ci(file): dearer\n slow: dearer\n"


def run(folder: Path, *options: str) -> set[str]:
    """The tests that ran of five files with dearer tests and one without."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "shifts", "-p", "no:cacheprovider", *options, "."]
    env = os.environ | {"PYTHONPATH": str(HERE), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # which cost more than it does
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True, timeout=500)
    return set(re.findall(r"(test_\w+\.py::\S+) PASSED", done.stdout))


@pytest.mark.parametrize("chosen", ["not slow", pytest.param("slow or not slow", marks=pytest.mark.ci(__file__))])
def test_the_shifts_share_the_dearer_tests_by_files(tmp_path: Path, chosen: str) -> None:
    (tmp_path / "pytest.ini").write_text(INI)
    for n in range(5):
        (tmp_path / f"test_{n}.py").write_text(TESTS)
    (tmp_path / "test_cheap.py").write_text(CHEAP)
    whole = run(tmp_path, "-m", chosen)
    shifts = [run(tmp_path, "-m", chosen, "--shift", f"{n}/2") for n in (1, 2)]
    cheap = {test for test in whole if "cheap" in test}
    assert set.union(*shifts) == whole
    assert shifts[0] & shifts[1] == cheap
    files = [{test.partition("::")[0] for test in shift - cheap} for shift in shifts]
    assert [len(one) for one in files] == [3, 2]


@pytest.mark.parametrize("shifts", range(1, 6))
def test_the_shifts_are_of_about_one_size_and_complete(shifts: int) -> None:
    files = {f"test_{n}.py" for n in range(17)}
    found = [dealt(files, (n, shifts)) for n in range(1, shifts + 1)]
    assert set.union(*found) == files
    assert sum(map(len, found)) == len(files)
    assert all(abs(len(one) - len(other)) <= 1 for one, other in pairwise(found))


@pytest.mark.parametrize("text", ["", "2", "0/3", "4/3", "1/0", "a/b", "1/3/5", " 1/3", "1/100"])
def test_what_is_no_shift_is_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match="such as 2/3"):
        read_shift(text)


def test_a_shift_is_read() -> None:
    assert read_shift("3/12") == (3, 12)
