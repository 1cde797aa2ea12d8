"""Halts over real local pods with real agents: the sidecar's process, the one-shot, frozen pods, dead workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from uvcc_console.cli.steer import halt
from uvcc_console.core import events as ev
from uvcc_console.core import paths
from uvcc_console.core.journal.journal import Journal, read_all
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.core.supervision import SideTasks
from uvcc_console.fleet import procs, ssh_keys
from uvcc_console.fleet.agent_client import AgentClient
from uvcc_console.fleet.bootstrap import bootstrap_all
from uvcc_console.fleet.local_provider import LocalProvider
from uvcc_console.fleet.provider import Pod, PodRequest
from uvcc_console.fleet.ssh import PodLink
from uvcc_console.fleet.wheel import build_wheel
from uvcc_console.halt.machine import Times
from uvcc_console.haltd import order_socket
from uvcc_console.haltd.channels import Channels
from uvcc_console.haltd.service import Service, run_halt
from uvcc_console.runs import processes
from uvcc_engine.contract.agent_protocol.agent_commands import LaunchCommand, SignalCommand
from uvcc_engine.contract.agent_protocol.agent_messages import Lines
from uvcc_engine.contract.job.spec import WorkerSpec
from uvcc_engine.contract.machine.shortpath import short
from uvcc_engine.contract.run_files import files

WORKER = (Path(__file__).parent / "haltworker.py").read_bytes()
# Whoever obeys does so within these on a busy machine, too.
PATIENT = Times(commit=60.0, hold=60.0, release=60.0, halt=60.0, term=60.0, kill=60.0)
QUICK = replace(PATIENT, commit=0.3)  # for a hold that nobody releases
DEAF = replace(PATIENT, halt=10.0, term=2.0)  # for a pod that does not answer, beside others that do
STUBBORN = replace(PATIENT, halt=10.0)  # for a worker that does not obey: its end by SIGTERM is waited for
SIDECAR = ["-m", "uvcc_console.haltd"]
HOLDING = [
    "-c",
    "import runpy\nfrom uvcc_console.halt.ladder_types import Times\n"
    "Times.__init__.__defaults__ = (*[600.0] * 8, *Times.__init__.__defaults__[8:])\n"
    "runpy.run_module('uvcc_console.haltd', run_name='__main__')",
]
"""A sidecar that waits for minutes on every rung: whoever presses again or releases may take seconds to do so."""
PROFILE = {"job": {"kind": "private", "steps": 9}, "halt": {"lease": "60s", "auto": ["hold", "halt", "term"]}}


@dataclass
class Fleet:
    """Three pods whose agents run; made once for all tests here."""

    home: Path
    pods: dict[str, Pod]
    host_keys: dict[str, str]


async def _make(home: Path) -> Fleet:
    provider = LocalProvider(home, ttl_s=3600.0)
    made = [await provider.create(PodRequest(f"halt-test-{os.getpid()}-p{p}r0", p, 0)) for p in range(3)]
    pods = {f"p{i}r0": await provider.wait_ready(pod) for i, pod in enumerate(made)}
    links = [PodLink(name, pod.address, ssh_keys.operator_key(home)) for name, pod in pods.items()]
    await bootstrap_all(links, build_wheel(home / "wheel"), preload="none")
    for link in links:
        await link.put(WORKER, "haltworker.py")
        await link.close()
    return Fleet(home, pods, {link.name: link.host_key for link in links})


async def _unmake(fleet: Fleet) -> None:
    provider = LocalProvider(fleet.home)
    for pod in fleet.pods.values():
        await provider.delete(pod)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = asyncio.run(_make(tmp_path_factory.mktemp("fleet")))
    yield made
    asyncio.run(_unmake(made))
    assert not any(procs.marked(pod.provider_id) for pod in made.pods.values())


class Run:
    """One console run with three workers under way."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.fleet = fleet
        self.name = name
        self.dir = paths.run_dir(name)
        self.engine_run = f"{name}.full"
        self.dir.mkdir(parents=True)
        shutil.copy(fleet.home / ssh_keys.KEY_FILE, self.dir / ssh_keys.KEY_FILE)
        self.journal = Journal(self.dir / processes.JOURNAL, source="test")
        self.clients: dict[str, AgentClient] = {}
        created = ev.RunCreated(
            run=name, profile_name="t", job_kind="private", replicas=1, pipeline_stages=1, tensor=1, stages=[]
        )
        self.journal.append(ev.RunCreated(**{**ev.to_json(created), "profile": PROFILE}))
        for pod, at in fleet.pods.items():
            self.say_pod(pod, "agent", at)
        self.journal.append(ev.PhaseStarted(phase="full", engine_run=self.engine_run, steps=9, sid_job=""))

    def say_pod(self, pod: str, state: str, at: Pod) -> None:
        known = {"address": at.address, "host_key": self.fleet.host_keys[pod]}
        party = int(pod[1])
        self.journal.append(ev.PodChanged(pod=pod, party=party, replica=0, provider="local", state=state, **known))

    async def launch(self, *, steps: tuple[int, int, int] = (5, 5, 5), ignoring: str = "") -> None:
        for party, (pod, at) in enumerate(self.fleet.pods.items()):
            link = PodLink(pod, at.address, ssh_keys.operator_key(self.dir), host_key=self.fleet.host_keys[pod])
            client = self.clients[pod] = AgentClient(link, holder="test")
            await client.start()
            await client.watch(self.engine_run)
            argv = ["python3", "../../../haltworker.py", str(steps[party]), *(["ignore"] if pod == ignoring else [])]
            spec = WorkerSpec(run=self.engine_run, kind="command", coord=f"p{party}r0s0t0", argv=argv)
            await client.request(LaunchCommand(run=self.engine_run, workers=[spec]))
        for client in self.clients.values():
            async for message in client.messages():
                if isinstance(message, Lines) and files.is_heartbeat(message.src):
                    break  # it has reached its step

    def ask(self, mode: str, nonce: str, **more: object) -> None:
        self.journal.append(ev.HaltRequested(nonce=nonce, mode=mode, by="test", **more))

    @property
    def snapshot(self) -> Snapshot:
        return read_all(self.journal)

    async def done(self, nonce: str, seconds: float = 120.0) -> ev.HaltDone:
        """The verdict on a nonce."""
        async with asyncio.timeout(seconds):
            while True:
                for _, event in self.journal.since(0, kinds=("halt_done",)):
                    if isinstance(event, ev.HaltDone) and event.nonce == nonce:
                        return event
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        for client in self.clients.values():
            await client.request(SignalCommand(run=self.engine_run, signal="KILL"))
            await client.close()
            await client.link.close()
        self.journal.close()


@pytest.fixture
async def run(fleet: Fleet, request: pytest.FixtureRequest) -> AsyncIterator[Run]:
    made = Run(fleet, re.sub("[^a-z0-9-]+", "-", request.node.name)[:60])
    yield made
    await made.close()


@pytest.fixture
async def service(run: Run, request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """The run's sidecar in this process; its parameter says how long it waits."""
    task = asyncio.create_task(Service(run.dir, times=getattr(request, "param", PATIENT)).run())
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_sidecars_process_drills_holds_halts_and_ends_with_the_run(run: Run) -> None:
    await run.launch()
    sidecar = subprocess.Popen([sys.executable, *HOLDING, run.name])
    try:
        run.ask("hold", "drill-1", drill=True)
        drill = await run.done("drill-1")
        assert (drill.verified, drill.total, drill.step, drill.drill) == (3, 3, 5, True)
        assert processes.running(run.dir, processes.HALTD) == sidecar.pid
        run.ask("hold", "halt-1")
        async with asyncio.timeout(120):
            while set(a[0] for a in run.snapshot.halt.acks.values()) != {"held"}:
                await asyncio.sleep(0.01)
        run.ask("halt", "halt-1")  # the second press
        done = await run.done("halt-1")
        assert (done.mode, done.verified, done.total, done.step) == ("halt", 3, 3, 5)
        acks = run.snapshot.halt.acks
        assert {a[0] for a in acks.values()} == {"gone"}
        assert all(len(a[2]) == 64 for a in acks.values())  # each names its checkpoint
        async with asyncio.timeout(120):
            while set(run.snapshot.halt.gpus) != set(acks):
                await asyncio.sleep(0.02)
        assert set(run.snapshot.halt.gpus.values()) <= {"none", "empty"}  # whatever machine this is
        run.journal.append(ev.RunEnded(status="ok"))
        assert await asyncio.to_thread(sidecar.wait, 120) == 0
    finally:
        sidecar.kill()
        sidecar.wait()


@pytest.mark.parametrize("service", [QUICK], indirect=True, ids=["soon"])
async def test_a_hold_that_nobody_releases_becomes_a_halt(run: Run, service: None) -> None:
    await run.launch()
    run.ask("hold", "n")
    done = await run.done("n")
    assert (done.mode, done.verified, done.step) == ("halt", 3, 5)
    committed = [e for _, e in run.journal.since(0, kinds=("halt_requested",)) if isinstance(e, ev.HaltRequested)]
    assert [(e.mode, e.by) for e in committed] == [("hold", "test"), ("halt", "haltd")]


async def test_a_release_lets_the_run_go_on(run: Run, service: None) -> None:
    await run.launch()
    run.ask("hold", "n")
    run.ask("release", "n")
    done = await run.done("n")
    assert (done.mode, done.verified) == ("release", 3)
    assert run.snapshot.status == "running"


async def test_without_a_sidecar_the_same_ladder_runs_in_process(run: Run) -> None:
    await run.launch()
    done = await run_halt(run.dir, ev.HaltRequested(nonce="n", mode="halt", by="cli"))
    assert (done.verified, done.total, done.step) == (3, 3, 5)


@pytest.mark.parametrize("service", [DEAF], indirect=True, ids=["soon"])
async def test_a_frozen_pod_is_unknown_in_time_and_the_others_are_halted(run: Run, service: None) -> None:
    await run.launch()
    run.ask("hold", "warm", drill=True)
    await run.done("warm")
    frozen = [
        p
        for p in procs.marked(run.fleet.pods["p1r0"].provider_id)
        if "uvcc_console.fleet.local.localpod" in psutil.Process(p).cmdline()
    ]
    try:
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        run.ask("halt", "n")
        done = await run.done("n")
        assert (done.verified, done.total) == (2, 3)
        assert run.snapshot.halt.acks["p1r0"][0] == "unknown"
        assert done.seconds >= DEAF.halt
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
    async with asyncio.timeout(120):  # it speaks again, and is halted after all
        while run.snapshot.halt.verified < 3:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("service", [STUBBORN], indirect=True, ids=["soon"])
async def test_a_worker_that_does_not_obey_is_terminated_and_told_as_unproven(run: Run, service: None) -> None:
    await run.launch(ignoring="p2r0")
    run.ask("halt", "n")
    done = await run.done("n")
    assert (done.verified, done.total) == (2, 3)
    acks = [e for _, e in run.journal.since(0, kinds=("halt_ack",)) if isinstance(e, ev.HaltAck) and e.pod == "p2r0"]
    acks = [e for e in acks if not e.gpu]
    assert acks[-1].stage == "gone"
    assert acks[-1].checkpoint == ""
    assert "SIGTERM" in acks[-1].detail
    assert any("p2r0 (ended by SIGTERM" in a.text for a in run.snapshot.alerts)


async def test_different_steps_raise_an_alert(run: Run, service: None) -> None:
    await run.launch(steps=(5, 5, 6))
    run.ask("halt", "n")
    await run.done("n")
    assert any(a.source == "halt" and "different steps" in a.text for a in run.snapshot.alerts)


async def test_before_anything_was_launched_a_halt_is_done_at_once(run: Run, service: None) -> None:
    run.ask("halt", "n")
    done = await run.done("n")
    assert (done.verified, done.total, done.step) == (3, 3, -1)


async def test_a_sidecar_that_comes_later_takes_up_an_unfinished_halt(run: Run) -> None:
    await run.launch()
    run.ask("halt", "n")
    task = asyncio.create_task(Service(run.dir, times=PATIENT).run())
    assert (await run.done("n")).verified == 3
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_sidecar_that_comes_later_sends_a_release_that_was_only_written(run: Run) -> None:
    """It was told as done, and no agent had heard of it: the pods that were held halted at their deadline."""
    await run.launch()
    run.ask("hold", "n")
    run.ask("release", "n")
    task = asyncio.create_task(Service(run.dir, times=PATIENT).run())
    done = await run.done("n")
    assert (done.mode, done.verified, done.total) == ("release", 3, 3)
    assert {a[0] for a in run.snapshot.halt.acks.values()} == {"released"}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_two_requests_at_once_are_both_answered(run: Run, service: None) -> None:
    await run.launch()
    run.ask("halt", "one")
    run.ask("hold", "two")
    first, second = await asyncio.gather(run.done("one"), run.done("two"))
    assert (first.verified, second.verified) == (3, 3)
    assert second.mode == "halt"  # a halt under way is never weakened


UVCC = [sys.executable, "-c", "import sys; from uvcc_console.cli.main import main; sys.exit(main())"]


@contextlib.asynccontextmanager
async def sidecar_of(
    run: Run, file_limit: int = 0, program: Sequence[str] = SIDECAR
) -> AsyncIterator[subprocess.Popen[bytes]]:
    """The run's sidecar as a process, once its door is open; ``file_limit``: no file of its may grow beyond that."""
    limit = (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))) if file_limit else None
    process = subprocess.Popen([sys.executable, *program, run.name], preexec_fn=limit, stderr=subprocess.DEVNULL)
    try:
        async with asyncio.timeout(120):
            while not await _is_open(run.dir / order_socket.SOCKET):
                await asyncio.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.wait()


async def _is_open(door: Path) -> bool:
    """Whether somebody listens: the file is there a moment before."""
    try:
        with short(door) as path:
            _, writer = await asyncio.open_unix_connection(path)
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    writer.close()
    return True


async def _uvcc(*words: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *UVCC, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(120):
        out, err = await process.communicate()
    return int(process.returncode or 0), out.decode(), err.decode()


@pytest.mark.ci(__file__)
async def test_a_frozen_writer_of_the_journal_delays_no_halt(run: Run) -> None:
    await run.launch()
    async with sidecar_of(run):
        frozen = sqlite3.connect(run.dir / processes.JOURNAL, isolation_level=None)
        frozen.execute("BEGIN IMMEDIATE")  # as a conductor stopped inside a commit
        try:
            code, out, err = await _uvcc("halt", run.name, "--now")
            assert (code, "HALT 3/3 verified at step 5" in out) == (0, True), err
            assert run.snapshot.halt.nonce == ""  # nothing of it is written yet
        finally:
            frozen.execute("ROLLBACK")
            frozen.close()
        async with asyncio.timeout(120):
            while run.snapshot.halt.verified != 3:
                await asyncio.sleep(0.02)
    kinds = [type(e) for _, e in run.journal.since(0, kinds=("halt_requested", "halt_ack", "halt_done"))]
    assert kinds[0] is ev.HaltRequested
    assert kinds.count(ev.HaltRequested) == 1
    assert run.snapshot.status == "halted"


@pytest.mark.ci(__file__)
async def test_a_disk_that_takes_no_byte_more_delays_no_halt(run: Run) -> None:
    await run.launch()
    size = max(p.stat().st_size for p in run.dir.glob("journal.sqlite*"))
    async with sidecar_of(run, file_limit=size):
        code, out, err = await _uvcc("halt", run.name)
        assert (code, "HALT 3/3 verified at step 5" in out) == (0, True), err
        assert "gone at step 5" in err  # the evidence, pod by pod


async def test_where_no_sidecar_can_be_started_the_command_halts_by_itself(run: Run) -> None:
    await run.launch()
    (run.dir / f"{processes.HALTD}.log").mkdir()  # so that it cannot
    code, out, err = await _uvcc("halt", run.name)
    assert (code, "HALT 3/3 verified at step 5" in out) == (0, True), err
    assert "this process halts by itself" in err


@pytest.mark.ci(__file__)
async def test_a_drill_and_a_release_go_by_the_door_too(run: Run) -> None:
    await run.launch()
    async with sidecar_of(run, program=HOLDING):
        for code, out, err in await asyncio.gather(*[_uvcc("halt", run.name, "--drill") for _ in range(2)]):
            assert (code, "DRILL 3/3 verified" in out) == (0, True), err  # of two at once one waited for two minutes
        hold = ev.HaltRequested(nonce="n", mode="hold", by="test")
        assert await asyncio.to_thread(order_socket.ask, run.dir, hold)
        code, out, err = await _uvcc("halt", run.name, "--release")
        assert (code, "RELEASE 3/3 verified" in out) == (0, True), err
        code, out, err = await _uvcc("halt", run.name, "--release")
        assert (code, "nothing is held" in err) == (2, True), err  # it waited for two minutes
    assert run.snapshot.status == "running"


async def test_what_is_no_request_is_hung_up_on(run: Run) -> None:
    async with sidecar_of(run):
        for junk in (b"\n", b"[]\n", b'{"mode": "explode", "nonce": "n"}\n', b"x" * 200_000, b'{"mode": "halt"}\n'):
            with short(run.dir / order_socket.SOCKET) as path:
                reader, writer = await asyncio.open_unix_connection(path)
            writer.write(junk)
            async with asyncio.timeout(120):
                with contextlib.suppress(ConnectionError):  # what it hung up on may still have been on its way
                    assert await reader.read() == b""
            writer.close()
        assert await asyncio.to_thread(order_socket.ask, run.dir, ev.HaltRequested(nonce="n", mode="halt", by="test"))
    assert not await asyncio.to_thread(order_socket.ask, run.dir, ev.HaltRequested(nonce="m", mode="halt", by="test"))


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.ci(__file__)), "meanwhile"])
async def test_a_frozen_sidecar_delays_no_halt(run: Run, when: str) -> None:
    """Stopped, it still holds its door open: whoever knocks is not kept waiting."""
    await run.launch()
    async with sidecar_of(run) as process:
        os.kill(process.pid, signal.SIGSTOP)
        if when == "meanwhile":  # to others it looks as if it ran
            (run.dir / "haltd.json").write_text(json.dumps(spawn_record()))
        code, out, err = await _uvcc("halt", run.name, "--now")
        assert (code, "HALT 3/3 verified at step 5" in out) == (0, True), err
        assert "this process halts by itself" in err


async def test_a_sidecar_frozen_before_it_listens_is_told_of(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its door is there and nobody opens: the command says that it halts by itself."""
    with order_socket.short(run.dir / order_socket.SOCKET) as path, socket.socket(socket.AF_UNIX) as door:
        door.bind(path)
        (run.dir / "haltd.json").write_text(json.dumps(spawn_record()))
        monkeypatch.setattr(halt, "START_S", 0.05)
        said: list[str] = []
        monkeypatch.setattr(halt.common, "say", said.append)
        halt.open_route(run.dir).close()
    assert said == ["uvcc: no halt sidecar listens; this process halts by itself"]


def spawn_record() -> dict[str, int]:
    me = procs.identify(os.getpid())
    assert me is not None
    return {"pid": me.pid, "starttime": me.starttime}


@pytest.mark.ci(__file__)
async def test_another_machine_under_a_pods_name_gets_a_channel_at_once(run: Run, fleet: Fleet) -> None:
    """A pod may be gone and replaced between two looks at the journal: the state says "agent" before and after."""
    channels, told = Channels(run.dir, "test", SideTasks(None, run.journal.append)), list[tuple[str, bool]]()
    channels.on_link = lambda pod, up: told.append((pod, up))

    async def up(address: str) -> None:
        client = channels.clients["p0r0"]
        assert client.link.address == address
        await client.start()

    try:
        channels.sync(run.snapshot, 0.0)
        await up(fleet.pods["p0r0"].address)
        there = run.snapshot.pods["p1r0"]
        run.journal.append(
            *(
                ev.PodChanged(
                    pod="p0r0", party=0, replica=0, provider="local", state=state, address=address, host_key=key
                )
                for state, address, key in (
                    ("gone", "", ""),
                    ("creating", "", ""),
                    ("agent", there.address, there.host_key),
                )
            )
        )
        channels.sync(run.snapshot, 0.0)
        await up(there.address)
        assert [heard for heard in told if heard[0] == "p0r0"] == [("p0r0", True), ("p0r0", False), ("p0r0", True)]
        assert set(channels.clients) == set(fleet.pods)
    finally:
        await channels.close()
