"""Pods rented at Runpod, over version 2 of its REST API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from uvcc_console.fleet.cloud.calls import PAGES, Call
from uvcc_console.fleet.cloud.choice import OfferFilter, RentedVolume, VolumePlace
from uvcc_console.fleet.cloud.clock import Clock
from uvcc_console.fleet.cloud.fields import ident, mapping, number, part, rows, text, whole
from uvcc_console.fleet.cloud.own_machines import CloudFleet, PlainOffer, Vendor
from uvcc_console.fleet.cloud.plain_vendor import MOUNT, PlainVolumes, RestVendor
from uvcc_console.fleet.cloud.vendor import RentedPod, SshTarget, itself
from uvcc_console.fleet.provider_kinds import ProviderKind
from uvcc_engine.contract.errors import ConfigError, UnreachableError

NAME: Final = "runpod"
URL: Final = "https://api.runpod.io/v2"
IMAGE: Final = "runpod/pytorch:2.8.0-py3.11-cuda12.8.1-cudnn-devel-ubuntu22.04"
DISK_GIB: Final = 40
PAGE: Final = 100
VOLUME_PRICE: Final = 0.07  # of its price list: see docs/reference/providers.md; the API names none


class RunPodClient(PlainVolumes, RestVendor):
    """One account. The run's SSH key goes into each pod by ``PUBLIC_KEY``: the account's own keys stay as they are."""

    name = NAME
    home = URL
    image = IMAGE
    least_volume = 10

    async def permitted(self) -> None:
        await self._get("/pods", ("limit", 1))

    # the market

    async def offers_for(self, wanted: OfferFilter) -> Sequence[PlainOffer]:
        """Stock and prices of each data centre of the secure cloud. Runpod names prices for one GPU."""
        if wanted.spot:
            raise ConfigError("runpod's API rents on demand only", "leave out fleet.spot")
        count = wanted.gpus or 1
        asked = ("include", "AVAILABILITY"), ("product", "POD"), ("count", count), ("cloud", "SECURE")
        answer = mapping(await self._get("/catalog/gpus", *asked), "runpod's list of GPUs")
        found: list[PlainOffer] = []
        for row in rows(answer.get("gpus"), "runpod's list of GPUs"):
            price = number(part(row.get("price")).get("secure"))
            gpu, memory = text(row.get("id")), number(row.get("memory")) or 0.0
            centres = row.get("dataCenters")
            places = [c for c in centres if isinstance(c, Mapping)] if isinstance(centres, list) else []
            for place in places or [{"id": "", "availability": row.get("availability")}]:
                stock = text(place.get("availability")) in ("LOW", "MEDIUM", "HIGH")
                where = text(place.get("id"))
                found.append(PlainOffer(gpu, NAME, where, gpu, count, (price or 0.0) * count, memory, stock=stock))
        return found

    # pods

    async def rent(
        self, offer: PlainOffer, wanted: OfferFilter, *, name: str, image: str, key_id: str, cap: float
    ) -> RentedPod:
        """The API takes no ceiling: a pod that comes at another price than was quoted is ended by who asked."""
        body: dict[str, Any] = {
            "name": name,
            "image": image,
            "cloud": "SECURE",
            "gpu": {"id": offer.gpu_type, "count": offer.gpu_count},
            "disk": wanted.disk or DISK_GIB,
            "ports": ["22/tcp"],
            "startSsh": True,
            "env": {"PUBLIC_KEY": key_id},
        }
        if offer.region:
            body["dataCenterIds"] = [offer.region]
        if wanted.volume is not None:
            body["mounts"] = {"network": [{"volumeId": wanted.volume.id, "path": wanted.mount or MOUNT}]}
        return _pod(await self._send(Call("POST", "/pods", [], body, repeat=False)))

    async def pods(self) -> Sequence[RentedPod]:
        return list({pod.id: pod for pod in map(_pod, await self._every("/pods", "pods"))}.values())

    async def _every(self, path: str, key: str) -> list[Mapping[str, Any]]:
        """A list, page by page. Raises UnreachableError for one that never ends, or names none as its next."""
        found: list[Mapping[str, Any]] = []
        cursor, what = "", f"runpod's list of {key}"
        for _ in range(PAGES):
            answer = mapping(await self._get(path, ("limit", PAGE), ("cursor", cursor)), what)
            found += rows(answer.get(key), what)
            page = part(answer.get("pagination"))
            following = text(page.get("nextCursor"))
            if not page.get("hasNextPage"):
                return found
            if not following or following == cursor:
                break
            cursor = following
        raise UnreachableError(f"{what} does not end", "the API may have changed")

    async def pod(self, pod_id: str) -> RentedPod | None:
        known, answer = await self._known(Call("GET", f"/pods/{ident(pod_id, 'a pod')}", []))
        return itself(_pod(answer), pod_id) if known else None

    async def delete(self, pod_id: str) -> bool:
        known, _ = await self._known(Call("DELETE", f"/pods/{ident(pod_id, 'a pod')}", []))
        return known

    # network volumes

    def volume_at(self, offer: PlainOffer, size_gb: int) -> VolumePlace | None:
        return VolumePlace(offer.region, size_gb, VOLUME_PRICE) if offer.region else None

    async def create_volume(self, name: str, place: VolumePlace) -> RentedVolume:
        body = {"name": name, "size": place.size_gb, "dataCenter": place.region}
        return _volume(await self._send(Call("POST", "/network-volumes", [], body, repeat=False)))

    async def volumes(self) -> Sequence[RentedVolume]:
        return [_volume(row) for row in await self._every("/network-volumes", "networkVolumes")]

    async def delete_volume(self, volume_id: str) -> bool:
        known, _ = await self._known(Call("DELETE", f"/network-volumes/{ident(volume_id, 'a volume')}", []))
        return known


def _volume(row: Any) -> RentedVolume:
    """A network volume out of its record. Raises UnreachableError for one without an id."""
    said = mapping(row, "runpod's network volume")
    name, region = text(said.get("name")), text(said.get("dataCenter"))
    return RentedVolume(ident(said.get("id"), "runpod's network volume"), name, region)


def _pod(row: Any) -> RentedPod:
    """A pod out of its record. Raises UnreachableError for one without an id."""
    said = mapping(row, "runpod's pod")
    status = text(said.get("status"))
    gpu, direct = part(said.get("gpu")), part(part(said.get("ssh")).get("direct"))
    host, port = text(direct.get("host")), whole(direct.get("port")) or 0
    logins = (SshTarget(text(direct.get("username")) or "root", host, port),) if host and 0 < port < 65536 else ()
    return RentedPod(
        ident(said.get("id"), "runpod's pod"),
        text(said.get("name")),
        NAME,
        number(said.get("cost")) or None,
        status,
        over=status == "TERMINATED",
        dying=status in ("TERMINATED", "ERROR", "EXITED"),
        failed=status in ("ERROR", "EXITED", "TERMINATED"),
        installed=status == "RUNNING",
        has_gpu=bool(gpu),
        logins=logins,
    )


class RunPodFleet(CloudFleet):
    """``gpu``: Runpod's own name, like ``NVIDIA H100 80GB HBM3``; ``regions``: its data centres; ``image``: a container
    image that starts an SSH server for the key in ``PUBLIC_KEY``, as Runpod's own do."""


def _client(url: str, key: str, clock: Clock) -> RunPodClient:
    return RunPodClient(url, key, clock=clock)


VENDOR: Final = Vendor(NAME, URL, ("RUNPOD_API_KEY",), _client)
KIND: Final = ProviderKind(NAME, RunPodFleet, VENDOR.make, volumes=MOUNT, mounts=True)
