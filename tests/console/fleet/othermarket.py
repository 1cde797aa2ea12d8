"""A second fake market, written from the vendor's schema alone: it knows nothing of how the first one was made.

Where the document leaves a choice, it takes the awkward one: optional fields left out, totals missing, rows in any
order, answers that show the world as it was some time ago, strangers who use our very names. Every answer is held
against the schema before it leaves.
"""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any

import httpx
from marketschema import document, wrong_answer, wrong_body

KEY = "other-key"
ME, STRANGER = "user-me", "user-stranger"
PROVIDERS = ("latitude", "nebius", "denvr", "vultr", "scaleway")
Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True)
class Quirks:
    """How this market behaves. Times in seconds; numbers of requests count from 1."""

    list_lag: float = 0.0
    get_lag: float = 0.0
    history_lag: float = 0.0
    lag_of: tuple[tuple[int, float], ...] = ()  # a lag of its own for the list and look-up of the nth created pod
    lost: frozenset[int] = frozenset()  # creates that are obeyed, and never answered
    failed: frozenset[int] = frozenset()  # creates that are answered 500 and not obeyed
    half: frozenset[int] = frozenset()  # creates that are answered 500 and obeyed all the same
    nameless: bool = False  # a create's answer has no id: the schema does not require one
    order: str = "asc"  # asc, desc, name, shuffled: how lists are sorted
    total: str = "right"  # right, missing, zero, page, huge
    page_most: int = 100
    busy: frozenset[int] = frozenset()  # requests answered 429 with a date
    busy_s: float = 25.0
    bare: bool = False  # only what the schema requires
    boot_s: float = 90.0
    boot_of: tuple[tuple[int, float], ...] = ()
    steps: str = "plain"  # plain, backwards, silent, percent: what is told while a pod boots
    first_price: float | None = None  # what a create's answer says it costs, whatever it costs
    price_factor: float = 1.0  # of what is billed over what was offered
    bill_factor: float = 1.0  # of what the history says was billed over what it should be
    after: str = "told"  # told, 404: how a look-up answers about a pod that has ended
    delete_s: float = 5.0
    delete_lost: frozenset[int] = frozenset()  # deletes that are obeyed, and never answered
    delete_idle: frozenset[int] = frozenset()  # deletes that are answered, and not obeyed
    delete_blind: bool = False  # a delete does not know a pod that look-ups do not show yet
    latency: float = 0.0
    create_s: float = 0.0
    seed: int = 1


@dataclass
class Rented:
    """One pod as it truly is."""

    number: int
    name: str
    owner: str
    offer: dict[str, Any]
    price: float
    born: float
    boot_s: float
    image: str
    id: str = ""
    dead: float | None = None
    order_to_end: float | None = None

    def cost(self, now: float) -> float:
        return self.price * max(0.0, (now if self.dead is None else self.dead) - self.born) / 3600.0


@dataclass
class OtherMarket(httpx.AsyncBaseTransport):
    """The market as a transport of ``httpx``: give it to a client, ask it afterwards what was done to it."""

    now: Callable[[], float]
    sleep: Sleep
    quirks: Quirks = field(default_factory=Quirks)
    pods: dict[str, Rented] = field(default_factory=dict)
    keys: dict[str, dict[str, Any]] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    creates: int = 0
    deletes: int = 0
    deleted: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._random = random.Random(self.quirks.seed)
        self._numbers = 0
        self.offers = [_offer(p, 1.0 + n / 10 + k / 50) for n, p in enumerate(PROVIDERS) for k in range(3)]

    # what is true

    def settle(self) -> None:
        """Let what was to happen until now have happened."""
        for pod in self.pods.values():
            if pod.dead is None and pod.order_to_end is not None and self.now() >= pod.order_to_end:
                pod.dead = pod.order_to_end

    @property
    def ours(self) -> list[Rented]:
        """Our pods that cost money now."""
        self.settle()
        return [p for p in self.pods.values() if p.dead is None and p.owner == ME]

    @property
    def made(self) -> list[Rented]:
        return [p for p in self.pods.values() if p.owner == ME]

    def stranger(self, name: str, born: float | None = None) -> Rented:
        """Somebody else's pod on the same account's list, under any name, ours included."""
        return self._rent(name, STRANGER, self.offers[0], self.now() if born is None else born)

    def take_away(self, pod_id: str) -> None:
        """The provider ends a pod without being asked."""
        self.pods[pod_id].dead = self.now()

    @property
    def touched(self) -> list[str]:
        """Ids of strangers' pods that somebody asked to delete."""
        return [i for i in self.deleted if i in self.pods and self.pods[i].owner == STRANGER]

    def spent(self) -> float:
        self.settle()
        return sum(p.cost(self.now()) for p in self.made)

    def _rent(self, name: str, owner: str, offer: dict[str, Any], born: float, image: str = "") -> Rented:
        self._numbers += 1
        number = self._numbers
        price = float(offer["prices"]["onDemand"]) * (self.quirks.price_factor if owner == ME else 1.0)
        boot = dict(self.quirks.boot_of).get(number, self.quirks.boot_s)
        pod = Rented(number, name, owner, offer, price, born, boot, image or "ubuntu_22_cuda_12")
        pod.id = f"{self._random.getrandbits(128):032x}"
        self.pods[pod.id] = pod
        return pod

    # what is shown

    def _lag(self, pod: Rented, usual: float) -> float:
        return dict(self.quirks.lag_of).get(pod.number, usual) if pod.owner == ME else 0.0

    def _shown(self, pod: Rented, at: float) -> dict[str, Any]:
        """The pod's record as it was at a moment."""
        q, age = self.quirks, at - pod.born
        share = min(1.0, max(0.0, age / pod.boot_s)) if pod.boot_s else 1.0
        word = _word(q.steps, share)
        dead = pod.dead is not None and pod.dead <= at
        if dead:
            word = "TERMINATED"
        elif pod.order_to_end is not None and pod.order_to_end - q.delete_s <= at:
            word = "DELETING"
        record: dict[str, Any] = {
            "id": pod.id,
            "userId": pod.owner,
            "name": pod.name,
            "providerType": pod.offer["provider"],
            "gpuName": pod.offer["gpuType"],
            "gpuCount": pod.offer["gpuCount"],
            "socket": pod.offer["socket"],
            "priceHr": pod.price,
            "status": word,
            "createdAt": _moment(pod.born),
        }
        ready = word == "ACTIVE"
        record["installationStatus"] = "FINISHED" if ready else "PENDING"
        if ready:
            record["sshConnection"] = f"ubuntu@10.9.{pod.number // 200}.{pod.number % 200} -p 22"
        if dead and pod.dead is not None:
            record["terminatedAt"] = _moment(pod.dead)
        if not q.bare:
            record |= {
                "type": "HOSTED",
                "teamId": None,
                "updatedAt": _moment(at),
                "installationProgress": int(100 * share) if q.steps == "percent" or ready else None,
                "environmentType": pod.image,
                "primePortMapping": [],
                "ip": f"10.9.{pod.number // 200}.{pod.number % 200}" if ready else None,
                "resources": {"memory": 180, "disk": 100, "vcpus": 26},
                "isSpot": False,
            }
        return record

    # requests

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path, method = request.url.path, request.method
        self.asked.append((method, path))
        number = len(self.asked)
        q = self.quirks
        if q.latency:
            await self.sleep(q.latency * self._random.uniform(0.5, 1.5))
        self.settle()
        if number in q.busy:
            headers = {"Retry-After": _http_date(self.now() + q.busy_s), "Date": _http_date(self.now())}
            return httpx.Response(429, json={"detail": "Too many requests"}, headers=headers, request=request)
        if request.headers.get("authorization") != f"Bearer {KEY}":
            status, body = 401, {"detail": "Authorization failed"}
        else:
            status, body = await self._answer(method, path, request)
        wrong = wrong_answer(method, path, status, body)
        assert not wrong, f"{method} {path} answered {status} against the schema: {wrong[:3]}"
        return httpx.Response(status, json=body, request=request)

    async def _answer(self, method: str, path: str, request: httpx.Request) -> tuple[int, Any]:
        name = path.removeprefix("/api/v1")
        body = json.loads(request.content) if request.content else None
        if wrong := wrong_body(method, path, body):
            return 422, {"errors": [{"param": w.partition(":")[0], "details": w.partition(": ")[2]} for w in wrong]}
        match method, [p for p in name.split("/") if p]:
            case "GET", ["availability", "gpus"]:
                return 200, self._offered(request.url.params)
            case "GET", ["availability", "gpu-summary"]:
                return 200, {"H100_80GB": {"1": {"cheapest": {"onDemand": 1.0}}}}
            case "POST", ["pods"]:
                return await self._create(body, request)
            case "GET", ["pods"]:
                return 200, self._listed(request.url.params)
            case "GET", ["pods", "history"]:
                return 200, self._past(request.url.params)
            case "GET", ["pods", pod_id]:
                return self._one(pod_id)
            case "DELETE", ["pods", pod_id]:
                return self._delete(pod_id, request)
            case "GET", ["ssh_keys"]:
                return 200, self._page(list(self.keys.values()), request.url.params)
            case "POST", ["ssh_keys"]:
                key = {"id": f"k{len(self.keys)}", "userId": ME, "isPrimary": False, "isUserKey": True, **body}
                self.keys[key["id"]] = key
                return 200, key
            case "DELETE", ["ssh_keys", key_id]:
                self.keys.pop(key_id, None)
                return 200, {}
        return 404, {"detail": "Not Found"}

    def _offered(self, params: httpx.QueryParams) -> dict[str, Any]:
        rows = [o for o in self.offers if params.get("gpu_type") in (None, "", o["gpuType"])]
        size, page = int(params.get("page_size", 100)), int(params.get("page", 1))
        return {"items": rows[(page - 1) * size : page * size], "totalCount": len(rows)}

    async def _create(self, body: Any, request: httpx.Request) -> tuple[int, Any]:
        q = self.quirks
        self.creates += 1
        number = self.creates
        if q.create_s:
            await self.sleep(q.create_s * self._random.uniform(0.7, 1.3))
        if number in q.failed:
            return 500, {"detail": "Error during pod provisioning"}
        want = body["pod"]
        asked = (body["provider"]["type"], want["cloudId"])
        fitting = [o for o in self.offers if (o["provider"], o["cloudId"]) == asked]
        if not fitting or fitting[0]["stockStatus"] == "Unavailable":
            return 400, {"detail": "No capacity available"}
        pod = self._rent(want.get("name", "pod"), ME, fitting[0], self.now(), want.get("image", ""))
        if number in q.half:
            return 500, {"detail": "Error during pod provisioning"}
        if number in q.lost:
            raise httpx.ReadTimeout("no answer", request=request)
        record = self._shown(pod, self.now())
        if q.nameless:
            del record["id"]
        if q.first_price is not None:
            record["priceHr"] = q.first_price
        return 200, record

    def _listed(self, params: httpx.QueryParams) -> dict[str, Any]:
        rows = []
        for pod in self.pods.values():
            at = self.now() - self._lag(pod, self.quirks.list_lag)
            if pod.born <= at and (pod.dead is None or pod.dead > at):
                rows.append(self._shown(pod, at))
        key: Callable[[dict[str, Any]], Any] = {
            "asc": lambda r: (r["createdAt"], r["id"]),
            "desc": lambda r: (r["createdAt"], r["id"]),
            "name": lambda r: (r["name"], r["id"]),
            "shuffled": lambda r: self._random.random(),
        }[self.quirks.order]
        return self._page(sorted(rows, key=key, reverse=self.quirks.order == "desc"), params)

    def _past(self, params: httpx.QueryParams) -> dict[str, Any]:
        at = self.now() - self.quirks.history_lag
        rows = []
        for pod in sorted(self.pods.values(), key=lambda p: -(p.dead or 0.0)):
            if pod.dead is not None and pod.dead <= at:
                rows.append(
                    {
                        "id": pod.id,
                        "name": pod.name,
                        "providerType": pod.offer["provider"],
                        "type": "Instance",
                        "createdAt": _moment(pod.born),
                        "terminatedAt": _moment(pod.dead),
                        "gpuName": pod.offer["gpuType"],
                        "gpuCount": 1,
                        "priceHr": pod.price,
                        "userId": pod.owner,
                        "totalBilledPrice": round(pod.cost(self.now()) * self.quirks.bill_factor, 6),
                    }
                )
        return self._page(rows, params)

    def _page(self, rows: list[dict[str, Any]], params: httpx.QueryParams) -> dict[str, Any]:
        offset, limit = int(params.get("offset", 0)), int(params.get("limit", 100))
        data = rows[offset : offset + min(limit, self.quirks.page_most)]
        total = {"right": len(rows), "zero": 0, "page": len(data), "huge": len(rows) + 1000}.get(self.quirks.total)
        return {"data": data} if total is None else {"data": data, "total_count": total}

    def _one(self, pod_id: str) -> tuple[int, Any]:
        pod = self.pods.get(pod_id)
        if pod is None:
            return 404, {"detail": "Pod not found"}
        at = self.now() - self._lag(pod, self.quirks.get_lag)
        over = pod.dead is not None and pod.dead <= at
        if pod.born > at or (over and self.quirks.after == "404"):
            return 404, {"detail": "Pod not found"}
        return 200, self._shown(pod, at)

    def _delete(self, pod_id: str, request: httpx.Request) -> tuple[int, Any]:
        self.deletes += 1
        pod = self.pods.get(pod_id)
        if pod is None or pod.dead is not None:
            return 404, {"detail": "Pod not found"}
        if self.quirks.delete_blind and pod.born > self.now() - self._lag(pod, self.quirks.get_lag):
            return 404, {"detail": "Pod not found"}
        self.deleted.add(pod_id)
        if self.deletes in self.quirks.delete_idle:
            return 200, {"status": "DELETING"}
        pod.order_to_end = pod.order_to_end or self.now() + self.quirks.delete_s
        if self.deletes in self.quirks.delete_lost:
            raise httpx.ReadTimeout("no answer", request=request)
        return 200, {"status": "DELETING"}


def _word(steps: str, share: float) -> str:
    """What a pod that has booted for this share of its time is said to be."""
    if share >= 1.0:
        return "ACTIVE"
    if steps == "backwards":
        return ("PENDING", "UNKNOWN", "PENDING", "PROVISIONING")[int(share * 4)]
    if steps == "silent":
        return "PROVISIONING"
    return "PROVISIONING" if share < 0.3 else "PENDING"


def _offer(provider: str, price: float) -> dict[str, Any]:
    row = {
        "cloudId": f"{provider}-{price:.2f}",
        "gpuType": "H100_80GB",
        "socket": "SXM5",
        "provider": provider,
        "dataCenter": f"DC-{provider}",
        "gpuCount": 1,
        "gpuMemory": 80,
        "disk": {"defaultCount": 200},
        "stockStatus": "High",
        "security": "secure_cloud",
        "prices": {"onDemand": price, "currency": "USD"},
        "images": ["ubuntu_22_cuda_12", "cuda_12_6_pytorch_2_7"],
    }
    known = document()["components"]["schemas"]["GpuAvailability"]["properties"]
    assert set(row) <= set(known)
    return row


def _http_date(at: float) -> str:
    return format_datetime(datetime.fromtimestamp(at, UTC), usegmt=True)


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()
