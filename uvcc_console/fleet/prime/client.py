"""The Prime Intellect API over httpx: every call has a time limit, and is repeated only where that is safe."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import httpx
from pydantic import ValidationError

from uvcc_console.fleet.prime.key import Account
from uvcc_console.fleet.prime.models import ApiPod, HistoryItem, Identity, Offer, SshKey, Tolerant, Wallet, read_offers
from uvcc_engine.contract.errors import UnreachableError, UvccError

TRIES = 5
PAGE = 100
PAGES = 200
_CAPACITY = ("no capacity", "capacity", "unavailable", "out of stock", "insufficient", "not available", "sold out")
_MONEY = ("balance", "credit", "payment", "fund")
_LIMIT = ("maximum number of instances", "quota exceeded", "limit exceeded")
M = TypeVar("M", bound=Tolerant)


class Clock(Protocol):
    """Time as the provider sees it, so that tests need not wait."""

    def now(self) -> float: ...
    async def sleep(self, seconds: float) -> None: ...


class WallClock:
    """Real time."""

    def now(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class PrimeRefused(UvccError):
    """The API answered no. ``kind``: auth | payment | limit | capacity | invalid | missing | rate."""

    def __init__(self, kind: str, status: int, text: str) -> None:
        cure = {
            "auth": "check the API key and its permissions; nothing more is created",
            "payment": "top up the wallet; nothing more is created",
            "limit": "the account's number of pods is used up",
        }.get(kind, "")
        super().__init__(f"the provider refused ({status}): {text}", cure)
        self.kind = kind
        self.status = status

    @property
    def stops_spending(self) -> bool:
        """No other offer would go better."""
        return self.kind in ("auth", "payment", "limit")


@dataclass(frozen=True, slots=True)
class _Call:
    """One request. ``repeat``: asking twice does no more than asking once."""

    method: str
    path: str
    params: list[tuple[str, Any]]
    body: Any = None
    repeat: bool = True


def explain(response: httpx.Response) -> str:
    """The reason out of either error shape, or what came instead of one; at most 2 KB."""
    try:
        found = response.json()
    except (ValueError, UnicodeDecodeError):
        return " ".join(response.text.split())[:2048] or response.reason_phrase
    if not isinstance(found, dict):
        return json.dumps(found)[:2048]
    detail = found.get("detail") or found.get("errors") or found.get("message") or found.get("error") or found
    rows = detail if isinstance(detail, list) else [detail]
    said = []
    for row in rows:
        if isinstance(row, dict):
            where = row.get("param") or ".".join(str(p) for p in row.get("loc", []) if p != "body")
            what = row.get("details") or row.get("msg") or row.get("message") or json.dumps(row)
            said.append(f"{where}: {what}" if where else str(what))
        else:
            said.append(str(row))
    return "; ".join(said)[:2048]


def kind_of(status: int, text: str) -> str:
    """What a refusal means for the next step."""
    low = text.lower()
    if status in (401, 403):
        return "auth"
    if status == 402 or any(word in low for word in _MONEY):
        return "payment"
    if status == 404:
        return "missing"
    if status == 429:
        return "rate"
    if any(word in low for word in _LIMIT):
        return "limit"
    return "capacity" if any(word in low for word in _CAPACITY) else "invalid"


class PrimeClient:
    """Typed calls. UnreachableError: no usable answer, so the outcome of a create is unknown."""

    def __init__(
        self, account: Account, *, transport: httpx.AsyncBaseTransport | None = None, clock: Clock | None = None
    ) -> None:
        self.clock = clock or WallClock()
        self.account = account
        self._random = random.Random()
        self._http = httpx.AsyncClient(
            base_url=f"{account.base_url}/api/v1",
            headers={"Authorization": f"Bearer {account.key}", "User-Agent": "uvcc-console"},
            timeout=httpx.Timeout(30.0, connect=10.0),
            follow_redirects=True,
            transport=transport,
            trust_env=transport is None,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def _send(self, call: _Call) -> Any:
        """Raises PrimeRefused, or UnreachableError once the tries are used up (at once if not repeatable)."""
        trouble = ""
        for attempt in range(TRIES):
            pause = min(20.0, 2.0 * 2**attempt) * self._random.uniform(0.5, 1.0)
            try:
                response = await self._http.request(call.method, call.path, params=call.params, json=call.body)
            except httpx.HTTPError as e:
                trouble = f"{type(e).__name__} {e}".strip()
                sent = not isinstance(e, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
                if sent and not call.repeat:
                    break
            else:
                if response.status_code < 400:
                    return _body(response)
                text = explain(response)
                trouble = f"{response.status_code} {text}"
                if response.status_code == 429:  # it was not obeyed, so asking again is safe for every call
                    pause = max(pause, _retry_after(response))
                elif response.status_code < 500:
                    raise PrimeRefused(kind_of(response.status_code, text), response.status_code, text)
                elif not call.repeat:
                    break
            if attempt < TRIES - 1:
                await self.clock.sleep(pause)
        what = f"{call.method} {call.path} got no usable answer: {trouble}"
        raise UnreachableError(what, "its outcome is unknown" if not call.repeat else "is the provider's API up?")

    async def _get(self, path: str, *params: tuple[str, Any]) -> Any:
        return await self._send(_Call("GET", path, [p for p in params if p[1] not in (None, "")]))

    # the market

    async def offers(
        self, *, gpu_type: str = "", gpu_count: int = 0, regions: Sequence[str] = (), multi_node: bool = False
    ) -> list[Offer]:
        """The market, all pages. A market that is empty for a moment is asked again before it is believed."""
        path = "/availability/multi-node" if multi_node else "/availability/gpus"
        wanted = [("gpu_type", gpu_type), ("gpu_count", gpu_count or None), *(("regions", r) for r in regions)]
        for attempt in range(5):
            found = await self._market(path, wanted)
            if found or (attempt and not await self._summary_has(gpu_type)):
                return found
            if attempt < 4:
                await self.clock.sleep(2.5)
        return []

    async def _market(self, path: str, wanted: list[tuple[str, Any]]) -> list[Offer]:
        rows: list[Any] = []
        seen: set[str] = set()
        for page in range(1, PAGES + 1):
            found = await self._get(path, *wanted, ("page", page), ("page_size", PAGE))
            items = found.get("items") if isinstance(found, dict) else None
            if not isinstance(items, list):
                raise UnreachableError(f"{path} answered in another form", "the API may have changed")
            new = []
            for row in items:
                mark = json.dumps(row, sort_keys=True)
                if mark not in seen:
                    seen.add(mark)
                    new.append(row)
            rows += new
            total = found.get("totalCount")
            if not new or (isinstance(total, int) and len(items) < PAGE and len(rows) >= total):
                break
        return read_offers(rows)

    async def _summary_has(self, gpu_type: str) -> bool:
        """Whether the market's summary knows of this GPU (of any, if none is named)."""
        summary = await self._get("/availability/gpu-summary")
        return bool(summary.get(gpu_type)) if gpu_type and isinstance(summary, dict) else bool(summary)

    async def disk_offers(self) -> list[dict[str, Any]]:
        found = await self._get("/availability/disks", ("page_size", PAGE))
        return [row for row in found.get("items", []) if isinstance(row, dict)] if isinstance(found, dict) else []

    # pods

    async def create(self, body: dict[str, Any]) -> ApiPod:
        """Create a pod. Never repeated: UnreachableError means that it may exist, to be looked up by its name."""
        if self.account.team:
            body = {**body, "team": {"teamId": self.account.team}}
        return _one(ApiPod, await self._send(_Call("POST", "/pods/", [], body, repeat=False)))

    async def pods(self) -> list[ApiPod]:
        """Every pod of the account, all pages, also while they shift under the reading. Raises rather than truncate."""
        found: dict[str, ApiPod] = {}
        for _ in range(3):
            before = len(found)
            total = await self._read_pods(found)
            if len(found) >= total or (before and len(found) == before):
                break
        return list(found.values())

    async def _read_pods(self, found: dict[str, ApiPod]) -> int:
        offset, total = 0, 0
        for _ in range(PAGES):
            page = await self._get("/pods/", ("offset", str(offset)), ("limit", str(PAGE)))
            rows = page.get("data") if isinstance(page, dict) else None
            if not isinstance(rows, list):
                raise UnreachableError("the list of pods came in another form", "the API may have changed")
            total = max(total, int(page.get("total_count") or 0))
            for row in rows:
                pod = _one(ApiPod, row)
                found[pod.id] = pod
            offset += len(rows)
            if not rows or offset >= total:
                break
        return total

    async def pod(self, pod_id: str) -> ApiPod | None:
        """One pod; None if the API does not know it."""
        try:
            found = await self._get(f"/pods/{pod_id}")
        except PrimeRefused as e:
            if e.kind == "missing":
                return None
            raise
        return _one(ApiPod, found.get("data", found) if isinstance(found, dict) else found)

    async def statuses(self, pod_ids: Sequence[str]) -> list[dict[str, Any]]:
        found = await self._get("/pods/status", *(("pod_ids", i) for i in pod_ids))
        return [row for row in found.get("data", []) if isinstance(row, dict)] if isinstance(found, dict) else []

    async def history(self, pages: int = 5) -> list[HistoryItem]:
        """Terminated pods, newest first."""
        rows: list[HistoryItem] = []
        for page in range(pages):
            window = (("limit", str(PAGE)), ("offset", str(page * PAGE)))
            found = await self._get("/pods/history", *window, ("sort_by", "terminatedAt"), ("sort_order", "desc"))
            data = found.get("data") if isinstance(found, dict) else None
            if not isinstance(data, list) or not data:
                break
            rows += [_one(HistoryItem, row) for row in data]
        return rows

    async def log(self, pod_id: str, tail: int = 100) -> str:
        """What the provider kept of the pod's log, as text."""
        return json.dumps(await self._get(f"/pods/{pod_id}/log", ("tail", tail)))

    async def delete(self, pod_id: str) -> None:
        """Ask for the pod's end; one that is not there is no error."""
        try:
            await self._send(_Call("DELETE", f"/pods/{pod_id}", []))
        except PrimeRefused as e:
            if e.kind != "missing":
                raise

    # account

    async def whoami(self) -> Identity:
        found = await self._get("/user/whoami")
        return _one(Identity, found.get("data", found) if isinstance(found, dict) else found)

    async def teams(self) -> list[dict[str, Any]]:
        found = await self._get("/user/teams", ("limit", str(PAGE)))
        return [row for row in found.get("data", []) if isinstance(row, dict)] if isinstance(found, dict) else []

    async def wallet(self) -> float | None:
        """US dollars left; None where the API does not tell."""
        try:
            found = await self._get("/billing/wallet", ("teamId", self.account.team), ("limit", 1))
            wallet = Wallet.model_validate(found)
        except (UvccError, ValidationError):
            return None
        return wallet.balance_usd if wallet.currency in ("USD", "") else None

    async def ssh_keys(self) -> list[SshKey]:
        found: dict[str, SshKey] = {}
        for page in range(PAGES):
            rows = await self._get("/ssh_keys/", ("offset", str(page * PAGE)), ("limit", str(PAGE)))
            data = rows.get("data") if isinstance(rows, dict) else None
            if not isinstance(data, list) or not data:
                break
            found.update({key.id: key for key in (_one(SshKey, row) for row in data)})
            if len(data) < PAGE:
                break
        return list(found.values())

    async def add_ssh_key(self, name: str, public_key: str) -> SshKey:
        body = {"name": name, "publicKey": public_key}
        return _one(SshKey, await self._send(_Call("POST", "/ssh_keys/", [], body, repeat=False)))

    async def make_primary(self, key_id: str) -> None:
        await self._send(_Call("PATCH", f"/ssh_keys/{key_id}", [], {"isPrimary": True}))

    async def delete_ssh_key(self, key_id: str) -> None:
        try:
            await self._send(_Call("DELETE", f"/ssh_keys/{key_id}", []))
        except PrimeRefused as e:
            if e.kind != "missing":
                raise

    # disks

    async def disks(self) -> list[dict[str, Any]]:
        found = await self._get("/disks/", ("limit", str(PAGE)))
        return [row for row in found.get("data", []) if isinstance(row, dict)] if isinstance(found, dict) else []

    async def create_disk(self, disk: dict[str, Any], provider: str) -> dict[str, Any]:
        body = {"disk": disk, "provider": {"type": provider}}
        made = await self._send(_Call("POST", "/disks/", [], body, repeat=False))
        return made if isinstance(made, dict) else {}

    async def delete_disk(self, disk_id: str) -> None:
        try:
            await self._send(_Call("DELETE", f"/disks/{disk_id}", []))
        except PrimeRefused as e:
            if e.kind != "missing":
                raise


def _body(response: httpx.Response) -> Any:
    if not response.content:
        return {}
    try:
        return response.json()
    except (ValueError, UnicodeDecodeError) as e:
        text = " ".join(response.text.split())[:200]
        raise UnreachableError(f"the provider answered {text!r} where JSON was due", "is a proxy in between?") from e


def _retry_after(response: httpx.Response) -> float:
    try:
        return min(60.0, max(0.0, float(response.headers.get("Retry-After", "0"))))
    except ValueError:
        return 0.0


def _one(model: type[M], row: Any) -> M:
    try:
        return model.model_validate(row)
    except ValidationError as e:
        raise UnreachableError(
            f"the provider's {model.__name__} came in another form", "the API may have changed"
        ) from e
