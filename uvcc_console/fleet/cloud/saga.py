"""Renting pods as a saga: what may cost money is on disk first, looked up when unsure, and proven gone at the end.

A pod's name on the market is ``<request name>x<six letters>``: one per try, so that a create whose answer was lost can
be told from the next one. The rest of the console sees the request's name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from uvcc_console.core.log import logger
from uvcc_console.fleet.cloud.calls import CloudRefused
from uvcc_console.fleet.cloud.candidates import Candidates
from uvcc_console.fleet.cloud.ends import LAG_S, SETTLE_S, Ends
from uvcc_console.fleet.cloud.guard import Guard, OverCap, unfit, wrong
from uvcc_console.fleet.cloud.intents import Intents, attempt_name, base_of
from uvcc_console.fleet.cloud.ready import NotReady, Readiness
from uvcc_console.fleet.cloud.runkey import RunKey
from uvcc_console.fleet.cloud.vendor import Cloud, CloudOffer
from uvcc_console.fleet.cloud.volumes import Volumes
from uvcc_console.fleet.provider import Books, Caps, NoOffer, Pod, PodRequest, Quote, QuoteLine, TellsSilence
from uvcc_console.fleet.provider_kinds import place_of
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UvccError
from uvcc_engine.contract.text import counted

log = logger(__name__)

PRICE_SLACK = 1.02
TRIES = 6
Names = list[str]
UNANSWERED = 2  # creates of one pod that may be without an answer at a time, since each may cost
LOOK_S = 15.0


class CloudProvider:
    """Quotes, creates, waits and deletes. Parties go to distinct providers, and every pod of a party to the same."""

    def __init__(
        self,
        client: Cloud,
        fleet: Mapping[str, Any],
        run_dir: Path,
        *,
        readiness: Readiness | None = None,
    ) -> None:
        self.name = client.name
        self._client = client
        self._clock = client.clock
        self._fleet = fleet
        self._run_dir = run_dir
        self._intents = Intents.of(run_dir)
        self._readiness = readiness or Readiness(client, run_dir, str(fleet.get("ssh_key", "")))
        self._offers: dict[str, CloudOffer] = {}
        self._rented: set[str] = set()
        self.ends = Ends(client, run_dir, fleet.get("party"))
        self._asking = self.ends.asking  # creates under way here: who asked for them settles them
        self._guard = Guard(self.ends)
        self.volumes = Volumes.of(client, fleet, run_dir)
        self.market = Candidates(client, fleet, self.ends, self.volumes)
        self._requests, self._domains = self.market.requests, self.market.domains
        self._first: dict[int, asyncio.Lock] = {}
        self._key = RunKey(client, run_dir, str(fleet.get("ssh_key", "")))

    @property
    def caps(self) -> Caps | None:
        return self._guard.caps

    @caps.setter
    def caps(self, caps: Caps | None) -> None:
        self._guard.caps = caps

    # quote

    async def quote(self, requests: Sequence[PodRequest]) -> Quote:
        """The cheapest fleet on distinct providers, with the funnel. Raises ConfigError naming what leaves nothing."""
        self._requests |= {r.name: r for r in requests}
        await self._client.permitted()
        await self.volumes.find([r.name for r in requests])
        choice = await self.market.look(requests[0], force=True)
        lines = []
        left = {name: list(those) for name, those in choice.by_provider.items()}
        for request in requests:
            provider = choice.domains[request.party]
            home = self.volumes.home(request.name)
            offer = next((o for o in left[provider] if self.volumes.fits(o, home)), None)
            if offer is None:
                what = f"{provider} offers {counted(len(choice.by_provider[provider]), 'machine')} that fit"
                what += f", for a pod whose volume lies in {home}" if home else ""
                raise NoOffer(
                    f"{what}, {counted(len(requests), 'pod')} are wanted", "loosen a constraint, or take fewer pods"
                )
            if offer.once:
                left[provider].remove(offer)
            price = offer.price(self.market.wanted(request).disk) or 0.0
            row = {"offer": offer.label, "image": choice.image, "gpu": offer.gpu_type, "gpus": offer.gpu_count}
            price += self.volumes.hourly(request.name, offer)
            row |= self.volumes.quoted(request.name, offer)
            lines.append(QuoteLine(request, provider, offer.region, price, row))
        funnel = choice.funnel
        if self._client.where:
            funnel = (replace(funnel[0], constraint=f"asked at {self._client.where}"), *funnel)
        return Quote(tuple(lines), self._clock.now(), funnel, await self._client.wallet())

    # create

    async def create(self, request: PodRequest) -> Pod:
        """Adopt the pod if a try of an earlier process succeeded, else rent one, offer after offer.

        The first pod of a party settles its provider; the others follow. Raises CloudRefused where money or permission
        is missing, UvccError with every offer's reason when all were tried.
        """
        self._requests[request.name] = request
        if (mine := await self._adopt(request)) is not None:
            return mine
        lock = self._first.setdefault(request.party, asyncio.Lock())
        async with lock:
            if request.party not in self._domains:
                return await self._rent(request)
        return await self._rent(request)

    async def _adopt(self, request: PodRequest) -> Pod | None:
        """The living pod of this request, were it left by a crash or by a create that was never answered.

        The one that the run holds, by its id; where none is held, the one that was asked for first.
        """
        await self.ends.waited(request.name)
        self._know(request)
        pods = [p for p in await self.ends.listing(request.name, place_of) if p.name == request.name]
        known = {t.id: t.name for t in self.ends.tries(request.name).values() if t.open and t.id}
        if not pods or pods[0].stray or pods[0].provider_id not in known:
            return None
        found = await self._client.pod(pods[0].provider_id)
        if found is not None and found.dying:
            return None
        domains = self._domains if self._client.distinct else {}
        if why := unfit(request, pods[0], domains, PRICE_SLACK):
            name = known[pods[0].provider_id]
            self._intents.note(self._clock.now(), name=name, rejected=why)
            await self.ends.end(pods[0].provider_id, name)
            return None
        self._domains.setdefault(request.party, pods[0].provider)
        self._rented.add(request.name)
        await self._hold(request.name, pods[0].provider_id)
        return replace(pods[0], party=request.party, replica=request.replica)

    async def _hold(self, base: str, pod_id: str) -> None:
        """From now on the run uses this pod, and no other of this name; what else there is of it goes."""
        tries = [t for t in self.ends.tries(base).values() if t.base == base and t.open]
        for t in tries:
            if t.id == pod_id and not t.held:
                self._intents.note(self._clock.now(), name=t.name, held=True)
            elif t.id != pod_id and t.held:
                self._intents.note(self._clock.now(), name=t.name, released=True)
        for pod in await self.ends.listing(base, place_of):
            if base_of(pod.name) == base and pod.provider_id != pod_id:
                await self.ends.delete(pod)

    def _know(self, request: PodRequest) -> None:
        """Which provider each party of this run has already, of pods that another process made."""
        run = request.name.rpartition("-")[0] + "-"
        for t in self.ends.all_tries(run).values():
            if t.base and t.open and t.answered and t.provider and t.base not in self._requests:
                self._rented.add(t.base)
                self._requests.setdefault(t.base, replace(request, name=t.base, party=place_of(t.base)[0]))
                self._domains.setdefault(place_of(t.base)[0], t.provider)

    async def _rent(self, request: PodRequest) -> Pod:
        reasons: list[str] = []
        for attempt in range(TRIES):
            if attempt and (late := await self._answers(request)) is not None:
                return late
            try:
                offer, image = await self.market.next(request, fresh=attempt > 0)
            except ConfigError as e:
                reasons.append(str(e))
                break
            try:
                late = await self._room(
                    request, self.market.price(request, offer) + self.volumes.newly(request.name, offer)
                )
                return late or await self._try(request, offer, image)
            except OverCap:
                raise
            except CloudRefused as e:
                if e.stops_spending:
                    raise
                reasons.append(f"{offer.label}: {e.what}")
            except UvccError as e:
                reasons.append(f"{offer.label}: {e.what}")
            self.market.block(offer)
        raise UvccError(f"no offer worked for {request.name}: " + "; ".join(reasons), "try later, or loosen the fleet")

    async def _answers(self, request: PodRequest) -> Pod | None:
        """Before another create: a pod of an earlier one that shows up after all, or nothing while few are unknown.

        Raises UnreachableError where the provider does not tell for longer than its lists may lag.
        """
        end = self._clock.now() + LAG_S + SETTLE_S
        while True:
            tries = self.ends.tries(request.name).values()
            unknown = {t.name for t in tries if t.base == request.name and t.open and not t.answered} - self._asking
            if not unknown:
                return None
            try:
                await self.ends.prove(self._guard.is_stray)
                if any(t.name in unknown and t.answered for t in self.ends.tries(request.name).values()):
                    return await self._adopt(request)
            except (UnreachableError, CloudRefused) as e:  # unknown they stay
                log.warning("creates without an answer are not proven: %s", e, pod=request.name)
            if len(unknown) < UNANSWERED:
                return None
            if self._clock.now() >= end:
                what = f"{', '.join(sorted(unknown))} may still exist: {self.name} tells neither way"
                raise UnreachableError(what, "uvcc pods --sweep looks again; uvcc resume goes on")
            await self._clock.sleep(LOOK_S)

    async def _room(self, request: PodRequest, price: float) -> Pod | None:
        """Wait until the caps allow one more pod at this price. Raises OverCap where they will not.

        What may still cost counts, also creates without an answer; for these it waits until they are proven, or until
        one of this request has brought a pod after all, which is returned.
        """
        end = self._clock.now() + LAG_S + SETTLE_S
        while self._guard.over_cap(price):
            if not self._guard.loose() or self._clock.now() >= end:
                self._guard.refuse_over_cap(price)
            await self._clock.sleep(LOOK_S)
            try:
                await self.ends.prove(self._guard.is_stray)
                mine = [t for t in self.ends.tries(request.name).values() if t.base == request.name and t.open]
                if any(t.answered and not t.rejected for t in mine):
                    return await self._adopt(request)
            except (UnreachableError, CloudRefused) as e:
                log.warning("creates without an answer are not proven: %s", e, pod=request.name)
        return None

    async def _try(self, request: PodRequest, offer: CloudOffer, image: str) -> Pod:
        """One create. What comes back is kept only if it is what was asked for, at the price that was quoted."""
        wanted = self.market.wanted(request)
        price = self.market.price(request, offer)
        cap = min(price * PRICE_SLACK, request.max_price_hr or float("inf"))
        name = attempt_name(request.name)
        key_id = await self._key.id()
        if self.volumes.wanted:
            wanted = replace(wanted, volume=await self.volumes.ensure(request.name, offer))
        self._guard.refuse_over_cap(price)  # asked and written down without anything in between
        self._asking.add(name)
        try:
            spot = {"spot": True} if wanted.spot else {}
            told = {"offer": offer.label, "provider": offer.provider, "price_hr": price, **spot}
            self._intents.note(self._clock.now(), name=name, **told)
            made = await self._client.rent(offer, wanted, name=name, image=image, key_id=key_id, cap=round(cap, 4))
            if not made.id or made.name not in ("", name):
                of = f"with another pod, {made.name[:80]!r}" if made.id else "without an id"
                raise UnreachableError(f"the create was answered {of}", "its outcome is unknown")
        except UnreachableError as e:
            made = await self.ends.settled(name, e)
        except CloudRefused as e:
            self._intents.note(self._clock.now(), name=name, refused=e.kind)
            raise
        finally:
            self._asking.discard(name)
        named = made.price_hr or price  # a market that names no price yet shall not make it free
        got = max(price, named)  # nor one that names less than its offer: the bill decides
        self._intents.note(self._clock.now(), name=name, id=made.id, user=made.user_id, price_hr=got)
        others = self.market.taken(request.party)
        if why := wrong(made, offer, named, price, cap, others):
            self._intents.note(self._clock.now(), name=name, rejected=why)
            await self.ends.end(made.id, name)
            raise UvccError(why)
        self._intents.note(self._clock.now(), name=name, held=True)
        self._domains.setdefault(request.party, offer.provider)
        self.market.image = image
        self._rented.add(request.name)
        self._offers[request.name] = offer
        provider = made.provider_type or offer.provider
        place = (request.name, request.party, request.replica)
        return Pod(*place, provider, made.id, price_hr=got, region=offer.region)

    # ready

    async def wait_ready(self, pod: Pod) -> Pod:
        """Wait for a real login, and on GPU pods for ``nvidia-smi``. A pod that fails is deleted and replaced.

        Raises UvccError with the reasons when no replacement worked either.
        """
        reasons: list[str] = []
        for _ in range(TRIES):
            offer = self._offers.get(pod.name)
            try:
                at = await self._readiness.wait(pod, offer)
                price = await self._same_price(pod)
                key = self._readiness.host_key(at)
                await self.volumes.hold(pod.name, pod.provider_id)
                there = replace(pod, user=at.user, host=at.host, port=at.port, jump=at.jump)
                return replace(there, price_hr=price, host_key=key)
            except NotReady as e:
                reasons.append(f"{pod.provider} {pod.provider_id[:8]}: {e.what}")
            if pod.name not in self._rented:  # not made here: it was taken over, and is its owner's to judge
                break
            await self.delete(pod)
            self._unsettle(pod)
            request = self._requests.get(pod.name)
            if request is None:
                break
            if offer is not None:
                self.market.block(offer)
            try:
                pod = await self._rent(request)
            except (OverCap, CloudRefused):
                raise
            except UvccError as e:
                why = "; ".join([*reasons, e.what])
                raise UvccError(f"pod {pod.name} never became ready: {why}", e.hint) from e
        raise UvccError(f"pod {pod.name} never became ready: " + "; ".join(reasons), "try later, or another provider")

    def _unsettle(self, pod: Pod) -> None:
        """A party without any pod is free to go to another provider."""
        self._rented.discard(pod.name)
        if not any(self._requests[name].party == pod.party for name in self._rented if name in self._requests):
            self._domains.pop(pod.party, None)

    async def _same_price(self, pod: Pod) -> float:
        """What the pod costs now that it runs. Raises NotReady where that is more than was agreed to."""
        request = self._requests.get(pod.name)
        try:
            found = await self._client.pod(pod.provider_id)
        except (UnreachableError, CloudRefused):
            found = None
        if found is None or not found.price_hr or pod.price_hr <= 0:
            return pod.price_hr
        cap = min(pod.price_hr * PRICE_SLACK, (request.max_price_hr if request else None) or float("inf"))
        if found.price_hr > cap + 1e-9 and pod.name in self._rented:
            self._intents.note(self._clock.now(), name=found.name, price_hr=found.price_hr)
            raise NotReady(f"costs {found.price_hr:.4f} $/h now, {pod.price_hr:.4f} were agreed to")
        return max(pod.price_hr, found.price_hr)

    # end

    async def delete(self, pod: Pod) -> None:
        """Delete every try of this pod and prove each gone. Raises UnreachableError where that could not be proven.

        A pod that ``list`` shows under the name of its own try is one beside the good one: that try alone is deleted.
        """
        await self.ends.delete(pod)
        if not base_of(pod.name):
            self._unsettle(pod)
            await self._key.forget()

    async def list(self, prefix: str) -> list[Pod]:
        """Pods of ours that may still cost something, under their requests' names; a second try shows its own name."""
        return await self.ends.listing(prefix, place_of)

    def begun(self, prefix: str) -> set[str]:
        """Pods that may exist: nothing is asked for that is not on disk, and what is proven over is told there."""
        return {t.base for t in self.ends.tries(prefix).values() if t.open and t.base}

    def taken(self, name: str) -> str:
        """Why a pod of this name is gone; see ``TellsEnds``."""
        tries = sorted((t for t in self.ends.tries(name).values() if t.base == name and t.taken), key=lambda t: t.asked)
        if not tries:
            return ""
        last = tries[-1]
        kind = "a spot machine, was taken away" if last.spot else "ended without having been asked to"
        return f"{kind} by {last.provider or self.name}" + (f" ({last.how})" if last.how else "")

    def waits(self, name: str) -> str:
        """What was last heard of a pod that is waited for; see ``TellsWaits``."""
        return self._readiness.said.get(name, "")

    def silence(self) -> tuple[str, str]:
        """See ``TellsSilence``."""
        return self._client.silence() if isinstance(self._client, TellsSilence) else ("", "")

    def books(self) -> Books:
        """What the run has cost until now."""
        return self._guard.books()

    async def prove(self, *, ended: bool, keep: Collection[str] = ()) -> Names:
        """One look at every try that is not proven yet; see ``Rents``."""
        left = await self.ends.prove(lambda t: (ended and t.base not in keep) or self._guard.is_stray(t))
        if ended and not left:
            await self._key.forget()
        stay = [t.name for t in left if not (t.held and (t.base in keep or not ended))]
        return [*stay, *await self.volumes.prove(ended=ended, keep=keep)]

    async def close(self) -> None:
        await self._client.close()
