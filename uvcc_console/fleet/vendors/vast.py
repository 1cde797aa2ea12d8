"""Machines of many small hosts, rented at Vast.ai over its REST API. Every offer is one machine, and is rented once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import httpx

from uvcc_console.fleet.cloud.calls import Call, CloudRefused, kind_of
from uvcc_console.fleet.cloud.choice import OfferFilter
from uvcc_console.fleet.cloud.clock import Clock
from uvcc_console.fleet.cloud.fields import ident, mapping, number, part, rows, text, whole
from uvcc_console.fleet.cloud.own_machines import CloudFleet, PlainOffer, Vendor
from uvcc_console.fleet.cloud.plain_vendor import RestVendor
from uvcc_console.fleet.cloud.vendor import AccountKey, RentedPod, SshTarget
from uvcc_console.fleet.provider_kinds import ProviderKind
from uvcc_engine.contract.errors import UnreachableError, UvccError

NAME: Final = "vast"
URL: Final = "https://console.vast.ai/api/v0"
IMAGE: Final = "vastai/pytorch:@vastai-automatic-tag"
DISK_GIB: Final = 40
MOST: Final = 500
_KINDS: Final = {
    "no_such_ask": "capacity",
    "no_such_user": "auth",
    "auth_error": "auth",
    "insufficient_credit": "payment",
    "no_such_instance": "missing",
    "rate_limit": "rate",
}


class VastClient(RestVendor):
    """The API of Vast for one account."""

    name = NAME
    home = URL
    fleeting = True
    image = IMAGE

    def _kind(self, response: httpx.Response, said: str) -> str:
        """Vast names what it refuses with by a word."""
        try:
            code = text(mapping(response.json(), "an error").get("error"))
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
        answer = mapping(await self._send(Call("POST", "/bundles/", [], query)), "vast's list of offers")
        return [_offer(row, wanted.spot) for row in rows(answer.get("offers"), "vast's list of offers")]

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
        return _pod(found) if found else None

    async def delete(self, pod_id: str) -> bool:
        known, answer = await self._known(Call("DELETE", f"/instances/{ident(pod_id, 'an instance')}/", []))
        if part(answer).get("success") is False:
            raise UnreachableError(f"vast does not end {pod_id}: {text(part(answer).get('msg'))}", "it is asked again")
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


def _offer(row: Mapping[str, Any], spot: bool) -> PlainOffer:
    """One machine. Its country is the last word of where its host says that it stands."""
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
KIND: Final = ProviderKind(NAME, VastFleet, VENDOR.make)
