"""The digest of a worker's final state."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

from torch import Tensor


def component_digest(named: Iterable[tuple[str, Tensor]], blind: bytes) -> str:
    """Blinded SHA-256 (hex) of named share components, in the order given; equal at both of their holders."""
    digest = hashlib.sha256(b"UVCC_STATE_V1" + blind)
    for name, part in named:
        digest.update(f"{name}|{part.dim()}|".encode() + struct.pack(f"<{part.dim()}Q", *part.shape))
        digest.update(part.contiguous().numpy().tobytes())
    return digest.hexdigest()
