"""Style sheets are parsed once per process, not once per app: hundreds of tests start an app of the same sheets.

Nothing that is said on a screen under test runs out, however slow the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from textual.app import App
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet

from uvcc_console.ui.halting import uncover


@pytest.fixture(scope="session", autouse=True)
def _sheets_parsed_once() -> Iterator[None]:
    """Parsed rules are never changed: textual itself keeps those of one app and gives them out again."""
    kept: dict[Any, list[RuleSet]] = {}
    parse = Stylesheet._parse_rules

    def parsed(
        sheet: Stylesheet,
        css: str,
        read_from: Any,
        is_default_rules: bool = False,
        tie_breaker: int = 0,
        scope: str = "",
    ) -> list[RuleSet]:
        key = (css, read_from, is_default_rules, tie_breaker, scope, tuple(sheet._variables.items()))
        if key not in kept:
            kept[key] = parse(sheet, css, read_from, is_default_rules, tie_breaker, scope)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stylesheet, "_parse_rules", parsed)
        yield


LASTING_S = 3600.0


@pytest.fixture(scope="session", autouse=True)
def _no_words_run_out() -> Iterator[None]:
    """A toast is gone after four seconds, and a key counts again 1.5 s after F9 closed what it was typed into."""
    notify = App.notify

    def lasting(app: App[Any], message: str, **more: Any) -> None:
        notify(app, message, **more | {"timeout": LASTING_S})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(App, "notify", lasting)
        patch.setattr(uncover, "HUSH_S", LASTING_S)
        yield
