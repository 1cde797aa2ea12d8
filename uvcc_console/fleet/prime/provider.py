"""Renting pods as a saga: what may cost money is on disk first, looked up when unsure, and proven gone at the end.

A pod's name on the market is ``<request name>x<six letters>``: one per try, so that a create whose answer was lost can
be told from the next one. The rest of the console sees the request's name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from uvcc_console.fleet.prime import offers as market
from uvcc_console.fleet.prime.client import PrimeClient, PrimeRefused
from uvcc_console.fleet.prime.intents import Intents, attempt_name, base_of
from uvcc_console.fleet.prime.models import ApiPod, Offer
from uvcc_console.fleet.prime.ready import NotReady, Readiness
from uvcc_console.fleet.prime.runkey import RunKey
from uvcc_console.fleet.provider import Pod, PodRequest, Quote, QuoteLine
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UvccError

FRESH_S = 60.0
BLOCK_S = 600.0
SETTLE_S = 45.0
PRICE_SLACK = 1.02
TRIES = 6
GONE_S = 180.0


@dataclass
class _Market:
    """The market at one moment, as it was chosen from."""

    choice: market.Choice
    at: float


class PrimeProvider:
    """Quotes, creates, waits and deletes. Parties go to distinct providers, and every pod of a party to the same."""

    name = "prime"

    def __init__(
        self,
        client: PrimeClient,
        fleet: Mapping[str, Any],
        run_dir: Path,
        *,
        readiness: Readiness | None = None,
    ) -> None:
        self._client = client
        self._clock = client.clock
        self._fleet = fleet
        self._run_dir = run_dir
        self._intents = Intents.of(run_dir)
        self._readiness = readiness or Readiness(client, run_dir, str(fleet.get("ssh_key", "")))
        self._market: _Market | None = None
        self._requests: dict[str, PodRequest] = {}
        self._offers: dict[str, Offer] = {}
        self._domains: dict[int, str] = {}
        self._image = ""
        self._rented: set[str] = set()
        self._blocked: dict[tuple[Any, ...], float] = {}
        self._asking: set[str] = set()  # creates under way here: who asked for them settles them
        self._first: dict[int, asyncio.Lock] = {}
        self._listing = asyncio.Lock()
        self._key = RunKey(client, run_dir, str(fleet.get("ssh_key", "")))

    # quote

    async def quote(self, requests: Sequence[PodRequest]) -> Quote:
        """The cheapest fleet on distinct providers, with the funnel. Raises ConfigError naming what leaves nothing."""
        self._requests |= {r.name: r for r in requests}
        await self._permitted()
        choice = (await self._look(requests[0], force=True)).choice
        lines = []
        for request in requests:
            provider = choice.domains[request.party]
            offer = choice.by_provider[provider][0]
            price = offer.price(self._wanted(request).disk) or 0.0
            row = {"offer": offer.label, "image": choice.image, "gpu": offer.gpu_type, "gpus": offer.gpu_count}
            lines.append(QuoteLine(request, provider, offer.region, price, row))
        return Quote(tuple(lines), self._clock.now(), choice.funnel, await self._client.wallet())

    async def _permitted(self) -> None:
        try:
            lacking = (await self._client.whoami()).lacks()
        except PrimeRefused as e:
            if e.kind == "auth":
                raise
            return
        if lacking:
            raise ConfigError(f"the API key lacks {', '.join(lacking)}", "make one with these permissions")

    def _wanted(self, request: PodRequest) -> market.Wanted:
        return market.Wanted.of(self._fleet, request)

    async def _look(self, request: PodRequest, *, force: bool = False) -> _Market:
        """The market, at most a minute old."""
        async with self._listing:
            now = self._clock.now()
            if self._market is not None and not force and now - self._market.at < FRESH_S:
                return self._market
            wanted = self._wanted(request)
            rows = await self._client.offers(gpu_type=wanted.gpu, gpu_count=wanted.gpus)
            parties = {r.party for r in self._requests.values()} | {request.party}
            if self._image:
                wanted = replace(wanted, image=self._image)
            found = market.choose(rows, wanted, parties, self._domains)
            self._market = _Market(found, self._clock.now())
            return self._market

    # create

    async def create(self, request: PodRequest) -> Pod:
        """Adopt the pod if a try of an earlier process succeeded, else rent one, offer after offer.

        The first pod of a party settles its provider; the others follow. Raises PrimeRefused where money or permission
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
        """The living pod of this request, were it left by a crash or by a create that was never answered."""
        await self._settled(request.name)
        pods = [p for p in await self._client.pods() if not p.dying]
        self._know(request, pods)
        alive = [p for p in pods if base_of(p.name) == request.name]
        if not alive:
            return None
        keep, *extra = sorted(alive, key=lambda p: (p.created_at, p.id))
        for pod in extra:
            await self._end(pod)
        self._domains.setdefault(request.party, keep.provider_type)
        self._rented.add(request.name)
        return self._pod(request, keep)

    def _know(self, request: PodRequest, pods: Sequence[ApiPod]) -> None:
        """Which provider each party of this run has already, of pods that another process made."""
        run = request.name.rpartition("-")[0] + "-"
        for p in pods:
            base = base_of(p.name)
            if base.startswith(run) and base not in self._requests:
                self._rented.add(base)
                self._requests.setdefault(base, replace(request, name=base, party=_place(base)[0]))
                self._domains.setdefault(_place(base)[0], p.provider_type)

    async def _settled(self, prefix: str) -> None:
        """Wait until all that was asked for shows in the list, or would have by now: the list lags behind creates."""
        while waiting := {n: t for n, t in self._intents.open(prefix).items() if n not in self._asking}:
            now = self._clock.now()
            shown = {p.name for p in await self._client.pods()}
            hidden = {name: now - ts for name, ts in waiting.items() if name not in shown}
            for name, age in hidden.items():
                if age >= SETTLE_S:
                    self._intents.note(now, name=name, absent=True)
            if all(age >= SETTLE_S for age in hidden.values()):
                return
            await self._clock.sleep(5.0)

    async def _rent(self, request: PodRequest) -> Pod:
        reasons: list[str] = []
        for attempt in range(TRIES):
            try:
                offer, image = await self._candidate(request, fresh=attempt > 0)
            except ConfigError as e:
                reasons.append(str(e))
                break
            try:
                return await self._try(request, offer, image)
            except PrimeRefused as e:
                if e.stops_spending:
                    raise
                reasons.append(f"{offer.label}: {e.what}")
            except UvccError as e:
                reasons.append(f"{offer.label}: {e.what}")
            self._blocked[offer.key] = self._clock.now() + BLOCK_S
        raise UvccError(f"no offer worked for {request.name}: " + "; ".join(reasons), "try later, or loosen the fleet")

    async def _candidate(self, request: PodRequest, *, fresh: bool) -> tuple[Offer, str]:
        """The next offer of this party's provider; before it has one, of any provider that no other party has."""
        choice = (await self._look(request, force=fresh)).choice
        own = self._domains.get(request.party)
        fixed = self._wanted(request).per_party
        if own is None and fixed:
            own = fixed[request.party]
        taken = {d for p, d in self._domains.items() if p != request.party}
        planned = {d for p, d in choice.domains.items() if p != request.party and p not in self._domains}
        first = choice.domains[request.party]
        names = [own] if own else [first, *(n for n in choice.by_provider if n not in planned | {first})]
        now = self._clock.now()
        for name in names:
            if name in taken:
                continue
            for offer in choice.by_provider.get(name, ()):
                if self._blocked.get(offer.key, 0.0) <= now:
                    return offer, choice.image
        raise ConfigError(f"no further offer for party {request.party} at {own or 'any free provider'}")

    async def _try(self, request: PodRequest, offer: Offer, image: str) -> Pod:
        """One create. What comes back is kept only if it is what was asked for, at the price that was quoted."""
        wanted = self._wanted(request)
        price = offer.price(wanted.disk) or 0.0
        cap = min(price * PRICE_SLACK, request.max_price_hr or float("inf"))
        name = attempt_name(request.name)
        key_id = await self._key.id()
        body = market.request_body(offer, wanted, name=name, image=image, key_id=key_id, cap=round(cap, 4))
        self._asking.add(name)
        try:
            self._intents.note(self._clock.now(), name=name, offer=offer.label, price_hr=price)
            made = await self._client.create(body)
        except UnreachableError as e:
            made = await self._settle(name, e)
        except PrimeRefused as e:
            self._intents.note(self._clock.now(), name=name, refused=e.kind)
            raise
        finally:
            self._asking.discard(name)
        self._intents.note(self._clock.now(), name=name, id=made.id)
        got = made.price_hr if made.price_hr is not None else price
        others = {d for p, d in self._domains.items() if p != request.party}
        wrong = ""
        if made.provider_type and made.provider_type != offer.provider:
            wrong = f"came from {made.provider_type}, not from {offer.provider}"
        elif (made.provider_type or offer.provider) in others:
            wrong = f"{made.provider_type} already hosts another party"
        elif got > cap + 1e-9:
            wrong = f"costs {got:.4f} $/h, quoted were {price:.4f}"
        if wrong:
            await self._end(made)
            raise UvccError(wrong)
        self._domains.setdefault(request.party, offer.provider)
        self._image = image
        self._rented.add(request.name)
        self._offers[request.name] = offer
        return self._pod(request, made, offer)

    async def _settle(self, name: str, why: UnreachableError) -> ApiPod:
        """A create without an answer: the list tells, once it has had time to show what was made."""
        end = self._clock.now() + SETTLE_S
        while True:
            try:
                found = [p for p in await self._client.pods() if p.name == name and not p.over]
            except UnreachableError:
                found = []
            if found:
                return found[0]
            if self._clock.now() >= end:
                self._intents.note(self._clock.now(), name=name, absent=True)
                raise UvccError(f"{why.what}; no pod of that name appeared in {SETTLE_S:.0f} s")
            await self._clock.sleep(5.0)

    def _pod(self, request: PodRequest, found: ApiPod, offer: Offer | None = None) -> Pod:
        price = found.price_hr if found.price_hr is not None else (offer.price(request.disk_gib) if offer else 0.0)
        provider = found.provider_type or (offer.provider if offer else self.name)
        region = offer.region if offer else ""
        return Pod(
            request.name, request.party, request.replica, provider, found.id, price_hr=price or 0.0, region=region
        )

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
                return replace(pod, user=at.user, host=at.host, port=at.port)
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
                self._blocked[offer.key] = self._clock.now() + BLOCK_S
            pod = await self._rent(request)
        raise UvccError(f"pod {pod.name} never became ready: " + "; ".join(reasons), "try later, or another provider")

    def _unsettle(self, pod: Pod) -> None:
        """A party without any pod is free to go to another provider."""
        self._rented.discard(pod.name)
        if not any(self._requests[name].party == pod.party for name in self._rented if name in self._requests):
            self._domains.pop(pod.party, None)

    # end

    async def delete(self, pod: Pod) -> None:
        """Delete every try of this pod and prove each gone. Raises UnreachableError where that could not be proven.

        A pod that ``list`` shows under the name of its own try is one beside the good one: that try alone is deleted.
        """
        if base_of(pod.name):
            return await self._delete_try(pod)
        base = pod.name
        if not base.startswith("uvcc-"):
            raise ConfigError(f"{pod.name} is no pod of ours", "it is left alone")
        await self._settled(base)
        ours = {p.id: p for p in await self._client.pods() if base_of(p.name) == base and not p.over}
        if pod.provider_id and pod.provider_id not in ours:
            found = await self._client.pod(pod.provider_id)
            if found is not None and not found.over:
                if base_of(found.name) != base:
                    raise ConfigError(f"{pod.provider_id} is named {found.name}, not {base}", "it is left alone")
                ours[found.id] = found
        for found in ours.values():
            await self._end(found)
        self._unsettle(pod)
        await self._key.forget()

    async def _delete_try(self, pod: Pod) -> None:
        for found in await self._client.pods():
            if found.id == pod.provider_id and found.name == pod.name and not found.over:
                await self._end(found)

    async def _end(self, pod: ApiPod) -> None:
        """Ask until it is absent from the whole list twice, and in the history or unknown to the API."""
        end = self._clock.now() + GONE_S
        absent = 0
        trouble = "it is still listed"
        while self._clock.now() < end:
            try:
                if absent == 0:
                    await self._client.delete(pod.id)
                listed = any(p.id == pod.id and not p.over for p in await self._client.pods())
                absent = 0 if listed else absent + 1
                if absent >= 2 and await self._in_history(pod.id):
                    self._intents.note(self._clock.now(), name=pod.name, gone=True)
                    return
            except (UnreachableError, PrimeRefused) as e:
                trouble = e.what  # also 401 and 402: spending stops, deleting goes on
            await self._clock.sleep(3.0)
        raise UnreachableError(f"pod {pod.name} ({pod.id}) is not proven gone: {trouble}", "uvcc pods --sweep goes on")

    async def _in_history(self, pod_id: str) -> bool:
        if any(item.id == pod_id for item in await self._client.history()):
            return True
        found = await self._client.pod(pod_id)
        return found is not None and found.status == "TERMINATED"

    async def list(self, prefix: str) -> list[Pod]:
        """Pods of ours that may still cost something, under their requests' names; a second try shows its own name."""
        await self._settled(prefix)
        found: list[Pod] = []
        seen: set[str] = set()
        for p in sorted(await self._client.pods(), key=lambda p: (p.dying, p.created_at, p.id)):
            base = base_of(p.name)
            if not base.startswith(prefix) or not base or p.over:
                continue
            party, replica = _place(base)
            name = p.name if base in seen else base
            seen.add(base)
            found.append(Pod(name, party, replica, p.provider_type or self.name, p.id, price_hr=p.price_hr or 0.0))
        return found

    async def close(self) -> None:
        await self._client.close()


def _place(base: str) -> tuple[int, int]:
    """Party and replica out of ``...-p0r1``."""
    party, _, replica = base.rpartition("-")[2].removeprefix("p").partition("r")
    return int(party), int(replica)
