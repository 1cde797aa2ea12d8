"""What a vendor of pods must be able to do, so that the saga can rent from it: small calls, and no decisions.

A vendor's file says how its API is asked and what its answers mean. When something is asked for, written down, waited
for, ended and proven is the saga's; nothing of it is the vendor's to get wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from uvcc_console.fleet.cloud.choice import OfferChoice, OfferFilter, RentedVolume, VolumePlace
from uvcc_console.fleet.cloud.clock import Clock
from uvcc_engine.contract.errors import UnreachableError


@dataclass(frozen=True, slots=True)
class SshTarget:
    """One way to log in. ``jump``: the tunnel that leads there, where the address alone does not."""

    user: str
    host: str
    port: int
    jump: str = ""


class CloudPod(Protocol):
    """A pod as a vendor tells of it. ``provider_type``: who runs it, in the vendor's words."""

    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def user_id(self) -> str: ...
    @property
    def provider_type(self) -> str: ...
    @property
    def price_hr(self) -> float | None: ...
    @property
    def over(self) -> bool: ...  # it costs nothing any more
    @property
    def dying(self) -> bool: ...  # it is on its way there, or failed
    @property
    def failed(self) -> bool: ...  # it will never come up
    @property
    def unclear(self) -> bool: ...  # the vendor does not know
    @property
    def installed(self) -> bool: ...  # a login may work
    @property
    def stage(self) -> str: ...  # how far it is, in words
    @property
    def has_gpu(self) -> bool: ...


class PastPod(Protocol):
    """A pod of the past; ``terminated_at`` is empty for one that may live."""

    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def user_id(self) -> str: ...
    @property
    def terminated_at(self) -> str: ...
    @property
    def total_billed_price(self) -> float | None: ...
    @property
    def how(self) -> str: ...  # why it ended, where the vendor says


class CloudOffer(Protocol):
    """Something that can be rented. ``key`` tells it from every other."""

    @property
    def key(self) -> tuple[Any, ...]: ...
    @property
    def label(self) -> str: ...
    @property
    def provider(self) -> str: ...
    @property
    def region(self) -> str: ...
    @property
    def gpu_type(self) -> str: ...
    @property
    def gpu_count(self) -> int | None: ...
    @property
    def provisioning_time(self) -> float | None: ...  # minutes
    @property
    def once(self) -> bool: ...  # one machine: rented, it is gone
    @property
    def steady(self) -> bool: ...  # a queue for many machines: what failed on one may work on the next
    def price(self, disk_gib: int = 0) -> float | None: ...


class CloudKey(Protocol):
    """A public SSH key on the account."""

    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def material(self) -> tuple[str, ...]: ...


class Cloud(Protocol):
    """One account of one vendor. UnreachableError: no usable answer; CloudRefused: the vendor said no.

    ``distinct``: its offers come from several operators, and no two parties go to the same.
    """

    name: str
    distinct: bool
    clock: Clock

    @property
    def where(self) -> str:
        """The API's address where it is not the vendor's own, which a quote shows; empty for that one."""
        ...

    async def permitted(self) -> None:
        """Raises CloudRefused or ConfigError where the key does not allow what a rollout needs."""
        ...

    async def offers_for(self, wanted: OfferFilter) -> Sequence[Any]:
        """What there is to rent, before it is filtered."""
        ...

    def choose(
        self, rows: Sequence[Any], wanted: OfferFilter, parties: Collection[int], settled: Mapping[int, str]
    ) -> OfferChoice:
        """Which of it each party may have. Raises ConfigError naming what leaves nothing."""
        ...

    async def rent(
        self, offer: Any, wanted: OfferFilter, *, name: str, image: str, key_id: str, cap: float
    ) -> CloudPod:
        """Ask for one pod. Never repeated: UnreachableError means that it may exist."""
        ...

    async def pods(self) -> Sequence[CloudPod]:
        """Every pod of the account. Raises rather than leave one out."""
        ...

    async def pod(self, pod_id: str) -> CloudPod | None:
        """One pod; None if the vendor does not know it."""
        ...

    async def history(self) -> Sequence[PastPod]:
        """Pods of the past, as far as the vendor tells; nothing where it keeps no such list."""
        ...

    async def delete(self, pod_id: str) -> bool:
        """Ask for a pod's end; False where the vendor knows no such pod."""
        ...

    def logins(self, pod: Any) -> Sequence[SshTarget]:
        """Ways to log in, the most likely first."""
        ...

    async def wallet(self) -> float | None:
        """US dollars left; None where the vendor does not tell."""
        ...

    async def ssh_keys(self) -> Sequence[CloudKey]: ...
    async def add_ssh_key(self, name: str, public_key: str) -> CloudKey: ...
    async def delete_ssh_key(self, key_id: str) -> None: ...
    async def close(self) -> None: ...


@runtime_checkable
class RentsVolumes(Protocol):
    """What a vendor does beside that has volumes which outlive a pod; ``OfferFilter.volume`` mounts one.

    ``least_volume``: GB of the smallest. :class:`~uvcc_console.fleet.cloud.plain_vendor.PlainVolumes` has the usual of
    it.
    """

    least_volume: int

    def volume_name(self, name: str) -> str:
        """What a volume is called there, for a name of ours; the same name always gives the same, and no other does."""
        ...

    def volume_at(self, offer: Any, size_gb: int) -> VolumePlace | None:
        """Where a pod from this offer would have a volume so large (0: one that is there). None: it can have none."""
        ...

    async def create_volume(self, name: str, place: VolumePlace) -> RentedVolume:
        """Ask for one volume. Never repeated: UnreachableError means that it may exist."""
        ...

    async def volumes(self) -> Sequence[RentedVolume]:
        """Every volume of the account. Raises rather than leave one out."""
        ...

    async def delete_volume(self, volume_id: str) -> bool:
        """Ask for a volume's end; False where the vendor knows no such volume."""
        ...

    async def whereabouts(self, volume: RentedVolume) -> str:
        """The region of a volume that the run did not make; empty where it binds nobody."""
        ...

    async def mounted(self, volume: RentedVolume, pod_id: str, at: str) -> str:
        """Where in this pod it is mounted. ``at``: where it was asked to be; "" where the vendor does not tell yet."""
        ...


@dataclass(frozen=True, slots=True)
class RentedPod:
    """What most vendors tell of a pod."""

    id: str
    name: str = ""
    provider_type: str = ""
    price_hr: float | None = None
    stage: str = ""
    over: bool = False
    dying: bool = False
    failed: bool = False
    unclear: bool = False
    installed: bool = False
    has_gpu: bool = True
    user_id: str = ""
    logins: tuple[SshTarget, ...] = ()


P = TypeVar("P", bound=CloudPod)


def itself(found: P, pod_id: str) -> P:
    """What the look-up of one pod gave. Raises UnreachableError for another one: of the pod that was asked for, that
    tells neither where it is nor that it has ended."""
    if found.id != pod_id:
        raise UnreachableError(
            f"asked for pod {pod_id}, the provider tells of {found.id[:80]!r}", "is a proxy between?"
        )
    return found


@dataclass(frozen=True, slots=True)
class EndedPod:
    """A pod of the past. ``how``: what the vendor says of why, like PREEMPTED."""

    id: str
    name: str = ""
    user_id: str = ""
    terminated_at: str = ""
    total_billed_price: float | None = None
    how: str = ""


@dataclass(frozen=True, slots=True)
class AccountKey:
    """A key on the account. ``public_key``: one line of authorized_keys."""

    id: str
    name: str
    public_key: str

    @property
    def material(self) -> tuple[str, ...]:
        return tuple(self.public_key.split()[:2])
