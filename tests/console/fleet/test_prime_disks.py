"""Disks of the Prime market as volumes, beside the conformance suite: sizes, prices, and the market's bill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cloudworld import RUN, CloudWorld, cloud_world
from marketschema import wrong_body

from uvcc_console.cli.view.costs import rows_of
from uvcc_console.fleet.cloud.intents import VOLUMES_FILE, Intents, Try, mount_of
from uvcc_console.fleet.prime.disks import DiskVolumes
from uvcc_console.fleet.prime.models import DiskOffer
from uvcc_console.fleet.provider import NoOffer, Pod
from uvcc_engine.contract.errors import UvccError

NAME = f"{RUN}-p0r0"


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UVCC_HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / "runs" / RUN.removeprefix("uvcc-")
    folder.mkdir(parents=True)
    return folder


async def up(w: CloudWorld, **volume: Any) -> Pod:
    w.provider = w.console(volume={"size_gb": 95, **volume})
    (pod,) = await w.up()
    return pod


def book(w: CloudWorld) -> list[Try]:
    return list(Intents(w.run_dir / VOLUMES_FILE).tries().values())


async def test_a_disk_has_a_size_of_its_offer_and_the_price_of_the_market_s_list(run_dir: Path) -> None:
    async with cloud_world("prime", run_dir) as w:
        without = (await w.provider.quote([w.request()])).hourly
        pod = await up(w)
        (asked,) = w.fake.asked("new disk")
        assert not wrong_body("POST", "/api/v1/disks/", asked)
        assert asked["disk"]["size"] == 100  # ninety-five, in steps of ten
        assert (asked["disk"]["dataCenterId"], asked["provider"]["type"]) == ("CANADA-1", "hyperstack")
        (made,) = w.fake.asked("create")
        assert (made["disks"], made["pod"]["dataCenterId"]) == ([*w.fake.disks], "CANADA-1")
        quote = await w.provider.quote([w.request()])
        assert quote.hourly == pytest.approx(without + 0.01)  # 0.0001 $ a GB and hour
        assert quote.lines[0].offer["volume_hr"] == 0.01
        assert mount_of(run_dir, NAME) == "/workspace"
        await w.clock.sleep(7200.0)
        await w.provider.delete(pod)
        await w.down()
        (row,) = [r for r in rows_of(run_dir) if r["pod"] == "p0r0 disk"]
        assert row["billed"] == pytest.approx(row["ours"], rel=0.02)  # the market tells the bill of a disk as well
        assert row["verdict"] == "agrees"


async def test_one_that_comes_dearer_than_quoted_is_given_back(run_dir: Path) -> None:
    async with cloud_world("prime", run_dir) as w:
        w.fake.disk_price_factor = 1.5
        with pytest.raises(UvccError, match=r"volume costs 0\.0150 \$/h, quoted were 0\.0100"):
            await up(w)
        assert (w.fake.disks, w.fake.asked("create"), w.fake.billing) == ({}, [], [])
        assert {t.outcome for t in book(w)} == {"gone"}


async def test_a_disk_that_is_not_ready_is_waited_for_and_one_that_never_is_ends(run_dir: Path) -> None:
    async with cloud_world("prime", run_dir) as w:
        w.fake.disk_boot_s = 120.0
        await up(w)
        assert len(w.fake.asked("create")) == 1  # it was not asked for too early
        await w.down()
        w.fake.disk_boot_s = 1e9
        w.provider = w.console(volume={"size_gb": 100})
        with pytest.raises(UvccError, match="not ready for a pod"):
            await w.provider.create(w.request(1))
        await w.down()
        assert w.fake.billing == []


async def test_without_a_disk_large_enough_the_funnel_says_so(run_dir: Path) -> None:
    async with cloud_world("prime", run_dir) as w:
        w.provider = w.console(volume={"size_gb": 4050})
        with pytest.raises(NoOffer, match="volume of 4050 GB removed the last"):
            await w.provider.quote([w.request()])
        assert w.fake.asked("create") == w.fake.asked("new disk") == []


async def test_a_named_disk_is_found_where_the_market_can_use_it(run_dir: Path) -> None:
    async with cloud_world("prime", run_dir) as w:
        disk = w.fake.new_disk("ours", 100, "crusoecloud/us-east1-a")
        w.provider = w.console(volume={"name": "ours"})
        (pod,) = await w.up()
        assert (pod.provider, w.fake.uses(disk)) == ("crusoecloud", True)
        await w.down()
        for row in w.fake.offers:
            row["provider"] = row["provider"].replace("crusoecloud", "datacrunch")
        w.provider = w.console(volume={"name": "ours"})
        with pytest.raises(NoOffer, match="offers nothing now that could have the disk ours"):
            await w.provider.quote([w.request()])
        w.fake.disks.clear()


async def test_a_pod_that_does_not_say_where_it_has_its_disk_is_written_down_without(run_dir: Path) -> None:
    async with cloud_world("prime", run_dir) as w:
        w.fake.drifts = True
        for row in w.fake.offers:
            row["sim"] = {"timeline": [(0.0, {"attachedResources": None})]}
        grown = w.fake.grow
        w.fake.grow = lambda r, sim, age, disks: grown(r, sim, age, ())
        await up(w)
        assert mount_of(run_dir, NAME) == ""
        assert [t.held for t in book(w)] == [True]
        await w.down()


@pytest.mark.parametrize(
    ("spec", "wanted", "size"),
    [
        ({"minCount": 50, "maxCount": 200, "step": 10, "pricePerUnit": 0.1}, 10, 50),
        ({"minCount": 50, "maxCount": 200, "step": 10, "pricePerUnit": 0.1}, 191, 200),
        ({"minCount": 50, "maxCount": 200, "step": 10, "pricePerUnit": 0.1}, 201, 0),
        ({"defaultCount": 100, "pricePerUnit": 0.1}, 80, 80),
        ({"minCount": 50, "maxCount": 200, "pricePerUnit": None}, 60, 0),  # who names no price is not asked
        (None, 60, 0),
    ],
)
def test_sizes_go_in_the_offer_s_steps(spec: Any, wanted: int, size: int) -> None:
    row = {"provider": "p", "dataCenter": "d", "spec": spec, "stockStatus": "Available"}
    assert DiskOffer.model_validate(row).size(wanted) == size
    assert DiskOffer.model_validate(row | {"stockStatus": "Unavailable"}).size(wanted) == 0


async def test_of_two_disks_in_one_place_the_cheaper_counts(run_dir: Path) -> None:
    async with cloud_world("prime", run_dir) as w:
        client: Any = w.client()
        assert isinstance(client, DiskVolumes)
        spec = {"minCount": 1, "maxCount": 500, "step": 1}
        rows = [
            {"provider": "hyperstack", "dataCenter": "CANADA-1", "cloudId": c, "spec": spec | {"pricePerUnit": p}}
            for c, p in (("dear", 0.3), ("cheap", 0.1), ("middling", 0.2))
        ]
        client.disks_on_offer([DiskOffer.model_validate(json.loads(json.dumps(r))) for r in rows], 100)
        (offer, *_) = [o for o in await client.offers(gpu_type="H100_80GB") if o.data_center == "CANADA-1"]
        place = client.volume_at(offer, 100)
        assert (place.more["disk"]["cloudId"], place.price) == ("cheap", pytest.approx(73.0))
