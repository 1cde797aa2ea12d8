"""SkyPilot's Python API in this process: an API server's clusters and requests, behind functions of the real forms.

What the functions take, the fields of what they answer and the ancestry of their exceptions are those that
``schemas/skypilot.json`` records of the real package; ``test_skypilot.py`` holds the fake against the record, and the
record against the package where it is installed.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from cloudfake import CloudFake, Disk, Rented
from primerecords import Fault

from uvcc_console.fleet.vendors.sky_api import Sky


@cache
def record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(__file__).parent / "schemas" / "skypilot.json").read_text())
    return found


def _error(name: str) -> type[Exception]:
    bases = {"ValueError": ValueError, "RuntimeError": RuntimeError}
    base = next((bases[b] for b in record()["exceptions"][name] if b in bases), Exception)
    return type(name, (base,), {})


ERRORS = {name: _error(name) for name in record()["exceptions"]}
ClusterStatus = enum.Enum("ClusterStatus", record()["enums"]["ClusterStatus"])  # type: ignore[misc]
StatusRefreshMode = enum.Enum("StatusRefreshMode", record()["enums"]["StatusRefreshMode"])  # type: ignore[misc]
AutostopWaitFor = enum.Enum("AutostopWaitFor", record()["enums"]["AutostopWaitFor"])  # type: ignore[misc]


def row(kind: str, **values: Any) -> SimpleNamespace:
    """An answer with the fields of the real one, None where it says nothing."""
    fields = record()["fields"][kind]
    assert set(values) <= set(fields), set(values) - set(fields)
    return SimpleNamespace(**(dict.fromkeys(fields) | values))


class HTTPError(OSError):
    """As of ``requests``: it has the response."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status} Error for url: http://127.0.0.1:46580/")
        self.response = SimpleNamespace(status_code=status)


@dataclass
class Request:
    """``pod``: what it waits for; ``ends``: when it has ended; ``result`` is a value, or an exception."""

    id: str
    name: str
    cluster: str
    ends: float
    result: Callable[[], Any]
    cancelled: bool = False
    hidden: float = 0.0


class _Made:
    """A class of SkyPilot's that takes what the record says."""

    kind = ""

    def __init__(self, **given: Any) -> None:
        known = {name for name, *_ in record()["classes"][self.kind]}
        assert set(given) <= known, set(given) - known
        self.given = given


class Resources(_Made):
    kind = "Resources"


class Volume(_Made):
    kind = "Volume"


class Task(_Made):
    kind = "Task"
    resources: Resources | None = None

    def set_resources(self, resources: Resources) -> None:
        self.resources = resources


class SkyFake(CloudFake):
    """``sdk``: the client's module."""

    OPS: ClassVar = {n: ("sdk", f) for n, f in zip(
        ("market", "create", "list", "delete", "new disk", "disks", "end disk"),
        ("list_accelerators", "launch", "status", "down", "volumes.apply", "volumes.ls", "volumes.delete"),
        strict=True)}  # fmt: skip

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__(now)
        self.boot_s = 20.0
        self.clouds: list[Any] = ["AWS", "GCP", "Kubernetes"]
        self.sent: dict[str, Request] = {}
        self.ids = count(1)
        names = record()["functions"]
        self.sdk = SimpleNamespace(**{name: getattr(self, name) for name in names})
        self.volumes = SimpleNamespace(apply=self._apply, ls=self._ls, delete=self._delete_volumes)
        rest = StatusRefreshMode["AUTO"], AutostopWaitFor["JOBS_AND_SSH"], self.volumes, Volume
        sky = Sky(self.sdk, Task, Resources, *rest)
        self.transport: Any = lambda: sky  # type: ignore[assignment]

    # failures on order

    def _enter(self, name: str, body: Any, work: Callable[[], str]) -> str:
        self.requests.append(("sdk", name, body))
        for fault in self.faults:
            if fault.path == name:
                fault.seen += 1
                if not fault.nth or fault.seen in fault.nth:
                    return self._failed(fault, name, work)
        return work()

    def _failed(self, fault: Fault, name: str, work: Callable[[], str]) -> str:
        if fault.action == "answer" and fault.status == 200:
            return self.request(name, "", lambda: fault.body)
        if fault.action.startswith("commit_then_"):
            work()
        if fault.action == "refuse":
            raise ERRORS["ApiServerConnectionError"]("Could not connect to SkyPilot API server")
        if fault.action == "answer" and fault.status == 401:
            raise ERRORS["ApiServerAuthenticationError"]("Authentication required for SkyPilot API server")
        if fault.action in ("answer", "html", "commit_then_500"):
            raise HTTPError(fault.status if fault.action == "answer" else 502)
        raise TimeoutError("Read timed out.")

    def request(self, name: str, cluster: str, result: Callable[[], Any], after: float = 0.0) -> str:
        made = Request(f"r-{next(self.ids)}", f"sky.{name}", cluster, self.now() + after, result)
        made.hidden = self.now() + (self.visible_after if name == "launch" else 0.0)
        self.sent[made.id] = made
        return made.id

    # the client's functions

    def enabled_clouds(self, workspace: str | None = None, expand: bool = False) -> str:
        return self._enter("enabled_clouds", None, lambda: self.request("enabled_clouds", "", lambda: self.clouds))

    def list_accelerators(
        self,
        gpus_only: bool = True,
        name_filter: str | None = None,
        region_filter: str | None = None,
        quantity_filter: int | None = None,
        clouds: list[str] | str | None = None,
        all_regions: bool = False,
        require_price: bool = True,
        case_sensitive: bool = True,
    ) -> str:
        places = [
            ("AWS", "us-east-1"),
            ("AWS", "eu-west-1"),
            ("GCP", "us-central1"),
            ("RunPod", "CA"),
            ("RunPod", "US"),
        ]
        rows = [
            row(
                "InstanceTypeInfo",
                cloud=cloud,
                instance_type=f"{cloud[0].lower()}5.4xlarge",
                accelerator_name="H100",
                accelerator_count=1.0,
                device_memory=80.0,
                price=self.PRICE + n / 1000,
                spot_price=0.7 if cloud == "AWS" else float("nan"),
                region=region,
            )
            for n, (cloud, region) in enumerate(places)
            if cloud.lower() in (clouds or ())
            if cloud != "RunPod" or "runpod" in self.clouds
        ]
        found = {"H100": rows} if name_filter == "^H100$" and rows else {}
        return self._enter("list_accelerators", clouds, lambda: self.request("list_accelerators", "", lambda: found))

    def launch(
        self,
        task: Any,
        cluster_name: str | None = None,
        retry_until_up: bool = False,
        idle_minutes_to_autostop: int | None = None,
        wait_for: Any = None,
        dryrun: bool = False,
        down: bool = False,
        backend: Any = None,
        optimize_target: Any = "OptimizeTarget.COST",
        no_setup: bool = False,
        clone_disk_from: str | None = None,
        fast: bool = False,
        resize: bool = False,
    ) -> str:
        said = {"task": task.given, "resources": task.resources.given, "autostop": idle_minutes_to_autostop}
        body = {**said, "down": down, "wait_for": wait_for.name, "name": cluster_name}
        return self._enter("launch", body, lambda: self.launched(str(cluster_name), body))

    def launched(self, name: str, body: dict[str, Any]) -> str:
        for volume in (body["task"].get("volumes") or {}).values():
            disk = next((d for d in self.disks.values() if d.name == volume), None)
            if disk is None or disk.region != body["resources"]["infra"].lower():
                return self.request(
                    "launch", name, lambda: self.refuses("InvalidCloudConfigs", "volume elsewhere"), 1.0
                )
        if self.broke or self.stock <= 0 or len(self.living) >= self.quota:
            why = "the project's billing is disabled: add a payment method" if self.broke else "out of stock"
            why = "QuotaExceeded: vCPU limit of us-east-1 is 0" if len(self.living) >= self.quota else why
            return self.request("launch", name, lambda: self.refuses("ResourcesUnavailableError", why), 3.0)
        pod = self.born(name, body, None)
        return self.request("launch", name, lambda: (1, self._handle(pod)), self.boot_s)

    def refuses(self, name: str, why: str) -> Any:
        raise ERRORS[name](why)

    def status(self, cluster_names: list[str] | None = None, refresh: Any = "StatusRefreshMode.NONE",
               all_users: bool = False) -> str:  # fmt: skip
        def found() -> list[Any]:
            return [self._row(p) for p in self.shown() if cluster_names is None or p.name in cluster_names]

        return self._enter("status", cluster_names, lambda: self.request("status", "", found))

    def _handle(self, pod: Rented) -> SimpleNamespace:
        return SimpleNamespace(head_ip=pod.host, stable_ssh_ports=[22], ssh_user="ubuntu")

    def _row(self, pod: Rented) -> SimpleNamespace:
        state = "INIT" if pod.state == "unhealthy" else pod.state or ("UP" if self.ready(pod) else "INIT")
        kind = {"unhealthy": "unhealthy"}.get(pod.state, "launching" if state == "INIT" else None)
        return row(
            "StatusResponse",
            name=pod.name,
            status=ClusterStatus[state],
            cluster_hash=pod.id,
            handle=self._handle(pod) if state == "UP" else None,
            init_kind=kind,
            accelerators="H100:1",
        )

    def down(self, cluster_name: str, purge: bool = False, graceful: bool = False,
             graceful_timeout: int | None = None) -> str:  # fmt: skip
        return self._enter("down", cluster_name, lambda: self._down(cluster_name))

    def _down(self, name: str) -> str:
        pod = next((p for p in self.shown() if p.name == name), None)
        if pod is None:
            return self.request("down", name, lambda: self.refuses("ClusterDoesNotExist", f"Cluster {name!r} does not"))
        if self.end(pod.id) != 200:
            return self.request("down", name, lambda: self._fail_down())
        return self.request("down", name, lambda: None, self.delete_s)

    def _fail_down(self) -> None:
        raise RuntimeError("Failed to terminate the instance: internal error")

    def autostop(self, cluster_name: str, idle_minutes: int, wait_for: Any = None, down: bool = False,
                 hook: str | None = None, hook_timeout: int | None = None) -> str:  # fmt: skip
        return self._enter("autostop", cluster_name, lambda: self.request("autostop", cluster_name, lambda: None))

    def cost_report(self, days: int | None = None) -> str:
        def found() -> list[dict[str, Any]]:
            past = [p for p in self.rented.values() if p not in self.living]
            rows = [{"name": p.name, "status": None, "total_cost": p.price, "cluster_hash": p.id} for p in past]
            return rows + [{"name": p.name, "status": ClusterStatus["UP"], "total_cost": 1.0} for p in self.shown()]

        return self._enter("cost_report", days, lambda: self.request("cost_report", "", found))

    # volumes, of which a name stands for one and is taken once

    def _apply(self, volume: Any, creation_yaml: str | None = None) -> str:
        asked = volume.given
        return self._enter("volumes.apply", asked, lambda: self._applied(asked))

    def _applied(self, asked: dict[str, Any]) -> str:
        if asked["type"] != "runpod-network-volume" or asked["infra"].count("/") != 2 or int(asked["size"]) < 10:
            raise ValueError("Invalid volume")
        if len(asked["name"]) > 30:
            raise ValueError("Volume name exceeds the maximum length of 30 characters.")
        known = any(d.name == asked["name"] for d in self.disks.values())
        if known or self.new_disk(asked["name"], int(asked["size"]), asked["infra"].lower()) is not None:
            return self.request("volumes.apply", "", lambda: None, 2.0)
        why = 'RunPod REST error 400: {"error": "network volume quota exceeded for this account"}'
        return self.request("volumes.apply", "", lambda: self._runtime_error(why), 2.0)

    def _runtime_error(self, why: str) -> None:
        raise RuntimeError(why)

    def _ls(self, refresh: bool = False, names: list[str] | None = None) -> str:
        def found() -> list[Any]:
            return [self._volume(d) for d in self.shown_disks() if not names or d.name in names]

        return self._enter("volumes.ls", names, lambda: self.request("volumes.ls", "", found))

    def _volume(self, disk: Disk) -> SimpleNamespace:
        cloud, region, zone = disk.region.split("/")
        place = {"cloud": "RunPod" if cloud == "runpod" else cloud, "region": region.upper(), "zone": zone.upper()}
        status = "IN_USE" if self.uses(disk) else "READY"
        return row("VolumeRecord", name=disk.name, type="runpod-network-volume", status=status, **place)

    def _delete_volumes(self, names: list[str], purge: bool = False) -> str:
        return self._enter(
            "volumes.delete", names, lambda: self.request("volumes.delete", "", lambda: self._gone(names))
        )

    def _gone(self, names: list[str]) -> None:
        for name in names:
            disk = next((d for d in self.shown_disks() if d.name == name), None)
            if disk is None:
                raise ValueError(f"Volume {name} not found.")
            status = self.end_disk(disk.id)
            if status == 400:
                raise ValueError(f"Volume {name} is used by cluster x.")
            if status != 200:
                raise RuntimeError("RunPod REST error 500: internal error")

    # requests

    def api_status(
        self,
        request_ids: list[str] | None = None,
        all_status: bool = False,
        limit: int | None = None,
        fields: list[str] | None = None,
        cluster_name: str | None = None,
    ) -> list[Any]:
        found = []
        for r in self.sent.values():
            over = r.cancelled or self.now() >= r.ends
            state = "CANCELLED" if r.cancelled else "SUCCEEDED" if over else "RUNNING"
            asked = r.id in request_ids if request_ids is not None else not over and self.now() >= r.hidden
            if asked and (cluster_name is None or r.cluster == cluster_name):
                found.append(
                    row("RequestPayload", request_id=r.id, name=r.name, status=state, cluster_name=r.cluster or None)
                )
        return found

    def api_cancel(self, request_ids: Any = None, all_users: bool = False, silent: bool = False) -> str:
        for request in request_ids:
            self.sent[request].cancelled = True
        return self.request("api_cancel", "", lambda: list(request_ids))

    def get(self, request_id: str) -> Any:
        return self.sent[request_id].result()
