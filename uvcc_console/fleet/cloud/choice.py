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
    """A volume at a vendor. ``region``: where it lies, empty where that binds nobody or is not told.

    ``ready``: a pod can have it. ``price_hr``: US dollars an hour for the whole of it, where the vendor says.
    """

    id: str
    name: str
    region: str = ""
    dying: bool = False
    ready: bool = True
    price_hr: float | None = None


@dataclass(frozen=True, slots=True)
class VolumePlace:
    """Where a volume can be made. ``region``: as of :class:`RentedVolume`; ``size_gb``: as large as it would be there.

    ``price``: US dollars for a GB and month; ``more``: what the vendor wants to be told beside.
    """

    region: str = ""
    size_gb: int = 0
    price: float = 0.0
    more: Mapping[str, Any] = field(default_factory=dict)


VolumeAt = Callable[[Any, int], VolumePlace | None]
"""Where the volume of a pod from this offer would be, with so many GB; 0: one that is there. None: it can have none."""


@dataclass(frozen=True, slots=True)
class OfferFilter:
    """What every pod must be. Empty values ask for nothing; ``max_price`` in US dollars an hour, None = any.

    ``volume``: the one that is mounted into it, at ``mount``; ``volume_gb``: so large is the one that would be made for
    it, -1 for one that is there already. ``homes``: where volumes of the run's pods lie; ``anywhere``: some pod has
    none yet.
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
    volume_gb: int = 0
    mount: str = ""
    homes: tuple[str, ...] = ()
    anywhere: bool = True

    @classmethod
    def of(cls, fleet: Mapping[str, Any], request: PodRequest) -> OfferFilter:
        """Out of the profile's ``fleet`` section and one pod's request, which may be stricter."""
        found = fleet.get("volume")
        volume = found if isinstance(found, Mapping) else {}
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
            volume_gb=-1 if volume.get("name") else int(volume.get("size_gb", 0)),
            mount=str(volume.get("mount", "")),
        )


def volume_tests(w: OfferFilter, at: VolumeAt | None) -> list[tuple[str, Callable[[Any], bool], bool]]:
    """What an offer must be for the volume's sake: name, test, and whether it applies."""
    if at is None or not w.volume_gb:
        return []
    size = max(0, w.volume_gb)

    def region(offer: Any) -> str | None:
        place = at(offer, 0)
        return place.region if place is not None else None

    what = f"volume of {size} GB" if size else "a volume"
    where = f"in {'/'.join(w.homes)}, where its volume lies"
    return [
        (what, lambda o: at(o, size) is not None or region(o) in w.homes, True),
        (where, lambda o: region(o) in w.homes, bool(w.homes) and not w.anywhere),
    ]


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
