"""Machines that SkyPilot rents at the clouds its API server has credentials for, over its Python API.

A request of SkyPilot's is asked for and then looked up until it has ended: the API server works on while nobody waits.
A cluster is one machine here, its name is its identity, and what that name stands for can be made once only. Its one
job lets the run's key in and sleeps for the run's longest life, so that SkyPilot's autostop, which counts jobs and SSH
connections, does not take a machine for idle that trains; after that it takes it down, whatever became of the console.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import Field, model_validator

from uvcc_console.core.log import logger
from uvcc_console.fleet.cloud.calls import CloudRefused
from uvcc_console.fleet.cloud.choice import OfferFilter
from uvcc_console.fleet.cloud.clock import Clock
from uvcc_console.fleet.cloud.fields import ident, number, part, text, whole
from uvcc_console.fleet.cloud.own_machines import PlainOffer
from uvcc_console.fleet.cloud.plain_vendor import MOUNT, PlainVendor
from uvcc_console.fleet.cloud.vendor import EndedPod, PastPod, RentedPod, SshTarget
from uvcc_console.fleet.provider import NoOffer
from uvcc_console.fleet.provider_kinds import FleetSettings, ProviderKind
from uvcc_console.fleet.runclock import FILE as CLOCK
from uvcc_console.fleet.runclock import RunClock
from uvcc_console.fleet.vendors import sky_api
from uvcc_console.fleet.vendors.sky_api import Sky
from uvcc_console.fleet.vendors.sky_requests import listed
from uvcc_console.fleet.vendors.sky_volumes import ZONE, SkyVolumes
from uvcc_engine.contract.errors import ConfigError, UnreachableError
from uvcc_engine.contract.text import clean

if TYPE_CHECKING:
    from uvcc_console.fleet.cloud.saga import CloudProvider

log = logger(__name__)

NAME: Final = "skypilot"
IMAGE: Final = "docker:runpod/pytorch:2.8.0-py3.11-cuda12.8.1-cudnn-devel-ubuntu22.04"
LAUNCH_S: Final = 1800.0
DOWN_S: Final = 20.0  # a longer end goes on at the API server, and is looked for in the list
IDLE_MIN: Final = 10
_NAME: Final = re.compile(r"[a-zA-Z]([-_.a-zA-Z0-9]{0,126}[a-zA-Z0-9])?")
# clouds whose machines have no address of their own, and the provider that reaches such
ELSEWHERE: Final = {"kubernetes": "kubernetes", "k8s": "kubernetes", "slurm": "slurm", "ssh": "inventory"}

RUN: Final = """umask 077
mkdir -p ~/.ssh
printf '%s\\n' "$PUBLIC_KEY" >>~/.ssh/authorized_keys
exec sleep {seconds}
"""


class SkyClient(SkyVolumes, PlainVendor):
    """One user of one API server. ``seconds``: a machine's longest life; ``infra``: clouds, or ``cloud/region``."""

    name = NAME
    image = IMAGE
    where = ""

    def __init__(
        self,
        infra: Sequence[str] = (),
        *,
        seconds: int = 3600,
        clock: Clock | None = None,
        sky: Callable[[], Sky] = sky_api.load,
        call: Callable[[Callable[[], Any]], Awaitable[Any]] = sky_api.in_thread,
    ) -> None:
        super().__init__(clock or RunClock(None), sky, call)
        self._infra, self._seconds = tuple(one.lower() for one in infra), seconds
        self._zones = [one for one in infra if one.count("/") == 2]

    # the market

    async def permitted(self) -> None:
        clouds = await self._clouds()
        for one in self._infra:
            if one.partition("/")[0] not in clouds:
                what = f"fleet.infra names {one}, and SkyPilot has {', '.join(clouds) or 'no cloud'} enabled"
                raise ConfigError(what, f"sky check {one.partition('/')[0]}")
        if not clouds:
            raise ConfigError("SkyPilot has no cloud enabled whose machines have an address", "sky check")

    async def _clouds(self) -> list[str]:
        found = await self._read("enabled_clouds", lambda sky: sky.sdk.enabled_clouds())
        names = sorted(text(one).lower() for one in listed(found, "clouds"))
        return [one for one in names if one.partition("/")[0] not in ELSEWHERE]

    async def offers_for(self, wanted: OfferFilter) -> Sequence[PlainOffer]:
        """The catalogue of the enabled clouds: prices by region. What is in stock only a launch tells."""
        if not wanted.gpu:
            raise ConfigError("skypilot rents machines with a GPU", "say which in fleet.gpu, as `sky gpus list` does")
        clouds = sorted({one.partition("/")[0] for one in self._infra}) or await self._clouds()
        answer = await self._read(
            "list_accelerators",
            lambda sky: sky.sdk.list_accelerators(
                name_filter=f"^{re.escape(wanted.gpu)}$",
                quantity_filter=wanted.gpus or 1,
                clouds=clouds,
                all_regions=True,
                case_sensitive=False,
            ),
        )
        if not isinstance(answer, Mapping):
            raise UnreachableError("SkyPilot's list of GPUs came in another form", "another version of SkyPilot?")
        found = [o for rows in answer.values() for row in listed(rows, "GPUs") for o in self._offers(row, wanted)]
        if not found:
            what = f"no offer of skypilot fits: none of {', '.join(clouds)} has {wanted.gpus or 1} {wanted.gpu}"
            raise NoOffer(what, "sky gpus list", passing=False)
        named = set(self._infra)
        return [o for o in found if not named or o.more["infra"] in named or o.more["cloud"] in named]

    def _offers(self, row: Any, wanted: OfferFilter) -> list[PlainOffer]:
        """What a row of the catalogue offers: its region, and each zone of it that the profile names."""
        whole_region = self._offer(row, wanted)
        places = [zone for zone in self._zones if zone.lower().startswith(f"{whole_region.more['infra']}/")]
        return [whole_region, *(self._in_zone(whole_region, place.rpartition("/")[2]) for place in places)]

    @staticmethod
    def _in_zone(offer: PlainOffer, zone: str) -> PlainOffer:
        at = f"{offer.more['at']}/{zone}"
        return replace(offer, id=f"{offer.id}/{zone}", more={**offer.more, "at": at, "infra": at.lower(), "zone": zone})

    def _offer(self, row: Any, wanted: OfferFilter) -> PlainOffer:
        cloud, region = text(getattr(row, "cloud", "")).lower(), text(getattr(row, "region", ""))
        kind, gpu = text(getattr(row, "instance_type", "")), text(getattr(row, "accelerator_name", ""))
        price = number(getattr(row, "spot_price" if wanted.spot else "price", None)) or 0.0
        infra = f"{cloud}/{region.lower()}"
        return PlainOffer(
            f"{cloud}:{kind}",
            NAME,
            region,
            wanted.gpu if gpu.lower() == wanted.gpu.lower() else gpu,
            whole(getattr(row, "accelerator_count", None)) or 0,
            price,
            number(getattr(row, "device_memory", None)) or 0.0,
            spot=wanted.spot,
            more={"cloud": cloud, "infra": infra, "kind": kind, "at": f"{cloud}/{region}", "gpu": gpu},
        )

    # clusters

    async def rent(
        self, offer: PlainOffer, wanted: OfferFilter, *, name: str, image: str, key_id: str, cap: float
    ) -> RentedPod:
        """Launch one cluster and wait until SkyPilot says how that went: only then stock and quotas are known."""
        run = RUN.format(seconds=self._seconds)
        args = {"infra": offer.more["at"], "instance_type": offer.more["kind"] or None, "use_spot": offer.spot}
        args |= {"accelerators": {offer.more["gpu"]: offer.gpu_count}, "image_id": image or None}
        args |= {"disk_size": wanted.disk or None, "max_hourly_cost": cap}
        volumes = {wanted.mount or MOUNT: wanted.volume.name} if wanted.volume is not None else None
        task = await self._do("Task", lambda sky: self._task(sky, run, key_id, args, volumes))
        request = await self._do(
            "launch",
            lambda sky: sky.sdk.launch(
                task, cluster_name=name, idle_minutes_to_autostop=IDLE_MIN, wait_for=sky.wait_for, down=True
            ),
        )
        said = RentedPod(name, name, NAME, stage="its launch has not ended")
        try:
            if await self._ended(request, LAUNCH_S):
                await self._do("launch", lambda sky: sky.sdk.get(request))
                said = await self.pod(name) or said
        except CloudRefused as e:
            if await self.pod(name) is not None:  # what was refused shall not cost
                raise UnreachableError(f"launch is refused, and {name} is there: {e.what}", "it is looked at") from e
            raise
        return said

    def _task(self, sky: Sky, run: str, key: str, args: Mapping[str, Any], volumes: Mapping[str, str] | None) -> Any:
        mounted = {"volumes": dict(volumes)} if volumes else {}
        made = sky.task(run=run, envs={"PUBLIC_KEY": key}, **mounted)
        made.set_resources(sky.resources(**args))
        return made

    async def _status(self, *names: str) -> list[RentedPod]:
        wanted = list(names) or None
        rows = await self._read("status", lambda sky: sky.sdk.status(wanted, refresh=sky.refresh))
        return [_pod(row) for row in listed(rows, "clusters")]

    async def pods(self) -> Sequence[RentedPod]:
        """Clusters, and launches that have brought none yet."""
        coming = [of for of, kind in await self._under_way("") if kind == "launch"]
        found = {pod.name: pod for pod in await self._status()}
        waiting = {n: RentedPod(n, n, NAME, stage="its launch has not ended") for n in coming if _NAME.fullmatch(n)}
        return list((waiting | found).values())

    async def pod(self, pod_id: str) -> RentedPod | None:
        if not _NAME.fullmatch(pod_id):
            return None
        coming = any(kind == "launch" for _, kind in await self._under_way(pod_id))
        found = [pod for pod in await self._status(pod_id) if pod.name == pod_id]
        waiting = RentedPod(pod_id, pod_id, NAME, stage="its launch has not ended") if coming else None
        return found[0] if found else waiting

    async def history(self) -> Sequence[PastPod]:
        """What SkyPilot remembers of clusters that it took down; its costs are estimates and count as no bill."""
        rows = await self._read("cost_report", lambda sky: sky.sdk.cost_report(days=30))
        past = [part(row) for row in listed(rows, "past clusters")]
        return [EndedPod(text(r.get("name")), text(r.get("name")), terminated_at="told") for r in past if _past(r)]

    async def delete(self, pod_id: str) -> bool:
        """Have the cluster taken down, once at a time; a launch that has not ended is cancelled first."""
        if not _NAME.fullmatch(pod_id):
            return False
        active = await self._under_way(pod_id)
        if any(kind == "down" for _, kind in active):
            return True
        launches = [request for request, kind in active if kind == "launch"]
        try:
            if launches:
                await self._read("api_cancel", lambda sky: sky.sdk.api_cancel(launches, silent=True))
            request = await self._do("down", lambda sky: sky.sdk.down(pod_id))
            if await self._ended(request, DOWN_S):
                await self._do("down", lambda sky: sky.sdk.get(request))
        except CloudRefused as e:
            if e.kind != "missing":
                raise
            return bool(launches)
        return True

    async def close(self) -> None:
        return None


def _past(row: Mapping[str, Any]) -> bool:
    """A cluster of the past has no status any more."""
    return "status" in row and row["status"] is None


def _pod(row: Any) -> RentedPod:
    """A machine out of its cluster's record. Raises UnreachableError for one of another form."""
    state = getattr(getattr(row, "status", None), "name", "")
    if state not in ("INIT", "PENDING", "UP", "STOPPED", "AUTOSTOPPING"):
        raise UnreachableError(f"a cluster of SkyPilot's came in another form: {clean(state)[:40]!r}", "is it newer?")
    ident(row.cluster_hash, "SkyPilot's cluster")
    name, handle = text(row.name), row.handle
    ports = getattr(handle, "stable_ssh_ports", None)
    port = whole(ports[0]) if isinstance(ports, list) and ports else 22
    host, user = text(getattr(handle, "head_ip", None)), text(getattr(handle, "ssh_user", None))
    logins = (SshTarget(user or "root", host, port),) if host and port and 0 < port < 65536 else ()
    lost = state == "INIT" and row.init_kind == "unhealthy"
    words = filter(None, (state, text(row.init_status_reason)[:200] if state == "INIT" else ""))
    return RentedPod(
        name if _NAME.fullmatch(name) else "",
        name,
        NAME,
        stage=" ".join(words),
        dying=state in ("STOPPED", "AUTOSTOPPING"),
        failed=state in ("STOPPED", "AUTOSTOPPING"),
        unclear=lost,
        installed=state == "UP",
        has_gpu=bool(row.accelerators),
        logins=logins if state == "UP" else (),
    )


class SkyFleet(FleetSettings):
    """``infra``: clouds that may be used, like ``aws``, ``gcp/us-central1`` or ``runpod/CA/CA-MTL-3``; empty for every
    cloud that `sky check` has enabled. ``gpu``: SkyPilot's name, like ``H100``."""

    infra: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _reached(self) -> SkyFleet:
        if self.per_party:
            raise ValueError("one API server is one operator: give each party a provider with fleet.parties")
        for one in self.infra:
            if other := ELSEWHERE.get(one.partition("/")[0].lower()):
                raise ValueError(f"infra {one} has no address of its own: use provider {other}")
        elsewhere = [one for one in self.infra if not ZONE.fullmatch(one)]
        if self.volume is not None and (elsewhere or not self.infra):
            what = f"infra {elsewhere[0]} has none" if elsewhere else "infra names none"
            raise ValueError(f"SkyPilot has volumes in zones of Runpod: {what}; write runpod/CA/CA-MTL-3")
        return self


def make(fleet: Mapping[str, Any], run_dir: Path, ttl_s: float) -> CloudProvider:
    from uvcc_console.fleet.cloud.intents import Intents
    from uvcc_console.fleet.cloud.saga import CloudProvider

    sky_api.needed()
    known = (run_dir / CLOCK).exists() or Intents.of(run_dir).path.exists()
    clock = RunClock(run_dir if known else None)
    return CloudProvider(SkyClient(fleet.get("infra", ()), seconds=math.ceil(ttl_s) + 600, clock=clock), fleet, run_dir)


KIND: Final = ProviderKind(NAME, SkyFleet, make, volumes=MOUNT, mounts=True)
