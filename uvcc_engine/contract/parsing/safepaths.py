"""Names of outside origin: whether they may become a path below a folder of ours. Standard library only, pure, total.

A name that a pod, a bundle or an owner gives is text until it has passed :func:`safe_relative`; what it becomes is a
tuple of parts that mean the same on every file system: plain ASCII, no ``..``, nothing that a shell, a terminal or
another operating system would read in its own way. Patterns are matched part by part, so ``*`` never crosses ``/``.
Whoever writes such a file opens every folder on the way without following links (``fleet.landing``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final

Parts = tuple[str, ...]

MAX_NAME: Final = 512
MAX_PART: Final = 200
MAX_DEPTH: Final = 8
SHOWN: Final = 80

_PLAIN: Final = re.compile(r"[A-Za-z0-9._+=@-]+", re.ASCII)
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# names that are devices on some systems, with any suffix
_DEVICE: Final = re.compile(r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\..*)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a name may not be a path here; ``name`` is fit to be shown."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


@dataclass(frozen=True, slots=True)
class CheckedPaths:
    """The names that may be paths, by the text that was given, and those that may not."""

    kept: Mapping[str, Parts] = field(default_factory=dict)
    refused: tuple[Refused, ...] = ()


def shown(name: object) -> str:
    """A name in a form that can be printed anywhere: ASCII, without control characters, not long."""
    text = ascii(name if isinstance(name, str) else str(type(name).__name__))[1:-1]
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def safe_relative(name: object) -> Parts | Refused:
    """The parts of a relative path, or why it is refused. Whatever is given, nothing is raised."""
    reason = _whole(name)
    if reason or not isinstance(name, str):
        return Refused(shown(name), reason)
    parts = tuple(name.split("/"))
    for part in parts:
        if reason := _part(part):
            return Refused(shown(name), reason)
    return parts if len(parts) <= MAX_DEPTH else Refused(shown(name), f"more than {MAX_DEPTH} folders deep")


def _whole(name: object) -> str:
    if not isinstance(name, str):
        return "not text"
    if not name:
        return "an empty name"
    if len(name) > MAX_NAME:
        return f"longer than {MAX_NAME} characters"
    if _CONTROL.search(name):
        return "holds control characters"
    if "\\" in name:
        return "holds a backslash"
    return "an absolute path" if name.startswith("/") else ""


def _part(part: str) -> str:
    if part in ("", "."):
        return "not in its normal form"
    if part == "..":
        return "leads out of its folder"
    if len(part) > MAX_PART:
        return f"a part longer than {MAX_PART} characters"
    if not part.isascii():
        return "holds characters beyond ASCII"
    if not _PLAIN.fullmatch(part):
        return "holds characters other than letters, digits and . _ + = @ -"
    if part.endswith("."):
        return "a part ends in a dot"
    return "the name of a device" if _DEVICE.fullmatch(part) else ""


def safe_name(name: object) -> str | Refused:
    """One part alone, for a file that lies directly in its folder."""
    parts = safe_relative(name)
    if isinstance(parts, Refused):
        return parts
    return parts[0] if len(parts) == 1 else Refused(shown(name), "a path, where a file name is wanted")


def matches(parts: Parts, pattern: str) -> bool:
    """Whether a path is of a pattern: as many parts, each matched in full."""
    wanted = pattern.split("/")
    return len(wanted) == len(parts) and all(fnmatchcase(p, w) for p, w in zip(parts, wanted, strict=True))


def check_paths(names: Iterable[object]) -> CheckedPaths:
    """Look at names that shall lie in one folder together.

    Beside what :func:`safe_relative` refuses, no two may be the same file, also where case does not count, and none
    may be a folder of another. The first of two counts.
    """
    kept: dict[str, Parts] = {}
    refused: list[Refused] = []
    files: set[Parts] = set()
    folders: set[Parts] = set()
    for name in names:
        parts = safe_relative(name)
        if isinstance(parts, Refused):
            refused.append(parts)
            continue
        folded = tuple(p.casefold() for p in parts)
        above = {folded[:n] for n in range(1, len(folded))}
        if folded in files:
            refused.append(Refused(shown(name), "given twice"))
        elif folded in folders or above & files:
            refused.append(Refused(shown(name), "both a file and a folder"))
        else:
            files.add(folded)
            folders |= above
            kept["/".join(parts)] = parts
    return CheckedPaths(kept, tuple(refused))
