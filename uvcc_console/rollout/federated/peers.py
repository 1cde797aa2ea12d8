"""What this domain's conductor hears of the other two, and tells them: signs of life, barriers, halts.

Everything is written again until the relay shows it, so a relay that forgot is told anew. Nothing of another domain
counts that its key did not sign. Whatever another domain does, or fails to do, ends here in a named error and in pods
that are given back; it is never waited for without a bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from uvcc_console.core import events as ev
from uvcc_console.core.log import logger
from uvcc_console.federation import seat as seats
from uvcc_console.federation.rendezvous import Rendezvous, barrier_name
from uvcc_console.federation.seat import Seat
from uvcc_console.rollout.bus import Bus
from uvcc_console.rollout.context import Halted
from uvcc_console.rollout.federated.barrier_ledger import BarrierLedger, check_ahead, is_over
from uvcc_console.rollout.federated.consenting import ConsentLedger
from uvcc_console.rollout.federated.parting_words import parting_words
from uvcc_console.rollout.federated.rendezvous_watch import RendezvousWatch
from uvcc_console.rollout.federated.told_waits import ToldWait
from uvcc_console.rollout.stage_runner import StageRunner
from uvcc_engine.contract.errors import ConfigError, PeerLostError, UnreachableError, UvccError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.peer_protocol.record_names import BARRIERS, REPORTS
from uvcc_engine.contract.text import clean
from uvcc_engine.transcript.signed import barriers, reports
from uvcc_engine.transcript.signed.barriers import (
    BARRIER_NAMESPACE,
    COLLECT,
    FAILED,
    HALT,
    MEET,
    REACHED,
    Barrier,
    Barriers,
)
from uvcc_engine.transcript.signed.consents import RESUME
from uvcc_engine.transcript.signed.reports import REPORT_NAMESPACE, DomainReport

log = logger(__name__)
T = TypeVar("T")
LOOK_S: Final = 0.5
REPORT_S: Final = 2.0
FAREWELL_S: Final = 10.0
HALTED_S: Final = 90.0
"""So long a phase has to stop by itself once another domain halted it."""
NOTHING: Final = "00" * 32


class Peers:
    """The other domains of one run. ``stages``: the barriers in order. ``run`` must be kept going beside the stages."""

    def __init__(self, bus: Bus, seat: Seat, stages: list[str]) -> None:
        self.seat = seat
        self.stages = stages
        self.attempt = -1
        self.ledger = BarrierLedger(seat.proposal, -1, stages)
        self._bus = bus
        self._others = [p for p in range(PARTIES) if p != seat.party]
        self._own: dict[str, tuple[str, str]] = {}  # by stage: the record's name and body
        self._stopped: tuple[str, str] | None = None
        self._first: dict[int, tuple[int, int]] = {}  # what lay there before this process heard anything
        self._heard: dict[int, tuple[float, DomainReport]] = {}
        self._told: dict[int, tuple[Any, ...]] = {}
        self._said: frozenset[str] = frozenset()  # what lay there at the last look: read already
        self._number = 0
        self._reported = float("-inf")
        self._watch = RendezvousWatch(bus, seat.terms.silence_s, lambda: time.monotonic())
        self._changed = asyncio.Event()
        self._trouble: asyncio.Future[UvccError] = asyncio.get_running_loop().create_future()
        self._halts: set[tuple[int, int]] = set()
        self.resumes = 0  # of this attempt, so far
        self.consents = ConsentLedger(bus, seat)
        self._runner: StageRunner | None = None
        self._halting: asyncio.TimerHandle | None = None
        self._met = False
        self._gone: set[int] = set()
        bus.listen(self._obey)

    @property
    def found(self) -> Barriers:
        """The barriers of this attempt, as far as they came."""
        return self.ledger.found

    # what is told

    def _sign(self, namespace: str) -> Callable[[bytes], str]:
        return lambda payload: self.seat.key.sign(namespace, payload)

    def _barrier(self, stage: str, status: Any, digest: str, reason: str = "") -> Barrier:
        at = self.stages.index(stage)
        before = self.found.of(self.stages[at - 1]) if at and status == REACHED else {}
        return Barrier(
            version=barriers.VERSION,
            proposal=self.seat.proposal.id,
            attempt=self.attempt,
            party=self.seat.party,
            stage=stage,
            status=status,
            digest=digest,
            reason=clean(reason)[: barriers.LONGEST_REASON],
            seen={str(p): b.mark for p, b in before.items()},
            resumed=self.resumes,
        )

    async def reach(self, stage: str, digest: str, *, waits: bool = True, equal: bool = True) -> dict[int, Barrier]:
        """Sign that this domain has reached a stage, and wait until all three have; returns their barriers.

        Raises PeerLostError naming who did not come, ProtocolError naming who signed out of order or, where the digest
        must be ``equal``, who reports something else.
        """
        made = self._barrier(stage, REACHED, digest)
        self._own[stage] = await asyncio.to_thread(self._record, made)
        with contextlib.suppress(UnreachableError):  # every visit leaves what does not lie there
            await asyncio.to_thread(self.seat.there().leave, *self._own[stage])
        if not waits:
            return {self.seat.party: made}
        found = await self.until(lambda: self._all_of(stage), f"reached {stage}", lambda: set(self.found.of(stage)))
        barriers.in_order(self.found, self.stages)
        if equal:
            barriers.agreed(found)
        return found

    def _record(self, barrier: Barrier) -> tuple[str, str]:
        return barrier_name(barrier), barriers.signed(barrier, self._sign(BARRIER_NAMESPACE))

    def tell(self, detail: str) -> None:
        """Say in the stage that runs now for what it waits."""
        if (stage := self._bus.snapshot.stage) is not None and stage.status == "running":
            self._bus.record([ev.StageChanged(name=stage.name, status="running", detail=detail)])

    def _all_of(self, stage: str) -> dict[int, Barrier] | None:
        found = self.found.of(stage)
        return found if len(found) == PARTIES else None

    async def until(
        self, look: Callable[[], T | None], what: str, who: Callable[[], set[int]], end: float | None = None
    ) -> T:
        """Wait for something of the others. Raises PeerLostError naming those who had not done it in time."""
        end = time.monotonic() + self.seat.terms.wait_s if end is None else end
        waiting = ToldWait(self.tell, what, time.monotonic(), end)
        while True:
            changed = self._changed
            if (found := look()) is not None:
                return found
            late = [p for p in self._others if p not in who()]
            waiting.look(names := ", ".join(f"P{p}" for p in late), time.monotonic())
            try:
                async with asyncio.timeout(max(0.0, end - time.monotonic())):
                    await changed.wait()
            except TimeoutError:
                told = f"{names} had not {what} after {self.seat.terms.wait_s:.0f} s"
                hint = "ask that domain's operator, then begin the next attempt"
                raise PeerLostError(told, hint, party=late[0] if late else -1) from None

    # what is heard

    async def run(self) -> None:
        """Tell and listen until cancelled."""
        while True:
            try:
                lying = await asyncio.to_thread(self._exchange)
            except UvccError as e:
                if (lost := self._watch.failed(e)) is not None:
                    self.fail(lost)
            else:
                self._watch.answered()
                try:
                    self._take(*lying)
                except UvccError as e:
                    self.fail(e)
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
            await asyncio.sleep(LOOK_S)

    def _exchange(self) -> tuple[list[str], list[str]]:
        """One visit to the rendezvous, in a thread: leave what is due, read what lies there."""
        with (there := self.seat.there()).connected():
            return self._visit(there)

    def _visit(self, there: Rendezvous) -> tuple[list[str], list[str]]:
        proposal = self.seat.proposal
        told = self.attempt >= 0 and time.monotonic() - self._reported >= REPORT_S
        if told:
            there.leave_report(self._report(), self._sign(REPORT_NAMESPACE))
            self._reported = time.monotonic()
        # once they have met, the others say something new as seldom as this domain does, unless one is late
        late = any(time.monotonic() - at > REPORT_S for at, _ in self._heard.values())
        said = there.look_bodies(f"{REPORTS}{proposal.id}/") if told or late or not self._met else []
        lying = there.look_bodies(f"{BARRIERS}{proposal.id}/{max(0, self.attempt)}/") if self.attempt >= 0 else []
        for name, body in (*list(self._own.values()), *([self._stopped] if self._stopped else [])):
            if body not in lying:  # the relay has not heard it, or has forgotten
                there.leave(name, body)
        for name, body in self.consents.due(lying):
            there.leave(name, body)
        return said, lying

    def _report(self) -> DomainReport:
        s = self._bus.snapshot
        stage = s.stage
        self._number += 1
        training = bool(s.engine_run) and stage is not None and stage.name == s.phase
        return DomainReport(
            proposal=self.seat.proposal.id,
            attempt=self.attempt,
            party=self.seat.party,
            number=self._number,
            stage=stage.name if stage else MEET,
            status=stage.status if stage else "running",
            step=max(-1, s.step) if training else -1,
            steps=s.steps_planned if training else 0,
        )

    def _take(self, said: list[str], lying: list[str]) -> None:
        now = time.monotonic()
        unread = [body for body in said if body not in self._said]
        self._said = frozenset(said) or self._said
        for party, report in reports.newest(self.seat.proposal, unread).items():
            if party == self.seat.party:
                continue
            at = (report.attempt, report.number)
            if at > self._first.setdefault(party, at) and (
                party not in self._heard or at > (self._heard[party][1].attempt, self._heard[party][1].number)
            ):
                self._heard[party] = (now, report)
        self.consents.take(self.attempt, self.ledger.take(lying))
        self._tell()
        for party, stop in self.found.stopped.items():
            if party != self.seat.party:
                self._told_to_stop(stop)
        self._silent(now)
        self._elsewhere()
        self._go_on()

    def _stop_of(self, party: int) -> Barrier | None:
        """A domain's stop, as long as it holds: not a halt after which all went on."""
        stop = self.found.stopped.get(party)
        return None if stop is not None and stop.status == HALT and stop.resumed < self.resumes else stop

    def _tell(self) -> None:
        """The others' state as events, whenever it changes."""
        for party in self._others:
            heard, stop = self._heard.get(party), self._stop_of(party)
            if party in self._gone:
                continue
            if stop is not None:
                state: tuple[Any, ...] = (stop.stage, stop.status, -1, 0, stop.reason)
            elif heard is not None:
                r = heard[1]
                state = (r.stage, r.status, r.step, r.steps, "")
            else:
                continue
            if self._told.get(party) != state:
                self._told[party] = state
                stage, status, step, steps, detail = state
                self._bus.record(
                    [ev.DomainReported(party=party, stage=stage, status=status, step=step, steps=steps, detail=detail)]
                )

    def _told_to_stop(self, stop: Barrier) -> None:
        if (stop.party, -1 if stop.status == FAILED else stop.resumed) in self._halts or (
            stop.status == HALT and stop.resumed < self.resumes
        ):
            return
        self._halts.add((stop.party, -1 if stop.status == FAILED else stop.resumed))
        who = f"P{stop.party}"
        if stop.status == HALT:
            self._bus.record(
                [ev.HaltRequested(nonce=secrets.token_hex(8), mode="halt", by=who, reason=f"its domain: {stop.reason}")]
            )
            self._halt_soon()
        else:
            what = f"{who}'s domain stopped at {stop.stage}: {stop.reason or 'no reason given'}"
            self.fail(PeerLostError(what, "ask that domain's operator; begin the next attempt", party=stop.party))

    def _halt_soon(self) -> None:
        """A phase stops by itself, with checkpoints; whatever else is under way is left."""
        s = self._bus.snapshot
        training = (
            s.stage is not None and s.stage.name == s.phase and any(w.state == "started" for w in s.workers.values())
        )
        delay = HALTED_S if training else 0.0
        self._halting = asyncio.get_running_loop().call_later(delay, self._not_stopped)

    def _not_stopped(self) -> None:
        if self._runner is None or not self._runner.deciding:
            self.fail(Halted(self._bus.snapshot.step))

    # going on after a halt

    def attach(self, runner: StageRunner) -> None:
        """Whose stages wait after a halt until as many domains have signed to go on."""
        self._runner = runner

    def sign(self, what: str) -> None:
        """This domain's operator signs: for the full run, the next resume, or an early end.

        Raises ConfigError for a resume while nothing waits for one.
        """
        if self.attempt < 0 or (what == RESUME and (self._runner is None or not self._runner.deciding)):
            raise ConfigError(f"there is nothing to sign {what} for now", "after a halt, once all workers have stopped")
        self.consents.ask(self.attempt, what, self.resumes + 1)

    def _go_on(self) -> None:
        """Decide to resume once the count is full: all three domains come to it, each by itself."""
        if self._runner is None or not self._runner.deciding or not self.consents.enough(self.resumes + 1):
            return
        if self._halting is not None:
            self._halting.cancel()
        if self._trouble.done():
            if not isinstance(self._trouble.result(), Halted):
                return
            self._trouble = asyncio.get_running_loop().create_future()
        self.resumes += 1
        self._stopped = None
        self._runner.decide("resume")

    def _elsewhere(self) -> None:
        """Name a domain that left this attempt for a later one."""
        for party, (_, report) in self._heard.items():
            if self._met and report.attempt > self.attempt and party not in self._gone:
                self._gone.add(party)
                what = f"P{party}'s domain has begun attempt {report.attempt}, this is {self.attempt}"
                self.fail(PeerLostError(what, "begin the next attempt with it", party=party))

    def _silent(self, now: float) -> None:
        """Name a domain that was heard and is not heard any more."""
        if self.attempt < 0 or not self.found.of(MEET).keys() >= set(self._others):
            return
        for party in self._others:
            heard = self._heard.get(party)
            quiet = now - heard[0] if heard is not None else 0.0
            over = party in self._gone or self._stop_of(party) is not None or COLLECT in self._done(party)
            if quiet > self.seat.terms.silence_s and not over:
                self._gone.add(party)
                stage = heard[1].stage if heard is not None else MEET
                text = f"no sign of life for {quiet:.0f} s"
                self._bus.record([ev.DomainReported(party=party, stage=stage, status="silent", detail=text)])
                what = f"P{party}'s domain vanished at {stage}: {text}"
                self.fail(PeerLostError(what, "this domain ends safe; begin the next attempt with it", party=party))

    def _done(self, party: int) -> set[str]:
        return {stage for (stage, who) in self.found.reached if who == party}

    # who ends what

    def fail(self, error: UvccError) -> None:
        """The first reason why this run cannot go on; while a halt is waited on, the first one after it."""
        waits = self._runner is not None and self._runner.deciding
        if self._trouble.done() and waits and isinstance(self._trouble.result(), Halted):
            self._trouble = asyncio.get_running_loop().create_future()
        if not self._trouble.done():
            log.error("the run cannot go on: %s", error)
            self._trouble.set_result(error)
            if self._runner is not None:
                self._runner.give_up(error)

    async def guarded(self, work: Coroutine[Any, Any, T]) -> T:
        """``work``, given up as soon as another domain makes it vain. Raises what it did."""
        task = asyncio.ensure_future(work)
        try:
            both: set[asyncio.Future[Any]] = {task, self._trouble}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, UvccError):
                    await task
        raise self._trouble.result()

    def _obey(self, event: ev.Event) -> None:
        """A halt that somebody asks for here stops the others, too."""
        if not isinstance(event, ev.HaltRequested) or event.drill or event.mode != "halt" or self.attempt < 0:
            return
        if event.by in {f"P{p}" for p in self._others} or self._stopped is not None:
            return
        self._stop(HALT, f"asked by {event.by}" + (f": {event.reason}" if event.reason else ""))
        self._halt_soon()

    def _stop(self, status: str, reason: str) -> None:
        s = self._bus.snapshot
        now = s.stage.name if s.stage is not None and s.stage.name in self.stages else self._last()
        self._stopped = self._record(self._barrier(now, status, NOTHING, reason))

    def _last(self) -> str:
        done = [stage for stage in self.stages if stage in self._own]
        return done[-1] if done else MEET

    async def farewell(self, status: str, detail: str) -> None:
        """Tell the others that this domain goes no further; a relay that does not answer delays nothing for long."""
        if self.attempt < 0 or status == "ok":
            return
        if self._stopped is None or status != "halted":  # who was halted, and ends, tells those who wait for it
            self._stop(HALT if status == "halted" else FAILED, parting_words(self._bus.snapshot, detail))
        assert self._stopped is not None
        try:
            async with asyncio.timeout(FAREWELL_S):
                await asyncio.to_thread(self.seat.there().leave, *self._stopped)
        except (UvccError, TimeoutError) as e:
            log.warning("the other domains were not told: %s", e)

    # the beginning

    async def meet(self) -> int:
        """Agree on an attempt with two domains that are there; returns it. Nothing is rented before.

        Raises PeerLostError naming who did not come.
        """
        proposal = self.seat.proposal.id
        there = self.seat.there()
        attempt = seats.next_attempt(self.seat)
        lying = await asyncio.to_thread(there.look_bodies, f"{BARRIERS}{proposal}/")
        while is_over(barriers.gathered(self.seat.proposal, attempt, lying)):
            attempt += 1
        await self._begin(attempt)

        def together() -> bool | None:
            heard = {p: r for p, (_, r) in self._heard.items()}
            if any(r.attempt > self.attempt for r in heard.values()):
                return True
            return True if self._all_of(MEET) and set(heard) == set(self._others) else None

        def there_now() -> set[int]:
            return {p for p, (_, r) in self._heard.items() if r.attempt == self.attempt}

        end = time.monotonic() + self.seat.terms.wait_s
        while True:
            await self.until(together, "come", there_now, end)
            higher, party = max(((r.attempt, p) for p, (_, r) in self._heard.items()), default=(0, -1))
            if higher <= self.attempt:
                self._met = True
                return self.attempt
            check_ahead(party, higher, self.attempt, late=time.monotonic() > end)
            await self._begin(higher)

    async def _begin(self, attempt: int) -> None:
        await asyncio.to_thread(seats.begin_attempt, self.seat, attempt)
        self.attempt, self.ledger = attempt, BarrierLedger(self.seat.proposal, attempt, self.stages)
        self._own = {MEET: self._record(self._barrier(MEET, REACHED, NOTHING))}
        self._reported = float("-inf")
