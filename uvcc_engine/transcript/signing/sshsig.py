"""Signatures in the OpenSSH format (PROTOCOL.sshsig), Ed25519 only, in their one canonical spelling.

``ssh-keygen -Y verify`` accepts what :func:`sign` writes. :func:`holds` is stricter than ssh-keygen and asyncssh: it
accepts exactly one text per (key, namespace, payload, raw signature), so no byte of a stored signature can be changed
unnoticed (both libraries skip the envelope's reserved field and are lenient about the armor). Needs no asyncssh, which
would add 0.15 s and 18 MiB to every worker.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from uvcc_engine.contract.errors import UnreadableError

POLICY_NAMESPACE: Final = "uvcc-policy"
ROOT_NAMESPACE: Final = "uvcc-root"
RESULT_NAMESPACE: Final = "uvcc-result"
MANIFEST_NAMESPACE: Final = "uvcc-manifest"
NAMESPACES: Final = (POLICY_NAMESPACE, ROOT_NAMESPACE, RESULT_NAMESPACE)
"""What a party signs."""
COLLECTOR: Final = "collector"
"""Principal of the key that signs the manifest of everything handed over."""

_KEY_TYPE: Final = b"ssh-ed25519"
_HASH: Final = b"sha512"
_HEAD: Final = "-----BEGIN SSH SIGNATURE-----\n"
_TAIL: Final = "-----END SSH SIGNATURE-----\n"
_WIDTH: Final = 70


def _string(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def public_line(raw: bytes) -> str:
    """The OpenSSH line ``ssh-ed25519 AAAA...`` of a 32-byte public key."""
    return f"ssh-ed25519 {base64.b64encode(_string(_KEY_TYPE) + _string(raw)).decode()}"


def public_raw(line: str) -> bytes:
    """The 32 bytes of an OpenSSH Ed25519 line. Raises UnreadableError on any other text, comments included."""
    kind, _, encoded = line.partition(" ")
    try:
        raw = base64.b64decode(encoded, validate=True)[-32:] if kind == "ssh-ed25519" else b""
    except ValueError:  # text beyond ASCII, or not base64
        raw = b""
    if len(raw) != 32 or public_line(raw) != line:
        raise UnreadableError(f"not an OpenSSH Ed25519 public key: {line[:60]!r}", "expected: ssh-ed25519 AAAA...")
    return raw


def _prefix(public: bytes, namespace: str) -> bytes:
    """Everything of the signature blob before the 64 raw signature bytes."""
    key = _string(_KEY_TYPE) + _string(public)
    inner = _string(_KEY_TYPE) + struct.pack(">I", 64)
    head = b"SSHSIG" + struct.pack(">I", 1) + _string(key) + _string(namespace.encode()) + _string(b"") + _string(_HASH)
    return head + struct.pack(">I", len(inner) + 64) + inner


def _signed(namespace: str, payload: bytes) -> bytes:
    digest = hashlib.sha512(payload).digest()
    return b"SSHSIG" + _string(namespace.encode()) + _string(b"") + _string(_HASH) + _string(digest)


def armor_text(blob: bytes) -> str:
    text = base64.b64encode(blob).decode()
    body = "\n".join(text[i : i + _WIDTH] for i in range(0, len(text), _WIDTH))
    return f"{_HEAD}{body}\n{_TAIL}"


def sign(key: Ed25519PrivateKey, public: bytes, namespace: str, payload: bytes) -> str:
    """Sign ``payload`` under ``namespace``; returns the armored text that ``ssh-keygen -Y verify`` reads."""
    return armor_text(_prefix(public, namespace) + key.sign(_signed(namespace, payload)))


def respelled(armored: str) -> str:
    """The one spelling of a signature whose base64 stands in lines of another length; other text as it is."""
    lines = armored.strip().splitlines()
    try:
        return armor_text(base64.b64decode("".join(lines[1:-1]), validate=True))
    except (binascii.Error, ValueError):
        return armored


def signer(armored: str) -> str:
    """The public key line that a canonical signature names. Raises UnreadableError if it is none."""
    try:
        blob = base64.b64decode(armored[len(_HEAD) : -len(_TAIL)].replace("\n", ""), validate=True)
    except (binascii.Error, ValueError) as e:
        raise UnreadableError("not an OpenSSH signature") from e
    begin, named = len(b"SSHSIG") + 4 + 4, _string(_KEY_TYPE) + struct.pack(">I", 32)  # after version and key's length
    at = begin + len(named)
    whole = len(blob) >= at + 32 + 64 and armored.startswith(_HEAD)
    if not whole or not blob.startswith(b"SSHSIG") or blob[begin:at] != named:
        raise UnreadableError("not an OpenSSH signature")
    return public_line(blob[at : at + 32])


def holds(line: str, namespace: str, payload: bytes, armored: str) -> bool:
    """True if ``armored`` is the canonical text of a valid signature by the key ``line`` over ``payload``."""
    if not armored.startswith(_HEAD) or not armored.endswith(_TAIL):
        return False
    try:
        public = public_raw(line)
        blob = base64.b64decode(armored[len(_HEAD) : -len(_TAIL)].replace("\n", ""), validate=True)
    except (binascii.Error, UnicodeEncodeError, ValueError, UnreadableError):
        return False
    if blob[:-64] != _prefix(public, namespace) or armor_text(blob) != armored:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(blob[-64:], _signed(namespace, payload))
    except (InvalidSignature, ValueError):
        return False
    return True


def write_allowed_signers(path: Path, signers: Mapping[str, str], collector: str = "") -> None:
    """Write principals (``P0``...) with their public key lines, limited to what a party signs.

    ``collector``: the key that signs the manifest of what is handed over, and nothing else.
    """
    allowed = ",".join(NAMESPACES)
    lines = [f'{who} namespaces="{allowed}" {line}\n' for who, line in sorted(signers.items())]
    if collector:
        lines.append(f'{COLLECTOR} namespaces="{MANIFEST_NAMESPACE}" {collector}\n')
    path.write_text("".join(lines))
