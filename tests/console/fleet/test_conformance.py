"""The conformance suite: every scenario with every provider that rents."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from inspect import iscoroutinefunction
from pathlib import Path

import pytest
import scenarios
from cloudworld import RUN, CloudWorld, Vendors, cloud_world

Scenario = Callable[[CloudWorld], Awaitable[None]]
ALL: dict[str, Scenario] = {
    name: play for name, play in vars(scenarios).items() if iscoroutinefunction(play) and not name.startswith("_")
}


@pytest.fixture
def own_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UVCC_HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / "runs" / RUN.removeprefix("uvcc-")
    folder.mkdir(parents=True)
    return folder


# the market is played through by its own tests as well: its part of the suite is run by hand
@pytest.mark.parametrize(
    "vendor", [pytest.param("prime", marks=pytest.mark.slow), *(v for v in Vendors if v != "prime")]
)
@pytest.mark.parametrize("name", list(ALL))
async def test_scenario(name: str, vendor: str, own_run: Path) -> None:
    async with cloud_world(vendor, own_run) as world:
        await ALL[name](world)
        await world.down()
        assert world.fake.billing == []


def test_there_are_enough_scenarios() -> None:
    assert len(ALL) >= 50
