"""Unix sockets in folders of any depth: their address holds some 100 bytes, paths may be longer."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

LONGEST: Final = 100  # sun_path holds 104 to 108 bytes


@contextmanager
def short(path: Path) -> Iterator[str]:
    """The path in a form that fits into a socket's address while this lasts: to bind, or to connect.

    Raises OSError if the folder is missing.
    """
    if len(os.fsencode(path)) <= LONGEST:
        yield os.fspath(path)
    elif os.path.isdir("/proc/self/fd"):
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{folder}/{path.name}"
        finally:
            os.close(folder)
    else:
        with tempfile.TemporaryDirectory(prefix="uvcc-", dir="/tmp") as folder_name:  # TMPDIR may be a long path itself
            link = Path(folder_name, "d")
            link.symlink_to(path.parent.resolve(strict=True))
            yield os.fspath(link / path.name)
