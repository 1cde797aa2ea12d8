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
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from uvcc_console.core.log import logger
from uvcc_console.fleet import pins, pod, ssh_keys, tunnels
from uvcc_console.fleet.claims import Claims, book_for, books
from uvcc_console.fleet.pins import HostKeyPins, split_address
from uvcc_console.fleet.provider import FunnelStep, Pod, PodRequest, Quote, QuoteLine
from uvcc_console.fleet.provider_kinds import GIVEN, FleetSettings, ProviderKind, place_of, sections
from uvcc_console.fleet.ssh import PodLink
from uvcc_console.fleet.user_ssh import UserKeys, place
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UnreadableError, UvccError
from uvcc_engine.contract.parsing import yaml_text
from uvcc_engine.contract.parsing.small_text import read_small
from uvcc_engine.contract.parsing.suggest import nearest

log = logger(__name__)

CLAIM = ".uvcc-claim"  # a symbolic link whose target is the pod's name: made and read in one step
PATIENCE_S = 30.0
_CLAIMED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class Host(BaseModel):
    """One machine. ``party`` reserves it for a party; ``domain`` is who runs it; ``price`` US dollars an hour.

    ``host`` may be a name that ``~/.ssh/config`` knows; what that says of address, user, port, keys and jump hosts
    counts where the entry itself says nothing.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str
    user: str = ""
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
    login: UserKeys | None = Field(None, exclude=True)

    @property
    def address(self) -> str:
        return f"{self.user}@{self.host}:{self.port}"


def read_hosts(path: Path) -> list[Host]:
    """The hosts of an inventory file. Raises UnreadableError, or ConfigError naming entry and key."""
    path = path.expanduser()
    try:
        data = yaml_text.load(read_small(path))
    except OSError as e:
        raise UnreadableError(f"cannot read the inventory {path}: {e.strerror}", "fleet.hosts names it") from e
    except yaml.YAMLError as e:
        raise ConfigError(f"inventory {path} is not YAML: {' '.join(str(e).split())}") from e
    except ValueError as e:
        raise UnreadableError(f"cannot read the inventory {path}: {e}", "fleet.hosts names it") from e
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
    if "login" in entry:
        raise ConfigError(f"inventory {path}, entry {n}: unknown key login", "did you mean jump?")
    try:
        host = _placed(Host.model_validate(entry))
        where = f"inventory {path}, entry {n}"
        return host.model_copy(update={"host_key": pins.checked(host.host_key, where)}) if host.host_key else host
    except ValidationError as e:
        error = e.errors()[0]
        key = ".".join(str(p) for p in error["loc"])
        if error["type"] == "extra_forbidden":
            hint = f"did you mean {nearest(key, [k for k in Host.model_fields if k != 'login'])}?"
            raise ConfigError(f"inventory {path}, entry {n}: unknown key {key}", hint) from None
        raise ConfigError(f"inventory {path}, entry {n}: {key}: {error['msg']}") from None


def _placed(host: Host) -> Host:
    """The entry with what the user's SSH configuration adds to it."""
    given = host.port if "port" in host.model_fields_set else 0
    at = place(host.host, user=host.user, port=given, jump=host.jump, key=host.key)
    found = {"host": at.host, "user": at.user, "port": at.port, "jump": at.jump, "login": at.keys}
    return host.model_copy(update=found)


def jump_to(fleet: Mapping[str, Any], address: str) -> str:
    """The jump host (``user@host:port``) or tunnel through which this address is reached; empty for a direct way."""
    if way := tunnels.jump_of(fleet, address):
        return way
    for part in sections(fleet):
        if part.get("provider") == InventoryProvider.name:
            for host in read_hosts(Path(str(part["hosts"]))):
                if host.address == address:
                    return host.jump
    return ""


def make(fleet: Mapping[str, Any], run_dir: Path, ttl_s: float) -> InventoryProvider:
    if not fleet.get("hosts"):
        raise ConfigError("fleet.hosts is missing", "it names the YAML file that lists the hosts")
    hosts = read_hosts(Path(str(fleet["hosts"])))
    return InventoryProvider(hosts, run_dir, str(fleet.get("ssh_key", "")), party=fleet.get("party"))


class InventoryProvider:
    """Claims hosts, one pod each."""

    name = "inventory"

    def __init__(self, hosts: Sequence[Host], run_dir: Path, key_file: str = "", *, party: int | None = None) -> None:
        """``party``: it serves this one alone, and the claims of the run's others are another provider's."""
        self._party = party
        self._hosts = {h.address: h for h in hosts}
        self._run_dir = run_dir
        self._key_file = key_file
        self._links: dict[str, PodLink] = {}
        self._taken: set[str] = set()
        self._pins = HostKeyPins.here()
        self._plain: set[str] = set()  # hosts where a plain shell is known to answer
        self.accepted = ""  # fingerprint of the one new host key that the operator has vouched for
        self.silent: dict[str, UvccError] = {}

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
        """Claim the first fitting host that nobody holds; a claim of this name is found again.

        Raises UnreachableError where an earlier claim of this name may be on a host that does not answer.
        """
        for mine in [p for p in await self.list(request.name) if p.name == request.name]:
            if mine.doubt:
                raise UnreachableError(f"{request.name} may be claimed already: {mine.doubt}", "retry once it answers")
            return mine
        reasons, hint = [], "free one, or add one"
        for host in _fitting(request, list(self._hosts.values())):
            if host.address in self._taken:
                continue
            self._taken.add(host.address)
            try:
                holder = await self._claim(host, request.name)
            except UvccError as e:
                self._taken.discard(host.address)
                log.warning("%s cannot be claimed: %s", host.address, e, pod=request.name)
                reasons.append(str(e))
                hint = "mend that, or add a host"
                continue
            if holder == request.name:
                return self._pod(request.name, host)
            self._taken.discard(host.address)
            reasons.append(f"{host.address} is held by {holder}")
        why = "; ".join(reasons) or _why(request, list(self._hosts.values()))
        raise UvccError(f"no host of the inventory can be claimed for {request.name}: {why}", hint)

    async def _claim(self, host: Host, name: str) -> str:
        """Who holds the host after trying; with the claim comes the run's key."""
        link = await self._link(host)
        public = ssh_keys.public_line(ssh_keys.operator_key(self._run_dir, self._key_file))
        line = " ".join([*public.split()[:2], f"uvcc-operator-{name}"])
        book = self._book(name)
        book.note(name, host.address)
        holder = await link.sh(
            f"umask 077; ln -s {shlex.quote(name)} {CLAIM} 2>/dev/null\n"
            f'[ "$(readlink {CLAIM})" = {shlex.quote(name)} ] || {{ readlink {CLAIM}; exit 0; }}\n'
            "mkdir -p .ssh; touch .ssh/authorized_keys\n"
            f"grep -qxF {shlex.quote(line)} .ssh/authorized_keys || echo {shlex.quote(line)} >>.ssh/authorized_keys\n"
            f"readlink {CLAIM}"
        )
        if holder != name:
            book.note(name, host.address, over=f"held by {holder[:200]}")
        return holder or "nobody: its home cannot be written"

    def _book(self, name: str) -> Claims:
        return book_for(name, self._run_dir) or Claims.of(self._run_dir)

    async def wait_ready(self, pod: Pod) -> Pod:
        host = self._host_of(pod.provider_id)
        link = self._make_link(host)
        await link.connect_until(PATIENCE_S)
        return replace(pod, host_key=link.host_key)

    async def delete(self, pod_: Pod) -> None:
        """End what runs there under our mark, remove our folder, the run's key and the claim; prove it.

        So on every host where a claim of this name may be; one that does not answer keeps no other.
        """
        hosts = {host for name, host in self._book(pod_.name).open(pod_.name) if name == pod_.name}
        hosts |= {pod_.provider_id} if pod_.provider_id else set()
        ends = await asyncio.gather(*(self._end(h, pod_.name) for h in sorted(hosts)), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end

    async def _end(self, address: str, name: str) -> None:
        host = self._host_of(address)
        link = await self._link(host)
        holder = await link.sh(f"readlink {CLAIM} || :")
        if holder and holder != name:  # somebody else's by now: ours is gone
            return self._book(name).note(name, address, over=f"held by {holder[:200]}")
        script = pod.source("give_back.py")
        pythons = (await link.sh(pod.PYTHONS)).splitlines() or ["python3"]
        said = await link.sh(f"{shlex.quote(pythons[-1])} - {shlex.quote(name)}", stdin=script, timeout=60.0)
        if said != "gone":
            raise UnreachableError(f"pod {name} on {address} is not gone: {said}", "end it by hand")
        self._taken.discard(address)
        self._book(name).note(name, address, over="gone")
        if self.accepted:
            self._pins.repin(address, link.host_key)

    def begun(self, prefix: str) -> set[str]:
        """Names of claims that may be there."""
        return {name for name, _ in self._book(prefix).open(prefix) if self._serves(name)}

    def _serves(self, name: str) -> bool:
        return self._party is None or place_of(name)[0] == self._party

    async def list(self, prefix: str) -> list[Pod]:
        """Claims on the inventory's hosts, also those that may be on a host that does not answer: these with a doubt.

        For one run's names only hosts are asked where that run has asked for a claim. ``silent`` tells of hosts that
        gave no answer and on which, as far as this data folder knows, no claim is.
        """
        book = book_for(prefix, self._run_dir)
        mine = book.open(prefix) if book is not None else [c for b in books() for c in b.open(prefix)]
        mine = [claim for claim in mine if self._serves(claim[0]) or claim[1] in self._hosts]
        told: dict[str, list[str]] = {}
        for name, host in mine:
            if book is not None or host in self._hosts:
                told.setdefault(host, []).append(name)
        asked = list(told) if book is not None else list(self._hosts)
        self.silent = {}
        found = await asyncio.gather(*(self._ask(address, prefix, told.get(address, [])) for address in asked))
        return [pod for those in found for pod in those]

    async def _ask(self, address: str, prefix: str, told: Sequence[str]) -> Sequence[Pod]:
        """Whose claim is there. ``told``: whose may be there, by our own account."""
        try:
            name = await (await self._link(self._host_of(address))).sh(f"readlink {CLAIM} || :")
        except UvccError as e:
            if not told:
                self.silent[address] = e
            return [self._pod(mine, self._hosts.get(address) or _unlisted(address), doubt=str(e)) for mine in told]
        for mine in told:
            if mine != name:
                self._book(mine).note(mine, address, over=f"held by {name[:200] or 'nobody'}")
        if not name.startswith(prefix) or not _CLAIMED.fullmatch(name):
            return []  # nobody's claim, another's, or none that this console ever wrote
        return [self._pod(name, self._hosts[address])]

    async def close(self) -> None:
        for link in self._links.values():
            await link.close()

    def _host_of(self, address: str) -> Host:
        host = self._hosts.get(address)
        if host is None:
            raise ConfigError(f"{address} is not in the inventory any more", "put it back until the run ended")
        return host

    async def _link(self, host: Host) -> PodLink:
        """The provider's own connection, with the user's key for this host; a plain shell is at its end."""
        link = self._make_link(host)
        await link.connect()
        if host.address not in self._plain:
            await link.prove_shell()
            self._plain.add(host.address)
        return link

    def _make_link(self, host: Host) -> PodLink:
        link = self._links.get(host.address)
        if link is None:
            key = host.login if host.login is not None and (host.key or not self._key_file) else None
            key = key or place(host.host, key=self._key_file).keys
            link = self._links[host.address] = PodLink(
                host.address,
                host.address,
                key,
                host_key=host.host_key,
                known=None if host.host_key else self._pins,
                hint=self._hint(host),
                accept=self.accepted,
                jump=host.jump,
            )
        return link

    def _hint(self, host: Host) -> str:
        """What to do once somebody has looked, on the machine itself, which key it has."""
        if host.host_key:
            then = "write it into host_key of its entry in the inventory"
        else:
            then = self._pins.forget_command(host.address)
        return f"another machine may answer in its place; where the new key is right (ssh-keygen -lf there): {then}"

    def _pod(self, name: str, host: Host, doubt: str = "") -> Pod:
        party, replica = place_of(name)
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
            host_key=host.host_key or self._pins.of(host.address),
            doubt=doubt,
        )


def _unlisted(address: str) -> Host:
    """A host that was claimed and is not in the inventory any more."""
    user, host, port = split_address(address)
    return Host.model_validate({"host": host, "user": user, "port": port})


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


class InventoryFleet(FleetSettings):
    """``hosts``: the YAML file that lists the machines."""

    hosts: str = ""

    @model_validator(mode="after")
    def _named(self) -> InventoryFleet:
        if not self.hosts:
            raise ValueError("provider inventory needs hosts: the path of the YAML list of machines")
        return self


KIND = ProviderKind("inventory", InventoryFleet, make, volumes=GIVEN)
