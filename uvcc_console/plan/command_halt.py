"""How a command is halted, and whether what can be read of it here looks at a control file at all.

A halt that needs the help of a program is worth nothing where that gives none, and the drill would tell so only after
pods were rented. What is read is text, nothing is run: a program that obeys in a way of its own is believed by its
drill, so this warns and refuses nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from uvcc_console.plan.code_tree import CodeTree
from uvcc_console.plan.plan import SIGTERM
from uvcc_console.plan.schema import CommandJobSettings

MOST_READ: Final = 1 << 20
MOST_FILES: Final = 2000
_OBEYS: Final = re.compile(rb"uvcc_engine|RunWriter|UVCC_RUN_DIR|control\.json")
_PROGRAM: Final = re.compile(r".*\.(?:py|sh|bash|jl|js|ts|rb|lua|r|R|ipynb|toml|ya?ml)")
WORDS: Final = {
    "control-file": "by the control file, drilled before the smoke",
    SIGTERM: "by SIGTERM alone: the program does not look at the control file, cannot be held, and the drill ends "
    "the smoke's processes by it",
}


def doubt(job: CommandJobSettings, tree: CodeTree | None = None) -> str:
    """Why the control file would not halt this program, as far as its text here tells; "" where it tells nothing.

    ``tree``: what ``job.code`` uploads, else the files that ``job.argv`` names are read, where they are here.
    """
    if job.halt == SIGTERM:
        return ""
    named = [tree.folder] if tree is not None else [Path(word).name for word in job.argv if _is_program(Path(word))]
    files = list(_files(job, tree))
    if not files or any(_OBEYS.search(word.encode()) for word in job.argv) or any(map(_obeys, files)):
        return ""
    return (
        f"nothing in {', '.join(named)} looks at the control file (no RunWriter, no adapter, no UVCC_RUN_DIR): such a "
        "program cannot be held, and its halt drill fails; job.halt: sigterm drills it by SIGTERM alone"
    )


def _files(job: CommandJobSettings, tree: CodeTree | None) -> Iterator[Path]:
    if tree is not None:
        found = (Path(tree.folder) / f.path for f in tree.files if _PROGRAM.fullmatch(f.path))
    else:
        found = (Path(word) for word in job.argv if _is_program(Path(word)))
    for at, path in enumerate(found):
        if at == MOST_FILES:
            return
        yield path


def _is_program(path: Path) -> bool:
    return bool(_PROGRAM.fullmatch(path.name)) and path.is_absolute() and path.is_file()


def _obeys(path: Path) -> bool:
    """Whether a file names the run contract; one that cannot be read is given the benefit of the doubt."""
    try:
        with path.open("rb") as file:
            return _OBEYS.search(file.read(MOST_READ)) is not None
    except OSError:
        return True
