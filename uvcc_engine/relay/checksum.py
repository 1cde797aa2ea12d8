"""CRC32C (Castagnoli; RFC 3720): the one checksum of frames and of the relay's store. It finds accidents, not liars."""

from __future__ import annotations

import google_crc32c
import numpy as np


def crc32c(data: bytes | bytearray | memoryview, start: int = 0) -> int:
    """CRC32C of any buffer, continuing from ``start``."""
    if not len(data):
        return start
    if not isinstance(data, bytes):
        data = np.frombuffer(data, np.uint8)  # type: ignore[assignment]  # the library takes bytes or an array, no view
    return int(google_crc32c.extend(start, data))
