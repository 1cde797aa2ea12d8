"""Small records beside the mail: orders and signs of life, one per (group, writer, name), the newest counts.

The relay keeps them in memory and understands none of them: what they say is signed, and whoever reads them checks
that. Each write gets a number above all earlier ones, so a reader asks for what is newer than the last it knows. That
holds over a restart on the same store, whatever has become of the clock: numbers are reserved there ahead of their use.
Without a store, or on an empty one, they begin at the clock. What matters is written again by its author until it is
answered.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from uvcc_engine.contract.peer_protocol.relay_words import RECORDS_AN_ANSWER

MAX_BODY: Final = 32 << 10
MAX_NAME: Final = 160
NAME: Final = re.compile(rf"[A-Za-z0-9._:/-]{{1,{MAX_NAME}}}", re.ASCII)
PER_WRITER: Final = 512
AHEAD: Final = 10_000_000  # numbers that are reserved at a time: microseconds of a relay's life, at most


@dataclass(frozen=True, slots=True)
class RelayRecord:
    """What the person of this number said under ``name``. ``seq`` orders all records of a relay."""

    writer: int
    name: str
    seq: int
    body: str


@dataclass
class Records:
    """All groups' records. ``clock`` is the wall clock in seconds; ``after``: the highest number that an earlier relay
    on the same store may have given out; ``reserve``: has the store note, in its time, that this one may go so far."""

    clock: Callable[[], float] = time.time
    after: int = 0
    reserve: Callable[[int], None] = lambda mark: None
    _last: int = field(init=False)
    _reserved: int = 0
    _kept: dict[str, dict[tuple[int, str], RelayRecord]] = field(default_factory=dict)
    _waiting: dict[str, dict[asyncio.Future[None], str]] = field(default_factory=dict)  # reader -> prefix

    def __post_init__(self) -> None:
        self._last = self.after

    def next_mark(self) -> int:
        """How far numbers may go from now on; told by whoever makes it durable."""
        self._reserved = max(self._last, int(self.clock() * 1e6)) + AHEAD
        return self._reserved

    def put(self, group: str, writer: int, name: str, body: str) -> int:
        """Keep a record and wake its readers; returns its number. Raises ValueError for one that is not allowed."""
        if not NAME.fullmatch(name) or len(body) > MAX_BODY:
            what = f"a record's name has 1 to {MAX_NAME} letters, digits or ._:/-"
            raise ValueError(f"{what}, its body {MAX_BODY} characters at most")
        self._last = max(self._last + 1, int(self.clock() * 1e6))
        if self._last + AHEAD // 2 > self._reserved:  # half of them are left while the disk takes its time
            self.reserve(self.next_mark())
        kept = self._kept.setdefault(group, {})
        kept.pop((writer, name), None)  # so that the order of the mapping is the order of writing
        kept[writer, name] = RelayRecord(writer, name, self._last, body)
        mine = [key for key in kept if key[0] == writer]
        for key in mine[: max(0, len(mine) - PER_WRITER)]:
            del kept[key]
        for reader, prefix in self._waiting.get(group, {}).items():
            if name.startswith(prefix) and not reader.done():
                reader.set_result(None)
        return self._last

    def since(self, group: str, after: int, prefix: str = "", readable: tuple[str, ...] = ("",)) -> list[RelayRecord]:
        """Records newer than ``after`` whose name begins with ``prefix``, oldest first; ``readable``: how the names
        begin of those that whoever asks may read.
        """
        kept = self._kept.get(group, {}).values()
        found = [r for r in kept if r.seq > after and r.name.startswith(prefix) and r.name.startswith(readable)]
        return found[:RECORDS_AN_ANSWER]

    @property
    def newest(self) -> int:
        """The number of the last write."""
        return self._last

    async def wait(
        self, group: str, after: int, prefix: str, seconds: float, readable: tuple[str, ...] = ("",)
    ) -> list[RelayRecord]:
        """The same as ``since``, but waits up to ``seconds`` for the first."""
        end = asyncio.get_running_loop().time() + seconds
        while not (found := self.since(group, after, prefix, readable)):
            left = end - asyncio.get_running_loop().time()
            if left <= 0:
                return []
            woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waiting = self._waiting.setdefault(group, {})
            waiting[woken] = prefix
            try:
                async with asyncio.timeout(left):
                    await woken
            except TimeoutError:
                return self.since(group, after, prefix, readable)
            finally:
                waiting.pop(woken, None)
        return found
