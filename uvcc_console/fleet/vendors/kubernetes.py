"""Pods of a Kubernetes cluster, over its REST API, reached through the API server.

Plain HTTP rather than a client library: seven calls are made, and the saga must know of each whether it may have been
obeyed. A pod starts an SSH server for the run's key and nothing else. The cluster ends it when the run's life is over
(``activeDeadlineSeconds``), whatever became of the console. It is gone when its object is: a pod on a node that does
not answer stays unproven.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx
from pydantic import Field, model_validator

from uvcc_console.fleet.cloud.calls import PAGE, PAGES, Call, Calls, CloudRefused, kind_of
from uvcc_console.fleet.cloud.choice import OfferFilter, RentedVolume, VolumePlace
from uvcc_console.fleet.cloud.clock import Clock
from uvcc_console.fleet.cloud.fields import mapping, part, rows, text, whole
from uvcc_console.fleet.cloud.intents import base_of
from uvcc_console.fleet.cloud.own_machines import PlainOffer
from uvcc_console.fleet.cloud.plain_vendor import MOUNT, PlainVolumes, RestVendor
from uvcc_console.fleet.cloud.vendor import RentedPod, SshTarget
from uvcc_console.fleet.provider_kinds import FleetSettings, ProviderKind
from uvcc_console.fleet.runclock import FILE as CLOCK
from uvcc_console.fleet.runclock import RunClock
from uvcc_console.fleet.vendors import kube_tunnel, kubeconfig
from uvcc_engine.contract.errors import ConfigError, UnreachableError

if TYPE_CHECKING:
    from uvcc_console.fleet.cloud.saga import CloudProvider

NAME: Final = "kubernetes"
IMAGE: Final = "runpod/pytorch:2.8.0-py3.11-cuda12.8.1-cudnn-devel-ubuntu22.04"
PORT: Final = 2222
NAME_OF_VOLUME: Final = "volume"
LABEL: Final = "app.kubernetes.io/managed-by"
SELECTOR: Final = f"{LABEL}=uvcc"
REGION: Final = "topology.kubernetes.io/region"
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_UID: Final = re.compile(r"[A-Za-z0-9-]{1,64}")
# what a container waits for that no waiting will mend
_HOPELESS: Final = frozenset(
    {
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
        "CrashLoopBackOff",
    }
)

START: Final = f"""set -eu
umask 077
dir=$(mktemp -d)
printf '%s\\n' "$PUBLIC_KEY" >"$dir/authorized_keys"
if ! command -v sshd >/dev/null && [ ! -x /usr/sbin/sshd ]; then
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq openssh-server >/dev/null
fi
sshd=$(command -v sshd || echo /usr/sbin/sshd)
[ "$(id -u)" != 0 ] || mkdir -p /run/sshd
ssh-keygen -q -t ed25519 -N '' -f "$dir/host_key"
printf '%s\\n' 'Port {PORT}' 'ListenAddress 127.0.0.1' "HostKey $dir/host_key" 'PidFile none' 'StrictModes no' \\
  "AuthorizedKeysFile $dir/authorized_keys" 'PasswordAuthentication no' 'KbdInteractiveAuthentication no' \\
  'UsePAM no' 'Subsystem sftp internal-sftp' 'MaxStartups 64' \\
  "SetEnv PATH=$PATH LD_LIBRARY_PATH=${{LD_LIBRARY_PATH:-}}" >"$dir/sshd_config"
exec "$sshd" -D -e -f "$dir/sshd_config"
"""


class KubernetesFleet(FleetSettings):
    """``context``, ``kubeconfig``, ``namespace``: which cluster and where in it, else what ``kubectl`` would take.

    ``gpu``: a product as the nodes' label ``gpu_label`` names it; ``regions``: by the nodes' label of their region.
    ``resource``: what a GPU is asked for as. ``cpus`` and ``memory`` (GiB) are requests. ``node_selector``: further
    labels that a pod's node must have. ``user``: who the image's container runs as. ``storage_class``: of the volumes,
    empty for the cluster's own. ``price``: US dollars an
    hour that a pod counts as, since a cluster names none.
    """

    context: str = ""
    kubeconfig: str = ""
    namespace: str = Field(default="", pattern="^([a-z0-9][a-z0-9-]{0,62})?$")
    gpu_label: str = "nvidia.com/gpu.product"
    resource: str = "nvidia.com/gpu"
    cpus: int = Field(default=4, ge=1)
    memory: int = Field(default=16, ge=1)
    node_selector: dict[str, str] = Field(default_factory=dict)
    user: str = "root"
    storage_class: str = Field(default="", pattern="^([a-z0-9][a-z0-9.-]{0,252})?$")
    price: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _one_cluster(self) -> KubernetesFleet:
        if self.per_party:
            raise ValueError("a cluster is one operator: give each party a provider with fleet.parties")
        return self


class KubernetesClient(PlainVolumes, RestVendor):
    """One namespace. ``seconds``: the cluster ends each pod after so long."""

    name = NAME
    home = ""
    image = IMAGE
    free = True

    def __init__(
        self,
        cluster: kubeconfig.Cluster,
        fleet: KubernetesFleet,
        *,
        seconds: int = 3600,
        clock: Clock | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        tls = cluster.tls if cluster.tls is not None else True
        Calls.__init__(self, cluster.server, "", clock=clock, transport=transport, auth=cluster.who, tls=tls)
        self.where = f"{cluster.name} {cluster.server} namespace {cluster.namespace}".strip()
        self._namespace, self._fleet, self._seconds = cluster.namespace, fleet, seconds
        self._way = kube_tunnel.way({"context": fleet.context, "kubeconfig": fleet.kubeconfig})
        at = {"--kubeconfig": fleet.kubeconfig, "--context": fleet.context, "-n": cluster.namespace}
        by_hand = shlex.join(["kubectl", *(word for k, v in at.items() if v for word in (k, v)), "get", "pods"])
        self.cure = f"{by_hand} asks the same; is the cluster up, and the way to it (VPN, tunnel)?"
        self._path = f"/api/v1/namespaces/{cluster.namespace}/pods"
        self._claims = f"/api/v1/namespaces/{cluster.namespace}/persistentvolumeclaims"

    def _kind(self, response: httpx.Response, said: str) -> str:
        """The API has reasons for what it refuses; a quota and a webhook's no are both Forbidden, told by words."""
        found = kind_of(response.status_code, said)
        low = said.lower()
        if response.status_code == 403 and "exceeded quota" in low:
            return "limit"
        return kind_of(400, said) if response.status_code == 403 and "admission webhook" in low else found

    async def permitted(self) -> None:
        """What a rollout needs in this namespace, asked of the cluster before anything is made there."""
        kube_tunnel.needed()
        needed = [("pods", verb, "") for verb in ("create", "list", "get", "delete")] + [
            ("pods", "create", "portforward")
        ]
        if self._fleet.volume is not None:
            needed += [("persistentvolumeclaims", verb, "") for verb in ("create", "list", "delete")]
        for resource, verb, sub in needed:
            wanted = {"namespace": self._namespace, "verb": verb, "resource": resource, "subresource": sub}
            body = {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectAccessReview",
                "spec": {"resourceAttributes": {k: v for k, v in wanted.items() if v}},
            }
            path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
            said = mapping(await self._send(Call("POST", path, [], body)), "the cluster's access review")
            if part(said.get("status")).get("allowed") is not True:
                what = f"{verb} {resource}{'/' if sub else ''}{sub} is not allowed in namespace {self._namespace}"
                raise CloudRefused("auth", 403, what)

    # the market

    async def offers_for(self, wanted: OfferFilter) -> Sequence[PlainOffer]:
        """Kinds of nodes that could take a pod. Whether they are busy only the scheduler tells; who may not see the
        nodes asks it at once."""
        if wanted.spot:
            raise ConfigError("kubernetes knows no spot", "leave out fleet.spot; fleet.node_selector names such nodes")
        price, own = self._fleet.price, self._fleet
        try:
            nodes = await self._every("/api/v1/nodes", "the cluster's nodes")
        except CloudRefused as e:
            if e.status != 403:
                raise
            regions = wanted.regions or ("",)
            return [PlainOffer("any", NAME, r, wanted.gpu, wanted.gpus, price, steady=True) for r in regions]
        found: dict[tuple[str, str], PlainOffer] = {}
        for node in nodes:
            labels, status = part(part(node.get("metadata")).get("labels")), part(node.get("status"))
            if any(labels.get(k) != v for k, v in own.node_selector.items()):
                continue
            gpu, region = text(labels.get(own.gpu_label)) if wanted.gpu else "", text(labels.get(REGION))
            room = whole(part(status.get("allocatable")).get(own.resource)) or 0
            stock = _schedulable(node) and (not wanted.gpu or room >= max(1, wanted.gpus))
            count = wanted.gpus if gpu else 0
            offer = PlainOffer(gpu or "node", NAME, region, gpu, count, price, stock=stock, steady=True)
            if stock or (gpu, region) not in found:
                found[gpu, region] = offer
        return list(found.values())

    async def _every(self, path: str, what: str, *params: tuple[str, Any]) -> list[Mapping[str, Any]]:
        """A list, page by page, as it is now: no resourceVersion is named, so the answer is not from a cache.

        A list whose continuation has expired (410) is begun anew: what changed in between would be missing.
        """
        for _ in range(3):
            found: list[Mapping[str, Any]] = []
            token = ""
            for _ in range(PAGES):
                try:
                    answer = await self._get(path, ("limit", PAGE), ("continue", token), *params)
                except CloudRefused as e:
                    if e.status != 410:
                        raise
                    break
                page = mapping(answer, what)
                found += rows(page.get("items"), what)
                token = str(part(page.get("metadata")).get("continue") or "")
                if not token:
                    return found
        raise UnreachableError(f"{what} could not be listed whole", "the cluster changes too fast, or the list is none")

    # pods

    async def rent(
        self, offer: PlainOffer, wanted: OfferFilter, *, name: str, image: str, key_id: str, cap: float
    ) -> RentedPod:
        """Create one pod. Without an answer it may be there: its name tells, which the namespace has once only."""
        body = self._manifest(offer, wanted, name, image, key_id)
        return self.read_pod(await self._send(Call("POST", self._path, [], body, repeat=False)))

    def _manifest(self, offer: PlainOffer, wanted: OfferFilter, name: str, image: str, key: str) -> dict[str, Any]:
        own = self._fleet
        requests: dict[str, str] = {"cpu": str(own.cpus), "memory": f"{own.memory}Gi"}
        requests |= {"ephemeral-storage": f"{wanted.disk}Gi"} if wanted.disk else {}
        limits: dict[str, str] = {own.resource: str(offer.gpu_count)} if offer.gpu_type else {}
        selector = dict(own.node_selector)
        selector |= {own.gpu_label: offer.gpu_type} if offer.gpu_type else {}
        selector |= {REGION: offer.region} if offer.region else {}
        container: dict[str, Any] = {
            "name": "pod",
            "image": image,
            "command": ["sh", "-c", START],
            "env": [{"name": "PUBLIC_KEY", "value": key}],
            "resources": {"requests": requests | limits, "limits": limits},
        }
        spec: dict[str, Any] = {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": self._seconds,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "containers": [container],
        }
        if wanted.volume is not None:
            container["volumeMounts"] = [{"name": NAME_OF_VOLUME, "mountPath": wanted.mount or MOUNT}]
            claim = {"claimName": wanted.volume.name}
            spec["volumes"] = [{"name": NAME_OF_VOLUME, "persistentVolumeClaim": claim}]
        if selector:
            spec["nodeSelector"] = selector
        if limits:
            spec["tolerations"] = [{"key": own.resource, "operator": "Exists", "effect": "NoSchedule"}]
        labels = {LABEL: "uvcc", "uvcc/request": base_of(name)}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}

    async def pods(self) -> Sequence[RentedPod]:
        found = await self._every(self._path, "the cluster's list of pods", ("labelSelector", SELECTOR))
        return [self.read_pod(row) for row in found]

    async def pod(self, pod_id: str) -> RentedPod | None:
        """One pod by name; another of the same name, made since, is not this one."""
        _, name = _parts(pod_id)
        if not name:
            return None
        known, answer = await self._known(Call("GET", f"{self._path}/{name}", []))
        found = self.read_pod(answer) if known else None
        return found if found is not None and found.id == pod_id else None

    async def delete(self, pod_id: str) -> bool:
        """Ask for the end of this pod, and of no later one of its name. It gets its half minute to end by itself."""
        return await self._delete(self._path, pod_id)

    async def _delete(self, path: str, object_id: str) -> bool:
        uid, name = _parts(object_id)
        if not name:
            return False
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": uid}}
        try:
            known, _ = await self._known(Call("DELETE", f"{path}/{name}", [], body))
        except CloudRefused as e:
            if e.status != 409:
                raise
            return False
        return known

    # claims for volumes: what lies behind them is the cluster's own affair

    def volume_at(self, offer: PlainOffer, size_gb: int) -> VolumePlace | None:
        return VolumePlace("", size_gb)

    async def create_volume(self, name: str, place: VolumePlace) -> RentedVolume:
        spec: dict[str, Any] = {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": f"{place.size_gb}G"}},
        }
        spec |= {"storageClassName": self._fleet.storage_class} if self._fleet.storage_class else {}
        labels = {LABEL: "uvcc", "uvcc/request": base_of(name)}
        meta = {"name": name, "labels": labels}
        body = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": spec}
        return _claim(await self._send(Call("POST", self._claims, [], body, repeat=False)))

    async def volumes(self) -> Sequence[RentedVolume]:
        """Every claim of the namespace: also those that somebody else made, which a profile may name."""
        return [_claim(row) for row in await self._every(self._claims, "the cluster's list of claims")]

    async def delete_volume(self, volume_id: str) -> bool:
        """A claim that a pod uses stays until that pod is gone: the cluster sees to it."""
        return await self._delete(self._claims, volume_id)

    def read_pod(self, row: Any) -> RentedPod:
        """A pod out of its object. Raises UnreachableError for one without a uid."""
        said = mapping(row, "the cluster's pod")
        meta, status = part(said.get("metadata")), part(said.get("status"))
        uid, name = meta.get("uid"), text(meta.get("name"))
        if not isinstance(uid, str) or not _UID.fullmatch(uid):
            raise UnreachableError(f"the cluster's pod has {str(uid)[:80]!r} for a uid", "the API may have changed")
        phase, ending = text(status.get("phase")), bool(meta.get("deletionTimestamp"))
        why, hopeless = _why(status)
        over = phase in ("Failed", "Succeeded")
        ready = phase == "Running" and not ending
        login = SshTarget(self._fleet.user, kube_tunnel.host_of(name, self._namespace), PORT, self._way)
        containers = part(said.get("spec")).get("containers")
        first = part(containers[0]) if isinstance(containers, list) and containers else {}
        return RentedPod(
            f"{uid}_{name if _NAME.fullmatch(name) else ''}",
            name,
            NAME,
            self._fleet.price or None,
            " ".join(filter(None, (phase, "Terminating" if ending else "", why))),
            dying=over or ending,
            failed=over or hopeless,
            unclear=phase == "Unknown",
            installed=ready,
            has_gpu=bool(part(part(first.get("resources")).get("limits")).get(self._fleet.resource)),
            logins=(login,) if ready else (),
        )


def _claim(row: Any) -> RentedVolume:
    """A claim out of its object. Raises UnreachableError for one without a uid."""
    meta = part(mapping(row, "the cluster's claim").get("metadata"))
    uid, name = meta.get("uid"), text(meta.get("name"))
    if not isinstance(uid, str) or not _UID.fullmatch(uid):
        raise UnreachableError(f"the cluster's claim has {str(uid)[:80]!r} for a uid", "the API may have changed")
    shown = name if _NAME.fullmatch(name) else ""
    return RentedVolume(f"{uid}_{shown}", name, dying=bool(meta.get("deletionTimestamp")))


def _parts(pod_id: str) -> tuple[str, str]:
    """(uid, name) of an id; no name where the pod has none that could be asked for."""
    uid, _, name = pod_id.partition("_")
    return (uid, name) if _UID.fullmatch(uid) and _NAME.fullmatch(name) else (uid, "")


def _schedulable(node: Mapping[str, Any]) -> bool:
    conditions = part(node.get("status")).get("conditions")
    ready = [c for c in (conditions if isinstance(conditions, list) else []) if part(c).get("type") == "Ready"]
    return not part(node.get("spec")).get("unschedulable") and all(part(c).get("status") == "True" for c in ready)


def _why(status: Mapping[str, Any]) -> tuple[str, bool]:
    """What keeps a pod from running, in words, and whether that is for good."""
    said, hopeless = [text(status.get("reason")), text(status.get("message"))], False
    rows_of = status.get("containerStatuses")
    for row in rows_of if isinstance(rows_of, list) else []:
        state = part(part(row).get("state"))
        waiting, ended = part(state.get("waiting")), part(state.get("terminated"))
        reason = text(waiting.get("reason"))
        hopeless = hopeless or reason in _HOPELESS
        said += [reason, text(waiting.get("message"))] if reason != "ContainerCreating" else []
        said += [f"exit {text(ended.get('exitCode'))} {text(ended.get('reason'))}"] if ended else []
    conditions = status.get("conditions")
    for row in conditions if isinstance(conditions, list) else []:
        if part(row).get("reason") == "Unschedulable":
            said += ["Unschedulable:", text(part(row).get("message"))]
    return " ".join(filter(None, said))[:300], hopeless


def make(fleet: Mapping[str, Any], run_dir: Path, ttl_s: float) -> CloudProvider:
    from uvcc_console.fleet.cloud.intents import Intents
    from uvcc_console.fleet.cloud.saga import CloudProvider

    own = KubernetesFleet.model_validate({k: v for k, v in fleet.items() if k in KubernetesFleet.model_fields})
    cluster = kubeconfig.find(own.context, own.kubeconfig, own.namespace)
    known = (run_dir / CLOCK).exists() or Intents.of(run_dir).path.exists()
    clock = RunClock(run_dir if known else None)
    client = KubernetesClient(cluster, own, seconds=math.ceil(ttl_s) + 600, clock=clock)
    return CloudProvider(client, fleet, run_dir)


KIND: Final = ProviderKind(NAME, KubernetesFleet, make, volumes=MOUNT, mounts=True)
