"""Time as a vendor sees it, so that tests need not wait."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Now, and a while later."""

    def now(self) -> float: ...
    async def sleep(self, seconds: float) -> None: ...


class WallClock:
    """Real time."""

    def now(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
