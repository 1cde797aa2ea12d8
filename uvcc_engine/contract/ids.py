"""Deterministic identifiers (docs/architecture.md, "Evidence"). Standard library only.

32- and 64-bit ids are labels on the wire. Anything that must be unique carries the whole tuple.
"""

from __future__ import annotations

import hashlib
import struct


def _sha256(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def sid_replica(sid_job: bytes, replica: int) -> bytes:
    """Session id of one replica: 32 bytes."""
    return _sha256(b"UVCC_SID_REPLICA_V1", sid_job, struct.pack("<I", replica))


def sid_sub(sid_rep: bytes, stage: int, tensor: int) -> bytes:
    """Session id of one (stage, tensor) subsession, shared by the three parties: 32 bytes."""
    return _sha256(b"UVCC_SID_SUB_V1", sid_rep, struct.pack("<BH", stage, tensor))
