"""What CI runs and what it leaves out is written down, and it installs whatever users may install."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from parsed import EVERY_TEST, ROOT, text_of, tree_of

RUN = ROOT / ".ci" / "run"
IN_CI = ROOT / "tests" / "slow_in_ci.txt"
BY_HAND = ROOT / "tests" / "slow_by_hand.txt"
PORTABLE = ROOT / "tests" / "portability" / "tests.txt"
# what stays in the default set from its beginning to its end, whatever else is left to CI
MAIN_JOBS = {
    "a demo of real pods, watched, halted, resumed, verified": (
        "tests/console/test_tmux_demo.py::test_watch_halt_resume_and_end_verified"
    ),
    "a language model's rollout, halted, killed, resumed": (
        "tests/console/rollout/test_rollout_lm.py"
        "::test_halted_killed_and_resumed_it_ends_in_the_bits_of_the_uninterrupted_run"
    ),
    "a private training of three processes, halted, resumed": (
        "tests/engine/private/test_private_worker.py"
        "::test_halt_stops_all_at_one_step_and_resume_ends_in_the_same_result"
    ),
    "a package, verified with its own verifier": (
        "tests/console/report/test_archive.py::test_a_stranger_verifies_it_with_its_own_verifier"
    ),
}
# what an extra brings that CI does not install, and why
LEFT_OUT = {"skypilot": "hundreds of megabytes of clouds' SDKs; the tests use a stand-in with its signatures"}


def files(listed: Path) -> list[str]:
    """The files of a list, a line each; a reason may follow a colon."""
    lines = [line.strip() for line in listed.read_text().splitlines() if line.strip() and not line.startswith("#")]
    return [re.split(r"::|: ", line)[0] for line in lines]


def test_every_slow_test_is_run_in_ci_or_named_as_left_to_a_hand() -> None:
    slow = {
        str(path.relative_to(ROOT))
        for path in EVERY_TEST
        if path.match("test_*.py") and path != Path(__file__) and re.search(r"\bmark\.slow\b", text_of(path))
    }
    assert not set(files(IN_CI)) & set(files(BY_HAND))
    assert slow == {*files(IN_CI), *files(BY_HAND)}


def test_every_file_left_to_a_hand_has_a_reason() -> None:
    lines = [line for line in BY_HAND.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"tests/\S+\.py: \S.{10,}", line) for line in lines)


def marks(node: ast.AST) -> Iterator[tuple[str, list[ast.expr]]]:
    """(name, arguments) of every mark that is named below a node."""
    called = {id(call.func): call.args for call in ast.walk(node) if isinstance(call, ast.Call)}
    for found in ast.walk(node):
        if isinstance(found, ast.Attribute) and isinstance(found.value, ast.Attribute) and found.value.attr == "mark":
            yield found.attr, called.get(id(found), [])


@cache
def by_default(path: Path) -> set[str]:
    """The tests of a file that the default set has, or some cases of."""
    body = tree_of(path).body
    whole = [node for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"]
    if any(name in ("slow", "ci") for node in whole for name, _ in marks(node)):
        return set()

    def left_out(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
        named = (mark.func if isinstance(mark, ast.Call) else mark for mark in node.decorator_list)
        return any(isinstance(mark, ast.Attribute) and mark.attr in ("slow", "ci") for mark in named)

    tests = [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {node.name for node in tests if node.name.startswith("test_") and not left_out(node)}


def test_what_is_left_to_ci_names_a_file_of_the_default_set_that_runs_the_same_code() -> None:
    found = 0
    for path in (path for path in EVERY_TEST if path.match("test_*.py")):
        for name, args in marks(tree_of(path)) if "mark.ci" in text_of(path) else ():
            if name == "ci":
                (cheaper,) = map(ast.unparse, args)
                other = path if cheaper == "__file__" else ROOT / ast.literal_eval(cheaper)
                assert by_default(other), f"{path.relative_to(ROOT)}: no test of {cheaper} is in the default set"
                found += 1
    assert found


def test_ci_runs_the_default_set_and_what_that_leaves_to_it() -> None:
    alone = "tests/engine/transcript/test_mutations.py"
    lines = [re.split(" [#>]", line)[0] for line in RUN.read_text().splitlines()]
    assert f".venv/bin/pytest -m 'not slow' --shift \"$shift\" --ignore {alone}" in lines
    assert f".venv/bin/pytest -n 0 -m ci {alone}" in lines
    assert not by_default(ROOT / alone)
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    assert "-m 'not slow and not ci'" in options


def test_each_commit_has_one_of_three_shifts_of_the_dearer_tests_and_the_whole_can_be_asked_for() -> None:
    text = RUN.read_text()
    assert set(re.findall(r"^ *shift=.*$|^if .*shift=.*$", text, re.MULTILINE)) == {
        "shift=$((UVCC_FUZZ_SEED % 3 + 1))/3",
        'if [ "$whole" = whole ]; then shift=1/1; fi',
    }
    assert text.count('--shift "$shift"') == 2
    asked = subprocess.run([RUN, "everything"], capture_output=True, text=True, check=False, timeout=600)
    assert (asked.returncode, asked.stderr) == (2, "usage: .ci/run [whole]\n")


@pytest.mark.parametrize("job", MAIN_JOBS)
def test_the_default_set_has_each_main_job_from_its_beginning_to_its_end(job: str) -> None:
    file, _, name = MAIN_JOBS[job].partition("::")
    assert name in by_default(ROOT / file)


@pytest.mark.parametrize("listed", [IN_CI, PORTABLE], ids=["slow", "portable"])
def test_ci_runs_its_lists(listed: Path) -> None:
    assert f"@{listed.relative_to(ROOT)}" in RUN.read_text()
    for file in files(listed):
        assert (ROOT / file).exists(), file


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest and the tests import each by its name alone: of two, one file's tests would not run."""
    found = [path.name for path in EVERY_TEST if path.name not in ("conftest.py", "__init__.py")]
    assert {name for name in found if found.count(name) > 1} == set()


def test_ci_installs_what_every_extra_brings() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]

    def names(wanted: list[str]) -> set[str]:
        """The packages of requirements, those of extras that they name included."""
        found: set[str] = set()
        for one in wanted:
            if inner := re.fullmatch(r"uvcc\[([\w,-]+)\]", one):
                for extra in inner[1].split(","):
                    found |= names(extras[extra])
            else:
                found.add(re.match(r"[\w.-]+", one)[0].lower())  # type: ignore[index]
        return found

    asked = re.search(r"pip install -q '\.\[([\w,-]+)\]'", RUN.read_text())
    assert asked is not None
    installed = names([f"uvcc[{asked[1]}]", *project["dependencies"]])
    for extra, wanted in extras.items():
        missing = names(wanted) - installed
        assert not missing or extra in LEFT_OUT, (extra, missing)
    assert set(LEFT_OUT) <= set(extras)
