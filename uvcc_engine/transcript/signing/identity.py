"""A party's identity: an Ed25519 key that signs and an X25519 key that agrees on pair secrets.

Both are born on the party's own pod, and no code takes them from there; whoever has a shell there can. Files of an
identity folder (0700): ``ed25519`` (OpenSSH private key, 0600, usable with ssh-keygen), ``x25519`` (32 raw bytes,
0600), ``public.json``.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives import serialization as ser
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from uvcc_engine.contract.errors import ConfigError, ProtocolError, UnreadableError
from uvcc_engine.contract.parsing import strict
from uvcc_engine.contract.parsing.untrusted import json_of
from uvcc_engine.transcript.signing import sshsig

_KEYS = ("ed25519", "x25519", "seeded")

PUBLIC: Final = "public.json"  # in an identity's folder


@dataclass(frozen=True, slots=True)
class PublicIdentity:
    """What others know of a party. ``ed25519``: OpenSSH line; ``x25519``: 64 hex digits; ``seeded``: a demo key."""

    ed25519: str
    x25519: str
    seeded: bool = False

    def __post_init__(self) -> None:
        sshsig.public_raw(self.ed25519)
        if len(self.x25519) != 64 or set(self.x25519) - set("0123456789abcdef"):
            raise UnreadableError(f"not an X25519 public key: {self.x25519[:70]!r}", "expected 64 hex digits")
        if not isinstance(self.seeded, bool):
            raise UnreadableError("an identity's `seeded` must be true or false")

    def to_json(self) -> dict[str, Any]:
        return {"ed25519": self.ed25519, "x25519": self.x25519, "seeded": self.seeded}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PublicIdentity:
        """Read back strictly. Raises UnreadableError on a missing, unknown or malformed field."""
        try:
            return strict.read(cls, strict.exact(data, _KEYS, "a public identity"), "a public identity")
        except ConfigError as error:
            raise UnreadableError(error.what, error.hint) from error


def verify_signature(public: PublicIdentity | str, namespace: str, payload: bytes, armored: str) -> bool:
    """True if ``armored`` is a valid signature of this identity (or OpenSSH line) over ``payload``."""
    line = public if isinstance(public, str) else public.ed25519
    return sshsig.holds(line, namespace, payload, armored)


def _derive(secret: bytes, salt: bytes, info: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=32, salt=salt, info=info).derive(secret)


def _info(prefix: bytes, label: str) -> bytes:
    encoded = label.encode()
    return prefix + struct.pack("<H", len(encoded)) + encoded


class Identity:
    """A party's private keys. Make one with :meth:`create`, :meth:`create_seeded` or :meth:`load`."""

    __slots__ = ("_dh", "_dh_raw", "_key", "_raw", "public")

    def __init__(self, signing: bytes, agreement: bytes, *, seeded: bool = False) -> None:
        """From 32 raw private bytes each."""
        self._key = Ed25519PrivateKey.from_private_bytes(signing)
        self._dh = X25519PrivateKey.from_private_bytes(agreement)
        self._dh_raw = agreement
        self._raw = self._key.public_key().public_bytes_raw()
        self.public = PublicIdentity(
            sshsig.public_line(self._raw), self._dh.public_key().public_bytes_raw().hex(), seeded
        )

    @classmethod
    def create(cls, folder: Path) -> Identity:
        """A fresh identity in ``folder``. Raises ConfigError as :meth:`store`."""
        return cls(os.urandom(32), os.urandom(32)).store(folder)

    @classmethod
    def create_seeded(cls, folder: Path, seed: bytes) -> Identity:
        """An identity computed from ``seed``: for demonstrations only, and marked so wherever it appears."""
        made = cls(_derive(seed, b"", b"UVCC_SEEDED_ED25519"), _derive(seed, b"", b"UVCC_SEEDED_X25519"), seeded=True)
        return made.store(folder)

    @classmethod
    def load(cls, folder: Path) -> Identity:
        """Read an identity. Raises UnreadableError if it is missing, damaged or readable by others."""
        try:
            for name in ("ed25519", "x25519"):
                if (folder / name).stat().st_mode & 0o077:
                    raise UnreadableError(f"{folder / name} is readable by others", "chmod 600, or make a new identity")
            key = ser.load_ssh_private_key((folder / "ed25519").read_bytes(), None)
            agreement = (folder / "x25519").read_bytes()
            public = PublicIdentity.from_json(json_of((folder / PUBLIC).read_text()))
        except (OSError, ValueError) as e:
            raise UnreadableError(f"cannot read the identity in {folder}: {e}", "was it created there?") from e
        if not isinstance(key, Ed25519PrivateKey) or len(agreement) != 32:
            raise UnreadableError(f"the identity in {folder} has keys of another kind", "make a new identity")
        found = cls(key.private_bytes_raw(), agreement, seeded=public.seeded)
        if found.public != public:
            raise UnreadableError(
                f"{folder / 'public.json'} does not belong to the keys beside it", "make a new identity"
            )
        return found

    def store(self, folder: Path) -> Identity:
        """Write it into ``folder``. Raises ConfigError if one is already there, or the folder cannot be written."""
        pem = self._key.private_bytes(ser.Encoding.PEM, ser.PrivateFormat.OpenSSH, ser.NoEncryption())
        text = json.dumps(self.public.to_json(), indent=1) + "\n"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # public.json comes last: a folder without it is an interrupted creation, not an identity
            for name, content in (("ed25519", pem), ("x25519", self._dh_raw), (PUBLIC, text.encode())):
                with os.fdopen(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
                    out.write(content)
        except FileExistsError as e:
            if not folder.is_dir():
                raise ConfigError(f"{folder} is no folder", "name another one for the identity") from e
            raise ConfigError(f"{folder} already holds an identity", "load it, or name another folder") from e
        except OSError as e:
            hint = "name a folder that can be written, on a disk with room"
            raise ConfigError(f"cannot keep an identity in {folder}: {e.strerror}", hint) from e
        return self

    def sign(self, namespace: str, payload: bytes) -> str:
        """Armored OpenSSH signature of ``payload`` under ``namespace``."""
        return sshsig.sign(self._key, self._raw, namespace, payload)

    def pair_secret(self, peer: PublicIdentity, sid_job: bytes, label: str) -> bytes:
        """32 bytes known to this party and ``peer`` alone, equal at both, bound to the job and to ``label``.

        HKDF-SHA256 (RFC 5869) of the static X25519 agreement (RFC 7748); salt ``sid_job``; info = label and both
        public keys in sorted order. Raises ProtocolError if the peer's key is of small order.
        """
        other = bytes.fromhex(peer.x25519)
        try:
            shared = self._dh.exchange(X25519PublicKey.from_public_bytes(other))
        except ValueError as e:
            raise ProtocolError("a peer's X25519 key is not usable", "its identity must be made anew") from e
        keys = sorted((bytes.fromhex(self.public.x25519), other))
        return _derive(shared, sid_job, _info(b"UVCC_PAIR_V1", label) + keys[0] + keys[1])

    def own_secret(self, sid_job: bytes, label: str) -> bytes:
        """32 bytes known to this party alone, bound to the job and to ``label``."""
        return _derive(self._dh_raw, sid_job, _info(b"UVCC_OWN_V1", label))
