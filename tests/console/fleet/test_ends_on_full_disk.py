"""A full disk keeps no rented pod from being ended, nor from being told as ended."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from primeworld import World, new_world

from uvcc_console.fleet.cloud import intents
from uvcc_engine.contract.errors import UvccError


@pytest.fixture
async def world(run_dir: Path) -> AsyncIterator[World]:
    async with new_world(run_dir) as made:
        yield made


def _full(path: Path, row: object, hint: str) -> None:
    raise UvccError(f"cannot write {path}: No space left on device", hint)


async def test_every_pod_is_proven_gone_and_written_down_once_there_is_room(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    pods = await world.up()
    with monkeypatch.context() as patch:
        patch.setattr(intents, "append_synced", _full)
        for pod in pods:
            await world.provider.delete(pod)
        assert world.fake.billing == []
        assert await world.provider.list("uvcc-") == []
        assert await world.provider.prove(ended=True) == []
        with pytest.raises(UvccError, match="No space left"):  # what may cost money is on disk first, as ever
            await world.provider.create(world.requests()[0])
    assert world.fake.billing == []
    assert await world.provider.prove(ended=True) == []
    assert world.provider.books().hourly == 0.0
    assert world.provider.begun("uvcc-") == set()


async def test_a_volume_that_is_gone_is_not_told_as_one_that_costs_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.fleet["volume"] = {"size_gb": 100}
    world.provider = world.console()
    await world.up()
    assert len(world.fake.disks) == 3
    with monkeypatch.context() as patch:
        patch.setattr(intents, "append_synced", _full)
        await world.down()
        assert await world.provider.prove(ended=True) == []
    assert world.fake.disks == {}
    assert await world.provider.prove(ended=True) == []
    assert intents.unended(world.run_dir) == []
