"""Local pods of one run import torch once: their zygotes are forks of one process, and yet each is its own pod's."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from uvcc_console.fleet import procs, ssh_keys
from uvcc_console.fleet.local import imports_shared
from uvcc_console.fleet.local_provider import LocalProvider
from uvcc_console.fleet.provider import Pod, PodRequest
from uvcc_console.fleet.ssh import PodLink, Timeouts
from uvcc_console.fleet.wheel import engine_package
from uvcc_engine.agent.processes.preloaded_server import LOOK_S
from uvcc_engine.agent.processes.spawner import Spawner
from uvcc_engine.contract.machine import host
from uvcc_engine.contract.machine.preloaded import PRELOADED_ENV, ROOM, socket_name

PATIENT = Timeouts(connect=5.0, login=5.0, operation=90.0)
pytestmark = pytest.mark.skipif(not host.HAS_PROC, reason="no /proc: each pod imports by itself")


@pytest.fixture
async def provider(run_dir: Path, short: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalProvider]:
    monkeypatch.delenv(PRELOADED_ENV, raising=False)
    made = LocalProvider(run_dir, ttl_s=3600.0)
    yield made
    for pod in await made.list("uvcc-test-"):
        await made.delete(pod)
    await made.close()


async def _up(provider: LocalProvider, party: int) -> Pod:
    request = PodRequest(f"uvcc-test-{os.getpid()}-p{party}r0", party, 0)
    return await provider.wait_ready(await provider.create(request))


def _server(of: LocalProvider) -> psutil.Process:
    assert of.imports.process is not None
    return psutil.Process(of.imports.process.pid)


async def _agent(link: PodLink, more: str = "") -> int:
    """Start an agent in a pod, as a bootstrap does; returns its pid."""
    code = f"{more} PYTHONPATH={engine_package().parent} {sys.executable} -m uvcc_engine.agent"
    said = await link.sh(f'{code} --root "$HOME/.uvcc" --preload torch --detach --give-way 5 </dev/null')
    return int(json.loads(said.splitlines()[-1])["pid"])


async def _until(found: Callable[[], bool], what: str) -> None:
    for _ in range(6000):
        if found():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(what)


async def _zygote_of(server: psutil.Process, pod: Pod) -> psutil.Process:
    """The fork that the system shows as this pod's, once it has given way as an agent's zygote does."""
    found: list[psutil.Process] = []

    def one() -> bool:
        found[:] = [z for z in server.children() if z.pid in procs.marked(pod.provider_id) and z.nice() == 5]
        return bool(found)

    await _until(one, "a zygote that carries the pod's mark")
    return found[0]


@pytest.mark.ci(__file__)
async def test_zygotes_of_two_pods_come_from_one_import_and_go_with_their_pods(
    provider: LocalProvider, run_dir: Path
) -> None:
    pods = await asyncio.gather(*(_up(provider, p) for p in range(2)))
    server = _server(provider)
    assert [child for child in psutil.Process().children() if "preloaded_server" in str(child.cmdline())] == [server]
    assert server.environ()["TMPDIR"] == str(Path(pods[0].provider_id).parent), "by which a run's processes are counted"
    links = [PodLink(pod.name, pod.address, ssh_keys.operator_key(run_dir), timeouts=PATIENT) for pod in pods]
    agents = [psutil.Process(await _agent(x)) for x in links]
    await _until(lambda: len(server.children()) == 2, "two zygotes")
    mapped = Path(f"/proc/{server.pid}/maps").read_text()
    assert "/scipy/linalg/" in mapped, "numba's tables are filled, for which it imports this, before a loop is loaded"
    for pod, agent in zip(pods, agents, strict=True):
        zygote = await _zygote_of(server, pod)
        assert zygote.environ() == agent.environ()
        assert [word for word in zygote.cmdline() if word.strip()] == agent.cmdline()
        assert zygote.cwd() == agent.cwd()
        assert any("torch" in m.path for m in zygote.memory_maps())
        assert not agent.children(), "it has forked no zygote of its own"
    await links[0].close()
    await provider.delete(pods[0])
    assert procs.marked(pods[0].provider_id) == set()
    assert len(server.children()) == 1, "the other pod has its own still"
    agents[1].send_signal(signal.SIGKILL)
    await _until(lambda: not server.children(), "a zygote goes with its agent")
    await links[1].close()
    await provider.delete(pods[1])
    await _until(lambda: not provider.imports.runs(), "the process goes with the last pod")
    assert not provider.imports.place.parent.exists()


async def test_a_pod_imports_by_itself_where_nobody_has(provider: LocalProvider, run_dir: Path) -> None:
    """Its process has ended; or it runs another Python; or a pod's environment has no room there."""
    pod = await _up(provider, 0)
    server = _server(provider)
    x = PodLink(pod.name, pod.address, ssh_keys.operator_key(run_dir), timeouts=PATIENT)
    for more in (f"{PRELOADED_ENV}={provider.imports.place}-of-another", f"MUCH={'x' * ROOM}", ""):
        if not more:
            server.kill()
            server.wait(120)
        agent = psutil.Process(await _agent(x, more))
        await _until(lambda agent=agent: len(agent.children()) == 1, "a zygote of its own")
        agent.terminate()
        await _until(lambda agent=agent: not agent.is_running(), "the agent ends")
    await x.close()


async def test_another_is_started_for_the_next_pod_if_it_was_killed(provider: LocalProvider) -> None:
    await _up(provider, 0)
    first = _server(provider)
    first.kill()
    first.wait(120)
    await _up(provider, 1)
    assert _server(provider) != first


def listens(place: Path) -> bool:
    """Whether somebody does: the socket's file is there a moment before."""
    with socket.socket(socket.AF_UNIX) as caller:
        return caller.connect_ex(str(place)) == 0


@pytest.mark.ci(__file__)
def test_who_asks_for_something_else_gets_nothing_and_an_agent_its_zygote_which_ends_with_it(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = short / socket_name()
    process = imports_shared.start(place, 3600.0)
    while not listens(place):
        assert process.poll() is None
        time.sleep(0.01)
    with open(os.devnull) as null:
        for text, files in ((b"", 0), (b"[]\n", 4), (b"{\n", 4), (b"{}\n", 0), (b'{"argv": 1}\n', 4)):
            with socket.socket(socket.AF_UNIX) as odd:
                odd.settimeout(120)
                odd.connect(str(place))
                if text:
                    socket.send_fds(odd, [text], [null.fileno()] * files)
                odd.shutdown(socket.SHUT_WR)
                assert odd.recv(1) == b""
    monkeypatch.setenv(PRELOADED_ENV, str(place))
    spawner = Spawner(short, ["torch"])
    assert spawner.pid == 0, "another process forks"
    spawner.sock.setblocking(True)
    while spawner.imports is None:
        assert spawner.receive() is not None
    assert (spawner.imports.missing, spawner.imports.threads) == ({}, 1)
    assert spawner.imports.torch
    (zygote,) = psutil.Process(process.pid).children()
    spawner.close()
    zygote.wait(120)
    place.unlink()
    assert process.wait(120 + 60 * LOOK_S) == 0
