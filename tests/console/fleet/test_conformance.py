"""The conformance suite: every scenario with every provider that rents."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

import pytest
import scenarios
import volume_scenarios
from cloudworld import NEVER, RUN, WITH_VOLUMES, CloudWorld, Vendors, cloud_world

Scenario = Callable[[CloudWorld], Awaitable[None]]


def _of(module: Any) -> dict[str, Scenario]:
    helpers = ("up", "lost")
    own = ((n, f) for n, f in vars(module).items() if iscoroutinefunction(f) and f.__module__ == module.__name__)
    return {name: play for name, play in own if name[0] != "_" and name not in helpers}


ALL: dict[str, Scenario] = _of(scenarios)
VOLUMES: dict[str, Scenario] = _of(volume_scenarios)


@pytest.fixture
def own_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UVCC_HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / "runs" / RUN.removeprefix("uvcc-")
    folder.mkdir(parents=True)
    return folder


def _pairs() -> list[Any]:
    """Every scenario with every vendor, but for what cannot happen there.

    The market is played through by tests of its own as well: its part of the suite is run by hand. Of the others each
    scenario has two, by turns, and the rest in CI.
    """
    found = []
    for number, name in enumerate((*ALL, *VOLUMES)):
        vendors = [v for v in (Vendors if name in ALL else WITH_VOLUMES) if (name, v) not in NEVER]
        others = [v for v in vendors if v != "prime" or name in VOLUMES]
        turn = {others[(2 * number + k) % len(others)] for k in range(2)}
        for vendor in vendors:
            rest = [] if vendor in turn else [pytest.mark.ci(__file__)]
            found.append(pytest.param(name, vendor, marks=rest if vendor in others else [pytest.mark.slow]))
    return found


@pytest.mark.parametrize(("name", "vendor"), _pairs())
async def test_scenario(name: str, vendor: str, own_run: Path) -> None:
    async with cloud_world(vendor, own_run) as world:
        await (ALL | VOLUMES)[name](world)
        await world.down()
        assert world.fake.billing == []


def test_there_are_enough_scenarios() -> None:
    assert len(ALL) == 61
    assert len(VOLUMES) == 21
    assert {name for name, _ in NEVER} <= set(ALL | VOLUMES)
