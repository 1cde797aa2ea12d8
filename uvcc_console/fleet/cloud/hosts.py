"""Which hosts may see the API key. A profile is shared, so a host that it names needs the user's own consent.

It is given host by host: ``UVCC_PRIME_HOSTS``, ``UVCC_RUNPOD_HOSTS``, ``UVCC_LAMBDA_HOSTS``, ``UVCC_VAST_HOSTS``.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from uvcc_engine.contract.errors import ConfigError

PRIME = "api.primeintellect.ai"


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def checked(url: str, env: Mapping[str, str], *, own: bool, vendor: str = PRIME, kind: str = "prime") -> str:
    """The address, if the key may go there: the vendor, this machine, or a host that the user vouches for.

    ``vendor``: where this ``kind`` of provider has its API. ``own``: the user's own environment or configuration named
    it, not a profile. Raises ConfigError for every other host, and for plain HTTP to anywhere but this machine, which
    no consent allows.
    """
    try:
        parts = urlsplit(url)
        host, _ = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        raise ConfigError(f"the API's address {url!r} is not a URL", "leave out fleet.base_url") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(f"the API's address {url!r} is not a URL", "leave out fleet.base_url")
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(f"the API's address {url!r} has more in it than a host and a path", "leave it out")
    if is_loopback(host):
        return url
    if parts.scheme != "https":
        raise ConfigError(f"the API key does not go to {host} over plain HTTP", f"use https://, or {vendor}")
    consent = f"UVCC_{kind.upper()}_HOSTS"
    allowed = {h.strip().lower() for h in env.get(consent, "").split(",") if h.strip()}
    if host == vendor or own or host in allowed:
        return url
    raise ConfigError(
        f"the profile's fleet.base_url would send your API key to {host}",
        f"if you trust that host, say so in your own environment: {consent}={host}",
    )
