"""Opened leaves: read strictly, and held against the signed root that they must be in."""

from __future__ import annotations

import re
from typing import Any, Final

from uvcc_engine.contract.errors import UnreadableError
from uvcc_engine.transcript.leaves.leaf import RECORD, Leaf, blinded_digest, epoch_prefix, leaf_hash
from uvcc_engine.transcript.leaves.merkle import root_from_inclusion
from uvcc_engine.transcript.leaves.roots import EpochRoot
from uvcc_engine.transcript.leaves.store import Opening
from uvcc_engine.transcript.signed.statements import count, digest, exact

_FIELDS: Final = ("blind", "epoch", "index", "payload", "proof", "record")
_HEX = re.compile(r"(?:[0-9a-f]{2})*")


def read_opening(data: Any) -> Opening:
    """An opened leaf from its JSON. Raises UnreadableError."""
    found = exact(data, _FIELDS, "opening")
    record, payload, proof = _bytes(found["record"], "record"), _bytes(found["payload"], "payload"), found["proof"]
    if len(record) != RECORD.size:
        raise UnreadableError(f"an opened leaf has {len(record)} bytes, not {RECORD.size}")
    if not isinstance(proof, list):
        raise UnreadableError("proof is not a list")
    return Opening(
        count(found["epoch"], "epoch", 2**32),
        count(found["index"], "index", 2**48),
        record,
        digest(found["blind"], "blind"),
        payload,
        tuple(digest(p, "proof") for p in proof),
    )


def root_with(opening: Opening, sid_sub: bytes, root: EpochRoot) -> bytes | None:
    """The root that the proof of an opened leaf leads to, in an epoch of as many leaves; None if it leads nowhere."""
    hashed = leaf_hash(epoch_prefix(sid_sub, opening.epoch), opening.record)
    return root_from_inclusion(hashed, opening.index, root.leaves, opening.proof)


def opens(opening: Opening, sid_sub: bytes, root: EpochRoot) -> bool:
    """True if the payload is what the leaf's digest says and the leaf is in ``root``."""
    leaf = Leaf.unpack(opening.record)
    return (
        opening.epoch == root.epoch
        and leaf.size == len(opening.payload)
        and leaf.digest == blinded_digest(leaf.kind, opening.blind, opening.payload)
        and root_with(opening, sid_sub, root) == root.root
    )


def _bytes(data: Any, what: str) -> bytes:
    if not isinstance(data, str) or not _HEX.fullmatch(data):
        raise UnreadableError(f"{what} is not lower-case hex")
    return bytes.fromhex(data)
