"""The detached process of an adopted run: it follows the folder, journals it, and halts by the control file.

``python -m uvcc_console.follow.adopted RUN``. It stands where a rollout has a conductor and a halt sidecar, under both
names, so every screen and verb finds what it looks for. It ends nothing there: a tear-down ends the following alone.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from uvcc_console.core import alerts, paths
from uvcc_console.core import events as ev
from uvcc_console.core.failures import describe
from uvcc_console.core.journal.journal import BUSY_S, Journal, iter_events
from uvcc_console.core.log import logger
from uvcc_console.core.supervision import SideTasks
from uvcc_console.fleet import pulse
from uvcc_console.follow import adopting
from uvcc_console.follow.control_file import ControlFileChannel
from uvcc_console.follow.follower import POLL_S, FolderFollower
from uvcc_console.follow.reader import FolderReader
from uvcc_console.halt import machine
from uvcc_console.haltd.halter import Halter
from uvcc_console.haltd.order_socket import OrderServer
from uvcc_console.rollout.bus import Bus
from uvcc_console.rollout.telling import tell_operator
from uvcc_console.runs import conducting, processes
from uvcc_engine.contract.agent_protocol.agent_messages import HaltStage
from uvcc_engine.contract.machine.by_itself import exit_code

log = logger(__name__)
PROVIDER: Final = "adopted"
NAMES: Final = (processes.CONDUCTOR, processes.HALTD)
TICK_S: Final = 0.05
HALT_POLL_S: Final = 0.25
COST_EVERY_S: Final = 5.0
WATCH_EVERY_S: Final = 2.0
SETTLE_S: Final = 5.0
VERDICT_S: Final = 75.0
FOREIGN: Final = "it is only followed: what runs there is not this console's to change"
NOT_TOUCHED: Final = "nothing there was touched"


class AdoptedRun:
    """One run that is only followed, from its journal."""

    def __init__(self, run_dir: Path, bus: Bus) -> None:
        self._run_dir, self._bus = run_dir, bus
        adoption = adopting.read(run_dir)
        self._words = adoption.target.words
        self._remote = bool(adoption.target.host)
        self._shell = adoption.shell()
        cursors: dict[str, list[int]] = {}
        for _, event in iter_events(run_dir / paths.JOURNAL, (ev.CursorMoved.kind,)):
            cursors |= event.cursors if isinstance(event, ev.CursorMoved) else {}
        self._reader = FolderReader(self._shell, adoption.target.folder, cursors)
        self._follower = FolderFollower(self._reader, self._recorded, path="ssh" if self._remote else "file")
        self._channel = ControlFileChannel(self._reader, lambda: self._follower.up, self._witnessed)
        self._channels: dict[str, ControlFileChannel] = {}
        self._halter = Halter(self._channels, self._append, auto=(machine.HOLD, machine.HALT))
        self._halter.checkpoints = False
        self._front = OrderServer(run_dir, self._asked)
        self._direct: set[tuple[str, str]] = set()
        self._early: list[ev.HaltRequested] = []  # asked for before the folder was looked at
        self._told = False
        self._known: tuple[bool, str] | None = None
        self._ending = ""
        self._up = True
        self._judge_at = 0.0

    def end(self, reason: str) -> None:
        """Stop following; the first reason counts."""
        self._ending = self._ending or reason

    async def run(self, since: int = 0) -> str:
        """Follow to the end; returns the run's last status. Intents after ``since``, a sequence number, are new."""
        self._bus.listen(self._heard)
        self._take_up(since)
        self._bus.commit(ev.StageChanged(name="connect", status="running", detail=self._words))
        try:
            await self._front.open()
        except OSError as e:
            log.error("no front door: %s; halts are asked for in the journal only", e)
        ticking = asyncio.create_task(self._tick())
        beside = SideTasks(None, lambda event: self._bus.record([event]))
        notifying = beside.start("the notices", lambda: tell_operator(self._run_dir, self._bus))
        writing = asyncio.create_task(self._bus.run())
        status, detail = "failed", ""
        try:
            await self._follower.run(lambda: bool(self._ending))
            status, detail = await self._verdict()
        except Exception as e:
            log.error("it cannot be followed any more", exc_info=e)
            detail = str(describe(e))
        finally:
            ticking.cancel()
            await self._channel.close()
            await self._halter.close()
            self._front.close()
            stage = ev.StageChanged(name="follow", status="ok" if status != "failed" else "failed", detail=detail)
            self._bus.commit(stage, ev.RunEnded(status=status, detail=detail))
            notifying.cancel()
            writing.cancel()
            await asyncio.wait({writing, notifying})
            await self._shell.close()
        return status

    async def _verdict(self) -> tuple[str, str]:
        """How the run is over; a halt under way is seen through first."""
        if self._ending:
            return "torn_down", f"{self._ending}; {NOT_TOUCHED}"
        end = time.monotonic() + VERDICT_S
        while self._halter.active and time.monotonic() < end:
            await asyncio.sleep(TICK_S)
        s = self._bus.snapshot
        if self._reader.failed:
            return "failed", f"the trainer failed: {self._reader.failed}"[:300]
        halted = self._reader.how == "halted"
        step = f" at step {s.step}" if s.step >= 0 else ""
        return ("halted", f"halted{step}") if halted else ("ok", f"the trainer ended{step}")

    # ---- what is read

    def _recorded(self, events: Sequence[ev.Event]) -> None:
        """In order: that there is a folder, what it is, what it holds."""
        found: list[ev.Event] = []
        if not self._told and self._follower.up:
            self._told = True
            found += [
                self._pod("ready", self._words),
                ev.LinkChanged(pod=self._reader.pod, path="ssh" if self._remote else "file", up=True),
                ev.StageChanged(name="connect", status="ok", detail=self._shell.where),
                ev.StageChanged(name="follow", status="running", detail=self._words),
            ]
        what = (self._reader.contract, self._reader.why_no_halt)
        if self._told and what != self._known:
            self._known = what
            found.append(
                ev.Followed(pod=self._reader.pod, target=self._words, contract=what[0], no_halt=what[1]),
            )
        self._bus.record([*found, *events])
        for event in events:
            self._channel.heard(event)
            if isinstance(event, ev.LinkChanged):
                self._up = event.up
                self._judge_at = time.monotonic() + SETTLE_S  # what was missed is folded first: it is no silence
                self._halter.link(self._reader.pod, event.up)

    def _pod(self, state: str, detail: str) -> ev.PodChanged:
        return ev.PodChanged(
            pod=self._reader.pod,
            party=int(self._reader.pod[1:].partition("r")[0]),
            replica=int(self._reader.pod.partition("r")[2]),
            provider=PROVIDER,
            state=state,
            address=self._shell.where if self._remote else "",
            detail=detail,
            host_key=self._shell.host_key,
        )

    # ---- what is asked

    def _take_up(self, since: int) -> None:
        """What was asked for before anybody listened here, and nobody has answered."""
        waiting: list[ev.Intent] = []
        for seq, event in iter_events(self._run_dir / paths.JOURNAL, (ev.Intent.kind, ev.ActionDone.kind), since):
            if seq > self._bus.snapshot.seq:
                break  # it is heard
            if isinstance(event, ev.Intent):
                waiting.append(event)
            elif isinstance(event, ev.ActionDone):
                of = [i for i in waiting if (i.action, str(i.args.get("order", ""))) == (event.action, event.order)]
                waiting = [i for i in waiting if i is not (of[0] if of else None)]
        for intent in waiting:
            self._heard(intent)
        if (asked := self._bus.snapshot.halt).nonce and not asked.done:
            self._obey(ev.HaltRequested(nonce=asked.nonce, mode=asked.mode, by=asked.by, drill=asked.drill))

    def _heard(self, event: ev.Event) -> None:
        if isinstance(event, ev.Intent) and event.action in ("teardown", "stop"):
            self.end(f"{event.action} asked by {event.by}")
        elif isinstance(event, ev.Intent) and event.action != "resume":  # what only a run of one's own has
            pod, order = (str(event.args.get(name, "")) for name in ("pod", "order"))
            why = f"{FOREIGN} ({self._words})"
            self._bus.record([ev.ActionDone(action=event.action, pod=pod, ok=False, detail=why, order=order)])
        elif isinstance(event, ev.HaltRequested) and (event.nonce, event.mode) not in self._direct:
            self._obey(event)

    def _asked(self, request: ev.HaltRequested) -> None:
        """At the front door: the order does not wait for the disk."""
        self._direct.add((request.nonce, request.mode))
        self._append([request])
        self._obey(request)

    def _obey(self, request: ev.HaltRequested) -> None:
        """Begin a halt, once the folder was looked at: before that nobody knows what there is to halt."""
        if not self._follower.looked:
            self._early.append(request)
            return
        if self._reader.why_no_halt:
            self._refused(request)
            return
        workers = max(1, len(self._bus.snapshot.workers))
        self._channels[self._reader.pod] = self._channel
        self._halter.request(request, self._reader.run, {self._reader.pod: workers})

    def _obey_early(self) -> None:
        early, self._early = self._early, []
        for request in early:
            self._direct.add((request.nonce, request.mode))
            self._append([replace(request, ts=0.0)])  # once more: the phase that begins with the first look has no halt
            self._obey(request)

    def _refused(self, request: ev.HaltRequested) -> None:
        why = f"nothing can be halted there: {self._reader.why_no_halt}"
        pod = self._reader.pod
        self._append(
            [
                ev.Alert(level="error", name="follow", text=why, hint="end it there, by hand", subject=pod),
                ev.HaltDone(nonce=request.nonce, mode="release", verified=0, total=1, step=-1, seconds=0.0),
            ]
        )

    def _witnessed(self, told: HaltStage) -> None:
        self._halter.message(self._reader.pod, told)

    def _append(self, events: Sequence[ev.Event]) -> None:
        stamped = [e if e.ts else replace(e, ts=time.time()) for e in events]
        self._bus.record(stamped)
        self._front.publish(stamped)

    async def _tick(self) -> None:
        """Beats under both names, the ladder's clock, the meter that shows no money, and the detectors."""
        beats = [pulse.Beat(self._run_dir, name) for name in NAMES]
        watch, cost = alerts.Watch(), 0.0
        try:
            while True:
                now = time.monotonic()
                for name, beat in zip(NAMES, beats, strict=True):
                    beat.beat()
                    processes.renew_record(self._run_dir, name)
                if self._early and self._follower.looked:
                    self._obey_early()
                self._halter.tick()
                self._follower.poll_s = HALT_POLL_S if self._halter.active else POLL_S
                if now >= cost and self._up and self._told:  # while the folder is out of reach, the picture is old
                    cost = now + COST_EVERY_S
                    self._bus.record([ev.CostTick(hourly=0.0, spent=0.0)])
                if now >= self._judge_at and self._up:
                    self._judge_at = now + WATCH_EVERY_S
                    self._bus.record(watch.look(self._bus.snapshot, time.time(), time.monotonic()))
                await asyncio.sleep(TICK_S)
        finally:
            for beat in beats:
                beat.close()


async def _follow(run_dir: Path, since: int, *, ending: bool) -> str:
    journal = Journal(run_dir / paths.JOURNAL, source="follow", busy_s=BUSY_S)
    try:
        bus = Bus(journal)
        if bus.snapshot.ended:
            return bus.snapshot.status
        run = AdoptedRun(run_dir, bus)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, run.end, f"it got {number.name}")
        if ending:
            run.end("a tear-down was asked for")
        return await run.run(since)
    finally:
        journal.close()


def follow_run(run_dir: Path, adopted: str, since: int) -> int:
    """Follow a run until it ends; ``adopted`` is "teardown" where it is to end. Returns the exit code.

    ``since``: the journal's sequence number after which intents are new.
    """
    log.info("following")
    return 1 if asyncio.run(_follow(run_dir, since, ending=adopted == "teardown")) == "failed" else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the process. Exit code 0 unless the run failed."""
    return conducting.main("uvcc_console.follow.adopted", follow_run, argv, names=NAMES)


if __name__ == "__main__":
    sys.exit(exit_code(main))
