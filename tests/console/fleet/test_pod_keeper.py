"""The keeper on a pod: real agent, real workers, and nobody left who would end them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from uvcc_console.fleet import pod, procs, ssh_keys
from uvcc_console.fleet.agent_client import AgentClient
from uvcc_console.fleet.bootstrap import Bootstrapped, bootstrap
from uvcc_console.fleet.local_provider import LocalProvider
from uvcc_console.fleet.provider import Pod, PodRequest
from uvcc_console.fleet.ssh import PodLink
from uvcc_console.fleet.wheel import Wheel, build_wheel
from uvcc_engine.contract.agent_protocol.agent_commands import LaunchCommand
from uvcc_engine.contract.job.spec import WorkerSpec

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: time.sleep(1)"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
async def host(run_dir: Path) -> AsyncIterator[Pod]:
    provider = LocalProvider(run_dir, ttl_s=3600.0)
    made = await provider.wait_ready(await provider.create(PodRequest(f"keeper-test-{os.getpid()}", 0, 0)))
    yield made
    await provider.delete(made)
    assert not procs.marked(made.provider_id)


@pytest.fixture
async def link(host: Pod, run_dir: Path) -> AsyncIterator[PodLink]:
    made = PodLink("p0r0", host.address, ssh_keys.operator_key(run_dir))
    yield made
    await made.close()


def here(host: Pod) -> set[int]:
    """What runs on the pod under the root's mark."""
    return {pid for pid in procs.marked(f"{host.provider_id}/.uvcc", "UVCC_ROOT") if procs.identify(pid)}


def keeper_of(host: Pod) -> int:
    return int(json.loads(Path(host.provider_id, ".uvcc", "keeper.json").read_text())["pid"])


async def until(met: Callable[[], object], seconds: float = 120.0) -> None:
    async with asyncio.timeout(seconds):
        while not met():
            await asyncio.sleep(0.05)


async def work(link: PodLink, *scripts: str) -> list[int]:
    client = AgentClient(link, holder="test")
    await client.start()
    specs = [
        WorkerSpec(run="r1", kind="command", coord=f"p0r0s{n}t0", argv=["python3", "-c", script])
        for n, script in enumerate(scripts)
    ]
    ack = await client.request(LaunchCommand(run="r1", workers=specs))
    await client.close()
    return [int(w["pid"]) for w in ack["workers"]]


@pytest.mark.ci(__file__)
async def test_at_the_end_of_its_time_the_pod_ends_what_the_run_started(link: PodLink, wheel: Wheel, host: Pod) -> None:
    """The operator is gone, the agent is killed, a worker is stopped and another one ignores what it is told."""
    done: Bootstrapped = await bootstrap(link, wheel, preload="none", life_s=3600.0)
    first = keeper_of(host)
    stopped, stubborn = await work(link, "import time; time.sleep(600)", STUBBORN)
    done = await bootstrap(link, wheel, preload="none", life_s=20.0)
    assert procs.identify(first) is None  # there is one keeper, the last
    os.kill(int(done.agent["pid"]), signal.SIGKILL)
    os.kill(stopped, signal.SIGSTOP)
    assert {stopped, stubborn, keeper_of(host)} <= here(host)
    await until(lambda: not here(host))
    assert await link.sh("cat .uvcc/runs/r1/*.log >/dev/null; echo files stay") == "files stay"
    assert "time is over" in await link.sh("cat .uvcc/keeper.log")


async def test_the_keeper_goes_with_what_it_keeps(link: PodLink, wheel: Wheel, host: Pod) -> None:
    """Giving the host back ends it like everything else there; and it touches nothing that is not the run's."""
    await bootstrap(link, wheel, preload="none", life_s=3600.0)
    keeper = keeper_of(host)
    assert keeper in here(host)
    foreign = await asyncio.create_subprocess_exec("sleep", "600")
    said = await link.sh(f"python3 - {host.name}", stdin=pod.source("give_back.py"), timeout=150.0)
    assert said == "gone"
    assert procs.identify(keeper) is None
    assert foreign.returncode is None
    foreign.kill()
    await foreign.wait()
