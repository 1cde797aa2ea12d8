"""The rungs of a halt, the mildest first, and the release of a hold: the one list of their names."""

from __future__ import annotations

from typing import Final, Literal

HaltRung = Literal["hold", "halt", "term", "kill", "terminate"]
HOLD: Final = "hold"
HALT: Final = "halt"
TERM: Final = "term"
KILL: Final = "kill"
TERMINATE: Final = "terminate"
RELEASE: Final = "release"
