"""Vendors' APIs in this process: state, life of pods, and failures on order; each vendor adds its own forms.

The forms are those of the vendors' public schemas: what a route takes, what it answers, how it says no. Bodies are
held against the schema's keys, so that a client that sends what is not in it is told so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, ClassVar

import httpx
from primerecords import Fault

KEY = "test-key"


def said(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> httpx.Response:
    return httpx.Response(status, json=body, headers=headers)


@dataclass
class Rented:
    """A pod at the vendor."""

    id: str
    name: str
    price: float
    born: float
    offer: Any = None
    asked: dict[str, Any] = field(default_factory=dict)
    deleting: float | None = None
    dead: float | None = None
    host: str = "10.0.0.1"
    state: str = ""  # overrides what its age says
    refused_deletes: int = 0
    foreign: bool = False
    vanish_s: float = float("inf")


@dataclass
class Disk:
    """A volume at the vendor."""

    id: str
    name: str
    size: int
    region: str
    born: float


class CloudFake:
    """What the vendors have in common. ``OPS``: where each kind of request goes, for failures on order."""

    OPS: ClassVar[dict[str, tuple[str, str]]] = {}
    PRICE = 2.0

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.rented: dict[str, Rented] = {}
        self.keys: dict[str, dict[str, Any]] = {}
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str, Any]] = []
        self.visible_after = 0.0
        self.boot_s = 90.0
        self.delete_s = 6.0
        self.stock = 50
        self.quota = 50
        self.broke = False
        self.price_factor = 1.0
        self.born_state = ""
        self.vanish_s = float("inf")
        self.refuse_deletes = 0
        self.disks: dict[str, Disk] = {}
        self.disk_quota = 50
        self.disks_shown_after = 0.0
        self.numbers = count(1001)
        self.transport = httpx.MockTransport(self.serve)

    # what tests ask and say

    @property
    def living(self) -> list[Rented]:
        for pod in self.rented.values():
            self._age(pod)
        return [p for p in self.rented.values() if p.dead is None]

    @property
    def billing(self) -> list[str]:
        return sorted([*(p.name for p in self.living if not p.foreign), *(d.name for d in self.disks.values())])

    # volumes, each a row of its own at every vendor

    def new_disk(self, name: str, size: int, region: str) -> Disk | None:
        """None where no more may be had."""
        if len(self.disks) >= self.disk_quota:
            return None
        made = Disk(self.new_id(), name, size, region, self.now())
        self.disks[made.id] = made
        return made

    def shown_disks(self) -> list[Disk]:
        return [d for d in self.disks.values() if self.now() - d.born >= self.disks_shown_after]

    def uses(self, disk: Disk) -> bool:
        return any(disk.id in json.dumps(p.asked) or disk.name in json.dumps(p.asked) for p in self.living)

    def end_disk(self, disk_id: str) -> int:
        """The status of asking for a volume's end; one that a pod has does not go."""
        disk = next((d for d in self.shown_disks() if d.id == disk_id), None)
        if disk is None:
            return 404
        if self.uses(disk):
            return 400
        if self.refuse_deletes:
            self.refuse_deletes -= 1
            return 500
        del self.disks[disk_id]
        return 200

    def fail(self, op: str, action: str, *nth: int, **more: Any) -> None:
        method, path = self.OPS[op]
        self.faults.append(Fault(method, path, action, frozenset(nth), **more))

    def asked(self, op: str) -> list[Any]:
        method, path = self.OPS[op]
        return [body for m, p, body in self.requests if m == method and p.startswith(path)]

    def kill(self, pod: Rented) -> None:
        """It is taken away."""
        pod.dead = self.now()

    def foreign(self, name: str) -> Rented:
        pod = self.born(name, {}, None)
        pod.foreign = True
        return pod

    # life

    def born(self, name: str, asked: dict[str, Any], offer: Any) -> Rented:
        made = Rented(self.new_id(), name, self.PRICE * self.price_factor, self.now(), offer, asked)
        made.state, made.refused_deletes, made.vanish_s = self.born_state, self.refuse_deletes, self.vanish_s
        self.rented[made.id] = made
        self.stock -= 1
        return made

    def new_id(self) -> str:
        return f"id{next(self.numbers)}"

    def _age(self, pod: Rented) -> None:
        if pod.dead is None and pod.deleting is not None and self.now() >= pod.deleting:
            pod.dead = self.now()
        if pod.dead is None and self.now() - pod.born >= pod.vanish_s:
            pod.dead = self.now()

    def ready(self, pod: Rented) -> bool:
        return self.now() - pod.born >= self.boot_s

    def shown(self) -> list[Rented]:
        return [p for p in self.living if self.now() - p.born >= self.visible_after]

    def one(self, pod_id: str) -> Rented | None:
        return next((p for p in self.shown() if p.id == pod_id), None)

    def end(self, pod_id: str) -> int:
        """The status of asking for a pod's end."""
        pod = self.one(pod_id)
        if pod is None:
            return 404
        if pod.refused_deletes:
            pod.refused_deletes -= 1
            return 500
        pod.deleting = pod.deleting or self.now() + self.delete_s
        return 200

    # requests

    def serve(self, request: httpx.Request) -> httpx.Response:
        path = re.sub("^/api/", "/", request.url.path)
        body = json.loads(request.content) if request.content else None
        self.requests.append((request.method, path, body))
        for fault in self.faults:
            if fault.method == request.method and path.startswith(fault.path):
                fault.seen += 1
                if not fault.nth or fault.seen in fault.nth:
                    return self._fault(fault, request, path, body)
        return self._answer(request, path, body)

    def _fault(self, fault: Fault, request: httpx.Request, path: str, body: Any) -> httpx.Response:
        if fault.action == "answer":
            return said(fault.body, fault.status, fault.headers)
        if fault.action == "html":
            return httpx.Response(502, html="<html><h1>502 Bad Gateway</h1></html>")
        if fault.action == "redirect":
            return httpx.Response(307, headers={"location": "https://elsewhere.example/"})
        if fault.action.startswith("commit_then_"):
            self._answer(request, path, body)
        errors: dict[str, Exception] = {
            "refuse": httpx.ConnectError("connection refused"),
            "commit_then_reset": httpx.ReadError("connection reset by peer"),
        }
        if fault.action == "commit_then_500":
            return said({"error": "internal"}, 500)
        raise errors.get(fault.action) or httpx.ReadTimeout("no answer")

    def _answer(self, request: httpx.Request, path: str, body: Any) -> httpx.Response:
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return self.no(401, "auth", "Invalid API key")
        return self.answer(request.method, [p for p in path.split("/") if p], dict(request.url.params), body)

    def no(self, status: int, kind: str, text: str) -> httpx.Response:
        return said({"error": text}, status)

    def answer(self, method: str, parts: list[str], q: dict[str, str], body: Any) -> httpx.Response:
        raise NotImplementedError


class RunPodFake(CloudFake):
    """Version 2 of Runpod's REST API."""

    OPS: ClassVar = {
        "market": ("GET", "/v2/catalog/gpus"),
        "create": ("POST", "/v2/pods"),
        "list": ("GET", "/v2/pods"),
        "delete": ("DELETE", "/v2/pods/"),
        "new disk": ("POST", "/v2/network-volumes"),
        "disks": ("GET", "/v2/network-volumes"),
        "end disk": ("DELETE", "/v2/network-volumes/"),
    }
    TAKES = frozenset(
        {
            "name",
            "image",
            "cloud",
            "gpu",
            "disk",
            "ports",
            "startSsh",
            "env",
            "dataCenterIds",
            "args",
            "cmd",
            "mounts",
            "templateId",
        }
    )
    page = 100

    def answer(self, method: str, parts: list[str], q: dict[str, str], body: Any) -> httpx.Response:
        match (method, *parts):
            case ("GET", "v2", "catalog", "gpus"):
                stock = "HIGH" if self.stock > 0 else "NONE"
                places = [{"id": n, "availability": stock} for n in ("US-KS-2", "CA-MTL-3")]
                gpu = {"id": "H100", "name": "H100", "memory": 80, "availability": stock, "dataCenters": places}
                gpu["price"] = {"secure": self.PRICE, "community": None}
                other = {**gpu, "id": "A40", "price": {"secure": 0.4, "community": 0.3}}
                return said({"gpus": [gpu, other, {"id": "X", "price": None, "dataCenters": None}]})
            case ("POST", "v2", "pods"):
                return self._create(body)
            case ("GET", "v2", "pods"):
                first, size = int(q.get("cursor") or 0), min(self.page, int(q.get("limit", 100)))
                rows = [self._record(p) for p in self.shown()]
                more = first + size < len(rows)
                page = {"hasNextPage": more, "nextCursor": str(first + size) if more else None}
                return said({"pods": rows[first : first + size], "pagination": page})
            case ("GET", "v2", "pods", pod_id):
                pod = self.one(pod_id)
                return said(self._record(pod)) if pod else self.no(404, "missing", "pod not found")
            case ("POST", "v2", "network-volumes"):
                if extra := set(body) - {"name", "size", "dataCenter", "type"}:
                    return self.no(400, "invalid", f"unknown field {extra.pop()}")
                made = self.new_disk(body["name"], body["size"], body["dataCenter"])
                return said(self._disk(made), 201) if made else self.no(400, "limit", "volume quota exceeded")
            case ("GET", "v2", "network-volumes"):
                return said({"networkVolumes": [self._disk(d) for d in self.shown_disks()]})
            case ("DELETE", "v2", "network-volumes", disk_id):
                status = self.end_disk(disk_id)
                return httpx.Response(204) if status == 200 else self.no(status, "", "the volume is attached to a pod")
            case ("DELETE", "v2", "pods", pod_id):
                status = self.end(pod_id)
                return httpx.Response(204) if status == 200 else self.no(status, "", "it cannot be done")
        return self.no(404, "missing", "not found")

    @staticmethod
    def _disk(disk: Disk) -> dict[str, Any]:
        return {"id": disk.id, "name": disk.name, "size": disk.size, "dataCenter": disk.region, "type": "STANDARD"}

    def _create(self, body: Any) -> httpx.Response:
        if extra := set(body) - self.TAKES:
            return self.no(400, "invalid", f"unknown field {extra.pop()}")
        for mount in body.get("mounts", {}).get("network", ()):
            disk = self.disks.get(mount["volumeId"])
            if disk is None or [disk.region] != body.get("dataCenterIds"):
                return self.no(400, "invalid", "network volume not found in this data center")
        if self.broke:
            return self.no(402, "payment", "insufficient balance to create this pod")
        if len(self.living) >= self.quota:
            return self.no(400, "limit", "pod quota exceeded for this account")
        if self.stock <= 0:
            return self.no(400, "capacity", "There are no instances currently available with this specification")
        pod = self.born(body["name"], body, body["gpu"])
        return said(self._record(pod), 201)

    def _record(self, p: Rented) -> dict[str, Any]:
        up = self.ready(p)
        direct = {"host": p.host, "port": 22, "username": "root", "command": f"ssh root@{p.host}"}
        return {
            "id": p.id,
            "name": p.name,
            "status": p.state or ("RUNNING" if up else "STARTING"),
            "gpu": {"id": "H100", "count": 1, "vcpuCount": 16, "memory": 128},
            "cloud": "SECURE",
            "dataCenterId": "US-KS-2",
            "cost": p.price,
            "ssh": {"proxy": None, "direct": direct if up else None},
            "runtime": None,
            "createdAt": "2026-11-22T00:00:00Z",
        }


class LambdaFake(CloudFake):
    """Lambda Cloud's REST API."""

    OPS: ClassVar = {
        "market": ("GET", "/v1/instance-types"),
        "create": ("POST", "/v1/instance-operations/launch"),
        "list": ("GET", "/v1/instances"),
        "delete": ("POST", "/v1/instance-operations/terminate"),
        "new disk": ("POST", "/v1/filesystems"),
        "disks": ("GET", "/v1/file-systems"),
        "end disk": ("DELETE", "/v1/filesystems/"),
    }
    TAKES = frozenset(
        {"region_name", "instance_type_name", "ssh_key_names", "file_system_names", "name", "hostname", "image"}
    )

    def no(self, status: int, kind: str, text: str) -> httpx.Response:
        codes = {
            "auth": "global/invalid-api-key",
            "missing": "global/object-does-not-exist",
            "limit": "global/quota-exceeded",
            "capacity": "instance-operations/launch/insufficient-capacity",
            "payment": "global/invalid-address",
            "invalid": "global/invalid-parameters",
        }
        why = {"code": codes.get(kind, "global/unknown"), "message": text, "suggestion": None}
        return said({"error": why}, status)

    def answer(self, method: str, parts: list[str], q: dict[str, str], body: Any) -> httpx.Response:
        match (method, *parts[1:]):
            case ("GET", "instance-types"):
                return said({"data": {k: self._type(k) for k in ("H100", "A10")}})
            case ("POST", "instance-operations", "launch"):
                return self._launch(body)
            case ("POST", "instance-operations", "terminate"):
                (pod_id,) = body["instance_ids"]
                status = self.end(pod_id)
                if status != 200:
                    return self.no(status, "missing" if status == 404 else "", "it cannot be done")
                return said({"data": {"terminated_instances": [self._record(self.rented[pod_id])]}})
            case ("GET", "instances"):
                return said({"data": [self._record(p) for p in self.shown()]})
            case ("GET", "instances", pod_id):
                pod = self.one(pod_id)
                return said({"data": self._record(pod)}) if pod else self.no(404, "missing", "no such instance")
            case ("POST", "filesystems"):
                if set(body) != {"name", "region"} or not re.fullmatch("[a-zA-Z]+[0-9a-zA-Z-]{0,59}", body["name"]):
                    return self.no(400, "invalid", "invalid parameters")
                made_disk = self.new_disk(body["name"], 0, body["region"])
                return said({"data": self._disk(made_disk)}) if made_disk else self.no(400, "limit", "Quota exceeded.")
            case ("GET", "file-systems"):
                return said({"data": [self._disk(d) for d in self.shown_disks()]})
            case ("DELETE", "filesystems", disk_id):
                status = self.end_disk(disk_id)
                if status != 200:
                    return self.no(status, "missing" if status == 404 else "", "the file system is in use")
                return said({"data": {"deleted_ids": [disk_id]}})
            case ("GET", "ssh-keys"):
                return said({"data": list(self.keys.values())})
            case ("POST", "ssh-keys"):
                made = {"id": f"k{len(self.keys)}", **body}
                self.keys[made["id"]] = made
                return said({"data": made})
            case ("DELETE", "ssh-keys", key_id):
                found = self.keys.pop(key_id, None)
                return said({"data": {}}) if found else self.no(404, "missing", "no such key")
        return self.no(404, "missing", "not found")

    def _type(self, name: str) -> dict[str, Any]:
        cents = int(self.PRICE * 100) if name == "H100" else 75
        kind = {"name": name, "description": f"1x {name} (80 GB PCIe)", "gpu_description": f"{name} (80 GB PCIe)"}
        specs = {"vcpus": 26, "memory_gib": 200, "storage_gib": 512, "gpus": 1}
        kind |= {"price_cents_per_hour": cents, "specs": specs}
        places = [{"name": n, "description": n} for n in ("us-west-1", "us-east-1")] if self.stock > 0 else []
        return {"instance_type": kind, "regions_with_capacity_available": places}

    def _disk(self, disk: Disk) -> dict[str, Any]:
        at = {"name": disk.region, "description": disk.region}
        where = {"mount_point": f"/lambda/nfs/{disk.name}", "is_in_use": self.uses(disk), "bytes_used": 0}
        return {"id": disk.id, "name": disk.name, "created": "2026-11-22T00:00:00Z", "region": at, **where}

    def _launch(self, body: Any) -> httpx.Response:
        for name in body.get("file_system_names", ()):
            disk = next((d for d in self.disks.values() if d.name == name), None)
            if disk is None or disk.region != body["region_name"]:
                return self.no(400, "invalid", "the file system is not in this region")
        if extra := set(body) - self.TAKES:
            return self.no(400, "invalid", f"unknown parameter {extra.pop()}")
        if [k for k in body["ssh_key_names"] if k not in {key["name"] for key in self.keys.values()}]:
            return self.no(400, "invalid", "the key does not exist")
        if self.broke:
            return self.no(400, "payment", "your billing address is invalid")
        if len(self.living) >= self.quota:
            return self.no(400, "limit", "Quota exceeded.")
        if self.stock <= 0:
            return self.no(400, "capacity", "Not enough capacity to fulfill launch request.")
        pod = self.born(body["name"], body, body["instance_type_name"])
        return said({"data": {"instance_ids": [pod.id]}})

    def _record(self, p: Rented) -> dict[str, Any]:
        kind = self._type("H100")["instance_type"] | {"price_cents_per_hour": int(p.price * 100)}
        up = self.ready(p)
        where = {"ip": p.host, "private_ip": "10.1.1.1", "hostname": "h"} if up else {}
        status = p.state or ("terminating" if p.deleting else "active" if up else "booting")
        at = {"region": {"name": "us-west-1", "description": "x"}, "instance_type": kind}
        return {"id": p.id, "name": p.name, "status": status, "ssh_key_names": [], **at, **where}


class VastFake(CloudFake):
    """Vast.ai's REST API."""

    OPS: ClassVar = {
        "market": ("POST", "/v0/bundles/"),
        "create": ("PUT", "/v0/asks/"),
        "list": ("GET", "/v0/instances/"),
        "delete": ("DELETE", "/v0/instances/"),
        "new disk": ("PUT", "/v0/volumes/"),
        "disks": ("GET", "/v0/volumes/"),
        "end disk": ("DELETE", "/v0/volumes/"),
    }
    TAKES = frozenset({"client_id", "image", "disk", "label", "runtype", "price", "env", "onstart", "volume_info"})
    STORAGE = 0.1  # US dollars for a GB and month
    VOLUME_ASKS = 5000  # and the machine's number: what is offered of its disk

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__(now)
        self.unlisted: set[int] = set()
        self.room = 200.0  # GB of each machine's disk that can be had as volumes

    def new_id(self) -> str:
        return str(next(self.numbers))

    def no(self, status: int, kind: str, text: str) -> httpx.Response:
        codes = {"auth": "auth_error", "missing": "no_such_instance", "capacity": "no_such_ask"}
        codes |= {"payment": "insufficient_credit", "limit": "limit", "gone volume": "no_such_volume"}
        return said({"success": False, "error": codes.get(kind, "invalid_args"), "msg": text}, status)

    def answer(self, method: str, parts: list[str], q: dict[str, str], body: Any) -> httpx.Response:
        match (method, *parts[1:]):
            case ("POST", "bundles"):
                taken = {p.offer for p in self.living} | self.unlisted
                wanted = body.get("machine_id", {}).get("in")
                free = [n for n in range(1, 60) if n not in taken and (wanted is None or n in wanted)]
                return said({"success": True, "offers": [self._offer(n) for n in free[: max(0, self.stock)]]})
            case ("POST", "volumes", "search"):
                least = body["disk_space"]["gte"]
                rooms = {n: self.room - self._rented_of(n) for n in range(1, 60)}
                return said({"offers": [self._room(n, room) for n, room in rooms.items() if room >= least]})
            case ("PUT", "volumes"):
                return self._new_volume(body)
            case ("GET", "volumes"):
                return said({"volumes": [self._volume(d) for d in self.shown_disks()]})
            case ("DELETE", "volumes"):
                if body != {"id": int(q["id"])}:
                    return self.no(400, "", "Please provide a valid volume ID.")
                status = self.end_disk(q["id"])
                if status != 200:
                    kind = "gone volume" if status == 404 else ""
                    return self.no(status, kind, "Volume with that ID does not exist, or an instance has it.")
                return said({"success": True})
            case ("PUT", "asks", number):
                return self._rent(int(number), body)
            case ("GET", "instances"):
                return said({"instances": [self._record(p) for p in self.shown()]})
            case ("GET", "instances", pod_id):
                pod = self.one(pod_id)
                return said({"instances": self._record(pod) if pod else None})
            case ("DELETE", "instances", pod_id):
                status = self.end(pod_id)
                if status != 200:
                    return self.no(status, "missing" if status == 404 else "", "no such instance")
                return said({"success": True})
            case ("GET", "users", "current"):
                return said({"id": 7, "credit": 100.0, "balance": 0.0})
            case ("GET", "ssh"):
                return said(list(self.keys.values()))
            case ("POST", "ssh"):
                made = {"id": len(self.keys) + 1, "user_id": 7, "public_key": body["ssh_key"]}
                self.keys[str(made["id"])] = made
                return said({"success": True, "key": made})
            case ("DELETE", "ssh", key_id):
                found = self.keys.pop(key_id, None)
                return said({"success": True}) if found else self.no(404, "missing", "no such key")
        return self.no(404, "missing", "not found")

    def _offer(self, n: int) -> dict[str, Any]:
        price = self.PRICE + n / 1000
        where = {"id": n, "machine_id": n, "host_id": n, "geolocation": "Oslo, NO", "rentable": True, "rented": False}
        what = {"gpu_name": "H100", "num_gpus": 1, "gpu_ram": 81559, "disk_space": 500.0, "verification": "verified"}
        return {**where, **what, "dph_total": price, "min_bid": price / 2}

    def _rented_of(self, machine: int) -> int:
        return sum(d.size for d in self.disks.values() if d.region == f"machine {machine}")

    def _room(self, n: int, room: float) -> dict[str, Any]:
        where = {"id": self.VOLUME_ASKS + n, "machine_id": n, "host_id": n, "geolocation": "Oslo, NO"}
        money = {"storage_cost": self.STORAGE, "storage_total_cost": self.STORAGE * room / 720.0}
        return {**where, **money, "disk_space": room, "verification": "verified"}

    def _new_volume(self, body: Any) -> httpx.Response:
        machine = body["id"] - self.VOLUME_ASKS
        if set(body) != {"id", "size", "name"} or not re.fullmatch("[A-Za-z0-9_]{1,64}", body["name"]):
            return self.no(400, "invalid", "invalid arguments")
        if body["size"] > self.room - self._rented_of(machine):
            return self.no(400, "capacity", "no_such_ask: it is not available")
        made = self.new_disk(body["name"], body["size"], f"machine {machine}")
        if made is None:
            return self.no(400, "limit", "volume limit exceeded: the maximum number of volumes is reached")
        return said({"success": True, "volume_name": f"V.{made.id}"})

    def _volume(self, disk: Disk) -> dict[str, Any]:
        with_it = [{"id": int(p.id)} for p in self.living if disk.id in json.dumps(p.asked)]
        where = {
            "machine_id": int(disk.region.removeprefix("machine ")),
            "geolocation": "Oslo, NO",
            "instances": with_it,
        }
        return {"id": int(disk.id), "label": disk.name, "disk_space": disk.size, "status": "created", **where}

    def _rent(self, number: int, body: Any) -> httpx.Response:
        if extra := set(body) - self.TAKES:
            return self.no(400, "invalid", f"unknown argument {extra.pop()}")
        if link := body.get("volume_info"):
            disk = self.disks.get(str(link["volume_id"]))
            if disk is None or disk.region != f"machine {number}" or link["create_new"] or not link["mount_path"]:
                return self.no(400, "invalid", "the volume is not on this machine")
        if self.broke:
            return self.no(400, "payment", "you lack credit")
        if len(self.living) >= self.quota:
            return self.no(400, "limit", "instance limit exceeded: maximum number of instances is reached")
        if self.stock <= 0 or number in {p.offer for p in self.living}:
            return self.no(400, "capacity", "error 404/3603: no_such_ask, it is not available")
        pod = self.born(body["label"], body, number)
        whole = (self.PRICE + number / 1000) * self.price_factor
        pod.price = min(whole, body.get("price", whole))  # interruptible: it costs what is bid
        return said({"success": True, "new_contract": int(pod.id)})

    def _record(self, p: Rented) -> dict[str, Any]:
        up = self.ready(p)
        status = p.state or ("running" if up else "loading")
        ports = {"22/tcp": [{"HostIp": "0.0.0.0", "HostPort": "22"}]} if up else {}
        at = {"public_ipaddr": p.host, "ports": ports, "ssh_host": "ssh4.vast.ai", "ssh_port": 12345}
        money = {"dph_total": p.price, "num_gpus": 1, "gpu_name": "H100"}
        return {"id": int(p.id), "label": p.name, "actual_status": status, "status_msg": None, **at, **money}
