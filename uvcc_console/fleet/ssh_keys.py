"""The operator's SSH key of one run: born in the run's folder, used for its pods only."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from uvcc_engine.contract.errors import UnreadableError, UvccError

if TYPE_CHECKING:  # a third of a second: who only looks at pods does without
    import asyncssh

KEY_FILE = "ssh_ed25519"


def operator_key(run_dir: Path, given: str = "") -> asyncssh.SSHKey:
    """The private key that opens this run's pods, made at first use (0600). ``given`` names a key file to use instead.

    Raises UnreadableError when a key file cannot be read, or is locked with a passphrase.
    """
    import asyncssh

    path = Path(given).expanduser() if given else run_dir / KEY_FILE
    if not given and not path.exists():
        _create(path)
    try:
        return asyncssh.read_private_key(str(path))
    except (OSError, asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as e:
        hint = "name an unlocked OpenSSH private key in fleet.ssh_key" if given else "delete it and start a new run"
        raise UnreadableError(f"cannot use the SSH key {path}: {e}", hint) from e


def public_line(key: asyncssh.SSHKey) -> str:
    """The key as one line of authorized_keys."""
    return key.export_public_key("openssh").decode().strip()


def _create(path: Path) -> None:
    import asyncssh

    key = asyncssh.generate_private_key("ssh-ed25519", comment="uvcc-operator")
    temporary: Path | None = None
    try:
        fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
        temporary = Path(name)
        with os.fdopen(fd, "wb") as f:
            f.write(key.export_private_key("openssh"))
            f.flush()
            os.fsync(f.fileno())
        try:
            os.link(temporary, path)  # the first of two processes wins; the other uses its key
        except FileExistsError:
            return
    except OSError as e:
        raise UvccError(f"cannot write the SSH key {path}: {e.strerror}", "is the disk full?") from e
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
