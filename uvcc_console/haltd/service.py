"""The halt sidecar: warm agent channels to every pod of a run, and an eye on the journal for whoever wants to stop it.

It has its own SSH connections, so neither a busy console nor a dead one delays a halt, and it renews the pods' lease.
``run_halt`` is the same code for one request, used when no sidecar lives.
"""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from uvcc_console.core import events as ev
from uvcc_console.core import pod_states
from uvcc_console.core.journal.journal import Journal
from uvcc_console.core.log import logger
from uvcc_console.core.paths import DOMAIN
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.core.supervision import SideTasks
from uvcc_console.federation import seat
from uvcc_console.fleet import pulse
from uvcc_console.fleet.cloud.intents import run_books
from uvcc_console.fleet.provider import Pod
from uvcc_console.fleet.provider_kinds import provider_for
from uvcc_console.fleet.runclock import RunClock
from uvcc_console.fleet.spend_ledger import Ledger
from uvcc_console.halt import certificate, machine
from uvcc_console.halt.relay_path import RelayHaltPath
from uvcc_console.haltd import gpus
from uvcc_console.haltd.channels import Channels
from uvcc_console.haltd.deferred import BUSY_S, Deferred
from uvcc_console.haltd.halter import Halter
from uvcc_console.haltd.journal_view import JournalView
from uvcc_console.haltd.order_socket import OrderServer
from uvcc_console.haltd.reaper import Reaper
from uvcc_console.haltd.stand_in import StandIn
from uvcc_console.plan import own_resumes
from uvcc_console.plan.plan import SIGTERM
from uvcc_console.plan.schema import seconds
from uvcc_console.runs import domain, processes
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UnreadableError, UvccError

log = logger(__name__)
POLL_S = 0.005  # while a halt is on its way
IDLE_POLL_S = 0.025  # orders come at the front door and wait for no poll; only the journal's are found so late
WARM_S = 5.0
REAP_EVERY_S = 2.0
REAP_HALT_S = 120.0
LOOK_S = 5.0
AT_ONCE_S = 0.5


class Service:
    """One run's halts. ``only`` restricts it to one request, after which ``run`` returns.

    ``request`` is that request itself, where the journal may not take it; ``hear`` is told of every event at once.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        only: str = "",
        times: machine.Times | None = None,
        request: ev.HaltRequested | None = None,
        hear: Callable[[Sequence[ev.Event]], None] | None = None,
    ) -> None:
        only = only or (request.nonce if request is not None else "")
        self._given = request
        self._run_dir = run_dir
        self._only = only
        self._given_times = times
        self._ended = False
        self._clock = RunClock(run_dir)
        self._reaper = Reaper(Ledger(clock=self._clock.now), resumable=not (run_dir / seat.FILE).exists())
        self._watching: asyncio.Task[None] | None = None
        self._reaping: asyncio.Task[None] | None = None
        self._gone = False  # the run's folder
        self._looking: set[asyncio.Task[None]] = set()
        self._beat = pulse.Beat(run_dir, processes.HALTD) if not only else None
        self._conductor = pulse.MOVING  # how it was when it was looked at last
        self._refused = False  # that domains have not signed for a termination was told
        self._successor: subprocess.Popen[bytes] | None = None
        self._journal = Journal(run_dir / processes.JOURNAL, source="haltd", busy_s=BUSY_S)
        self._front = OrderServer(run_dir, self.asked)
        self._pen = Deferred(self._journal, hear or self._front.publish)
        self._direct: set[tuple[str, str]] = set()  # (nonce, mode) that came by the front door, not by the journal
        self._view = JournalView(self._journal)
        self._stand_in = StandIn(run_dir) if not only and not (run_dir / DOMAIN).exists() else None
        self._beside = SideTasks(None, lambda event: self._append([event]))
        self._channels = Channels(run_dir, "halt" if only else "haltd", self._beside)
        self._halter = Halter(
            self._channels.clients, self._append, times=times, terminate=self._terminate, certify=self._certify
        )
        self._relay = RelayHaltPath(run_dir, self._append, self._halter.witnessed)
        self._channels.on_link = self._halter.link
        self._channels.on_message = self._halter.message

    def asked(self, request: ev.HaltRequested) -> None:
        """Somebody asks at the front door: commands first, then the disk."""
        self._direct.add((request.nonce, request.mode))
        self._pen.note(request)
        self._request(request)

    def _append(self, events: list[ev.Event]) -> None:
        self._pen.append(events)
        for event in events:
            ended = isinstance(event, ev.HaltAck) and event.stage == "gone" and event.path != "api"  # that pod is gone
            if isinstance(event, ev.HaltAck) and ended and event.pod in self._channels.clients:
                task = self._beside.start(f"the look at the GPUs of {event.pod}", partial(self._gpus, event))
                self._looking.add(task)
                task.add_done_callback(self._looking.discard)

    async def _gpus(self, gone: ev.HaltAck) -> None:
        """The processes of a pod are gone: say whether its GPUs are empty as well, or that it has none."""
        client = self._channels.clients[gone.pod]
        ours = [w.pid for w in self.snapshot.workers.values() if w.pod == gone.pod and w.pid]
        word, said = await gpus.look(client.link, ours)
        self._pen.append([replace(gone, detail=said, gpu=word, ts=0.0)])
        if word in (gpus.USED, gpus.UNKNOWN):
            hint = "log in and end what holds it, or replace the pod"
            self._pen.append([ev.Alert(level="error", name="gpu", text=said, hint=hint, subject=gone.pod)])

    @property
    def snapshot(self) -> Snapshot:
        return self._view.snapshot

    async def run(self) -> None:
        """Serve until the run has ended or all its pods are gone; with ``only``, until that halt is done."""
        try:
            while before := self._view.poll():  # all of it: what comes after this is obeyed
                for event in before:
                    self._note(event)
            self._sync()
            if self._only:
                await self._channels.warm(WARM_S)
            self._resume()
            if self._given is not None:
                self.asked(self._given)
            await self._open_front()
            if not self._only:
                self._watching = self._beside.start("the watch over the run", self._look_on)
            while not self._over():
                for event in self._view.poll():
                    self._handle(event)
                self._halter.tick()
                self._pen.tick()
                if self._beat is not None:
                    self._beat.beat()
                self._relay.follow(self._halter.ladder, self.snapshot, time.monotonic())
                if self._gone:
                    log.error("the run's folder is gone: there is nothing left to look after")
                    return
                await asyncio.sleep(POLL_S if self._halter.active else IDLE_POLL_S)
        finally:
            for task in (self._watching, self._reaping):
                if task is not None:
                    task.cancel()
            if self._looking:
                await asyncio.wait(self._looking, timeout=LOOK_S)
            for task in self._looking:
                task.cancel()
            await self._halter.close()
            self._relay.close()
            self._front.close()
            await self._channels.close()
            await self._pen.finish()
            self._journal.close()
            if self._beat is not None:
                self._beat.close()
            if self._stand_in is not None:
                self._stand_in.close()

    async def _open_front(self) -> None:
        """One request needs no door; a sidecar without one is still asked through the journal."""
        if self._only:
            return
        try:
            await self._front.open()
        except OSError as e:
            log.error("no front door: %s; halts are asked for in the journal only", e)

    def _sync(self) -> None:
        profile = self.snapshot.profile.get("halt", {})
        lease = 0.0 if self._only else float(seconds(profile.get("lease", 60.0)))
        self._halter.auto = tuple(profile.get("auto", (machine.HOLD, machine.HALT, machine.TERM)))
        if self._given_times is None:
            self._halter.times = ladder_times(self.snapshot.profile)
        self._halter.checkpoints = self.snapshot.job_kind != "command"
        self._halter.votes = self.snapshot.job_kind == "private"
        self._channels.sync(self.snapshot, lease)

    def _resume(self) -> None:
        """Take up a halt that was asked for before this process lived and that nobody finished."""
        asked = self.snapshot.halt
        if asked.nonce and not asked.done and (not self._only or asked.nonce == self._only):
            self._request(ev.HaltRequested(nonce=asked.nonce, mode=asked.mode, by=asked.by, drill=asked.drill))

    def _note(self, event: ev.Event, at: float | None = None) -> None:
        """A run that ended may be taken up again: its pods or workers come back."""
        self._reaper.see(event, at)
        if isinstance(event, ev.RunEnded):
            self._ended = True
            self._front.publish([event])
        elif isinstance(event, ev.PhaseStarted) or (
            isinstance(event, ev.PodChanged) and event.state in pod_states.ATTACHABLE
        ):
            self._ended = False

    def _handle(self, event: ev.Event) -> None:
        self._note(event, self._clock.now())
        if isinstance(event, ev.PodChanged | ev.RunCreated):
            self._sync()
        elif isinstance(event, ev.PhaseStarted):
            self._halter.renew(self.snapshot.engine_run, self._view.targets())
        elif isinstance(event, ev.HaltRequested) and (event.nonce, event.mode) in self._direct:
            pass  # it was acted on before it was written
        elif isinstance(event, ev.HaltRequested) and (not self._only or event.nonce == self._only):
            self._request(event)

    async def _look_on(self) -> None:
        """Look after the run every now and then; an error in that must not take the halts with it."""
        while not self._gone:
            await asyncio.sleep(REAP_EVERY_S)
            self._gone = not self._run_dir.is_dir()
            if not self._gone:
                processes.renew_record(self._run_dir, processes.HALTD)
                self._look_after()

    def _look_after(self) -> None:
        """A run that nobody conducts any more is halted and handed to a new conductor, which tears it down."""
        conductor = processes.vital(self._run_dir, processes.CONDUCTOR)
        self._tell_of(conductor)
        if self._stand_in is not None:
            self._stand_in.look(self.snapshot, conductor.state, time.time())
        conducted = conductor.moving
        now = self._clock.now()
        self._reaper.ledger.books = run_books(self._run_dir, now)
        s = self.snapshot
        why = self._reaper.due(s, conducted=conducted, now=now, frozen=conductor.who is not None)
        if not why:
            if conductor.who is None and not self._halter.active and (time_of := self._reaper.successor(s, now=now)):
                self._go_on(time_of)
            return
        text = f"the run is ended without its conductor: {why}"
        self._append([ev.Alert(level="error", name="reaper", text=text, hint="uvcc status tells what was saved")])
        if self.snapshot.engine_run and self.snapshot.status == "running" and not self._halter.active:
            # by the front door: whoever is frozen in the middle of a commit keeps the journal shut
            self.asked(ev.HaltRequested(nonce=secrets.token_hex(8), mode="halt", by="reaper", reason=why))
        self._reaping = self._beside.start("the teardown without a conductor", self._tear_down)

    def _go_on(self, time_of: str) -> None:
        """Start another conductor, as ``uvcc resume`` does, if the journal takes the order."""
        text = f"the conductor has died: the run goes on by itself under another one ({time_of})"
        self._append([ev.Alert(level="warn", name="goes_on", text=text, hint="uvcc logs says what it did last")])
        try:
            seq = self._journal.append(own_resumes.order())
            self._successor = processes.start(
                self._run_dir, processes.CONDUCTOR, "--adopt", "resume", "--since", str(seq)
            )
        except UvccError as e:
            log.error("no other conductor: %s", e)

    def _tell_of(self, conductor: pulse.Vital) -> None:
        """Say once when the conductor dies or stops moving, and when it is back."""
        if (self._run_dir / DOMAIN).exists():
            return  # it is conducted elsewhere
        was, self._conductor = self._conductor, conductor.state
        if was == conductor.state or not any(p.state not in pod_states.ABSENT for p in self.snapshot.pods.values()):
            return
        if conductor.moving:
            self._append([ev.Alert(level="warn", name="conductor", text="the conductor moves again")])
            return
        word = "has died" if conductor.who is None else f"is frozen ({conductor.words()})"
        text = f"the conductor {word}; its sidecar keeps the caps and the time to live"
        hint = "uvcc resume goes on, uvcc teardown ends it"
        if not self._reaper.resumable:
            hint = "its sidecar ends it; uvcc rollout --domain begins the next attempt with the other domains"
        if conductor.who is not None:
            hint = f"kill -CONT {conductor.who.pid} lets it go on, uvcc teardown ends it and the run"
        self._append([ev.Alert(level="error", name="conductor", text=text, hint=hint)])

    async def _tear_down(self) -> None:
        """Once the halt has its verdict, or had time for one. A conductor that is frozen makes way for the next."""
        for _ in range(int(REAP_HALT_S / REAP_EVERY_S)):
            await asyncio.sleep(REAP_EVERY_S)
            if not self._halter.active:
                break
        conductor = processes.vital(self._run_dir, processes.CONDUCTOR)
        if conductor.moving:
            return
        if conductor.who is not None:
            log.error("the conductor %s, and is killed", conductor.words())
            await asyncio.to_thread(pulse.end, conductor.who)
        self._successor = processes.start(self._run_dir, processes.CONDUCTOR, "--adopt", "teardown")

    def _request(self, asked: ev.HaltRequested) -> None:
        log.info("%s asked for by %s%s", asked.mode, asked.by, ", a drill" if asked.drill else "", nonce=asked.nonce)
        self._halter.request(asked, self.snapshot.engine_run, self._view.targets())

    def _over(self) -> bool:
        s = self.snapshot
        if self._only:
            ladder = self._halter.ladder
            return ladder is not None and ladder.nonce == self._only and ladder.done
        if self._ended or not s.pods or any(p.state != "gone" for p in s.pods.values()):
            return self._ended
        # a conductor that lives says when the run has ended: it may be renting another pod for its only one
        return processes.vital(self._run_dir, processes.CONDUCTOR).who is None

    def _certify(self, done: ev.HaltDone, engine_run: str, pods: Mapping[str, machine.PodEvidence]) -> str:
        return certificate.issue(self._run_dir, done, engine_run, pods, at=time.time()).sha256 if engine_run else ""

    async def _terminate(self, name: str) -> None:
        """Delete a pod at its provider; returns when it is proven gone.

        Raises ConfigError while domains must still sign for it; the ladder asks again.
        """
        s = self.snapshot
        if why := domain.missing(s, "terminate"):
            if not self._refused:
                hint = "a domain signs with: uvcc domain consent RUN terminate"
                self._append([ev.Alert(level="error", name="consent", text=why, hint=hint, subject=name)])
            self._refused = True
            raise ConfigError(why)
        provider = provider_for(dict(s.profile.get("fleet", {})), self._run_dir)
        try:
            full = f"{s.prefix}{name}"
            for pod in await provider.list(full):
                if pod.name == full:
                    await _delete(provider.delete, pod)
            if (view := s.pods.get(name)) is not None:
                gone = ev.PodChanged(
                    pod=name,
                    party=view.party,
                    replica=view.replica,
                    provider=view.provider,
                    state="gone",
                    detail="terminated by the halt",
                )
                self._append([gone])
        finally:
            await provider.close()


def ladder_times(profile: Mapping[str, Any]) -> machine.Times:
    """The ladder's times for a profile; a command that never looks at a control file gets its SIGTERM at once."""
    halt, job = profile.get("halt", {}), profile.get("job", {})
    found = machine.Times.patient(float(halt.get("patience", 0.0)))
    return replace(found, halt=AT_ONCE_S) if isinstance(job, Mapping) and job.get("halt") == SIGTERM else found


async def _delete(delete: Callable[[Pod], Awaitable[None]], pod: Pod) -> None:
    for last in (False, False, True):
        try:
            return await delete(pod)
        except UnreachableError:
            if last:
                raise


async def run_halt(run_dir: Path, request: ev.HaltRequested, *, patience_s: float = 180.0) -> ev.HaltDone:
    """Write the request down and see it through: by the run's sidecar if it lives, else in this process.

    Raises UnreachableError when the ladder gave no verdict in ``patience_s`` seconds.
    """
    path = run_dir / processes.JOURNAL
    if not path.exists():
        raise UnreadableError(f"no run at {run_dir}", "see the runs with: uvcc runs")
    journal = Journal(path, source=request.by or "halt")
    try:
        asked = journal.append(request)
        end = time.monotonic() + patience_s
        while time.monotonic() < end:
            for _, event in journal.since(asked, kinds=(ev.HaltDone.kind,)):
                if isinstance(event, ev.HaltDone) and event.nonce == request.nonce:
                    return event
            if not processes.running(run_dir, processes.HALTD):
                async with asyncio.timeout(max(1.0, end - time.monotonic())):
                    await Service(run_dir, only=request.nonce).run()
            else:
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        pass  # told below
    finally:
        journal.close()
    raise UnreachableError(f"no verdict on the halt in {patience_s:g} s", "see: uvcc status; try: uvcc halt --now")
