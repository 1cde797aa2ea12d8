"""What CI runs and what it leaves out is written down, and it installs whatever users may install."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUN = ROOT / ".ci" / "run"
IN_CI = ROOT / "tests" / "slow_in_ci.txt"
BY_HAND = ROOT / "tests" / "slow_by_hand.txt"
PORTABLE = ROOT / "tests" / "portability" / "tests.txt"
# what an extra brings that CI does not install, and why
LEFT_OUT = {"skypilot": "hundreds of megabytes of clouds' SDKs; the tests use a stand-in with its signatures"}


def files(listed: Path) -> list[str]:
    """The files of a list, a line each; a reason may follow a colon."""
    lines = [line.strip() for line in listed.read_text().splitlines() if line.strip() and not line.startswith("#")]
    return [re.split(r"::|: ", line)[0] for line in lines]


def test_every_slow_test_is_run_in_ci_or_named_as_left_to_a_hand() -> None:
    slow = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if path != Path(__file__) and re.search(r"\bmark\.slow\b", path.read_text())
    }
    assert not set(files(IN_CI)) & set(files(BY_HAND))
    assert slow == {*files(IN_CI), *files(BY_HAND)}


def test_every_file_left_to_a_hand_has_a_reason() -> None:
    lines = [line for line in BY_HAND.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"tests/\S+\.py: \S.{10,}", line) for line in lines)


@pytest.mark.parametrize("listed", [IN_CI, PORTABLE], ids=["slow", "portable"])
def test_ci_runs_its_lists(listed: Path) -> None:
    assert f"@{listed.relative_to(ROOT)}" in RUN.read_text()
    for file in files(listed):
        assert (ROOT / file).exists(), file


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
