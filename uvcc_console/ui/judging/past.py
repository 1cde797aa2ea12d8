"""What is advised where it cannot be done: in a recording nothing is, and a read-only console has few of the keys."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Final

from uvcc_console.core import events as ev
from uvcc_console.ui.drawing.paint import clean
from uvcc_console.ui.judging.view import View

_KEPT: Final = re.compile(r"; (?:pods kept|there is no pod; this waits) until .*$", re.DOTALL)
_COMMANDS: Final = re.compile(r"(?<= for a decision): uvcc resume \(r\) or uvcc teardown \(t\)")
_WORDS: Final = r"\b(?:uvcc|F9|Esc|look|see|retry|raise|replace|restart|goes back)\b"
_ADVICE: Final = re.compile(rf"\s*\((?=[^()]*{_WORDS})[^()]*\)")
_PARTS: Final = re.compile(r"(?<=[,;]) ")
_KEY: Final = re.compile(r"[rRtxWP] [a-z]")  # of an action that a read-only console refuses
_HINTS: Final = frozenset(("hint", "cure"))
_WITH_DETAIL: Final = (ev.StageChanged, ev.PodChanged, ev.LinkChanged, ev.ActionDone, ev.RunEnded, ev.PhaseVerdict)


def as_told(view: View, text: str) -> str:
    """A text of the run as it is to be shown: in a recording without what could have been done then."""
    return _bare(text) if view.replay else text


def without_commands(text: str) -> str:
    """What a stage that waits says, without the commands for its two ways: for where their keys stand beside it."""
    return _COMMANDS.sub("", text)


def advice_here(view: View, hint: str) -> str:
    """Advice as this console can follow it: a read-only one halts, and anything else is done by another."""
    parts = _PARTS.split(hint)
    mine = [part for part in parts if not _KEY.match(part)]
    if not view.readonly or view.replay or len(mine) == len(parts):
        return hint
    other = f"read-only here, so in another terminal: uvcc attach {clean(view.snap.run)}"
    return "; ".join([*(part.rstrip(",;") for part in mine), other])


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
