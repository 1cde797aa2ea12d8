"""Digests of a worker's state, final or at a checkpoint."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

from torch import Tensor

from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.sealing.box_keys import derive
from uvcc_engine.sealing.components import Ring

Half = Literal["first", "second"]
HALVES: Final[tuple[Half, Half]] = ("first", "second")
"""The components of a ``Share``, by name of their attribute."""
_STORED: Final[dict[Half, str]] = {"first": "lo", "second": "hi"}  # how names in checkpoints end: a stored format


def stored_name(name: str, half: Half) -> str:
    """Name of one component of a tensor in a checkpoint."""
    return f"{name}.{_STORED[half]}"


def stored(name: str, share: Share) -> dict[str, Tensor]:
    """Both components of a share under their names in a checkpoint. Any shape."""
    return {stored_name(name, half): component(share, half).contiguous().cpu() for half in HALVES}


def loaded(state: Mapping[str, Tensor], name: str, f: int) -> Share:
    """The inverse of :func:`stored`, at scale ``f``. Shapes as they are stored."""
    return Share(state[stored_name(name, "first")], state[stored_name(name, "second")], f)


def component(share: Share, half: Half) -> Tensor:
    """The component that ``half`` names. Shape of the share."""
    return share.first if half == "first" else share.second


def rings(named: Iterable[tuple[str, Share]]) -> tuple[dict[str, Ring], dict[str, Ring]]:
    """Both components of shares by name, as the owner's box holds them. Shapes of the shares."""
    found = list(named)
    return {n: s.first.cpu().numpy() for n, s in found}, {n: s.second.cpu().numpy() for n, s in found}


def component_digest(named: Iterable[tuple[str, Tensor]], blind: bytes) -> str:
    """Blinded SHA-256 (hex) of named share components, in the order given; equal at both of their holders.

    Shapes go into the digest.
    """
    digest = hashlib.sha256(b"UVCC_STATE_V1" + blind)
    for name, part in named:
        digest.update(f"{name}|{part.dim()}|".encode() + struct.pack(f"<{part.dim()}Q", *part.shape))
        digest.update(part.contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


def half_of(state: Mapping[str, Tensor], half: Half) -> dict[str, Tensor]:
    """One component of a state by name, in the order of the names. Shapes as they are stored."""
    end = stored_name("", half)
    return {name.removesuffix(end): state[name] for name in sorted(state) if name.endswith(end)}


def blind_at(blind: bytes, step: int) -> bytes:
    """The secret that blinds a component's digest at one step. It may be revealed: it tells nothing of other steps."""
    return derive(blind, f"component at step {step}")


def whole_digest(parts: Sequence[str]) -> str:
    """The digest (hex) of one component of all ranks of a pod from theirs, in order of rank."""
    return hashlib.sha256(b"UVCC_POD_STATE_V1" + b"".join(bytes.fromhex(p) for p in parts)).hexdigest()
