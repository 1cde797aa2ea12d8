"""Volumes for checkpoints: each pod of a run may have one that outlives it. They cost money, so each is a saga as well.

A volume is written down before it is asked for, under a name that was never used before; looked up by that name when an
answer is lost; held from the moment that a pod came up with it; and proven gone at the run's end: absent from the
whole list twice. The pod that comes in a lost one's place gets the volume of the same place in the fleet.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from uvcc_console.core.log import logger
from uvcc_console.fleet.cloud.calls import CloudRefused
from uvcc_console.fleet.cloud.choice import RentedVolume
from uvcc_console.fleet.cloud.ends import GONE_S, LAG_S, SETTLE_S
from uvcc_console.fleet.cloud.intents import VOLUMES_FILE, Intents, Try, attempt_name
from uvcc_console.fleet.cloud.vendor import Cloud, RentsVolumes
from uvcc_console.fleet.provider_kinds import place_of
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UvccError

log = logger(__name__)

MONTH_H: Final = 730.0
LOOK_S: Final = 5.0
UNANSWERED: Final = 2  # creates of one pod's volume that may be without an answer at a time


@dataclass(frozen=True, slots=True)
class Volumes:
    """One run's volumes at one account. ``size_gb`` 0: its pods have none."""

    client: Cloud
    run_dir: Path
    size_gb: int = 0
    keep: bool = False
    price: float | None = None
    party: int | None = None

    @classmethod
    def of(cls, client: Cloud, fleet: Mapping[str, Any], run_dir: Path) -> Volumes:
        """Out of a profile's ``fleet`` section. Raises ConfigError where this vendor has none, or none so small."""
        found = fleet.get("volume")
        said = found if isinstance(found, Mapping) else {}
        size = int(said.get("size_gb", 0))
        if size and not isinstance(client, RentsVolumes):
            raise ConfigError(f"{client.name} has no volumes here", "leave out fleet.volume")
        if size and isinstance(client, RentsVolumes) and size < client.least_volume:
            what = f"fleet.volume.size_gb is {size}, {client.name}'s smallest volume has {client.least_volume}"
            raise ConfigError(what, f"write {client.least_volume}")
        return cls(client, run_dir, size, bool(said.get("keep")), said.get("price"), fleet.get("party"))

    @property
    def hourly(self) -> float:
        """US dollars an hour for each volume of this size."""
        if not self.size_gb or not isinstance(self.client, RentsVolumes):
            return 0.0
        monthly = self.client.volume_price if self.price is None else self.price
        return monthly * self.size_gb / MONTH_H

    @property
    def bound(self) -> bool:
        return isinstance(self.client, RentsVolumes) and self.client.volume_bound

    @property
    def _vendor(self) -> RentsVolumes:
        if not isinstance(self.client, RentsVolumes):
            raise ConfigError(f"{self.client.name} has no volumes here", "leave out fleet.volume")
        return self.client

    @property
    def _book(self) -> Intents:
        return Intents(self.run_dir / VOLUMES_FILE)

    def _note(self, name: str, **fields: object) -> None:
        self._book.note(self.client.clock.now(), name=name, **fields)

    def tries(self, base: str = "") -> list[Try]:
        """Volumes of this account's pods that may cost something; ``base``: of this one pod."""
        found = [t for t in self._book.tries(base).values() if t.open and (not base or t.base == base)]
        return [t for t in found if self.party is None or place_of(t.base)[0] == self.party]

    def home(self, base: str) -> str | None:
        """The region that this pod's checkpoints bind it to; None where they bind it to none."""
        held = next((t for t in self.tries(base) if t.held), None)
        return held.region if held is not None and self.bound else None

    def newly(self, base: str) -> float:
        """US dollars an hour that this pod's volume costs beside what the books count already."""
        return self.hourly if self.size_gb and not self.tries(base) else 0.0

    # made and used

    async def ensure(self, base: str, region: str) -> RentedVolume:
        """The volume of this pod, in the region of the offer that is taken; made if there is none.

        Raises CloudRefused where the vendor says no, UvccError where nobody knows what came of the create.
        """
        found = await self._there(base)
        if found is not None and (not self.bound or found.region == region):
            return found
        tries = self.tries(base)
        if len(unknown := [t.name for t in tries if not t.id]) >= UNANSWERED:
            what = f"volumes {', '.join(unknown)} may exist: {self.client.name} tells neither way"
            raise UnreachableError(what, "uvcc pods --sweep looks again; uvcc resume goes on")
        for t in (t for t in tries if t.id):  # of an offer that came to nothing, elsewhere
            if t.held and self.bound and t.region != region:
                raise UvccError(f"the volume of {base} lies in {t.region}, not in {region}", "wait for stock there")
            await self._end(t)
        return await self._made(base, region)

    async def _there(self, base: str) -> RentedVolume | None:
        """What is there already, also of a create without an answer; the one that a pod had comes first."""
        tries = sorted(self.tries(base), key=lambda t: not t.held)
        rows = await self._vendor.volumes() if tries else []
        for t in tries:
            row = _row(t, rows)
            if row is not None and not row.dying:
                if not t.id or not t.seen:
                    self._note(t.name, id=row.id, region=row.region, seen=True)
                return row
            if t.id and row is None and self.client.clock.now() - t.asked < LAG_S:
                return RentedVolume(t.id, t.name, t.region)  # the list may be late
            if t.held:
                log.warning("the volume with its checkpoints is gone: %s", t.name, pod=base)
                self._note(t.name, gone=True, taken=True)
        return None

    async def _made(self, base: str, region: str) -> RentedVolume:
        name = attempt_name(base)
        self._note(
            name,
            offer=f"{self.size_gb} GB",
            provider=self.client.name,
            price_hr=self.hourly,
            region=region,
            kept=self.keep,
        )
        try:
            made = await self._vendor.create_volume(name, self.size_gb, region)
            if not made.id:
                raise UnreachableError("the volume was answered without an id", "its outcome is unknown")
        except UnreachableError as e:
            made = await self._settled(name, e)
        except CloudRefused as e:
            self._note(name, refused=e.kind)
            raise
        self._note(name, id=made.id)
        if self.bound and made.region not in ("", region):
            self._note(name, rejected=True)
            await self._end(next(t for t in self.tries(base) if t.name == name))
            raise UvccError(f"the volume came in {made.region}, not in {region}")
        return made

    async def _settled(self, name: str, why: UnreachableError) -> RentedVolume:
        end = self.client.clock.now() + SETTLE_S
        while True:
            try:
                found = [v for v in await self._vendor.volumes() if v.name == name]
            except (UnreachableError, CloudRefused):
                found = []
            if found:
                return found[0]
            if self.client.clock.now() >= end:
                raise UvccError(f"{why.what}; no volume of that name appeared in {SETTLE_S:.0f} s, it is watched on")
            await self.client.clock.sleep(LOOK_S)

    def hold(self, base: str) -> None:
        """This pod is up, and its volume in it: from now on there may be checkpoints."""
        tries = self.tries(base) if self.size_gb else []
        if tries and not any(t.held for t in tries):
            self._note(next((t.name for t in tries if t.id), tries[0].name), held=True)

    # and ended

    async def prove(self, *, ended: bool, keep: Collection[str] = ()) -> Sequence[str]:
        """End what shall not be there, with proof; returns names of volumes that may still be.

        Of a run that has ``ended`` every volume goes, but those of pods that are kept, and with ``volume.keep`` those
        that a pod had. Of one that lives nothing goes: a pod may come again.
        """
        doomed = [t for t in self.tries() if ended and t.base not in keep and not (self.keep and t.held)]
        left = []
        for t in doomed:
            try:
                await self._end(t)
            except (UnreachableError, CloudRefused) as e:
                log.warning("volume %s is not proven gone: %s", t.name, e.what)
                left.append(t.name)
        return left

    async def _end(self, t: Try) -> None:
        """Ask until it is absent from the whole list twice. Raises UnreachableError where that cannot be proven.

        One that the list never showed counts as absent once it had ``LAG_S`` to show it; without an id it is looked for
        by its name.
        """
        clock, vendor = self.client.clock, self._vendor
        began, absent, said, seen = clock.now(), 0, "it is still listed", bool(t.seen)
        while clock.now() < began + GONE_S:
            try:
                row = _row(t, await vendor.volumes())
                wanted = row.id if row is not None else t.id
                if row is not None:
                    absent, said, seen = 0, "it is still listed", True
                if wanted and (absent == 0 or not seen):
                    await vendor.delete_volume(wanted)
                absent += row is None
                late = not seen and clock.now() - t.asked < LAG_S
                if absent >= 2 and late and not t.id:
                    raise UnreachableError(f"volume {t.name} was never answered", "uvcc pods --sweep looks again")
                if absent >= 2 and not late:
                    self._note(t.name, **({"gone": True} if t.id or wanted else {"absent": True}))
                    return
            except CloudRefused as e:  # a pod that ends may still have it
                said = e.what
            await clock.sleep(LOOK_S)
        raise UnreachableError(f"volume {t.name} ({t.id}) is not proven gone: {said}", "uvcc pods --sweep goes on")


def _row(t: Try, rows: Sequence[RentedVolume]) -> RentedVolume | None:
    """The volume of this try: by its id, or while it has none by its name."""
    return next((v for v in rows if (v.id == t.id if t.id else v.name == t.name)), None)
