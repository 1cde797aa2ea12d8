"""``uvcc man``: the man pages, also where the system's ``man`` does not look into this installation."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from uvcc_console.cli import common
from uvcc_console.cli.main import OK
from uvcc_engine.contract.errors import UnreadableError

PAGES: Final = ("uvcc", "uvcc-engine")


def page(name: str) -> Path:
    """The file of a man page: a checkout's, else an installation's. Raises UnreadableError."""
    checkout = Path(__file__).resolve().parents[3] / "docs" / "reference"
    for folder in (checkout, Path(sys.prefix) / "share" / "man" / "man1"):
        if (folder / f"{name}.1").is_file():
            return folder / f"{name}.1"
    raise UnreadableError("the man pages are not installed", "install the package again, from its wheel")


def run(argv: list[str]) -> int:
    parser = common.Parser(
        "man",
        "The man page of uvcc or uvcc-engine, made from the parsers that read the commands. Without a terminal its "
        "source is printed, for man -l - or another formatter.",
    )
    parser.add_argument("page", nargs="?", choices=PAGES, default=PAGES[0], help="which page")
    parser.add_argument("--path", action="store_true", help="print where the page lies, for MANPATH or a package")
    args = parser.parse_args(argv)
    found = page(args.page)
    if args.path:
        common.hand_out(str(found))
        return OK
    viewer = shutil.which("man") if sys.stdout.isatty() else None
    if viewer is None:
        try:
            source = found.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise UnreadableError(f"cannot read {found}: {e}") from e
        common.hand_out(source.rstrip("\n"))
        return OK
    return subprocess.run([viewer, str(found)], check=False).returncode
