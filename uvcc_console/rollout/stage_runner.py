"""The stage machine: stages in order, each journalled; what happens after a failure or a halt is asked for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

from uvcc_console.core import events as ev
from uvcc_console.core import pod_states
from uvcc_console.core.failures import describe
from uvcc_console.core.log import logger, within
from uvcc_console.plan.plan import JUDGED, LATER, RESUMABLE
from uvcc_console.rollout.bus import Bus
from uvcc_console.rollout.context import Halted, HaltedEarly
from uvcc_console.rollout.going_on import GoingOn
from uvcc_engine.contract.errors import ConfigError, UvccError

log = logger(__name__)
StageFunction = Callable[[bool], Awaitable[str]]
"""A stage; its argument tells whether it is entered again, after a failure, a halt or another conductor's death."""
BACK = "back"  # resume, but from an earlier checkpoint: of a stage that judges, its training is entered again
DECISIONS = ("resume", "retry", "skip", BACK)
SKIPPABLE = ("drill", "gate")
BEGINNING = ("quote", "provision", "bootstrap", "preflight", "drill", "smoke", *LATER, "full")
PROOF_S = 20.0  # for how long the proof of a halt may come after the end of its workers


@dataclass
class StageRunner:
    """Runs ``acts`` in the order given. A stage returns its detail line, or raises.

    ``keeping`` stages, once there are workers or evidence to go on with, wait for a decision up to ``wait_s`` after a
    halt or failure, but not beyond ``end`` (the run's end of life); with ``patient`` all stages do. ``going_back`` says
    whether an earlier checkpoint was chosen before this conductor lived. ``by_itself``: after which failures of a
    training nobody need decide. ``halts_only``: of a run that three domains
    began only a halt of its workers is waited on, which is proved within ``proof_s``; ``deciding`` says when.
    """

    bus: Bus
    acts: Mapping[str, StageFunction]
    keeping: frozenset[str]
    wait_s: float
    patient: bool = False
    adopted: bool = False
    clock: Callable[[], float] = time.time
    decisions: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    end: float = math.inf
    going_back: Callable[[], bool] = lambda: False
    by_itself: GoingOn | None = None
    halts_only: bool = False
    proof_s: float = PROOF_S
    begun: bool = False
    deciding: bool = False
    _instead: UvccError | None = None
    _before: tuple[str, Callable[[], None]] | None = None  # the halt that is gone on from, and how that is decided
    _answered: str = ""  # the nonce of the halt that was heeded, or behind which somebody decided

    def give_up(self, error: UvccError) -> None:
        """Nobody can decide to go on any more: a wait for that ends with this error."""
        if self.deciding:
            self._instead = error
            self.decisions.put_nowait("")

    def decide(self, action: str) -> None:
        """Somebody asked to resume, retry or skip; void while nothing is to be decided.

        An order that came second would otherwise undo the next halt.
        """
        if action in DECISIONS and self.deciding:
            self.decisions.put_nowait(action)

    def decided_before(self, nonce: str, again: Callable[[], None]) -> None:
        """Before this conductor lived somebody asked to go on behind the halt ``nonce``, or took that back ("").

        Workers may have obeyed that halt while nobody read what they wrote: then their stage is entered as one that
        goes on, and ends halted. ``again`` decides at that moment as was asked; behind any other halt it does not.
        """
        self._before = (nonce, again) if nonce else None

    async def run(self) -> tuple[str, str]:
        """Run every stage that is not done yet; returns (status, detail): ok, halted or failed."""
        names, at, resumed = list(self.acts), 0, ""
        self.begun, self._answered = True, self.bus.snapshot.halt.nonce if self.adopted else ""
        while at < len(names):
            name = names[at]
            known = next((v.status for v in self.bus.snapshot.stages if v.name == name), "pending")
            if known in ("ok", "skipped") and name != resumed:
                at += 1
                continue
            if not (self.adopted and name in JUDGED and self.going_back()):
                error = await self._stage(name, self.acts[name])
                if error is None:
                    at += 1
                    continue
                if not isinstance(error, _GoBack):
                    return ("halted" if isinstance(error, Halted) else "failed", str(error))
            resumed, self.adopted = JUDGED[name], True
            at = names.index(resumed)
        return "ok", ""

    async def _stage(self, name: str, act: StageFunction) -> UvccError | None:
        """One stage with its retries; the error that it finally stays with, None when it is through."""
        resumed, self.adopted = self.adopted, False
        while True:
            self.bus.commit(ev.StageChanged(name=name, status="running"))
            log.info("the stage begins%s", " again" if resumed else "", stage=name)
            try:
                self._heed(name)
                with within(stage=name):
                    detail = await act(resumed)
            except Halted as e:
                error: UvccError = e
            except Exception as e:
                error = describe(e)
                if not isinstance(e, UvccError):
                    log.error("the stage met a defect", stage=name, exc_info=e)
            else:
                log.info("the stage is through: %s", detail, stage=name)
                self.bus.commit(ev.StageChanged(name=name, status="ok", detail=detail))
                return None
            log.log(
                logging.INFO if isinstance(error, Halted) else logging.ERROR, "the stage ends: %s", error, stage=name
            )
            action = await self._decision(name, error)
            log.info("decided: %s", action or "nothing", stage=name)
            if action == "skip":
                self.bus.commit(ev.StageChanged(name=name, status="skipped", detail=str(error)))
                return None
            if action == "":
                return self._instead or error
            if action == BACK and JUDGED.get(name) in self.acts:
                return _GoBack(f"{name}: {error.what}")
            resumed = resumed or not isinstance(error, HaltedEarly)  # which kept it from being entered

    def _heed(self, name: str) -> None:
        """Raises HaltedEarly, once, for a halt that was asked for when there was no worker to obey it."""
        s = self.bus.snapshot
        asked = s.halt.nonce if s.halt.mode == "halt" and not s.halt.drill else ""
        over = all(w.state != "started" for w in s.workers.values())
        if asked and asked != self._answered and name in BEGINNING and over:
            self._answered = asked
            raise HaltedEarly(name, began=bool(s.engine_run))

    def _holds(self, name: str, error: UvccError) -> bool:
        """Whether the pods have what nobody else has: workers to go on with, checkpoints, evidence.

        A setting that was refused before the first step leaves nothing.
        """
        s = self.bus.snapshot
        begun = bool(s.engine_run) and name in self.keeping
        return begun and not (isinstance(error, ConfigError) and not s.checkpoints and s.attempt == 0)

    async def _stopped_soon(self, name: str) -> bool:
        """As ``_stopped``, with time for the sidecar's proof: workers also end because their peers were halted."""
        if name not in RESUMABLE or not self.bus.snapshot.engine_run:
            return False
        try:
            return await self.bus.wait(lambda _: self._stopped(name), self.proof_s)
        except TimeoutError:
            return False

    def _stopped(self, name: str) -> bool:
        """Whether workers of this stage were halted, all of them, and left what they can go on from."""
        s = self.bus.snapshot
        over = bool(s.workers) and all(w.state == "exited" for w in s.workers.values())
        return name in RESUMABLE and bool(s.engine_run) and s.halt.done and over

    async def _decision(self, name: str, error: UvccError) -> str:
        """What to do about a halt or failure; "" when nobody decided in time or nothing can be decided."""
        halted = isinstance(error, Halted)
        waits = self.wait_s > 0 and (self.patient or halted or self._holds(name, error))
        if self.halts_only:
            waits = self.wait_s > 0 and halted and await self._stopped_soon(name)
        now = self.clock()
        until = min(now + self.wait_s, max(now, self.end)) if waits else 0.0
        kept = time.strftime("%H:%M", time.localtime(until))
        pods = any(p.state not in pod_states.ABSENT for p in self.bus.snapshot.pods.values())
        what_waits = "pods kept" if pods else "there is no pod; this waits"
        said = f"; {what_waits} until {kept} for a decision: uvcc resume (r) or uvcc teardown (t)" if waits else ""
        status, what = ("waiting", error.what) if halted else ("failed", str(error))
        while not self.decisions.empty():
            self.decisions.get_nowait()  # of two who decided at once the second
        self.deciding = waits
        nonce = self.bus.snapshot.halt.nonce
        try:
            if waits and halted and self._before is not None and self._before[0] == nonce:
                (_, again), self._before, self._answered = self._before, None, nonce
                again()
                return await self.decisions.get()
            going, pause = self.by_itself, self._pause(name, error, until - now)
            if going is not None and pause is not None:
                alone = f"; goes on by itself in {pause:.0f} s ({going.words})"
                failed = ev.StageChanged(name=name, status=status, detail=what + alone + said, until=until)
                self.bus.commit(replace(failed, again=now + pause))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        return await self._decided(name)
                if self.bus.snapshot.halt.nonce == nonce:  # else somebody wants it to stand still
                    going.order()
                    async with asyncio.timeout(until - now):
                        return await self._decided(name)
            self.bus.commit(ev.StageChanged(name=name, status=status, detail=what + said, until=until))
            if not waits:
                return ""
            async with asyncio.timeout(until - now):
                return await self._decided(name)
        except TimeoutError:
            return ""
        finally:
            self.deciding = False

    def _pause(self, name: str, error: UvccError, longest_s: float) -> float | None:
        """After how many seconds the stage goes on by itself; None where it waits for somebody."""
        if self.by_itself is None or name not in RESUMABLE or isinstance(error, Halted):
            return None
        found = self.by_itself.pause(error)
        return found if found is not None and found < longest_s else None

    async def _decided(self, name: str) -> str:
        """The next decision that fits this stage."""
        while True:
            action = await self.decisions.get()
            self._answered = self.bus.snapshot.halt.nonce
            if action != "skip" or name in SKIPPABLE:
                return action


class _GoBack(UvccError):
    """The operator chose an earlier checkpoint: what was judged is trained again from there."""
