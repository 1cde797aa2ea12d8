"""Who may see a run's page: whoever has the token of its address, at that address, from that page.

The token stands behind the ``#`` of the address, which browsers send nobody; the page exchanges it for a key of the
tab's own, and no cookie is set that another page could use. Host is compared because a name of a stranger's may be made
to point here (DNS rebinding), Origin because any page may open a WebSocket to any address.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from uvcc_engine.contract.errors import ConfigError

KEYS: Final = 256  # tabs that are known; the oldest is forgotten for a new one
PROTOCOL: Final = "uvcc"
_KEY: Final = "uvcc-key."


def policy(host: str) -> str:
    """The page's Content-Security-Policy: nothing from elsewhere. xterm.js writes its own styles, so those may be."""
    return (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; font-src 'self'; "
        f"img-src 'self' data:; connect-src 'self' ws://{host}; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


def bindable(address: str, *, exposed: bool) -> str:
    """The address to listen at. Raises ConfigError for one beyond this machine, unless that was asked for."""
    try:
        where = ipaddress.ip_address("127.0.0.1" if address == "localhost" else address)
    except ValueError:
        raise ConfigError(f"--address {address!r} is no IP address", "like 127.0.0.1") from None
    if where.is_unspecified:
        raise ConfigError(f"--address {address} is every address of this machine", "name the one to be reached at")
    if not where.is_loopback and not exposed:
        raise ConfigError(
            f"{address} can be reached from other machines, and the page is not encrypted",
            "ssh -L brings it there; --exposed serves it all the same",
        )
    return str(where)


@dataclass(slots=True)
class PageGuard:
    """What is compared. ``hosts``: how the page's address may be spelled, with its port."""

    hosts: frozenset[str]
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    _keys: dict[str, None] = field(default_factory=dict)

    def refuses(self, headers: Mapping[str, str], *, origin: bool) -> str:
        """Why a request is refused, "" if it is not; ``origin``: it does something, so the page must have sent it."""
        host = headers.get("Host", "")
        if host not in self.hosts:
            return "this address is not that of the page"
        if origin and headers.get("Origin", "") != f"http://{host}":
            return "another page asks"
        return ""

    def exchange(self, token: object) -> str:
        """A tab's key for the token, or for a key that it has; "" for anything else."""
        if not isinstance(token, str):
            return ""
        if token in self._keys:
            return token
        if not hmac.compare_digest(token.encode(errors="replace"), self.token.encode()):
            return ""
        key = secrets.token_urlsafe(32)
        self._keys[key] = None
        while len(self._keys) > KEYS:
            del self._keys[next(iter(self._keys))]
        return key

    def knows(self, protocols: str) -> bool:
        """Whether one of the WebSocket's subprotocols carries a key."""
        return any(
            word.strip().removeprefix(_KEY) in self._keys
            for word in protocols.split(",")
            if word.strip().startswith(_KEY)
        )


def hosts(address: str, port: int) -> frozenset[str]:
    """How a browser may name an address: also as localhost, where it is this machine's own."""
    where = ipaddress.ip_address(address)
    named = f"[{address}]" if where.version == 6 else address
    known = {named, "localhost"} if where.is_loopback else {named}
    return frozenset(f"{name}:{port}" for name in known) | (frozenset(known) if port == 80 else frozenset())
