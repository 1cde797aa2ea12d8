"""A pod that its provider takes away in mid-run, as spot machines are: every provider that rents can replace it."""

from __future__ import annotations

from pathlib import Path

import pytest
from cloudfake import CloudFake
from cloudworld import RUN, Vendors, cloud_world

from uvcc_console.fleet.cloud.ends import LAG_S


@pytest.mark.parametrize("vendor", Vendors)
async def test_a_pod_that_is_taken_away_is_missed_and_replaced(
    vendor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UVCC_HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / "runs" / RUN.removeprefix("uvcc-")
    folder.mkdir(parents=True)
    async with cloud_world(vendor, folder) as world:
        pods = {p.name: p for p in await world.up(3)}
        taken = pods[f"{RUN}-p1r0"]
        (victim,) = [p for p in world.fake.living if world_name(world.fake, p).startswith(taken.name)]
        if isinstance(world.fake, CloudFake):
            victim.dead = world.clock.now()
        else:
            world.fake.kill(victim)
        await world.clock.sleep(LAG_S)  # a young pod that no list has shown counts as there
        console = world.console()  # whoever replaces it may be another process than the one that rented it
        assert {p.name for p in await console.list(RUN)} == set(pods) - {taken.name}
        await console.delete(taken)  # gone is proven before another is rented
        asked = len(world.fake.asked("create"))
        again = await console.wait_ready(await console.create(world.request(1)))
        assert (again.name, again.provider_id != taken.provider_id) == (taken.name, True)
        assert len(world.fake.asked("create")) == asked + 1
        assert {p.name for p in await console.list(RUN)} == set(pods)
        assert len(world.fake.billing) == 3
        await world.down()
        assert world.fake.billing == []
        await console.close()


def world_name(fake: object, pod: object) -> str:
    """A pod's name at its vendor: the market keeps it in a record."""
    record = getattr(pod, "record", None)
    return str(record["name"] if record else pod.name)
