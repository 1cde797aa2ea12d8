"""Whatever is killed, the console shows what is so: every picture is held against the journal's truth at that time.

The run is made up: six workers on the test's own clock, blows by a seed. ``test_ui_chaos_real.py`` strikes a real one.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from chaos_truth import Findings, Truth, looked
from ui_desk import FakeProcesses, OrderingApp, desk
from ui_journals import RUN, Story

from uvcc_console.core import events as ev
from uvcc_console.ui.judging.lamps import FROZEN, Lamp

SECONDS = 120


class StruckRun(Story):
    """A run that trains on, second by second, while parts of it are struck; ``fresh`` are the events to be written."""

    def begin(self, seed: int) -> StruckRun:
        self.full(5)
        self.dice = random.Random(seed)
        self.done = 5
        self.attempt = 0
        self.deaf: dict[str, float] = {}  # pods whose agents say nothing, and until when
        self.ended: set[str] = set()
        self.held = False
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.blows: Counter[str] = Counter()
        self.processes = FakeProcesses()
        self.quiet_until = 0.0  # nobody writes the journal
        self.written = self.told = 0
        self.loaded = 0.0  # until then workers that were started again only load
        return self

    def fresh(self) -> list[ev.Event]:
        new, self.written = self.events[self.written :], len(self.events)
        return new

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        self.later.append((self.now + seconds, do))

    def second(self) -> None:
        """A second of the run, and a blow now and then."""
        self.now += 1.0
        due = [do for at, do in self.later if at <= self.now]
        self.later = [(at, do) for at, do in self.later if at > self.now]
        for do in due:
            do()
        if self.now < self.quiet_until:
            return
        if self.now < self.loaded:
            self.add(ev.CostTick(hourly=0, spent=0, forecast=0))
            return
        moves = not (self.ended or self.deaf or self.held)
        self.done += moves
        for coord in self.coords:
            pod = self.pod(coord)
            if self.deaf.get(pod, 0.0) > self.now or coord in self.ended:
                continue
            if moves or self.dice.random() < 0.5:
                phase = "hold" if self.held else "train"
                waits = {} if moves or self.held else {"waiting_on": "p2", "waiting_s": 2.0}
                record = {"rank": 0, "step": self.done, "phase": phase, **waits}
                self.add(ev.HeartbeatRead(pod=pod, coord=coord, record=record))
        self.deaf = {pod: until for pod, until in self.deaf.items() if until > self.now}
        self.add(ev.CostTick(hourly=0, spent=0, forecast=0))
        if not self.later and self.dice.random() < 0.5:
            blow = self.dice.choice([w for w in WAYS if self.blows[w] == min(self.blows[v] for v in WAYS)])
            self.blows[blow] += 1
            WAYS[blow](self)

    # ---- blows

    def kill_worker(self) -> None:
        victim = self.dice.choice(self.coords)
        self.ended.add(victim)
        self.add(ev.WorkerProcess(pod=self.pod(victim), coord=victim, state="exited", signal="SIGKILL"))
        for i, peer in enumerate(c for c in self.coords if c != victim):
            self.after(2.0 + i, lambda peer=peer: self._gives_up(peer))  # type: ignore[misc]
        self.after(9.0, lambda: self.add(ev.StageChanged(name="full", status="failed", detail="a worker was killed")))
        self.after(15.0, self._resume)

    def _gives_up(self, coord: str) -> None:
        self.ended.add(coord)
        self.add(ev.WorkerProcess(pod=self.pod(coord), coord=coord, state="exited", rc=4))

    def _resume(self) -> None:
        self.attempt += 1
        self.add(ev.StageChanged(name="full", status="running"))
        self.add(
            ev.PhaseStarted(
                phase="full", engine_run=f"{RUN}.full", steps=self.steps, sid_job="ab" * 32, attempt=self.attempt
            )
        )
        self.ended.clear()
        self.held = False
        for i, coord in enumerate(self.coords):
            pid = 900 + 10 * self.attempt + i
            self.add(ev.WorkerProcess(pod=self.pod(coord), coord=coord, state="started", pid=pid))
        self.loaded = self.now + self.dice.choice((1.0, 14.0))

    def stop_agent(self) -> None:
        pod = self.pod(self.dice.choice(self.coords))
        away = self.dice.choice((4.0, 12.0, 25.0, 64.0))
        self.deaf[pod] = self.now + away
        self.after(3.0, lambda: self.add(ev.LinkChanged(pod=pod, path="ssh", up=False)))
        if away > 60:  # longer than a worker is called silent
            self.after(62.0, lambda: self.add(ev.PodChanged(pod=pod, **self._place(pod), state="lost")))
            self.after(away, lambda: self.add(ev.PodChanged(pod=pod, **self._place(pod), state="agent")))
        self.after(max(3.5, away), lambda: self.add(ev.LinkChanged(pod=pod, path="ssh", up=True)))

    def _place(self, pod: str) -> dict[str, object]:
        return {"party": int(pod[1]), "replica": int(pod[3:]), "provider": "local"}

    def kill_sidecar(self) -> None:
        self.processes.living.discard("haltd")
        self.after(self.dice.choice((1.0, 2.0)), self._respawned)

    def _respawned(self) -> None:
        self.processes.living.add("haltd")
        self.add(ev.Alert(level="error", name="sidecar", text="the halt sidecar has died; another takes its place"))

    def kill_conductor(self) -> None:
        self.processes.living.discard("conductor")
        away = self.dice.choice((3.0, 10.0, 25.0))
        self.quiet_until = self.now + away
        self.after(away, lambda: self.processes.living.add("conductor"))

    def freeze_conductor(self) -> None:
        self.processes.lamps["conductor"] = Lamp(FROZEN, "pid 4242 has not moved for 9 s")
        self.quiet_until = self.now + 8.0
        self.after(8.0, lambda: self.processes.lamps.clear())

    def stall_journal(self) -> None:
        """The conductor lives and comes to nothing: a full disk, a machine that swaps."""
        self.quiet_until = self.now + self.dice.choice((7.0, 20.0))

    def cut_path(self) -> None:
        pod, path = self.pod(self.dice.choice(self.coords)), self.dice.choice(("relay", "lease"))
        self.add(ev.LinkChanged(pod=pod, path=path, up=False))
        self.after(6.0, lambda: self.add(ev.LinkChanged(pod=pod, path=path, up=True)))

    def hold_and_release(self) -> None:
        nonce = f"{self.dice.getrandbits(64):016x}"
        self.held = True
        self.add(ev.HaltRequested(nonce=nonce, mode="hold", by="ada@ops tui"))
        for coord in self.coords:
            self.add(ev.HaltAck(pod=self.pod(coord), nonce=nonce, stage="held", step=self.done))

        def release() -> None:
            self.held = False
            self.add(ev.HaltRequested(nonce=nonce, mode="release", by="ada@ops tui"))
            for coord in self.coords:
                self.add(ev.HaltAck(pod=self.pod(coord), nonce=nonce, stage="released", step=self.done))
            done = {"nonce": nonce, "mode": "release", "step": self.done, "seconds": 2.0}
            self.add(ev.HaltDone(verified=len(self.coords), total=len(self.coords), **done))  # type: ignore[arg-type]

        self.after(2.0, release)

    def halt_it(self) -> None:
        """A halt in which a pod may prove nothing; then it goes on."""
        nonce, lost = f"{self.dice.getrandbits(64):016x}", self.dice.choice(("", self.pod(self.coords[1])))
        self.held = True
        self.add(ev.HaltRequested(nonce=nonce, mode="halt", by="ada@ops tui"))

        def stop() -> None:
            for coord in self.coords:
                pod = self.pod(coord)
                if pod == lost:
                    self.add(ev.HaltAck(pod=pod, nonce=nonce, stage="unknown", detail="no answer"))
                    continue
                self.add(ev.HaltAck(pod=pod, nonce=nonce, stage="gone", step=self.done, checkpoint="ab" * 32))
                record = {"rank": 0, "step": self.done, "phase": "halted"}
                self.add(ev.HeartbeatRead(pod=pod, coord=coord, record=record))
                self.add(ev.WorkerProcess(pod=pod, coord=coord, state="exited", rc=0))
            self.ended = set(self.coords)
            proved = len(self.coords) - bool(lost)
            done = {"nonce": nonce, "mode": "halt", "step": self.done, "seconds": 3.0, "total": len(self.coords)}
            self.add(ev.HaltDone(verified=proved, **done))  # type: ignore[arg-type]
            self.add(ev.StageChanged(name="full", status="waiting", detail=f"halted at step {self.done}"))

        self.after(3.0, stop)
        self.after(9.0, self._resume)


WAYS: dict[str, Callable[[StruckRun], None]] = {
    "worker": StruckRun.kill_worker,
    "agent": StruckRun.stop_agent,
    "sidecar": StruckRun.kill_sidecar,
    "conductor": StruckRun.kill_conductor,
    "frozen conductor": StruckRun.freeze_conductor,
    "journal": StruckRun.stall_journal,
    "link": StruckRun.cut_path,
    "hold": StruckRun.hold_and_release,
    "halt": StruckRun.halt_it,
}


async def see(d: OrderingApp, run: StruckRun, truth: Truth, found: Findings) -> None:
    """Write what is new, look, and hold what is painted against it."""
    new = run.fresh()
    truth.conducted = "conductor" in run.processes.living and not run.processes.lamps
    truth.guarded = "haltd" in run.processes.living
    if new:
        d.append(*new)
    d.app.check_processes()
    d.app.frames.paint_next()
    d.app.tick()
    await d.pilot.pause()
    shown = d.app.main.view.snap  # a picture up to two seconds old is held against what was true then
    truth.tell(run.events[run.told : shown.seq])
    run.told = max(run.told, shown.seq)
    look = looked(d.app, truth, run.now)
    if not d.app.behind_s and run.events[-1].ts - shown.updated > 2.5:
        look.wrong.append(f"{run.events[-1].ts - shown.updated:.1f} s behind, and nothing says so")
    found.take(look, run.now)


@pytest.mark.ci("tests/console/ui/test_ui_truth.py")
@pytest.mark.parametrize("seed", [9, 11])
async def test_nothing_is_green_that_is_not_well_and_nothing_red_that_is(tmp_path: Path, seed: int) -> None:
    run = StruckRun(replicas=2, steps=10_000).begin(seed)
    truth, found = Truth(), Findings()
    async with desk(run, tmp_path / "runs" / RUN, (120, 40), after=0.0, processes=run.processes) as d:
        run.fresh()
        for second in range(SECONDS):
            run.second()
            d.app.source.budget_s = 0.0 if second % 40 > 36 else 60.0  # the machine leaves it no time now and then
            await see(d, run, truth, found)
    assert found.looks == SECONDS
    assert set(run.blows) == set(WAYS), run.blows
    assert not found.bad, "\n".join(found.bad[:40])
