"""The Prime Intellect API, typed: the market and its pods, and through its base what belongs to the account."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from uvcc_console.core.log import logger
from uvcc_console.fleet.cloud.calls import PAGE, PAGES, Call, CloudRefused, explain, kind_of, one
from uvcc_console.fleet.cloud.choice import OfferChoice, OfferFilter, RentedVolume
from uvcc_console.fleet.cloud.clock import Clock, WallClock
from uvcc_console.fleet.cloud.hosts import PRIME
from uvcc_console.fleet.cloud.vendor import SshTarget, itself
from uvcc_console.fleet.prime import offers as market
from uvcc_console.fleet.prime.access import targets
from uvcc_console.fleet.prime.disks import DiskVolumes, lies, mount_in
from uvcc_console.fleet.prime.models import ApiPod, DiskOffer, HistoryItem, MarketOffer, PodStatus, read_offers
from uvcc_engine.contract.errors import ConfigError, UnreachableError

log = logger(__name__)

__all__ = ["Clock", "CloudRefused", "PrimeClient", "WallClock", "explain", "kind_of"]


class PrimeClient(DiskVolumes):
    """Typed calls. UnreachableError: no usable answer, so the outcome of a create is unknown."""

    name = "prime"
    distinct = True  # several operators sell here, and the parties go to different ones

    # what the saga asks for

    @property
    def where(self) -> str:
        own = self.account.base_url.endswith(f"//{PRIME}")
        return "" if own else self.account.base_url  # whoever named another host shall see it

    async def permitted(self) -> None:
        try:
            lacking = (await self.whoami()).lacks()
        except CloudRefused as e:
            if e.kind == "auth":
                raise
            return
        if lacking:
            raise ConfigError(f"the API key lacks {', '.join(lacking)}", "make one with these permissions")

    async def offers_for(self, wanted: OfferFilter) -> Sequence[MarketOffer]:
        found = await self.offers(gpu_type=wanted.gpu, gpu_count=wanted.gpus)
        if wanted.volume_gb > 0:
            self.disks_on_offer(await self.disk_offers(), wanted.volume_gb)
        return found

    async def whereabouts(self, volume: RentedVolume) -> str:
        return lies(volume, await self._market("/availability/gpus", [("disks", volume.id)]))

    async def mounted(self, volume: RentedVolume, pod_id: str, at: str) -> str:
        return mount_in(await self.pod(pod_id), volume.id)

    def choose(
        self, rows: Sequence[MarketOffer], wanted: OfferFilter, parties: Collection[int], settled: Mapping[int, str]
    ) -> OfferChoice:
        return market.choose(rows, wanted, parties, settled, at=self.volume_at)

    async def rent(
        self, offer: MarketOffer, wanted: OfferFilter, *, name: str, image: str, key_id: str, cap: float
    ) -> ApiPod:
        return await self.create(market.request_body(offer, wanted, name=name, image=image, key_id=key_id, cap=cap))

    def logins(self, pod: ApiPod) -> Sequence[SshTarget]:
        return targets(pod)

    # the market

    async def offers(
        self, *, gpu_type: str = "", gpu_count: int = 0, regions: Sequence[str] = (), multi_node: bool = False
    ) -> list[MarketOffer]:
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

    async def _market(self, path: str, wanted: list[tuple[str, Any]]) -> list[MarketOffer]:
        return read_offers(await self._rows(path, wanted))

    async def _rows(self, path: str, wanted: list[tuple[str, Any]]) -> list[Any]:
        """Rows of all pages, none twice, also while they shift under the reading."""
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
            if not new or (isinstance(total, int) and len(items) < PAGE and 0 < total <= len(rows)):
                break
        return rows

    async def _summary_has(self, gpu_type: str) -> bool:
        """Whether the market's summary knows of this GPU (of any, if none is named)."""
        summary = await self.summary()
        return bool(summary.get(gpu_type)) if gpu_type else bool(summary)

    async def summary(self, *, multi_node: bool = False) -> dict[str, Any]:
        """The cheapest prices by GPU, number and region, as they come."""
        found = await self._get("/availability/multi-node-summary" if multi_node else "/availability/gpu-summary")
        return found if isinstance(found, dict) else {}

    async def legacy_offers(self, *, clusters: bool = False) -> list[MarketOffer]:
        """The market of the older endpoints, which list it by GPU."""
        found = await self._get("/availability/clusters" if clusters else "/availability/", ("page_size", 500))
        rows = found.values() if isinstance(found, dict) else ()
        return read_offers([row for by_gpu in rows if isinstance(by_gpu, list) for row in by_gpu])

    async def disk_offers(self) -> list[DiskOffer]:
        return [one(DiskOffer, row) for row in await self._rows("/availability/disks", [])]

    # pods

    async def create(self, body: dict[str, Any]) -> ApiPod:
        """Create a pod. Never repeated: UnreachableError means that it may exist, to be looked up by its name."""
        if self.account.team:
            body = {**body, "team": {"teamId": self.account.team}}
        made = one(ApiPod, await self._send(Call("POST", "/pods/", [], body, repeat=False)))
        log.info("created, with the id %s", made.id, pod=made.name)
        return made

    async def pods(self) -> list[ApiPod]:
        """Every pod of the account, all pages, also while they shift under the reading. Raises rather than truncate."""
        found: dict[str, ApiPod] = {}
        for _ in range(3):
            before = len(found)
            rows, total = await self._whole("/pods/")
            for row in rows:
                pod = one(ApiPod, row)
                if not pod.id:
                    raise UnreachableError(f"pod {pod.name} is listed without an id", "the API may have changed")
                found[pod.id] = pod
            if len(found) >= total or (before and len(found) == before):
                break
        return list(found.values())

    async def pod(self, pod_id: str) -> ApiPod | None:
        """One pod; None if the API does not know it."""
        try:
            found = await self._get(f"/pods/{_safe(pod_id)}")
        except CloudRefused as e:
            if e.kind == "missing":
                return None
            raise
        return itself(one(ApiPod, found.get("data", found) if isinstance(found, dict) else found), pod_id)

    async def statuses(self, pod_ids: Sequence[str]) -> list[PodStatus]:
        """Money and ports are not in here: take those from ``pod``."""
        found = await self._get("/pods/status", *(("pod_ids", i) for i in pod_ids))
        rows = found.get("data") if isinstance(found, dict) else None
        return [one(PodStatus, row) for row in rows or ()]

    async def history(self, pages: int = 5) -> list[HistoryItem]:
        """Pods of the past, newest first; the last ``pages`` hundred of them."""
        newest = (("sort_by", "terminatedAt"), ("sort_order", "desc"))
        return [one(HistoryItem, row) for row in await self._all("/pods/history", *newest, most=pages)]

    async def log(self, pod_id: str, tail: int = 100) -> str:
        """What the provider kept of the pod's log, as text."""
        return json.dumps(await self._get(f"/pods/{_safe(pod_id)}/log", ("tail", tail)))

    async def delete(self, pod_id: str) -> bool:
        """Ask for the pod's end; False where the API knows no such pod (or none yet), which is no error."""
        try:
            await self._send(Call("DELETE", f"/pods/{_safe(pod_id)}", []))
            log.info("the end of pod %s is asked for", pod_id)
        except CloudRefused as e:
            if e.kind != "missing":
                raise
            return False
        return True


def _safe(pod_id: str) -> str:
    """The id as part of a path. Ids come from the API: one that would lead elsewhere is not asked for."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,128}", pod_id):
        raise UnreachableError(f"{pod_id[:80]!r} is no id of a pod", "the API may have changed")
    return pod_id
