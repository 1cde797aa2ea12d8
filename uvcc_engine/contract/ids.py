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


def sgir_op_id32(sub: bytes, step: int, phase: int, microbatch: int, k: int) -> int:
    """Label of operation ``k`` of a microbatch in a phase (0 forward, 1 backward, 2 update)."""
    return int.from_bytes(_sha256(b"UVCC_OPID_V1", sub, struct.pack("<IBHH", step, phase, microbatch, k))[:4], "little")


def fss_id64(sub: bytes, step: int, microbatch: int, kind: int, call: int, shard: int) -> int:
    """Label of one function-secret-sharing call."""
    packed = struct.pack("<IHHHI", step, microbatch, kind, call, shard)
    return int.from_bytes(_sha256(b"UVCC_FSSID_V1", sub, packed)[:8], "little")
