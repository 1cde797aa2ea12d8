"""The console dies at any moment of a rollout; whoever comes next finds what it left, and nothing keeps billing.

The console is a forked process with the rollout's own stages and journal; it talks to the market over a socket pair
and is killed with SIGKILL right before or right after one of its requests. Then either the run's next conductor tears
it down, or ``uvcc pods --sweep`` finds it. ``UVCC_CRASHES`` sets how many moments are tried.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from primefake import KEY, PrimeFake
from virtualtime import VirtualClock

from uvcc_console.cli.steer import pods
from uvcc_console.core import paths
from uvcc_console.core.journal.journal import Journal
from uvcc_console.fleet import provider_kinds as providers
from uvcc_console.fleet.cloud.ready import Readiness
from uvcc_console.fleet.cloud.saga import CloudProvider
from uvcc_console.fleet.prime.access import SshTarget
from uvcc_console.fleet.prime.client import PrimeClient
from uvcc_console.fleet.prime.key import Account
from uvcc_console.fleet.ssh_keys import operator_key
from uvcc_console.plan.plan import make_plan
from uvcc_console.plan.profile import load
from uvcc_console.rollout.bus import Bus
from uvcc_console.rollout.context import Member, Rollout
from uvcc_console.rollout.stages.fleet import provision

RUN = "crash-20261121-0115-ab12"
PROFILE = Path(__file__).parents[3] / "profiles" / "prime-smoke-r2.yaml"
FLEET = {"provider": "prime", "gpu": "H100_80GB", "gpus": 1}
START = 1_795_000_000.0
CRASHES = int(os.environ.get("UVCC_CRASHES", "30"))
PARTS = 3


class Wire(httpx.AsyncBaseTransport):
    """Requests over a socket pair, one JSON line each way; the other end decides when this process dies."""

    def __init__(self, sock: socket.socket, clock: VirtualClock) -> None:
        self._file = sock.makefile("rwb")
        self._clock = clock

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = (await request.aread()).decode()
        asked = {"method": request.method, "url": str(request.url), "body": body, "now": self._clock.now()}
        self._file.write(json.dumps(asked).encode() + b"\n")
        self._file.flush()
        answer = json.loads(self._file.readline())
        return httpx.Response(answer["status"], text=answer["text"], headers=answer["headers"])


async def _anybody(at: SshTarget, gpu: bool) -> str:
    return ""


def _provider(transport: httpx.AsyncBaseTransport, clock: VirtualClock, run_dir: Path) -> CloudProvider:
    client = PrimeClient(Account(KEY, "http://prime.test"), transport=transport, clock=clock)
    return CloudProvider(client, FLEET, run_dir, readiness=Readiness(client, run_dir, "", _anybody))


@asynccontextmanager
async def _rollout(provider: CloudProvider, run_dir: Path) -> AsyncIterator[Rollout]:
    """The run as a conductor holds it: its journal, its plan, its pods still unknown."""
    name, profile = load(str(PROFILE), ["topology.replicas=1", "smoke.replicas=1", "fleet.per_party=[]"])
    plan = make_plan(run_dir.name, name, profile)
    journal = Journal(run_dir / "journal.sqlite", source="conductor")
    members = {n: Member(n, request) for n, request in plan.requests.items()}
    yield Rollout(plan, run_dir, Bus(journal), provider, operator_key(run_dir), members)
    journal.close()


async def _unseen(*args: object) -> None:
    """Logging in needs pods of flesh and blood."""


async def _console(sock: socket.socket, run_dir: Path) -> None:
    """A whole fleet's life: quote, provision, tear down. Runs in a process of its own."""
    provision.connect, provision.processes.start = _unseen, lambda *args: None  # type: ignore[assignment,misc]
    async with VirtualClock(START) as clock, _rollout(_provider(Wire(sock, clock), clock, run_dir), run_dir) as ctx:
        await provision.quote(ctx)
        await provision.provision(ctx)
        assert await provision.teardown(ctx) == []


class Market:
    """The fake behind the socket, in the console's time, and the moment of death."""

    def __init__(self, visible_after: float) -> None:
        self.time = START
        self.fake = PrimeFake(lambda: self.time)
        self.fake.boot_s = 0.0
        self.fake.visible_after = visible_after
        self.foreign = self.fake.foreign("somebody-elses")

    async def serve(self, sock: socket.socket, pid: int, die_at: int, obey_last: bool) -> None:
        """Answer until request number ``die_at`` (0 = for ever), which is obeyed or not; then the console is killed."""
        http = httpx.AsyncClient(transport=httpx.ASGITransport(self.fake.app), base_url="http://prime.test")
        reader, writer = await asyncio.open_connection(sock=sock)
        number = 0
        while line := await reader.readline():
            number += 1
            if number == die_at and not obey_last:
                break
            asked = json.loads(line)
            self.time = max(self.time, asked["now"])
            headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
            answer = await http.request(asked["method"], asked["url"], content=asked["body"], headers=headers)
            if number == die_at:
                break
            headers = {k: v for k, v in answer.headers.items() if k in ("location", "content-type")}
            told = {"status": answer.status_code, "text": answer.text, "headers": headers}
            writer.write(json.dumps(told).encode() + b"\n")
        if number == die_at:
            os.kill(pid, signal.SIGKILL)
        writer.close()

    async def again(self, run_dir: Path, *, sweep: bool) -> None:
        """The next process on this machine: ``uvcc pods --sweep``, or the run's next conductor."""
        (run_dir / "conductor.json").write_text('{"pid": 1, "starttime": 1}')  # whoever that was, it is dead
        async with VirtualClock(self.time) as clock:
            self.fake.now = clock.now
            provider = _provider(httpx.ASGITransport(self.fake.app), clock, run_dir)
            if sweep:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(providers, "provider_for", lambda *args, **kwargs: provider)
                    found = pods.PodSurvey()
                    await pods.survey_pods([pods.KnownFleet({"provider": "prime"}, run_dir)], True, found)
                assert (found.left, found.unknown) == ([], [])
                assert {r["fate"] for r in found.rows.values()} <= {"ORPHAN"}
            else:
                async with _rollout(provider, run_dir) as ctx:
                    assert await provision.teardown(ctx) == []
            await clock.sleep(120.0)
            await provider.close()


def _fork(run_dir: Path) -> tuple[int, socket.socket]:
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            ours.close()
            asyncio.run(_console(theirs, run_dir))
            status = 0
        finally:
            os._exit(status)
    theirs.close()
    return pid, ours


def _moments() -> list[tuple[int, bool]]:
    rng = random.Random(20261121)
    return [(rng.randint(1, 60), rng.random() < 0.5) for _ in range(CRASHES)]


def _life(run_dir: Path, *, die_at: int, obey_last: bool, visible_after: float) -> tuple[int, Market]:
    """One console from birth to its end: its wait status, and the world it leaves."""
    world = Market(visible_after)
    pid, sock = _fork(run_dir)
    asyncio.run(world.serve(sock, pid, die_at, obey_last))
    return os.waitpid(pid, 0)[1], world


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.ci(__file__)) for n in range(1, PARTS))])
def test_killed_at_any_moment_nothing_is_left_billing(part: int) -> None:
    found_some, deaths = 0, 0
    mine = list(enumerate(_moments()))[part::PARTS]
    for n, (die_at, obey_last) in mine:
        run_dir = paths.run_dir(f"{RUN}-{n}")
        run_dir.mkdir(parents=True)
        status, world = _life(run_dir, die_at=die_at, obey_last=obey_last, visible_after=20.0 * (n % 2))
        assert os.WIFSIGNALED(status) or status == 0  # killed, or done before its time came
        deaths += os.WIFSIGNALED(status)
        found_some += len(world.fake.billing) > 1
        asyncio.run(world.again(run_dir, sweep=n // PARTS % 2 == 0))
        assert world.fake.billing == ["somebody-elses"], f"killed at request {die_at}, obeyed: {obey_last}"
        assert not [path for method, path, _ in world.fake.requests if method == "DELETE" and world.foreign in path]
    assert found_some > len(mine) // 4
    sys.stderr.write(f"{len(mine)} lives, {deaths} killed, {found_some} of them while pods were billing, 0 left\n")


def test_without_a_crash_the_same_console_ends_by_itself() -> None:
    run_dir = paths.run_dir(RUN)
    run_dir.mkdir(parents=True)
    status, world = _life(run_dir, die_at=0, obey_last=True, visible_after=20.0)
    assert status == 0
    assert world.fake.billing == ["somebody-elses"]
