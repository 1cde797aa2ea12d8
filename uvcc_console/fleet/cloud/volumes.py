"""Volumes for checkpoints: each pod of a run may have one that outlives it. They cost money, so each is a saga as well.

A volume is written down before it is asked for, under a name that was never used before; looked up by that name when an
answer is lost; held from the moment that a pod came up with it; and proven gone at the run's end: absent from the
whole list twice. The pod that comes in a lost one's place gets the volume of the same place in the fleet.

A volume that the profile names (``fleet.volume.name``) is its owner's: it is looked up, mounted and left alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from uvcc_console.core.log import logger
from uvcc_console.fleet.cloud.calls import CloudRefused
from uvcc_console.fleet.cloud.choice import RentedVolume, VolumePlace
from uvcc_console.fleet.cloud.ends import GONE_S, LAG_S, SETTLE_S
from uvcc_console.fleet.cloud.intents import VOLUMES_FILE, Intents, Try, attempt_name
from uvcc_console.fleet.cloud.vendor import Cloud, RentsVolumes
from uvcc_console.fleet.provider import NoOffer
from uvcc_console.fleet.provider_kinds import place_of
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UvccError

log = logger(__name__)

MONTH_H: Final = 730.0
LOOK_S: Final = 5.0
USABLE_S: Final = 300.0  # so long a new volume may take until a pod can have it
DEARER: Final = 1.02
UNANSWERED: Final = 2  # creates of one pod's volume that may be without an answer at a time
MOUNT_LOOKS: Final = 6


@dataclass(frozen=True, slots=True)
class Volumes:
    """One run's volumes at one account. Without ``size_gb`` and ``name`` its pods have none.

    ``name``: of volumes that are there already, ``{pod}`` in it stands for the pod's place, like ``p0r0``. ``mount``:
    where the pods shall have it, "" for the provider's own place. ``price``: US dollars for a GB and month, where the
    vendor's is not to be taken.
    """

    client: Cloud
    run_dir: Path
    size_gb: int = 0
    keep: bool = False
    price: float | None = None
    party: int | None = None
    name: str = ""
    mount: str = ""
    _named: dict[str, RentedVolume] = field(default_factory=dict)

    @classmethod
    def of(cls, client: Cloud, fleet: Mapping[str, Any], run_dir: Path) -> Volumes:
        """Out of a profile's ``fleet`` section. Raises ConfigError where this vendor has none, or none so small."""
        found = fleet.get("volume")
        said = found if isinstance(found, Mapping) else {}
        size, name = int(said.get("size_gb", 0)), str(said.get("name", ""))
        if (size or name) and not isinstance(client, RentsVolumes):
            raise ConfigError(f"{client.name} has no volumes here", "leave out fleet.volume")
        if size and isinstance(client, RentsVolumes) and size < client.least_volume:
            what = f"fleet.volume.size_gb is {size}, {client.name}'s smallest volume has {client.least_volume}"
            raise ConfigError(what, f"write {client.least_volume}")
        keep, price, mount = bool(said.get("keep")), said.get("price"), str(said.get("mount", ""))
        return cls(client, run_dir, size, keep, price, fleet.get("party"), name, mount)

    @property
    def wanted(self) -> bool:
        return bool(self.size_gb or self.name)

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
        """Volumes of this account's pods that the run made and that may cost something; ``base``: of this one pod."""
        return [t for t in self._all(base) if not t.given]

    def _all(self, base: str = "") -> list[Try]:
        found = [t for t in self._book.tries(base).values() if t.open and (not base or t.base == base)]
        return [t for t in found if self.party is None or place_of(t.base)[0] == self.party]

    # where, and for how much

    def fits(self, offer: Any, home: str | None) -> bool:
        """Whether a pod from this offer can have its volume, which lies in ``home`` where that binds it."""
        if not self.wanted:
            return True
        place = self._vendor.volume_at(offer, 0 if home else self.size_gb)
        return place is not None and (not home or place.region == home)

    def home(self, base: str) -> str | None:
        """The region that this pod's checkpoints bind it to; None where they bind it to none."""
        if base in self._named:
            return self._named[base].region or None
        held = next((t for t in self.tries(base) if t.held), None)
        return (held.region or None) if held is not None else None

    def _costs(self, place: VolumePlace | None) -> float:
        """US dollars an hour."""
        if place is None:
            return 0.0
        return (place.price if self.price is None else self.price) * place.size_gb / MONTH_H

    def hourly(self, base: str, offer: Any) -> float:
        """US dollars an hour for the volume of this pod, were it from this offer.

        One that the profile names costs its owner, whether this run is there or not.
        """
        if not self.size_gb:
            return 0.0
        there = [t.price_hr for t in self.tries(base)]
        return sum(there) if there else self._costs(self._vendor.volume_at(offer, self.size_gb))

    def newly(self, base: str, offer: Any) -> float:
        """US dollars an hour that this pod's volume costs beside what the books count already."""
        return self.hourly(base, offer) if self.size_gb and not self.tries(base) else 0.0

    def quoted(self, base: str, offer: Any) -> dict[str, Any]:
        """What a quote says of it."""
        if self.name:
            return {"volume": self._called(base)}
        if not self.size_gb:
            return {}
        return {"volume_gb": self.size_gb, "volume_hr": round(self.hourly(base, offer), 4)}

    # one that is there already

    def _called(self, base: str) -> str:
        party, replica = place_of(base)
        return self.name.replace("{pod}", f"p{party}r{replica}")

    async def find(self, bases: Sequence[str]) -> None:
        """Look up the volumes that the profile names. Raises NoOffer for one that is not there, or there twice."""
        missing = [base for base in bases if base not in self._named] if self.name else []
        rows = await self._vendor.volumes() if missing else []
        for base in missing:
            name = self._called(base)
            found = [v for v in rows if v.name == name and not v.dying]
            if len(found) != 1:
                what = f"{self.client.name} has {len(found) or 'no'} volume{'s' * (len(found) > 1)} named {name}"
                raise NoOffer(what, "fleet.volume.name names one that is there", passing=False)
            self._named[base] = replace(found[0], region=await self._vendor.whereabouts(found[0]))

    # made and used

    async def ensure(self, base: str, offer: Any) -> RentedVolume:
        """The volume of this pod, where a pod of the offer that is taken can have it; made if there is none.

        Raises CloudRefused where the vendor says no, UvccError where nobody knows what came of the create.
        """
        if self.name:
            await self.find([base])
            return await self._usable(self._named[base])
        here = self._vendor.volume_at(offer, 0)
        found = await self._there(base)
        if found is not None and here is not None and found.region in ("", here.region):
            return await self._usable(found)
        tries = self.tries(base)
        if len(unknown := [t.name for t in tries if not t.id]) >= UNANSWERED:
            what = f"volumes {', '.join(unknown)} may exist: {self.client.name} tells neither way"
            raise UnreachableError(what, "uvcc pods --sweep looks again; uvcc resume goes on")
        for t in (t for t in tries if t.id):  # of an offer that came to nothing, elsewhere
            if t.held and (here is None or t.region != here.region):
                raise UvccError(f"the volume of {base} lies in {t.region}, not where {offer.label} is", "wait for it")
            await self._end(t)
        place = self._vendor.volume_at(offer, self.size_gb)
        if place is None:
            raise UvccError(f"no volume of {self.size_gb} GB can be made for {offer.label}")
        return await self._usable(await self._made(base, place))

    async def _usable(self, volume: RentedVolume) -> RentedVolume:
        """Wait until a pod can have it. Raises UvccError where that takes too long, or never comes."""
        end = self.client.clock.now() + USABLE_S
        while not volume.ready:
            if volume.dying or self.client.clock.now() >= end:
                raise UvccError(f"the volume {volume.name} is not ready for a pod", "another offer is tried")
            await self.client.clock.sleep(LOOK_S)
            row = next((v for v in await self._vendor.volumes() if v.id == volume.id), None)
            volume = replace(row, region=row.region or volume.region) if row is not None else volume
        return volume

    async def _there(self, base: str) -> RentedVolume | None:
        """What is there already, also of a create without an answer; the one that a pod had comes first."""
        tries = sorted(self.tries(base), key=lambda t: not t.held)
        rows = await self._vendor.volumes() if tries else []
        for t in tries:
            row = self._row(t, rows)
            if row is not None and not row.dying:
                row = replace(row, region=row.region or t.region)
                if not t.id or not t.seen:
                    self._note(t.name, id=row.id, region=row.region, seen=True)
                return row
            if t.id and row is None and self.client.clock.now() - t.asked < LAG_S:
                return RentedVolume(t.id, self._vendor.volume_name(t.name), t.region)  # the list may be late
            if t.held:
                log.warning("the volume with its checkpoints is gone: %s", t.name, pod=base)
                self._note(t.name, gone=True, taken=True)
        return None

    async def _made(self, base: str, place: VolumePlace) -> RentedVolume:
        name, hourly = attempt_name(base), self._costs(place)
        told = {"offer": f"{place.size_gb} GB", "provider": self.client.name, "price_hr": hourly}
        self._note(name, **told, region=place.region, kept=self.keep)
        try:
            made = await self._vendor.create_volume(self._vendor.volume_name(name), place)
            if not made.id:
                raise UnreachableError("the volume was answered without an id", "its outcome is unknown")
        except UnreachableError as e:
            made = await self._settled(name, e)
        except CloudRefused as e:
            self._note(name, refused=e.kind)
            raise
        costs = max(hourly, made.price_hr or 0.0)
        self._note(name, id=made.id, price_hr=costs)
        why = f"came in {made.region}, not in {place.region}" if made.region not in ("", place.region) else ""
        why = f"costs {costs:.4f} $/h, quoted were {hourly:.4f}" if costs > hourly * DEARER + 1e-9 else why
        if why:
            self._note(name, rejected=True)
            await self._end(next(t for t in self.tries(base) if t.name == name))
            raise UvccError(f"the volume {why}")
        return replace(made, region=made.region or place.region)

    async def _settled(self, name: str, why: UnreachableError) -> RentedVolume:
        end = self.client.clock.now() + SETTLE_S
        while True:
            try:
                found = [v for v in await self._vendor.volumes() if v.name == self._vendor.volume_name(name)]
            except (UnreachableError, CloudRefused):
                found = []
            if found:
                return found[0]
            if self.client.clock.now() >= end:
                raise UvccError(f"{why.what}; no volume of that name appeared in {SETTLE_S:.0f} s, it is watched on")
            await self.client.clock.sleep(LOOK_S)

    async def hold(self, base: str, pod_id: str) -> None:
        """This pod is up, and its volume in it: from now on there may be checkpoints. Where they go is written down."""
        if not self.wanted:
            return
        if self.name:
            await self.find([base])
            volume = self._named[base]
            known = next((t for t in self._all(base) if t.given and t.id == volume.id), None)
            name = known.name if known is not None else attempt_name(base)
            told = {"id": volume.id, "region": volume.region, "provider": self.client.name, "given": True}
        else:
            tries = sorted(self.tries(base), key=lambda t: (not t.held, not t.id))
            if not tries:
                return
            volume, name, told = RentedVolume(tries[0].id, tries[0].name), tries[0].name, {}
            volume = replace(volume, name=self._vendor.volume_name(name))
        self._note(name, **told, held=True)
        if at := await self._mounted(volume, pod_id):
            self._note(name, mount=at)

    async def _mounted(self, volume: RentedVolume, pod_id: str) -> str:
        """Where this pod has it, which some vendors tell only once it is up; "" where one does not."""
        for look in range(MOUNT_LOOKS):
            try:
                at = await self._vendor.mounted(volume, pod_id, self.mount)
                if at.startswith("/"):
                    return at
            except (UnreachableError, CloudRefused) as e:
                log.warning("where %s is mounted is not known: %s", volume.name, e)
            if look < MOUNT_LOOKS - 1:
                await self.client.clock.sleep(LOOK_S)
        return ""

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
                row = self._row(t, await vendor.volumes())
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
                    gone = {"gone": True, **await self._bill(wanted)} if wanted else {"absent": True}
                    try:
                        self._note(t.name, **gone)
                    except UvccError as e:  # a full disk makes no volume that is gone one that costs
                        log.warning("that volume %s is gone is not written down: %s", t.name, e)
                    return
            except CloudRefused as e:  # a pod that ends may still have it
                said = e.what
            await clock.sleep(LOOK_S)
        raise UnreachableError(f"volume {t.name} ({t.id}) is not proven gone: {said}", "uvcc pods --sweep goes on")

    async def _bill(self, volume_id: str) -> dict[str, float]:
        """What the vendor's books say that it has cost, where they do."""
        try:
            item = next((i for i in await self.client.history() if i.id == volume_id), None)
        except (UnreachableError, CloudRefused) as e:
            log.warning("what volume %s has cost is not told: %s", volume_id, e)
            return {}
        billed = item.total_billed_price if item is not None else None
        return {"billed": billed} if billed else {}

    def _row(self, t: Try, rows: Sequence[RentedVolume]) -> RentedVolume | None:
        """The volume of this try: by its id, or while it has none by its name."""
        name = self._vendor.volume_name(t.name)
        return next((v for v in rows if (v.id == t.id if t.id else v.name == name)), None)
