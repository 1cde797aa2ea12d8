"""What runs beside a sidecar's halts: each is killed once, told, and comes back; halts are obeyed meanwhile."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from uvcc_console.core import events as ev
from uvcc_console.core import paths, supervision
from uvcc_console.core.journal.journal import Journal
from uvcc_console.fleet import ssh_keys
from uvcc_console.halt.machine import Times
from uvcc_console.haltd import channels, gpus, service
from uvcc_console.haltd.service import Service
from uvcc_console.runs import processes
from uvcc_engine.contract.agent_protocol.agent_commands import Command
from uvcc_engine.contract.agent_protocol.agent_messages import Ack, AgentMessage, HaltStage
from uvcc_engine.contract.run_files.records import Malformed

AT_ONCE = Times(commit=0.05, hold=0.05, halt=0.05, term=0.05, kill=0.05, terminate=30.0)
WORKS = (
    "the halt channel to p0r0",
    "the look at the GPUs of p0r0",
    "the termination of p0r0",
    "the watch over the run",
    "the teardown without a conductor",
)
PROFILE = {
    "job": {"kind": "private", "steps": 9},
    "fleet": {"provider": "local"},
    "halt": {"lease": 0.1, "auto": ["hold", "halt"]},
}


class ClientFake:
    """An agent channel that takes every command; what it says is put into ``words``."""

    made: list[ClientFake]

    def __init__(self, link: Any, *, holder: str, lease_s: float, on_link: Callable[[bool, str], None]) -> None:
        self.link = link
        self.up = True
        self.words: asyncio.Queue[AgentMessage | Malformed | Exception] = asyncio.Queue()
        self.renewed = 0
        self.fail_to_renew = False
        self.posted: list[Command] = []
        self.closed = False
        ClientFake.made.append(self)

    def begin(self) -> None:
        return

    async def messages(self) -> AsyncIterator[AgentMessage | Malformed]:
        while True:
            word = await self.words.get()
            if isinstance(word, Exception):
                raise word
            yield word

    async def request(self, command: Command, *, timeout: float) -> dict[str, Any]:
        if self.fail_to_renew:
            raise RuntimeError("a defect")
        self.renewed += 1
        return {}

    def post(self, command: Command, *, nonce: str) -> asyncio.Future[Ack] | None:
        self.posted.append(command)
        answer: asyncio.Future[Ack] = asyncio.get_running_loop().create_future()
        answer.set_result(Ack(nonce=nonce, ok=True))
        return answer

    async def close(self) -> None:
        self.closed = True
        self.up = False


class ProviderFake:
    async def list(self, prefix: str) -> list[Any]:
        return []

    async def delete(self, pod: Any) -> None:
        raise AssertionError("nothing is there to delete")

    async def close(self) -> None:
        return


class FailingOnce:
    """Raises at its first call; then it is what it stands for."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self.calls, self._work = 0, work

    def __call__(self, *args: Any, **more: Any) -> Any:
        self.calls += 1
        if self.calls == 1:
            raise RuntimeError("a defect")
        return self._work(*args, **more)


@pytest.fixture
async def journal(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Journal]:
    ClientFake.made = []
    monkeypatch.setattr(channels, "AgentClient", ClientFake)
    monkeypatch.setattr(supervision, "FIRST_S", 0.01)
    monkeypatch.setattr(service, "REAP_EVERY_S", 0.02)
    run_dir = paths.run_dir("beside")
    run_dir.mkdir(parents=True)
    ssh_keys.operator_key(run_dir)
    made = Journal(run_dir / processes.JOURNAL, source="test")
    created = ev.RunCreated(
        run="beside", profile_name="t", job_kind="private", replicas=1, pipeline_stages=1, tensor=1, stages=[]
    )
    made.append(
        ev.RunCreated(**{**ev.to_json(created), "profile": PROFILE}),
        ev.PodChanged(
            pod="p0r0",
            party=0,
            replica=0,
            provider="local",
            state="agent",
            address="127.0.0.1:9",
            host_key="ssh-ed25519 AA",
        ),
        ev.PhaseStarted(phase="full", engine_run="beside.full", steps=9, sid_job=""),
    )
    yield made
    made.close()


def pod_is(pod: str, state: str) -> ev.PodChanged:
    at = {"address": f"127.0.0.{pod[1]}:9", "host_key": "ssh-ed25519 AA"} if state == "agent" else {}
    return ev.PodChanged(pod=pod, party=int(pod[1]), replica=0, provider="local", state=state, **at)


async def until(found: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not found():
            await asyncio.sleep(0.005)


def alerts(journal: Journal) -> list[ev.Alert]:
    found = (e for _, e in journal.since(0, kinds=(ev.Alert.kind,)))
    return [e for e in found if isinstance(e, ev.Alert) and e.name == "side_task"]


def acks(journal: Journal) -> list[ev.HaltAck]:
    return [e for _, e in journal.since(0, kinds=(ev.HaltAck.kind,)) if isinstance(e, ev.HaltAck)]


async def break_channel(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    await until(lambda: bool(ClientFake.made and ClientFake.made[0].renewed))
    ClientFake.made[0].words.put_nowait(RuntimeError("a defect"))
    return lambda: len(ClientFake.made) == 2 and ClientFake.made[0].closed and ClientFake.made[1].renewed > 0


async def break_gpus(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    async def look(*_: object) -> tuple[str, str]:
        return gpus.EMPTY, "GPU empty"

    monkeypatch.setattr(gpus, "look", FailingOnce(look))
    journal.append(ev.HaltRequested(nonce="n", mode="halt", by="t"))
    await until(lambda: bool(ClientFake.made and ClientFake.made[0].posted))
    gone = HaltStage(run="beside.full", nonce="n", stage="gone", coord="p0r0s0t0", step=4, checkpoint="ab")
    ClientFake.made[0].words.put_nowait(gone)
    return lambda: any(a.gpu == gpus.EMPTY for a in acks(journal))


async def break_termination(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    monkeypatch.setattr(service, "provider_for", FailingOnce(lambda *_: ProviderFake()))
    journal.append(ev.HaltRequested(nonce="n", mode="halt", by="t"))
    await until(lambda: bool(acks(journal)))
    journal.append(ev.HaltRequested(nonce="n", mode="terminate", by="t"))
    return lambda: any((a.stage, a.path) == ("gone", "api") for a in acks(journal))


async def break_watch(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    due = FailingOnce(lambda *_, **__: "")
    monkeypatch.setattr(service.Reaper, "due", lambda *args, **more: due(*args, **more))
    return lambda: due.calls >= 3


async def break_teardown(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    start, reasons = FailingOnce(lambda *_: None), ["nobody conducts it"]
    monkeypatch.setattr(service.Reaper, "due", lambda *_, **__: reasons.pop() if reasons else "")
    monkeypatch.setattr(processes, "start", start)
    return lambda: start.calls == 2


BREAKS = dict(zip(WORKS, (break_channel, break_gpus, break_termination, break_watch, break_teardown), strict=True))


@pytest.mark.parametrize("name", WORKS)
async def test_each_task_beside_the_halts_that_dies_is_told_and_comes_back(
    journal: Journal, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar = asyncio.create_task(Service(paths.run_dir("beside"), times=AT_ONCE).run())
    try:
        await until(await BREAKS[name](journal, monkeypatch))
        (alert,) = alerts(journal)
        assert (alert.level, alert.subject) == ("error", name)
        assert "RuntimeError: a defect" in alert.text
        if name != "the termination of p0r0":  # then there is nothing left to halt
            journal.append(ev.HaltRequested(nonce="after", mode="halt", by="t"))
            await until(lambda: any(a.nonce == "after" for a in acks(journal)))
            assert not sidecar.done()
    finally:
        sidecar.cancel()
        await asyncio.gather(sidecar, return_exceptions=True)


async def test_a_lease_that_meets_a_defect_is_renewed_over_another_channel(journal: Journal) -> None:
    sidecar = asyncio.create_task(Service(paths.run_dir("beside"), times=AT_ONCE).run())
    try:
        await until(lambda: bool(ClientFake.made and ClientFake.made[0].renewed))
        ClientFake.made[0].fail_to_renew = True
        await until(lambda: len(ClientFake.made) == 2 and ClientFake.made[1].renewed > 1)
        assert [a.subject for a in alerts(journal)] == ["the halt channel to p0r0"]
    finally:
        sidecar.cancel()
        await asyncio.gather(sidecar, return_exceptions=True)


async def test_a_pod_that_goes_while_its_channel_fails_is_let_go(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "FIRST_S", 0.2)
    sidecar = asyncio.create_task(Service(paths.run_dir("beside"), times=AT_ONCE).run())
    try:
        await until(lambda: bool(ClientFake.made))
        ClientFake.made[0].words.put_nowait(RuntimeError("a defect"))
        await until(lambda: bool(alerts(journal)))
        journal.append(
            ev.PodChanged(pod="p0r0", party=0, replica=0, provider="local", state="gone"),
            ev.PodChanged(
                pod="p1r0", party=1, replica=0, provider="local", state="agent", address="127.0.0.1:8", host_key="k"
            ),
        )
        await until(lambda: len(ClientFake.made) == 2)
        await asyncio.sleep(0.3)  # longer than the pause after which it would be opened again
        assert [c.link.name for c in ClientFake.made] == ["p0r0", "p1r0"]
    finally:
        sidecar.cancel()
        await asyncio.gather(sidecar, return_exceptions=True)


def test_everything_that_runs_beside_the_halts_is_killed_above() -> None:
    """What the sidecar starts and nobody waits for is one of the tasks that the tests above kill."""
    started: set[str] = set()
    for path in Path(service.__file__).parent.rglob("*.py"):
        for call in (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)):
            if ast.unparse(call.func).endswith("_beside.start"):
                named = ast.unparse(call.args[0]).strip("f'\"")
                started.add(named.replace("{pod.pod}", "p0r0").replace("{event.pod}", "p0r0").replace("{pod}", "p0r0"))
    assert started == set(WORKS)
