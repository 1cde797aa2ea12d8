"""A module that is started by itself, ``python -m``, ends with an error as a command does: in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from uvcc_engine.contract.errors import UvccError


def exit_code(main: Callable[[Sequence[str]], int]) -> int:
    """Run ``main`` with the words of the command line. Returns its exit code, or that of the error that ended it."""
    try:
        return main(sys.argv[1:])
    except UvccError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
