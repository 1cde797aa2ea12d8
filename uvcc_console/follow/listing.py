"""What is asked of the folder's shell, and how the answers are read. Pure; what comes back is a stranger's text.

Only regular files below the folder are ever named: no link is followed, and a name that cannot be shown is passed over.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from uvcc_engine.contract.errors import UnreadableError, UvccError
from uvcc_engine.contract.run_files import files

MOST_LISTED: Final = 512
MOST_LOGS: Final = 64
DEPTH: Final = 3
NAME: Final = 200
TABLES: Final = ("*.csv", "*.tsv", "*.jsonl", "*.ndjson", "events.out.tfevents.*")
LOGS: Final = tuple(f"*.{ending}" for ending in ("log", "out", "err"))
CONTRACT: Final = (
    files.RUN_JSON,
    files.TRAINING,
    files.VAL,
    files.EVENTS,
    files.heartbeat_name(0),
    files.exit_name(0),
    files.result_name(0),
)
RANKS: Final = (files.HEARTBEATS, files.EXITS, files.RESULTS)
_PASSED_OVER: Final = (".*", files.CHECKPOINTS, "node_modules", "site-packages", "__pycache__")
_STAT: Final = r"""
s() {
  if stat -c %i . >/dev/null 2>&1; then stat -c '%i %s %Y %n' -- "$@"; else stat -f '%i %z %m %N' -- "$@"; fi
}
"""
_LINE: Final = re.compile(rb"([0-9]{1,20}) ([0-9]{1,18}) ([0-9]{1,12})(?:\.[0-9]*)? (\./[^\n]+)")
_TROUBLES: Final = {
    "missing": ("there is no folder", "look at its name; a path without a slash in front begins where a login does"),
    "file": ("it is a file, not a folder", "name the folder that it lies in"),
    "denied": ("it may not be entered", "the account needs the right to read it and to enter it"),
}


@dataclass(frozen=True, slots=True)
class FileStat:
    """A regular file: its inode, its size in bytes and when it was written last, by the machine's own clock."""

    ino: int
    size: int
    mtime: float


@dataclass(frozen=True, slots=True)
class FolderListing:
    """Files by their names relative to the folder; ``now`` is the machine's clock. ``more``: not all were listed."""

    now: float
    files: Mapping[str, FileStat] = field(default_factory=dict)
    refused: int = 0
    more: bool = False


def _head(folder: str) -> str:
    """Be in the folder with plain English and no complaints on standard error."""
    at = shlex.quote(folder if folder.startswith("/") else f"./{folder}")
    return (
        "exec 2>/dev/null; LC_ALL=C; export LC_ALL; unset CDPATH\n"
        f"[ -e {at} ] || {{ echo TROUBLE missing; exit 0; }}\n"
        f"[ -d {at} ] || {{ echo TROUBLE file; exit 0; }}\n"
        f"cd {at} && [ -r . ] || {{ echo TROUBLE denied; exit 0; }}\n"
        "echo NOW $(date +%s)\n"
    )


def _named(names: Sequence[str]) -> str:
    """Whichever of these are regular files become the shell's arguments."""
    words = " ".join(shlex.quote(f"./{name}") for name in names)
    return f'set --\nfor f in {words}; do [ -f "$f" ] && [ ! -L "$f" ] && set -- "$@" "$f"; done\n'


def scan_script(folder: str) -> str:
    """List what may be followed: the names of the run contract, then tables, then logs, so many of each at most."""
    tables, logs = _find((*RANKS, *TABLES), MOST_LISTED + 1), _find(LOGS, MOST_LOGS)
    return (
        f"{_head(folder)}{_STAT}{_named(CONTRACT)}"
        f"""if [ $# -gt 0 ]; then s "$@"; fi
IFS='
'
set -f
set -- $({tables})
[ $# -gt {MOST_LISTED} ] && echo MORE
set -- "$@" $({logs})
if [ $# -gt 0 ]; then s "$@"; fi
echo END
"""
    )


def _find(patterns: Sequence[str], most: int) -> str:
    """Names of regular files, not far below; a folder of a million costs a look through it, and no more."""
    wanted = " -o ".join(f"-name {shlex.quote(p)}" for p in patterns)
    pruned = " -o ".join(f"-name {shlex.quote(p)}" for p in _PASSED_OVER)
    return (
        f"find . -maxdepth {DEPTH} \\( -type d \\( {pruned} \\) ! -name . -prune \\) "
        f"-o -type f \\( {wanted} \\) -print </dev/null | head -n {most}"
    )


def stat_script(folder: str, names: Sequence[str], extra: str = "") -> str:
    """Look at known files again; ``extra`` is run behind it."""
    return f'{_head(folder)}{_STAT}{_named(names)}if [ $# -gt 0 ]; then s "$@"; fi\necho END\n{extra}'


def read_script(folder: str, name: str, offset: int, count: int) -> str:
    """``count`` bytes of a file from ``offset`` on, and nothing else; nothing of what has become a link."""
    at = shlex.quote(folder if folder.startswith("/") else f"./{folder}")
    file = shlex.quote(f"./{name}")
    return (
        f"exec 2>/dev/null; unset CDPATH; cd {at} >/dev/null || exit 3\n"
        f"[ -f {file} ] && [ ! -L {file} ] || exit 3\n"
        f"tail -c +{offset + 1} -- {file} </dev/null | head -c {count}\n"
    )


def parse(out: bytes, folder: str, where: str) -> FolderListing:
    """Read a listing. Raises UnreadableError for a folder that cannot be read, UvccError for an answer cut short."""
    first, _, rest = out.partition(b"\n")
    if first.startswith(b"TROUBLE "):
        what, hint = _TROUBLES.get(first[8:].decode(errors="replace"), ("it cannot be read", "look at it by hand"))
        raise UnreadableError(f"{folder} on {where}: {what}", hint)
    body, end, _ = rest.partition(b"END\n")
    if not first.startswith(b"NOW ") or not first[4:].isdigit() or not end:
        raise UvccError(f"{where} answers {first[:60]!r} where a listing was asked", "does /bin/sh there have find?")
    found: dict[str, FileStat] = {}
    refused, more = 0, False
    for line in body.split(b"\n"):
        if line == b"MORE":
            more = True
        elif (m := _LINE.fullmatch(line)) is not None and (name := _shown(m[4][2:])):
            found[name] = FileStat(int(m[1]), int(m[2]), float(m[3]))
        elif line:
            refused += 1
    return FolderListing(float(first[4:]), found, refused, more)


def _shown(raw: bytes) -> str:
    """A name that can be shown and asked for again; "" for any other."""
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        return ""
    parts = name.split("/")
    fine = name.isprintable() and len(name) <= NAME and ".." not in parts and "" not in parts
    return name if fine else ""
