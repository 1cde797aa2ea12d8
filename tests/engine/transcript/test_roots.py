"""Ids and roots against values computed here with hashlib from the formulas alone."""

from __future__ import annotations

import hashlib
import struct

from blake3 import blake3

from uvcc_engine.contract import ids
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.transcript.formats import kinds
from uvcc_engine.transcript.leaves import roots
from uvcc_engine.transcript.leaves.leaf import (
    OPENED_KINDS,
    Leaf,
    blind_at,
    blinded_digest,
    epoch_key,
    epoch_prefix,
    head_of,
    leaf_hash,
)

JOB = hashlib.sha256(b"a job").digest()


def H(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def le(value: int, size: int) -> bytes:
    return value.to_bytes(size, "little")


def test_ids() -> None:
    rep = H(b"UVCC_SID_REPLICA_V1", JOB, le(3, 4))
    sub = H(b"UVCC_SID_SUB_V1", rep, le(2, 1), le(1, 2))
    assert ids.sid_replica(JOB, 3) == rep
    assert ids.sid_sub(rep, 2, 1) == sub == roots.sid_of(JOB, Coord(3, 0, 2, 1)) == roots.sid_of(JOB, Coord(3, 2, 2, 1))


def test_replica_and_global_roots() -> None:
    topology = Topology(replicas=2, stages=2, tensor=2)
    worker = {c: H(str(c).encode()) for c in topology.coords()}
    replicas = []
    for r in range(2):
        ordered = [H(f"p{p}r{r}s{s}t{t}".encode()) for p in range(3) for s in range(2) for t in range(2)]
        replicas.append(H(b"UVCC_REPLICA_ROOT_V1", H(b"UVCC_SID_REPLICA_V1", JOB, le(r, 4)), le(11, 4), *ordered))
    found, top = roots.epoch_roots(JOB, topology, 11, worker)
    assert found == replicas
    assert top == H(b"UVCC_GLOBAL_ROOT_V1", JOB, le(11, 4), *replicas)
    assert roots.run_root([top, JOB]) == H(b"\x01", H(b"\x00", top), H(b"\x00", JOB))
    assert roots.subsession_root(JOB, 5, [top, JOB, top]) == H(b"UVCC_SUB_ROOT_V1", JOB, le(5, 4), top, JOB, top)


def keyed(key: bytes, *parts: bytes) -> bytes:
    return blake3(b"".join(parts), key=key).digest()


def test_the_keyed_hash_is_that_of_blake3s_published_vectors() -> None:
    key = b"whats the Elvish word for friend"
    for text, hashed in (
        (b"", "92b2b75604ed3c761f9d6f62392c8a9227ad0ea3f09573e783f1498a4ed60d26"),
        (b"\0", "6d7878dfff2f485635d39013278ae14f1454b8c0a3a2d34bc1ab38228a80c95b"),
    ):
        assert blinded_digest(kinds.OPEN, key, text).hex() == hashed


def test_leaf_layout_hash_and_blind() -> None:
    key, sub, payload = H(b"key"), H(b"sub"), b"a share"
    said = keyed(key, b"UVCC_BLIND_V2", sub, le(6, 4))
    blind = keyed(said, bytes([kinds.OPEN, 1, 2]) + le(10, 4) + le(0, 4) + le(3, 8))
    assert epoch_key(key, sub, 6) == said
    assert [blind_at(said, head_of((3, 10, 0, way, 1, 2, kinds.OPEN))) for way in (0, 1)] == [blind, blind]
    for kind in kinds.NAMES:
        opened = kind in OPENED_KINDS
        assert blinded_digest(kind, blind, payload) == (H(blind, payload) if opened else keyed(blind, payload))
    digest = keyed(blind, payload)
    record = Leaf(0, kinds.OPEN, 1, 2, 10, 0, 3, len(payload), digest).pack()
    assert record == bytes([0, kinds.OPEN, 1, 2]) + le(10, 4) + le(0, 4) + le(3, 8) + le(7, 8) + digest
    assert leaf_hash(epoch_prefix(sub, 6), record) == H(b"\x00UVCC_LEAF_V1", sub, struct.pack("<I", 6), record)
    assert Leaf.unpack(record).key == (3, 10, 0, 0, 1, 2, kinds.OPEN)
