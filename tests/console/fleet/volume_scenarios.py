"""What every provider with volumes must bear: scenarios of the conformance suite, each in one vendor's world."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cloudworld import RUN, CloudWorld

from uvcc_console.fleet.cloud.calls import CloudRefused
from uvcc_console.fleet.cloud.ends import LAG_S
from uvcc_console.fleet.cloud.guard import OverCap
from uvcc_console.fleet.cloud.intents import VOLUMES_FILE, Intents, Try, mount_of, unended
from uvcc_console.fleet.cloud.saga import CloudProvider
from uvcc_console.fleet.provider import Caps, NoOffer, Pod
from uvcc_engine.contract.errors import UvccError

VOLUME = {"size_gb": 100, "price": 7.3}  # a dollar an hour
NAME = f"{RUN}-p0r0"
ZONES = ["runpod/CA/CA-MTL-3", "runpod/US/US-KS-2"]
MOUNTS = {"prime": "/workspace", "lambda": "/lambda/nfs/{name}"}  # the others mount where they are told to


def with_volumes(w: CloudWorld, volume: dict[str, Any], **fleet: Any) -> CloudProvider:
    if w.vendor == "skypilot":
        w.fake.clouds = ["runpod"]
        fleet = {"infra": ZONES} | fleet
    w.provider = w.console(volume=volume, **fleet)
    return w.provider


def console(w: CloudWorld, **more: Any) -> CloudProvider:
    return with_volumes(w, VOLUME | more)


def called(w: CloudWorld, t: Try) -> str:
    """What the vendor calls the volume of this try."""
    name: str = w.client().volume_name(t.name)  # type: ignore[attr-defined]
    return name


def elsewhere(w: CloudWorld, region: str) -> dict[str, Any]:
    """What keeps pods from where this volume lies."""
    match w.vendor:
        case "prime":
            return {"data_center": "NORWAY-1"}
        case "runpod":
            return {"regions": ["US-KS-2" if region == "CA-MTL-3" else "CA-MTL-3"]}
        case "lambda":
            return {"regions": ["us-west-1" if region == "us-east-1" else "us-east-1"]}
        case "skypilot":
            return {"infra": [zone for zone in ZONES if zone.lower() != region]}
    w.fake.unlisted.add(int(region.removeprefix("machine ")))
    return {}


def book(w: CloudWorld) -> list[Try]:
    return list(Intents(w.run_dir / VOLUMES_FILE).tries().values())


def where_others_lie(w: CloudWorld) -> str:
    """A place of the second offer, so that nobody comes there by chance."""
    places = {"prime": "hyperstack/NORWAY-1", "runpod": "CA-MTL-3", "lambda": "us-east-1", "vast": "machine 9"}
    return {**places, "skypilot": ZONES[1].lower()}.get(w.vendor, "")


async def _costs_bare(w: CloudWorld) -> float:
    """US dollars an hour of a pod without a volume."""
    return (await with_volumes(w, {}).quote([w.request()])).hourly


async def up(w: CloudWorld) -> Pod:
    (pod,) = await w.up()
    return pod


async def lost(w: CloudWorld, pod: Pod) -> None:
    """The vendor takes the pod, and the rollout ends what is left of it."""
    (victim,) = [p for p in w.fake.living if p.id == pod.provider_id or p.name in pod.provider_id]
    w.fake.kill(victim)
    await w.clock.sleep(LAG_S)
    await w.provider.delete(pod)


async def a_volume_is_made_mounted_and_proven_gone(w: CloudWorld) -> None:
    console(w)
    pod = await up(w)
    (disk,) = w.fake.disks.values()
    assert w.fake.uses(disk)
    assert [(called(w, t), t.base, t.held) for t in book(w)] == [(disk.name, NAME, True)]
    assert mount_of(w.run_dir, NAME) == MOUNTS.get(w.vendor, "/uvcc-volume").format(name=disk.name)
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
    without = await _costs_bare(w)
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
    offer, _ = await provider.market.next(w.request(), fresh=False)
    await provider.volumes.ensure(NAME, offer)
    console(w)
    await up(w)
    assert len(w.fake.disks) == 1


async def a_list_of_volumes_outside_its_schema_is_no_empty_list(w: CloudWorld) -> None:
    console(w)
    await lost(w, await up(w))
    w.fake.fail("disks", "answer", status=200, body={"unexpected": True})
    with pytest.raises(UvccError, match="form"):
        await w.provider.create(w.request())
    assert (len(w.fake.disks), w.fake.billing) == (1, [called(w, book(w)[0])])
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
    with_volumes(w, VOLUME, **elsewhere(w, disk.region))
    before = len(w.fake.asked("create"))
    with pytest.raises(UvccError, match=f"in {disk.region}, where its volume lies"):
        await w.provider.create(w.request())
    assert (len(w.fake.asked("create")), list(w.fake.disks.values())) == (before, [disk])


async def somebody_else_s_volume_of_our_form_is_left_alone(w: CloudWorld) -> None:
    theirs = w.fake.new_disk(f"{NAME}xaaaaaa"[-30:].strip("-"), 100, where_others_lie(w))
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


async def one_that_is_there_is_mounted_counts_nothing_and_is_left_alone(w: CloudWorld) -> None:
    """Where it lies decides where its pod goes; the run neither makes, pays for nor ends it."""
    without = await _costs_bare(w)
    theirs = w.fake.new_disk("our-checkpoints", 100, where_others_lie(w))
    provider = with_volumes(w, {"name": "our-checkpoints"})
    quote = await provider.quote([w.request()])
    assert quote.lines[0].offer["volume"] == "our-checkpoints"
    assert quote.hourly == pytest.approx(without, rel=0.1)  # it is another machine
    await up(w)
    assert (w.fake.uses(theirs), w.fake.asked("new disk")) == (True, [])
    (noted,) = book(w)
    assert (noted.given, noted.held, noted.price_hr, provider.volumes.tries()) == (True, True, 0.0, [])
    assert mount_of(w.run_dir, NAME) == MOUNTS.get(w.vendor, "/uvcc-volume").format(name="our-checkpoints")
    assert unended(w.run_dir) == []
    with_volumes(w, {"name": "our-checkpoints"})  # whoever goes on is another process
    await w.down()
    assert list(w.fake.disks.values()) == [theirs]
    w.fake.disks.clear()


async def one_that_is_named_and_not_there_is_told_before_anything_is_rented(w: CloudWorld) -> None:
    w.fake.new_disk("our-checkpoint", 100, where_others_lie(w))
    for name, what in (("our-checkpoints", "has no volume named our-checkpoints"), ("ckpt-{pod}", "named ckpt-p0r0")):
        with pytest.raises(NoOffer, match=what) as error:
            await with_volumes(w, {"name": name}).quote([w.request()])
        assert not error.value.passing
    assert (w.fake.asked("create"), w.fake.asked("new disk"), book(w)) == ([], [], [])
    w.fake.disks.clear()


async def it_is_mounted_where_the_profile_says(w: CloudWorld) -> None:
    with_volumes(w, VOLUME | {"mount": "/data/ckpt"})
    await up(w)
    (asked,) = w.fake.asked("create")
    assert "/data/ckpt" in json.dumps(asked)
    assert mount_of(w.run_dir, NAME) == "/data/ckpt"
