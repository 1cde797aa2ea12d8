"""What the clients of vendors that sell their own machines have in common; each one's file says what is its own."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import httpx

from uvcc_console.fleet.cloud.calls import Call, Calls, CloudRefused
from uvcc_console.fleet.cloud.choice import OfferChoice, OfferFilter, RentedVolume
from uvcc_console.fleet.cloud.clock import Clock
from uvcc_console.fleet.cloud.own_machines import PlainOffer, choose
from uvcc_console.fleet.cloud.vendor import AccountKey, PastPod, RentedPod, RentsVolumes, SshTarget

MOUNT: Final = "/uvcc-volume"


def short_name(name: str, joint: str = "-") -> str:
    """A name of 29 characters in place of one that is too long for a vendor, and as good as unique."""
    return f"uvcc{joint}{hashlib.sha256(name.encode()).hexdigest()[:24]}"


class PlainVolumes:
    """Volumes that are called as is asked for, tell where they lie, and are mounted where the pod wants them."""

    least_volume = 1

    def volume_name(self, name: str) -> str:
        return name

    async def whereabouts(self, volume: RentedVolume) -> str:
        return volume.region

    async def mounted(self, volume: RentedVolume, pod_id: str, at: str) -> str:
        return at or MOUNT


class PlainVendor:
    """One operator; no history, no wallet, and no keys of the account: the run's key goes into each pod by itself."""

    name: str
    image = ""
    distinct = False
    free = False
    """Whether what it rents may cost nothing."""
    fleeting = False
    """Whether its list leaves out what cannot be had now."""

    def choose(
        self, rows: Sequence[PlainOffer], wanted: OfferFilter, parties: Collection[int], settled: Mapping[int, str]
    ) -> OfferChoice:
        at = self.volume_at if isinstance(self, RentsVolumes) else None
        return choose(rows, wanted, parties, self.name, self.image, free=self.free, fleeting=self.fleeting, at=at)

    async def history(self) -> Sequence[PastPod]:
        return ()

    def logins(self, pod: RentedPod) -> Sequence[SshTarget]:
        return pod.logins

    async def wallet(self) -> float | None:
        return None

    async def ssh_keys(self) -> Sequence[AccountKey]:
        return ()

    async def add_ssh_key(self, name: str, public_key: str) -> AccountKey:
        return AccountKey(public_key, name, public_key)

    async def delete_ssh_key(self, key_id: str) -> None:
        return None


class RestVendor(PlainVendor, Calls):
    """One account at an HTTP API. ``home``: the vendor's own address."""

    home: str

    def __init__(
        self, url: str, key: str, *, clock: Clock | None = None, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        super().__init__(url, key, transport=transport, clock=clock)
        self.where = "" if url == self.home else url

    async def _known(self, call: Call) -> tuple[bool, Any]:
        """(whether the vendor knows what the call names, its answer)."""
        try:
            return True, await self._send(call)
        except CloudRefused as e:
            if e.kind != "missing":
                raise
            return False, None
