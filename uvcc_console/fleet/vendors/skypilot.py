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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pydantic import Field, model_validator

from uvcc_console.core.log import logger
from uvcc_console.fleet.cloud.calls import CloudRefused
from uvcc_console.fleet.cloud.choice import OfferFilter
from uvcc_console.fleet.cloud.clock import Clock
from uvcc_console.fleet.cloud.fields import ident, number, part, text, whole
from uvcc_console.fleet.cloud.own_machines import PlainOffer
from uvcc_console.fleet.cloud.plain_vendor import PlainVendor
from uvcc_console.fleet.cloud.vendor import EndedPod, PastPod, RentedPod, SshTarget
from uvcc_console.fleet.provider import NoOffer
from uvcc_console.fleet.provider_kinds import FleetSettings, ProviderKind
from uvcc_console.fleet.runclock import FILE as CLOCK
from uvcc_console.fleet.runclock import RunClock
from uvcc_console.fleet.vendors import sky_api
from uvcc_console.fleet.vendors.sky_api import Sky
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UvccError
from uvcc_engine.contract.text import clean

if TYPE_CHECKING:
    from uvcc_console.fleet.cloud.saga import CloudProvider

log = logger(__name__)
T = TypeVar("T")

NAME: Final = "skypilot"
IMAGE: Final = "docker:runpod/pytorch:2.8.0-py3.11-cuda12.8.1-cudnn-devel-ubuntu22.04"
READ_S: Final = 120.0  # so long a request that only looks may take
LAUNCH_S: Final = 1800.0
DOWN_S: Final = 20.0  # a longer end goes on at the API server, and is looked for in the list
IDLE_MIN: Final = 10
TRIES: Final = 3
_NAME: Final = re.compile(r"[a-zA-Z]([-_.a-zA-Z0-9]{0,126}[a-zA-Z0-9])?")
# clouds whose machines have no address of their own, and the provider that reaches such
ELSEWHERE: Final = {"kubernetes": "kubernetes", "k8s": "kubernetes", "slurm": "slurm", "ssh": "inventory"}
_OVER: Final = frozenset(("SUCCEEDED", "FAILED", "CANCELLED"))

RUN: Final = """umask 077
mkdir -p ~/.ssh
printf '%s\\n' "$PUBLIC_KEY" >>~/.ssh/authorized_keys
exec sleep {seconds}
"""


class SkyClient(PlainVendor):
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
        self.clock: Clock = clock or RunClock(None)
        self._infra, self._seconds = tuple(one.lower() for one in infra), seconds
        self._load, self._call = sky, call
        self._sky: Sky | None = None

    # requests

    async def _at(self) -> Sky:
        if self._sky is None:
            self._sky = await self._call(self._load)
        return self._sky

    async def _do(self, what: str, work: Callable[[Sky], T]) -> T:
        """One call of the client. Raises CloudRefused, or UnreachableError: whether it was obeyed is unknown."""
        sky = await self._at()
        try:
            found: T = await self._call(lambda: work(sky))
            return found
        except UvccError:
            raise
        except Exception as e:
            raise sky_api.meant(what, e) from e

    async def _ended(self, request: Any, most: float) -> bool:
        """Whether a request has ended before ``most`` seconds were over. Trouble with looking is no end of it."""
        end, pause = self.clock.now() + most, 0.2
        while True:
            try:
                rows = await self._do("api_status", lambda sky: sky.sdk.api_status([request]))
                if any(str(getattr(row, "status", "")) in _OVER for row in _list(rows, "requests")):
                    return True
            except UnreachableError as e:
                log.warning("a request of SkyPilot's is not looked up: %s", e)
            if self.clock.now() >= end:
                return False
            await self.clock.sleep(pause)
            pause = min(5.0, pause * 2)

    async def _read(self, what: str, work: Callable[[Sky], Any]) -> Any:
        """The result of a request that changes nothing; asked again where no answer comes."""
        for attempt in range(TRIES):
            try:
                request = await self._do(what, work)
                if not await self._ended(request, READ_S):
                    raise UnreachableError(f"{what} got no usable answer in {READ_S:.0f} s", "sky api status")
                return await self._do(what, lambda sky, r=request: sky.sdk.get(r))  # type: ignore[misc]
            except UnreachableError as e:
                if attempt == TRIES - 1:
                    raise
                log.warning("%s", e)
                await self.clock.sleep(2.0 * 2**attempt)
        raise AssertionError

    async def _under_way(self, name: str) -> list[tuple[str, str]]:
        """(id, kind) of requests about a cluster, or about any, that have not ended: "launch" and "down" count."""
        rows = await self._do("api_status", lambda sky: sky.sdk.api_status(cluster_name=name or None))
        said = [(text(row.request_id), text(row.name), text(row.cluster_name), text(row.status)) for row in rows]
        kinds = [(i, kind.rpartition(".")[2], of) for i, kind, of, status in said if status not in _OVER]
        return [(i if name else of, kind) for i, kind, of in kinds if not name or of == name]

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
        names = sorted(text(one).lower() for one in _list(found, "clouds"))
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
        found = [self._offer(row, wanted) for rows in answer.values() for row in _list(rows, "GPUs")]
        if not found:
            what = f"no offer of skypilot fits: none of {', '.join(clouds)} has {wanted.gpus or 1} {wanted.gpu}"
            raise NoOffer(what, "sky gpus list", passing=False)
        regions = {one for one in self._infra if "/" in one}
        whole_clouds = {one for one in self._infra if "/" not in one}
        return [o for o in found if not self._infra or o.more["infra"] in regions or o.more["cloud"] in whole_clouds]

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
        task = await self._do("Task", lambda sky: self._task(sky, run, key_id, args))
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

    def _task(self, sky: Sky, run: str, key: str, args: Mapping[str, Any]) -> Any:
        made = sky.task(run=run, envs={"PUBLIC_KEY": key})
        made.set_resources(sky.resources(**args))
        return made

    async def _status(self, *names: str) -> list[RentedPod]:
        wanted = list(names) or None
        rows = await self._read("status", lambda sky: sky.sdk.status(wanted, refresh=sky.refresh))
        return [_pod(row) for row in _list(rows, "clusters")]

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
        past = [part(row) for row in _list(rows, "past clusters")]
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


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise UnreachableError(f"SkyPilot's list of {what} came in another form", "another version of SkyPilot?")
    return value


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
    """``infra``: clouds that may be used, like ``aws`` or ``gcp/us-central1``; empty for every cloud that `sky check`
    has enabled. ``gpu``: SkyPilot's name, like ``H100``."""

    infra: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _reached(self) -> SkyFleet:
        if self.per_party:
            raise ValueError("one API server is one operator: give each party a provider with fleet.parties")
        for one in self.infra:
            if other := ELSEWHERE.get(one.partition("/")[0].lower()):
                raise ValueError(f"infra {one} has no address of its own: use provider {other}")
        return self


def make(fleet: Mapping[str, Any], run_dir: Path, ttl_s: float) -> CloudProvider:
    from uvcc_console.fleet.cloud.intents import Intents
    from uvcc_console.fleet.cloud.saga import CloudProvider

    sky_api.needed()
    known = (run_dir / CLOCK).exists() or Intents.of(run_dir).path.exists()
    clock = RunClock(run_dir if known else None)
    return CloudProvider(SkyClient(fleet.get("infra", ()), seconds=math.ceil(ttl_s) + 600, clock=clock), fleet, run_dir)


KIND: Final = ProviderKind(NAME, SkyFleet, make)
