"""Whom a worker waits for: a name that decides, and how long, each in a field of its own of a heartbeat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from uvcc_engine.contract.parsing.untrusted import as_float, scalar_text

FIRST_STEP_S: Final = 900.0
"""What the first step of a language model may take before it counts as stuck: kernels are compiled in it, and a hub
that is asked too often makes whoever asks wait for minutes."""


class Waiting(NamedTuple):
    """``whom``: a party (``p2``), a worker, or ranks in a collective; ``since_s``: seconds so far, None if unknown."""

    whom: str
    since_s: float | None = None

    def fields(self) -> dict[str, Any]:
        """What a heartbeat and a flight recorder's answer say of it."""
        return {"waiting_on": self.whom} | ({} if self.since_s is None else {"waiting_s": round(self.since_s, 1)})

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Waiting | None:
        """Read it back, totally; None where nobody is waited for."""
        whom = scalar_text(fields.get("waiting_on"), 200)
        return cls(whom, as_float(fields.get("waiting_s"), 0.0)) if whom else None

    def __str__(self) -> str:
        return self.whom if self.since_s is None else f"{self.whom} for {self.since_s:.1f} s"
