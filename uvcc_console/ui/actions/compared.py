"""Another run of this machine, read whole, to be compared with the one on the screen."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Final

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal, read_newest
from uvcc_console.core.paths import JOURNAL
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.runs.order import number_of
from uvcc_engine.contract.errors import ConfigError, UvccError
from uvcc_engine.contract.parsing.suggest import nearest

_READ: Final = 100  # of the newest runs it is read what they are of
_WHEN: Final = re.compile(r"-\d{8}-\d{4}-")


def others(run_dir: Path) -> list[str]:
    """Names of the other runs beside this one: those of its own profile, then all others, the newest first."""
    found = sorted(run_dir.parent.glob(f"*/{JOURNAL}"), key=lambda p: (-number_of(p.parent), -p.stat().st_mtime))
    mine = _profile(run_dir / JOURNAL)
    near = {p: _profile(p) == mine for p in found[:_READ]}  # stable: within both the newest stay first
    return [p.parent.name for p in sorted(found, key=lambda p: not near.get(p)) if p.parent != run_dir]


@cache
def _profile(journal: Path) -> str:
    """The profile of a run, by the first of its events; of one that has none yet, by what its id begins with.

    Runs of different profiles may be called alike: those of ``uvcc demo`` and of ``uvcc demo --lm`` are.
    """
    try:
        opened = Journal(journal, readonly=True)
        try:
            for _, event in opened.since(0, 1, (ev.RunCreated.kind,)):
                if isinstance(event, ev.RunCreated):
                    return event.profile_name
        finally:
            opened.close()
    except UvccError:
        pass
    return _WHEN.split(journal.parent.name, maxsplit=1)[0]


def chosen(run_dir: Path, word: str) -> str:
    """The run that is meant: its name, or the only one that it begins or ends. Raises ConfigError."""
    known = others(run_dir)
    if word in known:
        return word
    like = [name for name in known if name.startswith(word) or name.endswith(word)]
    if len(like) == 1:
        return like[0]
    if like:
        raise ConfigError(f"{word} is the beginning of {len(like)} runs", f"name one: {', '.join(like[:4])}")
    near = nearest(word, known)
    raise ConfigError(f"there is no other run {word!r}", f"did you mean {near}?" if near else "it is the only run here")


def read(run_dir: Path, word: str) -> tuple[str, Snapshot]:
    """(name, how it ended or stands). Blocking. Raises UvccError."""
    name = chosen(run_dir, word)
    journal = Journal(run_dir.parent / name / JOURNAL, readonly=True)
    try:
        return name, read_newest(journal)
    finally:
        journal.close()
