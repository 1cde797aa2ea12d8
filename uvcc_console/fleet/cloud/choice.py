"""What every pod must be, and what a vendor's offers leave to choose from. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from uvcc_console.fleet.provider import FunnelStep, PodRequest


class Labelled(Protocol):
    """What has a name to show."""

    @property
    def label(self) -> str: ...


OfferedRow = TypeVar("OfferedRow", bound=Labelled)


@dataclass(frozen=True, slots=True)
class RentedVolume:
    """A volume at a vendor. ``region``: where it lies, empty where that binds nobody."""

    id: str
    name: str
    region: str = ""
    dying: bool = False


@dataclass(frozen=True, slots=True)
class OfferFilter:
    """What every pod must be. Empty values ask for nothing; ``max_price`` in US dollars an hour, None = any.

    ``volume``: the one that is mounted into it.
    """

    gpu: str = ""
    gpus: int = 0
    gpu_memory: int = 0
    image: str = ""
    socket: str = ""
    regions: tuple[str, ...] = ()
    country: str = ""
    data_center: str = ""
    spot: bool = False
    disk: int = 0
    max_price: float | None = None
    per_party: tuple[str, ...] = ()
    volume: RentedVolume | None = None

    @classmethod
    def of(cls, fleet: Mapping[str, Any], request: PodRequest) -> OfferFilter:
        """Out of the profile's ``fleet`` section and one pod's request, which may be stricter."""
        return cls(
            gpu=request.gpu or str(fleet.get("gpu", "")),
            gpus=request.gpu_count or (int(fleet.get("gpus", 1)) if fleet.get("gpu") else 0),
            gpu_memory=int(fleet.get("gpu_memory", 0)),
            image=request.image or str(fleet.get("image", "")),
            socket=str(fleet.get("socket", "")),
            regions=tuple(fleet.get("regions", ())) or ((request.region,) if request.region else ()),
            country=str(fleet.get("country", "")),
            data_center=str(fleet.get("data_center", "")),
            spot=request.spot or bool(fleet.get("spot", False)),
            disk=request.disk_gib or int(fleet.get("disk", 0)),
            max_price=request.max_price_hr,
            per_party=tuple(fleet.get("per_party", ())),
        )


def apply_filters(
    offers: Iterable[OfferedRow], tests: Iterable[tuple[str, Callable[[OfferedRow], bool]]]
) -> tuple[list[OfferedRow], list[FunnelStep]]:
    """Offers that pass every test, and what each of these removed."""
    left = list(offers)
    funnel = [FunnelStep("offered", len(left), 0)]
    for name, test in tests:
        kept = [o for o in left if test(o)]
        gone = [o for o in left if not test(o)]
        funnel.append(FunnelStep(name, len(kept), len(gone), gone[0].label if gone else ""))
        left = kept
    return left, funnel


def why_none(funnel: Sequence[FunnelStep]) -> str:
    """The constraint that left nothing, and how many it met."""
    for step in funnel:
        if step.left == 0:
            return f"{step.constraint} removed the last {step.removed} offers" if step.removed else "nothing is offered"
    return ""


@dataclass(frozen=True, slots=True)
class OfferChoice:
    """Which provider each party goes to first, the image of all, and every fitting offer by provider."""

    domains: Mapping[int, str]
    image: str
    by_provider: Mapping[str, Sequence[Any]]
    funnel: tuple[FunnelStep, ...] = field(default=())
