"""The runbook's options are keys of the profile."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from uvcc_console.cli.main import VERBS, main
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


def test_options_set_keys_of_the_profile(launched: list[list[str]]) -> None:
    words = ["--no-dp-preflight", "--keep-pods", "--attach-prefix", "uvcc-demo-1-"]
    assert main(["rollout", "demo", "--headless", "--yes", *words, "--set", "job.steps=3"]) == 0
    _, profile = load("demo", launched[0])
    assert (profile.dp_preflight, profile.fleet.keep_pods, profile.fleet.attach_prefix) == (False, True, "uvcc-demo-1-")
    assert getattr(profile.job, "steps", 0) == 3


def test_without_them_pods_are_deleted_and_the_network_is_rehearsed(launched: list[list[str]]) -> None:
    assert main(["rollout", "demo", "--headless", "--yes"]) == 0
    _, profile = load("demo", launched[0])
    assert (profile.dp_preflight, profile.fleet.keep_pods, profile.fleet.attach_prefix) == (True, False, "")


@pytest.mark.parametrize("words", [["--keep-pods", "true"], ["--dp-preflight", "false"], ["--no-keep-pods"]])
def test_what_is_on_or_off_takes_no_value(launched: list[list[str]], words: list[str]) -> None:
    with contextlib.suppress(SystemExit):
        assert main(["rollout", "demo", "--yes", *words]) == 2
    assert launched == []


def test_no_verb_offers_true_or_false_as_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in VERBS:
        with contextlib.suppress(SystemExit):
            main([verb, "--help"])
        assert "true or false" not in capsys.readouterr().out, verb
