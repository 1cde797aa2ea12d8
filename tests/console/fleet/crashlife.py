"""One life of a console on the fake market: it conducts a whole rollout, dies of SIGKILL, and others come after it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import psutil
from primefake import KEY
from primehost import PrimeHost

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal, read_all
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.fleet import procs
from uvcc_console.fleet.provider import POD_PREFIX
from uvcc_engine.contract.errors import UnreadableError

PROFILE = Path(__file__).parents[3] / "profiles" / "prime-smoke-r2.yaml"
SMALL = {
    "fleet.gpu": "CPU_NODE",
    "topology.replicas": 1,
    "smoke.replicas": 1,
    "job.steps": 20,
    "job.test_rows": 100,
    "limits.wait": "3s",  # a sidecar that is left alone does not wait longer for a conductor
}
# where the console dies, and about how many seconds the stage takes on a quiet machine
MOMENTS = {
    "quote": 0.1,
    "provision": 1.5,
    "bootstrap": 3.0,
    "preflight": 2.0,
    "drill": 1.5,
    "smoke": 0.5,
    "verify-smoke": 1.0,
    "gate": 0.2,
    "full": 2.0,
    "verify-full": 1.0,
    "collect": 0.5,
    "teardown": 7.0,
}
SWEEP, TEARDOWN, REAPER, RESUME = "sweep", "teardown", "reaper", "resume"
PATIENCE_S = 240.0
LOOK_S = 0.02
CLI = (sys.executable, "-m", "uvcc_console.cli.main")


@dataclass(frozen=True)
class Death:
    """So many seconds after this stage has begun; ``sidecar``: whether the halt sidecar dies with the console."""

    stage: str
    after_s: float
    sidecar: bool = True

    def __str__(self) -> str:
        return f"{self.stage}+{self.after_s:.2f}s{'' if self.sidecar else ' (sidecar lives)'}"


@dataclass
class Life:
    """``deaths`` come one after the other, each but the last followed by a resume; then ``heir`` puts things right."""

    home: Path
    host: PrimeHost
    deaths: tuple[Death, ...]
    heir: str
    died: list[str] = field(default_factory=list)
    billing_then: int = 0
    run: str = ""

    @property
    def prefix(self) -> str:
        return f"{POD_PREFIX}{self.run}-"

    @property
    def billing(self) -> list[str]:
        """Our pods that cost money now."""
        return [name for name in self.host.fake.billing if name.startswith(self.prefix)]

    @property
    def snapshot(self) -> Snapshot:
        return read_all(Journal(self.home / "runs" / self.run / "journal.sqlite", readonly=True))

    @property
    def log(self) -> str:
        """What the commands said."""
        return (self.home.parent / f"{self.home.name}.log").read_text()

    async def begin(
        self, changed: Mapping[str, object] = MappingProxyType({}), profile: Path | None = None
    ) -> asyncio.subprocess.Process:
        """Start the rollout's command; it has a run when this returns. ``profile``: another than the small private."""
        settings = {**({} if profile else SMALL), "fleet.base_url": self.host.url, **changed}
        words = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        console = await self._cli("rollout", str(profile or PROFILE), "--headless", "--json", "--yes", *words)
        self.run = await self._named(console)
        return console

    async def live(self) -> None:
        """From the first command to the end of the last process."""
        console = await self.begin()
        for number, death in enumerate(self.deaths):
            if number:
                console = await self._cli("resume", self.run, "--wait")
            if not await self._reached(death, console):
                break
            await self._kill(death.sidecar)
            self.died.append(death.stage)
            self.billing_then = max(self.billing_then, len(self.billing))
            await console.wait()
        await console.wait()
        if self.heir in (TEARDOWN, RESUME):
            words = [self.heir, self.run, *(["--wait"] if self.heir == RESUME else [])]
            await (await self._cli(*words)).wait()
        if self.heir != REAPER:
            await (await self._cli("pods", "--sweep")).wait()
        await self._quiet()

    async def _cli(self, *words: str) -> asyncio.subprocess.Process:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("UVCC_", "PRIME_"))}
        env |= {"UVCC_HOME": str(self.home), "UVCC_PRIME_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
        with (self.home.parent / f"{self.home.name}.log").open("ab") as log:
            log.write(f"--- {' '.join(words)}\n".encode())
            log.flush()
            return await asyncio.create_subprocess_exec(*CLI, *words, env=env, stdout=log, stderr=log)

    async def _named(self, console: asyncio.subprocess.Process) -> str:
        """The run's name, once its journal is there."""
        async with asyncio.timeout(PATIENCE_S):
            while not (found := list(self.home.glob("runs/*/journal.sqlite"))):
                assert console.returncode is None, "the console ended before it had a run"
                await asyncio.sleep(LOOK_S)
        return found[0].parent.name

    async def _reached(self, death: Death, console: asyncio.subprocess.Process) -> bool:
        """Wait for the moment; False if the console has ended before it."""
        begun, seq = False, self._seq() if self.died else 0
        async with asyncio.timeout(PATIENCE_S):
            while not begun and console.returncode is None:
                for number, event in self._news(seq):
                    seq = number
                    begun |= isinstance(event, ev.StageChanged) and event.name == death.stage
                await asyncio.sleep(LOOK_S)
        if begun:
            await asyncio.sleep(death.after_s)
        return console.returncode is None

    def _seq(self) -> int:
        return self.snapshot.seq

    def _news(self, seq: int) -> list[tuple[int, ev.Event]]:
        try:
            journal = Journal(self.home / "runs" / self.run / "journal.sqlite", readonly=True)
        except (UnreadableError, sqlite3.Error):
            return []
        try:
            return list(journal.since(seq, kinds=(ev.StageChanged.kind,)))
        except UnreadableError:
            return []  # its tables are being made
        finally:
            journal.close()

    def _processes(self, *, sidecar: bool = True) -> set[int]:
        """The console's processes here: command line, conductor and, unless it is spared, the sidecar."""
        mine = procs.marked(str(self.home), "UVCC_HOME")
        return {pid for pid in mine if sidecar or "uvcc_console.haltd" not in _command(pid)}

    async def _kill(self, sidecar: bool) -> None:
        """SIGKILL, until none is left: a process may have been starting another."""
        async with asyncio.timeout(PATIENCE_S):
            while left := self._processes(sidecar=sidecar):
                for pid in left:
                    procs.send([pid], signal.SIGKILL)
                await asyncio.sleep(LOOK_S)

    async def _quiet(self) -> None:
        """Until no process of this console runs and no machine of its pods does. Raises TimeoutError naming them."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while self._processes() or self.host.standing(self.prefix):
                    await asyncio.sleep(10 * LOOK_S)
        except TimeoutError:
            mine = [_command(pid) for pid in self._processes()]
            raise TimeoutError(f"left: {mine} {self.host.standing(self.prefix)}") from None


def _command(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""


def deaths(seed: int) -> Iterator[tuple[tuple[Death, ...], str]]:
    """Random moments without end: most consoles die once, some of those that resume them die as well."""
    rng = random.Random(seed)
    while True:
        times = rng.choice((1, 1, 2))
        moments = sorted(rng.choices(range(len(MOMENTS)), k=times))
        heir = rng.choice((SWEEP, TEARDOWN, REAPER, RESUME))
        found = []
        for n, moment in enumerate(moments):
            stage, usual = list(MOMENTS.items())[moment]
            spared = heir == REAPER or (n < times - 1 and rng.random() < 0.5)
            found.append(Death(stage, round(rng.uniform(0.0, usual), 3), sidecar=not spared))
        yield tuple(found), heir
