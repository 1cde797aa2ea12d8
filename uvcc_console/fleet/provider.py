"""What a provider of pods must be able to do; :mod:`~uvcc_console.fleet.provider_kinds` says how one is added."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

from uvcc_engine.contract.errors import ConfigError, UvccError

POD_PREFIX: Final = "uvcc-"
"""What the name of every pod of ours begins with; the run and the pod follow."""


@dataclass(frozen=True, slots=True)
class PodRequest:
    """One pod that is wanted. ``name`` is unique for ever: it is how an uncertain create is looked up again.

    ``gpu`` and ``image`` are the provider's own names, empty for any. ``max_price_hr`` is US dollars an hour for the
    whole pod, None for no cap of its own. ``disk_gib`` 0 takes what the offer includes.
    """

    name: str
    party: int
    replica: int
    gpu: str = ""
    gpu_count: int = 0
    image: str = ""
    region: str = ""
    want_provider: str = ""
    max_price_hr: float | None = None
    spot: bool = False
    disk_gib: int = 0


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod that exists. ``provider_id`` is the provider's key to it; ``price_hr`` US dollars an hour.

    ``stray``: its run is known, by ids, to use another pod in its place; it shall go. ``host_key``: the one key that
    any connection to it may accept, empty where nobody has met it yet. ``doubt``: why nobody can tell whether it is
    still there; empty for one that was seen. ``ending``: what the provider says of one that goes without having been
    asked to.
    """

    name: str
    party: int
    replica: int
    provider: str
    provider_id: str
    user: str = ""
    host: str = ""
    port: int = 0
    price_hr: float = 0.0
    region: str = ""
    jump: str = ""
    stray: bool = False
    host_key: str = ""
    doubt: str = ""
    ending: str = ""

    @property
    def address(self) -> str:
        """``user@host:port``, as the journal keeps it."""
        return f"{self.user}@{self.host}:{self.port}" if self.host else ""


@dataclass(frozen=True, slots=True)
class FunnelStep:
    """One constraint, how many offers were left after it, and why the others went."""

    constraint: str
    left: int
    removed: int
    example: str = ""


@dataclass(frozen=True, slots=True)
class QuoteLine:
    """What one pod would cost and where it would run."""

    request: PodRequest
    provider: str
    region: str
    price_hr: float
    offer: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Quote:
    """Prices for a whole fleet at one moment. ``runway_h`` is the wallet over the hourly price, None if unknown.

    ``parts``: where each party pays for itself, its quote by its name.
    """

    lines: tuple[QuoteLine, ...]
    at: float
    funnel: tuple[FunnelStep, ...] = ()
    wallet: float | None = None
    parts: Mapping[str, Quote] = field(default_factory=dict)

    @property
    def hourly(self) -> float:
        return sum(line.price_hr for line in self.lines)

    @property
    def runway_h(self) -> float | None:
        if lasts := [part.runway_h for part in self.parts.values() if part.runway_h is not None]:
            return min(lasts)
        return self.wallet / self.hourly if self.wallet is not None and self.hourly > 0 else None


class NoOffer(ConfigError):
    """Nothing that is offered now fits. ``passing``: it is a matter of stock or price, so that waiting may help."""

    def __init__(self, what: str, hint: str = "", *, passing: bool = True) -> None:
        super().__init__(what, hint)
        self.passing = passing


class Provider(Protocol):
    """Creates and deletes pods. Every call has its own time limit; UnreachableError means the outcome is unknown."""

    name: str

    async def quote(self, requests: Sequence[PodRequest]) -> Quote:
        """Price the fleet; raises NoOffer naming the constraint that leaves nothing, ConfigError otherwise."""
        ...

    async def create(self, request: PodRequest) -> Pod:
        """Create the pod, or adopt the one that already has this name."""
        ...

    async def wait_ready(self, pod: Pod) -> Pod:
        """Wait until SSH should answer; returns the pod with its address. Raises UvccError if it never will."""
        ...

    async def delete(self, pod: Pod) -> None:
        """End the pod and prove it absent. Deleting an absent pod succeeds. Raises UnreachableError if unproven."""
        ...

    async def list(self, prefix: str) -> list[Pod]:
        """Every pod whose name starts with ``prefix`` that may still cost something, whoever made it."""
        ...

    async def close(self) -> None:
        """Release connections. The pods stay."""
        ...


@dataclass(frozen=True, slots=True)
class Caps:
    """What a run may spend, in US dollars: an hour, and in all."""

    hourly: float
    total: float


@dataclass(frozen=True, slots=True)
class Books:
    """What a run's pods cost. ``over``: pods for which the provider billed more than our clock says, beyond tolerance.

    ``spent`` takes the larger of the two for each; ``hourly`` counts everything that is not proven gone. ``dearer``:
    pods in use whose price has risen: what they cost an hour when they were taken, and what they cost now. ``pods``:
    which pods (``p0r1``) these books tell all of; None where they do not say, and the larger of both accounts counts.
    """

    spent: float = 0.0
    hourly: float = 0.0
    over: tuple[tuple[str, float, float], ...] = ()
    dearer: tuple[tuple[str, float, float], ...] = ()
    pods: frozenset[str] | None = None


@runtime_checkable
class Rents(Protocol):
    """What a provider that sends bills does beside: it keeps caps, books, and an eye on creates without an answer."""

    caps: Caps | None

    def books(self) -> Books:
        """What the run has cost until now."""
        ...

    async def prove(self, *, ended: bool, keep: Collection[str] = ()) -> Sequence[str]:
        """One look at what is not proven yet; returns the names of tries that still are not, nor in use.

        Of a run that has ``ended`` everything but ``keep`` (names of pods) goes; of one that lives, strays go.
        """
        ...


@runtime_checkable
class Remembers(Protocol):
    """What a provider does beside that writes down what it is about to make: it can tell without asking anybody."""

    def begun(self, prefix: str) -> set[str]:
        """Names with this prefix under which something may exist; whatever is not among them was never made."""
        ...


@runtime_checkable
class TellsEnds(Protocol):
    """What a provider does beside that can tell why a pod is gone which nobody asked it to end."""

    def taken(self, name: str) -> str:
        """In words; empty for a pod that was not taken away."""
        ...


@runtime_checkable
class TellsWaits(Protocol):
    """What a provider does beside that hears why a pod is not ready yet: it stands in a queue, say."""

    def waits(self, name: str) -> str:
        """What was last heard of a pod that is waited for, in words; empty without anything."""
        ...


@runtime_checkable
class TellsSilence(Protocol):
    """What a provider does beside whose API may be silent while it is asked again and again."""

    def silence(self) -> tuple[str, str]:
        """Who gives no usable answer and since when, and what to do about it; two empty texts while all is well."""
        ...


@runtime_checkable
class Several(Protocol):
    """A provider that is several: each with its name, and each may fail alone."""

    def each(self) -> Sequence[tuple[str, Provider]]: ...


@runtime_checkable
class AsksHosts(Protocol):
    """A provider whose list is what its hosts answer. ``silent``: those that did not, without a claim of ours."""

    silent: Mapping[str, UvccError]
