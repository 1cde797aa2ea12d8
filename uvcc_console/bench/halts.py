"""Halts over 24 real local pods: their agents, their workers and the run's own sidecar process.

Rows: ``halt_dispatch_sidecar`` (a hold being durable in the journal, under 20,000 lines/s, to the sidecar's commands
being on their way), ``halt_24_held`` (asked to the last pod's evidence that it holds), ``halt_24_halted`` (asked to the
verdict that every pod's processes are gone and every checkpoint's bytes were checked).
"""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from uvcc_console.bench import feeder, obedient
from uvcc_console.bench.scratch import scratch
from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal
from uvcc_console.fleet import ssh_keys
from uvcc_console.fleet.agent_client import AgentClient
from uvcc_console.fleet.bootstrap import bootstrap_all
from uvcc_console.fleet.local_provider import LocalProvider
from uvcc_console.fleet.provider import Pod, PodRequest
from uvcc_console.fleet.ssh import PodLink
from uvcc_console.fleet.wheel import build_wheel
from uvcc_console.runs import processes
from uvcc_engine.contract.agent_protocol.agent_commands import LaunchCommand
from uvcc_engine.contract.agent_protocol.agent_messages import Lines
from uvcc_engine.contract.errors import UnreachableError
from uvcc_engine.contract.job.spec import WorkerSpec
from uvcc_engine.contract.machine.benchrows import Row, row
from uvcc_engine.contract.run_files import files

WORKER = "obedient.py"
PATIENCE_S = 60.0
PROFILE = {"job": {"kind": "private", "steps": 1}, "halt": {"lease": 0.0, "auto": ["hold", "halt"]}}


@dataclass
class HaltFleet:
    """A run folder, its pods by name, a channel to each, and the journal that the sidecar watches."""

    run_dir: Path
    links: dict[str, PodLink]
    clients: dict[str, AgentClient]
    journal: Journal
    pods: tuple[Pod, ...]

    async def launch(self, engine_run: str) -> None:
        """One worker on every pod, each seen to train."""
        self.journal.append(ev.PhaseStarted(phase="full", engine_run=engine_run, steps=1, sid_job=""))

        async def start(pod: str, client: AgentClient) -> None:
            await client.watch(engine_run)
            argv = ["python3", f"../../../{WORKER}"]
            spec = WorkerSpec(run=engine_run, kind="command", coord=f"{pod}s0t0", argv=argv)
            await client.request(LaunchCommand(run=engine_run, workers=[spec]), timeout=PATIENCE_S)
            async for message in client.messages():
                if isinstance(message, Lines) and message.run == engine_run and files.is_heartbeat(message.src):
                    return

        await asyncio.gather(*(start(pod, client) for pod, client in self.clients.items()))

    async def ask(self, mode: str, *, drill: bool = False) -> tuple[str, float]:
        """Write a request; its nonce and the moment it was durable."""
        nonce = secrets.token_hex(8)
        event = ev.HaltRequested(nonce=nonce, mode=mode, by="bench", drill=drill)
        await asyncio.to_thread(_append, self.run_dir, event)
        return nonce, time.time()

    async def verdict(self, nonce: str) -> ev.HaltDone:
        """The end of a ladder. Raises UnreachableError if there is none in a minute."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            for _, event in self.journal.since(0, kinds=(ev.HaltDone.kind,)):
                if isinstance(event, ev.HaltDone) and event.nonce == nonce:
                    return event
            await asyncio.sleep(0.01)
        raise UnreachableError(f"no verdict in {PATIENCE_S:g} s", "uvcc logs tells more")

    def acks(self, nonce: str, stage: str) -> list[ev.HaltAck]:
        found = [e for _, e in self.journal.since(0, 1 << 20, kinds=(ev.HaltAck.kind,)) if isinstance(e, ev.HaltAck)]
        return [e for e in found if e.nonce == nonce and e.stage == stage and not e.gpu]


def _append(run_dir: Path, event: ev.Event) -> None:
    journal = Journal(run_dir / processes.JOURNAL, source="bench")
    journal.append(event)
    journal.close()


@asynccontextmanager
async def fleet(pods: int) -> AsyncIterator[HaltFleet]:
    """Bring up local pods with agents and the run's sidecar; everything is gone afterwards."""
    with scratch() as home:
        async with _fleet(home, pods) as found:
            yield found


@asynccontextmanager
async def _fleet(home: Path, pods: int) -> AsyncIterator[HaltFleet]:
    run_dir = home / "runs" / "halts"
    run_dir.mkdir(parents=True)
    provider = LocalProvider(run_dir, ttl_s=300.0)
    made: list[Pod] = []
    try:
        wanted = [PodRequest(f"uvcc-halts-p{i % 3}r{i // 3}", i % 3, i // 3) for i in range(pods)]
        for request in wanted:
            made.append(await provider.create(request))
        ready = await asyncio.gather(*(provider.wait_ready(pod) for pod in made))
        key = ssh_keys.operator_key(run_dir)
        links = {
            f"p{p.party}r{p.replica}": PodLink(f"p{p.party}r{p.replica}", p.address, key, host_key=p.host_key)
            for p in ready
        }
        await bootstrap_all(list(links.values()), build_wheel(run_dir / "wheel"), preload="none")
        source = Path(obedient.__file__).read_bytes()
        await asyncio.gather(*(link.put(source, WORKER) for link in links.values()))
        clients = {name: AgentClient(link, holder="bench") for name, link in links.items()}
        await asyncio.gather(*(client.start() for client in clients.values()))
        journal = Journal(run_dir / processes.JOURNAL, source="bench")
        journal.append(_created(pods), *(_pod(p, links) for p in ready))
        try:
            yield HaltFleet(run_dir, links, clients, journal, tuple(ready))
        finally:
            journal.append(ev.RunEnded(status="ok"))
            journal.close()
            await asyncio.gather(*(c.close() for c in clients.values()), return_exceptions=True)
            await asyncio.gather(*(link.close() for link in links.values()), return_exceptions=True)
    finally:
        for pod in made:
            await provider.delete(pod)


def _created(pods: int) -> ev.Event:
    return ev.RunCreated(
        run="halts",
        profile_name="bench",
        job_kind="private",
        replicas=max(1, pods // 3),
        pipeline_stages=1,
        tensor=1,
        stages=[],
        profile={**PROFILE, "topology": {"replicas": max(1, pods // 3)}},
    )


def _pod(pod: Pod, links: dict[str, PodLink]) -> ev.Event:
    name = f"p{pod.party}r{pod.replica}"
    return ev.PodChanged(
        pod=name,
        party=pod.party,
        replica=pod.replica,
        provider="local",
        state="agent",
        address=pod.address,
        host_key=links[name].host_key,
    )


@asynccontextmanager
async def sidecar(found: HaltFleet) -> AsyncIterator[None]:
    """The run's halt sidecar, its channels warm: a drill has been answered by every pod."""
    process = subprocess.Popen(
        [sys.executable, "-m", "uvcc_console.haltd", found.run_dir.name],
        env={**os.environ, "UVCC_HOME": str(found.run_dir.parents[1])},
    )
    try:
        while (await found.verdict((await found.ask("hold", drill=True))[0])).verified < len(found.clients):
            await asyncio.sleep(0.2)
        yield
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait)


async def dispatch(found: HaltFleet, presses: int, lines_per_s: float) -> list[float]:
    """Milliseconds from a hold being durable to the sidecar's word that its commands are on their way."""
    args = [str(found.run_dir / processes.JOURNAL), str(len(found.clients)), str(lines_per_s), "1", str(presses + 10)]
    writer = subprocess.Popen([sys.executable, "-m", "uvcc_console.bench.feeder", *args], stdout=subprocess.DEVNULL)
    delays = []
    try:
        await asyncio.sleep(1.0)
        for i in range(presses):
            nonce, durable = await found.ask("hold", drill=True)
            await found.verdict(nonce)
            sent = found.acks(nonce, "sent")
            delays.append(max(0.0, max(a.ts for a in sent) - durable) * 1000)
            await asyncio.sleep(0.05 + 0.013 * (i % 7))
    finally:
        writer.kill()
        writer.wait()
    return delays


async def _measure(pods: int, runs: int, presses: int) -> list[Row]:
    held, halted = [], []
    async with fleet(pods) as found:
        await found.launch("halts.warm")
        async with sidecar(found):
            for _ in range(max(3, runs)):
                nonce, asked = await found.ask("hold", drill=True)
                await found.verdict(nonce)
                acks = found.acks(nonce, "held")
                if len(acks) == pods:
                    held.append(max(a.ts for a in acks) - asked)
            delays = sorted(await dispatch(found, presses, 20_000))
            for i in range(runs):
                await found.launch(f"halts.full{i}")
                nonce, asked = await found.ask("halt")
                done = await found.verdict(nonce)
                if done.verified != pods:
                    raise UnreachableError(f"{done.verified} of {pods} pods were verified", "uvcc logs tells more")
                halted.append(max(a.ts for a in found.acks(nonce, "gone")) - asked)
    p99 = delays[min(len(delays) - 1, round(0.99 * (len(delays) - 1)))]
    return [
        row("halt_dispatch_sidecar", "p99", "ms", [p99], 20.0),
        row("halt_dispatch_sidecar", "p50", "ms", delays),
        row("halt_24_held", "seconds", "s", held, 1.0 + obedient.STEP_S),
        row("halt_24_halted", "seconds", "s", halted, 5.0),
    ]


def bench(runs: int = 3, *, pods: int = feeder.PODS, presses: int = 20) -> list[Row]:
    """The three rows. Raises UvccError if pods do not come up or do not halt."""
    return asyncio.run(_measure(pods, runs, presses))
