"""What a worker signs: one statement per epoch root and one for the result, each a line of canonical JSON.

``roots.jsonl`` holds ``{"signature", "statement"}`` lines; ``jq -cjS .statement`` of a line is the signed text, so
``ssh-keygen -Y verify`` alone can check it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.parallel.topology import PARTIES, Coord
from uvcc_engine.transcript.canonical import canonical
from uvcc_engine.transcript.identity import Identity, PublicIdentity, verify_signature
from uvcc_engine.transcript.replay import peers_of
from uvcc_engine.transcript.roots import EpochRoot
from uvcc_engine.transcript.sshsig import RESULT_NAMESPACE, ROOT_NAMESPACE

_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class RootStatement:
    """A worker's word on one epoch; ``seen`` countersigns the peers' roots of the epoch before (empty in the first)."""

    coord: Coord
    sid_job: bytes
    root: EpochRoot
    seen: Mapping[int, bytes]

    def to_json(self) -> dict[str, Any]:
        return {
            "coord": str(self.coord),
            "epoch": self.root.epoch,
            "leaves": self.root.leaves,
            "opened": self.root.opened,
            "pairs": {str(p): d.hex() for p, d in sorted(self.root.pairs.items())},
            "root": self.root.root.hex(),
            "seen": {str(p): d.hex() for p, d in sorted(self.seen.items())},
            "sid_job": self.sid_job.hex(),
        }

    @classmethod
    def from_json(cls, data: Any) -> RootStatement:
        """Read strictly. Raises UnreadableError."""
        found = exact(
            data, ("coord", "epoch", "leaves", "opened", "pairs", "root", "seen", "sid_job"), "root statement"
        )
        where = coord_of(found["coord"])
        epoch = count(found["epoch"], "epoch", 2**32)
        peers = peers_of(where.party)
        root = EpochRoot(
            epoch,
            digest(found["root"], "root"),
            count(found["leaves"], "leaves", 2**48),
            count(found["opened"], "opened", 2**32),
            _by_peer(found["pairs"], peers, "pairs"),
        )
        return cls(
            where, digest(found["sid_job"], "sid_job"), root, _by_peer(found["seen"], peers if epoch else (), "seen")
        )


@dataclass(frozen=True, slots=True)
class ResultStatement:
    """A worker's word on the outcome. ``root``: of the last of ``epochs`` epochs, which holds the RESULT leaf."""

    coord: Coord
    sid_job: bytes
    epochs: int
    root: bytes
    steps: int
    values: Mapping[str, float]
    state_digests: Sequence[str]

    @property
    def core(self) -> bytes:
        """What is hashed and recorded as the RESULT leaf: equal at all three parties."""
        return result_core(self.sid_job, self.steps, self.values, self.state_digests)

    @property
    def result_hash(self) -> bytes:
        return hashlib.sha256(b"UVCC_RESULT_V1" + self.core).digest()

    def to_json(self) -> dict[str, Any]:
        return {
            "coord": str(self.coord),
            "epochs": self.epochs,
            "result_hash": self.result_hash.hex(),
            "root": self.root.hex(),
            "sid_job": self.sid_job.hex(),
            "state_digests": list(self.state_digests),
            "steps": self.steps,
            "values": dict(self.values),
        }

    @classmethod
    def from_json(cls, data: Any) -> ResultStatement:
        """Read strictly. Raises UnreadableError, also if the result hash is not that of the rest."""
        fields = ("coord", "epochs", "result_hash", "root", "sid_job", "state_digests", "steps", "values")
        found = exact(data, fields, "result statement")
        digests, values = found["state_digests"], found["values"]
        if not isinstance(digests, list) or len(digests) != PARTIES:
            raise UnreadableError("a result statement must list three state digests")
        if not isinstance(values, dict) or not all(_is_number(v) for v in values.values()):
            raise UnreadableError("the values of a result statement must be numbers")
        statement = cls(
            coord_of(found["coord"]),
            digest(found["sid_job"], "sid_job"),
            count(found["epochs"], "epochs", 2**32),
            digest(found["root"], "root"),
            count(found["steps"], "steps", 2**32),
            values,
            [digest(d, "state_digests").hex() for d in digests],
        )
        if (stated := digest(found["result_hash"], "result_hash")) != statement.result_hash:
            raise UnreadableError(f"result_hash is {stated.hex()}, its fields give {statement.result_hash.hex()}")
        return statement


def result_core(sid_job: bytes, steps: int, values: Mapping[str, float], state_digests: Sequence[str]) -> bytes:
    """Canonical JSON of the outcome; ``result_hash = SHA256("UVCC_RESULT_V1" || core)``."""
    return canonical(
        {"sid_job": sid_job.hex(), "state_digests": list(state_digests), "steps": steps, "values": dict(values)}
    )


@dataclass(frozen=True, slots=True)
class Signed:
    """A statement's JSON with its armored signature."""

    statement: Mapping[str, Any]
    signature: str

    def to_json(self) -> dict[str, Any]:
        return {"signature": self.signature, "statement": dict(self.statement)}

    @classmethod
    def from_json(cls, data: Any) -> Signed:
        found = exact(data, ("signature", "statement"), "signed statement")
        if not isinstance(found["signature"], str) or not isinstance(found["statement"], dict):
            raise UnreadableError("a signed statement needs a text and an object")
        return cls(found["statement"], found["signature"])

    @property
    def line(self) -> bytes:
        return canonical(self.to_json()) + b"\n"

    def holds(self, public: PublicIdentity, namespace: str) -> bool:
        """True if ``public`` signed exactly this statement."""
        try:
            return verify_signature(public, namespace, canonical(self.statement), self.signature)
        except ConfigError:
            return False


def sign_root(identity: Identity, statement: RootStatement) -> Signed:
    data = statement.to_json()
    return Signed(data, identity.sign(ROOT_NAMESPACE, canonical(data)))


def sign_result(identity: Identity, statement: ResultStatement) -> Signed:
    data = statement.to_json()
    return Signed(data, identity.sign(RESULT_NAMESPACE, canonical(data)))


# ---- strict reading ------------------------------------------------------------------------------------------------


def exact(data: Any, fields: Sequence[str], what: str) -> Mapping[str, Any]:
    """``data`` if it is an object with exactly these fields. Raises UnreadableError naming the difference."""
    if not isinstance(data, dict):
        raise UnreadableError(f"a {what} is not an object")
    if set(data) != set(fields):
        extra, missing = sorted(set(data) - set(fields)), sorted(set(fields) - set(data))
        raise UnreadableError(f"a {what} has unknown fields {extra}, lacks {missing}")
    return data


def digest(value: Any, what: str) -> bytes:
    """32 bytes from 64 lower-case hex digits. Raises UnreadableError."""
    if not isinstance(value, str) or not _HEX.fullmatch(value):
        raise UnreadableError(f"{what} is {str(value)[:80]!r}, not 64 lower-case hex digits")
    return bytes.fromhex(value)


def count(value: Any, what: str, below: int) -> int:
    """A whole number in [0, below). Raises UnreadableError."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < below:
        raise UnreadableError(f"{what} is {str(value)[:80]!r}, not a whole number below {below}")
    return value


def coord_of(value: Any) -> Coord:
    """A worker coordinate in its one spelling. Raises UnreadableError."""
    try:
        found = Coord.parse(value) if isinstance(value, str) else None
    except ConfigError:
        found = None
    if found is None or str(found) != value or found.party >= PARTIES:
        raise UnreadableError(f"not a worker coordinate: {str(value)[:80]!r}", "written like p0r1s0t0")
    return found


def _by_peer(data: Any, peers: Sequence[int], what: str) -> dict[int, bytes]:
    found = exact(data, [str(p) for p in peers], what)
    return {p: digest(found[str(p)], what) for p in peers}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
