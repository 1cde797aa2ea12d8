"""Which pods of the market are ours, and how each try at one comes to a proven end.

Whose a pod is, and which of several the run holds, is decided by ids that are on disk, never by names alone and never
by the order of a list. The market's list, look-up and history may all be late: what they do not show counts as absent
only once they had ``LAG_S`` to show it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from uvcc_console.core import paths
from uvcc_console.core.log import logger
from uvcc_console.fleet.cloud.calls import CloudRefused
from uvcc_console.fleet.cloud.clock import Clock
from uvcc_console.fleet.cloud.intents import Intents, Try, base_of
from uvcc_console.fleet.cloud.vendor import Cloud, CloudPod, EndedPod, PastPod, RentedPod
from uvcc_console.fleet.provider import POD_PREFIX, Pod
from uvcc_console.fleet.provider_kinds import place_of
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UvccError
from uvcc_engine.contract.text import clean

log = logger(__name__)

SETTLE_S = 45.0  # so long a create without an answer is waited for before anything else is tried
LAG_S = 600.0  # so late list, look-up and history may show what there is
GONE_S = LAG_S + 120.0
UNKNOWN_S = 60.0  # so long nobody knows a pod that was shown before, and whose end was asked for
AGAIN_S = 10.0
BELIEVED_S = 45.0  # two looks of the sweep
SAME_PRICE = 0.0005  # US dollars an hour: a price that differs by less is the same one, rounded by somebody
_Trouble = (UnreachableError, CloudRefused)


@dataclass
class _End:
    """What has been seen of one pod since its end was asked for."""

    absent: int = 0
    since: float = 0.0  # when it was last shown, or its end first asked for
    seen: bool = False
    answered: bool = False
    asked: float = float("-inf")
    trouble: str = "it is still listed"


@dataclass
class Ends:
    """The account's pods as one run's folder knows them. ``asking``: names of creates that are under way here.

    ``party``: this account is that one's alone; what the folder tells of the others is not to be judged by it.
    """

    client: Cloud
    run_dir: Path
    party: int | None = None
    asking: set[str] = field(default_factory=set)
    ending: set[str] = field(default_factory=set)  # ids that somebody here is ending
    over: set[str] = field(default_factory=set)  # ids proven gone here, also those that a full disk did not take
    dearer: dict[str, tuple[float, float]] = field(default_factory=dict)  # ids, since when they cost more, how much

    @property
    def clock(self) -> Clock:
        return self.client.clock

    # whose is it?

    def book(self, name: str) -> Intents:
        """The file that tells of a pod of this name: the run's own, or that of another run of this data folder."""
        run = _run(name)
        if run and run != self.run_dir.name:
            other = paths.run_dir(run)
            if Intents.of(other).path.exists():
                return Intents.of(other)
        return Intents.of(self.run_dir)

    def tries(self, prefix: str = "") -> dict[str, Try]:
        """This account's tries of the run."""
        found = self.all_tries(prefix)
        return {n: t for n, t in found.items() if self.party is None or place_of(t.base)[0] == self.party}

    def all_tries(self, prefix: str = "") -> dict[str, Try]:
        """The run's tries, of every account."""
        return Intents.of(self.run_dir).tries(prefix)

    def ours(self, pod: CloudPod, tries: dict[str, Try]) -> bool:
        """Whether a pod whose name has our form is ours: its create is on disk, and no other user's key made it.

        Nothing is created that was not written down before, so a name alone makes nothing ours. Pods of runs that this
        data folder does not know are let through: they are shown, and left alone by whoever asks for a run's fate.
        """
        if not base_of(pod.name):
            return False
        if not tries:
            run = _run(pod.name)
            return run != self.run_dir.name and not paths.run_dir(run).exists()
        users = {t.user for t in tries.values() if t.user}
        return pod.name in tries and (not (pod.user_id and users) or pod.user_id in users)

    async def shown(self, prefix: str) -> list[tuple[CloudPod, dict[str, Try]]]:
        """Listed pods of ours under this prefix that may cost something, each with the tries that its run knows of."""
        known: dict[Path, dict[str, Try]] = {}
        found = []
        for pod in await self.client.pods():
            if not pod.name.startswith(prefix) or not base_of(pod.name) or pod.over:
                continue
            book = self.book(pod.name)
            tries = known.setdefault(book.path, book.tries())
            if self.ours(pod, tries):
                self._see(tries.get(pod.name), pod)
                found.append((pod, tries))
        return found

    def _see(self, t: Try | None, pod: CloudPod) -> None:
        """Write down, once, that the market shows it, and which id it has; and a price that is higher than before.

        Of a pod that runs it is believed once it stands there for ``BELIEVED_S``: a run over its cap is torn down.
        """
        if t is None or t.outcome or (t.id and t.id != pod.id):
            return
        told, now = pod.price_hr or 0.0, self.clock.now()
        if told <= t.price_hr + SAME_PRICE:
            self.dearer.pop(pod.id, None)
            price = {}
        else:
            since, least = self.dearer.setdefault(pod.id, (now, told))
            self.dearer[pod.id] = since, min(least, told)
            price = {"price_hr": min(least, told)} if not t.id or now - since >= BELIEVED_S else {}
        if price or not (t.seen and t.id):
            self._told(t, id=pod.id, user=pod.user_id, seen=True, **price)

    async def waited(self, prefix: str) -> None:
        """Wait for creates without an answer while they are young: until each is shown, or ``SETTLE_S`` old."""
        while True:
            now = self.clock.now()
            young = [
                t.name
                for t in self.tries(prefix).values()
                if t.open and not t.answered and t.name not in self.asking and now - t.asked < SETTLE_S
            ]
            if not young:
                return
            shown = {pod.name for pod, _ in await self.shown(prefix)}
            if set(young) <= shown:
                return
            await self.clock.sleep(5.0)

    async def settled(self, name: str, why: UnreachableError) -> CloudPod:
        """A create without an answer: the list tells, if it shows in time what was made.

        If not, nothing is given up: a pod that still comes of it is found by ``prove`` and ended.
        """
        end = self.clock.now() + SETTLE_S
        while True:
            try:
                found = [p for p, _ in await self.shown(name) if p.name == name]
            except (UnreachableError, CloudRefused):
                found = []
            if found:
                return found[0]
            if self.clock.now() >= end:
                raise UvccError(f"{why.what}; no pod of that name appeared in {SETTLE_S:.0f} s, it is watched on")
            await self.clock.sleep(5.0)

    # what is there?

    async def listing(self, prefix: str, place: Callable[[str], tuple[int, int]]) -> list[Pod]:
        """Pods of ours that may still cost something, the one that a run holds under its request's name.

        Others of the same request show the name of their own try; ``stray`` where the run is known to hold another.
        A pod that has an id and is not shown yet counts as there.
        """
        await self.waited(prefix)
        rows = await self.shown(prefix)
        there: dict[str, list[tuple[CloudPod, Try | None]]] = {}
        held: dict[str, str] = {}
        for pod, tries in rows:
            there.setdefault(base_of(pod.name), []).append((pod, tries.get(pod.name)))
            held |= {t.base: t.id for t in tries.values() if t.held and t.open and t.id}
        for pod, hidden in await self._hidden(prefix, {pod.id for pod, _ in rows}):
            there.setdefault(hidden.base, []).append((pod, hidden))
            held |= {hidden.base: hidden.id} if hidden.held else {}
        found = []
        for base, those in there.items():
            chosen = held.get(base) or _likeliest(those)
            for pod, t in those:
                given_up = bool(t and (t.outcome or t.rejected))
                going = clean(pod.stage)[:200] or "it ends" if pod.dying and t and t.held and not t.ending else ""
                if going and t is not None and not t.taken:
                    self._told(t, taken=True, how=going)
                stray = (given_up or (pod.id != chosen and base in held)) and pod.name not in self.asking
                name = base if pod.id == chosen and not given_up else pod.name
                price = max(pod.price_hr or 0.0, t.price_hr if t else 0.0)
                provider = pod.provider_type or (t.provider if t else "") or self.client.name
                found.append(Pod(name, *place(base), provider, pod.id, price_hr=price, stray=stray, ending=going))
        return found

    async def _hidden(self, prefix: str, listed: set[str]) -> list[tuple[CloudPod, Try]]:
        """Pods with an id that the list does not show, and that may be there all the same."""
        found = []
        past: Sequence[PastPod] | None = None
        for t in self.tries(prefix).values():
            if not t.open or not t.id or t.id in listed:
                continue
            pod = await self.client.pod(t.id)
            if pod is not None and not pod.over:
                found.append((pod, t))
                continue
            if past is None:
                past = await self.client.history()
            item = next((i for i in past if i.id == t.id), None)
            if pod is not None or (item is not None and _told(item)):
                self._gone(t, t.id, item)
            elif not t.seen and self.clock.now() - t.asked < LAG_S:
                found.append((RentedPod(t.id, t.name, t.provider, user_id=t.user), t))
        return found

    # how does it end?

    async def delete(self, pod: Pod) -> None:
        """End every try of this pod (of a pod under a try's own name: that try alone) and prove each end.

        Creates without an answer are waited for while they are young; ``prove`` watches the others. Raises
        UnreachableError where an end could not be proven, ConfigError for a pod that is not ours.
        """
        base = base_of(pod.name) or pod.name
        alone = bool(base_of(pod.name))
        if not base.startswith(POD_PREFIX):
            raise ConfigError(f"{pod.name} is no pod of ours", "it is left alone")
        ended: set[str] = set()
        while True:
            targets, unlisted = await self._targets(pod, base, alone)
            left = {i: name for i, name in targets.items() if i not in ended}
            ends = await asyncio.gather(*(self.end(i, name) for i, name in left.items()), return_exceptions=True)
            for end in ends:
                if isinstance(end, BaseException):
                    raise end
            ended |= set(left)
            if left:
                continue
            if unlisted is not None:
                raise unlisted
            now = self.clock.now()
            young = [
                t
                for t in self.book(f"{base}x000000").tries(base).values()
                if t.base == base and t.open and not t.answered and t.name not in self.asking
            ]
            if alone or not any(now - t.asked < SETTLE_S for t in young):
                return
            await self.clock.sleep(5.0)

    async def _targets(self, pod: Pod, base: str, alone: bool) -> tuple[dict[str, str], UvccError | None]:
        """Ids to end and their names; and what kept the list from being read, which delays nothing that is known."""
        tries = self.book(f"{base}x000000").tries(base)
        known = {t.id: t.name for t in tries.values() if t.base == base and t.open and t.id}
        unlisted: UvccError | None = None
        try:
            known |= {p.id: p.name for p, _ in await self.shown(base) if base_of(p.name) == base}
            if pod.provider_id and pod.provider_id not in {t.id for t in tries.values()} | set(known):
                found = await self.client.pod(pod.provider_id)
                if found is not None and not found.over:
                    if base_of(found.name) != base or not self.ours(found, tries):
                        raise ConfigError(f"{pod.provider_id} is named {found.name}, not {base}", "it is left alone")
                    known[found.id] = found.name
        except _Trouble as e:
            unlisted = e
        if alone:
            known = {i: name for i, name in known.items() if i == pod.provider_id}
        return known, unlisted

    async def end(self, pod_id: str, name: str) -> None:
        """Ask until the pod is proven gone.

        Proven is: absent from the whole list twice in a row, and told to have ended by the history or by its own
        record. Where neither tells, a pod that was shown before counts as gone once list and look-up have not known it
        for ``UNKNOWN_S``, and one that never was shown once they had ``LAG_S`` to show it.
        """
        book = self.book(name)
        t = book.tries().get(name)
        t = t if t is not None and t.id in ("", pod_id) else None
        began = self.clock.now()
        seen = _End(since=began, seen=bool(t and t.seen))
        asked_for = t.asked if t is not None else began
        self.ending.add(pod_id)
        try:
            while self.clock.now() < began + GONE_S:
                try:
                    item = await self._look(pod_id, seen, asked_for, t)
                    if item is not None:
                        return self._gone(t or Try(name, began, began), pod_id, item)
                except _Trouble as e:
                    seen.trouble = e.what  # also 401 and 402: spending stops, deleting goes on
                await self.clock.sleep(3.0 if self.clock.now() < began + 60.0 else 10.0)
        finally:
            self.ending.discard(pod_id)
        raise UnreachableError(f"pod {name} ({pod_id}) is not proven gone: {seen.trouble}", "uvcc pods --sweep goes on")

    async def _look(self, pod_id: str, seen: _End, asked_for: float, t: Try | None) -> PastPod | None:
        """Ask for the end if it is due, look everywhere; what proves the end (an empty item: that nobody knows it)."""
        now = self.clock.now()
        if seen.absent == 0 and now - seen.asked >= AGAIN_S:
            seen.asked = now
            known = await self.client.delete(pod_id)
            if not seen.answered and t is not None and t.id:
                self._told(t, **({"ending": True} if known or not t.held else {"taken": True}))
            seen.answered = True
        if any(p.id == pod_id and not p.over for p in await self.client.pods()):
            seen.absent, seen.since, seen.seen, seen.trouble = 0, now, True, "it is still listed"
            return None
        seen.absent += 1
        if seen.absent < 2:
            return None
        item = next((i for i in await self.client.history() if i.id == pod_id), None)
        if item is not None and _told(item):
            return item
        found = await self.client.pod(pod_id)
        if found is not None and not found.over:
            seen.absent, seen.since, seen.seen, seen.trouble = 0, now, True, "it can still be looked up"
            return None
        if found is not None:
            return item or EndedPod(pod_id)
        seen.trouble = "nobody knows it, and its history does not tell of its end"
        if now - seen.asked >= AGAIN_S and not seen.seen:
            seen.absent = 0  # a market that does not show it yet may not have understood either: ask again
        unknown = now - seen.since >= UNKNOWN_S if seen.seen else now - asked_for >= LAG_S
        return (item or EndedPod(pod_id)) if unknown and seen.answered else None

    def _gone(self, t: Try, pod_id: str, item: PastPod | None) -> None:
        billed = {"billed": item.total_billed_price} if item is not None and item.total_billed_price else {}
        by_itself = {}
        if t.held and not t.ending and item is not None:
            by_itself = {"taken": True, "how": clean(item.how)[:200]}
        self.over.add(pod_id)
        self._told(t, id=pod_id, gone=True, **billed, **by_itself)

    def _told(self, t: Try, **how: object) -> None:
        """Write down what is heard of a try; a full disk keeps no pod from being ended."""
        try:
            self.book(t.name).note(self.clock.now(), name=t.name, **how)
        except UvccError as e:
            log.warning("what is heard of %s is not written down: %s", t.name, e)

    # what is still open?

    async def prove(self, over: Callable[[Try], bool]) -> list[Try]:
        """One look at every open try of the run; returns those that are not proven one way or the other.

        A try that is ``over`` has its pod ended. One without an id is proven absent once list and history have both
        answered, ``LAG_S`` after it was asked for, and show none.
        """
        now = self.clock.now()
        tries = self.tries()
        left = [t for t in tries.values() if t.open and t.name not in self.asking]
        if not left and not [t for t in tries.values() if t.outcome == "gone" and t.billed is None and _fresh(t, now)]:
            return []
        rows = await self.client.pods()
        past = await self.client.history()
        doomed: dict[str, Try] = {}
        for t in left:
            if (pod := _its(t, [r for r in rows if self.ours(r, tries)])) is not None and not pod.over:
                self._see(t, pod)
                doomed |= {pod.id: t} if over(t) else {}
            elif (item := _past(t, past)) is not None and _told(item):
                self._gone(t, item.id, item)
            elif t.id and over(t):
                doomed[t.id] = t
            elif not t.id and now - t.asked >= LAG_S:
                self._told(t, absent=True)
        for t in tries.values():
            if t.outcome == "gone" and t.billed is None and (item := _past(t, past)) is not None:
                self._gone(t, t.id, item)
        todo = [(i, t) for i, t in doomed.items() if i not in self.ending]
        ends = await asyncio.gather(*(self.end(i, t.name) for i, t in todo), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException) and not isinstance(end, UvccError):
                raise end
        return [t for t in self.tries().values() if t.open and t.name not in self.asking and t.id not in self.over]


def _run(name: str) -> str:
    """The run that a try's name belongs to."""
    return base_of(name).removeprefix(POD_PREFIX).rpartition("-")[0]


def _fresh(t: Try, now: float) -> bool:
    """Ended so lately that its bill may still come."""
    return now - t.ended < LAG_S


def _told(item: PastPod) -> bool:
    """The history may tell of pods that live: only a time of its end says that one does not."""
    return bool(item.terminated_at)


def _its(t: Try, rows: Iterable[CloudPod]) -> CloudPod | None:
    """The pod of this try: by its id, or while it has none by its name."""
    return next((p for p in rows if (p.id == t.id if t.id else p.name == t.name)), None)


def _past(t: Try, items: Iterable[PastPod]) -> PastPod | None:
    own = t.user
    return next(
        (i for i in items if (i.id == t.id if t.id else i.name == t.name and (not own or i.user_id in ("", own)))), None
    )


def _likeliest(those: Sequence[tuple[CloudPod, Try | None]]) -> str:
    """The id to go by where no run says which one it holds: one that was not given up, the earliest asked for."""
    return min(those, key=lambda one: _rank(*one))[0].id


def _rank(pod: CloudPod, t: Try | None) -> tuple[bool, bool, bool, float, str]:
    given_up = bool(t and (t.outcome or t.rejected))
    return given_up, pod.dying, t is None, t.asked if t else 0.0, pod.id
