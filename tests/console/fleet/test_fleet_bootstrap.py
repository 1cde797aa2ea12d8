"""Bootstrap on real local pods: from nothing to an answering agent, twice, and with everything that can be wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import zipfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest

from uvcc_console.core import events as ev
from uvcc_console.core.folding.state import fold
from uvcc_console.fleet import procs, ssh_keys
from uvcc_console.fleet.agent_client import AgentClient
from uvcc_console.fleet.bootstrap import Bootstrapped, bootstrap, bootstrap_all
from uvcc_console.fleet.local import localpod
from uvcc_console.fleet.local_provider import LocalProvider
from uvcc_console.fleet.provider import Pod, PodRequest
from uvcc_console.fleet.ssh import PodLink
from uvcc_console.fleet.wheel import Wheel, build_wheel
from uvcc_console.fleet.wheel_cache import read_wheels
from uvcc_console.rollout.context import Member, Rollout
from uvcc_console.rollout.stages.fleet import agents, provision
from uvcc_engine.contract.agent_protocol.agent_commands import ProbeCommand
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.machine import torch_floor


@pytest.fixture
async def pod(run_dir: Path) -> AsyncIterator[Pod]:
    provider = LocalProvider(run_dir, ttl_s=3600.0)
    made = await provider.wait_ready(await provider.create(PodRequest(f"boot-test-{os.getpid()}", 0, 0)))
    yield made
    await provider.delete(made)


@pytest.fixture
async def link(pod: Pod, run_dir: Path) -> AsyncIterator[PodLink]:
    made = PodLink("p0r0", pod.address, ssh_keys.operator_key(run_dir))
    yield made
    await made.close()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


async def test_a_bare_host_becomes_an_answering_agent(link: PodLink, wheel: Wheel, pod: Pod) -> None:
    steps: list[str] = []
    found = await bootstrap(link, wheel, lambda step, detail: steps.append(step), preload="none")
    assert steps == ["connect", "wheel", "upload", "unpack", "python", "agent", "ready"]
    assert found.code_hash == found.agent["code_hash"] == wheel.sha256
    assert found.home == pod.provider_id
    assert found.boot_id == procs.boot_id()
    assert found.versions["torch"].startswith("2.")
    assert await link.sh(f"cat .uvcc/{wheel.site_name}/CODE_HASH") == wheel.sha256
    assert (await link.sh("stat -c %a .uvcc")) == "700"
    where = await link.sh(
        f"PYTHONPATH=.uvcc/{wheel.site_name} python3 -c 'import uvcc_engine; print(uvcc_engine.__file__)'"
    )
    assert wheel.site_name in where  # the wheel's code, not the operator's checkout
    environ = await link.sh(f"tr '\\0' '\\n' </proc/{found.agent['pid']}/environ")
    assert f"HF_HOME={found.home}/.uvcc/cache/hf" in environ.splitlines()  # downloads stay on the pod's disk


@pytest.mark.ci(__file__)
async def test_again_is_quick_and_changes_nothing(link: PodLink, wheel: Wheel) -> None:
    first = await bootstrap(link, wheel, preload="none")
    steps: list[str] = []
    second = await bootstrap(link, wheel, lambda step, detail: steps.append(step), preload="none")
    assert second.agent["pid"] == first.agent["pid"]
    assert second.agent["identity"] == first.agent["identity"]
    assert "upload" not in steps


async def test_a_seeded_identity_is_the_same_anywhere_and_no_secret_stays_readable(link, wheel) -> None:
    seed = "11" * 32
    found = await bootstrap(link, wheel, identity_seed=seed, preload="none")
    assert found.agent["identity"]["seeded"] is True
    leaks = await link.run(f"grep -rl {seed} .uvcc")
    assert leaks.text == ""


@pytest.mark.ci(__file__)
async def test_on_a_shared_machine_imports_give_way_to_the_agent(link: PodLink, wheel: Wheel) -> None:
    done = await bootstrap(link, wheel, preload="none", give_way=11)
    agent = int(done.agent["pid"])
    assert os.getpriority(os.PRIO_PROCESS, agent) == localpod.NICE
    (zygote,) = [child.pid for child in psutil.Process(agent).children()]
    assert os.getpriority(os.PRIO_PROCESS, zygote) == 11
    assert os.sched_getscheduler(zygote) == os.SCHED_BATCH


async def test_the_agent_survives_the_link(link: PodLink, wheel: Wheel) -> None:
    found = await bootstrap(link, wheel, preload="none")
    link.abort()
    client = AgentClient(link)
    again = await client.start()
    assert again["pid"] == found.agent["pid"]
    assert (await client.request(ProbeCommand()))["ok"]
    await client.close()


@pytest.mark.ci(__file__)
async def test_a_dead_agent_is_told_from_a_lost_link_and_another_takes_its_place(
    link: PodLink, wheel: Wheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await bootstrap(link, wheel, preload="none")
    told: asyncio.Queue[tuple[bool, str]] = asyncio.Queue()
    client = AgentClient(link, on_link=lambda up, detail: told.put_nowait((up, detail)))
    await client.start()
    assert await told.get() == (True, "")
    os.kill(found.agent["pid"], signal.SIGKILL)
    assert not (await told.get())[0]
    up, detail = await told.get()  # the pod answers when it is asked again, and has no agent
    assert (up, detail.partition(" in ")[0], client.agentless) == (False, "no agent answers", True)
    alerts: asyncio.Queue[ev.Alert] = asyncio.Queue()
    tries: list[str] = []

    async def started(ctx: Rollout, member: Member) -> Bootstrapped:
        tries.append(member.name)
        if len(tries) == 1:
            raise UvccError("no room on its disk", "make some")
        return await bootstrap(link, wheel, preload="none")

    monkeypatch.setattr(provision, "bootstrapped", started)
    member = Member("p0r0", PodRequest("x", 0, 0), link=link, agent=client)
    agent = ev.PodChanged(pod="p0r0", party=0, replica=0, provider="local", state="agent")

    def record(found: Sequence[ev.Event]) -> None:
        for event in found:
            alerts.put_nowait(cast(ev.Alert, event))

    bus = SimpleNamespace(snapshot=fold([agent]), record=record)
    ctx = cast(Rollout, SimpleNamespace(bus=bus, members={"p0r0": member}, wheel=wheel))
    hours = iter(range(1000))
    caring = asyncio.create_task(agents.keep_agents(ctx, clock=lambda: 3600.0 * next(hours)))
    failed, done = await alerts.get(), await alerts.get()
    assert "no other could be started: no room on its disk" in failed.text
    assert (failed.hint, done.subject, done.name) == ("make some", "p0r0", "agent")
    assert "another has taken its place" in done.text
    assert (await told.get())[0]
    assert client.hello["pid"] not in (found.agent["pid"], None)
    assert client.hello["identity"] == found.agent["identity"]
    assert not client.agentless
    caring.cancel()
    await asyncio.wait({caring})
    assert tries == ["p0r0", "p0r0"], "one that answers is left alone"
    await client.close()


async def test_a_damaged_upload_is_found_before_anything_runs(link, wheel, tmp_path) -> None:
    copy = tmp_path / wheel.path.name
    data = bytearray(wheel.path.read_bytes())
    data[5000] ^= 0xFF
    copy.write_bytes(data)
    with pytest.raises(UvccError, match="arrived damaged"):
        await bootstrap(link, Wheel(copy, wheel.sha256), preload="none")
    assert (await link.run("ls .uvcc/agent.sock")).exit != 0
    assert (await bootstrap(link, wheel, preload="none")).code_hash == wheel.sha256


@pytest.mark.ci(__file__)
async def test_a_half_unpacked_site_is_replaced(link: PodLink, wheel: Wheel) -> None:
    await link.sh(f"mkdir -p .uvcc/{wheel.site_name}/uvcc_engine")
    assert (await bootstrap(link, wheel, preload="none")).code_hash == wheel.sha256


@pytest.mark.ci(__file__)
async def test_other_code_takes_over_from_an_idle_agent(link: PodLink, wheel: Wheel, tmp_path: Path) -> None:
    first = await bootstrap(link, wheel, preload="none")
    sources = tmp_path / "uvcc_engine"
    with zipfile.ZipFile(wheel.path) as archive:
        archive.extractall(tmp_path)
    with (sources / "__init__.py").open("a") as f:
        f.write("# a change\n")
    newer = build_wheel(tmp_path / "out", sources)
    second = await bootstrap(link, newer, preload="none")
    assert second.agent["code_hash"] == newer.sha256 != first.agent["code_hash"]
    assert second.agent["pid"] != first.agent["pid"]
    assert second.agent["identity"] == first.agent["identity"]


async def test_an_agent_that_cannot_start_is_told_with_its_words(link: PodLink, wheel: Wheel) -> None:
    await link.sh("mkdir -p .uvcc && : >.uvcc/state")  # a file where the agent wants a folder
    with pytest.raises(UvccError, match="p0r0 does not start: cannot write"):
        await bootstrap(link, wheel, preload="none")


@pytest.mark.ci(__file__)
async def test_missing_packages_go_into_a_venv_over_the_image(link: PodLink, wheel: Wheel, tmp_path: Path) -> None:
    """pip is real; it may look nowhere but among the wheels that were sent, and not where the image's pip.conf says."""
    sample = tmp_path / "uvcc_sample"
    sample.mkdir()
    (sample / "__init__.py").write_text('__version__ = "6.6.6"\n')
    newer = build_wheel(tmp_path / "newer", sample)
    (sample / "__init__.py").write_text('__version__ = "1.2.3"\n')
    build_wheel(tmp_path / "out", sample)
    wheels = read_wheels(str(tmp_path / "out"))
    await link.sh("mkdir -p .config/pip planted")
    await link.put(newer.path, f"planted/{newer.path.name}")
    home = await link.sh("pwd")
    await link.put(f"[global]\nfind-links = {home}/planted\n".encode(), ".config/pip/pip.conf")
    said: list[tuple[str, str]] = []
    tell = lambda step, detail: said.append((step, detail))  # noqa: E731
    found = await bootstrap(link, wheel, tell, preload="none", packages=["uvcc_sample>=1"], wheels=wheels)
    assert ("wheels", "1 wheels, 0 MiB") in said
    assert ("python", "installing uvcc_sample>=1") in said
    assert found.python == f"{home}/.uvcc/venv/bin/python"
    assert found.versions["uvcc_sample"] == "1.2.3"
    assert found.versions["torch"].startswith("2.")  # the image's, not another one
    assert "Successfully installed uvcc-sample" in (await link.read(".uvcc/bootstrap.log")).decode().replace("_", "-")
    with pytest.raises(UvccError, match="uvcc_nowhere") as refused:
        await bootstrap(link, wheel, preload="none", packages=["uvcc_nowhere"], wheels=wheels)
    assert "fleet.wheels" in refused.value.hint


@pytest.mark.ci(__file__)
async def test_many_pods_at_once_and_the_first_failure_names_its_pod(run_dir: Path, wheel: Wheel) -> None:
    provider = LocalProvider(run_dir, ttl_s=3600.0)
    requests = [PodRequest(f"boot-many-{os.getpid()}-{p}", p, 1) for p in range(3)]
    pods = await asyncio.gather(*(provider.create(r) for r in requests))
    pods = await asyncio.gather(*(provider.wait_ready(p) for p in pods))
    links = [PodLink(p.name, p.address, ssh_keys.operator_key(run_dir)) for p in pods]
    try:
        heard: set[str] = set()
        found = await bootstrap_all(links, wheel, lambda pod, step, detail: heard.add(pod), preload="none")
        assert heard == {p.name for p in pods}
        keys_of = {json.dumps(b.agent["identity"]) for b in found}
        assert len(keys_of) == 3
    finally:
        for link in links:
            await link.close()
        await asyncio.gather(*(provider.delete(p) for p in pods))


@pytest.mark.ci(__file__)
async def test_an_image_with_too_old_a_torch_gets_another_over_it(
    link: PodLink, wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_floor, "LEAST", (2, 14))  # so that the torch which is here is too old
    newer = tmp_path / "torch"
    newer.mkdir()
    (newer / "__init__.py").write_text('__version__ = "2.14.1"\n')
    package = build_wheel(tmp_path / "out", newer)
    await link.sh("mkdir -p .config/pip wheels")
    await link.put(package.path, f"wheels/{package.path.name}")
    home = await link.sh("pwd")
    pip = ".config/pip/pip.conf"
    await link.put(f"[global]\nno-index = true\nfind-links = {home}/nothing\n".encode(), pip)
    with pytest.raises(UvccError, match="pod p0r0"):
        await bootstrap(link, wheel, preload="none")
    await link.put(f"[global]\nno-index = true\nfind-links = {home}/wheels\n".encode(), pip)
    said: list[tuple[str, str]] = []
    found = await bootstrap(link, wheel, lambda step, detail: said.append((step, detail)), preload="none")
    assert ("python", "installing torch") in said
    assert found.python == f"{home}/.uvcc/venv/bin/python"
    assert found.versions["torch"] == "2.14.1"
    said.clear()
    await bootstrap(link, wheel, lambda step, detail: said.append((step, detail)), preload="none")
    assert ("python", "installing torch") not in said  # it is there now
