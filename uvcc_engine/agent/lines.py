"""Bytes from a stream socket -> whole lines. Shared by the agent, its zygote and the bridge."""

from __future__ import annotations

from uvcc_engine.contract.errors import ProtocolError

LONGEST = 16 << 20


class LineBuffer:
    """Collects what arrives and gives back whole lines without their newline."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Raises ProtocolError if a line does not end."""
        self._rest += data
        if b"\n" not in data:
            if len(self._rest) > LONGEST:
                raise ProtocolError(f"a line longer than {LONGEST} bytes", "send a smaller message")
            return []
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        return lines
