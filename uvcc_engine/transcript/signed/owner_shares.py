"""What a data owner signs: which key it seals with, and for one attempt of one proposal what it sealed, to which pods.

A proposal names owners by their signing keys. The statement of shares names the proposal, the attempt, all owners in
their order, the three rosters whose pods can open the files, and the commitments that the policy will bind, so it holds
for nothing else; the files themselves are bound to the same in their sealed boxes.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, ProtocolError, UnreadableError
from uvcc_engine.contract.job.column_join import ColumnJoin
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.parsing import strict
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.transcript.signed import orders
from uvcc_engine.transcript.signed.roster import MOST_ATTEMPTS, Roster
from uvcc_engine.transcript.signing.identity import PublicIdentity
from uvcc_engine.transcript.terms.proposal import Proposal

OWNER_NAMESPACE: Final = "uvcc-owner"
SET_MAGIC: Final = b"UVCCSET1"
VERSION: Final = 1
MAILBOXES: Final = 256  # numbers that a relay's frames can tell apart
_KEY: Final = "owner-key"
_SHARE: Final = "owner-share"
_JOIN: Final = "owner-join"
_HASH: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareFile:
    """One party's sealed file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerShare:
    """``owners``: X25519 keys (hex) of all owners in the proposal's order; ``rosters``: digests of the three rosters;
    ``commitments``: to the three components; ``files``: for P0, P1 and P2; ``rows``: how many of each kind (public);
    ``mailbox``: the number that the owner's token has at the relay, for what is sent back; ``joined``: where owners
    hold columns of the same rows, what stands for the rows and their order, the same of all owners, else empty."""

    version: int
    proposal: str
    attempt: int
    owner: PublicIdentity
    owners: tuple[str, ...]
    rosters: tuple[str, str, str]
    commitments: tuple[str, str, str]
    files: tuple[ShareFile, ShareFile, ShareFile]
    rows: dict[str, int]
    mailbox: int
    joined: str = ""

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ConfigError(f"the statement of shares has version {self.version}", f"this code knows {VERSION}")
        hashes = (self.proposal, *self.rosters, *self.commitments, *self.owners, *(f.sha256 for f in self.files))
        hashes += (self.joined,) if self.joined else ()
        if not all(map(_HASH.fullmatch, hashes)) or not 0 <= self.attempt < MOST_ATTEMPTS:
            raise ConfigError("the statement of shares has a hash or an attempt that is none", "64 hex digits each")
        if min((*(f.bytes for f in self.files), *self.rows.values())) < 0:
            raise ConfigError("the statement of shares has a negative size")
        if self.mailbox not in range(MAILBOXES):
            raise ConfigError(f"the statement of shares names the mailbox {self.mailbox}", f"0 to {MAILBOXES - 1}")

    def to_json(self) -> dict[str, Any]:
        """``joined`` stands in it only where owners hold columns of the same rows."""
        return {key: value for key, value in asdict(self).items() if key != "joined" or value}


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerJoin:
    """That an owner (X25519 key, hex) looks for the rows that it has in common with the others: ``secrets``, X25519 key
    -> what it sealed to that owner (hex); ``mailbox``: where it takes their lists."""

    proposal: str
    attempt: int
    owner: str
    mailbox: int
    secrets: dict[str, str]


@dataclass(frozen=True, slots=True)
class OwnerPart:
    """One owner's X25519 key (hex), and its commitments to its three components."""

    owner: str
    commitments: tuple[str, str, str]


def set_commitments(parts: Sequence[OwnerPart]) -> tuple[str, str, str]:
    """What a policy commits to where owners are several: one hash per component over all of them, in order."""
    listed = [canonical([[p.owner, p.commitments[c]] for p in parts]) for c in range(PARTIES)]
    first, second, third = (hashlib.sha256(b"UVCC_INPUT_SET_V1" + one).hexdigest() for one in listed)
    return first, second, third


def set_head(parts: Sequence[OwnerPart], sizes: Sequence[int]) -> bytes:
    """What stands in a party's file before the owners' boxes, which follow in order and have these sizes."""
    listed = [
        {"owner": p.owner, "commitments": list(p.commitments), "bytes": n} for p, n in zip(parts, sizes, strict=True)
    ]
    head = canonical(listed)
    return SET_MAGIC + struct.pack("<I", len(head)) + head


def key_signed(owner: PublicIdentity, sign: Callable[[bytes], str]) -> str:
    """The record that says with which X25519 key an owner seals; ``sign`` signs under ``OWNER_NAMESPACE``."""
    return orders.sealed({"type": _KEY, **owner.to_json()}, sign)


def keys_of(owners: Sequence[str], bodies: Iterable[str]) -> dict[int, PublicIdentity]:
    """The identities of a proposal's owners (their OpenSSH lines) by number, those that announced them. Pure.

    Raises ProtocolError for an owner that announced two, naming it.
    """
    found: dict[int, PublicIdentity] = {}
    for body in bodies:
        content = orders.opened(body, OWNER_NAMESPACE, owners)
        if content is None or content.get("type") != _KEY:
            continue
        try:
            public = PublicIdentity.from_json({k: v for k, v in content.items() if k != "type"})
        except UnreadableError:
            continue
        if public.ed25519 not in owners or orders.opened(body, OWNER_NAMESPACE, [public.ed25519]) is None:
            continue
        number = list(owners).index(public.ed25519)
        if found.setdefault(number, public) != public:
            raise ProtocolError(f"owner {number} ({public.ed25519}) announced two keys that it seals with", "ask it")
    return found


def join_signed(join: OwnerJoin, sign: Callable[[bytes], str]) -> str:
    """The record by which an owner begins to look for common rows; ``sign`` signs under ``OWNER_NAMESPACE``."""
    return orders.sealed({"type": _JOIN, **asdict(join)}, sign)


def joins_of(
    proposal: Proposal, attempt: int, owners: Sequence[PublicIdentity], bodies: Iterable[str]
) -> dict[int, OwnerJoin]:
    """What the owners said of one attempt, by number, those that did. Pure; what is not so signed is passed over."""
    found: dict[int, OwnerJoin] = {}
    kept = list(bodies)
    for number, owner in enumerate(owners):
        for body in kept:
            content = orders.opened(body, OWNER_NAMESPACE, [owner.ed25519])
            if content is None or content.get("type") != _JOIN:
                continue
            try:
                join = strict.read(OwnerJoin, {k: v for k, v in content.items() if k != "type"}, "an owner's join")
            except (ConfigError, UnreadableError):
                continue
            if (join.proposal, join.attempt, join.owner) == (proposal.id, attempt, owner.x25519):
                found[number] = join
    return found


def share_signed(share: OwnerShare, sign: Callable[[bytes], str]) -> str:
    """The statement with its signature; ``sign`` signs under ``OWNER_NAMESPACE``."""
    return orders.sealed({"type": _SHARE, **share.to_json()}, sign)


def share_opened(body: str, owner: str) -> OwnerShare | None:
    """What the owner of this key sealed; None if it did not sign this, or it is no such statement. Never raises."""
    content = orders.opened(body, OWNER_NAMESPACE, [owner])
    if content is None or content.get("type") != _SHARE:
        return None
    try:
        found = strict.read(OwnerShare, {k: v for k, v in content.items() if k != "type"}, "a statement of shares")
    except (ConfigError, UnreadableError):
        return None
    return found if found.owner.ed25519 == owner else None


def check(share: OwnerShare, number: int, proposal: Proposal, attempt: int, rosters: Mapping[int, Roster]) -> None:
    """Hold one owner's statement against the proposal and the rosters. Raises ConfigError naming what differs."""
    whose = f"owner {number} ({share.owner.x25519[:12]})"
    if share.proposal != proposal.id or share.attempt != attempt:
        what = f"{whose} sealed for attempt {share.attempt} of the proposal {share.proposal[:16]}"
        raise ConfigError(what, f"this is attempt {attempt} of {proposal.id[:16]}: have it share again")
    if len(share.owners) != len(proposal.owners) or share.owners[number] != share.owner.x25519:
        raise ConfigError(f"{whose} sealed for other owners than the proposal names, or in another order")
    for party in range(PARTIES):
        if share.rosters[party] != rosters[party].digest:
            what = f"{whose} sealed to other pods of P{party} than that domain's roster lists"
            raise ConfigError(what, f"P{party}'s domain signed another roster, or the owner saw an older one")


def gathered(
    proposal: Proposal, attempt: int, rosters: Mapping[int, Roster], bodies: Iterable[str]
) -> dict[int, OwnerShare]:
    """The owners' statements of one attempt by number, those that are there and hold. Pure.

    What an owner did not sign is passed over. Raises ConfigError, ProtocolError naming an owner whose statement does
    not fit, who signed two, or who names another key for somebody than that one's own statement.
    """
    found: dict[int, OwnerShare] = {}
    kept = list(bodies)
    for number, key in enumerate(proposal.owners):
        for body in kept:
            share = share_opened(body, key)
            if share is None:
                continue
            check(share, number, proposal, attempt, rosters)
            if found.setdefault(number, share) != share:
                what = f"owner {number} ({key}) signed two statements of shares of attempt {attempt}"
                raise ProtocolError(what, "keep both; it may have told the domains different things")
    if ColumnJoin.of_job(proposal.job) is not None:
        _check_joined(found)
    for number, share in sorted(found.items()):
        for other, theirs in found.items():
            if share.owners[other] != theirs.owner.x25519:
                what = f"owner {number} sealed beside another key of owner {other} than that one uses"
                raise ConfigError(what, "one of them announced two keys; have both share again")
    return found


def _check_joined(found: Mapping[int, OwnerShare]) -> None:
    """Refuse (ConfigError naming both) owners who put other rows together, or in another order."""
    for number, share in sorted(found.items()):
        first, of = min(found.items())
        if not share.joined or (share.joined, share.rows) != (of.joined, of.rows):
            what = f"owner {number} shared other rows than owner {first}, or in another order"
            raise ConfigError(what, "one of them told the others different keys; the domains begin another attempt")
