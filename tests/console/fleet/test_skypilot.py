"""Machines over SkyPilot's Python API, beside what the conformance suite plays with its fake."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
import skyfake
from cloudworld import RUN, CloudWorld, cloud_world

from uvcc_console.fleet.cloud.calls import CloudRefused
from uvcc_console.fleet.provider import NoOffer, PodRequest
from uvcc_console.fleet.provider_kinds import provider_for
from uvcc_console.fleet.vendors import sky_api
from uvcc_console.plan.profile import parse
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UvccError

JOB = {"kind": "private", "model": "mlp-digits", "steps": 2}


def form(f: Any, own: bool = False) -> list[list[Any]]:
    """What the record keeps of a function: names, kinds and defaults of what it takes, but for its private ones."""
    found = []
    for p in list(inspect.signature(f).parameters.values())[own:]:
        plain = p.default if isinstance(p.default, str | int | float | bool | None) else str(p.default)
        given = p.default is not p.empty
        if not p.name.startswith("_"):
            found.append([p.name, p.kind.name, given, plain if given else None])
    return found


@pytest.mark.parametrize("name", skyfake.record()["functions"])
def test_the_fake_takes_what_the_real_function_takes(name: str) -> None:
    assert form(getattr(skyfake.SkyFake(time.time).sdk, name)) == skyfake.record()["functions"][name]


@pytest.mark.parametrize("name", skyfake.record()["volumes"])
def test_the_fake_takes_what_the_real_functions_of_volumes_take(name: str) -> None:
    assert form(getattr(skyfake.SkyFake(time.time).volumes, name)) == skyfake.record()["volumes"][name]


@pytest.mark.skipif(importlib.util.find_spec("sky") is None, reason="SkyPilot is not installed beside the tests")
def test_the_record_is_the_packages() -> None:
    import sky
    import sky.volumes
    from sky.client import sdk

    for name, known in skyfake.record()["functions"].items():
        assert form(getattr(sdk, name)) == known
    for name, known in skyfake.record()["classes"].items():
        there = sky.volumes if name == "Volume" else sky
        assert form(getattr(there, name).__init__, own=True) == known
    for name, known in skyfake.record()["volumes"].items():
        assert form(getattr(sky.volumes, name)) == known


async def up(w: CloudWorld, **fleet: Any) -> Any:
    provider = w.console(**fleet)
    await provider.quote([w.request()])
    return await provider.wait_ready(await provider.create(w.request()))


async def test_a_machine_ends_by_itself_and_is_not_idle_while_it_trains(run_dir: Path) -> None:
    """Autostop counts SkyPilot's jobs and SSH: the one job lasts as long as the run may, and then it is taken down."""
    async with cloud_world("skypilot", run_dir) as w:
        pod = await up(w)
        (asked,) = w.fake.asked("create")
        assert (asked["down"], asked["wait_for"]) == (True, "JOBS_AND_SSH")
        assert 5 <= asked["autostop"] <= 30
        assert "exec sleep 3600" in asked["task"]["run"]
        assert asked["task"]["envs"]["PUBLIC_KEY"].startswith("ssh-ed25519 ")
        assert asked["resources"]["infra"] == "aws/us-east-1"
        assert asked["resources"]["max_hourly_cost"] == pytest.approx(2.0, rel=0.03)
        assert (pod.address, pod.region) == ("ubuntu@10.0.0.1:22", "us-east-1")
        await w.down()


async def test_clouds_and_regions_may_be_named(run_dir: Path) -> None:
    async with cloud_world("skypilot", run_dir) as w:
        for infra, region in ((["gcp"], "us-central1"), (["aws/eu-west-1"], "eu-west-1")):
            quote = await w.console(infra=infra).quote([w.request()])
            assert [line.region for line in quote.lines] == [region]
        with pytest.raises(ConfigError, match=r"fleet\.infra names azure, and SkyPilot has aws, gcp enabled") as error:
            await w.console(infra=["azure"]).quote([w.request()])
        assert error.value.hint == "sky check azure"
        w.fake.clouds = []
        with pytest.raises(ConfigError, match="no cloud enabled"):
            await w.provider.quote([w.request()])


async def test_spot_is_priced_where_there_is_such(run_dir: Path) -> None:
    async with cloud_world("skypilot", run_dir) as w:
        await up(w, spot=True)
        (asked,) = w.fake.asked("create")
        assert (asked["resources"]["use_spot"], asked["resources"]["max_hourly_cost"] < 1) == (True, True)
        with pytest.raises(NoOffer, match="priced"):
            await w.console(spot=True, infra=["gcp"]).quote([w.request()])
        await w.down()


async def test_a_quota_of_one_region_lets_the_next_be_tried(run_dir: Path) -> None:
    async with cloud_world("skypilot", run_dir) as w:
        w.fake.quota = 0
        with pytest.raises(UvccError, match="vCPU limit of us-east-1"):
            await up(w)
        regions = [asked["resources"]["infra"] for asked in w.fake.asked("create")]
        assert regions == ["aws/us-east-1", "aws/eu-west-1", "gcp/us-central1"]


async def test_a_launch_that_is_refused_and_there_all_the_same_is_not_let_cost(run_dir: Path) -> None:
    async with cloud_world("skypilot", run_dir) as w:
        launch = w.fake.launched

        def both(name: str, body: dict[str, Any]) -> str:
            launch(name, body)
            return w.fake.request("launch", name, lambda: w.fake.refuses("ResourcesUnavailableError", "none left"), 3.0)

        w.fake.launched = both
        await w.provider.quote([w.request()])
        pod = await w.provider.create(w.request())
        assert (len(w.fake.billing), [pod.provider_id]) == (1, w.fake.billing)
        await w.down()


async def test_a_launch_that_is_under_way_can_be_ended(run_dir: Path) -> None:
    async with cloud_world("skypilot", run_dir) as w:
        w.fake.boot_s, w.fake.visible_after = 4000.0, 0.0
        await w.provider.quote([w.request()])
        asking = asyncio.ensure_future(w.provider.create(w.request()))
        while not w.fake.billing:
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        w.provider = w.console()
        assert len(await w.provider.list(RUN)) == 1
        await w.down()
        assert any(r.cancelled and r.name == "sky.launch" for r in w.fake.sent.values())


@pytest.mark.parametrize(
    ("fleet", "said"),
    [
        ({"infra": ["kubernetes"]}, "use provider kubernetes"),
        ({"infra": ["slurm/lab"]}, "use provider slurm"),
        ({"infra": "aws"}, "fleet.infra"),
        ({"per_party": ["a", "b", "c"]}, r"fleet\.parties"),
        ({"infar": ["aws"]}, "did you mean .*infra"),
    ],
)
def test_a_wrong_profile_is_told(fleet: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse({"job": JOB, "fleet": {"provider": "skypilot", **fleet}})


async def test_a_machine_without_gpu_is_told_before_anything_is_asked(run_dir: Path) -> None:
    async with cloud_world("skypilot", run_dir) as w:
        with pytest.raises(ConfigError, match=r"say which in fleet\.gpu"):
            await w.console(gpu="").quote([w.request()])
        assert w.fake.asked("create") == []


async def test_a_package_that_is_not_there_or_broken_names_the_cure(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None)
    with pytest.raises(ConfigError, match="Python API") as missing:
        provider_for({"provider": "skypilot", "gpu": "H100"}, run_dir)
    assert missing.value.hint == "pip install 'uvcc[skypilot]'"
    monkeypatch.undo()
    broken = types.ModuleType("sky")
    broken.__spec__ = importlib.machinery.ModuleSpec("sky", None)
    monkeypatch.setitem(sys.modules, "sky", broken)
    provider = provider_for({"provider": "skypilot", "gpu": "H100"}, run_dir)
    with pytest.raises(ConfigError, match="cannot be imported"):
        await provider.quote([PodRequest(f"{RUN}-p0r0", 0, 0)])
    assert not list(run_dir.glob("*intents*"))


async def test_a_call_that_hangs_is_given_up_and_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sky_api, "CALL_S", 0.05)
    free = threading.Event()
    try:
        with pytest.raises(TimeoutError):
            await sky_api.in_thread(free.wait)
        assert all(t.daemon for t in threading.enumerate() if t.name == "skypilot")
        with pytest.raises(RuntimeError, match="over"):
            await sky_api.in_thread(lambda: sys.exit("over"))
    finally:
        free.set()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (skyfake.ERRORS["NoCloudAccessError"]("no"), "auth"),
        (skyfake.HTTPError(403), "auth"),
        (skyfake.HTTPError(422), "invalid"),
        (skyfake.ERRORS["ClusterDoesNotExist"]("x"), "missing"),
        (skyfake.ERRORS["ResourcesUnavailableError"]("quota exceeded in us-east-1"), "capacity"),
        (skyfake.HTTPError(502), ""),
        (skyfake.ERRORS["ApiServerConnectionError"]("x"), ""),
        (RuntimeError("\x1b]0;owned\x07 setup failed"), ""),
    ],
)
def test_what_an_exception_means(error: Exception, kind: str) -> None:
    found = sky_api.meant("launch", error)
    assert str(found).isprintable()
    assert isinstance(found, CloudRefused if kind else UnreachableError)
    assert getattr(found, "kind", "") == kind
