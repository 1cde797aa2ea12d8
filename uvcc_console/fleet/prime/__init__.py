"""Pods rented on the Prime Intellect market."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uvcc_console.fleet.provider_kinds import TOLD, FleetSettings, ProviderKind
from uvcc_console.fleet.runclock import FILE as CLOCK
from uvcc_console.fleet.runclock import RunClock

if TYPE_CHECKING:
    from uvcc_console.fleet.cloud.saga import CloudProvider


def make(fleet: Mapping[str, Any], run_dir: Path, ttl_s: float) -> CloudProvider:
    """Raises ConfigError where no API key is found, and where it must not go to the host that the profile names."""
    from uvcc_console.fleet.cloud.intents import Intents
    from uvcc_console.fleet.cloud.saga import CloudProvider
    from uvcc_console.fleet.prime.client import PrimeClient  # here, so that whoever reads intents loads no HTTP client
    from uvcc_console.fleet.prime.key import find_account

    account = find_account(str(fleet.get("base_url", "")), account=str(fleet.get("account", "")))
    known = (run_dir / CLOCK).exists() or Intents.of(run_dir).path.exists()
    return CloudProvider(PrimeClient(account, clock=RunClock(run_dir if known else None)), fleet, run_dir)


class PrimeFleet(FleetSettings):
    """What only this market knows: ``socket``, ``data_center``, and ``base_url`` of another address of its API.

    ``account``: one of several, whose key is found under its own name.
    """

    account: str = ""

    socket: str = ""
    data_center: str = ""
    base_url: str = ""


KIND = ProviderKind("prime", PrimeFleet, make, volumes=TOLD)
