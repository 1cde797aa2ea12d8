"""Which offer a pod is rented from next: of its party's operator, where its volume lies, none that failed just now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from uvcc_console.fleet.cloud.choice import OfferChoice, OfferFilter
from uvcc_console.fleet.cloud.ends import Ends
from uvcc_console.fleet.cloud.stall import Stall
from uvcc_console.fleet.cloud.vendor import Cloud, CloudOffer
from uvcc_console.fleet.cloud.volumes import Volumes
from uvcc_console.fleet.provider import PodRequest
from uvcc_console.fleet.provider_kinds import place_of
from uvcc_engine.contract.errors import ConfigError

BLOCK_S: Final = 600.0


@dataclass
class Candidates:
    """What one run may choose from at one account.

    ``requests``: every pod that was asked for, by its name. ``domains``: which operator each party has; the first pod
    of a party settles it. ``image``: what the first pod was made with, and every other shall be.
    """

    client: Cloud
    fleet: Mapping[str, Any]
    ends: Ends
    volumes: Volumes
    requests: dict[str, PodRequest] = field(default_factory=dict)
    domains: dict[int, str] = field(default_factory=dict)
    image: str = ""
    _blocked: dict[tuple[Any, ...], float] = field(default_factory=dict)
    _stall: Stall | None = None

    def wanted(self, request: PodRequest) -> OfferFilter:
        """What this request asks for. Spot machines only while the policy has replacements left."""
        wanted = OfferFilter.of(self.fleet, request)
        policy = self.fleet.get("spot")
        if not isinstance(policy, Mapping) or not wanted.spot or policy.get("then") == "stop":
            return wanted
        lost = sum(t.spot and t.taken for t in self.ends.tries().values())
        return replace(wanted, spot=lost <= int(policy.get("replace", 1)))

    def price(self, request: PodRequest, offer: CloudOffer) -> float:
        """US dollars an hour for the pod, without its volume."""
        return offer.price(self.wanted(request).disk) or 0.0

    async def look(self, request: PodRequest, *, force: bool = False) -> OfferChoice:
        """What there is to choose from, at most a minute old. Raises ConfigError naming what leaves nothing."""
        if self._stall is None:
            self._stall = Stall(self.client)

        def want() -> tuple[OfferFilter, set[int]]:
            wanted = self.wanted(request)
            wanted = replace(wanted, image=self.image) if self.image else wanted
            homes = {self.volumes.home(name) for name in [*self.requests, request.name]}
            there = tuple(sorted(home for home in homes if home))
            wanted = replace(wanted, homes=there, anywhere=None in homes)
            return wanted, {r.party for r in self.requests.values()} | {request.party}

        return await self._stall.look(want, self.domains, force=force)

    async def next(self, request: PodRequest, *, fresh: bool) -> tuple[CloudOffer, str]:
        """The next offer of this party's operator, and the image; before it has one, of any that no other party has.

        Raises ConfigError where there is none.
        """
        choice = await self.look(request, force=fresh)
        own = self.domains.get(request.party)
        fixed = self.wanted(request).per_party
        if own is None and fixed:
            own = fixed[request.party]
        taken = self.taken(request.party)
        planned = {d for p, d in choice.domains.items() if p != request.party and p not in self.domains}
        first = choice.domains[request.party]
        names = [own] if own else [first, *(n for n in choice.by_provider if n not in planned | {first})]
        now = self.client.clock.now()
        home = self.volumes.home(request.name)
        for name in names:
            if name in taken:
                continue
            for offer in choice.by_provider.get(name, ()):
                if self.volumes.fits(offer, home) and self._blocked.get(offer.key, 0.0) <= now:
                    if offer.once:  # nobody else who rents at the same moment shall try for it
                        self.block(offer)
                    return offer, choice.image
        where = f" in {home}, where its volume lies" if home else ""
        raise ConfigError(f"no further offer for party {request.party} at {own or 'any free provider'}{where}")

    def block(self, offer: CloudOffer) -> None:
        """Try others first for a while; a queue is not to blame for what one of its machines did."""
        if not offer.steady:
            self._blocked[offer.key] = self.client.clock.now() + BLOCK_S

    def taken(self, party: int) -> set[str]:
        """Operators that other parties of this run have, and from accounts of their own those that they asked.

        Nobody's, where all offers are the vendor's own.
        """
        if not self.client.distinct:
            return set()
        taken = {d for p, d in self.domains.items() if p != party}
        if self.ends.party is not None:
            tries = self.ends.all_tries().values()
            taken |= {t.provider for t in tries if t.open and t.provider and place_of(t.base)[0] != party}
        return taken
