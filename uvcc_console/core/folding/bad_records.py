"""What odd data may make a fold raise, and whether that is let through.

Readers of a journal go on over a record that they cannot use: it is counted (``Snapshot.malformed``) and told once.
With ``UVCC_STRICT`` set, as in the tests, an error that is not plainly the data's fault is raised instead.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from uvcc_engine.contract.parsing.untrusted import as_float, as_int

ERRORS: Final = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class BadRecordError(ValueError):
    """A record whose content cannot be meant: the data's fault, never the program's."""


def strict() -> bool:
    """Whether errors that may be the program's own are raised."""
    return os.environ.get("UVCC_STRICT", "") == "1"


def step_of(fields: Mapping[str, Any], default: int = -1) -> int:
    """The ``step`` of a record. Raises BadRecordError where there is one that is no step."""
    found = as_int(fields.get("step", default), -1)
    if found is None:
        raise BadRecordError(f"step is {str(fields['step'])[:40]!r}")
    return found


def number_of(fields: Mapping[str, Any], name: str, default: float = 0.0) -> float:
    """A number of a record; ``default`` where there is none that is finite."""
    found = as_float(fields.get(name))
    return default if found is None else found
