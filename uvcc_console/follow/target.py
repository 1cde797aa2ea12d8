"""What ``uvcc watch`` and ``uvcc adopt`` are pointed at: ``DIR``, ``user@host:DIR`` or ``ssh://user@host:port/DIR``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.text import clean

_USER: Final = r"(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.+-]*)@)?"
_HOST: Final = r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_][A-Za-z0-9_.-]*)"
_SCP: Final = re.compile(rf"{_USER}{_HOST}:(?P<folder>.*)", re.DOTALL)
_URL: Final = re.compile(rf"ssh://{_USER}{_HOST}(?::(?P<port>[0-9]{{1,5}}))?(?P<folder>/.*)?", re.DOTALL)
_WRITE_IT: Final = "write it like me@host:runs/mine, ssh://me@host:2222/runs/mine, or runs/mine for a folder here"


@dataclass(frozen=True, slots=True)
class FollowTarget:
    """A folder. ``host`` is "" for this machine; ``user`` "" and ``port`` 0 are left to ``~/.ssh/config``."""

    folder: str
    host: str = ""
    user: str = ""
    port: int = 0

    @property
    def words(self) -> str:
        """The target as it is written, cleaned."""
        user = f"{self.user}@" if self.user else ""
        return clean(f"{user}{self.host}:{self.folder}" if self.host else self.folder, 300)

    @property
    def label(self) -> str:
        """A short name for a run: of the folder, else of the host."""
        last = self.folder.rstrip("/").rpartition("/")[2]
        return last if last.strip(".~") else self.host or "folder"


def is_target(text: str) -> bool:
    """Whether a word names a folder and not a run: runs' names have no colon, slash or tilde."""
    return ":" in text or "/" in text or text.startswith(("~", ".")) or text == "."


def read_target(text: str, port: int = 0) -> FollowTarget:
    """Read what was typed; ``port`` as of ``-p``. Raises ConfigError for a target that names no folder or host."""
    if "\0" in text or "\n" in text:
        raise ConfigError("a folder's name has no line ends", _WRITE_IT)
    if "://" in text:
        found = _URL.fullmatch(text)
        if found is None:
            raise ConfigError(f"cannot read {clean(text, 200)!r}", _WRITE_IT)
        given = int(found["port"] or 0)
        if port and given and port != given:
            raise ConfigError(f"two ports: {given} in the address, {port} by -p", "give one of them")
        folder = unquote(found["folder"] or "")
        folder = folder[1:] if folder.startswith("/~/") else folder
        return _remote(found["user"], found["host"], given or port, folder)
    found = _SCP.fullmatch(text)
    if found is not None and not Path(text).expanduser().is_dir():
        return _remote(found["user"], found["host"], port, found["folder"])
    if ":" in text.partition("/")[0] and not Path(text).is_dir():
        raise ConfigError(f"cannot read {clean(text, 200)!r}", _WRITE_IT)
    if port:
        raise ConfigError(f"-p {port} goes with a host", _WRITE_IT)
    return FollowTarget(str(Path(text).expanduser().absolute()))


def _remote(user: str | None, host: str, port: int, folder: str) -> FollowTarget:
    folder = folder.removeprefix("~/")  # where a login begins
    if not folder or folder == "~":
        raise ConfigError(f"no folder is named on {host}", _WRITE_IT)
    if port > 65535:
        raise ConfigError(f"there is no port {port}", _WRITE_IT)
    return FollowTarget(folder, host.strip("[]"), user or "", port)
