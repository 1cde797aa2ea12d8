"""What a pod offers of a run directory, and what of it is taken. Pure: a listing is the text of a hostile pod.

A file is taken if its name is a path of ours (:mod:`safepaths`), if it is of a pattern that may leave a pod, and if it
does not exceed what such a file may hold. What belongs to a worker is taken only from the pod that runs this worker:
evidence is found by coordinate later, so one pod could otherwise speak for another, or make two of what must be one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from uvcc_engine.contract.parsing.safepaths import Parts, Refused, check_paths, matches, shown
from uvcc_engine.contract.run_files import files
from uvcc_engine.transcript.terms.commit_record import RECORDS

MIB: Final = 1 << 20
GIB: Final = 1 << 30
# what may leave a pod, and how large it may be; everything else (checkpoints, sealed inputs, identities) may not
WANTED: Final = (
    ("transcript_{coord}/*", 64 * GIB),
    ("earlier*_transcript_{coord}/*", 64 * GIB),  # of an attempt that was given up
    ("result_{coord}.box", 16 * GIB),  # sealed to the data owner: they may pass through anybody's hands
    ("seeds_{coord}.box", 16 * MIB),
    ("finding_{coord}.json", 4 * MIB),  # whom each party suspects after a proof that failed, signed
    ("roots*.jsonl", GIB),
    ("signatures*.json", 16 * MIB),
    (RECORDS, GIB),  # what three parties signed about each checkpoint; the checkpoints themselves stay
    ("policy*.json", 16 * MIB),
    ("openings*.json*", GIB),
    (files.RESULTS, 16 * MIB),
    (files.EXITS, 16 * MIB),
    (files.TRAINING, 4 * GIB),
    (files.VAL, 4 * GIB),
    (files.METRICS, 16 * MIB),
    (files.ENV_JSON, MIB),
    (files.SAMPLE, MIB),
    (f"{files.TENSORBOARD}/*", GIB),
    (files.EVENTS, 4 * GIB),
    (files.HEARTBEATS, 4 * GIB),
    (files.LOGS, 4 * GIB),
    (files.STACKDUMPS, 64 * MIB),
    (files.SINK_LOGS, 64 * MIB),
    (files.RUN_JSON, 16 * MIB),
    (files.RUN_INFO, 16 * MIB),
)
NEVER: Final = (files.CHECKPOINTS, "inputs*", "sealed*", "identity*", "*.key", "*token*", "*.safetensors")
MOST_FILES: Final = 4096
MOST_BYTES: Final = 256 * GIB
LISTING: Final = 4 * MIB
NAMED: Final = 5  # so many refused names are told one by one
NONE: Final = "no such run here"
_FILES: Final = "find . -type f ! -path './checkpoints/*' -exec"
SIZES: Final = f"cd {{folder}} && {_FILES} stat -c '%s  %n' {{{{}}}} +"
WHOLE: Final = f"[ -d {{folder}} ] || {{{{ echo {NONE}; exit 0; }}}}\n{SIZES} && {_FILES} sha256sum {{{{}}}} +"
_SUM: Final = re.compile(r"([0-9a-f]{64})  \./(.+)")
_SIZE: Final = re.compile(r"([0-9]{1,18})  \./(.+)")
_ANY: Final = re.compile(r"\\?(?:[0-9a-f]{64}|[0-9]+)  (.*)")


@dataclass(frozen=True, slots=True)
class ListedFile:
    """One file that may be fetched: no more than ``size`` bytes of it, with this hash if the listing has one."""

    parts: Parts
    size: int
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class Listing:
    """The files that a pod offers: those that may be fetched, and those that are refused."""

    files: Mapping[str, ListedFile]
    refused: tuple[Refused, ...]

    def complaint(self) -> str:
        """What was refused, in words that can be shown; empty if nothing was."""
        if not self.refused:
            return ""
        named = "; ".join(map(str, self.refused[:NAMED]))
        more = len(self.refused) - NAMED
        return f"{len(self.refused)} names refused: {named}" + (f"; and {more} more" if more > 0 else "")


def read_offer(listing: str, coords: Collection[str], *, hashed: bool = True) -> Listing:
    """Judge a listing made by :data:`WHOLE` (or by :data:`SIZES`, then not ``hashed``) on the pod of these workers."""
    sizes: dict[str, int] = {}
    sums: dict[str, str] = {}
    names: list[str] = []
    refused: list[Refused] = []
    for line in listing.split("\n"):
        if m := _SUM.fullmatch(line):
            sums.setdefault(m[2], m[1])
        elif m := _SIZE.fullmatch(line):
            sizes.setdefault(m[2], int(m[1]))
            names.append(m[2])
        elif m := _ANY.fullmatch(line):
            refused.append(Refused(shown(m[1]), "not a name below the run directory"))
    checked = check_paths(names)
    refused = [*checked.refused, *refused]
    taken: dict[str, ListedFile] = {}
    total = 0
    for name, parts in sorted(checked.kept.items(), key=lambda one: (_of_a_sink(one[1]), one[0])):
        limit, why = _judge(parts, coords)
        if why:
            refused.append(Refused(shown(name), why))
        if not limit or why:
            continue
        if hashed and name not in sums:
            refused.append(Refused(shown(name), "listed without a hash"))
        elif sizes[name] > limit:
            refused.append(Refused(shown(name), f"{sizes[name]} bytes, such a file has {limit} at most"))
        elif len(taken) >= MOST_FILES:
            refused.append(Refused(shown(name), f"beyond the {MOST_FILES} files that a pod may give"))
        elif total + sizes[name] > MOST_BYTES:
            refused.append(Refused(shown(name), f"beyond the {MOST_BYTES} bytes that a pod may give"))
        else:
            total += sizes[name]
            taken[name] = ListedFile(parts, sizes[name], sums.get(name, ""))
    return Listing(taken, tuple(refused))


def _of_a_sink(parts: Parts) -> bool:
    """Whether a sink wrote it. However many files those are, they come last and crowd no evidence out. They are named
    by figures and settings (``train.sample_tokens``), so :data:`NEVER` does not look at them."""
    return len(parts) > 1 and parts[0] in files.SINK_FOLDERS


def _judge(parts: Parts, coords: Collection[str]) -> tuple[int, str]:
    """How many bytes such a file may have, 0 if it is not wanted; or why a file of this kind is not this pod's."""
    if _of_a_sink(parts):
        return GIB, ""
    if any(fnmatchcase(part, never) for part in parts for never in NEVER):
        return 0, ""
    others = False
    for pattern, limit in WANTED:
        if "{coord}" not in pattern:
            if matches(parts, pattern):
                return limit, ""
        elif any(matches(parts, pattern.format(coord=c)) for c in coords):
            return limit, ""
        else:
            others = others or matches(parts, pattern.format(coord="*"))
    return 0, "of a worker that this pod does not run" if others else ""
