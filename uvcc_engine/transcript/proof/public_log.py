"""Entries of a public transparency log with Rekor's interface, checked offline with the log's own public key.

Before a phase's first step the hash of its policy is entered, after it was verified the run's root; both are signed by
the collector, so that whoever knows his key finds every run that he ever began. Beside each file lies what the log
answered. It holds if the log signed when it took the entry up, if the entry leads to the head that the log signed, and
if the head before is a beginning of the head afterwards: a log that shows two histories is found out.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from uvcc_engine.contract.errors import UnreadableError, VerificationError
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.transcript.formats import reading
from uvcc_engine.transcript.leaves import merkle
from uvcc_engine.transcript.proof import manifest
from uvcc_engine.transcript.proof.bundle import NAME, POLICY_FILE
from uvcc_engine.transcript.proof.package import PackageTarget
from uvcc_engine.transcript.proof.verification_certificate import Certificate
from uvcc_engine.transcript.signing import sshsig

SUFFIX: Final = ".rekor.json"
POLICY_ENTRY: Final = POLICY_FILE + SUFFIX
RUN_ENTRY: Final = NAME + SUFFIX
KIND, VERSION, NAMESPACE = "rekord", "0.0.1", "file"  # the namespace that Rekor holds OpenSSH signatures against
LARGEST: Final = 256 * reading.KIB
MOST_HASHES: Final = 128
_CHECK: Final = "public log"
_HEX: Final = re.compile("[0-9a-f]{64}")
_SIGNED: Final = ("body", "integratedTime", "logID", "logIndex")
_PROOF: Final = ("checkpoint", "hashes", "logIndex", "rootHash", "treeSize")
_MOST: Final = 2**37  # entries; and seconds, which ends in the year 6325


def policy_text(policy_hash: str) -> bytes:
    """What is entered before the first step."""
    return f"UVCC_LOG_POLICY_V1 {policy_hash}\n".encode()


def run_text(policy_hash: str, run_root: str) -> bytes:
    """What is entered once the phase is verified."""
    return f"UVCC_LOG_RUN_V1 {policy_hash} {run_root}\n".encode()


@dataclass(frozen=True, slots=True)
class LogKey:
    """The public key of a log: ECDSA over P-256, or Ed25519."""

    public: ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey
    id: str

    @classmethod
    def from_pem(cls, data: bytes, what: str) -> LogKey:
        """Raises UnreadableError."""
        try:
            key = serialization.load_pem_public_key(data)
        except (ValueError, TypeError, UnsupportedAlgorithm) as e:
            raise UnreadableError(f"{reading.shown(what)} is no public key in PEM: {reading.reason(e)}") from e
        if not isinstance(key, ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey):
            raise UnreadableError(f"{reading.shown(what)} is neither an ECDSA nor an Ed25519 key")
        der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
        return cls(key, hashlib.sha256(der).hexdigest())

    def holds(self, signature: bytes, data: bytes) -> bool:
        """Whether the log signed these bytes."""
        try:
            if isinstance(self.public, ec.EllipticCurvePublicKey):
                self.public.verify(signature, data, ec.ECDSA(hashes.SHA256()))
            else:
                self.public.verify(signature, data)
        except (InvalidSignature, ValueError):
            return False
        return True


@dataclass(frozen=True, slots=True)
class TreeHead:
    """A head of the log's tree, as a checkpoint names it."""

    origin: str
    size: int
    root: bytes


@dataclass(frozen=True, slots=True)
class Entered:
    """An entry that holds: when the log took it up (seconds since 1970), where, under which head, and who signed it."""

    at: int
    index: int
    head: TreeHead
    signer: str

    @property
    def when(self) -> str:
        return f"{datetime.fromtimestamp(self.at, UTC):%Y-%m-%dT%H:%M:%SZ} (entry {self.index})"


# ---- reading -------------------------------------------------------------------------------------------------------


def entry_of(found: Any, what: str) -> dict[str, Any]:
    """The fields of a log's answer that count, each of its type. Raises UnreadableError."""
    entry = _object(found, what)
    checks = _object(entry.get("verification"), what)
    proof = _object(checks.get("inclusionProof"), what)
    counted = [entry.get("integratedTime"), entry.get("logIndex"), proof.get("logIndex"), proof.get("treeSize")]
    texts = [entry.get("body"), entry.get("logID"), checks.get("signedEntryTimestamp")]
    texts += [proof.get("checkpoint"), proof.get("rootHash")]
    if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < _MOST for n in counted):
        raise UnreadableError(f"{reading.shown(what)} is no entry of a log: a number is missing")
    if not all(isinstance(text, str) for text in texts):
        raise UnreadableError(f"{reading.shown(what)} is no entry of a log: a text is missing")
    siblings(proof.get("hashes"), what)
    kept = {
        "inclusionProof": {name: proof[name] for name in _PROOF},
        "signedEntryTimestamp": checks["signedEntryTimestamp"],
    }
    return {name: entry[name] for name in _SIGNED} | {"verification": kept}


def siblings(found: Any, what: str) -> list[bytes]:
    """The hashes of a proof. Raises UnreadableError."""
    if not isinstance(found, list) or len(found) > MOST_HASHES:
        raise UnreadableError(f"{reading.shown(what)} holds no list of hashes")
    return [_hash(each, what) for each in found]


def _hash(found: Any, what: str) -> bytes:
    if not isinstance(found, str) or not _HEX.fullmatch(found):
        raise UnreadableError(f"{reading.shown(what)} holds {reading.shown(found, 80)} in place of a hash")
    return bytes.fromhex(found)


def _object(found: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(found, dict):
        raise UnreadableError(f"{reading.shown(what)} is no entry of a log: an object is missing")
    return found


def _decoded(text: Any, what: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError) as e:
        raise UnreadableError(f"{reading.shown(what)} is no base64") from e


def read_head(checkpoint: str, key: LogKey, what: str) -> TreeHead:
    """The head of a signed checkpoint: origin, size and root in lines, then, behind an empty one, signatures.

    Raises UnreadableError; VerificationError if the log's key did not sign it.
    """
    text, gap, signatures = checkpoint.rpartition("\n\n")
    lines = text.split("\n")
    if not gap or len(lines) < 3 or not re.fullmatch("0|[1-9][0-9]{0,15}", lines[1]):
        raise UnreadableError(f"{reading.shown(what)} holds no checkpoint")
    root = _decoded(lines[2], f"the root in {what}")
    if len(root) != 32:
        raise UnreadableError(f"{reading.shown(what)} holds no root of 32 bytes")
    mark = bytes.fromhex(key.id[:8])
    for line in signatures.split("\n"):
        words = line.split(" ")
        if len(words) == 3 and words[0] == "\u2014":
            signature = _decoded(words[2], f"a signature in {what}")
            if signature[:4] == mark and key.holds(signature[4:], f"{text}\n".encode()):
                return TreeHead(lines[0], int(lines[1]), root)
    raise VerificationError(_CHECK, f"the checkpoint in {reading.shown(what)} is not signed by the log's key")


# ---- checking ------------------------------------------------------------------------------------------------------


def check_entry(entry: Mapping[str, Any], text: bytes, key: LogKey, what: str) -> Entered:
    """Hold an entry (as of :func:`entry_of`) against what was entered and the log's key.

    Raises VerificationError naming what does not hold; UnreadableError.
    """
    if entry["logID"] != key.id:
        raise VerificationError(_CHECK, f"{reading.shown(what)} is of another log than the one whose key is expected")
    stamp = entry["verification"]["signedEntryTimestamp"]
    if not key.holds(_decoded(stamp, f"the time in {what}"), canonical({name: entry[name] for name in _SIGNED})):
        raise VerificationError(_CHECK, f"the log did not sign when it took up {reading.shown(what)}")
    body = _decoded(entry["body"], f"the body of {what}")
    signer = _signer(body, text, what)
    proof = entry["verification"]["inclusionProof"]
    head = read_head(proof["checkpoint"], key, what)
    leaf = hashlib.sha256(b"\0" + body).digest()
    root = merkle.root_from_inclusion(leaf, proof["logIndex"], head.size, siblings(proof["hashes"], what))
    if root != head.root or (proof["rootHash"], proof["treeSize"]) != (head.root.hex(), head.size):
        raise VerificationError(_CHECK, f"{reading.shown(what)} is not in the tree that the log signed: it was dropped")
    return Entered(entry["integratedTime"], entry["logIndex"], head, signer)


def _signer(body: bytes, text: bytes, what: str) -> str:
    """Whose key signed the entry, which must be about ``text``."""
    found = _object(reading.parse_json(body, f"the body of {what}"), what)
    spec = _object(found.get("spec"), what)
    data, signature = _object(spec.get("data"), what), _object(spec.get("signature"), what)
    wanted = {"algorithm": "sha256", "value": hashlib.sha256(text).hexdigest()}
    if (found.get("kind"), found.get("apiVersion")) != (KIND, VERSION) or data.get("hash") != wanted:
        raise VerificationError(_CHECK, f"{reading.shown(what)} is an entry of something else")
    public = _decoded(_object(signature.get("publicKey"), what).get("content"), f"the key in {what}")
    line = " ".join(public.decode(errors="replace").split()[:2])
    armored = _decoded(signature.get("content"), f"the signature in {what}").decode(errors="replace")
    if not sshsig.holds(line, NAMESPACE, text, sshsig.respelled(armored)):
        raise VerificationError(_CHECK, f"the signature in {reading.shown(what)} is not one of its key")
    return line


def check_growth(before: TreeHead, after: TreeHead, proof: list[bytes], what: str) -> None:
    """See that a head is a beginning of another one of the same log. Raises VerificationError."""
    if before.origin != after.origin:
        raise VerificationError(
            _CHECK, f"{reading.shown(what)} is in the tree {after.origin!r}, the policy in {before.origin!r}"
        )
    if not merkle.is_consistent(before.size, after.size, before.root, after.root, proof):
        raise VerificationError(
            _CHECK,
            f"the log shows two histories: its {before.size} entries before the run are no beginning of the "
            f"{after.size} in {reading.shown(what)}",
        )


def spelled(entry: Mapping[str, Any], grown: list[str] | None = None) -> bytes:
    """The file beside what was entered. ``grown``: the proof that the policy's head is a beginning of this entry's."""
    return canonical({"entry": entry} | ({} if grown is None else {"consistency": grown})) + b"\n"


def read_entry(path: Path) -> tuple[dict[str, Any], list[bytes] | None]:
    """An entry's file, and the proof of growth in it. Raises UnreadableError."""
    what = path.name
    found = _object(reading.parse_json(reading.read_file(path, LARGEST), reading.shown(path)), what)
    if not set(found) <= {"entry", "consistency"}:
        raise UnreadableError(f"{reading.shown(path)} holds more than an entry")
    return entry_of(found.get("entry"), what), siblings(found["consistency"], what) if "consistency" in found else None


def check_phase(folder: Path, policy_hash: str, run_root: str, key: LogKey) -> tuple[Entered, Entered]:
    """Both entries of a phase. Raises VerificationError naming what does not hold, or which of them lacks."""
    for name in (POLICY_ENTRY, RUN_ENTRY):
        if not (folder / name).exists():
            raise VerificationError(_CHECK, f"{reading.shown(folder.name)} has no {name}: it was never entered")
    first, _ = read_entry(folder / POLICY_ENTRY)
    last, grown = read_entry(folder / RUN_ENTRY)
    policy = check_entry(first, policy_text(policy_hash), key, POLICY_ENTRY)
    run = check_entry(last, run_text(policy_hash, run_root), key, RUN_ENTRY)
    check_growth(policy.head, run.head, grown or [], RUN_ENTRY)
    if run.at < policy.at or run.index <= policy.index:
        raise VerificationError(_CHECK, "the run was entered before its policy")
    if run.signer != policy.signer:
        raise VerificationError(_CHECK, f"{policy.signer} entered the policy, {run.signer} the run")
    return policy, run


def check(target: PackageTarget, certificates: Mapping[str, Certificate], key: LogKey) -> list[str]:
    """Both entries of every phase of a verified package, signed by its collector; a line for each phase.

    Raises VerificationError.
    """
    listed = target.root is not None and manifest.is_there(target.root)
    collector = manifest.read(target.root, None).manifest.collector if listed and target.root else ""
    lines = []
    for name, file in target.phases.items():
        policy, run = check_phase(file.parent, certificates[name].policy_hash, certificates[name].run_root, key)
        if collector and policy.signer != collector:
            raise VerificationError(_CHECK, f"{policy.signer} entered the phase {name}, {collector} collected it")
        about = f"phase {name}: " if name else ""
        lines.append(f"logged       {about}policy {policy.when}, run root {run.when}, by {policy.signer}")
    return lines
