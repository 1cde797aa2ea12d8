"""Conductor and sidecar watch each other: real processes are killed and frozen, and the other one sees to it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from uvcc_console.core import events as ev
from uvcc_console.core import paths
from uvcc_console.core.journal.journal import Journal, read_all
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.fleet import procs, pulse
from uvcc_console.fleet.local_provider import LocalProvider
from uvcc_console.fleet.provider import PodRequest
from uvcc_console.haltd import service, stand_in
from uvcc_console.plan.profile import load
from uvcc_console.rollout import side_tasks
from uvcc_console.rollout.bus import Bus
from uvcc_console.runs import notices, notify, processes

AGAIN_S = 3600.0  # the same is not said again while a test lasts
# what a conductor is to others: its lock, its record, its beat; with "commit" it is in the middle of a transaction
CONDUCTOR = """
import sqlite3, sys, time
from pathlib import Path
from uvcc_console.fleet import pulse
from uvcc_console.runs import conducting, processes
folder = Path(sys.argv[1])
with conducting.run_lock(folder):
    processes.write_record(folder, processes.CONDUCTOR)
    beat = pulse.Beat(folder, processes.CONDUCTOR)
    beat.beat()
    db = sqlite3.connect(folder / processes.JOURNAL, isolation_level=None)
    if sys.argv[2] == "commit":
        db.execute("BEGIN IMMEDIATE")
    if sys.argv[2] == "tell":
        import asyncio, threading
        from uvcc_console.core.journal.journal import Journal
        from uvcc_console.rollout import telling
        from uvcc_console.rollout.bus import Bus
        from uvcc_console.runs import notices, notify
        from uvcc_console.runs.notify import Notifier
        notices.AGAIN_S = notify.AGAIN_S = float(sys.argv[3])
        async def tell():
            bus = Bus(Journal(folder / processes.JOURNAL, source="conductor"))
            following = asyncio.create_task(bus.run())
            look, looks = Notifier.look, []
            def looked(*at):
                look(*at)
                looks.append(at)
                if len(looks) == 2:
                    print("ready", flush=True)
            Notifier.look = looked
            await telling.tell_operator(folder, bus)
        telling.LOOK_EVERY_S = 0.05
        threading.Thread(target=lambda: asyncio.run(tell()), daemon=True).start()
    else:
        print("ready", flush=True)
    while True:
        beat.beat()
        time.sleep(0.05)
"""


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "STOPPED_S", 1.0)
    monkeypatch.setattr(service, "REAP_EVERY_S", 0.1)


@dataclass
class Run:
    """One local pod and whoever conducts it."""

    dir: Path
    journal: Journal
    conductors: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def snapshot(self) -> Snapshot:
        return read_all(self.journal)

    def conduct(self, how: str = "") -> subprocess.Popen[bytes]:
        words = [str(self.dir), how, str(AGAIN_S)]
        child = subprocess.Popen([sys.executable, "-c", CONDUCTOR, *words], stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        self.conductors.append(child)
        return child

    async def until(self, met: Callable[[Snapshot], Any], seconds: float = 120.0) -> Snapshot:
        async with asyncio.timeout(seconds):
            while not met(s := self.snapshot):
                await asyncio.sleep(0.02)
        return s


async def make(settings: list[str]) -> Run:
    name, profile = load("demo", settings)
    run_dir = paths.run_dir("watched")
    run_dir.mkdir(parents=True)
    journal = Journal(run_dir / processes.JOURNAL, source="test")
    journal.append(
        ev.RunCreated(
            run="watched",
            profile_name=name,
            job_kind="private",
            replicas=1,
            pipeline_stages=1,
            tensor=1,
            stages=[],
            profile=profile.model_dump(mode="json"),
        )
    )
    provider = LocalProvider(run_dir, ttl_s=3600.0)
    pod = await provider.wait_ready(await provider.create(PodRequest("uvcc-watched-p0r0", 0, 0)))
    ready = ev.PodChanged(pod="p0r0", party=0, replica=0, provider="local", state="ready", address=pod.address)
    journal.append(ready)
    return Run(run_dir, journal)


@pytest.fixture
async def run(request: pytest.FixtureRequest, short: Path) -> AsyncIterator[Run]:
    """``short``: runs of other tests have the same name, and what ends one looks for its pods everywhere."""
    made = await make(getattr(request, "param", ["limits.wait=1h", "limits.ttl=2h"]))
    yield made
    for child in made.conductors:
        child.kill()
        child.wait()
    for name in (processes.CONDUCTOR, processes.HALTD):
        if (who := processes.recorded(made.dir, name)) is not None:
            pulse.end(who)
    made.journal.close()
    provider = LocalProvider(made.dir)
    for pod in await provider.list("uvcc-watched-"):
        await provider.delete(pod)


def alerts(s: Snapshot) -> str:
    return "\n".join(a.text for a in s.alerts)


async def test_a_frozen_conductor_is_told_of_and_so_is_its_return(run: Run) -> None:
    child = run.conduct()
    serving = asyncio.create_task(service.Service(run.dir).run())
    try:
        os.kill(child.pid, signal.SIGSTOP)
        s = await run.until(lambda s: "frozen" in alerts(s))
        assert f"pid {child.pid}" in alerts(s)
        assert any(f"kill -CONT {child.pid}" in e.text for e in s.log)
        os.kill(child.pid, signal.SIGCONT)
        await run.until(lambda s: "moves again" in alerts(s))
        child.kill()
        child.wait()
        s = await run.until(lambda s: "has died" in alerts(s))
        assert not s.ended  # it may be resumed: only limits.wait, the caps and the time to live end it
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


def alarm(text: str) -> ev.Alert:
    return ev.Alert(level="error", name=text, text=text, subject="p0r0")


@pytest.mark.ci(__file__)
async def test_the_operator_is_notified_once_of_everything_though_the_conductor_is_killed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, told = tmp_path / "tell", tmp_path / "told"
    program.write_text(f'#!/bin/sh\necho "$1" >> {told}\n')
    program.chmod(0o755)
    monkeypatch.setenv("UVCC_NOTIFY_COMMAND", str(program))
    monkeypatch.setattr(stand_in, "BACK_S", 2.0)  # some looks of the sidecar: in 0.5 s there may be none

    def lines() -> list[str]:
        return told.read_text().splitlines() if told.exists() else []

    def noted() -> str:  # once it is, nobody sends it again
        path = run.dir / "notices.jsonl"
        return path.read_text() if path.exists() else ""

    async def until_told(*words: str) -> None:
        async with asyncio.timeout(120):
            while not all(word in noted() and any(word in line for line in lines()) for word in words):
                await asyncio.sleep(0.02)

    for module in (notices, notify):
        monkeypatch.setattr(module, "AGAIN_S", AGAIN_S)
    looks: list[float] = []
    look = stand_in.StandIn.look

    def looked(self: stand_in.StandIn, s: Snapshot, conductor: str, now: float) -> None:
        look(self, s, conductor, now)
        looks.append(now)

    monkeypatch.setattr(stand_in.StandIn, "look", looked)
    child = run.conduct("tell")
    serving = asyncio.create_task(service.Service(run.dir).run())
    try:
        await run.until(lambda s: len(looks) > 1)
        run.journal.append(alarm("first"))
        await until_told("first")
        os.kill(child.pid, signal.SIGSTOP)
        run.journal.append(alarm("second"))  # the conductor will not have time to tell it
        child.kill()
        child.wait()
        await until_told("second", "has died")
        run.journal.append(alarm("third"))
        await until_told("third")
        run.conduct("tell")
        await run.until(lambda s: "moves again" in alerts(s))
        await until_told("moves again")
        run.journal.append(alarm("fourth"))
        await until_told("fourth")
        run.conductors[-1].kill()
        run.conductors[-1].wait()
        async with asyncio.timeout(120):
            while sum("has died" in a.text for a in run.snapshot.alerts) < 2:
                await asyncio.sleep(0.02)
        run.journal.append(alarm("fifth"))
        await until_told("fifth")
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
    # the second death is the same word as the first, and not said again for a while
    wanted = ("first", "second", "has died", "third", "moves again", "fourth", "fifth")
    assert [sum(word in line for line in lines()) for word in wanted] == [1] * len(wanted), lines()


@pytest.mark.parametrize("run", [["limits.wait=1h", "limits.ttl=0.5s"]], indirect=True)
async def test_the_time_to_live_holds_though_the_conductor_is_frozen_in_a_commit(run: Run) -> None:
    """It holds the lock of the run and that of the journal: it makes way, and a new one tears down with proof."""
    child = run.conduct("commit")
    os.kill(child.pid, signal.SIGSTOP)
    await asyncio.wait_for(service.Service(run.dir).run(), 120)
    s = await run.until(lambda s: s.ended)
    assert child.wait() == -signal.SIGKILL
    assert "time to live" in alerts(s)
    assert {p.state for p in s.pods.values()} <= {"gone", "planned"}
    assert await LocalProvider(run.dir).list("uvcc-watched-") == []
    assert not s.leaks


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGSTOP, id="frozen", marks=pytest.mark.ci(__file__)),
    ],
)
async def test_a_sidecar_that_is_lost_is_replaced_and_that_is_told(run: Run, number: signal.Signals) -> None:
    run.conduct()
    bus = Bus(run.journal)
    ctx: Any = SimpleNamespace(bus=bus, run_dir=run.dir, sidecar=processes.start(run.dir, processes.HALTD))
    tasks = [asyncio.create_task(bus.run()), asyncio.create_task(side_tasks.guard_sidecar(ctx))]

    async def moving() -> int:
        async with asyncio.timeout(120):
            while not (found := processes.vital(run.dir, processes.HALTD)).moving:
                await asyncio.sleep(0.02)
        assert found.who is not None
        return found.who.pid

    first = await moving()
    lost = time.monotonic()
    os.kill(first, number)
    async with asyncio.timeout(120):
        while (another := processes.running(run.dir, processes.HALTD)) in (0, first):
            await asyncio.sleep(0.02)
    took = time.monotonic() - lost
    assert await moving() == another
    s = await run.until(lambda s: "the halt sidecar" in alerts(s))
    assert ("frozen" if number == signal.SIGSTOP else "has died") in alerts(s)
    assert alerts(s).count("sidecar") == 1
    assert procs.identify(first) is None  # the frozen one does not wake up beside it
    print(f"replaced after {took:.2f} s")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.ci(__file__)
async def test_two_sidecars_that_start_at_once_are_one(run: Run) -> None:
    run.conduct()
    started = [processes.start(run.dir, processes.HALTD) for _ in range(3)]
    async with asyncio.timeout(120):
        while sum(child.poll() is None for child in started) != 1 or not processes.running(run.dir, processes.HALTD):
            await asyncio.sleep(0.02)
    (left,) = [child for child in started if child.poll() is None]
    assert left.pid == processes.running(run.dir, processes.HALTD)
    assert all(child.poll() == 0 for child in started if child is not left)
    left.terminate()
    await asyncio.to_thread(left.wait, 120)


UVCC = [sys.executable, "-c", "import sys; from uvcc_console.cli.main import main; sys.exit(main())"]


async def uvcc(*words: str, limit: Callable[[], None] | None = None) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *UVCC, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, preexec_fn=limit
    )
    async with asyncio.timeout(150):
        out, err = await process.communicate()
    return int(process.returncode or 0), out.decode(), err.decode()


@pytest.mark.ci(__file__)
async def test_a_teardown_waits_for_nobody_who_is_frozen_in_a_commit(run: Run) -> None:
    child = run.conduct("commit")
    os.kill(child.pid, signal.SIGSTOP)
    code, out, err = await uvcc("teardown", run.dir.name)
    assert (code, "3 pods proven gone" in out) == (0, True), err
    assert "the conductor makes way" in err
    assert child.wait() == -signal.SIGKILL
    assert await LocalProvider(run.dir).list("uvcc-watched-") == []
    assert run.snapshot.status == "torn_down"


@pytest.mark.ci(__file__)
async def test_a_teardown_does_not_need_a_disk_that_takes_a_byte(run: Run) -> None:
    """The command and the conductor that it starts may write nothing at all; the pods end all the same, with proof."""

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

    code, out, err = await uvcc("teardown", run.dir.name, limit=full)
    assert (code, "every pod is gone" in out) == (0, True), err
    assert "cannot be written down" in err
    assert await LocalProvider(run.dir).list("uvcc-watched-") == []
    assert not run.snapshot.ended
    async with asyncio.timeout(120):
        while not _free(run.dir):  # the conductor without a disk waits a while for it
            await asyncio.sleep(0.1)
    code, out, err = await uvcc("teardown", run.dir.name)  # with room on the disk the journal follows
    assert (code, "3 pods proven gone" in out) == (0, True), err
    assert run.snapshot.status == "torn_down"


def _free(run_dir: Path) -> bool:
    with (run_dir / "conductor.lock").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


async def test_a_conductor_that_moves_but_cannot_be_written_to_is_told_by_a_signal(run: Run) -> None:
    child = run.conduct()
    locked = sqlite3.connect(run.dir / processes.JOURNAL, isolation_level=None)
    locked.execute("BEGIN IMMEDIATE")  # whoever that is: it is none of the run's own processes
    try:
        code, _, err = await uvcc("teardown", run.dir.name)
        assert child.wait() == -signal.SIGTERM
        assert "by a signal" in err
        assert (code, "NOT proven gone: uvcc-watched-p0r0" in err) == (1, True), err
    finally:
        locked.execute("ROLLBACK")
        locked.close()
