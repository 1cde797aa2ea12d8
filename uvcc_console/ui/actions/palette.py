"""The command palette: every action of the registry, possible or not, the impossible ones with their reason."""

from __future__ import annotations

from functools import partial
from typing import cast

from textual.command import DiscoveryHit, Hit, Hits, Provider

from uvcc_console.ui.drawing.paint import literal
from uvcc_console.ui.registry.keys import ACTIONS, UiAction
from uvcc_console.ui.run_base import RunConsole


class ActionProvider(Provider):
    """Offers the actions."""

    def _entries(self) -> list[tuple[UiAction, str, str]]:
        context = cast(RunConsole, self.app).context()
        out = []
        for a in ACTIONS.values():
            if a.id in ("palette", "release"):
                continue
            why = a.reason(context)
            title = f"{a.name} ({a.label})"
            out.append((a, title, literal(f"not now: {why}") if why else a.description))
        return out

    async def discover(self) -> Hits:
        """Offer every action before anything is typed, those of the screen first: Enter takes the first line."""
        for action, title, text in sorted(self._entries(), key=lambda entry: entry[0].group != "screen"):
            yield DiscoveryHit(title, partial(self._do, action), help=text)

    async def search(self, query: str) -> Hits:
        """Fuzzy matches of name and description."""
        matcher = self.matcher(query)
        for action, title, text in self._entries():
            score = max(matcher.match(title), matcher.match(f"{action.id} {text}") * 0.8)
            if score > 0:
                yield Hit(score, matcher.highlight(title), partial(self._do, action), help=text)

    def _do(self, action: UiAction) -> None:
        cast(RunConsole, self.app).perform(action)
