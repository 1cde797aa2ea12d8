"""What every provider with volumes must bear: scenarios of the conformance suite, each in one vendor's world."""

from __future__ import annotations

from typing import Any

import pytest
from cloudworld import RUN, CloudWorld

from uvcc_console.fleet.cloud.calls import CloudRefused
from uvcc_console.fleet.cloud.ends import LAG_S
from uvcc_console.fleet.cloud.guard import OverCap
from uvcc_console.fleet.cloud.intents import VOLUMES_FILE, Intents, Try, unended
from uvcc_console.fleet.cloud.saga import CloudProvider
from uvcc_console.fleet.provider import Caps, Pod
from uvcc_engine.contract.errors import UvccError

VOLUME = {"size_gb": 100, "price": 7.3}  # a dollar an hour
NAME = f"{RUN}-p0r0"


def console(w: CloudWorld, **more: Any) -> CloudProvider:
    w.provider = w.console(volume=VOLUME | more)
    return w.provider


def book(w: CloudWorld) -> list[Try]:
    return list(Intents(w.run_dir / VOLUMES_FILE).tries().values())


async def up(w: CloudWorld) -> Pod:
    (pod,) = await w.up()
    return pod


async def lost(w: CloudWorld, pod: Pod) -> None:
    """The vendor takes the pod, and the rollout ends what is left of it."""
    (victim,) = [p for p in w.fake.living if p.id == pod.provider_id or p.name in pod.provider_id]
    victim.dead = w.clock.now()
    await w.clock.sleep(LAG_S)
    await w.provider.delete(pod)


async def a_volume_is_made_mounted_and_proven_gone(w: CloudWorld) -> None:
    console(w)
    pod = await up(w)
    (disk,) = w.fake.disks.values()
    assert w.fake.uses(disk)
    assert [(t.name, t.base, t.held) for t in book(w)] == [(disk.name, NAME, True)]
    await w.provider.delete(pod)
    assert [d.name for d in w.fake.disks.values()] == [disk.name]  # the run may need it again
    await w.down()
    assert w.fake.disks == {}
    assert [t.outcome for t in book(w)] == ["gone"]


async def the_pod_in_a_lost_one_s_place_gets_the_same_volume(w: CloudWorld) -> None:
    console(w)
    pod = await up(w)
    (disk,) = w.fake.disks.values()
    await lost(w, pod)
    console(w)  # whoever goes on is another process
    again = await up(w)
    assert again.provider_id != pod.provider_id
    assert list(w.fake.disks.values()) == [disk]
    assert w.fake.uses(disk)
    assert len(w.fake.asked("new disk")) == 1


async def it_is_in_the_quote_the_books_and_the_caps(w: CloudWorld) -> None:
    without = (await w.provider.quote([w.request()])).hourly
    provider = console(w)
    assert (await provider.quote([w.request()])).hourly == pytest.approx(without + 1.0)
    provider.caps = Caps(without + 0.5, 100.0)
    with pytest.raises(OverCap, match=r"limits\.hourly"):
        await provider.create(w.request())
    assert (w.fake.billing, w.fake.asked("new disk")) == ([], [])
    provider.caps = Caps(without + 1.5, 100.0)
    pod = await up(w)
    await w.clock.sleep(3600.0)
    assert provider.books().hourly == pytest.approx(pod.price_hr + 1.0)
    assert provider.books().spent > pod.price_hr + 1.0


async def a_lost_answer_makes_no_second_volume(w: CloudWorld) -> None:
    w.fake.fail("new disk", "commit_then_timeout", 1)
    console(w)
    await up(w)
    assert len(w.fake.disks) == 1


async def a_volume_that_shows_late_is_ended_with_the_run(w: CloudWorld) -> None:
    w.fake.fail("new disk", "commit_then_reset", 1)
    w.fake.disks_shown_after = 200.0
    console(w)
    await up(w)
    assert len(w.fake.disks) == 2
    assert sum(t.held for t in book(w)) == 1


async def a_volume_that_never_came(w: CloudWorld) -> None:
    w.fake.fail("new disk", "timeout", 1)
    console(w)
    await up(w)
    assert len(w.fake.disks) == 1
    await w.down()
    assert sorted(t.outcome for t in book(w)) == ["absent", "gone"]


async def a_volume_answered_outside_the_schema(w: CloudWorld) -> None:
    w.fake.fail("new disk", "answer", 1, status=200, body=["nobody said so"])
    console(w)
    await up(w)
    assert len(w.fake.disks) == 1


async def a_quota_of_volumes_that_is_used_up_makes_no_pod(w: CloudWorld) -> None:
    w.fake.disk_quota = 0
    console(w)
    with pytest.raises(CloudRefused) as error:
        await up(w)
    assert (error.value.kind, w.fake.asked("create")) == ("limit", [])
    assert [t.outcome for t in book(w)] == ["refused"]


async def a_crash_between_volume_and_pod_loses_neither(w: CloudWorld) -> None:
    provider = console(w)
    await provider.quote([w.request()])
    where = "" if w.vendor == "kubernetes" else ("CA-MTL-3" if w.vendor == "runpod" else "us-east-1")
    await provider.volumes.ensure(NAME, where)
    console(w)
    await up(w)
    assert len(w.fake.disks) == 1


async def a_list_of_volumes_outside_its_schema_is_no_empty_list(w: CloudWorld) -> None:
    console(w)
    await lost(w, await up(w))
    w.fake.fail("disks", "answer", status=200, body={"unexpected": True})
    with pytest.raises(UvccError, match="form"):
        await w.provider.create(w.request())
    assert (len(w.fake.disks), w.fake.billing) == (1, [book(w)[0].name])
    assert await w.provider.prove(ended=True) == [book(w)[0].name]


async def an_end_that_is_refused_three_times(w: CloudWorld) -> None:
    console(w)
    await lost(w, await up(w))
    w.fake.refuse_deletes = 3
    await w.down()
    assert w.fake.disks == {}


async def an_end_that_is_never_obeyed_is_told(w: CloudWorld) -> None:
    console(w)
    await lost(w, await up(w))
    w.fake.fail("end disk", "answer", status=500, body={"error": "x"})
    assert await w.provider.prove(ended=True) == [book(w)[0].name]
    assert [t.name for t in unended(w.run_dir)] == [book(w)[0].name]


async def a_volume_in_use_goes_after_its_pod(w: CloudWorld) -> None:
    console(w)
    pod = await up(w)
    left = await w.provider.volumes.prove(ended=True)
    assert left == [book(w)[0].name]  # its pod lives
    await w.provider.delete(pod)
    assert await w.provider.volumes.prove(ended=True) == []
    assert w.fake.disks == {}


async def a_living_run_and_kept_pods_lose_no_volume(w: CloudWorld) -> None:
    console(w)
    await up(w)
    assert await w.provider.prove(ended=False) == []
    assert await w.provider.prove(ended=True, keep=[NAME]) == []
    assert len(w.fake.disks) == 1


async def a_volume_that_shall_stay_stays_and_is_told(w: CloudWorld) -> None:
    console(w, keep=True)
    await up(w)
    await w.down()
    assert len(w.fake.disks) == 1
    assert ([t.open for t in book(w)], unended(w.run_dir)) == ([True], [])
    w.fake.disks.clear()


async def without_stock_where_it_lies_no_pod_comes_elsewhere(w: CloudWorld) -> None:
    console(w)
    await lost(w, await up(w))
    (disk,) = w.fake.disks.values()
    regions = ["US-KS-2" if disk.region == "CA-MTL-3" else "CA-MTL-3"]
    regions = ["us-west-1" if disk.region == "us-east-1" else "us-east-1"] if w.vendor == "lambda" else regions
    w.provider = w.console(volume=VOLUME, regions=regions)
    before = len(w.fake.asked("create"))
    with pytest.raises(UvccError, match=f"in {disk.region}, where its volume lies"):
        await w.provider.create(w.request())
    assert (len(w.fake.asked("create")), list(w.fake.disks.values())) == (before, [disk])


async def somebody_else_s_volume_of_our_form_is_left_alone(w: CloudWorld) -> None:
    theirs = w.fake.new_disk(f"{NAME}xaaaaaa", 100, "")
    console(w)
    await up(w)
    await w.down()
    assert list(w.fake.disks.values()) == [theirs]
    w.fake.disks.clear()


async def a_volume_that_is_gone_is_made_anew(w: CloudWorld) -> None:
    console(w)
    await lost(w, await up(w))
    w.fake.disks.clear()
    await w.clock.sleep(LAG_S)
    await up(w)
    assert len(w.fake.disks) == 1
    assert [t.outcome for t in book(w)] == ["gone", ""]
