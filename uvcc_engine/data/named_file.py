"""What a data owner names in place of a file: a pipe, a socket or a device would be waited for, and could not be read
twice, as data are (once to look at them, once to seal them)."""

from __future__ import annotations

import stat
from pathlib import Path

from uvcc_engine.contract.errors import UnreadableError


def refuse_streams(path: Path) -> None:
    """Raises UnreadableError for what is neither a file nor a folder. Of what is not there, whoever opens it speaks."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        what = "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
        raise UnreadableError(f"{path} is {what}, not a file", "data are read more than once: save them in a file")
