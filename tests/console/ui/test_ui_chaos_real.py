"""By hand: the console beside a real run whose parts are killed for half an hour, every picture against the journal.

The run is real in all but what it computes: a conductor, a halt sidecar, a local pod over SSH with its agent, and
a worker that steps, obeys holds and halts, and goes on from its checkpoints. ``UVCC_CHAOS_MINUTES`` (30) says how
long, ``UVCC_CHAOS_SEED`` (1) in which order the blows fall, ``UVCC_CHAOS_LOG`` a file for what was seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
from chaos_truth import Findings, Truth, looked
from demorun import Uvcc, user_at

from uvcc_console.core.journal.journal import Journal
from uvcc_console.runs import processes
from uvcc_console.ui.app import UvccApp, open_app

TRAINER = """
import pathlib, time
from uvcc_engine.contract.checkpoints import checkpoint
from uvcc_engine.contract.run_files import files
from uvcc_engine.contract.run_files.writer import RunWriter

with RunWriter.from_env() as w:
    home = pathlib.Path(w.directory) / files.CHECKPOINTS
    found = checkpoint.latest_verified(home, run=w.run)
    step = found.step if found else 0
    w.resume_at(step)

    def save():
        return checkpoint.save(home, run=w.run, step=step, coord=w.coord, topology={}, contents={"s.bin": bytes(64)})

    last = int(__import__("os").environ["UVCC_STEPS"])
    while step < last:
        asked = w.poll_halt()
        if asked is not None and asked.mode == "halt":
            saved = save()
            w.heartbeat(step, "halted", halt_nonce=asked.nonce, checkpoint=saved.sha256)
            w.exit("halted", step=step, checkpoint=saved.sha256)
            break
        if asked is not None and asked.mode == "hold":
            w.heartbeat(step, "hold", halt_nonce=asked.nonce)
            time.sleep(0.1)
            continue
        time.sleep(0.3)
        step += 1
        w.heartbeat(step, "train", loss=2.0 / step)
        if step % 20 == 0:
            save()
    else:
        w.exit("done", step=step)
"""
PROFILE = """
job: {kind: command, argv: [python, train.py], steps: 100000, code: mine}
fleet: {provider: local}
smoke: {steps: 4}
gates: {loss_falls: false, halt_drill_s: 60}
halt: {patience: 30s}
limits: {hourly: 0, total: 0, ttl: 3h}
"""
LOOK_S: Final = 0.3
LOOKED_AT_S: Final = 3.0  # lamps look once a second; the machine is busy with the run
MINUTES: Final = float(os.environ.get("UVCC_CHAOS_MINUTES", "30"))


class Vitals:
    """Whether conductor and sidecar move, by the operating system; a change counts once lamps had time to look."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._since: dict[str, tuple[bool, float]] = {}

    def moves(self, name: str) -> bool:
        who = processes.recorded(self._run_dir, name)
        state = "" if who is not None else "starting"  # its record comes with it
        with contextlib.suppress(psutil.Error):
            state = psutil.Process(who.pid).status() if who is not None else state
        moving = state not in ("", psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)
        was, at = self._since.get(name, (moving, float("-inf")))
        if moving != was:
            was, at = moving, time.monotonic()
        self._since[name] = was, at
        return moving if time.monotonic() - at > LOOKED_AT_S else True

    def away_s(self, name: str) -> float:
        """For how long it has not moved."""
        moving, at = self._since.get(name, (True, 0.0))
        return 0.0 if moving else time.monotonic() - at


class Blows:
    """Kills by a seed, and somebody who resumes what waits."""

    def __init__(self, uvcc: Uvcc, run_dir: Path, truth: Truth, vitals: Vitals, seed: int) -> None:
        self.uvcc, self.run_dir, self.truth, self.vitals = uvcc, run_dir, truth, vitals
        self.dice = random.Random(seed)
        self.struck: Counter[str] = Counter()
        self._waits_since = 0.0
        self._tasks: set[asyncio.Task[Any]] = set()

    def _on_pods(self, *words: str) -> list[int]:
        return [pid for pid, command in self.uvcc.on_pods().items() if any(word in command for word in words)]

    def _pause(self, pids: list[int], seconds: float) -> None:
        async def frozen() -> None:
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                if number == signal.SIGSTOP:
                    await asyncio.sleep(seconds)

        self._keep(frozen())

    def _keep(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _kill(self, pid: int) -> None:
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def strike(self) -> str:
        """The next blow's name."""
        ways: dict[str, Callable[[], None]] = {
            "worker": lambda: self._kill(self.dice.choice(self._on_pods("train.py") or [0])),
            "agent frozen": lambda: self._pause(
                self._on_pods("uvcc_engine.agent --root")[:1], self.dice.choice((4.0, 20.0))
            ),
            "agent": lambda: self._kill(self.dice.choice(self._on_pods("uvcc_engine.agent --root") or [0])),
            "sidecar": lambda: self._kill(processes.running(self.run_dir, processes.HALTD)),
            "conductor": lambda: self._kill(processes.running(self.run_dir, processes.CONDUCTOR)),
            "conductor frozen": lambda: self._pause(self._pid(processes.CONDUCTOR), 8.0),
            "link": lambda: self._pause(self._on_pods("localpod")[:1], self.dice.choice((5.0, 18.0))),
            "halt": lambda: self._keep(asyncio.to_thread(self.uvcc.run, "halt", self.run_dir.name)),
        }
        least = min(self.struck[w] for w in ways)
        name = self.dice.choice([w for w in ways if self.struck[w] == least])
        self.struck[name] += 1
        ways[name]()
        return name

    def _pid(self, name: str) -> list[int]:
        pid = processes.running(self.run_dir, name)
        return [pid] if pid else []

    def calm(self) -> bool:
        """Whether the last blow is over."""
        t = self.truth
        return not (t.waiting or t.halting or self._tasks or self.vitals.away_s("conductor")) and all(
            not w.ended for w in t.workers.values()
        )

    def care(self) -> str:
        """Resume a run that waits or that nobody conducts, after some seconds in which the screen must say so."""
        idle = self.truth.waiting or self.vitals.away_s("conductor") > 0
        if not idle or self._tasks:
            self._waits_since = 0.0
            return ""
        self._waits_since = self._waits_since or time.monotonic()
        if time.monotonic() - self._waits_since < 9.0:
            return ""
        self._waits_since = 0.0
        self._keep(asyncio.to_thread(self.uvcc.run, "resume", self.run_dir.name))
        return "resume"


class Beside:
    """The console on the run, and the journal read again by somebody else."""

    def __init__(self, app: UvccApp, run_dir: Path, truth: Truth, vitals: Vitals) -> None:
        self.app, self.truth, self.vitals = app, truth, vitals
        self.journal = Journal(run_dir / processes.JOURNAL, readonly=True)
        self.told = 0
        self.found = Findings()
        self.catching_up = 0

    def look(self) -> None:
        """One picture: paint what is known now, and hold it against the journal up to the same event."""
        newest = self.journal.newest()[1]
        self.app.frames.paint_next()
        self.app.tick()
        view = self.app.main.view
        while self.told < view.snap.seq:
            for seq, event in self.journal.since(self.told, 1000):
                if seq > view.snap.seq:
                    break
                self.truth.tell([event])
                self.told = seq
            else:
                continue
            self.told = view.snap.seq
        self.truth.conducted = self.vitals.moves(processes.CONDUCTOR)
        self.truth.guarded = self.vitals.moves(processes.HALTD)
        seen = looked(self.app, self.truth, view.now)
        self.catching_up += bool(view.behind_s)
        if not view.behind_s and newest - view.snap.updated > 5.0:
            seen.wrong.append(f"{newest - view.snap.updated:.1f} s behind, and nothing says so")
        self.found.take(seen, view.now)


@pytest.mark.slow
@pytest.mark.timeout(MINUTES * 60 + 900)
async def test_nothing_is_green_that_is_not_well_while_a_real_run_is_struck(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.py").write_text(TRAINER)
    (tmp_path / "chaos.yaml").write_text(PROFILE)
    log = Path(os.environ.get("UVCC_CHAOS_LOG", str(tmp_path / "chaos.log")))
    with user_at(tmp_path / "home") as uvcc, log.open("a", buffering=1) as said:
        rollout = uvcc.start("rollout", str(tmp_path / "chaos.yaml"), "--headless", "--yes")
        try:
            await _through(uvcc, said.write)
        finally:
            rollout.kill()
            rollout.communicate()
            await asyncio.to_thread(uvcc.run, "teardown", "last")


async def _through(uvcc: Uvcc, say: Callable[[str], Any]) -> None:
    runs = uvcc.home / "runs"
    async with asyncio.timeout(300):
        while not (runs.is_dir() and any((d / f"{processes.CONDUCTOR}.json").exists() for d in runs.iterdir())):
            await asyncio.sleep(0.2)
    (run_dir,) = runs.iterdir()
    truth, vitals = Truth(), Vitals(run_dir)
    app = open_app(run_dir)
    blows = Blows(uvcc, run_dir, truth, vitals, int(os.environ.get("UVCC_CHAOS_SEED", "1")))
    async with app.run_test(size=(160, 50)) as pilot:
        await pilot.pause()
        beside = Beside(app, run_dir, truth, vitals)
        begun, due, told = 0.0, 0.0, 0
        while not begun or time.monotonic() - begun < MINUTES * 60:
            await asyncio.sleep(LOOK_S)
            beside.look()
            for line in beside.found.bad[told:]:
                say(line + "\n")
            told = len(beside.found.bad)
            if truth.over:
                say(f"{truth.newest:.1f} the run ended\n")
                break
            training = bool(truth.workers) and truth.step > 5
            begun = begun or (time.monotonic() if training else 0.0)
            if begun and (what := blows.care()):
                say(f"{time.time():.1f} {what}\n")
            if begun and blows.calm() and time.monotonic() > due:
                say(f"{time.time():.1f} blow: {blows.strike()}\n")
                due = time.monotonic() + blows.dice.uniform(8.0, 16.0)
        lasted = time.monotonic() - begun if begun else 0.0
        say(f"{beside.found.looks} looks in {lasted:.0f} s, {beside.catching_up} behind, blows {dict(blows.struck)}\n")
        for task in list(blows._tasks):
            with contextlib.suppress(Exception):
                await task
    app.source.close()
    if app.writer:
        app.writer.close()
    assert begun, "the run never trained"
    assert not beside.found.bad, "\n".join(beside.found.bad[:60])
    assert sum(blows.struck.values()) >= MINUTES / 2
