"""Where the API key of an account comes from. It is never printed, never an argument of a process, never in a log.

One account of a vendor is the usual one: its key is in the vendor's own variable, or in a file. Another account has a
name of its own in the profile, ``account: lab-a``, and its key is found under that name and nowhere else, so that no
party pays by accident from another's wallet.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.parsing.small_text import MOST_TOKEN, read_small

FOLDER: Final = "~/.uvcc/keys"
ACCOUNT: Final = r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}"


def named(vendor: str, account: str, env: Mapping[str, str]) -> tuple[str, str]:
    """The key of a named account, and where it was. Raises ConfigError saying where it is looked for."""
    if not re.fullmatch(ACCOUNT, account):
        raise ConfigError(f"fleet.account is {account[:40]!r}", "letters, digits, - and _, at most 32")
    variable = f"UVCC_{vendor}_KEY_{account}".upper().replace("-", "_")
    return _found(f"for {vendor} account {account}", [variable], [f"{FOLDER}/{vendor}-{account}"], env)


def usual(vendor: str, variables: Sequence[str], env: Mapping[str, str], files: Sequence[str] = ()) -> tuple[str, str]:
    """The key of the vendor's usual account, and where it was. Raises ConfigError saying where it is looked for."""
    return _found(f"for {vendor}", variables, [*files, f"{FOLDER}/{vendor}"], env)


def _found(whose: str, variables: Sequence[str], files: Sequence[str], env: Mapping[str, str]) -> tuple[str, str]:
    for variable in variables:
        if key := env.get(variable, "").strip():
            return _checked(key, variable), variable
    for name in files:
        path = Path(name).expanduser()
        if path.exists():
            private(path)
            if key := read(path):
                return _checked(key, name), name
    hint = f"set {' or '.join(variables)}, or write it to {files[-1]} (mode 600)"
    raise ConfigError(f"no API key {whose}", hint)


def _checked(key: str, source: str) -> str:
    """A key that can stand in a header. Its text is in no message."""
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"what {source} holds is no API key", "it is one word of printable ASCII")
    return key


def private(path: Path) -> None:
    """Raises ConfigError where others can read the file."""
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ConfigError(f"others can read the API key in {path}", f"chmod 600 {path}")


def read(path: Path) -> str:
    try:
        return read_small(path, MOST_TOKEN).strip()
    except (OSError, ValueError) as e:
        raise UnreadableError(f"cannot read {path}: {e}") from e
