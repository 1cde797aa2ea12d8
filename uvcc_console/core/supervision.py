"""What runs beside the main work of a conductor or of a halt sidecar: whatever dies there is told and started again.

A detector, the sweep, the ingest of a pod, a channel of the sidecar or the guard of the sidecar may fail and come back.
Without its spend guard, its journal or its beat a run must not go on: it is ended in good order, and they are started
again meanwhile, for the end needs them too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from uvcc_console.core import events as ev
from uvcc_console.core.failures import describe
from uvcc_console.core.log import logger
from uvcc_engine.contract.text import clean

log = logger(__name__)
FIRST_S: Final = 1.0
LONGEST_S: Final = 60.0
LOGGED: Final = "uvcc logs has the whole error"
Sleep = Callable[[float], Awaitable[None]]


class SideTasks:
    """Tasks of one task group. ``tell`` takes events for the journal, ``end`` the reason why the run must end.

    Without a group, in the sidecar and where single stages are tried without a conductor, they are plain tasks: kept
    alive and told alike; whoever starts one cancels it.
    """

    def __init__(
        self,
        group: asyncio.TaskGroup | None,
        tell: Callable[[ev.Event], None],
        end: Callable[[str], None] = lambda why: None,
        *,
        sleep: Sleep = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._group, self._tell, self._end = group, tell, end
        self._sleep, self._clock = sleep, clock

    def start(
        self, name: str, work: Callable[[], Awaitable[None]], *, vital: bool = False, hint: str = ""
    ) -> asyncio.Task[None]:
        """Keep ``work`` going until it returns or is cancelled; if it is ``vital``, its failure ends the run.

        ``hint``: what an operator can do about a failure, where it is more than reading the log.
        """
        create = asyncio.create_task if self._group is None else self._group.create_task
        return create(self._kept(name, work, vital, hint or LOGGED), name=name)

    async def _kept(self, name: str, work: Callable[[], Awaitable[None]], vital: bool, hint: str) -> None:
        pause = FIRST_S
        while True:
            began = self._clock()
            try:
                await work()
                return
            except Exception as error:
                log.error("%s failed and is started again", name, exc_info=error)
                self._failed(name, str(describe(error)), vital, hint)
            if self._clock() - began > LONGEST_S:
                pause = FIRST_S
            await self._sleep(pause)
            pause = min(2 * pause, LONGEST_S)

    def _failed(self, name: str, why: str, vital: bool, hint: str) -> None:
        text = f"{name} failed and is started again: {clean(why, 300)}"  # an error may quote a pod
        hint = "the run is ended: it must not go on without" if vital else hint
        self._tell(ev.Alert(level="error", name="side_task", text=text, hint=hint, subject=name))
        if vital:
            self._end(f"{name} failed: {clean(why, 300)}")
