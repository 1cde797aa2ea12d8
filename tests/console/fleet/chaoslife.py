"""Whole rollouts on the fake market under blows at random moments: kills, freezes, full disks, late lists, clocks.

    python tests/console/fleet/chaoslife.py --blows 500 --seed 1 --table FILE

Everything is real but the market's money and the operator's wall clock, which ``clockshim.c`` moves where there is a C
compiler. After each life: what it ended with, what the next command said, and whether anything was left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil
from crashlife import CLI, Life
from primefake import KEY
from primehost import PrimeHost

from uvcc_console.fleet import procs
from uvcc_engine.contract.errors import UvccError

SHIM: Final = Path(__file__).with_name("clockshim.c")
TTL_S, GRACE_S = 300.0, 60.0
TIRED_S = 200.0  # an operator who has waited so long for a run ends it
PATIENCE_S, TEARDOWN_S = 90.0, 600.0  # for any later command, and for the teardown: only a hang takes so long
RESUMES = 2
LOOK_S = 0.05
PROCESSES: Final = ("conductor", "sidecar", "agent", "zygote", "relay", "worker", "ssh")
KINDS: Final = (
    *(f"{how} {who}" for who in PROCESSES for how in ("kill", "freeze")),
    *("full disk", "late list", "clock +1 h", "clock -1 h"),
)


@dataclass(frozen=True)
class Blow:
    """So many seconds after the one before; ``for_s``: how long a freeze, a full disk or a lag lasts."""

    kind: str
    after_s: float
    for_s: float
    pod: int

    def __str__(self) -> str:
        return f"{self.kind}@{self.after_s:.1f}s/{self.for_s:.0f}s"


@dataclass
class Chaos(Life):
    """``blows`` fall on one rollout; whoever finds its conductor dead resumes it, twice at most, then ends it."""

    blows: tuple[Blow, ...] = ()
    shim: Path | None = None
    swept: bool = True
    fallen: list[str] = field(default_factory=list)
    codes: list[tuple[str, int | None]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    began: float = 0.0

    async def live(self) -> None:
        self.began = time.monotonic()
        changed = {"limits.ttl": f"{TTL_S:.0f}s", "limits.wait": "20s", "job.steps": 12, "link": self.link}
        (self.home / "clock").write_bytes(bytes(8))
        console = await self.begin(changed)
        watching = asyncio.create_task(self._watch())
        striking = asyncio.create_task(self._strike())
        try:
            await self._followed("rollout", console)
            for _ in range(RESUMES):
                if self.over:
                    break
                await self._followed("resume", await self._cli("resume", self.run, "--wait"))
            striking.cancel()
            await asyncio.wait({striking})  # it takes back what it did before it ends
            if not self.over:
                await self._followed("teardown", await self._cli("teardown", self.run))
            if self.swept:
                await self._followed("sweep", await self._cli("pods", "--sweep"))
            await self._quiet()
            await self._followed("teardown", await self._cli("teardown", self.run))  # of a run that is over: says so
        finally:
            striking.cancel()
            watching.cancel()
            await asyncio.wait({striking, watching})
        self._judge()

    @property
    def link(self) -> str:
        return "relay" if any("relay" in b.kind for b in self.blows) else "auto"

    @property
    def over(self) -> bool:
        with contextlib.suppress(UvccError):
            return self.snapshot.ended
        return False

    @property
    def reason(self) -> str:
        """Why it ended as it did, in the run's own words."""
        s = self.snapshot
        return s.detail or next((v.detail for v in reversed(s.stages) if v.status in ("failed", "waiting")), "")

    async def _cli(self, *words: str) -> asyncio.subprocess.Process:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("UVCC_", "PRIME_"))}
        env |= {"UVCC_HOME": str(self.home), "UVCC_PRIME_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
        if self.shim is not None:
            env |= {"LD_PRELOAD": str(self.shim), "UVCC_TEST_CLOCK": str(self.home / "clock")}
        with (self.home.parent / f"{self.home.name}.log").open("ab") as log:
            log.write(f"--- {time.monotonic() - self.began:.1f} s: {' '.join(words)}\n".encode())
            log.flush()
            return await asyncio.create_subprocess_exec(*CLI, *words, env=env, stdout=log, stderr=log)

    async def _followed(self, verb: str, console: asyncio.subprocess.Process) -> None:
        """A command to its end; one that takes longer than an operator's patience is ended with a teardown."""
        left = max(PATIENCE_S, TIRED_S - (time.monotonic() - self.began))
        try:
            async with asyncio.timeout(left):
                self.codes.append((verb, await console.wait()))
        except TimeoutError:
            self.codes.append((f"{verb} (given up)", None))
            ending = await self._cli("teardown", self.run)
            async with asyncio.timeout(TEARDOWN_S):
                self.codes.append(("teardown", await ending.wait()))
                await console.wait()

    # blows

    async def _strike(self) -> None:
        undo: list[Callable[[], None]] = []
        try:
            for blow in self.blows:
                await asyncio.sleep(blow.after_s)
                back = await self._fall(blow)
                if back is None:
                    continue
                self.fallen.append(blow.kind)
                undo.append(back)
                if blow.for_s:
                    await asyncio.sleep(blow.for_s)
                undo.pop()()
        finally:
            for back in undo:
                back()

    async def _fall(self, blow: Blow) -> Callable[[], None] | None:
        """Do it; returns what takes it back, or None if its victim never showed up."""
        how, _, who = blow.kind.partition(" ")
        if blow.kind == "late list":
            self.host.fake.visible_after = blow.for_s * 4
            return lambda: setattr(self.host.fake, "visible_after", 0.0)
        if how == "clock":
            with (self.home / "clock").open("r+b") as f:  # in place: it is mapped by whoever runs
                f.write(struct.pack("=q", 3600 if "+" in who else -3600))
            return lambda: None
        end = time.monotonic() + 15.0
        while not (found := self._victims("conductor" if how == "full" else who, blow.pod)):
            if self.over or time.monotonic() > end:
                return None
            await asyncio.sleep(LOOK_S)
        if how == "full":
            return _fill_disk(found)
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        return lambda: _thaw(found) if how == "freeze" else None

    def _victims(self, who: str, pod: int) -> list[psutil.Process]:
        if who in ("conductor", "sidecar"):
            module = "uvcc_console.rollout.conductor" if who == "conductor" else "uvcc_console.haltd"
            return [p for p in _alive(procs.marked(str(self.home), "UVCC_HOME")) if module in p.cmdline()]
        homes = [str(home) for name, home in sorted(self.host.homes.items()) if name.startswith(self.prefix)]
        if not homes:
            return []
        home = homes[pod % len(homes)]
        if who == "relay":  # of whichever pod has one
            return [p for h in homes for p in _of_pod(h) if "uvcc_engine.relay" in p.cmdline()][:1]
        return [p for p in _of_pod(home) if _part(p) == who][:1]

    # judgement

    async def _watch(self) -> None:
        """Nothing may cost after the end of life, and no pod in use may be deleted."""
        seen = len(self.host.fake.requests)
        while True:
            await asyncio.sleep(LOOK_S)
            if time.monotonic() - self.began > TTL_S + GRACE_S and self.billing:
                self.wrong.append(f"billing past the end of life: {self.billing}")
                return
            asked, seen = self.host.fake.requests[seen:], len(self.host.fake.requests)
            for method, path, _ in asked:
                if method == "DELETE":
                    self._deleted(path.rpartition("/")[2])

    def _deleted(self, pod_id: str) -> None:
        pod = self.host.fake.pods.get(pod_id)
        if pod is None or not pod.record["name"].startswith(self.prefix):
            return
        name = pod.record["name"].removeprefix(self.prefix).partition("-")[0]
        with contextlib.suppress(UvccError):
            s = self.snapshot
            view = s.pods.get(name)
            ending = s.ended or any(v.name == "teardown" and v.status != "pending" for v in s.stages)
            if view is not None and view.state in ("ready", "agent") and not ending and self._victims("conductor", 0):
                held = [v.detail for v in s.stages if v.status == "failed"]
                if not held:
                    self.wrong.append(f"{name} was deleted while it was in use")

    def _judge(self) -> None:
        s = self.snapshot
        if self.billing:
            self.wrong.append(f"still billing: {self.billing}")
        if not s.ended:
            self.wrong.append(f"it never ended: {s.status}")
        elif s.status not in ("ok", "halted") and not self.reason:
            self.wrong.append(f"it ended {s.status} without a reason")
        if self.codes[-1][1] != 0:
            self.wrong.append(f"the last command failed: {self.codes}")
        logs = [self.log, *(f.read_text(errors="replace") for f in self.home.glob("runs/*/conductor.log"))]
        if any("Traceback" in text for text in logs):
            self.wrong.append("a traceback")


def _alive(pids: set[int]) -> Iterator[psutil.Process]:
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                process.cmdline()
                yield process


def _of_pod(home: str) -> list[psutil.Process]:
    return list(_alive(procs.marked(home)))


def _part(process: psutil.Process) -> str:
    """What a pod's process is. Zygote and workers are forks: their parents tell them apart."""
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
        if "uvcc_console.fleet.local.localpod" in words:
            return "ssh"
        if "uvcc_engine.agent" in words:
            above = process.parent()
            if above is not None and "preloaded_server.py" in " ".join(above.cmdline()):
                return "zygote"
            if above is None or "uvcc_engine.agent" not in above.cmdline():
                return "agent"
            higher = above.parent()
            words = " ".join(higher.cmdline()) if higher is not None else ""
            return "worker" if "uvcc_engine.agent" in words or "preloaded_server.py" in words else "zygote"
    return ""


def _thaw(found: list[psutil.Process]) -> None:
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGCONT)


def _fill_disk(found: list[psutil.Process]) -> Callable[[], None]:
    """The kernel refuses every byte that these processes would write, as on a full disk."""

    def limit(size: int) -> None:
        for process in found:
            with contextlib.suppress(psutil.Error, OSError):
                process.rlimit(psutil.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    limit(0)
    return lambda: limit(resource.RLIM_INFINITY)


def _shim(folder: Path) -> Path | None:
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    made = folder / "clockshim.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", made, SHIM, "-ldl"], check=True)
    return made


def blows(rng: random.Random, count: int, kinds: tuple[str, ...] = KINDS) -> tuple[Blow, ...]:
    """Blows for one rollout of about half a minute."""
    found = []
    for _ in range(count):
        kind = rng.choice(kinds)
        found.append(Blow(kind, round(rng.uniform(0.5, 45.0 / count), 1), _lasts(rng, kind), rng.randrange(3)))
    return tuple(found)


def _lasts(rng: random.Random, kind: str) -> float:
    if kind.startswith(("kill", "clock")):
        return 0.0
    return round(rng.choice((1.0, 3.0, 8.0, 20.0)) * rng.uniform(0.7, 1.3), 1)


async def run(count: int, seed: int, at_once: int, folder: Path, say: Callable[[str], None]) -> list[Chaos]:
    """Lives until so many blows were planned; raises nothing, every life tells what was wrong with it."""
    rng, turns, lives = random.Random(seed), asyncio.Semaphore(at_once), list[Chaos]()
    (folder / "market").mkdir(parents=True)
    shim = _shim(folder)
    kinds = KINDS if shim else tuple(k for k in KINDS if not k.startswith("clock"))
    planned = 0

    async with PrimeHost(folder / "market") as host:
        foreign = host.fake.foreign("somebody-elses")

        async def turn(n: int, mine: tuple[Blow, ...]) -> None:
            async with turns:
                home = folder / f"h{n}"
                home.mkdir()
                jumps = any(b.kind.startswith("clock") for b in mine)
                life = Chaos(home, host, (), "", blows=mine, shim=shim if jumps else None, swept=n % 2 == 0)
                lives.append(life)
                try:
                    await life.live()
                except Exception as e:  # noqa: BLE001  (one life's trouble is told; the others go on)
                    life.wrong.append(f"{type(e).__name__}: {e}")
            status = life.snapshot.status if life.run else "never began"
            told = "; ".join(life.wrong) or f"fine, {life.reason}"
            say(f"{n:3} {time.monotonic() - life.began:5.0f} s {status:10} {' '.join(map(str, mine))}: {told}")

        async with asyncio.TaskGroup() as group:
            for n in range(count):
                if planned >= count:
                    break
                mine = blows(rng, min(rng.choice((3, 5, 8)), count - planned), kinds)
                planned += len(mine)
                group.create_task(turn(n, mine))
        touched = [path for method, path, _ in host.fake.requests if method == "DELETE" and foreign in path]
        if touched or "somebody-elses" not in host.fake.billing:
            lives[-1].wrong.append("a foreign pod was touched")
    return lives


def table(lives: list[Chaos]) -> str:
    """Blows by kind, and what their rollouts ended with."""
    ends: dict[str, Counter[str]] = {}
    for life in lives:
        for kind in life.fallen:
            ends.setdefault(kind, Counter())[life.snapshot.status] += 1
    lines = ["| blow | times | ok | halted | failed | torn down |", "|---|---|---|---|---|---|"]
    for kind, found in sorted(ends.items()):
        cells = " | ".join(str(found[k]) for k in ("ok", "halted", "failed", "torn_down"))
        lines.append(f"| {kind} | {found.total()} | {cells} |")
    total = sum(found.total() for found in ends.values())
    wrong = [w for life in lives for w in life.wrong]
    lines.append(f"\n{total} blows on {len(lives)} rollouts; {len(wrong)} of them not as promised")
    return "\n".join(lines + [f"- {w}" for w in wrong])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blows", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--keep", action="store_true", help="keep the folders of lives that went wrong")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="uc", dir="/tmp"))  # socket paths below it must stay short
    lives = asyncio.run(run(args.blows, args.seed, args.at_once, folder, lambda line: print(line, flush=True)))
    made = table(lives)
    print(made)
    if args.table:
        args.table.write_text(made + "\n")
    if not args.keep:
        shutil.rmtree(folder)
    return 1 if any(life.wrong for life in lives) else 0


if __name__ == "__main__":
    sys.exit(main())
