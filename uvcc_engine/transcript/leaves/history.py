"""The history of a run as append-only trees of epochs (RFC 9162 section 2.1), and proofs that one extends another.

A subsession, the three workers of one (replica, stage, tensor), has a tree whose leaf of epoch e binds what the three
signed about it: ``SHA-256(0x00 || "UVCC_EPOCH_LEAF_V1" || sid_sub || LE32(e) || s0 || s1 || s2)``, where ``s`` is the
SHA-256 of a party's signed text, which holds its root. Every root statement signs the head over the epochs before it,
the result the head over all: so each signature of a party is one on everything that the other two signed before.

What that is worth: whoever holds one party's key, or two, can change nothing of a finished run, for the third party's
result signs a head over every statement. What it is not: two parties that act together *while* the run goes on may note
between them what they like; of them, only what they exchanged with the third is bound to what truly passed. All three
keys together can make any run.

The run has a tree of its own over the global roots (``roots.run_root``).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.transcript.leaves.merkle import TreeHasher, consistency_proof, is_consistent
from uvcc_engine.transcript.leaves.roots import run_leaves

_LEAF = b"\x00UVCC_EPOCH_LEAF_V1"


def epoch_leaf(sid_sub: bytes, epoch: int, statements: Sequence[bytes]) -> bytes:
    """Leaf hash of one epoch; ``statements``: SHA-256 of the signed texts of P0, P1, P2."""
    if len(statements) != PARTIES:
        raise ConfigError(f"{len(statements)} statements of epoch {epoch}", "one of each party")
    return hashlib.sha256(_LEAF + sid_sub + struct.pack("<I", epoch) + b"".join(statements)).digest()


class History:
    """The tree of one subsession, as it grows."""

    def __init__(self, sid_sub: bytes) -> None:
        self._sid = sid_sub
        self._tree = TreeHasher()

    @property
    def size(self) -> int:
        """How many epochs are in it."""
        return self._tree.size

    @property
    def head(self) -> bytes:
        """The tree hash; of no epoch that of the empty text."""
        return self._tree.root()

    def add(self, statements: Mapping[int, bytes]) -> None:
        """Append the next epoch: SHA-256 of each party's signed text."""
        ordered = [statements[p] for p in range(PARTIES)]
        self._tree.append(epoch_leaf(self._sid, self.size, ordered))


def prove_extension(global_roots: Sequence[bytes], first: int) -> list[bytes]:
    """Consistency proof (RFC 9162 section 2.1.4.1) that the run's tree extends the one of its ``first`` epochs.

    Raises ConfigError if it has not so many.
    """
    try:
        return consistency_proof(run_leaves(global_roots), first)
    except IndexError as e:
        raise ConfigError(f"no head of {first} epochs in a run of {len(global_roots)}", "name a size within it") from e


def extends(first: int, first_head: bytes, second: int, second_head: bytes, proof: Sequence[bytes]) -> bool:
    """True if ``proof`` shows that the tree of ``second`` epochs begins with the one of ``first``."""
    return is_consistent(first, second, first_head, second_head, proof)
