"""An agent that lives in the test: speaks the wire over whatever stream it is given, and remembers what it was told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import asyncssh

from uvcc_engine.contract.agent_protocol import wire

Answer = Callable[[dict[str, Any]], dict[str, Any] | None]


@dataclass
class AgentFake:
    """``answers[op]`` gives an acknowledgement's fields, or None to stay silent; unknown commands are acknowledged."""

    answers: dict[str, Answer] = field(default_factory=dict)
    heard: list[dict[str, Any]] = field(default_factory=list)
    attached: list[asyncssh.SSHServerProcess] = field(default_factory=list)
    after: Callable[[dict[str, Any]], None] = lambda message: None
    arrived: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def __call__(self, process: asyncssh.SSHServerProcess) -> None:
        self.attached.append(process)
        rest = b""
        try:
            while data := await process.stdin.read(65536):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    await self._take(process, wire.decode(line))
        except (asyncssh.Error, OSError):
            pass  # the link was cut, as the test wanted
        finally:
            if process in self.attached:
                self.attached.remove(process)
        process.exit(0)

    async def _take(self, process: asyncssh.SSHServerProcess, message: dict[str, Any]) -> None:
        answer = self.answers.get(message["op"], lambda _: {})(message)
        if answer is not None:
            process.stdout.write(wire.encode({"op": wire.ACK, "nonce": message["nonce"], "ok": True, **answer}))
        async with self.arrived:
            self.heard.append(message)
            self.arrived.notify_all()
        self.after(message)

    def tell(self, **message: Any) -> None:
        """Send something unasked to every attached console."""
        for process in self.attached:
            process.stdout.write(wire.encode(message))

    def of(self, op: str) -> list[dict[str, Any]]:
        return [m for m in self.heard if m["op"] == op]

    async def until(self, op: str, count: int = 1) -> list[dict[str, Any]]:
        """Wait until ``count`` messages of this kind were heard."""
        async with asyncio.timeout(120), self.arrived:
            await self.arrived.wait_for(lambda: len(self.of(op)) >= count)
        return self.of(op)
