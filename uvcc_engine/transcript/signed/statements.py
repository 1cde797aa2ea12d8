"""What a worker signs: one statement per epoch root and one for the result, each a line of canonical JSON.

``roots.jsonl`` holds ``{"signature", "statement"}`` lines; the signed text is what stands between ``"statement":`` and
the line's last brace (``sed -e 's/^.*"statement"://' -e 's/}$//' | tr -d '\\n'``). So ``ssh-keygen -Y verify`` alone
can check it, and its ``sha256sum`` is what the heads of the epochs after it bind (``history``).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.job.proof_mode import OFF, Proving, is_audited
from uvcc_engine.contract.job.topology import PARTIES, Coord
from uvcc_engine.contract.parsing import strict
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.contract.text import clean
from uvcc_engine.transcript.formats.reading import OLD
from uvcc_engine.transcript.leaves.replay import peers_of
from uvcc_engine.transcript.leaves.roots import EpochRoot
from uvcc_engine.transcript.signing.identity import Identity, PublicIdentity, verify_signature
from uvcc_engine.transcript.signing.sshsig import RESULT_NAMESPACE, ROOT_NAMESPACE

VERSION: Final = 2
_HEX = re.compile(r"[0-9a-f]{64}")
_DRAWS = re.compile(r"[0-9a-f]{48}")
_ROOT_FIELDS: Final = (
    "coord",
    "epoch",
    "head",
    "leaves",
    "opened",
    "pairs",
    "root",
    "seen",
    "sid_job",
    "values",
    "version",
)
PROVED: Final = "proved"
"""The one field that a root statement has only where the policy has products proved."""
_RESULT_FIELDS: Final = (
    "coord",
    "epochs",
    "head",
    "result_hash",
    "root",
    "seen",
    "sid_job",
    "state_digests",
    "steps",
    "values",
    "version",
)


DRAWN: Final = "drawn"
"""The one field that a verdict has only where the policy has steps audited, and something was to be proved."""
_VERDICT_FIELDS: Final = ("claims", "coins", "digest")


@dataclass(frozen=True, slots=True)
class Verdict:
    """A worker's word that the proof of an epoch held, or, where it revealed nothing, what this worker judges of it, so
    that the three together say that it did: of how many claims, which (as far as they are public), under
    which coins of the verifiers. ``drawn``: where steps are audited, what each party's coins drew."""

    claims: int
    digest: bytes
    coins: bytes
    drawn: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        drawn = {DRAWN: "".join(f"{number:016x}" for number in self.drawn)} if self.drawn else {}
        return drawn | {"claims": self.claims, "coins": self.coins.hex(), "digest": self.digest.hex()}

    def audited(self, proving: Proving) -> tuple[int, ...]:
        """The parties whose proofs of this epoch were made: where not all are, those that were drawn."""
        if not proving.audit_one_in:
            return tuple(range(PARTIES)) if proving.mode != OFF else ()
        return tuple(q for q, number in enumerate(self.drawn) if is_audited(number, proving.audit_one_in))

    @classmethod
    def from_json(cls, data: Any) -> Verdict:
        """Read strictly. Raises UnreadableError."""
        draws = isinstance(data, dict) and DRAWN in data
        found = exact(data, (*_VERDICT_FIELDS, DRAWN) if draws else _VERDICT_FIELDS, "verdict")
        return cls(
            count(found["claims"], "claims", 2**32),
            digest(found["digest"], "digest of claims"),
            digest(found["coins"], "digest of coins"),
            _draws(found[DRAWN]) if draws else (),
        )


@dataclass(frozen=True, slots=True)
class RootStatement:
    """A worker's word on one epoch.

    ``seen`` countersigns the peers' roots of the epoch before (empty in the first), ``head`` all that the three signed
    about all epochs before. ``values``: what the step revealed to everybody, by name. ``proved``: where the policy has
    products proved.
    """

    coord: Coord
    sid_job: bytes
    root: EpochRoot
    seen: Mapping[int, bytes]
    head: bytes
    values: Mapping[str, float]
    proved: Verdict | None = None

    def to_json(self) -> dict[str, Any]:
        proved = {} if self.proved is None else {PROVED: self.proved.to_json()}
        return proved | {
            "coord": str(self.coord),
            "epoch": self.root.epoch,
            "head": self.head.hex(),
            "leaves": self.root.leaves,
            "opened": self.root.opened,
            "pairs": {str(p): d.hex() for p, d in sorted(self.root.pairs.items())},
            "root": self.root.root.hex(),
            "seen": {str(p): d.hex() for p, d in sorted(self.seen.items())},
            "sid_job": self.sid_job.hex(),
            "values": dict(self.values),
            "version": VERSION,
        }

    @classmethod
    def from_json(cls, data: Any) -> RootStatement:
        """Read strictly. Raises UnreadableError."""
        proves = isinstance(data, dict) and PROVED in data
        found = _current(data, (*_ROOT_FIELDS, PROVED) if proves else _ROOT_FIELDS, "root statement")
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
            where,
            digest(found["sid_job"], "sid_job"),
            root,
            _by_peer(found["seen"], peers if epoch else (), "seen"),
            digest(found["head"], "head"),
            _numbers(found["values"], "root statement"),
            Verdict.from_json(found[PROVED]) if proves else None,
        )


@dataclass(frozen=True, slots=True)
class ResultStatement:
    """A worker's word on the outcome. ``root``: of the last of ``epochs`` epochs, which holds the RESULT leaf.

    ``seen`` countersigns the peers' roots of that epoch, ``head`` all that the three signed about all epochs.
    """

    coord: Coord
    sid_job: bytes
    epochs: int
    root: bytes
    seen: Mapping[int, bytes]
    head: bytes
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
            "head": self.head.hex(),
            "result_hash": self.result_hash.hex(),
            "root": self.root.hex(),
            "seen": {str(p): d.hex() for p, d in sorted(self.seen.items())},
            "sid_job": self.sid_job.hex(),
            "state_digests": list(self.state_digests),
            "steps": self.steps,
            "values": dict(self.values),
            "version": VERSION,
        }

    @classmethod
    def from_json(cls, data: Any) -> ResultStatement:
        """Read strictly. Raises UnreadableError, also if the result hash is not that of the rest."""
        found = _current(data, _RESULT_FIELDS, "result statement")
        digests, where = found["state_digests"], coord_of(found["coord"])
        if not isinstance(digests, list) or len(digests) != PARTIES:
            raise UnreadableError("a result statement must list three state digests")
        statement = cls(
            where,
            digest(found["sid_job"], "sid_job"),
            count(found["epochs"], "epochs", 2**32),
            digest(found["root"], "root"),
            _by_peer(found["seen"], peers_of(where.party), "seen"),
            digest(found["head"], "head"),
            count(found["steps"], "steps", 2**32),
            _numbers(found["values"], "result statement"),
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


@dataclass(frozen=True)
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

    @classmethod
    def read(cls, statement: RootStatement, signature: str, text: bytes, spelled: bytes) -> Signed:
        """A root statement of which all spellings are known, so that none is computed again: ``text`` and ``spelled``
        must be its canonical ones."""
        made = cls(statement.to_json(), signature)
        made.__dict__.update(root=statement, text=text, spelled=spelled)  # what its properties would compute
        return made

    @cached_property
    def text(self) -> bytes:
        """What is signed. Raises ConfigError for what canonical JSON cannot carry."""
        return canonical(self.statement)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of what is signed."""
        return hashlib.sha256(self.text).digest()

    @cached_property
    def line(self) -> bytes:
        return self.spelled + b"\n"

    @cached_property
    def spelled(self) -> bytes:
        """Canonical JSON of statement and signature."""
        return b'{"signature":' + canonical(self.signature) + b',"statement":' + self.text + b"}"

    @cached_property
    def root(self) -> RootStatement:
        """The root statement that it is, read once. Raises UnreadableError."""
        return RootStatement.from_json(self.statement)

    def holds(self, public: PublicIdentity, namespace: str) -> bool:
        """True if ``public`` signed exactly this statement."""
        try:
            return verify_signature(public, namespace, self.text, self.signature)
        except ConfigError:
            return False


def sign_root(identity: Identity, statement: RootStatement) -> Signed:
    """The statement as its worker signs it."""
    made = _signed(identity, ROOT_NAMESPACE, statement.to_json(), root_text(statement))
    made.__dict__["root"] = statement  # what its property would read again
    return made


def root_text(statement: RootStatement) -> bytes:
    """The canonical JSON of a root statement. Raises ConfigError as ``canonical``."""
    if statement.proved is not None:
        return canonical(statement.to_json())
    front, back = around_root(statement)
    root = statement.root
    counts = b'%d,"opened":%d,"pairs":{%s},"root":"%s"' % (
        root.leaves,
        root.opened,
        _spelled_digests(root.pairs),
        root.root.hex().encode(),
    )
    return front + counts + back


def around_root(statement: RootStatement) -> tuple[bytes, bytes]:
    """Of the canonical JSON of a statement without a proof, what stands before its root's counts, pairs and hash, and
    what stands behind them: that is spelled here at a third of what a general encoder takes."""
    front = b'{"coord":"%s","epoch":%d,"head":"%s","leaves":' % (
        str(statement.coord).encode(),
        statement.root.epoch,
        statement.head.hex().encode(),
    )
    back = b',"seen":{%s},"sid_job":"%s","values":%s,"version":%d}' % (
        _spelled_digests(statement.seen),
        statement.sid_job.hex().encode(),
        canonical(dict(statement.values)),
        VERSION,
    )
    return front, back


def _spelled_digests(by_party: Mapping[int, bytes]) -> bytes:
    return b",".join(b'"%d":"%s"' % (p, d.hex().encode()) for p, d in sorted(by_party.items()))


def sign_result(identity: Identity, statement: ResultStatement) -> Signed:
    """The statement as its worker signs it."""
    data = statement.to_json()
    return _signed(identity, RESULT_NAMESPACE, data, canonical(data))


def _signed(identity: Identity, namespace: str, data: dict[str, Any], text: bytes) -> Signed:
    made = Signed(data, identity.sign(namespace, text))
    made.__dict__["text"] = text  # what its property would compute again
    return made


# ---- strict reading ------------------------------------------------------------------------------------------------


def exact(data: Any, fields: Sequence[str], what: str) -> Mapping[str, Any]:
    """``data`` if it is an object with exactly these fields. Raises UnreadableError naming the difference."""
    return strict.exact(data, fields, f"a {what}", UnreadableError)


def digest(value: Any, what: str) -> bytes:
    """32 bytes from 64 lower-case hex digits. Raises UnreadableError."""
    if not isinstance(value, str) or not _HEX.fullmatch(value):
        raise UnreadableError(f"{what} is {str(value)[:80]!r}, not 64 lower-case hex digits")
    return bytes.fromhex(value)


def _draws(data: Any) -> tuple[int, ...]:
    """What the three parties' coins drew, 16 hexadecimal digits each."""
    if not isinstance(data, str) or not _DRAWS.fullmatch(data):
        raise UnreadableError(f"what is drawn for audits is {str(data)[:80]!r}", "it is 48 hexadecimal digits")
    return tuple(int(data[at : at + 16], 16) for at in range(0, 16 * PARTIES, 16))


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


def _current(data: Any, fields: Sequence[str], what: str) -> Mapping[str, Any]:
    """A statement of the version that this code writes."""
    if isinstance(data, dict) and data.get("version") != VERSION:
        stated = clean(str(data.get("version", 1)), 40)
        raise UnreadableError(f"a {what} of version {stated}; this release reads version {VERSION}", OLD)
    return exact(data, fields, what)


def _numbers(data: Any, what: str) -> dict[str, float]:
    if not isinstance(data, dict) or not all(_is_number(v) for v in data.values()):
        raise UnreadableError(f"the values of a {what} must be numbers")
    return data


def _is_number(value: Any) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**53
    return isinstance(value, float) and math.isfinite(value)
