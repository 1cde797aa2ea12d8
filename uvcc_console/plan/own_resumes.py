"""The order by which a run goes on by itself, as often as ``limits.resumes`` says, in the journal."""

from __future__ import annotations

from typing import Final

from uvcc_console.core import events as ev

BY: Final = "limits.resumes"


def order() -> ev.Intent:
    """The order to go on, as the journal has it."""
    return ev.Intent(action="resume", by=BY)


def ordered(event: ev.Event) -> bool:
    """Whether an event is that order."""
    return isinstance(event, ev.Intent) and (event.action, event.by) == ("resume", BY)
