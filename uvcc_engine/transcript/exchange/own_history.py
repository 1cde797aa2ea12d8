"""Before a run goes on, what it recorded so far is read again: a resume over damaged evidence would train for nothing.

Everything that the final verification will hold this worker to is recomputed from its own folder: the tree hash, counts
and pair digests of every finished epoch in ``leaves.bin`` against its own signed roots, every opened leaf, and the
peers' statements that it kept. Nothing is written. What does not hold is damage of *these* files: it is named by file
and epoch, and says nothing about any peer, whose own copy may well be whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.errors import UnreadableError, VerificationError
from uvcc_engine.contract.job.topology import Coord
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.leaves.leaf import OPENED_KINDS, SENT, Leaf, blinded_digest, epoch_prefix, leaf_hash
from uvcc_engine.transcript.leaves.merkle import root_from_inclusion
from uvcc_engine.transcript.leaves.replay import peers_of, summarise
from uvcc_engine.transcript.leaves.roots import sid_of
from uvcc_engine.transcript.signed.openings import read_opening
from uvcc_engine.transcript.signed.statements import RootStatement, Signed
from uvcc_engine.transcript.signing.sshsig import ROOT_NAMESPACE
from uvcc_engine.transcript.terms.policy import Policy

CHECK: Final = "evidence"
HINT: Final = (
    "nothing was trained; put the file back as it was and resume, or start over under the next attempt with "
    "uvcc resume RUN --from 0, which keeps this attempt's files aside"
)
_Statements = dict[int, dict[int, RootStatement]]  # party -> epoch -> what it signed


def check_history(folder: Path, policy: Policy, coord: Coord, epochs: int) -> int:
    """Replay the first ``epochs`` epochs of a worker's transcript folder; returns how many leaves that were.

    Whatever is signed of later epochs is checked as well, as it will be compared with when they are repeated.
    Raises VerificationError naming the file, the epoch and what does not hold.
    """
    if epochs == 0:
        return 0
    parties = [coord.party, *peers_of(coord.party)]
    said: _Statements = {p: {} for p in parties}
    _read_statements(folder, leaf_file.ROOTS, policy, coord, (coord.party,), said)
    _read_statements(folder, leaf_file.PEERS, policy, coord, peers_of(coord.party), said)
    for epoch in range(epochs):
        _check_agreed(folder, coord, epoch, said)
    leaves = _check_leaves(folder, policy, coord, epochs, said[coord.party])
    _check_openings(folder, policy, coord, epochs, said[coord.party])
    return leaves


def signed_epochs(folders: Mapping[int, Path], policy: Policy, coord: Coord) -> dict[int, int]:
    """How many epochs the three workers at the place of ``coord`` signed, by party, from the folders of all three.

    An epoch that a party signed, as its own folder or a peer's says, must lie in its transcript as it was signed.
    Raises VerificationError naming the file, the epoch and what does not hold.
    """
    said: _Statements = {p: {} for p in folders}
    for party, folder in folders.items():
        mine = Coord(coord.replica, party, coord.stage, coord.tensor)
        for name, of in ((leaf_file.ROOTS, (party,)), (leaf_file.PEERS, tuple(peers_of(party)))):
            if (folder / name).exists():  # a run may have ended before the first
                _read_statements(folder, name, policy, mine, of, said)
    found = {party: 1 + max(of_party, default=-1) for party, of_party in said.items()}
    for party, epochs in found.items():
        if lacking := set(range(epochs)) - said[party].keys():
            raise _damage(folders[party], leaf_file.ROOTS, min(lacking), "the signed root is missing")
        mine = Coord(coord.replica, party, coord.stage, coord.tensor)
        if epochs:
            _check_leaves(folders[party], policy, mine, epochs, said[party])
    return found


def _damage(folder: Path, name: str, epoch: int | None, what: str) -> VerificationError:
    where = f"{folder.name}/{name}" + (f", epoch {epoch}" if epoch is not None else "")
    return VerificationError(CHECK, f"{where}: {what}", HINT)


def _lines(folder: Path, name: str) -> Iterator[tuple[int, Any]]:
    """(line number, object) of every whole line: what a killed process left unfinished is no line yet."""
    try:
        data = (folder / name).read_bytes()
    except OSError as e:
        raise _damage(folder, name, None, f"cannot be read: {e.strerror}") from e
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as e:
            raise _damage(folder, name, None, f"line {number} is not what was written: {e}") from e


def _read_statements(
    folder: Path, name: str, policy: Policy, coord: Coord, parties: tuple[int, ...], said: _Statements
) -> None:
    """Every signed root of a file, each of the right worker and with a signature that holds."""
    for number, entry in _lines(folder, name):
        try:
            signed = Signed.from_json(entry)
            statement = RootStatement.from_json(signed.statement)
        except UnreadableError as e:
            raise _damage(folder, name, None, f"line {number} is not what was written: {e.what}") from e
        party, epoch = statement.coord.party, statement.root.epoch
        worker = Coord(coord.replica, party, coord.stage, coord.tensor)
        if party not in parties or statement.coord != worker or statement.sid_job != policy.sid_job:
            raise _damage(folder, name, epoch, f"line {number} is of {statement.coord} of another job or place")
        if not signed.holds(policy.public(party, coord.replica), ROOT_NAMESPACE):
            raise _damage(folder, name, epoch, f"the signature of P{party} does not hold over the root as stored here")
        known = said[party].setdefault(epoch, statement)
        if known != statement:
            raise _damage(folder, name, epoch, f"two different roots of P{party} are stored")


def _check_agreed(folder: Path, coord: Coord, epoch: int, said: _Statements) -> None:
    """The own root is there, both peers' are, and they agree about what was exchanged and countersigned."""
    mine = said[coord.party].get(epoch)
    if mine is None:
        raise _damage(folder, leaf_file.ROOTS, epoch, "the signed root is missing")
    for peer in peers_of(coord.party):
        theirs = said[peer].get(epoch)
        if theirs is None:
            raise _damage(folder, leaf_file.PEERS, epoch, f"the root that P{peer} signed is missing")
        if theirs.root.pairs[coord.party] != mine.root.pairs[peer]:
            raise _damage(
                folder, leaf_file.PEERS, epoch, f"the pair digest of P{peer} as stored here is not the own one"
            )
        if epoch and mine.seen[peer] != said[peer][epoch - 1].root.root:
            what = f"the root of P{peer} in the epoch before is not the one that was countersigned"
            raise _damage(folder, leaf_file.PEERS, epoch, what)


def _check_leaves(folder: Path, policy: Policy, coord: Coord, epochs: int, said: dict[int, RootStatement]) -> int:
    """Recompute each epoch from its leaves. Blocks after the last one asked for are not looked at."""
    sid, name = sid_of(policy.sid_job, coord), leaf_file.LEAVES
    at = leaves = 0
    try:
        for file, block in leaf_file.blocks(folder / name):
            signed = said[at].root
            if (block.epoch, block.sid_sub) != (at, sid):
                raise _damage(folder, name, at, f"the block header says epoch {block.epoch}, or another session")
            if (block.count, block.root) != (signed.leaves, signed.root):
                raise _damage(folder, name, at, "the block header is not that of the root signed in roots.jsonl")
            found = summarise(leaf_file.chunks(file, block), sid, at, coord.party)
            if found != signed:
                what = f"its leaves give root {found.root.hex()[:16]}, signed was {signed.root.hex()[:16]}"
                raise _damage(folder, name, at, what)
            at, leaves = at + 1, leaves + block.count
            if at == epochs:
                break  # before the next header: a full disk or a kill may have cut it short
    except UnreadableError as e:
        raise _damage(folder, name, at, e.what) from e
    except VerificationError as e:
        if e.check == CHECK:
            raise
        raise _damage(folder, name, at, e.what) from e
    if at < epochs:
        raise _damage(folder, name, at, "the epoch is missing")
    return leaves


def _check_openings(folder: Path, policy: Policy, coord: Coord, epochs: int, said: dict[int, RootStatement]) -> None:
    """Every opened leaf lies in its signed root and has the digest of its payload; none is missing."""
    sid, name = sid_of(policy.sid_job, coord), leaf_file.OPENINGS
    opened: dict[int, set[int]] = {epoch: set() for epoch in range(epochs)}
    for number, entry in _lines(folder, name):
        try:
            opening = read_opening(entry)
            leaf = Leaf.unpack(opening.record)
        except UnreadableError as e:
            raise _damage(folder, name, None, f"line {number} is not what was written: {e.what}") from e
        epoch = opening.epoch
        if epoch not in opened:
            continue  # it is repeated, and compared then
        signed = said[epoch].root
        local = (leaf.direction, leaf.src, leaf.dst) == (SENT, coord.party, coord.party) and leaf.kind in OPENED_KINDS
        hashed = leaf_hash(epoch_prefix(sid, epoch), opening.record)
        root = root_from_inclusion(hashed, opening.index, signed.leaves, opening.proof)
        digest = blinded_digest(leaf.kind, opening.blind, opening.payload)
        if not local or root != signed.root or (leaf.digest, leaf.size) != (digest, len(opening.payload)):
            raise _damage(folder, name, epoch, f"line {number} does not open a leaf of the signed root")
        opened[epoch].add(opening.index)
    for epoch, found in opened.items():
        if len(found) != said[epoch].root.opened:
            what = f"{len(found)} leaves are opened, the signed root counts {said[epoch].root.opened}"
            raise _damage(folder, name, epoch, what)
