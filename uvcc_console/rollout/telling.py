"""Notices of a run by whoever conducts it, so that none waits for a console to be attached."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Final

from uvcc_console.core import events as ev
from uvcc_console.core.log import logger
from uvcc_console.rollout.bus import Bus
from uvcc_console.runs import notices, notify
from uvcc_engine.contract.errors import UvccError

log = logger(__name__)
LOOK_EVERY_S: Final = 2.0
END_S: Final = 10.0  # so long is waited at a run's end for the place to tell of it
END_LOOK_S: Final = 0.05
RECENT_S: Final = 10.0  # what came so shortly before, nobody may have told; what somebody told is not told again


async def tell_operator(run_dir: Path, bus: Bus) -> None:
    """Hand what is new and matters to the operator's program and address, with or without a console on the run.

    As long as this lives no console does so as well. Settings that cannot be read are told, and nothing is sent.
    """
    try:
        way = notices.outside(notify.operators_program(), lambda text: log.warning("%s", text))
    except UvccError as e:
        bus.record([ev.Alert(level="warn", name="notices", text=f"nobody is notified: {e}")])
        return
    if way is None:
        return
    sender = notices.SoleSender(run_dir, way)
    sender.claim()
    unsent = notices.Unsent(sender)
    notifier = notify.Notifier(notices.void, unsent.add, recent_s=RECENT_S)
    try:
        while True:
            notifier.look(bus.snapshot, time.time())
            unsent.hand_on()
            await asyncio.sleep(LOOK_EVERY_S)
    finally:
        notifier.look(bus.snapshot, time.time())  # also of the end
        await _last(unsent, ended=bus.snapshot.ended > 0)
        sender.close()


async def _last(unsent: notices.Unsent, *, ended: bool) -> None:
    """Tell what is left. The sidecar that has the place still ends with the run, and tells nothing of that itself."""
    end = time.monotonic() + END_S
    while not unsent.hand_on() and ended and time.monotonic() < end:
        await asyncio.sleep(END_LOOK_S)
