"""Instances rented at Lambda Cloud, over its REST API."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import httpx

from uvcc_console.fleet.cloud.calls import Call, kind_of, value_of
from uvcc_console.fleet.cloud.choice import OfferFilter, RentedVolume, VolumePlace
from uvcc_console.fleet.cloud.clock import Clock
from uvcc_console.fleet.cloud.fields import ident, mapping, number, part, rows, text, whole
from uvcc_console.fleet.cloud.own_machines import CloudFleet, PlainOffer, Vendor
from uvcc_console.fleet.cloud.plain_vendor import PlainVolumes, RestVendor
from uvcc_console.fleet.cloud.vendor import AccountKey, RentedPod, SshTarget, itself
from uvcc_console.fleet.provider_kinds import ProviderKind
from uvcc_engine.contract.errors import ConfigError, UnreachableError

NAME: Final = "lambda"
URL: Final = "https://cloud.lambda.ai/api/v1"
VOLUME_PRICE: Final = 0.2  # of its price list: see docs/reference/providers.md; the API names none
MOUNT: Final = "/lambda/nfs"
_KINDS: Final = {
    "global/invalid-api-key": "auth",
    "global/account-inactive": "auth",
    "global/invalid-address": "payment",
    "global/quota-exceeded": "limit",
    "global/object-does-not-exist": "missing",
    "global/duplicate": "invalid",
    "instance-operations/launch/insufficient-capacity": "capacity",
}


class LambdaClient(PlainVolumes, RestVendor):
    """One account. Instances are machines with a public address, and are logged into as ``ubuntu``."""

    name = NAME
    home = URL

    def __init__(
        self, url: str, key: str, *, clock: Clock | None = None, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        super().__init__(url, key, clock=clock, transport=transport)
        self._key_names: dict[str, str] = {}

    def _kind(self, response: httpx.Response, said: str) -> str:
        """Lambda names what it refuses with by a code."""
        try:
            code = text(part(mapping(value_of(response), "an error").get("error")).get("code"))
        except (ValueError, UnreachableError):
            code = ""
        return _KINDS.get(code) or ("invalid" if code else kind_of(response.status_code, said))

    async def _data(self, path: str) -> Any:
        return mapping(await self._get(path), f"lambda's answer to {path}").get("data")

    async def permitted(self) -> None:
        await self._data("/instances")

    # the market

    async def offers_for(self, wanted: OfferFilter) -> Sequence[PlainOffer]:
        """Each type of instance in each region that has some."""
        if wanted.spot:
            raise ConfigError("lambda rents on demand only", "leave out fleet.spot")
        if wanted.image:
            raise ConfigError("lambda's instances come with Lambda Stack, and no other image", "leave out fleet.image")
        found: list[PlainOffer] = []
        for row in mapping(await self._data("/instance-types"), "lambda's list of instance types").values():
            said = mapping(row, "lambda's instance type")
            kind = mapping(said.get("instance_type"), "lambda's instance type")
            specs = part(kind.get("specs"))
            price = (number(kind.get("price_cents_per_hour")) or 0.0) / 100
            memory = re.search(r"\((\d+) GB", text(kind.get("gpu_description")) or text(kind.get("description")))
            name, gpus = text(kind.get("name")), whole(specs.get("gpus")) or 0
            of_gpu, disk = float(memory[1]) if memory else 0.0, number(specs.get("storage_gib")) or 0.0
            places = rows(said.get("regions_with_capacity_available"), "lambda's list of regions")
            stock = [(text(place.get("name")), True) for place in places] or [("", False)]
            found += [
                PlainOffer(name, NAME, region, name, gpus, price, of_gpu, disk=disk, stock=there)
                for region, there in stock
            ]
        return found

    # instances

    async def rent(
        self, offer: PlainOffer, wanted: OfferFilter, *, name: str, image: str, key_id: str, cap: float
    ) -> RentedPod:
        """The price is that of the list: the API takes no ceiling, and an instance tells what its type costs."""
        body: dict[str, Any] = {
            "region_name": offer.region,
            "instance_type_name": offer.gpu_type,
            "ssh_key_names": [self._key_names[key_id]],
            "name": name,
        }
        if wanted.volume is not None:
            body["file_system_names"] = [wanted.volume.name]
        answer = await self._send(Call("POST", "/instance-operations/launch", [], body, repeat=False))
        made = part(part(answer).get("data")).get("instance_ids")
        if not isinstance(made, list) or len(made) != 1:
            raise UnreachableError("lambda answered a launch without one id", "its outcome is unknown")
        return RentedPod(ident(made[0], "lambda's instance"), name, NAME)

    async def pods(self) -> Sequence[RentedPod]:
        return [_pod(row) for row in rows(await self._data("/instances"), "lambda's list of instances")]

    async def pod(self, pod_id: str) -> RentedPod | None:
        known, answer = await self._known(Call("GET", f"/instances/{ident(pod_id, 'an instance')}", []))
        return itself(_pod(mapping(answer, "lambda's instance").get("data")), pod_id) if known else None

    async def delete(self, pod_id: str) -> bool:
        body = {"instance_ids": [ident(pod_id, "an instance")]}
        known, _ = await self._known(Call("POST", "/instance-operations/terminate", [], body))
        return known

    # file systems: each grows with what lies in it

    def volume_at(self, offer: PlainOffer, size_gb: int) -> VolumePlace | None:
        return VolumePlace(offer.region, size_gb, VOLUME_PRICE) if offer.region else None

    async def mounted(self, volume: RentedVolume, pod_id: str, at: str) -> str:
        return f"{MOUNT}/{volume.name}"

    async def create_volume(self, name: str, place: VolumePlace) -> RentedVolume:
        body = {"name": name, "region": place.region}
        answer = mapping(await self._send(Call("POST", "/filesystems", [], body, repeat=False)), "lambda's file system")
        return _volume(answer.get("data"))

    async def volumes(self) -> Sequence[RentedVolume]:
        return [_volume(row) for row in rows(await self._data("/file-systems"), "lambda's list of file systems")]

    async def delete_volume(self, volume_id: str) -> bool:
        known, _ = await self._known(Call("DELETE", f"/filesystems/{ident(volume_id, 'a file system')}", []))
        return known

    # the account

    async def ssh_keys(self) -> Sequence[AccountKey]:
        found = [
            AccountKey(ident(row.get("id"), "lambda's key"), text(row.get("name")), text(row.get("public_key")))
            for row in rows(await self._data("/ssh-keys"), "lambda's list of keys")
        ]
        self._key_names |= {key.id: key.name for key in found}
        return found

    async def add_ssh_key(self, name: str, public_key: str) -> AccountKey:
        body = {"name": name, "public_key": public_key}
        answer = mapping(await self._send(Call("POST", "/ssh-keys", [], body, repeat=False)), "lambda's key")
        key_id = ident(part(answer.get("data")).get("id"), "lambda's key")
        self._key_names[key_id] = name
        return AccountKey(key_id, name, public_key)

    async def delete_ssh_key(self, key_id: str) -> None:
        await self._known(Call("DELETE", f"/ssh-keys/{ident(key_id, 'a key')}", []))


def _volume(row: Any) -> RentedVolume:
    """A file system out of its record. Raises UnreachableError for one without an id."""
    said = mapping(row, "lambda's file system")
    name, region = text(said.get("name")), text(part(said.get("region")).get("name"))
    return RentedVolume(ident(said.get("id"), "lambda's file system"), name, region)


def _pod(row: Any) -> RentedPod:
    """An instance out of its record. Raises UnreachableError for one without an id."""
    said = mapping(row, "lambda's instance")
    status, kind = text(said.get("status")), part(said.get("instance_type"))
    cents, host = number(kind.get("price_cents_per_hour")), text(said.get("ip"))
    gpus = whole(part(kind.get("specs")).get("gpus"))
    return RentedPod(
        ident(said.get("id"), "lambda's instance"),
        text(said.get("name")),
        NAME,
        cents / 100 if cents else None,
        status,
        over=status in ("terminated", "preempted"),
        dying=status in ("terminated", "preempted", "terminating"),
        failed=status in ("terminated", "preempted", "terminating"),
        unclear=status == "unhealthy",
        installed=status == "active",
        has_gpu=gpus is None or gpus > 0,
        logins=(SshTarget("ubuntu", host, 22),) if host else (),
    )


class LambdaFleet(CloudFleet):
    """``gpu``: Lambda's name for a type of instance, like ``gpu_1x_h100_pcie``; ``regions``: like ``us-west-1``."""


def _client(url: str, key: str, clock: Clock) -> LambdaClient:
    return LambdaClient(url, key, clock=clock)


VENDOR: Final = Vendor(NAME, URL, ("LAMBDA_API_KEY",), _client)
KIND: Final = ProviderKind(NAME, LambdaFleet, VENDOR.make, volumes="/lambda/nfs/{pod}")
