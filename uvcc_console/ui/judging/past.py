"""What was advised then: a recording shows what happened, and no key of that moment works any more."""

from __future__ import annotations

import re
from typing import Final

from uvcc_console.ui.judging.view import View

_KEPT: Final = re.compile(r"; pods kept until .*$", re.DOTALL)
_WORDS: Final = r"\b(?:uvcc|F9|Esc|look|see|retry|raise|replace|restart|goes back)\b"
_ADVICE: Final = re.compile(rf"\s*\((?=[^()]*{_WORDS})[^()]*\)")


def as_told(view: View, text: str) -> str:
    """A text of the run as it is to be shown: in a recording without what could have been done then."""
    return _ADVICE.sub("", _KEPT.sub("", text)) if view.replay else text
