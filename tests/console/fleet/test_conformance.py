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

    The market is played through by tests of its own as well: its part of the suite is run by hand.
    """
    pairs = [(name, vendor) for name in ALL for vendor in Vendors if (name, vendor) not in NEVER]
    pairs += [(name, vendor) for name in VOLUMES for vendor in WITH_VOLUMES if (name, vendor) not in NEVER]
    by_hand = [pytest.mark.slow]
    return [pytest.param(n, v, marks=by_hand if v == "prime" and n in ALL else []) for n, v in pairs]


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
