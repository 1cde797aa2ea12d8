"""Volumes of SkyPilot: it makes them on Kubernetes, whose pods have a provider of their own here, and on Runpod.

A volume is known by its name alone, and lies in one zone, which a run has to name since the catalogue of GPUs does not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from uvcc_console.fleet.cloud.calls import CloudRefused
from uvcc_console.fleet.cloud.choice import RentedVolume, VolumePlace
from uvcc_console.fleet.cloud.fields import text
from uvcc_console.fleet.cloud.own_machines import PlainOffer
from uvcc_console.fleet.cloud.plain_vendor import PlainVolumes, short_name
from uvcc_console.fleet.vendors import runpod
from uvcc_console.fleet.vendors.sky_requests import SkyRequests, listed
from uvcc_engine.contract.errors import UnreachableError

KIND: Final = "runpod-network-volume"
ZONE: Final = re.compile(r"(?i:runpod)/[A-Za-z0-9-]{1,40}/[A-Za-z0-9-]{1,40}")
MADE_S: Final = 120.0
_NAME: Final = re.compile(r"[a-zA-Z0-9]([-_.a-zA-Z0-9]{0,62}[a-zA-Z0-9])?")


class SkyVolumes(PlainVolumes, SkyRequests):
    """Network volumes of Runpod, over SkyPilot's own functions for volumes."""

    least_volume = 10

    def volume_name(self, name: str) -> str:
        """SkyPilot takes thirty characters at Runpod."""
        return short_name(name)

    def volume_at(self, offer: PlainOffer, size_gb: int) -> VolumePlace | None:
        if not offer.more.get("zone") or not ZONE.fullmatch(offer.more["at"]):
            return None
        return VolumePlace(offer.more["at"].lower(), size_gb, runpod.VOLUME_PRICE, {"infra": offer.more["at"]})

    async def create_volume(self, name: str, place: VolumePlace) -> RentedVolume:
        """A name that is there already is left as it is, and no second volume is made."""

        def ask(sky: Any) -> Any:
            made = sky.volume(name=name, type=KIND, infra=place.more["infra"], size=str(place.size_gb))
            return sky.volumes.apply(made)

        await self._done("volumes.apply", await self._do("volumes.apply", ask))
        made = next((v for v in await self.volumes() if v.name == name), None)
        if made is None:
            raise UnreachableError(f"SkyPilot lists no volume {name} after it was made", "its outcome is unknown")
        return made

    async def _done(self, what: str, request: Any) -> None:
        """Wait for a request's end, which is told by its result. Raises what came of it."""
        if not await self._ended(request, MADE_S):
            raise UnreachableError(f"{what} has not ended in {MADE_S:.0f} s", "its outcome is unknown")
        await self._do(what, lambda sky: sky.sdk.get(request))

    async def volumes(self) -> Sequence[RentedVolume]:
        found = listed(await self._read("volumes.ls", lambda sky: sky.volumes.ls()), "volumes")
        return [_volume(row) for row in found]

    async def delete_volume(self, volume_id: str) -> bool:
        if not _NAME.fullmatch(volume_id):
            return False
        try:
            await self._done(
                "volumes.delete", await self._do("volumes.delete", lambda sky: sky.volumes.delete([volume_id]))
            )
        except CloudRefused as e:
            if e.kind != "missing":
                raise
            return False
        return True


def _volume(row: Any) -> RentedVolume:
    """A volume out of its record. Raises UnreachableError for one without a name."""
    name = text(getattr(row, "name", None))
    if not _NAME.fullmatch(name):
        raise UnreachableError(f"a volume of SkyPilot's is named {name[:80]!r}", "another version of SkyPilot?")
    place = [text(getattr(row, part, None)).lower() for part in ("cloud", "region", "zone")]
    ready = text(getattr(row, "status", None)) != "NOT_READY"
    return RentedVolume(name, name, "/".join(place) if all(place) else "", ready=ready)
