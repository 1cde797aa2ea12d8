"""Style sheets are parsed once per process, not once per app: hundreds of tests start an app of the same sheets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet


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
