"""What the console runs on a pod before the engine is there: scripts for any Python 3.11, standard library only.

They are sent over the SSH channel's standard input and never imported there.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Final

# every Python >= 3.11 of the host, a venv of an earlier bootstrap first; a login shell finds what images put on PATH
PYTHONS: Final = r"""
{
  [ -x .uvcc/venv/bin/python ] && echo "$PWD/.uvcc/venv/bin/python"
  command -v python3
  sh -lc 'command -v python3' 2>/dev/null </dev/null
  for v in 3.14 3.13 3.12 3.11; do command -v "python$v"; done
} 2>/dev/null | awk '!seen[$0]++' | while read -r python; do
  "$python" -S -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null </dev/null && echo "$python"
done
:
"""


def source(name: str) -> bytes:
    """The text of one of the scripts beside this file."""
    return files(__name__).joinpath(name).read_bytes()
