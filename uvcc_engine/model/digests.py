"""Digests of a worker's state, final or at a checkpoint."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from torch import Tensor

from uvcc_engine.sealing.box import derive

HALVES: Final = ("lo", "hi")


def component_digest(named: Iterable[tuple[str, Tensor]], blind: bytes) -> str:
    """Blinded SHA-256 (hex) of named share components, in the order given; equal at both of their holders."""
    digest = hashlib.sha256(b"UVCC_STATE_V1" + blind)
    for name, part in named:
        digest.update(f"{name}|{part.dim()}|".encode() + struct.pack(f"<{part.dim()}Q", *part.shape))
        digest.update(part.contiguous().numpy().tobytes())
    return digest.hexdigest()


def half_of(state: Mapping[str, Tensor], half: str) -> dict[str, Tensor]:
    """One component ("lo" or "hi") of a state by name, in the order of the names."""
    return {name.removesuffix(f".{half}"): state[name] for name in sorted(state) if name.endswith(f".{half}")}


def blind_at(blind: bytes, step: int) -> bytes:
    """The secret that blinds a component's digest at one step. It may be revealed: it tells nothing of other steps."""
    return derive(blind, f"component at step {step}")


def whole_digest(parts: Sequence[str]) -> str:
    """The digest (hex) of one component of all ranks of a pod from theirs, in order of rank."""
    return hashlib.sha256(b"UVCC_POD_STATE_V1" + b"".join(bytes.fromhex(p) for p in parts)).hexdigest()
