"""A small file that a person wrote or was given, a list, a config, a token: what the locale says does not matter to how
it is read, and a checkpoint or disk image that was named by mistake does not fill the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Final

MOST: Final = 1 << 20
MOST_TOKEN: Final = 64 << 10


def read_small_bytes(path: Path, most: int = MOST) -> bytes:
    """All of a file, which may be a pipe. Raises OSError, and ValueError for one of more than ``most`` bytes."""
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it has more than {most >> 10} KiB; is it the file that you meant?")
    return data


def read_small(path: Path, most: int = MOST) -> str:
    """The UTF-8 text of a file. Raises OSError, and ValueError for what is too large or no such text."""
    data = read_small_bytes(path, most)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"its byte {error.start} is no UTF-8 text") from None
