"""The stage machine: stages in order, each journalled; what happens after a failure or a halt is asked for."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from uvcc_console.core import events as ev
from uvcc_console.rollout.bus import Bus
from uvcc_console.rollout.context import Halted, describe
from uvcc_engine.contract.errors import ConfigError, UvccError

Act = Callable[[bool], Awaitable[str]]
"""A stage; its argument tells whether it is entered again, after a failure, a halt or another conductor's death."""
DECISIONS = ("resume", "retry", "skip")
SKIPPABLE = ("drill", "gate")


@dataclass
class Stages:
    """Runs ``acts`` in the order given. A stage returns its detail line, or raises.

    ``resumable`` stages, once there are workers to go on with, wait for a decision up to ``wait_s`` after a halt or
    failure; with ``patient`` all stages do.
    """

    bus: Bus
    acts: Mapping[str, Act]
    resumable: frozenset[str]
    wait_s: float
    patient: bool = False
    adopted: bool = False
    clock: Callable[[], float] = time.time
    decisions: asyncio.Queue[str] = field(default_factory=asyncio.Queue)

    def decide(self, action: str) -> None:
        """Somebody asked to resume, retry or skip."""
        if action in DECISIONS:
            self.decisions.put_nowait(action)

    async def run(self) -> tuple[str, str]:
        """Run every stage that is not done yet; returns (status, detail): ok, halted or failed."""
        for name, act in self.acts.items():
            known = next((v.status for v in self.bus.snapshot.stages if v.name == name), "pending")
            if known in ("ok", "skipped"):
                continue
            error = await self._stage(name, act)
            if error is not None:
                return ("halted" if isinstance(error, Halted) else "failed", str(error))
        return "ok", ""

    async def _stage(self, name: str, act: Act) -> UvccError | None:
        """One stage with its retries; the error that it finally stays with, None when it is through."""
        again, self.adopted = self.adopted, False
        while True:
            self._forget()
            self.bus.commit(ev.StageChanged(name=name, status="running"))
            try:
                detail = await act(again)
            except Halted as e:
                error: UvccError = e
            except Exception as e:  # noqa: BLE001  (whatever a stage raises must end as a named failure, not a hang)
                error = describe(e)
                if not isinstance(e, UvccError):
                    traceback.print_exception(e)
            else:
                self.bus.commit(ev.StageChanged(name=name, status="ok", detail=detail))
                return None
            action = await self._decision(name, error)
            if action == "skip":
                self.bus.commit(ev.StageChanged(name=name, status="skipped", detail=str(error)))
                return None
            if action == "":
                return error
            again = True

    def _forget(self) -> None:
        """Decisions made before there was something to decide are void."""
        while not self.decisions.empty():
            self.decisions.get_nowait()

    async def _decision(self, name: str, error: UvccError) -> str:
        """What to do about a halt or failure; "" when nobody decided in time or nothing can be decided."""
        halted = isinstance(error, Halted)
        begun = bool(self.bus.snapshot.engine_run) and not isinstance(error, ConfigError)
        waits = self.patient or halted or (name in self.resumable and begun)
        until = self.clock() + self.wait_s if waits else 0.0
        said = f"; its pods wait until {time.strftime('%H:%M', time.localtime(until))}" if waits else ""
        status, what = ("waiting", error.what) if halted else ("failed", str(error))
        self.bus.commit(ev.StageChanged(name=name, status=status, detail=what + said, until=until))
        if not waits:
            return ""
        try:
            async with asyncio.timeout(self.wait_s):
                while True:
                    action = await self.decisions.get()
                    if action != "skip" or name in SKIPPABLE:
                        return action
        except TimeoutError:
            return ""
