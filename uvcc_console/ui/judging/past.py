"""What was advised then: a recording shows what happened, and no key of that moment works any more."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Final

from uvcc_console.core import events as ev
from uvcc_console.ui.judging.view import View

_KEPT: Final = re.compile(r"; pods kept until .*$", re.DOTALL)
_WORDS: Final = r"\b(?:uvcc|F9|Esc|look|see|retry|raise|replace|restart|goes back)\b"
_ADVICE: Final = re.compile(rf"\s*\((?=[^()]*{_WORDS})[^()]*\)")
_HINTS: Final = frozenset(("hint", "cure"))
_WITH_DETAIL: Final = (ev.StageChanged, ev.PodChanged, ev.LinkChanged, ev.ActionDone, ev.RunEnded, ev.PhaseVerdict)


def as_told(view: View, text: str) -> str:
    """A text of the run as it is to be shown: in a recording without what could have been done then."""
    return _bare(text) if view.replay else text


def without_advice(event: ev.Event) -> ev.Event:
    """An event as a recording tells it: what happened, without what could have been done about it then.

    Every surface that is drawn from a recording, its log and its notices too, is drawn from these.
    """
    new: dict[str, Any] = {}
    if isinstance(event, ev.Alert):
        new = {"hint": "", "text": _bare(event.text)}
    elif isinstance(event, ev.EngineEvent) and not _HINTS.isdisjoint(event.fields):
        new = {"fields": {name: value for name, value in event.fields.items() if name not in _HINTS}}
    elif isinstance(event, _WITH_DETAIL):
        new = {"detail": _bare(event.detail)}
    if all(getattr(event, name) == value for name, value in new.items()):
        return event
    return dataclasses.replace(event, **new)


def _bare(text: str) -> str:
    return _ADVICE.sub("", _KEPT.sub("", text))
