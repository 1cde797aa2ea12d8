"""The runbook's options are keys of the profile."""

from __future__ import annotations

from typing import Any

import pytest

from uvcc_console.cli.main import main
from uvcc_console.cli.screen import launch as launching
from uvcc_console.plan.profile import load


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    sets: list[list[str]] = []

    def launch(name: str, pairs: list[str], **options: Any) -> int:
        sets.append(pairs)
        return 0

    monkeypatch.setattr(launching, "launch", launch)
    return sets


def test_the_seeds_command_line_sets_the_profile(launched: list[list[str]]) -> None:
    words = ["--dp-preflight", "false", "--keep-pods", "true", "--attach-prefix", "uvcc-demo-1-"]
    assert main(["rollout", "demo", "--headless", "--yes", *words, "--set", "job.steps=3"]) == 0
    _, profile = load("demo", launched[0])
    assert (profile.dp_preflight, profile.fleet.keep_pods, profile.fleet.attach_prefix) == (False, True, "uvcc-demo-1-")
    assert getattr(profile.job, "steps", 0) == 3


def test_without_them_pods_are_deleted_and_the_network_is_rehearsed(launched: list[list[str]]) -> None:
    assert main(["rollout", "demo", "--headless", "--yes"]) == 0
    _, profile = load("demo", launched[0])
    assert (profile.dp_preflight, profile.fleet.keep_pods, profile.fleet.attach_prefix) == (True, False, "")


def test_a_value_that_is_neither_true_nor_false_is_refused(launched: list[list[str]]) -> None:
    assert main(["rollout", "demo", "--yes", "--keep-pods", "maybe"]) == 2
    assert launched == []
