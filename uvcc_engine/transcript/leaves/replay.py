"""One pass over the records of an epoch: order, roles, tree hash and pair digests, in bounded memory.

Writer and verifier go through the same pass, so that what a party signs is what an auditor recomputes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

from uvcc_engine.contract.errors import VerificationError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.transcript.leaves.leaf import (
    LOCAL_KINDS,
    OPENED_KINDS,
    RECEIVED,
    RECORD,
    SENT,
    WIRE_KINDS,
    Leaf,
    epoch_prefix,
    name_of,
)
from uvcc_engine.transcript.leaves.merkle import TreeHasher
from uvcc_engine.transcript.leaves.roots import EpochRoot, flow_state, pair_digest

_Role = tuple[Callable[[bytes], None] | None, frozenset[int]]  # takes what the flow hashes; the allowed kinds


def peers_of(party: int) -> tuple[int, ...]:
    """The other two parties, ascending."""
    return tuple(p for p in range(PARTIES) if p != party)


def summarise(chunks: Iterable[bytes], sid_sub: bytes, epoch: int, party: int) -> EpochRoot:
    """Root, counts and pair digests of an epoch's records, given in canonical order in pieces of whole records.

    Raises VerificationError for a leaf out of order, repeated, of an unknown kind, or not of this party.
    """
    flows: dict[tuple[int, int], tuple[hashlib._Hash, list[bytes]]] = {}
    roles: dict[tuple[int, int, int], _Role] = {(SENT, party, party): (None, LOCAL_KINDS)}
    for peer in peers_of(party):
        for direction, src, dst in ((SENT, party, peer), (RECEIVED, peer, party)):
            held: list[bytes] = []
            flows[(src, dst)] = flow_state(sid_sub, epoch), held
            roles[(direction, src, dst)] = (held.append, WIRE_KINDS)
    prefix, width, sha256 = epoch_prefix(sid_sub, epoch), RECORD.size, hashlib.sha256
    tree = TreeHasher()
    append, unpack = tree.append, RECORD.iter_unpack
    last: tuple[int, ...] = (-1,)
    opened = 0
    for data in chunks:
        at = 0
        for direction, kind, src, dst, op, chunk, stream, _, _ in unpack(data):
            record = data[at : at + width]
            at += width
            key = (stream, op, chunk, direction, src, dst, kind)
            role = roles.get((direction, src, dst))
            if key <= last or role is None or kind not in role[1]:
                raise _violation(key, last, epoch, party)
            last = key
            append(sha256(prefix + record).digest())
            if role[0] is not None:
                role[0](record[1:])
            elif kind in OPENED_KINDS:
                opened += 1
        for state, held in flows.values():  # hashed together: a call takes longer than a record
            state.update(b"".join(held))
            held.clear()
    pairs = {}
    for peer in peers_of(party):
        low, high = min(party, peer), max(party, peer)
        pairs[peer] = pair_digest(flows[(low, high)][0].digest(), flows[(high, low)][0].digest())
    return EpochRoot(epoch, tree.root(), tree.size, opened, pairs)


def _violation(key: Any, last: Any, epoch: int, party: int) -> VerificationError:
    name = name_of(key)
    if key == last:
        return VerificationError("leaf order", f"epoch {epoch} of P{party} holds {name} twice")
    if key < last:
        return VerificationError("leaf order", f"epoch {epoch} of P{party}: {name} comes after {name_of(last)}")
    return VerificationError("leaf role", f"epoch {epoch} of P{party} holds {name}, which is no leaf of this party")


def first_difference(mine: Iterable[bytes], theirs: Iterable[bytes], me: int, peer: int) -> str:
    """Which common message two parties recorded differently; "" if none. Both sides in canonical order.

    Records of messages with others are skipped. Memory is bounded by one (stream, op, chunk) group, since a message's
    direction, and with it its order inside the group, differs between the two ends.
    """
    own, other = _groups(mine, me, peer), _groups(theirs, me, peer)
    a, b = next(own, None), next(other, None)
    while a is not None or b is not None:
        if b is None or (a is not None and a[0] < b[0]):
            assert a is not None
            return f"{_message(min(a[1]))} is missing at P{peer}"
        if a is None or b[0] < a[0]:
            return f"{_message(min(b[1]))} is missing at P{me}"
        if a[1] != b[1]:
            return _in_group(a[1], b[1], me, peer)
        a, b = next(own, None), next(other, None)
    return ""


def _message(common: bytes) -> str:
    leaf = Leaf.unpack(b"\x00" + common)
    return name_of(leaf.key).replace(" sent", "")


def _groups(records: Iterable[bytes], one: int, two: int) -> Any:
    """Common records of a pair without direction, as (group key, set)."""
    key, group = None, set[bytes]()
    for record in records:
        leaf = Leaf.unpack(record)
        if {leaf.src, leaf.dst} != {one, two} or leaf.src == leaf.dst:
            continue
        if leaf.key[:3] != key:
            if key is not None:
                yield key, group
            key, group = leaf.key[:3], set()
        group.add(record[1:])
    if key is not None:
        yield key, group


def _in_group(mine: set[bytes], theirs: set[bytes], me: int, peer: int) -> str:
    names = {record[:19]: record for record in mine - theirs}
    for record in sorted(theirs - mine):
        if (own := names.get(record[:19])) is not None:
            sizes = Leaf.unpack(b"\x00" + own), Leaf.unpack(b"\x00" + record)
            values = " and ".join(f"{leaf.digest.hex()[:16]} ({leaf.size} B)" for leaf in sizes)
            return f"{_message(own)} is {values} at P{me} and P{peer}"
    only = mine - theirs
    return f"{_message(min(only or theirs))} is missing at P{peer if only else me}"
