"""The conformance suite: every scenario with every provider that rents."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

import pytest
import scenarios
from cloudworld import NEVER, RUN, CloudWorld, Vendors, cloud_world

Scenario = Callable[[CloudWorld], Awaitable[None]]
ALL: dict[str, Scenario] = {
    name: play
    for name, play in vars(scenarios).items()
    if iscoroutinefunction(play) and play.__module__ == scenarios.__name__ and name[0] != "_"
}


@pytest.fixture
def own_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UVCC_HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / "runs" / RUN.removeprefix("uvcc-")
    folder.mkdir(parents=True)
    return folder


def _pairs() -> list[Any]:
    """Every scenario with every vendor, but for what cannot happen there.

    The market is played through by tests of its own as well: its part of the suite is run by hand.
    """
    pairs = [(name, vendor) for name in ALL for vendor in Vendors if (name, vendor) not in NEVER]
    return [pytest.param(n, v, marks=[pytest.mark.slow] if v == "prime" else []) for n, v in pairs]


@pytest.mark.parametrize(("name", "vendor"), _pairs())
async def test_scenario(name: str, vendor: str, own_run: Path) -> None:
    async with cloud_world(vendor, own_run) as world:
        await ALL[name](world)
        await world.down()
        assert world.fake.billing == []


def test_there_are_enough_scenarios() -> None:
    assert len(ALL) == 60
    assert {name for name, _ in NEVER} <= set(ALL)
