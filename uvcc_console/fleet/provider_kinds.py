"""The kinds of providers there are: the ones that come with UVCC, and those of installed packages.

A further provider is one file: a :class:`ProviderKind` with its own settings model and a function that makes the
:class:`~uvcc_console.fleet.provider.Provider`, named in the entry-point group ``uvcc.providers`` of its package::

    [project.entry-points."uvcc.providers"]
    lambda = "uvcc_lambda:KIND"

A profile then says ``fleet: {provider: lambda, ...}``; every key of ``fleet`` is checked by that kind's model. Or it
gives each party a provider of its own, ``fleet: {parties: {P0: {provider: lambda, ...}, P1: ..., P2: ...}}``; see
:mod:`~uvcc_console.fleet.by_party`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from uvcc_console.fleet.provider import Provider
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.parsing.suggest import CLOSE, known_words, nearest
from uvcc_engine.contract.text import clean

GROUP: Final = "uvcc.providers"
DEFAULT: Final = "local"
PARTIES_KIND: Final = "parties"
GIVEN: Final = "given"
TOLD: Final = "told"
_FAILOVER: Final = "uvcc_console.fleet.failover.failover_provider"
PARTY_NAMES: Final = tuple(f"P{party}" for party in range(PARTIES))
OWN_KINDS: Final = {
    "local": "uvcc_console.fleet.local_provider:KIND",
    "inventory": "uvcc_console.fleet.inventory:KIND",
    "prime": "uvcc_console.fleet.prime:KIND",
    "runpod": "uvcc_console.fleet.vendors.runpod:KIND",
    "lambda": "uvcc_console.fleet.vendors.lambda_cloud:KIND",
    "vast": "uvcc_console.fleet.vendors.vast:KIND",
    "slurm": "uvcc_console.fleet.vendors.slurm:KIND",
    "kubernetes": "uvcc_console.fleet.vendors.kubernetes:KIND",
    "skypilot": "uvcc_console.fleet.vendors.skypilot:KIND",
    PARTIES_KIND: "uvcc_console.fleet.by_party:KIND",
}


class Strict(BaseModel):
    """Base of every part of a profile: unknown keys and silent conversions are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class SpotPolicy(Strict):
    """Spot machines, ``replace`` of which may be taken away and replaced by others of their kind; ``then`` further ones
    come on demand, as many as ``replace_lost`` says, or the run stops and can be resumed."""

    replace: int = Field(default=1, ge=0, le=1000)
    then: Literal["on_demand", "stop"] = "on_demand"


class VolumeSettings(Strict):
    """A language model's checkpoints on something that outlives its pods. ``size_gb``: of each pod's own volume, which
    the run makes; ``name``: of one at the provider that is there already and stays, ``{pod}`` in it for each pod's own;
    ``path``: of a folder that the machines have anyhow. ``mount``: where the pods shall have it. ``keep``: what lies
    there stays after the run. ``price``: US dollars for a GB and month, where the vendor's list price is not yours.
    """

    size_gb: int = Field(default=0, ge=0, le=4096)
    name: str = Field(default="", pattern=r"^([A-Za-z0-9]([A-Za-z0-9._-]|\{pod\}){0,120})?$")
    path: str = Field(default="", pattern=r"^(/[A-Za-z0-9._/-]{1,200})?$")
    mount: str = Field(default="", pattern=r"^((/[A-Za-z0-9_-][A-Za-z0-9._-]{0,60}){1,8})?$")
    keep: bool = False
    price: float | None = Field(default=None, ge=0)


class FleetSettings(Strict):
    """Where pods come from: what every provider understands. ``per_party`` names the domain of each of the parties.

    ``replace_lost``: how many pods that their provider took away in mid-run are replaced without being asked; the run
    goes on from the last checkpoint that all parties committed, or, of a language model, from the last that came home.
    ``spot``: whether machines that may be taken away are rented, or how often and what then.
    ``fallbacks``: providers, regions or GPUs to go to, in order, where the ones before cannot be had.
    ``wait_for_stock``: hours that a run waits for offers that fit, before anything is rented.
    ``volume``: where checkpoints lie, so that a pod that replaces a lost one finds them.
    ``reserve``: rent the full run's pods before the smoke, although it leaves some idle: where stock would be lost.
    """

    provider: str = DEFAULT
    per_party: list[str] = []
    gpu: str = ""
    gpus: int = Field(default=1, ge=0)
    gpu_memory: int = Field(default=0, ge=0)
    image: str = ""
    regions: list[str] = []
    country: str = ""
    spot: bool | SpotPolicy = False
    disk: int = Field(default=0, ge=0)
    max_price: float = Field(default=0.0, ge=0)
    ssh_key: str = ""
    wait_for_stock: float = Field(default=0.0, ge=0, le=720)
    keep_pods: bool = False
    replace_lost: int = Field(default=1, ge=0)
    reserve: bool = False
    attach_prefix: str = ""
    packages: list[str] = []
    wheels: str = ""
    fallbacks: list[dict[str, Any]] = []
    volume: VolumeSettings | None = None

    @model_validator(mode="after")
    def _three(self) -> FleetSettings:
        if self.per_party and len(self.per_party) != 3:
            raise ValueError(f"per_party names one provider for each of the three parties, not {len(self.per_party)}")
        return self

    @model_validator(mode="after")
    def _can_be_had(self) -> FleetSettings:
        """Each of the list is held against its own provider's model, as if it stood alone."""
        for n, one in enumerate(
            alternatives(self.model_dump(mode="json")) if self.fallbacks and self.provider != PARTIES_KIND else ()
        ):
            where = f"fallbacks[{n - 1}]" if n else "fleet"
            if "fallbacks" in one:
                raise ValueError(f"{where} has fallbacks of its own: write one list")
            try:
                kind = kind_of(str(one.get("provider")))
                if kind.here or kind.name in (PARTIES_KIND, "inventory"):
                    raise ValueError(f"{where}: {kind.name} rents nothing, and takes no part in a list of fallbacks")
                if n:
                    kind.settings.model_validate(one)
            except ConfigError as e:
                raise ValueError(f"{where}: {e}") from e
        return self

    @model_validator(mode="after")
    def _has_volumes(self) -> FleetSettings:
        """A provider without volumes refuses the key by name, before anything is asked of it."""
        if self.volume is None or self.provider == PARTIES_KIND:
            return self
        try:
            kind = kind_of(self.provider)
        except ConfigError:
            return self  # that it is unknown is said elsewhere
        if not kind.volumes:
            raise ValueError(f"{kind.name} has no volumes here: leave out volume")
        if why := _unfit_volume(kind, self.volume):
            raise ValueError(why)
        return self

    @property
    def replacements(self) -> int:
        """How many pods that were taken away may be replaced in all."""
        if not isinstance(self.spot, SpotPolicy):
            return self.replace_lost
        return self.spot.replace + (self.replace_lost if self.spot.then == "on_demand" else 0)

    @property
    def kind(self) -> str:
        """The kind of provider that all pods come from; ``parties`` where they come from several."""
        return self.provider

    @property
    def where(self) -> str:
        """Where the pods come from, in words."""
        return ", ".join(self.per_party) or self.provider

    def of(self, party: int) -> FleetSettings:
        """What one party's pods shall be."""
        return self


_SYSTEM: Final = frozenset(
    ("bin", "boot", "dev", "etc", "lib", "lib64", "proc", "run", "sbin", "sys", "tmp", "usr", "var")
)
_HOMES: Final = frozenset(("home", "opt", "root"))


def _unfit_volume(kind: ProviderKind, volume: VolumeSettings) -> str:
    """Why this provider cannot have such a volume; empty where it can."""
    made = [key for key in ("size_gb", "name") if getattr(volume, key)]
    if kind.volumes == GIVEN:
        if not volume.path or made or volume.price is not None or volume.mount:
            return f"{kind.name} makes no volumes: volume.path names a folder of its machines, and no size"
        return ""
    if volume.path or not made:
        return f"{kind.name} makes a volume for each pod: volume.size_gb says how large, or volume.name which; no path"
    if len(made) > 1:
        return "volume.size_gb is of a volume that the run makes, volume.name of one that is there: give one of them"
    if volume.name and volume.price is not None:
        return "volume.price is of a volume that the run makes: one that is there costs you, whether the run is or not"
    if volume.mount and not kind.mounts:
        return f"{kind.name} says itself where a volume is mounted: leave out volume.mount"
    first, _, below = volume.mount.removeprefix("/").partition("/")
    if first in _SYSTEM or (first in _HOMES and not below):
        return f"volume.mount {volume.mount} would hide what the image has there: give a folder of its own"
    return ""


@dataclass(frozen=True, slots=True)
class ProviderKind:
    """A way of coming by pods.

    ``make``: (the profile's ``fleet`` section, folder of the run, the run's longest life in seconds) -> provider;
    raises ConfigError. ``here``: its pods are processes of this machine, which cost nothing and end by themselves.
    ``consents``: whether a run must be confirmed, because pods cost money or belong to somebody. ``volumes``: where a
    pod's volume is mounted, with ``{pod}`` for what its name begins with; ``TOLD`` where the provider tells that of
    each pod, ``GIVEN`` for a folder that the profile names, empty where there are none. ``mounts``: whether the profile
    may say where.
    """

    name: str
    settings: type[FleetSettings]
    make: Callable[[Mapping[str, Any], Path, float], Provider]
    here: bool = False
    consents: bool = True
    volumes: str = ""
    mounts: bool = False


@cache
def known() -> Mapping[str, tuple[str, ...]]:
    """Every kind by its name, and where it is (``module:attribute``): ours first, then those of installed packages."""
    found: dict[str, tuple[str, ...]] = {name: (target,) for name, target in OWN_KINDS.items()}
    for point in entry_points(group=GROUP):
        others = found.get(point.name, ())
        found[point.name] = others if point.value in others else (*others, point.value)
    return found


def kind_of(name: str) -> ProviderKind:
    """The kind of this name. Raises ConfigError for an unknown one, and for one that cannot be loaded.

    A name that two offer is neither's: nothing outside may stand in for a provider that gets an API key. One package's
    fault, whatever its import comes to, is the fault of that one kind, and every other goes on.
    """
    targets = known().get(name)
    if targets is None:
        near = nearest(name, known(), CLOSE)
        raise ConfigError(f"fleet.provider is {name!r}", f"did you mean {near}?" if near else known_words(known()))
    if len(targets) > 1:
        package = targets[1].partition(".")[0].partition(":")[0]
        raise ConfigError(f"{package} offers a provider {name!r}, which is taken", f"uninstall {package}")
    target = targets[0]
    module, _, attribute = target.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as e:
        why = f"{type(e).__name__}: {clean(str(e))[:300]}"
        raise ConfigError(f"provider {name} cannot be loaded: {why}", f"reinstall the package of {module}") from e
    if not isinstance(found, ProviderKind) or found.name != name:
        raise ConfigError(f"{target} is not the provider {name}", "its package is wrong: see fleet.provider_kinds")
    return found


def sections(fleet: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parts of a ``fleet`` section that each name one provider: one, or one for each party.

    A party's part has all that holds for the whole fleet, and on top what it says for itself; ``party`` is its number.
    """
    parties = fleet.get("parties")
    if not isinstance(parties, Mapping):
        return [dict(fleet)]
    usual = FleetSettings().model_dump(mode="json")
    common = {k: v for k, v in fleet.items() if k not in ("parties", "provider")}
    found = []
    for party, name in enumerate(PARTY_NAMES):
        own = parties.get(name)
        said = {k: v for k, v in own.items() if k not in usual or v != usual[k]} if isinstance(own, Mapping) else {}
        found.append({"provider": DEFAULT, **common, **said, "party": party})
    return found


_EACH_VENDOR_S: Final = ("gpu", "image", "regions", "country", "per_party")


def alternatives(section: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A section that names one provider, and each of its ``fallbacks`` as a section of its own, in order.

    A fallback at the same provider changes what it says; one at another keeps of the first what every vendor
    understands, and no name of a GPU, image or region.
    """
    first = {k: v for k, v in section.items() if k != "fallbacks"}
    common = {k for k in FleetSettings.model_fields if k not in _EACH_VENDOR_S} | {"party"}
    found = [first]
    for said in section.get("fallbacks") or ():
        same = said.get("provider", first.get("provider")) == first.get("provider")
        found.append({**{k: v for k, v in first.items() if same or k in common}, **said})
    return found


def section_for(fleet: Mapping[str, Any], pod: str) -> dict[str, Any]:
    """The part of a ``fleet`` section that a pod of this name comes from."""
    parts = sections(fleet)
    return parts[min(place_of(pod)[0], len(parts) - 1)]


def place_of(pod: str) -> tuple[int, int]:
    """Party and replica out of a pod's name, ``...-p0r1``; (0, 0) for another form."""
    found = re.search(r"p([0-9]{1,6})r([0-9]{1,6})(x[0-9a-z]{6})?\Z", pod)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def kind_in(fleet: Mapping[str, Any]) -> ProviderKind:
    """The kind that a profile's ``fleet`` section names. Raises ConfigError."""
    if not isinstance(fleet.get("parties"), Mapping):
        return kind_of(str(fleet.get("provider", DEFAULT)))
    kinds = [kind_of(str(part["provider"])) for part in sections(fleet)]
    own = kind_of(PARTIES_KIND)
    return replace(own, here=all(k.here for k in kinds), consents=any(k.consents for k in kinds))


def runs_here(fleet: Mapping[str, Any]) -> bool:
    """Whether the pods of this section are processes of this machine; a kind that is gone is taken not to be."""
    try:
        return kind_in(fleet).here
    except ConfigError:
        return False


def provider_for(fleet: Mapping[str, Any], run_dir: Path, *, ttl_s: float = 3600.0) -> Provider:
    """The provider that a profile's ``fleet`` section names; ``ttl_s`` is the run's longest life.

    Raises ConfigError for an unknown provider, or for a key of ``fleet`` that this provider does not know.
    """
    if fleet.get("fallbacks"):
        several: Callable[[Mapping[str, Any], Path, float], Provider] = importlib.import_module(_FAILOVER).make
        return several(fleet, run_dir, ttl_s)
    return kind_in(fleet).make(fleet, run_dir, ttl_s)
