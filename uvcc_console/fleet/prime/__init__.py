"""Pods rented on the Prime Intellect market."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uvcc_console.fleet.prime.client import PrimeClient
from uvcc_console.fleet.prime.key import find_account
from uvcc_console.fleet.prime.provider import PrimeProvider


def make(fleet: Mapping[str, Any], run_dir: Path, ttl_s: float) -> PrimeProvider:
    """Raises ConfigError where no API key is found."""
    account = find_account(str(fleet.get("base_url", "")))
    return PrimeProvider(PrimeClient(account), fleet, run_dir)
