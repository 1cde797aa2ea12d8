"""Signatures in the OpenSSH format (PROTOCOL.sshsig), Ed25519 only, in their one canonical spelling.

:func:`holds` also takes those of an Ed25519 key in a FIDO token (``sk-ssh-ed25519@openssh.com``, PROTOCOL.u2f), which
people sign with; pods, parties and collectors have keys of the plain type, which :func:`public_raw` reads.

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
from functools import lru_cache
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
_TOKEN_TYPE: Final = b"sk-ssh-ed25519@openssh.com"
_SAID: Final = 5  # bytes of a token's flags and counter
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


def person_material(line: str) -> bytes:
    """What identifies a person's key: the 32 bytes of a plain one, the whole wire form of one in a FIDO token.

    Raises UnreadableError on any other text, comments included.
    """
    if not line.startswith(f"{_TOKEN_TYPE.decode()} "):
        return public_raw(line)
    public, application = _token_parts(line)
    return _token_wire(public, application)


def _token_wire(public: bytes, application: bytes) -> bytes:
    return _string(_TOKEN_TYPE) + _string(public) + _string(application)


def _token_parts(line: str) -> tuple[bytes, bytes]:
    """The 32 public bytes and the application of a FIDO token's key line. Raises UnreadableError."""
    try:
        wire = base64.b64decode(line.partition(" ")[2], validate=True)
    except ValueError:
        wire = b""
    at = 4 + len(_TOKEN_TYPE) + 4
    public, application = wire[at : at + 32], wire[at + 32 + 4 :]
    spelled = f"{_TOKEN_TYPE.decode()} {base64.b64encode(wire).decode()}"
    if len(public) != 32 or not application or _token_wire(public, application) != wire or spelled != line:
        raise UnreadableError(
            f"not an OpenSSH Ed25519 public key: {line[:60]!r}", "expected: sk-ssh-ed25519@openssh.com"
        )
    return public, application


def _prefix(public: bytes, namespace: str) -> bytes:
    """Everything of the signature blob before the 64 raw signature bytes."""
    return _before(_string(_KEY_TYPE) + _string(public), _KEY_TYPE, namespace)


def _before(key: bytes, kind: bytes, namespace: str, after: int = 0) -> bytes:
    """Everything before the raw signature bytes, after which ``after`` more follow; ``key``: the key's wire form."""
    inner = _string(kind) + struct.pack(">I", 64)
    head = b"SSHSIG" + struct.pack(">I", 1) + _string(key) + _string(namespace.encode()) + _string(b"") + _string(_HASH)
    return head + struct.pack(">I", len(inner) + 64 + after) + inner


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
    """The plain public key line that a canonical signature names. Raises UnreadableError if it is none."""
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
    """True if ``armored`` is the canonical text of a valid signature by the key ``line`` over ``payload``.

    Of a token's signature, whether it wanted a touch is the token's and its owner's matter (``no-touch-required``).
    """
    if not armored.startswith(_HEAD) or not armored.endswith(_TAIL):
        return False
    if line.startswith(_TOKEN_TYPE.decode()):
        return _held_by_token(line, namespace, payload, armored)
    try:
        key, prefix = _signer_of(line, namespace)
        blob = base64.b64decode(armored[len(_HEAD) : -len(_TAIL)].replace("\n", ""), validate=True)
    except (binascii.Error, UnicodeEncodeError, ValueError, UnreadableError):
        return False
    if blob[:-64] != prefix or armor_text(blob) != armored:
        return False
    try:
        key.verify(blob[-64:], _signed(namespace, payload))
    except (InvalidSignature, ValueError):
        return False
    return True


@lru_cache(maxsize=64)
def _signer_of(line: str, namespace: str) -> tuple[Ed25519PublicKey, bytes]:
    """The key of a line, and what its signatures under a namespace begin with: a worker asks for those of two peers in
    every step. Raises UnreadableError, ValueError."""
    public = public_raw(line)
    return Ed25519PublicKey.from_public_bytes(public), _prefix(public, namespace)


def _held_by_token(line: str, namespace: str, payload: bytes, armored: str) -> bool:
    """The same for a FIDO token's key: its flags and counter follow the raw signature, and are signed with the rest."""
    try:
        public, application = _token_parts(line)
        blob = base64.b64decode(armored[len(_HEAD) : -len(_TAIL)].replace("\n", ""), validate=True)
    except (binascii.Error, UnicodeEncodeError, ValueError, UnreadableError):
        return False
    head, raw, said = blob[: -64 - _SAID], blob[-64 - _SAID : -_SAID], blob[-_SAID:]
    key = _token_wire(public, application)
    if head != _before(key, _TOKEN_TYPE, namespace, _SAID) or armor_text(blob) != armored:
        return False
    told = hashlib.sha256(application).digest() + said + hashlib.sha256(_signed(namespace, payload)).digest()
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(raw, told)
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
