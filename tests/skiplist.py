"""A pytest plugin: no test is skipped unseen.

With ``UVCC_STRICT_SKIPS=1``, which CI sets, every skip must stand in ``allowed_skips.txt`` (or in the file that the
variable names), and one that does not fails the session.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

SWITCH = "UVCC_STRICT_SKIPS"
LISTED = Path(__file__).with_name("allowed_skips.txt")


def read_list(path: Path) -> list[tuple[str, str]]:
    """(pattern of test ids, pattern of reasons) per line ``PATTERN | PATTERN``; ``#`` begins a comment."""
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        test, bar, reason = (part.strip() for part in text.partition("|"))
        if not (test and bar and reason):
            raise pytest.UsageError(f"{path}:{number}: write it as TESTS | REASON, not {text!r}")
        found.append((test, reason))
    return found


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why it was skipped, as it was written in the test."""
    said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return said.removeprefix("Skipped: ")


class SkipList:
    """Holds every skip of a session against the list."""

    def __init__(self, allowed: Sequence[tuple[str, str]]) -> None:
        self._allowed = allowed
        self.unlisted: dict[str, str] = {}

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = reason_of(report)
        if not any(fnmatchcase(report.nodeid, test) and fnmatchcase(reason, why) for test, why in self._allowed):
            self.unlisted[report.nodeid] = reason

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unlisted and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.unlisted:
            terminalreporter.section("skipped, and not listed", red=True)
            for test, reason in sorted(self.unlisted.items()):
                terminalreporter.line(f"{test}: {reason}")


def pytest_configure(config: pytest.Config) -> None:
    wanted = os.environ.get(SWITCH, "")
    if wanted and not hasattr(config, "workerinput"):  # the session that starts the others hears of every skip
        path = LISTED if wanted == "1" else Path(wanted)
        config.pluginmanager.register(SkipList(read_list(path)), "skiplist-session")
