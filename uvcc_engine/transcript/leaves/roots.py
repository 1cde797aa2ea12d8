"""Roots above a worker's epoch root (docs/architecture.md, "Evidence"), and the digest two peers must share."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from uvcc_engine.contract.ids import sid_replica, sid_sub
from uvcc_engine.contract.job.topology import PARTIES, Coord, Topology
from uvcc_engine.transcript.leaves.merkle import tree_root


@dataclass(frozen=True, slots=True)
class EpochRoot:
    """What finalising an epoch yields. ``pairs``: peer party -> digest of the leaves both ends hold (32 bytes)."""

    epoch: int
    root: bytes
    leaves: int
    opened: int
    pairs: Mapping[int, bytes]

    def event(self, coord: Coord) -> dict[str, Any]:
        """Fields of the ``epoch_root`` event of a worker."""
        peers = {str(Coord(coord.replica, p, coord.stage, coord.tensor)): d.hex() for p, d in self.pairs.items()}
        return {"coord": str(coord), "epoch": self.epoch, "root": self.root.hex(), "pairs": peers}


def _hash(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def flow_state(sid: bytes, epoch: int) -> hashlib._Hash:
    """Running hash of the messages of one direction between two parties, fed with records less their first byte."""
    return hashlib.sha256(b"UVCC_FLOW_V1" + sid + struct.pack("<I", epoch))


def pair_digest(up: bytes, down: bytes) -> bytes:
    """Digest of a pair's common leaves; ``up`` is the flow from the lower to the higher party."""
    return _hash(b"UVCC_PAIR_DIGEST_V1", up, down)


def subsession_root(sub: bytes, epoch: int, roots: Sequence[bytes]) -> bytes:
    """Root of one (replica, stage, tensor); ``roots`` by party."""
    return _hash(b"UVCC_SUB_ROOT_V1", sub, struct.pack("<I", epoch), *roots)


def replica_root(sid_rep: bytes, epoch: int, roots: Sequence[bytes]) -> bytes:
    """Root of one replica; ``roots`` sorted by (party, stage, tensor)."""
    return _hash(b"UVCC_REPLICA_ROOT_V1", sid_rep, struct.pack("<I", epoch), *roots)


def global_root(sid_job: bytes, epoch: int, replica_roots: Sequence[bytes]) -> bytes:
    """Root of one epoch of the whole job; ``replica_roots`` in replica order."""
    return _hash(b"UVCC_GLOBAL_ROOT_V1", sid_job, struct.pack("<I", epoch), *replica_roots)


def run_leaves(global_roots: Sequence[bytes]) -> list[bytes]:
    """Leaf hashes of the run's tree of epochs (RFC 9162 section 2.1.1): SHA-256(0x00 || global root)."""
    return [_hash(b"\x00", root) for root in global_roots]


def run_root(global_roots: Sequence[bytes]) -> bytes:
    """Head of the append-only tree over every epoch's global root, in order; that of fewer epochs is a prefix of it."""
    return tree_root(run_leaves(global_roots))


def replica_order(topology: Topology, replica: int) -> list[Coord]:
    """Workers of a replica in the order of :func:`replica_root`: by (party, stage, tensor)."""
    return [
        Coord(replica, p, s, t) for p in range(PARTIES) for s in range(topology.stages) for t in range(topology.tensor)
    ]


def epoch_roots(
    sid_job: bytes, topology: Topology, epoch: int, roots: Mapping[Coord, bytes]
) -> tuple[list[bytes], bytes]:
    """Replica roots and the global root of one epoch from every worker's root. Raises KeyError if one is missing."""
    replicas = [
        replica_root(sid_replica(sid_job, r), epoch, [roots[c] for c in replica_order(topology, r)])
        for r in range(topology.replicas)
    ]
    return replicas, global_root(sid_job, epoch, replicas)


def sid_of(sid_job: bytes, coord: Coord) -> bytes:
    """The subsession id of a worker."""
    return sid_sub(sid_replica(sid_job, coord.replica), coord.stage, coord.tensor)
