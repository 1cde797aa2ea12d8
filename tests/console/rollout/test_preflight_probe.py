"""What a pod's torch can do is asked again until the pod has imported it, where that decides something."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import pytest

from uvcc_console.rollout.context import Member
from uvcc_console.rollout.stages.fleet import preflight

GPU = {"name": "H100"}
DONE = {"torch": "2.7.0", "cuda": "12.6"}


def asked(monkeypatch: pytest.MonkeyPatch, *answers: dict[str, Any], on_gpus: bool) -> tuple[dict[str, Any], int]:
    """What the probe says in the end, and how often the pod was asked."""
    left: Iterator[dict[str, Any]] = iter(answers)
    count = 0

    async def probe(member: Member) -> dict[str, Any]:
        nonlocal count
        count += 1
        return next(left)

    monkeypatch.setattr(preflight, "probe_member", probe)
    monkeypatch.setattr(preflight, "IMPORT_LOOK_S", 0.0)
    return asyncio.run(preflight.probe_settled(cast(Member, None), on_gpus)), count


def test_a_pod_that_still_imports_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    importing = {"gpus": [GPU], "imports": {}}
    found, count = asked(monkeypatch, importing, importing, importing | {"imports": DONE}, on_gpus=True)
    assert (found["imports"], count) == (DONE, 3)


@pytest.mark.parametrize(("gpus", "on_gpus"), [([], True), ([GPU], False)])
def test_nobody_waits_for_what_decides_nothing(gpus: list[Any], on_gpus: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, {"gpus": gpus, "imports": {}}, on_gpus=on_gpus)[1] == 1


def test_a_pod_that_never_answers_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "IMPORT_LOOKS", 3)
    assert asked(monkeypatch, *[{"gpus": [GPU], "imports": {}}] * 9, on_gpus=True)[1] == 4
