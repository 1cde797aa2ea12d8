"""Machines of many small hosts, rented at Vast.ai over its REST API. Every offer is one machine, and is rented once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import httpx

from uvcc_console.fleet.cloud.calls import Call, CloudRefused, kind_of, value_of
from uvcc_console.fleet.cloud.choice import OfferFilter, RentedVolume, VolumePlace
from uvcc_console.fleet.cloud.clock import Clock
from uvcc_console.fleet.cloud.fields import ident, mapping, number, part, rows, text, whole
from uvcc_console.fleet.cloud.own_machines import CloudFleet, PlainOffer, Vendor
from uvcc_console.fleet.cloud.plain_vendor import MOUNT, PlainVolumes, RestVendor, short_name
from uvcc_console.fleet.cloud.vendor import AccountKey, RentedPod, SshTarget, itself
from uvcc_console.fleet.provider import NoOffer
from uvcc_console.fleet.provider_kinds import ProviderKind
from uvcc_engine.contract.errors import UnreachableError, UvccError

NAME: Final = "vast"
URL: Final = "https://console.vast.ai/api/v0"
IMAGE: Final = "vastai/pytorch:@vastai-automatic-tag"
DISK_GIB: Final = 40
MOST: Final = 500
AT_MACHINE: Final = "machine "
_KINDS: Final = {
    "no_such_ask": "capacity",
    "no_such_user": "auth",
    "auth_error": "auth",
    "insufficient_credit": "payment",
    "no_such_instance": "missing",
    "no_such_volume": "missing",
    "rate_limit": "rate",
}


class VastClient(PlainVolumes, RestVendor):
    """The API of Vast for one account."""

    name = NAME
    home = URL
    fleeting = True
    image = IMAGE

    def _kind(self, response: httpx.Response, said: str) -> str:
        """Vast names what it refuses with by a word."""
        try:
            code = text(mapping(value_of(response), "an error").get("error"))
        except (ValueError, UnreachableError):
            code = ""
        return _KINDS.get(code) or kind_of(response.status_code, said)

    async def permitted(self) -> None:
        await self._get("/users/current/")

    # the market

    async def offers_for(self, wanted: OfferFilter) -> Sequence[PlainOffer]:
        """Machines of verified hosts, with the disk that is wanted in their price."""
        query: dict[str, Any] = {
            "verified": {"eq": True},
            "rentable": {"eq": True},
            "rented": {"eq": False},
            "type": "bid" if wanted.spot else "on-demand",
            "allocated_storage": wanted.disk or DISK_GIB,
            "order": [["dph_total", "asc"]],
            "limit": MOST,
        }
        query |= {"gpu_name": {"eq": wanted.gpu}} if wanted.gpu else {}
        query |= {"num_gpus": {"eq": wanted.gpus}} if wanted.gpus else {}
        if wanted.homes and not wanted.anywhere:  # where their volumes lie, and nowhere else
            query["machine_id"] = {"in": [whole(home.removeprefix(AT_MACHINE)) for home in wanted.homes]}
        answer = mapping(await self._send(Call("POST", "/bundles/", [], query)), "vast's list of offers")
        beside = await self._room_for(wanted.volume_gb) if wanted.volume_gb > 0 and wanted.anywhere else {}
        found = rows(answer.get("offers"), "vast's list of offers")
        if not found and "machine_id" in query:
            raise NoOffer(f"vast offers nothing in {', '.join(wanted.homes)}, where its volume lies", "wait for it")
        return [_offer(row, wanted.spot, beside.get(text(row.get("machine_id")))) for row in found]

    async def _room_for(self, size_gb: int) -> dict[str, Mapping[str, Any]]:
        """Offers of volumes that are large enough, the cheapest of each machine."""
        query = {"disk_space": {"gte": size_gb}, "limit": MOST, "order": [["storage_cost", "asc"]]}
        what = "vast's list of volumes on offer"
        answer = mapping(await self._send(Call("POST", "/volumes/search/", [], query)), what)
        found: dict[str, Mapping[str, Any]] = {}
        for row in rows(answer.get("offers"), what):
            price, room = number(row.get("storage_cost")), number(row.get("disk_space")) or 0.0
            machine = text(row.get("machine_id"))
            known = found.get(machine)
            cheaper = known is None or (price or 0.0) < (number(known.get("storage_cost")) or 0.0)
            if machine and price and room >= size_gb and cheaper:
                found[machine] = row
        return found

    # instances

    async def rent(
        self, offer: PlainOffer, wanted: OfferFilter, *, name: str, image: str, key_id: str, cap: float
    ) -> RentedPod:
        body: dict[str, Any] = {
            "client_id": "me",
            "image": image,
            "disk": wanted.disk or DISK_GIB,
            "label": name,
            "runtype": "ssh_direct",
        }
        if offer.spot:
            body["price"] = cap
        if wanted.volume is not None:
            link = {"create_new": False, "volume_id": int(wanted.volume.id), "mount_path": wanted.mount or MOUNT}
            body["volume_info"] = link
        answer = part(await self._send(Call("PUT", f"/asks/{offer.id}/", [], body, repeat=False)))
        if answer.get("success") is False:
            why = text(answer.get("msg")) or text(answer.get("error"))
            raise CloudRefused(_KINDS.get(text(answer.get("error")), "invalid"), 200, why)
        return RentedPod(ident(answer.get("new_contract"), "vast's new instance"), name, NAME)

    async def pods(self) -> Sequence[RentedPod]:
        answer = mapping(await self._get("/instances/", ("owner", "me")), "vast's list of instances")
        return [_pod(row) for row in rows(answer.get("instances"), "vast's list of instances")]

    async def pod(self, pod_id: str) -> RentedPod | None:
        call = Call("GET", f"/instances/{ident(pod_id, 'an instance')}/", [("owner", "me")])
        known, answer = await self._known(call)
        if not known:
            return None
        found = mapping(answer, "vast's instance").get("instances")
        return itself(_pod(found), pod_id) if found else None

    async def delete(self, pod_id: str) -> bool:
        known, answer = await self._known(Call("DELETE", f"/instances/{ident(pod_id, 'an instance')}/", []))
        if part(answer).get("success") is False:
            raise UnreachableError(f"vast does not end {pod_id}: {text(part(answer).get('msg'))}", "it is asked again")
        return known

    # volumes: each is a part of one machine's disk, and only pods of that machine can have it

    def volume_name(self, name: str) -> str:
        return short_name(name, "_")

    def volume_at(self, offer: PlainOffer, size_gb: int) -> VolumePlace | None:
        machine, ask = str(offer.more.get("machine", "")), offer.more.get("volume")
        number_of = whole(part(ask).get("id"))
        if not machine or (size_gb and number_of is None):
            return None
        price = number(part(ask).get("storage_cost")) or 0.0
        return VolumePlace(f"{AT_MACHINE}{machine}", size_gb, price, {"ask": number_of})

    async def create_volume(self, name: str, place: VolumePlace) -> RentedVolume:
        """Vast answers with the volume's name of its own making, V. and its number."""
        body = {"id": place.more["ask"], "size": place.size_gb, "name": name}
        answer = part(await self._send(Call("PUT", "/volumes/", [], body, repeat=False)))
        if answer.get("success") is False:
            why = text(answer.get("msg")) or text(answer.get("error"))
            raise CloudRefused(_KINDS.get(text(answer.get("error")), "invalid"), 200, why)
        number_of = re.fullmatch(r"V\.([0-9]{1,18})", text(answer.get("volume_name")))
        if number_of is None:
            raise UnreachableError("vast answered a volume without its number", "its outcome is unknown")
        return RentedVolume(number_of[1], name, place.region)

    async def volumes(self) -> Sequence[RentedVolume]:
        what = "vast's list of volumes"
        answer = mapping(await self._get("/volumes/", ("owner", "me"), ("type", "local_volume")), what)
        return [_volume(row) for row in rows(answer.get("volumes"), what)]

    async def delete_volume(self, volume_id: str) -> bool:
        """Vast's own program names the volume in the address, and its description in the body: both are sent."""
        number_of = int(volume_id) if volume_id.isdigit() else 0
        known, answer = await self._known(Call("DELETE", "/volumes/", [("id", number_of)], {"id": number_of}))
        if part(answer).get("success") is False:
            raise UnreachableError(
                f"vast does not end {volume_id}: {text(part(answer).get('msg'))}", "it is asked again"
            )
        return known

    # the account

    async def wallet(self) -> float | None:
        try:
            return number(part(await self._get("/users/current/")).get("credit"))
        except UvccError:
            return None

    async def ssh_keys(self) -> Sequence[AccountKey]:
        """Keys have no name here: the third word of a key, its comment, serves as one."""
        answer = await self._get("/ssh/")
        found = answer.get("ssh_keys", answer.get("keys")) if isinstance(answer, Mapping) else answer
        keys = []
        for row in rows(found, "vast's list of keys"):
            line = text(row.get("public_key") or row.get("ssh_key") or row.get("key"))
            keys.append(AccountKey(ident(row.get("id"), "vast's key"), line.partition(" ")[2].partition(" ")[2], line))
        return keys

    async def add_ssh_key(self, name: str, public_key: str) -> AccountKey:
        line = " ".join([*public_key.split()[:2], name])
        answer = part(await self._send(Call("POST", "/ssh/", [], {"ssh_key": line}, repeat=False)))
        return AccountKey(ident(part(answer.get("key")).get("id"), "vast's key"), name, line)

    async def delete_ssh_key(self, key_id: str) -> None:
        await self._known(Call("DELETE", f"/ssh/{ident(key_id, 'a key')}/", []))


def _volume(row: Any) -> RentedVolume:
    """A volume out of its record. Raises UnreachableError for one without an id."""
    said = mapping(row, "vast's volume")
    status = text(said.get("status"))
    number_of = ident(said.get("id"), "vast's volume")
    if not number_of.isdigit():
        raise UnreachableError(f"vast's volume has {number_of!r} for an id", "the API may have changed")
    machine = text(said.get("machine_id"))
    region = f"{AT_MACHINE}{machine}" if machine else ""
    return RentedVolume(number_of, text(said.get("label")), region, status in ("deleting", "deleted", "error"))


def _offer(row: Mapping[str, Any], spot: bool, volume: Mapping[str, Any] | None = None) -> PlainOffer:
    """One machine, and the volume on offer there. Its country is the last word of where it stands, as its host says."""
    where = text(row.get("geolocation"))
    price = number(row.get("min_bid") if spot else row.get("dph_total")) or 0.0
    return PlainOffer(
        ident(row.get("id"), "vast's offer"),
        NAME,
        where,
        text(row.get("gpu_name")),
        whole(row.get("num_gpus")) or 0,
        price,
        (number(row.get("gpu_ram")) or 0.0) / 1024,
        country=where.rpartition(",")[2].strip(),
        spot=spot,
        stock=row.get("rentable") is not False and row.get("rented") is not True,
        once=True,
        disk=number(row.get("disk_space")) or 0.0,
        more={"machine": text(row.get("machine_id")), **({"volume": volume} if volume is not None else {})},
    )


def _pod(row: Any) -> RentedPod:
    """An instance out of its record. Raises UnreachableError for one without an id."""
    said = mapping(row, "vast's instance")
    status = text(said.get("actual_status"))
    mapped = part(said.get("ports")).get("22/tcp")
    first = part(mapped[0]) if isinstance(mapped, list) and mapped else {}
    ways = [(said.get("public_ipaddr"), first.get("HostPort")), (said.get("ssh_host"), said.get("ssh_port"))]
    logins = [SshTarget("root", text(host).strip(), whole(port) or 0) for host, port in ways]
    message = text(said.get("status_msg"))
    return RentedPod(
        ident(said.get("id"), "vast's instance"),
        text(said.get("label")),
        NAME,
        number(said.get("dph_total")) or None,
        f"{status or 'created'} {message}".strip(),
        dying=status in ("exited", "stopped"),
        failed=status in ("exited", "stopped"),
        unclear=status in ("unknown", "offline"),
        installed=status == "running",
        has_gpu=bool(whole(said.get("num_gpus"))),
        logins=tuple(way for way in logins if way.host and 0 < way.port < 65536),
    )


class VastFleet(CloudFleet):
    """``gpu``: Vast's name, like ``H100 SXM``; ``country``: two letters; with ``spot`` the price is a bid."""


def _client(url: str, key: str, clock: Clock) -> VastClient:
    return VastClient(url, key, clock=clock)


VENDOR: Final = Vendor(
    NAME,
    URL,
    ("VAST_API_KEY",),
    _client,
    ("~/.config/vastai/vast_api_key", "~/.vast_api_key"),
)
KIND: Final = ProviderKind(NAME, VastFleet, VENDOR.make, volumes=MOUNT, mounts=True)
