"""Files of a command's work folder that come home (``job.artifacts``), into ``artifacts/PHASE/POD/files``.

A pod's names and sizes are a stranger's text: only what a pattern of the profile names is fetched, within bounds, and
checked against the hash that the pod gave before.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from uvcc_console.core import events as ev
from uvcc_console.fleet.download_folder import DownloadFolder
from uvcc_console.fleet.ssh import PodLink
from uvcc_console.plan.plan import Phase
from uvcc_console.plan.schema import CommandJobSettings
from uvcc_console.rollout.context import Member, Rollout
from uvcc_console.rollout.file_listing import GIB, LISTING, NAMED
from uvcc_console.rollout.stages.fleet.code import WORK
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.parsing.safepaths import Parts, check_paths

FILES: Final = "files"
MOST_FILES: Final = 2000
MOST_BYTES: Final = 32 * GIB
LISTED_S: Final = 300.0
AT_ONCE: Final = 100
_SIZE: Final = re.compile(r"([0-9]{1,15})  \./(.+)")
_SUM: Final = re.compile(r"([0-9a-f]{64})  \./(.+)")


def chosen(listing: str, patterns: Sequence[str]) -> tuple[dict[str, tuple[Parts, int]], list[str]]:
    """(name -> parts and size) of the files that the patterns name, and what was left there, in words. Pure."""
    sizes = {m[2]: int(m[1]) for line in listing.split("\n") if (m := _SIZE.fullmatch(line))}
    wanted = [n for n in sizes if any(_named(n, p) for p in patterns)]
    checked = check_paths(wanted)
    left = [str(r) for r in checked.refused]
    taken: dict[str, tuple[Parts, int]] = {}
    total = 0
    for name, parts in sorted(checked.kept.items()):
        if len(taken) >= MOST_FILES or total + sizes[name] > MOST_BYTES:
            left.append(f"{name} (beyond {MOST_FILES} files or {MOST_BYTES // GIB} GiB)")
            continue
        total += sizes[name]
        taken[name] = (parts, sizes[name])
    left += [f"nothing is named {p}" for p in patterns if not any(_named(n, p) for n in sizes)]
    return taken, left


def _named(name: str, pattern: str) -> bool:
    """``*`` stays in its folder, ``**`` goes through all of them; a folder's name means all that is in it."""
    parts, wanted = name.split("/"), [p for p in pattern.strip("/").split("/") if p not in ("", ".")]

    def fits(at: int, of: int) -> bool:
        if of == len(wanted):
            return True  # all of the pattern was a folder on the way, or the file itself
        if wanted[of] == "**":
            return any(fits(i, of + 1) for i in range(at, len(parts) + 1)) if of + 1 < len(wanted) else at < len(parts)
        return at < len(parts) and fnmatchcase(parts[at], wanted[of]) and fits(at + 1, of + 1)

    return bool(wanted) and fits(0, 0)


async def fetch_outputs(ctx: Rollout, phase: Phase, member: Member) -> int:
    """Bring one pod's outputs of a phase home; how many files. What is left there is named in a warning."""
    job = ctx.plan.profile.job
    if not isinstance(job, CommandJobSettings) or not job.artifacts:
        return 0
    work = f"{WORK}/{phase.engine_run}"
    link = member.ssh
    script = f"cd {work} 2>/dev/null || exit 0; find . -type f -exec stat -c '%s  %n' {{}} +"
    taken, left = chosen(await link.sh(script, timeout=LISTED_S, limit=LISTING), job.artifacts)
    home = ctx.artifacts / phase.name / member.name / FILES
    sums = await _hashes(link, work, list(taken))
    with DownloadFolder(home) as downloads:
        for name, (parts, size) in taken.items():
            if name not in sums:
                left.append(f"{name} (it was gone before it was hashed)")
                continue
            try:
                await link.get(f"{work}/{name}", downloads, parts, limit=size, sha256=sums[name])
            except UvccError as e:
                left.append(f"{name} ({e.what})")
    if left:
        more = f"; and {len(left) - NAMED} more" if len(left) > NAMED else ""
        text = f"of job.artifacts not home: {'; '.join(left[:NAMED])}{more}"
        hint = "see the patterns, and what the command wrote: its work folder goes with the pod"
        ctx.say(ev.Alert(level="warn", name="collect", text=text, hint=hint, subject=member.name))
    return _count(home, taken)


def _count(home: Path, taken: Mapping[str, object]) -> int:
    return sum((home / name).is_file() for name in taken)


async def _hashes(link: PodLink, work: str, names: Sequence[str]) -> dict[str, str]:
    """SHA-256 of each file as the pod gives it."""
    found: dict[str, str] = {}
    for i in range(0, len(names), AT_ONCE):
        words = " ".join(shlex.quote(f"./{n}") for n in names[i : i + AT_ONCE])
        out = await link.sh(f"cd {work} && sha256sum -- {words} 2>/dev/null; :", timeout=6 * LISTED_S, limit=LISTING)
        found |= {m[2]: m[1] for line in out.split("\n") if (m := _SUM.fullmatch(line))}
    return found
