"""``python -m docs.make.taken NAME COMMAND ...``: run a benchmark with ``--json`` and keep its rows in the manual.

``docs/benchmarks/NAME.json`` holds the command, the rows as they were printed, the processor, the commit, and how busy
the machine was: a figure without these says nothing.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, UnreadableError, UvccError

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / "docs" / "benchmarks"


def processor() -> str:
    """The processor in a few words: its name, its cores, the widest vectors that it has."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return f"{os.cpu_count()} cores"
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    known = (("amx_int8", "AVX-512 and AMX"), ("avx512f", "AVX-512"), ("avx2", "AVX2"))
    vectors = next((word for flag, word in known if flag in text), "no AVX2")
    return f"{os.cpu_count()} cores of {named[1] if named else 'an unnamed processor'} with {vectors}"


def commit() -> str:
    """The commit of this checkout; with ``+`` where tracked files differ from it, but for the manual's."""
    git = ["git", "-C", str(ROOT)]
    said = [*git, "describe", "--always", "--abbrev=10", "--exclude=*"]
    named = subprocess.run(said, capture_output=True, text=True, check=True).stdout.strip()
    same = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ".", ":!docs"], check=False).returncode == 0
    return named if same else f"{named}+"


def _rows(command: list[str]) -> list[dict[str, Any]]:
    """What the command prints. Raises UvccError where it cannot be started, fails, or prints no rows."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    except OSError as e:
        raise ConfigError(f"cannot run {command[0]}: {e.strerror}", "name a program on PATH, or its path") from e
    if done.returncode:
        raise UvccError(f"{command[0]} ended with {done.returncode}", "what it said stands above; nothing was kept")
    try:
        rows: list[dict[str, Any]] = json.loads(done.stdout)
    except ValueError as e:
        raise UnreadableError(f"{command[0]} printed no JSON: {e}", "give a command that knows --json") from e
    return rows


def take(name: str, command: list[str]) -> Path:
    """Run ``command --json`` and keep what it prints. Raises UvccError where it prints no rows."""
    before = os.getloadavg()[0]
    rows = _rows([*command, "--json"])
    kept = {
        "command": " ".join([Path(command[0]).name, *command[1:]]),
        "processor": processor(),
        "commit": commit(),
        "load": {"before": round(before, 1), "after": round(os.getloadavg()[0], 1)},
        "rows": rows,
    }
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return path


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    if len(argv) < 2 or argv[0].startswith("-"):
        print("usage: python -m docs.make.taken NAME COMMAND ...", file=sys.stderr)
        return 2
    try:
        print(take(argv[0], argv[1:]))
    except UvccError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
