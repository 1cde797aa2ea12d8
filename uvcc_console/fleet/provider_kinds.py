"""The kinds of providers there are: the ones that come with UVCC, and those of installed packages.

A further provider is one file: a :class:`ProviderKind` with its own settings model and a function that makes the
:class:`~uvcc_console.fleet.provider.Provider`, named in the entry-point group ``uvcc.providers`` of its package::

    [project.entry-points."uvcc.providers"]
    lambda = "uvcc_lambda:KIND"

A profile then says ``fleet: {provider: lambda, ...}``; every key of ``fleet`` is checked by that kind's model.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, model_validator

from uvcc_console.core.suggest import nearest
from uvcc_console.fleet.provider import Provider
from uvcc_engine.contract.errors import ConfigError

GROUP: Final = "uvcc.providers"
DEFAULT: Final = "local"
_OWN: Final = {
    "local": "uvcc_console.fleet.local_provider:KIND",
    "inventory": "uvcc_console.fleet.inventory:KIND",
    "prime": "uvcc_console.fleet.prime:KIND",
}


class Strict(BaseModel):
    """Base of every part of a profile: unknown keys and silent conversions are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class FleetSettings(Strict):
    """Where pods come from: what every provider understands. ``per_party`` names the domain of each of the parties.

    ``replace_lost``: how many pods that their provider took away in mid-run are replaced without being asked; the run
    goes on from the last checkpoint that all parties committed, or, of a language model, from the last that came home.
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
    spot: bool = False
    disk: int = Field(default=0, ge=0)
    max_price: float = Field(default=0.0, ge=0)
    ssh_key: str = ""
    keep_pods: bool = False
    replace_lost: int = Field(default=1, ge=0)
    reserve: bool = False
    attach_prefix: str = ""
    packages: list[str] = []

    @model_validator(mode="after")
    def _three(self) -> FleetSettings:
        if self.per_party and len(self.per_party) != 3:
            raise ValueError(f"per_party names one provider for each of the three parties, not {len(self.per_party)}")
        return self


@dataclass(frozen=True, slots=True)
class ProviderKind:
    """A way of coming by pods.

    ``make``: (the profile's ``fleet`` section, folder of the run, the run's longest life in seconds) -> provider;
    raises ConfigError. ``here``: its pods are processes of this machine, which cost nothing and end by themselves.
    ``consents``: whether a run must be confirmed, because pods cost money or belong to somebody.
    """

    name: str
    settings: type[FleetSettings]
    make: Callable[[Mapping[str, Any], Path, float], Provider]
    here: bool = False
    consents: bool = True


@cache
def known() -> Mapping[str, str]:
    """Every kind by its name, and where it is: ``module:attribute``.

    Raises ConfigError where an installed package offers a name that is taken: nothing outside may stand in for a
    provider that gets an API key.
    """
    found = dict(_OWN)
    for point in entry_points(group=GROUP):
        if found.setdefault(point.name, point.value) != point.value:
            package = point.dist.name if point.dist is not None else "a package"
            raise ConfigError(f"{package} offers a provider {point.name!r}, which is taken", f"uninstall {package}")
    return found


def kind_of(name: str) -> ProviderKind:
    """The kind of this name. Raises ConfigError for an unknown one, and for one that cannot be loaded."""
    target = known().get(name)
    if target is None:
        near = nearest(name, known())
        hint = f"did you mean {near}?" if near else f"known: {', '.join(known())}"
        raise ConfigError(f"fleet.provider is {name!r}", hint)
    module, _, attribute = target.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as e:
        raise ConfigError(f"provider {name} cannot be loaded: {e}", f"reinstall the package of {module}") from e
    if not isinstance(found, ProviderKind) or found.name != name:
        raise ConfigError(f"{target} is not the provider {name}", "its package is wrong: see fleet.provider_kinds")
    return found


def kind_in(fleet: Mapping[str, Any]) -> ProviderKind:
    """The kind that a profile's ``fleet`` section names. Raises ConfigError."""
    return kind_of(str(fleet.get("provider", DEFAULT)))


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
    return kind_in(fleet).make(fleet, run_dir, ttl_s)
