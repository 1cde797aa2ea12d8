"""The part of a Kubernetes API server that pods are made with, by the API's own OpenAPI document.

Objects have uid and resourceVersion, lists have pages that may expire (410), a name is taken once (409), what is no pod
is refused (422), a quota and an admission webhook refuse as the real ones do (403), and an end takes its time: the
object stays with a deletionTimestamp until its containers are gone.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import httpx
from cloudfake import CloudFake, Disk, Rented, said

NAMESPACE = "lab"
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_LABEL = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_SPEC = frozenset(
    (
        "restartPolicy",
        "activeDeadlineSeconds",
        "automountServiceAccountToken",
        "enableServiceLinks",
        "containers",
        "nodeSelector",
        "tolerations",
        "volumes",
    )
)
_CONTAINER = frozenset(("name", "image", "command", "args", "env", "resources", "volumeMounts", "ports"))
_REASONS = {400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 409: "Conflict"}
_REASONS |= {410: "Expired", 422: "Invalid", 429: "TooManyRequests"}


class KubernetesFake(CloudFake):
    """``denied``: (verb, subresource) that the user may not; ``hidden_nodes``: neither may they list nodes."""

    OPS: ClassVar = {
        "market": ("GET", "/v1/nodes"),
        "create": ("POST", f"/v1/namespaces/{NAMESPACE}/pods"),
        "list": ("GET", f"/v1/namespaces/{NAMESPACE}/pods"),
        "delete": ("DELETE", f"/v1/namespaces/{NAMESPACE}/pods/"),
        "new disk": ("POST", f"/v1/namespaces/{NAMESPACE}/persistentvolumeclaims"),
        "disks": ("GET", f"/v1/namespaces/{NAMESPACE}/persistentvolumeclaims"),
        "end disk": ("DELETE", f"/v1/namespaces/{NAMESPACE}/persistentvolumeclaims/"),
    }
    page = 50

    def __init__(self, now: Any) -> None:
        super().__init__(now)
        self.denied: set[tuple[str, str]] = set()
        self.hidden_nodes = False
        self.expire = 0  # so many continuations have expired
        self.version = 100
        self.ending_claims: set[str] = set()
        self.waiting: dict[str, Any] = {}  # what the container waits for
        self.unschedulable = ""

    def no(self, status: int, kind: str, text: str) -> httpx.Response:
        why = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": text}
        return said({**why, "reason": _REASONS.get(status, "InternalError"), "code": status}, status)

    def new_id(self) -> str:
        n = next(self.numbers)
        return f"{n:08x}-0000-4000-8000-{n:012x}"

    def answer(self, method: str, parts: list[str], q: dict[str, str], body: Any) -> httpx.Response:
        match (method, *parts):
            case ("POST", "apis", "authorization.k8s.io", "v1", "selfsubjectaccessreviews"):
                asked = body["spec"]["resourceAttributes"]
                pods = asked["resource"] == "pods"
                allowed = (
                    asked["verb"],
                    asked.get("subresource", "") if pods else asked["resource"],
                ) not in self.denied
                return said({**body, "status": {"allowed": allowed}}, 201)
            case ("GET", "v1", "nodes"):
                if self.hidden_nodes:
                    return self.no(403, "", 'nodes is forbidden: User "lab" cannot list resource "nodes"')
                return self._list([self._node(n) for n in range(60)], q, "NodeList")
            case ("GET", "v1", "namespaces", ns, "pods") if ns == NAMESPACE:
                key, _, value = q.get("labelSelector", "").partition("=")
                rows = [self._object(p) for p in self.shown()]
                found = [r for r in rows if not key or r["metadata"]["labels"].get(key) == value]
                return self._list(found, q, "PodList")
            case ("POST", "v1", "namespaces", ns, "pods") if ns == NAMESPACE:
                return self._create(body)
            case ("GET", "v1", "namespaces", ns, "pods", name) if ns == NAMESPACE:
                pod = self.named(name)
                return said(self._object(pod)) if pod else self.no(404, "", f'pods "{name}" not found')
            case ("DELETE", "v1", "namespaces", ns, "pods", name) if ns == NAMESPACE:
                return self._delete(name, body or {})
            case ("GET", "v1", "namespaces", ns, "persistentvolumeclaims") if ns == NAMESPACE:
                self._protected()
                return self._list([self._claim(d) for d in self.shown_disks()], q, "PersistentVolumeClaimList")
            case ("POST", "v1", "namespaces", ns, "persistentvolumeclaims") if ns == NAMESPACE:
                return self._new_claim(body)
            case ("DELETE", "v1", "namespaces", ns, "persistentvolumeclaims", name) if ns == NAMESPACE:
                return self._end_claim(name, body or {})
            case (_, "v1", "namespaces", ns, *_):
                return self.no(404, "", f'namespaces "{ns}" not found')
        return self.no(404, "", "the server could not find the requested resource")

    def _new_claim(self, body: Any) -> httpx.Response:
        name, spec = body["metadata"]["name"], body["spec"]
        size = re.fullmatch(r"([0-9]+)G", spec["resources"]["requests"]["storage"])
        if body["kind"] != "PersistentVolumeClaim" or spec["accessModes"] != ["ReadWriteOnce"] or size is None:
            return self.no(422, "", f'PersistentVolumeClaim "{name}" is invalid')
        if any(d.name == name for d in self.disks.values()):
            return self.no(409, "", f'persistentvolumeclaims "{name}" already exists')
        made = self.new_disk(name, int(size[1]), "")
        if made is None:
            how = "requested: persistentvolumeclaims=1, used: 9, limited: 9"
            return self.no(403, "", f'persistentvolumeclaims "{name}" is forbidden: exceeded quota: disks, {how}')
        return said(self._claim(made), 201)

    def _end_claim(self, name: str, options: dict[str, Any]) -> httpx.Response:
        """A claim in use stays, with a deletionTimestamp, until its pod is gone (``kubernetes.io/pvc-protection``)."""
        disk = next((d for d in self.shown_disks() if d.name == name), None)
        if disk is None:
            return self.no(404, "", f'persistentvolumeclaims "{name}" not found')
        if options.get("preconditions", {}).get("uid") not in (None, disk.id):
            return self.no(409, "", "the UID in the precondition does not match the UID in record")
        if self.refuse_deletes:
            self.refuse_deletes -= 1
            return self.no(500, "", "etcdserver: request timed out")
        self.ending_claims.add(disk.id)
        return said(self._claim(disk))

    def _protected(self) -> None:
        for disk in [d for d in self.disks.values() if d.id in self.ending_claims and not self.uses(d)]:
            del self.disks[disk.id]

    def _claim(self, disk: Disk) -> dict[str, Any]:
        meta: dict[str, Any] = {"name": disk.name, "namespace": NAMESPACE, "uid": disk.id}
        meta["labels"] = {"app.kubernetes.io/managed-by": "uvcc"}
        meta |= {"deletionTimestamp": "2026-11-22T00:00:00Z"} if disk.id in self.ending_claims else {}
        return {"kind": "PersistentVolumeClaim", "apiVersion": "v1", "metadata": meta, "status": {"phase": "Bound"}}

    def _list(self, found: list[Any], q: dict[str, str], kind: str) -> httpx.Response:
        first = int(q.get("continue") or 0)
        if first and self.expire:
            self.expire -= 1
            return self.no(410, "", "The provided continue parameter is too old to display a consistent list result.")
        size = min(self.page, int(q.get("limit") or 10**6))
        more = first + size < len(found)
        meta = {"resourceVersion": str(self.version), **({"continue": str(first + size)} if more else {})}
        meta |= {"remainingItemCount": len(found) - first - size} if more else {}
        return said({"kind": kind, "apiVersion": "v1", "metadata": meta, "items": found[first : first + size]})

    def _node(self, n: int) -> dict[str, Any]:
        labels = {"nvidia.com/gpu.product": "H100", "topology.kubernetes.io/region": ("us-1", "eu-1")[n % 2]}
        free = n < self.stock
        status = {
            "allocatable": {"cpu": "64", "nvidia.com/gpu": "8"},
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        spec = {} if free else {"unschedulable": True}
        return {"metadata": {"name": f"node-{n}", "uid": str(n), "labels": labels}, "spec": spec, "status": status}

    def named(self, name: str) -> Rented | None:
        return next((p for p in self.shown() if p.name == name), None)

    def _create(self, body: Any) -> httpx.Response:
        meta, spec = body.get("metadata", {}), body.get("spec", {})
        name = meta.get("name", "")
        container = (spec.get("containers") or [{}])[0]
        if body.get("kind") != "Pod" or set(spec) - _SPEC or set(container) - _CONTAINER:
            return self.no(
                400, "", f"strict decoding error: unknown field {set(spec) - _SPEC}{set(container) - _CONTAINER}"
            )
        if not _NAME.fullmatch(name) or any(not _LABEL.fullmatch(v) for v in meta.get("labels", {}).values()):
            return self.no(422, "", f'Pod "{name[:80]}" is invalid: metadata.name: Invalid value')
        limits, requests = (container.get("resources", {}).get(k, {}) for k in ("limits", "requests"))
        if not container.get("image") or any(requests.get(k) != v for k, v in limits.items()):
            return self.no(422, "", f'Pod "{name}" is invalid: spec.containers[0]')
        if any(p.name == name for p in self.living):
            return self.no(409, "", f'pods "{name}" already exists')
        if len(self.living) >= self.quota:
            how = "requested: requests.nvidia.com/gpu=1, used: requests.nvidia.com/gpu=8, limited: 8"
            return self.no(403, "", f'pods "{name}" is forbidden: exceeded quota: gpus, {how}')
        if self.broke:
            how = 'admission webhook "billing.example.com" denied the request: insufficient balance'
            return self.no(403, "", how)
        self.version += 1
        return said(self._object(self.born(name, body, None)), 201)

    def _delete(self, name: str, options: dict[str, Any]) -> httpx.Response:
        pod = self.named(name)
        if pod is None:
            return self.no(404, "", f'pods "{name}" not found')
        wanted = options.get("preconditions", {}).get("uid")
        if wanted and wanted != pod.id:
            how = f"the UID in the precondition ({wanted}) does not match the UID in record ({pod.id})"
            return self.no(409, "", f'Operation cannot be fulfilled on pods "{name}": {how}')
        status = self.end(pod.id)
        return said(self._object(pod)) if status == 200 else self.no(status, "", "etcdserver: request timed out")

    def _object(self, p: Rented) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "name": p.name,
            "namespace": NAMESPACE,
            "uid": p.id,
            "resourceVersion": str(self.version),
        }
        meta["labels"] = p.asked.get("metadata", {}).get("labels", {"app.kubernetes.io/managed-by": "uvcc"})
        meta |= {"deletionTimestamp": "2026-11-22T00:00:00Z"} if p.deleting else {}
        up = self.ready(p) and not self.unschedulable and not self.waiting
        status: dict[str, Any] = {"phase": p.state or ("Running" if up else "Pending")}
        if self.unschedulable:
            why = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": self.unschedulable}
            status["conditions"] = [why]
        if self.waiting:
            status["containerStatuses"] = [{"name": "pod", "ready": False, "state": {"waiting": self.waiting}}]
        return {"kind": "Pod", "apiVersion": "v1", "metadata": meta, "spec": p.asked.get("spec", {}), "status": status}
