"""Hosts that the user already has, from a YAML list. A pod is a claim on one of them; giving it back leaves no trace.

The run's own key is added to the host's ``authorized_keys`` for the time of the claim, so that the rest of the console
needs neither the user's key nor to know that the host is not a rented one. One host (user and address) is one pod.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from uvcc_console.core.suggest import nearest
from uvcc_console.fleet import keys, pod
from uvcc_console.fleet.kinds import FleetSettings, ProviderKind
from uvcc_console.fleet.provider import FunnelStep, Pod, PodRequest, Quote, QuoteLine
from uvcc_console.fleet.ssh import PodLink
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UnreadableError, UvccError

CLAIM = ".uvcc-claim"  # a symbolic link whose target is the pod's name: made and read in one step
PATIENCE_S = 30.0
_CLAIMED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class Host(BaseModel):
    """One machine. ``party`` reserves it for a party; ``domain`` is who runs it; ``price`` US dollars an hour."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str
    user: str
    port: int = Field(22, gt=0, lt=65536)
    party: int | None = Field(None, ge=0, le=2)
    key: str = ""
    jump: str = ""
    domain: str = ""
    gpu: str = ""
    gpus: int = Field(0, ge=0)
    region: str = ""
    price: float = Field(0.0, ge=0)
    host_key: str = ""

    @property
    def address(self) -> str:
        return f"{self.user}@{self.host}:{self.port}"


def read_hosts(path: Path) -> list[Host]:
    """The hosts of an inventory file. Raises UnreadableError, or ConfigError naming entry and key."""
    path = path.expanduser()
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as e:
        raise UnreadableError(f"cannot read the inventory {path}: {e.strerror}", "fleet.hosts names it") from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ConfigError(f"inventory {path} is not YAML: {' '.join(str(e).split())}") from e
    entries = data.get("hosts") if isinstance(data, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"inventory {path} lists no hosts", "it starts with hosts: and a list of {host, user}")
    found = [_host(entry, n, path) for n, entry in enumerate(entries, 1)]
    for n, host in enumerate(found, 1):
        if host.address in {h.address for h in found[: n - 1]}:
            raise ConfigError(f"inventory {path}, entry {n}: {host.address} is listed twice", "one host is one pod")
    return found


def _host(entry: Any, n: int, path: Path) -> Host:
    if not isinstance(entry, dict):
        raise ConfigError(f"inventory {path}, entry {n} is not a mapping", "write it like {host: a.example, user: me}")
    try:
        return Host.model_validate(entry)
    except ValidationError as e:
        error = e.errors()[0]
        key = ".".join(str(p) for p in error["loc"])
        if error["type"] == "extra_forbidden":
            hint = f"did you mean {nearest(key, Host.model_fields)}?"
            raise ConfigError(f"inventory {path}, entry {n}: unknown key {key}", hint) from None
        raise ConfigError(f"inventory {path}, entry {n}: {key}: {error['msg']}") from None


def jump_to(fleet: Mapping[str, Any], address: str) -> str:
    """The jump host (``user@host:port``) through which this address is reached; empty for a direct way."""
    if fleet.get("provider") != InventoryProvider.name:
        return ""
    return next((h.jump for h in read_hosts(Path(str(fleet["hosts"]))) if h.address == address), "")


def make(fleet: Mapping[str, Any], run_dir: Path, ttl_s: float) -> InventoryProvider:
    if not fleet.get("hosts"):
        raise ConfigError("fleet.hosts is missing", "it names the YAML file that lists the hosts")
    return InventoryProvider(read_hosts(Path(str(fleet["hosts"]))), run_dir, str(fleet.get("ssh_key", "")))


class InventoryProvider:
    """Claims hosts, one pod each."""

    name = "inventory"

    def __init__(self, hosts: Sequence[Host], run_dir: Path, key_file: str = "") -> None:
        self._hosts = {h.address: h for h in hosts}
        self._run_dir = run_dir
        self._key_file = key_file
        self._links: dict[str, PodLink] = {}
        self._taken: set[str] = set()

    async def quote(self, requests: Sequence[PodRequest]) -> Quote:
        """Which host each pod would get. Raises ConfigError naming the constraint that leaves too few."""
        funnel: list[FunnelStep] = []
        free = list(self._hosts.values())
        lines: list[QuoteLine] = []
        for request in sorted(requests, key=lambda r: (r.replica, r.party)):
            fitting = _fitting(request, free)
            if not fitting:
                raise ConfigError(f"no host of the inventory is left for {request.name}", _why(request, free))
            host = fitting[0]
            free.remove(host)
            funnel.append(FunnelStep(request.name, len(fitting), 0, host.address))
            lines.append(QuoteLine(request, host.domain or self.name, host.region, host.price, {"host": host.address}))
        return Quote(tuple(lines), time.time(), tuple(funnel))

    async def create(self, request: PodRequest) -> Pod:
        """Claim the first fitting host that nobody holds; a claim of this name is found again."""
        mine = [p for p in await self.list(request.name) if p.name == request.name]
        if mine:
            return mine[0]
        reasons = []
        for host in _fitting(request, list(self._hosts.values())):
            if host.address in self._taken:
                continue
            self._taken.add(host.address)
            try:
                holder = await self._claim(host, request.name)
            except UvccError as e:
                self._taken.discard(host.address)
                reasons.append(str(e))
                continue
            if holder == request.name:
                return _pod(request.name, request.party, request.replica, host)
            self._taken.discard(host.address)
            reasons.append(f"{host.address} is held by {holder}")
        why = "; ".join(reasons) or _why(request, list(self._hosts.values()))
        raise UvccError(f"no host of the inventory can be claimed for {request.name}: {why}", "free one, or add one")

    async def _claim(self, host: Host, name: str) -> str:
        """Who holds the host after trying; with the claim comes the run's key."""
        link = await self._link(host)
        public = keys.public_line(keys.operator_key(self._run_dir, self._key_file))
        line = " ".join([*public.split()[:2], f"uvcc-operator-{name}"])
        return await link.sh(
            f"umask 077; ln -s {shlex.quote(name)} {CLAIM} 2>/dev/null\n"
            f'[ "$(readlink {CLAIM})" = {shlex.quote(name)} ] || {{ readlink {CLAIM}; exit 0; }}\n'
            "mkdir -p .ssh; touch .ssh/authorized_keys\n"
            f"grep -qxF {shlex.quote(line)} .ssh/authorized_keys || echo {shlex.quote(line)} >>.ssh/authorized_keys\n"
            f"readlink {CLAIM}"
        )

    async def wait_ready(self, pod: Pod) -> Pod:
        host = self._host_of(pod)
        await (await self._link(host)).connect_until(PATIENCE_S)
        return pod

    async def delete(self, pod_: Pod) -> None:
        """End what runs there under our mark, remove our folder, the run's key and the claim; prove it."""
        host = self._host_of(pod_)
        link = await self._link(host)
        holder = await link.sh(f"readlink {CLAIM} || :")
        if holder and holder != pod_.name:
            return  # somebody else's by now: ours is gone
        script = pod.source("give_back.py")
        pythons = (await link.sh(pod.PYTHONS)).splitlines() or ["python3"]
        said = await link.sh(f"{shlex.quote(pythons[-1])} - {shlex.quote(pod_.name)}", stdin=script, timeout=60.0)
        if said != "gone":
            raise UnreachableError(f"pod {pod_.name} on {host.address} is not gone: {said}", "end it by hand")
        self._taken.discard(host.address)

    async def list(self, prefix: str) -> list[Pod]:
        """Claims on the inventory's hosts. A host that cannot be reached makes the answer unknown: it raises."""

        async def ask(host: Host) -> Pod | None:
            name = await (await self._link(host)).sh(f"readlink {CLAIM} || :")
            if not name.startswith(prefix) or not _CLAIMED.fullmatch(name):
                return None  # nobody's claim, another's, or none that this console ever wrote
            party, replica = _place(name)
            return _pod(name, party, replica, host)

        found = await asyncio.gather(*(ask(h) for h in self._hosts.values()))
        return [p for p in found if p is not None]

    async def close(self) -> None:
        for link in self._links.values():
            await link.close()

    def _host_of(self, pod_: Pod) -> Host:
        host = self._hosts.get(pod_.provider_id)
        if host is None:
            raise ConfigError(f"{pod_.provider_id} is not in the inventory any more", "put it back until the run ended")
        return host

    async def _link(self, host: Host) -> PodLink:
        """The provider's own connection, with the user's key for this host."""
        link = self._links.get(host.address)
        if link is None:
            given = host.key or self._key_file or "~/.ssh/id_ed25519"
            key = keys.operator_key(self._run_dir, given)
            link = PodLink(host.address, host.address, key, host_key=host.host_key, jump=host.jump)
            self._links[host.address] = link
        await link.connect()
        return link


def _fitting(request: PodRequest, hosts: Sequence[Host]) -> list[Host]:
    """Hosts that would do, those reserved for the party first, then the cheapest."""
    found = [
        h
        for h in hosts
        if h.party in (None, request.party)
        and (not request.gpu or h.gpu == request.gpu)
        and (not request.gpu or h.gpus >= request.gpu_count)
        and (not request.region or h.region == request.region)
        and (not request.want_provider or h.domain == request.want_provider)
        and (request.max_price_hr is None or h.price <= request.max_price_hr)
    ]
    return sorted(found, key=lambda h: (h.party is None, h.price))


def _why(request: PodRequest, hosts: Sequence[Host]) -> str:
    wants = {
        "party": request.party,
        "gpu": request.gpu,
        "gpus": request.gpu_count,
        "region": request.region,
        "domain": request.want_provider,
        "price": request.max_price_hr,
    }
    said = ", ".join(f"{k} {v}" for k, v in wants.items() if v not in ("", None))
    return f"{len(hosts)} hosts are free, none fits {said}" if hosts else "all hosts are given out"


def _place(name: str) -> tuple[int, int]:
    """Party and replica out of ``...-p0r1``; (0, 0) for another form."""
    found = re.fullmatch(r".*-p([0-9]{1,6})r([0-9]{1,6})", name)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _pod(name: str, party: int, replica: int, host: Host) -> Pod:
    return Pod(
        name=name,
        party=party,
        replica=replica,
        provider=host.domain or "inventory",
        provider_id=host.address,
        user=host.user,
        host=host.host,
        port=host.port,
        price_hr=host.price,
        region=host.region,
        jump=host.jump,
    )


class InventoryFleet(FleetSettings):
    """``hosts``: the YAML file that lists the machines."""

    hosts: str = ""

    @model_validator(mode="after")
    def _named(self) -> InventoryFleet:
        if not self.hosts:
            raise ValueError("provider inventory needs hosts: the path of the YAML list of machines")
        return self


KIND = ProviderKind("inventory", InventoryFleet, make)
