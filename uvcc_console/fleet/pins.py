"""Which host key is right: what is seen at the first contact with a machine is written down and binds every later one.

The file ``known_hosts`` of the data folder has OpenSSH's format, so ``ssh-keygen -R`` and ``ssh`` can use it. It tells
of machines that stay, those of an inventory; a rented pod's pin is in its run's journal, since it goes with the pod.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

import asyncssh
from asyncssh.public_key import get_default_public_key_algs

from uvcc_console.core import paths
from uvcc_engine.contract.errors import ConfigError, UvccError

FILE = "known_hosts"


def split_address(address: str) -> tuple[str, str, int]:
    """``user@host:port`` -> (user, host, port); the user may be missing, the port is then 22 if it is."""
    user, _, rest = address.rpartition("@")
    host, colon, port = rest.rpartition(":")
    if not colon or not port.isdigit():
        host, port = rest, "22"
    return user, host.strip("[]"), int(port)


def plain(key: str | asyncssh.SSHKey) -> str:
    """``ssh-ed25519 AAAA...`` without a comment."""
    text = key if isinstance(key, str) else key.export_public_key("openssh").decode()
    return " ".join(text.split()[:2])


def fingerprint(key: str) -> str:
    """``SHA256:...`` as ssh-keygen prints it; the key itself where it is none."""
    try:
        return asyncssh.import_public_key(key).get_fingerprint()
    except (asyncssh.KeyImportError, ValueError):
        return key or "none"


def checked(key: str, where: str) -> str:
    """A key that somebody wrote down. Raises ConfigError where it is no public key."""
    try:
        asyncssh.import_public_key(key)
    except (asyncssh.KeyImportError, ValueError):
        hint = "write it as in ssh_host_ed25519_key.pub: ssh-ed25519 AAAA..."
        raise ConfigError(f"{where}: host_key is no public key: {key[:60]!r}", hint) from None
    return plain(key)


def preference(key: str) -> list[str]:
    """Algorithms to ask a server for: those of the pinned key first, since most servers have keys of several kinds."""
    every = [a.decode() for a in get_default_public_key_algs()]
    try:
        first = [a.decode() for a in asyncssh.import_public_key(key).sig_algorithms] if key else ["ssh-ed25519"]
    except (asyncssh.KeyImportError, ValueError):
        first = []
    first = [a for a in first if a in every]
    return first + [a for a in every if a not in first]


@dataclass(frozen=True, slots=True)
class HostKeyPins:
    """The machines that this data folder's runs have met."""

    path: Path

    @classmethod
    def here(cls) -> HostKeyPins:
        return cls(paths.data_dir() / FILE)

    def of(self, address: str) -> str:
        """The key of the machine at this address; empty where it was never met."""
        try:
            return _find(self.path.read_text(errors="replace"), name_of(address))
        except OSError:
            return ""

    def pin(self, address: str, key: str) -> str:
        """What is pinned for this address: ``key`` from now on if nothing was. Raises UvccError if the disk refuses."""
        return self._write(address, key, replace=False)

    def repin(self, address: str, key: str) -> None:
        """The machine's new key, which the operator has vouched for."""
        self._write(address, key, replace=True)

    def _write(self, address: str, key: str, *, replace: bool) -> str:
        name = name_of(address)
        try:
            paths.ensure(self.path.parent)
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "r+", errors="replace") as f:
                fcntl.flock(f, fcntl.LOCK_EX)  # two processes that meet it at once agree on one key
                text = f.read()
                known = _find(text, name)
                if known and not replace:
                    return known
                if known:
                    text = "".join(line for line in text.splitlines(keepends=True) if line.split()[:1] != [name])
                    f.truncate(0)
                    f.write(text)
                f.write(f"{name} {key}\n")
                f.flush()
                os.fsync(f.fileno())
        except OSError as e:
            raise UvccError(f"cannot write {self.path}: {e.strerror}", "free disk space") from e
        return key

    def forget_command(self, address: str) -> str:
        """What the operator types once it is clear why the machine has a new key."""
        return f"ssh-keygen -R '{name_of(address)}' -f {self.path}"


def name_of(address: str) -> str:
    """How OpenSSH writes the machine of ``user@host:port``."""
    _, host, port = split_address(address)
    return host if port == 22 else f"[{host}]:{port}"


def _find(text: str, name: str) -> str:
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 3 and words[0] == name:
            return f"{words[1]} {words[2]}"
    return ""
