"""SSH as its user has it: ``~/.ssh/config``, an agent, keys with a passphrase, certificates, jump hosts.

It is how the console gets to hosts that somebody already has, for the time until the run's own key is there. The
configuration's ``Host`` blocks give a host's address, user, port, keys and ``ProxyJump``; the agent's keys are offered
too, also those on a FIDO token, which only an agent speaks to here; a key beside which its certificate lies
(``KEY-cert.pub``) is shown with it; and a locked key that no agent holds is opened with what ``$SSH_ASKPASS`` answers.
What the configuration says of checking host keys is not asked: each host has its one pinned key.
"""

from __future__ import annotations

import base64
import getpass
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import asyncssh
from asyncssh.config import SSHClientConfig

from uvcc_engine.contract.errors import ConfigError, UnreadableError

CONFIG: Final = "~/.ssh/config"
_USUAL: Final = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
ASKPASS_S: Final = 60.0
_MAGIC: Final = b"openssh-key-v1\0"
_TOKEN: Final = "sk-"


@dataclass(frozen=True, slots=True)
class UserKeys:
    """What a user can log in with. ``named``: the files were asked for by name. ``agent``: its socket, or ""."""

    files: tuple[str, ...]
    agent: str = ""
    named: bool = False

    @property
    def words(self) -> str:
        """What was offered, for whoever has to find out why it was refused."""
        return ", ".join([*self.files, *(["the agent's keys"] if self.agent else [])]) or "no key at all"

    def options(self) -> dict[str, Any]:
        """For ``asyncssh.connect``; it may ask the user. Raises UnreadableError for a key that was named and is no use.

        Of a key beside which its certificate lies both are offered.
        """
        found: list[Any] = []
        for file in self.files:
            if (key := self._opened(file)) is not None:
                beside = Path(f"{file}-cert.pub")
                found.append((key, str(beside)) if beside.exists() else key)
        return {"client_keys": found, "agent_path": self.agent or None, "ignore_encrypted": True}

    def _of_token(self, file: str, key: asyncssh.SSHKey) -> asyncssh.SSHKey:
        """A key's file is no key where a FIDO token signs: the agent speaks to it, as OpenSSH's own does."""
        if key.get_algorithm().startswith(_TOKEN):
            raise _OnToken(file)
        return key

    def _opened(self, file: str) -> asyncssh.SSHKey | None:
        """The key in a file; None for one that the agent may hold, or that nobody named."""
        locked = False
        try:
            locked = _locked(Path(file).read_bytes())
            if not locked:
                return self._of_token(file, asyncssh.read_private_key(file))
            if program := os.environ.get("SSH_ASKPASS"):
                return self._of_token(file, _unlocked(file, program))
            why = "it has a passphrase"
        except (asyncssh.KeyEncryptionError, asyncssh.KeyImportError, OSError) as e:
            why = str(e)
        except _OnToken:
            if self.named and not self.agent:
                hint = f"ssh-add {file}: the agent asks the token, and you touch it"
                raise UnreadableError(f"the SSH key {file} is on a FIDO token", hint) from None
            return None
        if self.named and not (locked and self.agent):
            hint = f"ssh-add {file}, or set SSH_ASKPASS" if locked else "name an OpenSSH private key"
            raise UnreadableError(f"cannot use the SSH key {file}: {why}", hint)
        return None


class _OnToken(Exception):
    """A key whose signing is a token's."""


def _locked(data: bytes) -> bool:
    """Whether a private key wants a passphrase, by what its file says of itself."""
    lines = [line.strip() for line in data.splitlines()]
    if not any(b"BEGIN OPENSSH" in line for line in lines):
        return b"ENCRYPTED" in data
    try:
        body = base64.b64decode(b"".join(line for line in lines if line and not line.startswith(b"-----")))
    except ValueError:
        return False
    return body.startswith(_MAGIC) and not body[len(_MAGIC) :].startswith(b"\0\0\0\x04none")


@cache
def _unlocked(file: str, program: str) -> asyncssh.SSHKey:
    """A locked key, opened with what the user's program says: asked once, kept in memory alone."""
    return asyncssh.read_private_key(file, _askpass(file, program))


def _askpass(file: str, program: str) -> str:
    """The passphrase of a key, from the program that the user has for it. Never kept, never logged."""
    try:
        command = [program, f"Enter passphrase for key '{file}':"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASKPASS_S, check=True)
    except (OSError, subprocess.SubprocessError) as e:
        raise UnreadableError(f"{program} gives no passphrase for {file}", "ssh-add opens it once for all") from e
    return done.stdout.rstrip("\n")


@dataclass(frozen=True, slots=True)
class SshPlace:
    """Where a host is, and who may go there, as the configuration has it."""

    host: str
    user: str
    port: int
    jump: str
    keys: UserKeys


def place(
    host: str, *, user: str = "", port: int = 0, jump: str = "", key: str = "", env: Mapping[str, str] | None = None
) -> SshPlace:
    """What the configuration makes of a host's name; what is given counts before it.

    Raises ConfigError for a configuration that cannot be read, and for a host without a user.
    """
    env = os.environ if env is None else env
    path = Path(CONFIG).expanduser()
    try:
        local = getpass.getuser()
        paths = [path] if path.exists() else []
        found: Any = SSHClientConfig.load(None, paths, False, False, False, local, user or (), host, port or ())
    except (asyncssh.ConfigParseError, OSError, UnicodeDecodeError, KeyError) as e:
        raise ConfigError(f"cannot read {path}: {e}", "ssh -G HOST names the line") from e
    way = jump or str(found.get("ProxyJump") or "")
    named = [key] if key else [str(f) for f in found.get("IdentityFile") or ()]
    files = tuple(str(Path(f).expanduser()) for f in named or _USUAL)
    agent = str(found.get("IdentityAgent") or env.get("SSH_AUTH_SOCK", ""))
    return SshPlace(
        str(found.get("Hostname") or host),
        user or str(found.get("User") or local),
        port or int(found.get("Port") or 22),
        "" if way == "none" else way,
        UserKeys(files if named else tuple(f for f in files if Path(f).exists()), agent, bool(key)),
    )
