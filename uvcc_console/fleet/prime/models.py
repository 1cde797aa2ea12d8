"""What the Prime Intellect API says, read tolerantly: unknown fields and enum values pass, numbers may be strings."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from uvcc_console.fleet.cloud.fields import items, number, text, whole

Number = Annotated[float | None, BeforeValidator(number)]
Whole = Annotated[int | None, BeforeValidator(whole)]
Text = Annotated[str, BeforeValidator(text)]


class Tolerant(BaseModel):
    """Base: camelCase on the wire, everything optional, what is not known is ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, alias_generator=to_camel, populate_by_name=True)


class Spec(Tolerant):
    """A size that an offer fixes or lets choose; ``price_per_unit`` is US dollars per unit and hour."""

    min_count: Number = None
    default_count: Number = None
    max_count: Number = None
    price_per_unit: Number = None
    step: Number = None
    default_included_in_price: bool | None = None


class Prices(Tolerant):
    """US dollars an hour for the whole box, whatever its number of GPUs."""

    on_demand: Number = None
    community_price: Number = None
    is_variable: bool | None = None
    currency: Text = "USD"

    @property
    def hourly(self) -> float | None:
        return self.community_price if self.community_price is not None else self.on_demand


class MarketOffer(Tolerant):
    """One row of the market. Nothing in it identifies it alone: see ``key``."""

    cloud_id: Text = ""
    gpu_type: Text = ""
    socket: Text = ""
    provider: Text = ""
    region: Text = ""
    data_center: Text = ""
    country: Text = ""
    gpu_count: Whole = 0
    gpu_memory: Number = None
    disk: Spec | None = None
    provisioning_time: Number = None
    stock_status: Text = ""
    security: Text = ""
    prices: Prices = Prices()
    images: Annotated[list[str], BeforeValidator(items)] = []
    is_spot: bool | None = None
    prepaid_time: Number = None

    @property
    def once(self) -> bool:
        return False

    @property
    def steady(self) -> bool:
        return False

    @property
    def key(self) -> tuple[str, str, str, str, int, bool]:
        """What tells two rows apart; ``cloud_id`` repeats over data centres."""
        where = (self.provider, self.cloud_id, self.data_center, self.socket)
        return (*where, self.gpu_count or 0, bool(self.is_spot))

    def price(self, disk_gib: int = 0) -> float | None:
        """US dollars an hour with a disk of this size (0 = what the offer comes with); None if it names no price."""
        base = self.prices.hourly
        if base is None:
            return None
        disk = self.disk
        if disk is None or disk.price_per_unit is None:
            return base
        size = disk_gib or disk.default_count or 0.0
        included = (disk.default_count or 0.0) if disk.default_included_in_price else 0.0
        return base + max(0.0, size - included) * disk.price_per_unit

    @property
    def label(self) -> str:
        spot = " spot" if self.is_spot else ""
        return f"{self.provider}/{self.cloud_id}@{self.data_center or self.region}{spot}"


class PortMapping(Tolerant):
    """Ports are strings and may be ``*``: all of them."""

    internal: Text = ""
    external: Text = ""
    used_by: Text = ""
    description: Text = ""


class AttachedResource(Tolerant):
    """What a pod has beside its own; of a disk, where it is mounted."""

    resource_type: Text = ""
    id: Text = ""
    status: Text = ""
    mount_path: Text = ""


class ApiPod(Tolerant):
    """A pod as create, get and list tell it."""

    id: Text = ""
    name: Text = ""
    user_id: Text = ""
    provider_type: Text = ""
    status: Text = ""
    installation_status: Text = ""
    installation_failure: Text = ""
    installation_progress: Number = None
    created_at: Text = ""
    terminated_at: Text = ""
    gpu_name: Text = ""
    gpu_count: Whole = 0
    price_hr: Number = None
    prime_port_mapping: Annotated[list[PortMapping], BeforeValidator(items)] = []
    attached_resources: Annotated[list[AttachedResource], BeforeValidator(items)] = []
    ssh_connection: Any = None
    ip: Any = None

    @property
    def over(self) -> bool:
        """Whether the pod has ended and costs nothing any more."""
        return self.status == "TERMINATED" or bool(self.terminated_at)

    @property
    def dying(self) -> bool:
        return self.status in ("DELETING", "TERMINATED", "ERROR") or bool(self.terminated_at)

    @property
    def failed(self) -> bool:
        return self.dying or self.installation_status in ("ERROR", "TERMINATED")

    @property
    def unclear(self) -> bool:
        return self.status == "UNKNOWN"

    @property
    def has_gpu(self) -> bool:
        return not self.gpu_name.startswith("CPU") and bool(self.gpu_count)

    @property
    def stage(self) -> str:
        progress = f" {self.installation_progress:.0f} %" if self.installation_progress is not None else ""
        return f"{self.status} {self.installation_status}{progress} {self.installation_failure}".strip()

    @property
    def installed(self) -> bool:
        """The provider says that it is up and its image is installed; only a login proves it."""
        finished = self.installation_status in ("FINISHED", "") or (self.installation_progress or 0) >= 100
        return self.status == "ACTIVE" and finished


class PodStatus(Tolerant):
    """What the short list of states tells of one pod."""

    pod_id: Text = ""
    provider_type: Text = ""
    status: Text = ""
    installation_status: Text = ""
    installation_failure: Text = ""
    installation_progress: Number = None
    ssh_connection: Any = None
    ip: Any = None


class HistoryItem(Tolerant):
    """A pod of the past; ``total_billed_price`` is what it has cost by the provider's books, in US dollars."""

    id: Text = ""
    name: Text = ""
    user_id: Text = ""
    terminated_at: Text = ""
    total_billed_price: Number = None

    @property
    def how(self) -> str:
        """The market does not say why."""
        return ""


class SshKey(Tolerant):
    id: Text = ""
    name: Text = ""
    public_key: Text = ""
    is_primary: bool | None = None

    @property
    def material(self) -> tuple[str, ...]:
        """Type and key, without the comment."""
        return tuple(self.public_key.split()[:2])


class Team(Tolerant):
    team_id: Text = ""
    name: Text = ""
    slug: Text = ""
    role: Text = ""


class TeamMember(Tolerant):
    user_id: Text = ""
    user_name: Text = ""
    user_email: Text = ""
    role: Text = ""


class Disk(Tolerant):
    """A disk that outlives its pods, and costs as long as it is there."""

    id: Text = ""
    name: Text = ""
    provider_type: Text = ""
    status: Text = ""
    size: Number = None
    price_hr: Number = None
    terminated_at: Text = ""

    @property
    def over(self) -> bool:
        return self.status == "TERMINATED" or bool(self.terminated_at)


class DiskOffer(Tolerant):
    """One row of the market for disks, which outlive pods."""

    cloud_id: Text = ""
    provider: Text = ""
    data_center: Text = ""
    country: Text = ""
    region: Text = ""
    spec: Spec | None = None
    stock_status: Text = ""

    @property
    def where(self) -> str:
        return f"{self.provider}/{self.data_center}"

    def size(self, wanted: int) -> int:
        """The size that it would have, in its steps; 0 where it has none so large, or names no price."""
        spec = self.spec
        if spec is None or not spec.price_per_unit or self.stock_status == "Unavailable":
            return 0
        low, step = int(spec.min_count or 1), max(1, int(spec.step or 1))
        size = low + -(-(max(wanted, low) - low) // step) * step
        return size if size <= int(spec.max_count or spec.default_count or 0) else 0


class Wallet(BaseModel):
    """The only part of the API that is in snake_case."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    balance_usd: Number = None
    currency: Text = "USD"


class KeyOwner(Tolerant):
    """Whose key it is, and what it may do: ``scope`` maps an area to {read, write} or null."""

    id: Text = ""
    email: Text = ""
    scope: dict[str, Any] | None = Field(default=None)

    def lacks(self) -> list[str]:
        """Permissions that a rollout needs and the key does not have; empty if the API does not tell."""
        wanted = {"availability": "read", "instances": "write", "ssh_keys": "write"}
        if not self.scope:
            return []
        return [f"{area}:{verb}" for area, verb in wanted.items() if not (self.scope.get(area) or {}).get(verb)]


def read_offers(rows: Any) -> list[MarketOffer]:
    """Rows that can be read; a row of a form never seen is left out rather than failing all."""
    found = []
    for row in rows if isinstance(rows, list) else []:
        try:
            found.append(MarketOffer.model_validate(row))
        except ValidationError:
            continue
    return found
