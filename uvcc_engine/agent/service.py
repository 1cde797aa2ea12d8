"""The agent: one process per pod, one thread, one selector loop. It supervises; it never computes.

Consoles come and go on ``agent.sock``; workers, relays and this agent do not depend on any of them.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from uvcc_engine.agent import party, pod_probe
from uvcc_engine.agent.consoles import commands
from uvcc_engine.agent.consoles.command_front import CommandFront, Key
from uvcc_engine.agent.consoles.console_channel import Console
from uvcc_engine.agent.halts import REFUSALS, HaltWatch
from uvcc_engine.agent.lease import Lease
from uvcc_engine.agent.processes.process import ProcessId, wake_pipe
from uvcc_engine.agent.processes.relays import RelayTable
from uvcc_engine.agent.processes.spawner import Spawner
from uvcc_engine.agent.processes.workers import Worker, WorkerTable
from uvcc_engine.agent.processes.zygote_messages import ForkFailed, ImportsDone, WorkerExited, WorkerForked
from uvcc_engine.agent.shutdown import Shutdown
from uvcc_engine.contract.agent_protocol import agent_messages as told
from uvcc_engine.contract.agent_protocol import wire
from uvcc_engine.contract.agent_protocol.wire import AckCode, RefusedError
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.job.spec import WorkerSpec
from uvcc_engine.contract.run_files import files
from uvcc_engine.contract.run_files.control import (
    HALT,
    RELEASE,
    HaltRequest,
    HaltVerdict,
    read_halt,
    verdict,
    write_halt,
)
from uvcc_engine.contract.run_files.eventlog import EventLog

log = logging.getLogger(__name__)

TICK_S: Final = 0.1
HALT_TICK_S: Final = 0.02
IDLE_TICK_S: Final = 0.5
TICK_SHARE: Final = 20.0  # a pause is so many times as long as the tick before: many agents leave workers room
TELEMETRY_S: Final = 2.0


@dataclass
class _Launch:
    """What one command waits for: ``specs``, by coord, are those that the zygote has not reported yet."""

    key: Key
    specs: dict[str, WorkerSpec]
    started: list[dict[str, Any]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


class Agent:
    """Owns everything on this pod that lives longer than a console's visit."""

    def __init__(self, root: Path, listener: socket.socket, spawner: Spawner, identity: Mapping[str, Any]) -> None:
        self.root = root
        self.spawner = spawner
        self.me = ProcessId.of(os.getpid())
        self.identity = dict(identity)
        self.workers = WorkerTable(root)
        self.relays = RelayTable(root)
        self.halts: dict[str, HaltWatch] = {}
        self.lease = Lease.load(root / "lease.json", time.monotonic())
        self._selector = selectors.DefaultSelector()
        self.front = CommandFront(self._selector, listener, self._obey, commands.LATER)
        self._launches: list[_Launch] = []
        self._relays_awaited: list[tuple[str, Key]] = []
        self._probes_awaited: list[tuple[pod_probe.GpuQuery, Key]] = []
        self._gpus: pod_probe.GpuQuery | None = None
        self._cpu = pod_probe.CpuMeter()
        self._ending: Shutdown | None = None
        self._done = False
        self._next_tick = self._next_telemetry = 0.0

    # life

    def run(self) -> int:
        """Serve until stopped. Returns the exit code."""
        wake_read, wake_write = wake_pipe()
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.begin_stop(10.0))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._selector.register(wake_read, selectors.EVENT_READ, lambda mask: os.read(wake_read, 4096))
        self._selector.register(self.spawner.sock, selectors.EVENT_READ, self._from_zygote)
        self._adopt()
        while not self._done:
            wait = max(0.0, self._next_tick - time.monotonic())
            for key, mask in self._selector.select(wait):
                key.data(mask)
            if time.monotonic() >= self._next_tick:
                self._tick()
        self._farewell()
        return 0

    def hurry(self) -> None:
        """Let the next tick come at once."""
        self._next_tick = 0.0

    def _adopt(self) -> None:
        """Take over what an earlier agent left running, with the halts in force."""
        adopted = self.workers.load()
        self.relays.load(self.workers.live)
        for worker in adopted:
            run = worker.spec.run
            log.info("took over worker %s of %s, pid %d", worker.spec.coord, run, worker.id.pid)
            asked = read_halt(Path(worker.spec.dir), run)
            if asked is not None and run not in self.halts:
                self.halts[run] = HaltWatch(asked, self.front.broadcast)

    def _farewell(self) -> None:
        self.spawner.close()
        self.front.close()
        self._selector.close()

    # consoles

    def _obey(self, console: Console, message: dict[str, Any]) -> dict[str, Any] | None:
        if console.lease_s > 0:
            self.lease.renew(console.lease_s, console.holder, time.monotonic())
        return commands.obey(self, console, message)

    def describe(self) -> dict[str, Any]:
        """The answer to hello."""
        return {
            "version": wire.VERSION,
            **(self.me.to_json() if self.me else {}),
            "identity": self.identity,
            "code_hash": party.code_hash(),
            "ts": time.time(),
            "root": os.fspath(self.root),
            "runs": self.workers.runs(),
            "relays": {r.run: r.url for r in self.relays.known.values()},
            "imports": self.spawner.told(),
        }

    # workers

    def run_dir(self, run: str) -> Path:
        """Where a run's files are: where its workers were told to write, else under ``runs``."""
        known = self.workers.of_run(run)
        return Path(known[0].spec.dir) if known else self.root / "runs" / run

    def starting(self, run: str) -> list[WorkerSpec]:
        """Workers of a run that the zygote was asked for and has not reported yet."""
        return list({s.coord: s for launch in self._launches for s in launch.specs.values() if s.run == run}.values())

    def launch(self, specs: Sequence[WorkerSpec], key: Key) -> None:
        """Have the zygote fork these; acknowledged when all have started."""
        if not self.spawner.running:
            self.spawner.start()
            self._selector.register(self.spawner.sock, selectors.EVENT_READ, self._from_zygote)
        self._launches.append(_Launch(key, {s.coord: s for s in specs}))
        for spec in specs:
            self.spawner.launch(spec)

    def await_launch(self, run: str, coords: Set[str], key: Key) -> None:
        """Acknowledge once these have started, which somebody asked for before; none is forked for it."""
        starting = {s.coord: s for s in self.starting(run) if s.coord in coords}
        live = [w.summary() for w in self.workers.live(run) if w.spec.coord in coords - set(starting)]
        self._launches.append(_Launch(key, starting, live))

    def proc_message(self, worker: Worker) -> dict[str, Any]:
        ts = worker.ended or worker.started
        return told.to_json(told.WorkerChange(run=worker.spec.run, **worker.summary(), ts=round(ts, 3)))

    def _from_zygote(self, mask: int) -> None:
        reports = self.spawner.receive()
        if reports is None:
            self._zygote_lost()
            return
        for report in reports:
            if isinstance(report, WorkerExited):
                ended = self.workers.exited(report.pid, report.status)
                if ended is not None:
                    self._worker_ended(ended)
            elif isinstance(report, ImportsDone):
                log.info("imports: %s", report)
            else:
                self._launched(report)
        self.hurry()

    def _launched(self, report: WorkerForked | ForkFailed) -> None:
        coord = report.coord
        waiting = [x for x in self._launches if coord in x.specs and x.specs[coord].run == report.run]
        if waiting and isinstance(report, WorkerForked):
            worker = self.workers.started(waiting[0].specs[coord], report.id, report.at)
            self.front.broadcast(self.proc_message(worker))
        for launch in waiting:
            del launch.specs[coord]
            if isinstance(report, WorkerForked):
                launch.started.append(worker.summary())
            else:
                launch.failed.append(f"{coord}: {report.error}")
            if launch.specs:
                continue
            self._launches.remove(launch)
            fields: dict[str, Any] = {"ok": not launch.failed, "workers": launch.started}
            if launch.failed:
                fields |= {"error": "; ".join(launch.failed), "hint": "check the pod's installation and memory"}
            self.front.settle(launch.key, fields)

    def _worker_ended(self, worker: Worker) -> None:
        """Tell everybody at once; the last lines of its files follow with the next tick."""
        self.front.broadcast(self.proc_message(worker))
        if worker.rc != 0:
            how = worker.signal or f"exit code {worker.rc}"
            self._note(worker.spec, "worker_died", "error", coord=worker.spec.coord, pid=worker.id.pid, how=how)
        self.hurry()

    def _zygote_lost(self) -> None:
        """It died, of its imports or by somebody's hand. Its workers go on, adopted; the next launch gets another."""
        log.error("the zygote has died")
        self._selector.unregister(self.spawner.sock)
        self.spawner.close()
        self.workers.orphaned()
        for launch in self._launches:
            self.front.settle(launch.key, {"ok": False, "error": "the zygote died", "hint": "launch again"})
        self._launches.clear()

    def _note(self, spec: WorkerSpec, name: str, level: str, **fields: Any) -> None:
        self._note_in(Path(spec.dir), name, level, **fields)

    def _note_in(self, folder: Path, name: str, level: str, **fields: Any) -> None:
        """An event of the agent's own in a run's event log."""
        try:
            events = EventLog(folder / files.EVENTS, "agent", time.time)
            events.append(name, level, fields)
            events.close()
        except (UvccError, OSError) as error:
            log.error("cannot note %s: %s", name, error)

    # halt

    def halt(self, asked: HaltRequest) -> list[dict[str, Any]]:
        """Write the control file of the run's directories and follow what happens; returns the workers concerned.

        Raises UvccError if no worker is known here, if a halt is already final, or if the disk refuses.
        """
        run = asked.run
        live = [w.spec for w in self.workers.live(run)] + self.starting(run)
        if not live and not self.workers.of_run(run):
            what = f"no worker of run {run} was started on this pod"
            raise RefusedError(AckCode.NO_WORKER, what, "there is nothing to halt here")
        for folder in {Path(s.dir) for s in live}:
            found = verdict(read_halt(folder, run), asked, time.time())
            if found == HaltVerdict.OBEY:
                self._write_halt(folder, asked)
            elif found != HaltVerdict.KNOWN:
                raise RefusedError(AckCode(found), *REFUSALS[found](run))
        watch = self.halts.get(run)
        if watch is None or watch.request.nonce != asked.nonce:
            watch = self.halts[run] = HaltWatch(asked, self.front.broadcast)
        else:
            watch.upgrade(asked)
        watch.retell()
        self.hurry()
        return [w.summary() for w in self.workers.of_run(run)]

    def _write_halt(self, folder: Path, asked: HaltRequest) -> None:
        try:
            write_halt(folder, asked)
        except UvccError:
            if asked.mode != HALT:
                raise
            # a full disk still takes an empty file, and that says "halt now"
            with (folder / files.HALT).open("wb"):
                log.error("the disk is full: wrote an empty %s for %s", files.HALT, asked.nonce)

    def _check_halts(self) -> bool:
        """Follow the halts in force; returns whether one wants to go on at once."""
        busy = False
        starting = {s.run for launch in self._launches for s in launch.specs.values()}
        for run, watch in tuple(self.halts.items()):
            workers = self.workers.of_run(run)
            busy |= watch.check(workers)
            if run not in starting and watch.request.mode in (HALT, RELEASE) and watch.settled(workers):
                del self.halts[run]
        return busy

    def _check_lease(self) -> None:
        if not self.lease.expired(time.monotonic()):
            return
        for run in sorted({w.spec.run for w in self.workers.live()}):
            first = self.workers.live(run)[0].spec
            holder, ttl = self.lease.holder or "console", self.lease.ttl_s
            self._note(first, "lease_expired", "warn", holder=holder, ttl_s=ttl)
            try:
                self.halt(HaltRequest(HALT, f"lease-{int(time.time())}", run))
            except UvccError as error:
                log.error("the lease of %s expired, but: %s", run, error)

    # time passing

    def _tick(self) -> None:
        began = time.monotonic()
        for worker in self.workers.check_adopted():
            self._worker_ended(worker)
        busy = self._check_halts()
        self._check_lease()
        self._check_awaited()
        self._look_after_relays()
        self._telemetry()
        for console in self.front:
            for run in console.watches():
                console.stream(run, finished=not self.workers.live(run))
            self.front.look_after(console)
        if self._ending is not None:
            self._go_on_ending(self._ending)
        self._flush_zygote()
        now = time.monotonic()
        self._next_tick = now + (0.0 if busy else max(self._pace(), min(TICK_SHARE * (now - began), IDLE_TICK_S)))

    def _pace(self) -> float:
        if self.halts or self._ending or self._relays_awaited or self._probes_awaited:
            return HALT_TICK_S
        return TICK_S if self.workers.live() or self._launches else IDLE_TICK_S

    def _flush_zygote(self) -> None:
        if self.spawner.waiting:
            self.spawner.flush()

    def await_relay(self, run: str, key: Key) -> None:
        self._relays_awaited.append((run, key))
        self.hurry()

    def await_probe(self, query: pod_probe.GpuQuery, key: Key) -> None:
        self._probes_awaited.append((query, key))
        self.hurry()

    def _check_awaited(self) -> None:
        for run, key in tuple(self._relays_awaited):
            relay = self.relays.known.get(run)
            try:
                if relay is None:
                    raise UvccError("the relay was stopped", "start it again")
                if not relay.look():
                    continue
                self.front.settle(key, {"ok": True, "url": relay.url, "pid": relay.id.pid})
            except UvccError as error:
                self.front.settle(key, {"ok": False, "error": error.what, "hint": error.hint})
            self._relays_awaited.remove((run, key))
        for query, key in tuple(self._probes_awaited):
            found = query.result()
            if found is not None:
                gpus, trouble = found
                facts = {
                    **pod_probe.facts(self.root),
                    "gpus": gpus,
                    "gpu_error": trouble,
                    "imports": self.spawner.told(),
                }
                self.front.settle(key, {"ok": True, **facts})
                self._probes_awaited.remove((query, key))

    def _look_after_relays(self) -> None:
        """A relay that nobody stopped is started again where it was; its store has kept every message."""
        self.relays.look()
        ended = self.relays.reap()
        started, given_up = self.relays.revive(ended if self._ending is None else ())
        for relay in started:
            log.warning("the relay of %s had died and was started again: %s", relay.run, relay.why)
            self._note_in(self.run_dir(relay.run), "relay_restarted", "warn", **relay.told())
        for relay in given_up:
            log.error("the relay of %s has died: %s", relay.run, relay.why)
            self._note_in(self.run_dir(relay.run), "relay_died", "error", **relay.told())

    def _telemetry(self) -> None:
        """Every 2 s to whoever listens; a full queue leaves it out."""
        now = time.monotonic()
        if now < self._next_telemetry or not self.front.greeted:
            return
        self._gpus = self._gpus or pod_probe.GpuQuery()
        found = self._gpus.result()
        if found is None:
            return
        self._next_telemetry, self._gpus = now + TELEMETRY_S, None
        memory, disk = pod_probe.memory_mib(), pod_probe.disk_mib(self.root)
        vital = told.Telemetry(
            ts=round(time.time(), 3),
            cpu=self._cpu.share(),
            mem_mib=round(memory["total_mib"] - memory["available_mib"], 1),
            disk_free_mib=disk["free_mib"],
            gpus=found[0],
        )
        for console in self.front.greeted:
            console.offer(told.to_json(vital))

    # the end

    def begin_stop(self, grace_s: float, key: Key | None = None) -> None:
        """End every worker (TERM, after ``grace_s`` KILL), the relays, then this agent; ``key`` is answered last."""
        if self._ending is None:
            self._ending = Shutdown(self.workers, self.relays, grace_s)
        if key is not None:
            self._ending.keys.append(key)
        self.hurry()

    def _go_on_ending(self, ending: Shutdown) -> None:
        if not ending.advance(self._end_zygote):
            return
        for key in ending.keys:
            self.front.settle(key, ending.outcome())
        for launch in self._launches:
            self.front.settle(launch.key, {"ok": False, "error": "the agent was stopped", "hint": "start it again"})
        self._done = True

    def _end_zygote(self) -> None:
        """No more forks; a worker that it forked without having told us yet is found by its state file and ended."""
        if self.spawner.running:
            self._selector.unregister(self.spawner.sock)
            self.spawner.close()
        self.workers.orphaned()
        for worker in self.workers.load():
            worker.id.send_group(signal.SIGKILL)
