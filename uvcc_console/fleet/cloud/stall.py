"""The market as a run sees it: asked at most once a minute, however many pods are rented at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from uvcc_console.fleet.cloud import choice as market
from uvcc_console.fleet.cloud.vendor import Cloud

FRESH_S = 60.0


@dataclass
class Stall:
    """What there was to choose from at the last look."""

    client: Cloud
    _found: market.OfferChoice | None = None
    _kind: tuple[Any, ...] = ()
    _at: float = 0.0
    _looking: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def look(
        self,
        want: Callable[[], tuple[market.OfferFilter, set[int]]],
        domains: Mapping[int, str],
        *,
        force: bool = False,
    ) -> market.OfferChoice:
        """The market, at most a minute old, with every party. Raises ConfigError naming what leaves nothing.

        ``want`` says what is looked for, and for which parties, at the moment of asking: another rent may have settled
        more of it while this one waited.
        """
        async with self._looking:
            clock = self.client.clock
            wanted, parties = want()
            stale = (
                force or clock.now() - self._at >= FRESH_S or (wanted.spot, wanted.homes, wanted.anywhere) != self._kind
            )
            if self._found is None or stale or not parties <= set(self._found.domains):
                rows = await self.client.offers_for(wanted)
                self._found = self.client.choose(rows, *want(), domains)
                self._at, self._kind = clock.now(), (wanted.spot, wanted.homes, wanted.anywhere)
            return self._found
