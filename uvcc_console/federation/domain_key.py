"""A domain's long-lived identity: one Ed25519 key in this installation's configuration folder, or in a FIDO token.

``uvcc domain init`` makes it (0600), or notes a key that lies elsewhere, in an agent or a token. Where the private
half is elsewhere or has a passphrase, ``ssh-keygen -Y sign`` signs and asks for what it needs: no passphrase ever
passes through this program. Only the public half leaves this machine.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives import serialization as ser
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from uvcc_console.core import paths
from uvcc_engine.contract.errors import ConfigError, UnreadableError, UvccError
from uvcc_engine.transcript.formats import reading
from uvcc_engine.transcript.signing import sshsig

FOLDER: Final = "domain"
KEY_FILE: Final = "ed25519"
PUBLIC_FILE: Final = "ed25519.pub"
ELSEWHERE: Final = "elsewhere"
"""Names a key that ssh-keygen signs with; there is no private half in the folder then."""
SIGN_S: Final = 120.0
_GROUPS: Final = 6


@dataclass(frozen=True, slots=True)
class DomainKey:
    """A domain's identity as it lies in ``folder``. ``public`` is its OpenSSH line."""

    folder: Path
    public: str

    def sign(self, namespace: str, payload: bytes) -> str:
        """An OpenSSH signature. Raises UnreadableError for a damaged key, UvccError where ssh-keygen does not sign."""
        other = self.folder / ELSEWHERE
        private = None if other.exists() else _load(self.folder / KEY_FILE)
        if private is None:
            at = Path(reading.read_text(other).strip()) if other.exists() else self.folder / KEY_FILE
            signed = _sign_by_ssh_keygen(at, namespace, payload)
        else:
            signed = sshsig.sign(private, private.public_key().public_bytes_raw(), namespace, payload)
        if not sshsig.holds(self.public, namespace, payload, signed):
            raise UnreadableError(f"the key in {self.folder} is not the one that it publishes", "uvcc domain show")
        return signed


def folder() -> Path:
    """Where this installation's domain lies; not necessarily there."""
    return paths.config_dir() / FOLDER


def load() -> DomainKey:
    """This installation's domain. Raises ConfigError if there is none yet."""
    where = folder()
    if not (where / PUBLIC_FILE).exists():
        raise ConfigError("this installation is no domain yet", "uvcc domain init makes its key")
    return DomainKey(where, read_public(where / PUBLIC_FILE))


def read_public(path: Path) -> str:
    """The key line of a ``.pub`` file, without its comment. Raises UnreadableError."""
    line = " ".join(reading.read_text(path, 64 * reading.KIB, named=True).split()[:2])
    sshsig.person_material(line)
    return line


def create(key: Path | None = None, *, passphrase: bool = False, at: Path | None = None) -> DomainKey:
    """Make a domain's key, or take up ``key``: its private file, or its public one while an agent holds the other half.

    ``passphrase``: have ssh-keygen make it and ask for one. ``at``: another folder than this installation's.

    Raises ConfigError if there is one already: a domain that lost its name has to be told to everybody.
    """
    where = paths.ensure(at or folder())
    if (where / PUBLIC_FILE).exists():
        raise ConfigError(
            f"there is a domain's key in {where}", "uvcc domain show prints it; move it away to begin anew"
        )
    if key is not None:
        public = read_public(key if key.suffix == ".pub" else key.with_name(f"{key.name}.pub"))
        _write(where / ELSEWHERE, f"{key.expanduser().resolve()}\n".encode())
    elif passphrase:
        _make_by_ssh_keygen(where / KEY_FILE)
        public = read_public(where / PUBLIC_FILE)
        return DomainKey(where, public)
    else:
        made = Ed25519PrivateKey.generate()
        _write(where / KEY_FILE, made.private_bytes(ser.Encoding.PEM, ser.PrivateFormat.OpenSSH, ser.NoEncryption()))
        public = sshsig.public_line(made.public_key().public_bytes_raw())
    _write(where / PUBLIC_FILE, f"{public} uvcc-domain\n".encode())  # last: with it the domain is there
    return DomainKey(where, public)


def fingerprint(public: str) -> str:
    """What people compare by voice: thirty digits in groups of five, of the key's SHA-256."""
    number = int.from_bytes(hashlib.sha256(b"UVCC_DOMAIN_V1" + sshsig.person_material(public)).digest(), "big")
    digits = f"{number % 10 ** (5 * _GROUPS):0{5 * _GROUPS}d}"
    return " ".join(digits[i : i + 5] for i in range(0, len(digits), 5))


def _load(path: Path) -> Ed25519PrivateKey | None:
    """The private half; None where it has a passphrase."""
    data = reading.read_file(path, 64 * reading.KIB)
    if path.stat().st_mode & 0o077:
        raise UnreadableError(f"{path} is readable by others", f"chmod 600 {path}")
    try:
        key = ser.load_ssh_private_key(data, None)
    except TypeError:
        return None
    except ValueError as e:
        raise UnreadableError(f"cannot use the domain's key {path}: {e}", "take it from your backup") from e
    if not isinstance(key, Ed25519PrivateKey):
        raise UnreadableError(f"{path} is no Ed25519 key", "uvcc domain init makes one")
    return key


def _make_by_ssh_keygen(path: Path) -> None:
    try:
        done = subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-C", "uvcc-domain", "-f", str(path)])
    except OSError as e:
        raise UvccError(f"ssh-keygen does not run: {e}", "install OpenSSH") from e
    if done.returncode:
        raise UvccError("ssh-keygen made no key", "uvcc domain init --passphrase asks again")


def _sign_by_ssh_keygen(key: Path, namespace: str, payload: bytes) -> str:
    command = ["ssh-keygen", "-Y", "sign", "-q", "-f", str(key), "-n", namespace]
    try:
        done = subprocess.run(command, input=payload, capture_output=True, timeout=SIGN_S)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise UvccError(f"ssh-keygen does not sign: {e}", "is OpenSSH installed, and the key in the agent?") from e
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise UvccError(f"ssh-keygen does not sign with {key}: {said[-200:]}", "ssh-add -l lists the agent's keys")
    return done.stdout.decode(errors="replace")


def _write(path: Path, data: bytes) -> None:
    """A new private file. Raises UvccError."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
    except OSError as e:
        raise UvccError(f"cannot write {path}: {e.strerror}", "is it there already, or the disk full?") from e
