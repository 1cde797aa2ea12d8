"""What a pod's agent has said and its reader has not yet taken: bounded for what can be asked for again.

Lines of files stay in the pod's files, and telemetry is superseded by the next: both may be left out when the reader
is slow. Ends of processes, rewinds and the like are said once, so they are always kept.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from uvcc_engine.contract.agent_protocol.agent_messages import AgentMessage, Lines
from uvcc_engine.contract.run_files.records import Malformed

MOST: Final = 4096
MOST_BYTES: Final = 16 << 20


class Backlog:
    """Messages in order. ``put`` never waits; whoever fills it looks at ``full`` first."""

    def __init__(self, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._waiting: deque[tuple[AgentMessage | Malformed | None, int]] = deque()
        self._bytes = 0
        self._most = most
        self._most_bytes = most_bytes
        self._there = asyncio.Event()

    @property
    def full(self) -> bool:
        return len(self._waiting) >= self._most or self._bytes >= self._most_bytes

    @property
    def low(self) -> bool:
        """Whether so much has been taken that it pays to ask for more."""
        return len(self._waiting) <= self._most // 4 and self._bytes <= self._most_bytes // 4

    def put(self, message: AgentMessage | Malformed | None) -> None:
        """Append; None is the end."""
        size = sum(len(line) for line in message.lines) if isinstance(message, Lines) else 0
        self._waiting.append((message, size))
        self._bytes += size
        self._there.set()

    async def get(self) -> AgentMessage | Malformed | None:
        """The oldest message; waits for one."""
        while not self._waiting:
            self._there.clear()
            await self._there.wait()
        message, size = self._waiting.popleft()
        self._bytes -= size
        return message
