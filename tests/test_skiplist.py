"""In CI no test is skipped that the list does not name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from skiplist import LISTED, SWITCH, read_list

HERE = Path(__file__).parent
TESTS = """
import pytest
def test_runs(): pass
@pytest.mark.skipif(True, reason="no such tool here")
def test_by_mark(): pass
def test_inside(): pytest.skip("this kernel refuses: no")
@pytest.fixture
def tool(): pytest.skip("in a fixture")
def test_by_fixture(tool): pass
@pytest.mark.xfail
def test_expected_to_fail(): assert False
"""
MODULE = 'import pytest\npytest.importorskip("uvcc_nowhere")\n'
EVERY = """
test_one.py::test_by_mark | no such tool*
test_one.py::test_in* | this kernel refuses: *   # a comment
test_one.py::test_by_fixture | in a fixture
test_two.py | could not import 'uvcc_nowhere'*
"""


def run(folder: Path, allowed: str | None, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_one.py").write_text(TESTS)
    (folder / "test_two.py").write_text(MODULE)
    env = {k: v for k, v in os.environ.items() if k != SWITCH} | {"PYTHONPATH": str(HERE)}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # all the others cost more than what is tested
    if allowed is not None:
        (folder / "allowed.txt").write_text(allowed)
        env[SWITCH] = str(folder / "allowed.txt")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist.plugin", "-p", "skiplist", "-p", "no:cacheprovider"]
    command += [*options, "."]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=500)


@pytest.mark.parametrize(
    "options", [("-n", "0"), pytest.param(("-n", "2"), marks=pytest.mark.ci(__file__))], ids=["one process", "two"]
)
def test_a_skip_that_is_not_listed_fails_the_session(tmp_path: Path, options: tuple[str, str]) -> None:
    listed = "\n".join(line for line in EVERY.splitlines() if "fixture" not in line and "nowhere" not in line)
    done = run(tmp_path, listed, *options)
    assert done.returncode == 1, done.stdout + done.stderr
    told = done.stdout.partition("skipped, and not listed")[2]
    assert "test_one.py::test_by_fixture: in a fixture" in told
    assert "test_two.py: could not import 'uvcc_nowhere'" in told
    assert "test_by_mark" not in told
    assert "test_inside" not in told


def test_listed_skips_pass_and_without_the_switch_every_skip_does(tmp_path: Path) -> None:
    assert run(tmp_path, EVERY).returncode == 0
    assert run(tmp_path, None).returncode == 0


def test_a_reason_that_is_not_the_listed_one_counts(tmp_path: Path) -> None:
    done = run(tmp_path, EVERY.replace("in a fixture", "for want of time"))
    assert done.returncode == 1
    assert "test_by_fixture: in a fixture" in done.stdout


def test_a_line_that_is_none_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "test_one.py::*\n")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "allowed.txt:1" in done.stderr + done.stdout


def test_the_list_is_short_and_names_tests_that_exist() -> None:
    listed = read_list(LISTED)
    assert len(listed) <= 10
    for test, _ in listed:
        file, _, name = test.partition("::")
        text = (HERE.parent / file).read_text()
        assert name in ("", "*") or f"def {name}(" in text
