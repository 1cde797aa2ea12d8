"""Spot machines as a policy: how many are replaced by others of their kind, what then, and how a loss is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cloudworld import RUN, CloudWorld, cloud_world
from test_slurm import Queue
from virtualtime import VirtualClock

from uvcc_console.fleet.cloud.ends import LAG_S
from uvcc_console.fleet.cloud.intents import Intents
from uvcc_console.fleet.cloud.ready import Readiness
from uvcc_console.fleet.cloud.saga import CloudProvider
from uvcc_console.fleet.provider import Pod, PodRequest
from uvcc_console.fleet.provider_kinds import SpotPolicy
from uvcc_console.fleet.vendors.slurm import SlurmClient
from uvcc_console.plan.plan import make_plan
from uvcc_console.plan.profile import parse
from uvcc_engine.contract.errors import ConfigError

JOB = {"kind": "private", "model": "mlp-digits", "steps": 2}
NAME = f"{RUN}-p0r0"


def fleet(**more: Any) -> Any:
    return parse({"job": JOB, "fleet": {"provider": "vast", "gpu": "H100", **more}}).fleet


@pytest.mark.parametrize(
    ("spot", "asks", "replacements"),
    [
        (False, False, 1),
        (True, True, 1),
        ({"replace": 3}, True, 4),
        ({"replace": 3, "then": "on_demand"}, True, 4),
        ({"replace": 3, "then": "stop"}, True, 3),
    ],
)
def test_the_policy_says_what_is_asked_for_and_how_often(spot: Any, asks: bool, replacements: int) -> None:
    found = fleet(spot=spot)
    assert (bool(found.spot), found.replacements) == (asks, replacements)
    profile = parse({"job": JOB, "fleet": {"provider": "vast", "gpu": "H100", "spot": spot}})
    assert {r.spot for r in make_plan("r", "x", profile).requests.values()} == {asks}


@pytest.mark.parametrize(
    ("spot", "said"),
    [
        ({"replace": -1}, r"fleet\.spot"),
        ({"then": "wait"}, r"fleet\.spot"),
        ({"replce": 1}, r"fleet\.spot"),
        ("often", r"fleet\.spot"),
        (2, r"fleet\.spot"),
    ],
)
def test_a_policy_that_is_none_is_told(spot: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fleet(spot=spot)


def test_a_party_may_have_a_policy_of_its_own() -> None:
    parties = {f"P{p}": {"provider": "vast", "gpu": "H100"} for p in range(3)}
    parties["P1"]["spot"] = {"replace": 2}  # type: ignore[assignment]
    found = parse({"job": JOB, "fleet": {"parties": parties}}).fleet
    assert found.of(1).spot == SpotPolicy(replace=2)
    assert not found.of(0).spot
    assert found.replacements == 3
    parties |= {n: {**part, "spot": {"replace": 1, "then": "stop"}} for n, part in parties.items()}  # type: ignore[dict-item]
    assert parse({"job": JOB, "fleet": {"parties": parties}}).fleet.replacements == 3


def victim(w: CloudWorld) -> Any:
    (found,) = [p for p in w.fake.living if not p.foreign]
    return found


async def again(w: CloudWorld, provider: CloudProvider, pod: Pod) -> Pod:
    """What the rollout does with a pod that is lost: end what is left of it, rent another."""
    await provider.list(RUN)
    await provider.delete(pod)
    return await provider.wait_ready(await provider.create(w.request()))


def spots(w: CloudWorld) -> list[bool]:
    return [a["resources"]["use_spot"] if w.vendor == "skypilot" else "price" in a for a in w.fake.asked("create")]


@pytest.mark.parametrize("vendor", ["skypilot", "vast"])
@pytest.mark.parametrize("then", ["on_demand", "stop"])
async def test_after_so_many_losses_it_rents_on_demand(vendor: str, then: str, run_dir: Path) -> None:
    async with cloud_world(vendor, run_dir) as w:
        policy = {"spot": {"replace": 1, "then": then}}
        provider = w.console(**policy)
        await provider.quote([w.request()])
        pod = await provider.wait_ready(await provider.create(w.request()))
        for _ in range(3):
            victim(w).dead = w.clock.now()
            await w.clock.sleep(LAG_S)
            provider = w.console(**policy)  # whoever goes on is another process: the count is on disk
            pod = await again(w, provider, pod)
            assert "a spot machine, was taken away by" in provider.taken(NAME) or spots(w)[-2] is False
        assert spots(w) == ([True, True, False, False] if then == "on_demand" else [True] * 4)
        await w.down()


async def test_a_pod_that_we_ended_counts_for_no_loss(run_dir: Path) -> None:
    async with cloud_world("vast", run_dir) as w:
        provider = w.console(spot={"replace": 0})
        await provider.quote([w.request()])
        for _ in range(2):
            pod = await provider.wait_ready(await provider.create(w.request()))
            await provider.delete(pod)
        assert spots(w) == [True, True]
        assert provider.taken(NAME) == ""


async def test_one_that_was_outbid_is_listed_as_ending_and_replaced(run_dir: Path) -> None:
    """Vast keeps an instance that was outbid, stopped: it is lost though it is listed, and is told in Vast's words."""
    async with cloud_world("vast", run_dir) as w:
        provider = w.console(spot={"replace": 0})
        await provider.quote([w.request()])
        pod = await provider.wait_ready(await provider.create(w.request()))
        assert [p.ending for p in await provider.list(RUN)] == [""]
        victim(w).state = "exited"
        assert [p.ending for p in await provider.list(RUN)] == ["exited"]
        assert provider.taken(NAME) == "a spot machine, was taken away by vast (exited)"
        fresh = await again(w, provider, pod)
        assert (spots(w), fresh.provider_id != pod.provider_id) == ([True, False], True)
        await w.down()


async def test_a_full_disk_keeps_no_pod_from_being_ended(run_dir: Path) -> None:
    async with cloud_world("runpod", run_dir) as w:
        (pod,) = await w.up()
        file = Intents.of(run_dir).path
        kept = file.read_bytes()
        real = Intents.note

        def note(self: Intents, ts: float, **fields: object) -> None:
            if "ending" in fields:
                raise ConfigError("no space left on device")
            real(self, ts, **fields)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Intents, "note", note)
            await w.provider.delete(pod)
        assert (w.fake.billing, file.read_bytes().startswith(kept)) == ([], True)


async def test_a_preempted_job_of_slurm_is_told_so(run_dir: Path) -> None:
    async with VirtualClock() as clock:
        queue = Queue(clock.now)
        client = SlurmClient(minutes=70, clock=clock, command=queue)

        async def login(at: object, gpu: bool) -> str:
            return ""

        provider = CloudProvider(client, {}, run_dir, readiness=Readiness(client, run_dir, "", login))
        request = PodRequest(NAME, 0, 0)
        await provider.quote([request])
        pod = await provider.wait_ready(await provider.create(request))
        queue.jobs[pod.provider_id]["state"] = "PREEMPTED"
        await clock.sleep(LAG_S)
        assert await provider.list(RUN) == []
        assert provider.taken(NAME) == "ended without having been asked to by slurm (PREEMPTED)"
        assert await provider.prove(ended=True) == []
