"""Holds what pods report of a result against what was verified: as they report it, and when the verdict comes."""

from __future__ import annotations

from uvcc_console.core import events as ev
from uvcc_console.core.answers.shown import Contradiction, contradictions
from uvcc_console.rollout.bus import Bus

ALERT = "result_contradicted"
HINT = "what is shown is the certificate's; keep that pod's files, they are evidence"


def compare_results(bus: Bus) -> None:
    """An alert that names the pod, once for each thing that it says otherwise."""
    told: set[Contradiction] = set()

    def heard(event: ev.Event) -> None:
        if not isinstance(event, ev.ResultReported | ev.PhaseVerdict):
            return
        for found in contradictions(bus.snapshot):
            if found not in told:
                told.add(found)
                bus.record([ev.Alert(level="error", name=ALERT, text=found.text, hint=HINT, subject=found.pod)])

    bus.listen(heard)
