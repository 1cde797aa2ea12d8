"""The Prime Intellect API as far as the console uses it: market, life of pods, wallet, limits, and failures on order.

Strict where the real one is strict (unknown body keys, missing data centre), in its own time, and it keeps the books:
``requests`` is what was asked, ``billing`` is what still costs.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from uuid import uuid4

import httpx
from marketschema import wrong_answer
from primeoffers import market
from primerecords import FakeDisk, FakePod, Fault, ended, iso
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

KEY = "test-key"
_POD_KEYS = {
    *("name", "cloudId", "gpuType", "socket", "gpuCount", "diskSize", "vcpus", "memory", "maxPrice", "image"),
    *("customTemplateId", "dataCenterId", "country", "security", "envVars", "jupyterPassword", "sshKeyId"),
    *("autoRestart", "prepaidForHr"),
}
_BODY_KEYS = {
    *("pod", "provider", "disks", "team", "team_member_ids", "shared_with_team", "sharedWithTeam", "teamMemberIds")
}


class PrimeFake:
    """State and application. ``on_born(pod)`` may start a real SSH server and return its (user, host, port)."""

    def __init__(self, now: Callable[[], float], *, on_born: Callable[[FakePod], Awaitable[Any]] | None = None) -> None:
        self.now = now
        self.on_born = on_born
        self.offers = market()
        self.pods: dict[str, FakePod] = {}
        self.keys: dict[str, dict[str, Any]] = {}
        self.disks: dict[str, FakeDisk] = {}
        self.ended_disks: list[dict[str, Any]] = []
        self.disk_quota = 50
        self.disk_boot_s = 20.0
        self.disks_shown_after = 0.0
        self.disk_price_factor = 1.0
        self.disk_refusals = 0
        self.balance = 100.0
        self.scope: dict[str, Any] = {
            "availability": {"read": True, "write": False},
            "instances": {"read": True, "write": True},
            "ssh_keys": {"read": True, "write": True},
        }
        self.max_instances = 50
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str, Any]] = []
        self.visible_after = 0.0
        self.boot_s = 90.0
        self.spent = 0.0
        self.dearest = 0.0
        self.cap = float("inf")  # US dollars an hour that our own pods may cost together
        self.over_cap = 0.0  # US dollars that they cost beyond it
        self.total_lies = 0  # how much more than there is totalCount and total_count promise
        self.drifts = False  # it has left its schema, as an API does one day: answers are not held against it
        self.repeat_rows = False  # pages overlap, as if rows had shifted under the reader
        self._billed = now()
        self.app = Starlette(routes=[Route("/{rest:path}", self._serve, methods=["GET", "POST", "PATCH", "DELETE"])])

    # what tests ask

    @property
    def billing(self) -> list[str]:
        """Names of pods that cost money now."""
        return sorted(p.record["name"] for p in self.pods.values() if p.dead is None)

    @property
    def living(self) -> list[FakePod]:
        return [p for p in self.pods.values() if p.dead is None]

    def asked(self, method: str, path: str) -> list[Any]:
        """Bodies of the requests of this kind."""
        return [body for m, p, body in self.requests if m == method and p.startswith(path)]

    def fail(self, method: str, path: str, action: str, *nth: int, **more: Any) -> None:
        self.faults.append(Fault(method, path, action, frozenset(nth), **more))

    def foreign(self, name: str) -> str:
        """A pod that somebody else made on the same account."""
        pod = self.born({"pod": {"name": name, "gpuType": "H100_80GB", "gpuCount": 1}}, self.offers[0], True)
        pod.foreign = True
        return str(pod.record["id"])

    def kill(self, pod: FakePod) -> None:
        self._bill()
        pod.dead = self.now()
        pod.record["terminatedAt"] = iso(pod.dead)

    # time and money

    @property
    def bill(self) -> float:
        """US dollars that everything has cost until now."""
        self._bill()
        return self.spent

    def reprice(self, pod: FakePod, price_hr: float) -> None:
        """From now on this pod costs so much an hour."""
        self._bill()
        pod.reprice(price_hr, self.now())

    def _bill(self) -> None:
        now = self.now()
        hours = (now - self._billed) / 3600.0
        self._billed = now
        running = sum(float(p.record["priceHr"]) for p in self.pods.values() if p.dead is None)
        running += sum(float(d.record["priceHr"]) for d in self.disks.values())
        self.dearest = max(self.dearest, running)
        ours = sum(float(p.record["priceHr"]) for p in self.living if not p.foreign)
        self.over_cap += max(0.0, ours - self.cap) * hours
        self.spent += running * hours
        self.balance -= running * hours
        if self.balance <= 0:
            for pod in [p for p in self.pods.values() if p.dead is None]:
                pod.dead = now
                pod.record["terminatedAt"] = iso(now)

    def _age(self, pod: FakePod) -> None:
        """Bring a pod's record to the present moment of its life."""
        r, sim, age = pod.record, pod.sim, self.now() - pod.born
        if pod.dead is None and pod.deleting is not None and self.now() >= pod.deleting:
            self.kill(pod)
        if pod.dead is None and "vanish_s" in sim and age >= sim["vanish_s"]:
            self.kill(pod)
        if pod.dead is not None:
            r["status"] = "TERMINATED"
        elif pod.deleting is not None:
            r["status"] = "DELETING"
        else:
            self.grow(r, sim, age, pod.disks)

    def grow(self, r: dict[str, Any], sim: dict[str, Any], age: float, disks: tuple[str, ...]) -> None:
        boot = sim.get("boot_s", self.boot_s)
        r["status"] = "PROVISIONING" if age < boot / 3 else "PENDING" if age < boot else "ACTIVE"
        done = age >= boot * 1.5
        r["installationStatus"] = "FINISHED" if done else "ACTIVE" if age >= boot else "PENDING"
        r["installationProgress"] = 100 if done else 10
        for at, changes in sim.get("timeline", ()):
            if age >= at:
                r.update(changes)
        if r["status"] == "ACTIVE":
            user, host, port = sim.get("at", ("ubuntu", "10.0.0.1", 22))
            written = sim.get("ssh", "{user}@{host} -p {port}")
            r["sshConnection"] = (
                written.format(user=user, host=host, port=port) if isinstance(written, str) else written
            )
            r["ip"] = sim.get("ip", host)
            r["primePortMapping"] = sim.get("ports", [])
            r["attachedResources"] = [
                {"resourceType": "DISK", "id": disk, "status": "MOUNTED", "mountPath": "/workspace", "isShared": True}
                for disk in disks
            ]

    # requests

    async def _serve(self, request: Request) -> Response:
        path = request.url.path.removeprefix("/api/v1")
        raw = await request.body()
        body = json.loads(raw) if raw else None
        self.requests.append((request.method, path, body))
        self._bill()
        for fault in self.faults:
            if fault.method == request.method and path.startswith(fault.path):
                fault.seen += 1
                if not fault.nth or fault.seen in fault.nth:
                    return await self._fault(fault, request, path, body)
        answer = await self._answer(request, path, body)
        if not self.drifts and answer.headers.get("content-type") == "application/json":
            asked = (request.method, f"/api/v1{path}")
            wrong = wrong_answer(*asked, answer.status_code, json.loads(bytes(answer.body)))
            assert not wrong, f"{asked} answered {answer.status_code} against the schema: {wrong[:3]}"
        return answer

    async def _fault(self, fault: Fault, request: Request, path: str, body: Any) -> Response:
        if fault.action == "answer":
            return JSONResponse(fault.body or {"detail": "Internal error"}, fault.status, headers=fault.headers)
        if fault.action == "html":
            return Response("<html><h1>502 Bad Gateway</h1></html>", 502, media_type="text/html")
        if fault.action == "timeout":
            raise httpx.ReadTimeout("no answer")
        if fault.action == "refuse":
            raise httpx.ConnectError("connection refused")
        if fault.action == "commit_then_timeout":
            await self._answer(request, path, body)
            raise httpx.ReadTimeout("no answer")
        if fault.action == "commit_then_500":
            await self._answer(request, path, body)
            return JSONResponse({"detail": "Error during pod provisioning"}, 500)
        if fault.action == "commit_then_reset":
            await self._answer(request, path, body)
            raise httpx.ReadError("connection reset by peer")
        if fault.action == "redirect":
            return Response(status_code=307, headers={"location": str(request.url)})
        if fault.action == "slow":
            return StreamingResponse(self._stalling(), media_type="application/json")
        if fault.action == "ignore":
            return JSONResponse({"status": "DELETING"})
        raise AssertionError(fault.action)

    @staticmethod
    async def _stalling() -> AsyncIterator[bytes]:
        yield b'{"data": ['
        raise httpx.ReadTimeout("the body stopped coming")

    async def _answer(self, request: Request, path: str, body: Any) -> Response:
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return JSONResponse({"detail": "Invalid token"}, 401)
        parts = [p for p in path.split("/") if p]
        slash = path.endswith("/")
        if path in ("/pods", "/ssh_keys", "/disks") or (slash and len(parts) > 1):
            target = request.url.replace(path=f"/api/v1{path.rstrip('/')}{'' if slash else '/'}")
            return Response(status_code=307, headers={"location": str(target)})
        q = request.query_params
        match (request.method, *parts):
            case ("GET", "availability", "gpus" | "multi-node"):
                return self._market(q)
            case ("GET", "availability", *rest) if rest in ([], ["clusters"]):
                rows = json.loads(bytes(self._market(q).body))["items"]
                return JSONResponse({r["gpuType"]: [x for x in rows if x["gpuType"] == r["gpuType"]] for r in rows})
            case ("GET", "availability", "multi-node-summary"):
                return JSONResponse({"H100_80GB": {"8": {"cheapest": {"onDemand": 16.0}}}})
            case ("GET", "availability", "disks"):
                rows = [self._disk_offer(o) for o in self.offers]
                return JSONResponse({"items": rows, "totalCount": len(rows)})
            case ("GET", "availability", "gpu-summary"):
                return JSONResponse({str(o.get("gpuType")): {"1": {"cheapest": {}}} for o in self.offers})
            case ("POST", "pods"):
                return await self._create(body)
            case ("GET", "pods"):
                return self._page(q, [r for r in self.records_told() if r["status"] != "TERMINATED"])
            case ("GET", "pods", "history"):
                dead = [p for p in self.pods.values() if p.dead is not None]
                rows = sorted(dead, key=lambda p: -(p.dead or 0))
                return self._page(q, [*self.ended_disks, *(ended(p) for p in rows)])
            case ("GET", "pods", "status"):
                keep = ("providerType", "status", "installationStatus", "sshConnection", "ip")
                rows = [(i, self.pods[i].record) for i in q.getlist("pod_ids") if i in self.pods]
                data = [{"podId": i, **{k: r[k] for k in keep}} for i, r in rows]
                return JSONResponse({"data": data, "status": None})
            case ("GET", "pods", pod_id):
                return self._one(pod_id)
            case ("GET", "pods", _, "log"):
                return JSONResponse(["booting", "ready"])
            case ("DELETE", "pods", pod_id):
                return self._delete(pod_id)
            case ("GET", "ssh_keys"):
                return self._page(q, list(self.keys.values()))
            case ("POST", "ssh_keys"):
                key = {"id": uuid4().hex, "userId": "u1", "isPrimary": not self.keys, "isUserKey": True, **body}
                self.keys[key["id"]] = key
                return JSONResponse(key)
            case ("DELETE", "ssh_keys", key_id):
                return JSONResponse({}, 200 if self.keys.pop(key_id, None) else 404)
            case ("PATCH", "ssh_keys", key_id) if body == {"isPrimary": True}:
                return JSONResponse({"message": "ok", "updated_fields": body}, 200 if key_id in self.keys else 404)
            case (_, "disks", *rest):
                return self._disks(request.method, rest, q, body)
            case ("GET", "user", "teams"):
                return self._page(q, [{"teamId": f"t{n}", "name": f"team {n}", "role": "ADMIN"} for n in range(150)])
            case ("GET", "teams", "t1", "members"):
                return self._page(q, [{"userId": "u1", "userName": "me", "role": "ADMIN"}])
            case ("GET", "user", "whoami"):
                return JSONResponse({"data": {"id": "u1", "scope": self.scope}, "status": None})
            case ("GET", "billing", "wallet"):
                return JSONResponse({"wallet_id": "w1", "balance_usd": round(self.balance, 4), "currency": "USD"})
        return JSONResponse({"detail": "Not Found"}, 404)

    def _disks(self, method: str, rest: list[str], q: Any, body: Any) -> Response:
        shown = {d.id: d for d in self.disks.values() if self.now() - d.born >= self.disks_shown_after}
        match (method, *rest):
            case ("GET",):
                return self._page(q, [self._told_disk(d) for d in shown.values()])
            case ("POST",):
                return self._new_disk(body)
        found = shown.get(rest[0])
        if found is None:
            return JSONResponse({"detail": "Disk not found"}, 404)
        if method == "PATCH":
            found.record |= body
            found.name = body["name"]
        elif method == "DELETE":
            if self.uses(found):
                return JSONResponse({"detail": "The disk is attached to a pod"}, 400)
            if self.disk_refusals:
                self.disk_refusals -= 1
                return JSONResponse({"detail": "Internal error"}, 500)
            self._bill()
            del self.disks[found.id]
            billed = float(found.record["priceHr"]) * (self.now() - found.born) / 3600.0
            none = {"gpuName": "", "gpuCount": 0, "socket": None}
            same = {k: found.record[k] for k in ("id", "name", "userId", "providerType", "createdAt", "priceHr")}
            same |= {"type": "Disk", "terminatedAt": iso(self.now()), "totalBilledPrice": round(billed, 6)}
            self.ended_disks.append(none | same)
        return JSONResponse(self._told_disk(found))

    @staticmethod
    def _disk_offer(o: dict[str, Any]) -> dict[str, Any]:
        """A data centre that has pods has disks."""
        spec = {"minCount": 50, "maxCount": 4000, "step": 10, "pricePerUnit": 0.0001}
        row = {
            "cloudId": f"disk-{o['dataCenter']}",
            "security": "secure_cloud",
            "stockStatus": "Available",
            "spec": spec,
        }
        return row | {k: o[k] for k in ("provider", "dataCenter", "country", "region")}

    def _new_disk(self, body: Any) -> Response:
        extra = set(body) - {"disk", "provider", "team"} | set(body["disk"]) - {
            "size", "name", "country", "cloudId", "dataCenterId"}  # fmt: skip
        if extra:
            return JSONResponse({"errors": [{"param": extra.pop(), "details": "Extra inputs are not permitted"}]}, 422)
        asked, provider = body["disk"], body["provider"]["type"]
        rows = [self._disk_offer(o) for o in self.offers]
        fitting = [r for r in rows if (r["provider"], r["dataCenter"]) == (provider, asked.get("dataCenterId"))]
        if not fitting or asked["cloudId"] != fitting[0]["cloudId"] or (asked["size"] - 50) % 10:
            return JSONResponse({"detail": "No such disk is offered"}, 400)
        if len(self.disks) >= self.disk_quota:
            return JSONResponse({"detail": "Maximum number of disks reached. Limit: 50"}, 400)
        made = self.new_disk(asked["name"], asked["size"], f"{provider}/{asked['dataCenterId']}")
        assert made is not None
        return JSONResponse(self._told_disk(made))

    def new_disk(self, name: str, size: int, region: str) -> FakeDisk | None:
        """Also one that somebody else made; without a region, where the first offer is."""
        region = region or f"{self.offers[0]['provider']}/{self.offers[0]['dataCenter']}"
        self._bill()
        price = round(size * 0.0001 * self.disk_price_factor, 6)
        record = {"id": uuid4().hex, "name": name, "size": size, "userId": "u1", "priceHr": price, "pods": []}
        record |= {"providerType": region.partition("/")[0], "createdAt": iso(self.now())}
        made = FakeDisk(str(record["id"]), name, size, region, self.now(), record)
        self.disks[made.id] = made
        return made

    def _told_disk(self, disk: FakeDisk) -> dict[str, Any]:
        up = self.now() - disk.born >= self.disk_boot_s
        with_it = [p.id for p in self.living if disk.id in p.disks]
        return disk.record | {"status": "ACTIVE" if up else "PROVISIONING", "pods": with_it}

    def uses(self, disk: FakeDisk) -> bool:
        for pod in self.pods.values():
            self._age(pod)
        return any(disk.id in p.disks for p in self.living)

    def records_told(self) -> list[dict[str, Any]]:
        for pod in self.pods.values():
            self._age(pod)
        return [p.record for p in self.pods.values() if self.now() - p.born >= self.visible_after]

    def _market(self, q: Any) -> Response:
        rows = [{k: v for k, v in o.items() if k != "sim"} for o in self.offers]
        rows = [r for r in rows if q.get("gpu_type") in (None, r.get("gpuType"))]
        there = {self.disks[i].region for i in q.getlist("disks") if i in self.disks}
        rows = [r for r in rows if not q.getlist("disks") or f"{r['provider']}/{r['dataCenter']}" in there]
        page, size = int(q.get("page", 1)), min(100, int(q.get("page_size", 100)))
        first = max(0, (page - 1) * size - self.repeat_rows)
        return JSONResponse({"items": rows[first : first + size], "totalCount": len(rows) + self.total_lies})

    def _page(self, q: Any, rows: list[dict[str, Any]]) -> Response:
        offset, limit = int(q.get("offset", 0)), min(100, int(q.get("limit", 100)))
        data = rows[max(0, offset - self.repeat_rows) : offset + limit]
        return JSONResponse(
            {"total_count": len(rows) + self.total_lies, "offset": offset, "limit": limit, "data": data, "status": None}
        )

    def _one(self, pod_id: str) -> Response:
        pod = self.pods.get(pod_id)
        if pod is None or self.now() - pod.born < self.visible_after:
            return JSONResponse({"detail": "Pod not found"}, 404)
        self._age(pod)
        gone = pod.dead is not None and "vanish_s" in pod.sim
        return JSONResponse({"detail": "Pod not found"}, 404) if gone else JSONResponse(pod.record)

    async def _create(self, body: Any) -> Response:
        extra = [k for k in body if k not in _BODY_KEYS] + [k for k in body["pod"] if k not in _POD_KEYS]
        if extra:
            return JSONResponse({"errors": [{"param": extra[0], "details": "Extra inputs are not permitted"}]}, 422)
        want, provider = body["pod"], body["provider"]["type"]
        if "dataCenterId" not in want:
            return JSONResponse({"detail": "Missing field: data_center_id not specified"}, 400)
        if not want.get("maxPrice"):
            return JSONResponse({"detail": "Missing field: max_price not specified"}, 400)
        same = ("cloudId", "gpuType", "socket", "gpuCount")
        found = [
            o
            for o in self.offers
            if o["provider"] == provider
            and o["dataCenter"] == want["dataCenterId"]
            and all(o[k] == want[k] for k in same)
        ]
        if not found or found[0]["sim"].get("capacity", 99) <= 0:
            return JSONResponse({"detail": "No capacity available for this configuration"}, 400)
        if want["image"] not in found[0]["images"]:
            return JSONResponse({"detail": f"Provider {provider} is not supported for image {want['image']}"}, 400)
        if len(self.billing) >= self.max_instances:
            return JSONResponse({"detail": f"Maximum number of instances reached. Limit: {self.max_instances}"}, 400)
        if self.balance < 1.0:
            return JSONResponse({"detail": "Payment required"}, 402)
        for disk in (self.disks.get(i) for i in body.get("disks") or ()):
            if disk is None or disk.region != f"{provider}/{want['dataCenterId']}":
                return JSONResponse({"detail": "The disk is not in this data center"}, 400)
            if self._told_disk(disk)["status"] != "ACTIVE":
                return JSONResponse({"detail": "The disk is not ready"}, 400)
        pod = self.born(body, found[0], want.get("sshKeyId") in self.keys)
        if self.on_born is not None:
            pod.sim["at"] = await self.on_born(pod)
        self._age(pod)
        return JSONResponse(pod.record)

    def born(self, body: Any, row: dict[str, Any], key_ok: bool) -> FakePod:
        sim, now = dict(row["sim"]), self.now()
        if "capacity" in sim:
            row["sim"]["capacity"] -= 1
        price = (row["prices"]["communityPrice"] or row["prices"]["onDemand"]) * sim.get("price_factor", 1.0)
        record = {
            "id": uuid4().hex,
            "name": body["pod"]["name"],
            "userId": "u1",
            "socket": row["socket"],
            "providerType": sim.get("provider", row["provider"]),
            "type": "HOSTED",
            "status": "PROVISIONING",
            "installationStatus": "PENDING",
            "installationFailure": None,
            "installationProgress": None,
            "createdAt": iso(now),
            "terminatedAt": None,
            "gpuName": body["pod"]["gpuType"],
            "gpuCount": body["pod"]["gpuCount"],
            "priceHr": price,
            "sshConnection": None,
            "ip": None,
            "primePortMapping": None,
            "autoRestart": False,
        }
        pod = FakePod(record, sim, now, key_ok, refused_deletes=sim.get("refuse_deletes", 0))
        pod.disks = tuple(body.get("disks") or ())
        self.pods[record["id"]] = pod
        self._bill()
        return pod

    def _delete(self, pod_id: str) -> Response:
        pod = self.pods.get(pod_id)
        if pod is None or pod.dead is not None:
            return JSONResponse({"detail": "Pod not found"}, 404)
        if pod.refused_deletes > 0:
            pod.refused_deletes -= 1
            return JSONResponse({"detail": "Internal error"}, 500)
        pod.deleting = pod.deleting or self.now() + pod.sim.get("delete_s", 6.0)
        return JSONResponse({"status": "DELETING"})
