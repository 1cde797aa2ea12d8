"""Local pods are real processes with a real SSH server; when they are deleted nothing of them is left."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from uvcc_console.fleet import local_provider, podhome, procs, ssh_keys
from uvcc_console.fleet.local import localpod
from uvcc_console.fleet.local_provider import LocalProvider
from uvcc_console.fleet.provider import Pod, PodRequest
from uvcc_console.fleet.provider_kinds import provider_for
from uvcc_console.fleet.ssh import PodLink, Timeouts
from uvcc_console.fleet.wheel import engine_package
from uvcc_engine.contract.errors import ConfigError, UnreachableError
from uvcc_engine.contract.machine.compiled import kept_in
from uvcc_engine.contract.machine.preloaded import PRELOADED_ENV

PATIENT = Timeouts(connect=60.0, login=60.0, operation=60.0, keepalive_s=10.0)


@pytest.fixture
async def provider(run_dir: Path) -> AsyncIterator[LocalProvider]:
    made = provider_for({"provider": "local"}, run_dir, ttl_s=3600.0)
    assert isinstance(made, LocalProvider)
    yield made
    for pod in await made.list("uvcc-test-"):
        if pod.provider_id.startswith(str(made._base)):
            await made.delete(pod)
    await made.close()


def request(party: int = 0, replica: int = 0) -> PodRequest:
    return PodRequest(f"uvcc-test-{os.getpid()}-p{party}r{replica}", party, replica)


async def up(provider: LocalProvider, party: int = 0) -> Pod:
    return await provider.wait_ready(await provider.create(request(party)))


def link(run_dir: Path, pod: Pod, timeouts: Timeouts = PATIENT) -> PodLink:
    return PodLink(pod.name, pod.address, ssh_keys.operator_key(run_dir), timeouts=timeouts)


async def test_three_pods_are_apart(provider: LocalProvider, run_dir: Path) -> None:
    pods = await asyncio.gather(*(up(provider, p) for p in range(3)))
    links = [link(run_dir, pod) for pod in pods]
    homes = await asyncio.gather(*(x.sh("pwd") for x in links))
    assert homes == [pod.provider_id for pod in pods]
    assert len({x.host_key for x in links}) == 3
    assert len({pod.port for pod in pods}) == 3
    for x in links:
        await x.close()


async def test_a_session_sees_its_own_environment_only(provider, run_dir, monkeypatch) -> None:
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "PRIME_API_KEY", "UVCC_HOME"):
        monkeypatch.setenv(name, "secret")
    x = link(run_dir, await up(provider))
    env = dict(line.split("=", 1) for line in (await x.sh("env")).splitlines() if "=" in line)
    assert not {"PYTHONPATH", "VIRTUAL_ENV", "PRIME_API_KEY", "UVCC_HOME"} & set(env)
    assert env["HOME"] == env["UVCC_POD"] == await x.sh("pwd")
    assert Path(await x.sh("command -v python3")).parent == Path(sys.executable).parent
    assert len(env["HOME"]) < 60
    await x.close()


async def test_streams_exit_codes_and_signals_pass_unchanged(provider, run_dir) -> None:
    x = link(run_dir, await up(provider))
    noise = os.urandom(300_000)
    done = await x.run("cat; exit 7", stdin=noise)
    assert (done.exit, done.stdout) == (7, noise)
    assert (await x.run("echo out; echo err >&2")).stderr == b"err\n"
    assert (await x.run("kill -9 $$")).signal == "KILL"
    process = await x.open("trap 'echo got it; exit 5' TERM; echo ready; while :; do sleep 0.01; done")
    assert await process.stdout.readline() == b"ready\n"
    process.send_signal("TERM")
    assert await process.stdout.read() == b"got it\n"
    await process.wait()
    assert process.exit_status == 5
    await x.close()


async def test_only_the_runs_key_opens_it_and_an_eleventh_session_takes_another_connection(
    provider, run_dir, tmp_path
) -> None:
    pod = await up(provider)
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    with pytest.raises(UnreachableError, match="refuses the key"):
        await link(stranger, pod).connect()
    x = link(run_dir, pod)
    opened = [await x.open("cat") for _ in range(10)]
    opened.append(await x.open("cat"))  # a connection has room for ten
    for process in opened:
        process.stdin.write_eof()
        await process.wait()
    assert await x.sh("echo again") == "again"
    await x.close()


async def test_deleting_ends_what_moved_to_other_sessions_and_removes_the_home(provider, run_dir) -> None:
    pod = await up(provider)
    x = link(run_dir, pod)
    await x.sh(
        "setsid -f sh -c 'setsid sleep 977 & trap \"\" TERM; while :; do sleep 0.1; done' </dev/null >a.log 2>&1"
    )
    adopts = hasattr(ctypes.CDLL(None), "prctl")  # what dropped the mark is found by its parentage, on Linux only
    alone = f"sleep 978.{os.getpid()}"  # nobody else's
    if adopts:
        await x.sh(f"(setsid -f env -i {alone} </dev/null >/dev/null 2>&1); echo x > file")
    mark = pod.provider_id
    while len(procs.marked(mark)) < 4:  # pod, shell, its child, its sleep
        await asyncio.sleep(0.01)
    unmarked = list[int]()
    while len(unmarked) < adopts:  # its shell has returned before it was this program
        unmarked = [p.pid for p in psutil.process_iter(["cmdline"]) if " ".join(p.info["cmdline"] or ()) == alone]
    assert len(unmarked) == adopts
    await x.close()
    await provider.delete(pod)
    assert procs.marked(mark) == set()
    assert not any(map(procs.identify, unmarked))
    assert not Path(mark).exists()
    assert not Path(mark).parent.exists()
    await provider.delete(pod)  # idempotent
    assert [p for p in await provider.list(pod.name)] == []


async def test_an_ended_orphan_leaves_no_zombie(provider, run_dir) -> None:
    pod = await up(provider)
    x = link(run_dir, pod)
    pid = int(
        await x.sh(
            "setsid -f sh -c 'echo $$ > pid; exit 0' </dev/null >/dev/null 2>&1; "
            "until [ -s pid ]; do sleep 0.01; done; cat pid"
        )
    )
    async with asyncio.timeout(120):
        while psutil.pid_exists(pid):
            await asyncio.sleep(0.02)
    await x.close()


async def test_a_pod_whose_folder_cannot_be_removed_is_told_as_that(provider, run_dir, monkeypatch) -> None:
    """It said that processes were left, and listed none."""
    pod, ends = await up(provider), podhome.clean_up

    def leaving(home: Path) -> set[int]:
        left = ends(home)
        home.mkdir(parents=True)
        return left

    with monkeypatch.context() as patch:
        patch.setattr(podhome, "clean_up", leaving)
        with pytest.raises(UnreachableError, match=r"no process is left, but its folder .* cannot be removed"):
            await provider.delete(pod)
    await provider.delete(pod)


def test_what_is_left_of_a_pod_keeps_the_record_that_shows_it(tmp_path: Path) -> None:
    home = tmp_path / "run" / "p0r0"
    home.mkdir(parents=True)
    record = home.with_suffix(".pod")
    record.write_text("{}")
    podhome.remove_files(home)
    assert record.exists()
    home.rmdir()
    podhome.remove_files(home)
    assert not home.parent.exists()


async def test_a_killed_pod_is_listed_and_its_orphans_are_swept(provider, run_dir) -> None:
    pod = await up(provider)
    x = link(run_dir, pod)
    await x.sh("setsid -f sleep 979 </dev/null >/dev/null 2>&1")
    mine = map(psutil.Process, procs.marked(pod.provider_id))
    (server,) = [p.pid for p in mine if "uvcc_console.fleet.local.localpod" in p.cmdline()]
    os.kill(server, signal.SIGKILL)
    sweeper = provider_for({}, run_dir)
    (found,) = await sweeper.list(pod.name)
    assert found.provider_id == pod.provider_id
    await sweeper.delete(found)
    assert procs.marked(pod.provider_id) == set()
    assert not Path(pod.provider_id).exists()


async def test_a_frozen_pod_can_be_deleted(provider, run_dir) -> None:
    pod = await up(provider)
    x = link(run_dir, pod, replace(PATIENT, keepalive_s=1.0, keepalive_count=2))
    await x.connect()
    x.timeouts = replace(x.timeouts, connect=1.0, login=1.0)  # nobody will answer from here on
    for pid in procs.marked(pod.provider_id):
        os.kill(pid, signal.SIGSTOP)
    with pytest.raises(UnreachableError):  # the keepalive notices, well before the time-out
        await x.run("echo hello", timeout=150.0)
    assert not x.up
    await provider.delete(pod)
    assert procs.marked(pod.provider_id) == set()


async def test_a_pod_ends_with_its_runs_folder(provider, run_dir) -> None:
    pod = await up(provider)
    child = provider.children[pod.provider_id]
    for file in run_dir.iterdir():
        file.unlink()
    run_dir.rmdir()
    assert await asyncio.to_thread(child.wait, 120) == 0
    assert not Path(pod.provider_id).exists()
    assert not Path(pod.provider_id).with_suffix(".pod").exists()


async def test_a_pod_ends_when_its_time_is_over(run_dir: Path) -> None:
    short = provider_for({}, run_dir, ttl_s=0.3)
    assert isinstance(short, LocalProvider)
    pod = await short.create(request(2))
    assert await asyncio.to_thread(short.children[pod.provider_id].wait, 120) == 0
    assert await short.list(pod.name) == []
    assert procs.marked(pod.provider_id) == set()


async def test_creating_again_adopts_the_pod(provider, run_dir) -> None:
    pod = await up(provider)
    other = provider_for({}, run_dir)
    assert await other.create(request()) == pod
    assert len([p for p in await other.list(pod.name)]) == 1


async def test_a_pod_that_cannot_start_is_told_with_its_last_words(run_dir, monkeypatch) -> None:
    provider = provider_for({}, run_dir)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    pod = await provider.create(request(1))
    with pytest.raises(Exception, match="ended while starting"):
        await provider.wait_ready(pod)
    await provider.delete(pod)
    assert await provider.list(pod.name) == []


def test_an_unknown_provider_names_the_nearest(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="local"):
        provider_for({"provider": "lokal"}, run_dir)


def test_a_process_is_told_from_a_later_one_with_its_pid() -> None:
    child = subprocess.Popen(["sleep", "60"])
    who = procs.identify(child.pid)
    assert who is not None
    assert procs.alive(who)
    assert not procs.alive(procs.LocalProcess(who.pid, who.starttime + 1))
    child.kill()
    child.wait()
    assert not procs.alive(who)


def test_the_image_environment_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PRELOADED_ENV, raising=False)
    env = localpod.environment(tmp_path)
    ours = {"UVCC_POD", "UVCC_LOOPS", "UVCC_BYTECODE"}
    assert set(env) == {"HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "TMPDIR"} | ours
    # three pods would compile the same loops beside each other; the installation's own are theirs too
    assert env["UVCC_LOOPS"] == str(kept_in(engine_package()))


async def test_a_run_folder_that_goes_as_a_pod_comes_is_made_again(provider, run_dir, monkeypatch) -> None:
    """The last pod of a run takes the folder along, between the next one's mkdir and its look at what it found."""
    once = [FileExistsError(17, "File exists"), FileNotFoundError(2, "No such file")]
    own = local_provider.claim_folder

    def raced(base: Path) -> None:
        if once:
            raise once.pop()
        own(base)

    monkeypatch.setattr(local_provider, "claim_folder", raced)
    await up(provider)
    assert once == []


async def test_a_folder_that_somebody_removes_meanwhile_hides_no_pod(
    provider: LocalProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine's temporary folder is everybody's: an auditor's package comes and goes there beside a sweep."""
    monkeypatch.setattr(local_provider, "temp_root", lambda: tmp_path)
    gone, base = tmp_path / "uvcc-package-x", tmp_path / "uvcc-0"
    gone.mkdir()
    base.mkdir()
    pod = Pod("uvcc-other-p0r0", 0, 0, "local", str(base / "p0r0"))
    (base / "p0r0.pod").write_text(json.dumps(asdict(pod)))
    scandir = os.scandir

    def vanishing(path: Any) -> Any:
        if gone.exists() and Path(path) != tmp_path:
            gone.rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert [pod.name for pod in await provider.list("uvcc-other-")] == ["uvcc-other-p0r0"]
