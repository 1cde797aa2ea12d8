"""Disks of the market as volumes: each lies in one data centre of one operator, and pods of that one can have it.

The market does not say of a disk where it lies: the run has written that down of its own, and of another it is asked
for offers that could have it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

from uvcc_console.fleet.cloud.choice import RentedVolume, VolumePlace
from uvcc_console.fleet.cloud.plain_vendor import PlainVolumes
from uvcc_console.fleet.prime.account import AccountCalls
from uvcc_console.fleet.prime.models import ApiPod, Disk, DiskOffer, MarketOffer
from uvcc_console.fleet.provider import NoOffer
from uvcc_engine.contract.errors import UnreachableError

MONTH_H: Final = 730.0
_GOING: Final = ("DELETING", "ERROR", "STOPPED")
_COMING: Final = ("PROVISIONING", "PENDING", "UNKNOWN")


class DiskVolumes(PlainVolumes, AccountCalls):
    """What the market's client does about volumes."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._on_offer: dict[str, DiskOffer] = {}

    def disks_on_offer(self, offers: Collection[DiskOffer], size_gb: int) -> None:
        """The market's disks as they are now; of each place the cheapest that is large enough counts."""
        fitting = [o for o in offers if o.size(size_gb) and o.spec is not None]
        dearest_first = sorted(fitting, key=lambda o: -((o.spec and o.spec.price_per_unit) or 0.0))
        self._on_offer = {o.where: o for o in dearest_first}

    def volume_at(self, offer: MarketOffer, size_gb: int) -> VolumePlace | None:
        where = place_of_offer(offer)
        if not offer.data_center or not size_gb:
            return VolumePlace(where) if offer.data_center else None
        disk = self._on_offer.get(where)
        size = disk.size(size_gb) if disk is not None else 0
        if disk is None or disk.spec is None or not size:
            return None
        told = {"country": disk.country, "cloudId": disk.cloud_id, "dataCenterId": disk.data_center}
        price = (disk.spec.price_per_unit or 0.0) * MONTH_H
        return VolumePlace(where, size, price, {"type": disk.provider, "disk": {k: v for k, v in told.items() if v}})

    async def create_volume(self, name: str, place: VolumePlace) -> RentedVolume:
        disk = {"name": name, "size": place.size_gb, **place.more["disk"]}
        return _volume(await self.create_disk(disk, place.more["type"]))

    async def volumes(self) -> Sequence[RentedVolume]:
        return [_volume(disk) for disk in await self.disks() if not disk.over]

    async def delete_volume(self, volume_id: str) -> bool:
        return await self.delete_disk(volume_id)


def place_of_offer(offer: MarketOffer) -> str:
    """What a disk and a pod must have in common."""
    return f"{offer.provider}/{offer.data_center}"


def lies(volume: RentedVolume, offers: Sequence[MarketOffer]) -> str:
    """The place of a disk, out of the offers whose pods could have it.

    Raises NoOffer where there is none now, so that the market tells nothing of where it lies.
    """
    found = {place_of_offer(offer) for offer in offers}
    if len(found) != 1:
        raise NoOffer(f"the market offers nothing now that could have the disk {volume.name}", "wait for stock there")
    return found.pop()


def mount_in(pod: ApiPod | None, volume_id: str) -> str:
    """Where a pod has this disk: the market mounts it where it will, and tells that of each pod."""
    attached = pod.attached_resources if pod is not None else []
    return next((a.mount_path for a in attached if a.id == volume_id and a.status != "UNATTACHED"), "")


def _volume(disk: Disk) -> RentedVolume:
    """Raises UnreachableError for one without an id."""
    if not disk.id:
        raise UnreachableError(f"disk {disk.name} is told without an id", "the API may have changed")
    going, ready = disk.status in _GOING or disk.over, disk.status not in _COMING
    return RentedVolume(disk.id, disk.name, "", going, ready, disk.price_hr)
