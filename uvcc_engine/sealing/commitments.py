"""A commitment to one component of the inputs: hiding, because blinded; binding, because a hash."""

from __future__ import annotations

from cryptography.hazmat.primitives.hashes import SHA256, Hash


class Commitment:
    """SHA-256 of a 32-byte blinding and the encoded component, which may come in pieces."""

    def __init__(self, blind: bytes) -> None:
        self._state = Hash(SHA256())
        self._state.update(b"UVCC_INPUT_COMMIT_V1" + blind)

    def update(self, data: bytes | bytearray | memoryview) -> None:
        self._state.update(data)

    def hex(self) -> str:
        """The commitment; nothing can be added afterwards."""
        return self._state.finalize().hex()


def commitment(blind: bytes, component: bytes | memoryview) -> str:
    """The commitment to a whole component, as hex."""
    made = Commitment(blind)
    made.update(component)
    return made.hex()
