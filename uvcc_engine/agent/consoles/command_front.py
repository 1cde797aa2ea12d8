"""The agent's side towards its consoles: accepting them, answering each command once, telling all of them."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Final

from uvcc_engine.agent.consoles.console_channel import Console
from uvcc_engine.contract.agent_protocol import agent_messages as told
from uvcc_engine.contract.agent_protocol import wire
from uvcc_engine.contract.errors import ProtocolError, UvccError

log = logging.getLogger(__name__)
REMEMBER: Final = 512
Key = tuple[str, str]
"""(op, nonce) of a command."""
Command = Callable[[Console, dict[str, Any]], dict[str, Any] | None]


class CommandFront:
    """``command`` obeys one message: fields of the acknowledgement, or None if :meth:`settle` follows later.

    ``later`` names the operations that may take a while. One of them under a known nonce is answered again, not
    obeyed again, also while the first is still under way.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listener: socket.socket,
        command: Command,
        later: frozenset[str],
    ) -> None:
        self._selector = selector
        self._listener = listener
        self._command = command
        self._later = later
        self._consoles: list[Console] = []
        self._answered: OrderedDict[Key, dict[str, Any]] = OrderedDict()
        self._asked: dict[Key, list[Console]] = {}
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def __iter__(self) -> Iterator[Console]:
        return iter(tuple(self._consoles))

    @property
    def greeted(self) -> list[Console]:
        """Consoles that have said hello."""
        return [c for c in self._consoles if c.greeted]

    def broadcast(self, message: dict[str, Any]) -> None:
        for console in self.greeted:
            console.send(message)

    def settle(self, key: Key, fields: dict[str, Any]) -> None:
        """Acknowledge a command that took a while, to everybody who asked."""
        ack = {"op": wire.ACK, "nonce": key[1], **fields}
        if fields.get("ok") and key[1]:
            self._answered[key] = ack
            while len(self._answered) > REMEMBER:
                self._answered.popitem(last=False)
        for console in self._asked.pop(key, []):
            console.owed -= 1
            console.send(ack)

    def look_after(self, console: Console) -> None:
        """Listen for writability only while something waits; let go of a console that has left with its answers."""
        known = console.sock.fileno() in self._selector.get_map()
        if console.ended and not console.waiting and not console.owed:
            self._consoles.remove(console)
            if known:
                self._selector.unregister(console.sock)
            console.close()
            return
        wanted = 0 if console.ended else selectors.EVENT_READ
        wanted |= selectors.EVENT_WRITE if console.waiting else 0
        if known and not wanted:
            self._selector.unregister(console.sock)
        elif known and self._selector.get_key(console.sock).events != wanted:
            self._selector.modify(console.sock, wanted, self._selector.get_key(console.sock).data)
        elif wanted and not known:
            self._selector.register(console.sock, wanted, lambda mask: self._serve(console, mask))

    def close(self) -> None:
        """Send what each console takes within a second, and hang up."""
        for console in self._consoles:
            console.sock.settimeout(1.0)
            console.flush()
            console.close()

    def _accept(self, mask: int) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            sock, _ = self._listener.accept()
            console = Console(sock)
            self._consoles.append(console)
            self.look_after(console)

    def _serve(self, console: Console, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            console.flush()
        if mask & selectors.EVENT_READ and not console.ended:
            try:
                commands = console.receive()
            except ProtocolError as error:
                console.send({"op": wire.ACK, "nonce": "", **_refusal(error)})
                console.ended = True
                commands = []
            for message in commands:
                self._execute(console, message)
        self.look_after(console)

    def _execute(self, console: Console, message: dict[str, Any]) -> None:
        key = (str(message["op"])[:32], str(message.get("nonce", ""))[: told.MOST_NAME])
        if key[0] in self._later:
            if key in self._answered:
                console.send(self._answered[key])
                return
            waiting = self._asked.setdefault(key, [])
            waiting.append(console)
            console.owed += 1
            if len(waiting) > 1 and key[1]:
                return
        try:
            fields = self._command(console, message)
            if fields is not None:
                fields = {"ok": True, **fields}
        except UvccError as error:
            fields = _refusal(error)
        except Exception as error:  # a defect in obeying one command ends neither the agent nor its workers
            log.exception("a defect in obeying %s", key[0])
            text = f"a defect in obeying {key[0]}: {type(error).__name__} {error}"
            fields = {"ok": False, "code": wire.AckCode.FAILED, "error": text, "hint": "see the pod's agent.log"}
        if fields is not None and key[0] in self._later:
            self.settle(key, fields)
        elif fields is not None:
            console.send({"op": wire.ACK, "nonce": key[1], **fields})


def _refusal(error: UvccError) -> dict[str, Any]:
    code = error.code if isinstance(error, wire.RefusedError) else wire.AckCode.FAILED
    return {"ok": False, "code": code, "error": error.what, "hint": error.hint}
