"""What the fake market keeps of its pods and of the failures on order."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any


@dataclass
class Fault:
    """What goes wrong with the ``nth`` (from 1; empty = every) request of this method whose path starts so."""

    method: str
    path: str
    action: str
    nth: frozenset[int] = frozenset()
    status: int = 500
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    seen: int = 0


@dataclass
class FakeDisk:
    """A disk at the market. ``region``: operator and data centre, which the market keeps to itself."""

    id: str
    name: str
    size: int
    region: str
    born: float
    record: dict[str, Any]
    refused_deletes: int = 0


@dataclass
class FakePod:
    record: dict[str, Any]
    sim: dict[str, Any]
    born: float
    key_ok: bool
    deleting: float | None = None
    dead: float | None = None
    refused_deletes: int = 0
    foreign: bool = False
    disks: tuple[str, ...] = ()
    earlier: float = 0.0  # US dollars that it costs less than its price of now says, for the time before that rose

    def reprice(self, price_hr: float, now: float) -> None:
        """From now on it costs so much; what it has cost until now stays as it is."""
        self.earlier += (price_hr - float(self.record["priceHr"])) * (now - self.born) / 3600.0
        self.record["priceHr"] = price_hr

    @property
    def id(self) -> str:
        return str(self.record["id"])

    @property
    def name(self) -> str:
        return str(self.record["name"])


def ended(pod: FakePod) -> dict[str, Any]:
    """A pod as the history tells it."""
    same = (
        "id",
        "name",
        "userId",
        "providerType",
        "gpuName",
        "gpuCount",
        "socket",
        "priceHr",
        "createdAt",
        "terminatedAt",
    )
    billed = float(pod.record["priceHr"]) * ((pod.dead or pod.born) - pod.born) / 3600.0 - pod.earlier
    return {k: pod.record[k] for k in same} | {"type": "Instance", "totalBilledPrice": round(billed, 6)}


def iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")
