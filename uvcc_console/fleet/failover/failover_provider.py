"""One provider after another for the same pods: where one has no stock, no quota or no answer, the next is asked.

``fleet.fallbacks`` lists what differs from the section that it stands in. At any time one of them is the chosen one,
and only that one creates: the choice moves on, on disk first, only while every create of these pods is proven to have
come to nothing. So there are never two fleets for one party, whenever the console dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from uvcc_console.core.log import logger
from uvcc_console.fleet.by_party import parts_of
from uvcc_console.fleet.cloud.calls import CloudRefused
from uvcc_console.fleet.cloud.ends import LAG_S, SETTLE_S
from uvcc_console.fleet.cloud.guard import OverCap
from uvcc_console.fleet.cloud.intents import Try
from uvcc_console.fleet.cloud.saga import LOOK_S, CloudProvider
from uvcc_console.fleet.failover.failover_choice import FILE, label, read_choice
from uvcc_console.fleet.provider import Books, Caps, FunnelStep, NoOffer, Pod, PodRequest, Provider, Quote
from uvcc_console.fleet.provider_kinds import alternatives, kind_of
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UvccError
from uvcc_engine.contract.run_files.files import append_synced

log = logger(__name__)

PROOF_S: Final = LAG_S + SETTLE_S + 60.0


def make(section: Mapping[str, Any], run_dir: Path, ttl_s: float) -> FailoverProvider:
    """Raises ConfigError where any of the list cannot be had: better now than when it is needed."""
    made: list[tuple[dict[str, Any], CloudProvider]] = []
    for one in alternatives(section):
        try:
            provider = kind_of(str(one.get("provider"))).make(one, run_dir, ttl_s)
        except ConfigError as e:
            raise ConfigError(f"fleet.fallbacks, {label(one)}: {e.what}", e.hint) from e
        if not isinstance(provider, CloudProvider):
            what = f"fleet.fallbacks: {label(one)} does not write down what it is about to rent"
            raise ConfigError(what, "take one that rents: prime, runpod, lambda, vast, slurm, kubernetes, skypilot")
        made.append((one, provider))
    return FailoverProvider(made, run_dir, int(section.get("party", -1)), ttl_s)


def listen(provider: Provider, tell: Callable[[str], None]) -> None:
    """Have every move to another provider told."""
    for part in parts_of(provider):
        if isinstance(part, FailoverProvider):
            part.tell = tell


class FailoverProvider:
    """A list of providers as one. ``party``: whose pods these are, -1 for a whole fleet's; ``ttl_s``: the run's
    life, which a wallet has to last for."""

    def __init__(
        self,
        those: Sequence[tuple[Mapping[str, Any], CloudProvider]],
        run_dir: Path,
        party: int,
        ttl_s: float = 3600.0,
    ) -> None:
        self._ttl_s = ttl_s
        self._sections = [section for section, _ in those]
        self._providers = [provider for _, provider in those]
        self._run_dir, self._party = run_dir, party
        self.name = self.current.name
        self._requests: dict[str, PodRequest] = {}
        self._moving = asyncio.Lock()
        self._busy = 0
        self._quiet = asyncio.Condition()
        self.tell: Callable[[str], None] = lambda text: None

    @property
    def _chosen(self) -> int:
        """As the run's folder has it: the run's other processes see a move at once."""
        return read_choice(self._run_dir, self._party, len(self._sections))

    @property
    def current(self) -> CloudProvider:
        """The one that is asked now."""
        return self._providers[self._chosen]

    def _as(self, choice: int, request: PodRequest) -> PodRequest:
        """The request in the words of one of the list: names of GPUs, images and regions are each vendor's own."""
        if choice == 0:
            return request
        s = self._sections[choice]
        gpu, regions = str(s.get("gpu", "")), s.get("regions") or [""]
        return replace(
            request,
            gpu=gpu,
            gpu_count=int(s.get("gpus", 1)) if gpu else 0,
            image=str(s.get("image", "")),
            region=str(regions[0]),
            want_provider="",
            max_price_hr=float(s.get("max_price", 0.0)) or None,
            spot=bool(s.get("spot", False)),
            disk_gib=int(s.get("disk", 0)),
        )

    def _open(self) -> list[Try]:
        """Creates of these pods that may cost something, whoever of the list was asked."""
        return [*(t for t in self.current.ends.tries().values() if t.open), *self.current.volumes.tries()]

    async def quote(self, requests: Sequence[PodRequest]) -> Quote:
        """The first quote of the list; nobody else's once something may exist. Raises NoOffer with every reason."""
        self._requests |= {r.name: r for r in requests}
        if self._open():
            return await self.current.quote([self._as(self._chosen, r) for r in requests])
        reasons: list[tuple[str, UvccError]] = []
        for choice, section in enumerate(self._sections):
            try:
                found = await self._affordable(choice, requests)
            except (NoOffer, UnreachableError, CloudRefused) as e:
                reasons.append((label(section), e))
                continue
            said = [f"{name}: {e.what}" for name, e in reasons]
            self._choose(choice, "; ".join(said))
            steps = [FunnelStep(why, len(self._sections) - n, 1) for n, why in enumerate(said, 1)]
            return replace(found, funnel=(*steps, *found.funnel))
        passing = any(not isinstance(e, NoOffer) or e.passing for _, e in reasons)
        what = "; ".join(f"{name}: {e.what}" for name, e in reasons)
        raise NoOffer(what, "add another to fleet.fallbacks, or loosen a constraint", passing=passing)

    async def _affordable(self, choice: int, requests: Sequence[PodRequest]) -> Quote:
        """What one of the list asks, within the run's caps and its own wallet: each of the list has another.

        Raises NoOffer where the price or the wallet does not allow it, and what a quote raises.
        """
        found = await self._providers[choice].quote([self._as(choice, r) for r in requests])
        caps, books = self.caps, self.books()
        hourly = found.hourly
        left = hourly * self._ttl_s / 3600.0
        if caps is not None:
            left = min(left, max(0.0, caps.total - books.spent))
            if hourly > caps.hourly + 1e-9:
                what = f"costs {hourly:.2f} $/h, limits.hourly is {caps.hourly:.2f}"
                raise NoOffer(what, "raise the cap or take fewer pods", passing=False)
        if found.wallet is not None and found.wallet < left:
            what = f"its wallet holds {found.wallet:.2f} $, the run may cost {left:.2f}"
            raise NoOffer(what, "top it up, or lower limits.total or limits.ttl", passing=False)
        return found

    def _choose(self, choice: int, why: str) -> None:
        if choice == self._chosen:
            return
        before = label(self._sections[self._chosen])
        row = {"ts": round(self.current.ends.clock.now(), 3), "party": self._party, "choice": choice, "why": why[:2048]}
        append_synced(self._run_dir / FILE, row, "free disk space; no pod was created")
        self.name = self.current.name
        whose = f"party {self._party}" if self._party >= 0 else "the fleet"
        self.tell(f"{whose} goes to {label(self._sections[choice])} instead of {before}: {why}")

    async def create(self, request: PodRequest) -> Pod:
        """From the chosen one; where it cannot, from the next, once nothing of this one is left."""
        self._requests[request.name] = request
        return await self._where_it_can(lambda n: self._providers[n].create(self._as(n, request)))

    async def wait_ready(self, pod: Pod) -> Pod:
        """Wait for a login; a pod that never became ready, nor any in its place, is rented from the next."""
        began = self._chosen

        async def act(choice: int) -> Pod:
            mine = pod
            if choice != began:
                mine = await self._providers[choice].create(self._as(choice, self._requests[pod.name]))
            return await self._providers[choice].wait_ready(mine)

        return await self._where_it_can(act)

    async def _where_it_can(self, act: Callable[[int], Any]) -> Pod:
        while True:
            choice = self._chosen
            self._busy += 1
            try:
                found: Pod = await act(choice)
                return found
            except OverCap:
                raise
            except UvccError as e:
                error = e
            finally:
                self._busy -= 1
                async with self._quiet:
                    self._quiet.notify_all()
            async with self._moving:
                if self._chosen == choice:
                    await self._move(choice, error)

    async def _move(self, choice: int, error: UvccError) -> None:
        """Choose the next. Raises the error where there is none, or where something of these pods may exist."""
        if choice + 1 >= len(self._sections):
            raise error
        async with self._quiet:
            await self._quiet.wait_for(lambda: self._busy == 0)
        end = self.current.ends.clock.now() + PROOF_S
        while left := self._open():
            here = label(self._sections[choice])
            if any(t.held and not t.rejected for t in left):
                pods = any(t.held and not t.rejected and t.open for t in self.current.ends.tries().values())
                what = "runs pods of this fleet" if pods else "has a volume with this fleet's checkpoints"
                why = f"{error.what}; no other provider is asked, {here} {what}"
                raise UvccError(why, error.hint) from error
            try:
                unproven = await self.current.prove(ended=True)
            except (UnreachableError, CloudRefused) as e:
                log.warning("creates are not proven: %s", e)
                unproven = [t.name for t in left]
            if unproven and self.current.ends.clock.now() >= end:
                why = f"{error.what}; no other provider is asked, {', '.join(unproven)} may still exist at {here}"
                raise UnreachableError(why, "uvcc pods --sweep goes on") from error
            if unproven:
                await self.current.ends.clock.sleep(LOOK_S)
        await self._next(choice, error)

    async def _next(self, choice: int, error: UvccError) -> None:
        """Choose the next that offers it within caps and wallet; who was not quoted yet is, before anything is rented.

        Raises the error, with every reason, where there is none.
        """
        said = [error.what]
        for following in range(choice + 1, len(self._sections)):
            try:
                await self._affordable(following, list(self._requests.values()))
            except (NoOffer, UnreachableError, CloudRefused) as e:
                said.append(f"{label(self._sections[following])}: {e.what}")
                continue
            return self._choose(following, "; ".join(said))
        raise UvccError("; ".join(said), error.hint) from error

    async def delete(self, pod: Pod) -> None:
        await self.current.delete(pod)

    async def list(self, prefix: str) -> list[Pod]:
        """Pods of the chosen one; of those before it every create is proven to have come to nothing."""
        return await self.current.list(prefix)

    def begun(self, prefix: str) -> set[str]:
        """Names under which something may exist."""
        return self.current.begun(prefix)

    def taken(self, name: str) -> str:
        """Why a pod is gone; see ``TellsEnds``."""
        return self.current.taken(name)

    def waits(self, name: str) -> str:
        """What was last heard of a pod that is waited for; see ``TellsWaits``."""
        return self.current.waits(name)

    def silence(self) -> tuple[str, str]:
        """Of the first that is silent: also one that is only asked for its price; see ``TellsSilence``."""
        return next((said for p in self._providers if (said := p.silence())[0]), ("", ""))

    @property
    def caps(self) -> Caps | None:
        return self.current.caps

    @caps.setter
    def caps(self, caps: Caps | None) -> None:
        for provider in self._providers:
            provider.caps = caps

    def books(self) -> Books:
        """What the run has cost, whoever was paid."""
        return self.current.books()

    async def prove(self, *, ended: bool, keep: Collection[str] = ()) -> Sequence[str]:
        """One look at what is not proven yet; see ``Rents``."""
        return await self.current.prove(ended=ended, keep=keep)

    async def close(self) -> None:
        await asyncio.gather(*(p.close() for p in self._providers))
