"""A provider for each party: three domains that distrust each other on one account and key distribute no trust.

``fleet: {parties: {P0: {provider: prime, account: a}, P1: {provider: inventory, hosts: ours.yaml}, P2: ...}}``. What
holds for the whole fleet stands beside ``parties``; each party's part is checked by its own kind's model. To the rest
of the console the three are one provider, and one that does not answer keeps no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import Field, create_model, model_validator

from uvcc_console.fleet.provider import (
    AsksHosts,
    Books,
    Caps,
    FunnelStep,
    NoOffer,
    Pod,
    PodRequest,
    Provider,
    Quote,
    Remembers,
    Rents,
    Several,
    TellsEnds,
    TellsSilence,
    TellsWaits,
)
from uvcc_console.fleet.provider_kinds import (
    PARTIES_KIND,
    PARTY_NAMES,
    FleetSettings,
    ProviderKind,
    SpotPolicy,
    Strict,
    kind_of,
    place_of,
    provider_for,
    sections,
)
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UvccError
from uvcc_engine.contract.job.topology import PARTIES

_WHOLE: Final = (
    "wait_for_stock",
    "keep_pods",
    "replace_lost",
    "reserve",
    "attach_prefix",
    "packages",
    "wheels",
    "per_party",
    "ssh_key",
)
T = TypeVar("T")


class PartyFleets(Strict):
    """One fleet for each of the three parties."""

    P0: FleetSettings
    P1: FleetSettings
    P2: FleetSettings


class PartiesFleet(FleetSettings):
    """``parties``: where each party's pods come from; what stands beside it holds for those that say nothing else."""

    provider: str = PARTIES_KIND
    parties: PartyFleets

    @model_validator(mode="after")
    def _each_for_itself(self) -> PartiesFleet:
        if self.provider != PARTIES_KIND or self.per_party:
            raise ValueError("each of fleet.parties names its own provider: leave out fleet.provider and per_party")
        if self.fallbacks:
            raise ValueError("fallbacks are one party's: write them in fleet.parties, under P0, P1 or P2")
        usual = FleetSettings()
        for name in PARTY_NAMES:
            part: FleetSettings = getattr(self.parties, name)
            for key in _WHOLE:
                if getattr(part, key) != getattr(usual, key):
                    raise ValueError(f"{key} holds for the whole fleet: write it beside parties, not in {name}")
        return self

    @property
    def kind(self) -> str:
        kinds = {self.of(party).kind for party in range(PARTIES)}
        return kinds.pop() if len(kinds) == 1 else PARTIES_KIND

    @property
    def where(self) -> str:
        named = (getattr(self.parties, name) for name in PARTY_NAMES)
        return ", ".join(label(n, p.model_dump()) for n, p in zip(PARTY_NAMES, named, strict=True))

    @property
    def replacements(self) -> int:
        """What the parties' policies allow together, and ``replace_lost`` where any goes on after that."""
        policies = [getattr(self.parties, name).spot or self.spot for name in PARTY_NAMES]
        stops = [isinstance(p, SpotPolicy) and p.then == "stop" for p in policies]
        spot = sum(p.replace for p in policies if isinstance(p, SpotPolicy))
        return spot + (0 if all(stops) else self.replace_lost)

    def of(self, party: int) -> FleetSettings:
        part = sections(self.model_dump(mode="json"))[party]
        own: FleetSettings = getattr(self.parties, PARTY_NAMES[party])
        return type(own).model_validate({k: v for k, v in part.items() if k in type(own).model_fields})


def label(party: str, part: Mapping[str, Any]) -> str:
    """``P0 prime/lab-a``: a party, its provider, and its account where it has one of its own."""
    account = str(part.get("account") or "")
    return f"{party} {part.get('provider')}" + (f"/{account}" if account else "")


def settings_for(kinds: Sequence[str]) -> type[FleetSettings]:
    """The model of a ``fleet`` section whose parties have these providers. Raises ConfigError for an unknown one."""
    if PARTIES_KIND in kinds:
        raise ConfigError(
            f"fleet.parties.P{list(kinds).index(PARTIES_KIND)} is {PARTIES_KIND!r}", "it wants one provider"
        )
    own = {name: (kind_of(kind).settings, Field()) for name, kind in zip(PARTY_NAMES, kinds, strict=True)}
    unknown: Any = own
    parties: Any = create_model("PartyFleets", __base__=PartyFleets, **unknown)
    return create_model("PartiesFleet", __base__=PartiesFleet, parties=(parties, Field()))


def make(fleet: Mapping[str, Any], run_dir: Path, ttl_s: float) -> PartyProviders:
    """Raises ConfigError naming the party whose provider cannot be had."""
    made: list[Provider] = []
    for name, part in zip(PARTY_NAMES, sections(fleet), strict=True):
        try:
            made.append(provider_for(part, run_dir, ttl_s=ttl_s))
        except ConfigError as e:
            raise ConfigError(f"{label(name, part)}: {e.what}", e.hint) from e
    names = [label(name, part) for name, part in zip(PARTY_NAMES, sections(fleet), strict=True)]
    return PartyProviders(made, names)


class PartyProviders:
    """Three providers as one: whatever concerns a pod goes to its party's."""

    name = PARTIES_KIND

    def __init__(self, providers: Sequence[Provider], labels: Sequence[str]) -> None:
        self._providers = providers
        self._labels = labels

    def each(self) -> Sequence[tuple[str, Provider]]:
        return list(zip(self._labels, self._providers, strict=True))

    def _of(self, pod: str) -> Provider:
        return self._providers[min(place_of(pod)[0], PARTIES - 1)]

    async def quote(self, requests: Sequence[PodRequest]) -> Quote:
        """All that has to be paid, and ``parts`` for what each party pays from its own wallet."""
        asked = {p: [r for r in requests if r.party == p] for p in range(PARTIES)}
        used = [p for p, those in asked.items() if those]
        quotes = await self._all([self._providers[p].quote(asked[p]) for p in used], used)
        funnel = [
            FunnelStep(f"{self._labels[p]}: {s.constraint}", s.left, s.removed, s.example)
            for p, q in zip(used, quotes, strict=True)
            for s in q.funnel
        ]
        by_name = {line.request.name: line for q in quotes for line in q.lines}
        lines = tuple(by_name[r.name] for r in requests if r.name in by_name)
        parts = {self._labels[p]: q for p, q in zip(used, quotes, strict=True)}
        return Quote(lines, max(q.at for q in quotes), tuple(funnel), parts=parts)

    async def create(self, request: PodRequest) -> Pod:
        return await self._of(request.name).create(request)

    async def wait_ready(self, pod: Pod) -> Pod:
        return await self._of(pod.name).wait_ready(pod)

    async def delete(self, pod: Pod) -> None:
        await self._of(pod.name).delete(pod)

    async def list(self, prefix: str) -> list[Pod]:
        """Each party's pods, as its own provider lists them.

        Where one does not answer, the pods that may be there by our own account are listed with that as their doubt.
        Raises its error where nothing is known of what it has.
        """
        answers = await asyncio.gather(*(p.list(prefix) for p in self._providers), return_exceptions=True)
        found: list[Pod] = []
        for party, (provider, answer) in enumerate(zip(self._providers, answers, strict=True)):
            if not isinstance(answer, BaseException):
                found += [pod for pod in answer if place_of(pod.name)[0] == party]
                continue
            if not isinstance(answer, UvccError) or not isinstance(provider, Remembers):
                raise answer
            why = f"{self._labels[party]}: {answer.what}"
            names = {name for name in provider.begun(prefix) if place_of(name)[0] == party}
            found += [Pod(n, party, place_of(n)[1], provider.name, "", doubt=why) for n in sorted(names)]
        return found

    async def close(self) -> None:
        await asyncio.gather(*(p.close() for p in self._providers))

    # what it remembers, pays, and asks

    def begun(self, prefix: str) -> set[str]:
        """Names under which something may exist, at any of the three."""
        found: set[str] = set()
        for party, provider in enumerate(self._providers):
            if isinstance(provider, Remembers):
                found |= {name for name in provider.begun(prefix) if place_of(name)[0] == party}
        return found

    def taken(self, name: str) -> str:
        """Why a pod is gone, as its party's provider tells."""
        provider = self._providers[min(place_of(name)[0], len(self._providers) - 1)]
        return provider.taken(name) if isinstance(provider, TellsEnds) else ""

    def waits(self, name: str) -> str:
        """What was last heard of a pod that is waited for, from its party's provider."""
        provider = self._of(name)
        return provider.waits(name) if isinstance(provider, TellsWaits) else ""

    def silence(self) -> tuple[str, str]:
        """Of the first party whose provider is silent, with its name."""
        for label, provider in zip(self._labels, self._providers, strict=True):
            what, hint = provider.silence() if isinstance(provider, TellsSilence) else ("", "")
            if what:
                return f"{label}: {what}", hint
        return "", ""

    @property
    def caps(self) -> Caps | None:
        return next((p.caps for p in self._providers if isinstance(p, Rents)), None)

    @caps.setter
    def caps(self, caps: Caps | None) -> None:
        """The caps hold for all three together: each keeps them against the books of the whole run."""
        for provider in self._providers:
            if isinstance(provider, Rents):
                provider.caps = caps

    def books(self) -> Books:
        """The books of the whole run, which whoever rents keeps in one place."""
        return next((p.books() for p in self._providers if isinstance(p, Rents)), Books())

    async def prove(self, *, ended: bool, keep: Collection[str] = ()) -> Sequence[str]:
        """Every party's creates are looked at, also where another's provider does not answer."""
        rents = [n for n, p in enumerate(self._providers) if isinstance(p, Rents)]
        looks = [p.prove(ended=ended, keep=keep) for p in self._providers if isinstance(p, Rents)]
        return sorted({name for names in await self._all(looks, rents) for name in names})

    @property
    def silent(self) -> Mapping[str, UvccError]:
        return {h: e for p in self._providers if isinstance(p, AsksHosts) for h, e in p.silent.items()}

    async def _all(self, calls: Sequence[Awaitable[T]], parties: Sequence[int]) -> Sequence[T]:
        """All answers. Every call is seen through; then the first error is raised, with its party's name."""
        answers = await asyncio.gather(*calls, return_exceptions=True)
        found: list[T] = []
        for party, answer in zip(parties, answers, strict=True):
            if isinstance(answer, NoOffer):
                what = f"{self._labels[party]}: {answer.what}"
                raise NoOffer(what, answer.hint, passing=answer.passing) from answer
            if isinstance(answer, ConfigError):
                raise ConfigError(f"{self._labels[party]}: {answer.what}", answer.hint) from answer
            if isinstance(answer, UnreachableError):
                raise UnreachableError(f"{self._labels[party]}: {answer.what}", answer.hint) from answer
            if isinstance(answer, BaseException):
                raise answer
            found.append(answer)
        return found


def parts_of(provider: Provider) -> Sequence[Provider]:
    """The providers behind one, each of which can fail alone; itself where it is but one."""
    return [part for _, part in provider.each()] if isinstance(provider, Several) else [provider]


KIND = ProviderKind(PARTIES_KIND, PartiesFleet, make)
