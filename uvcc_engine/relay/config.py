"""The relay's configuration: one strict JSON file, readable by its owner only because it holds the credentials."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.parsing import strict
from uvcc_engine.contract.parsing.untrusted import json_of
from uvcc_engine.contract.peer_protocol.record_names import MAIL_KEPT_S
from uvcc_engine.relay.relay_roles import SCOPES, Role, RoleScope, called, may_send_to, number_of

_MIN_TOKEN: Final = 16


@dataclass(frozen=True, slots=True)
class Credential:
    """Who a bearer token speaks for: it writes as ``number``, to ``send_to``, and reads what is for ``number``."""

    number: int
    group: str
    send_to: frozenset[int]
    role: Role = Role.PARTY

    @property
    def scope(self) -> RoleScope:
        """What the role of this credential may do."""
        return SCOPES[self.role]


@dataclass(frozen=True, slots=True)
class RelayConfig:
    """Seconds and bytes. From ``quota_messages`` to ``arriving_bytes`` all bound one credential (group, number):
    what it may have queued (``waiting_bytes``: not yet on disk), in how many boxes, which ids are remembered, how many
    connections it may have, and how much of requests that are still arriving."""

    db: Path
    credentials: Mapping[bytes, Credential]  # SHA-256 of the token -> credential
    listen: str = "127.0.0.1:0"
    stream_listen: str = ""
    ready_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    ttl_s: int = 3600
    max_ttl_s: int = MAIL_KEPT_S
    lease_s: float = 60.0
    dedup_s: float = 86_400.0
    dedup_keep: int = 262_144
    quota_messages: int = 200_000
    quota_bytes: int = 4 << 30
    waiting_bytes: int = 256 << 20
    boxes: int = 4096
    dedup_total: int = 8_388_608
    connections: int = 1024
    arriving_bytes: int = 256 << 20
    memory_bytes: int = 256 << 20
    max_body: int = 64 << 20
    max_message: int = 16 << 20
    strangers: int = 512  # connections that have shown no token
    login_s: float = 10.0  # for which they may stay
    request_s: float = 120.0  # for an HTTP request to be whole
    stall_s: float = 60.0  # without any progress of what is sent to, or awaited from, a connection


_PATHS: Final = ("db", "ready_file", "tls_cert", "tls_key")


def token_key(token: str) -> bytes:
    """How a token is looked up: by its hash, so that a comparison tells nothing about it."""
    return hashlib.sha256(token.encode()).digest()


def load(path: Path) -> RelayConfig:
    """Read a configuration. Raises UnreadableError or ConfigError."""
    try:
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"{path} holds credentials and is readable by others", f"chmod 600 {path.name}")
        data = json_of(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UnreadableError(f"cannot read the relay configuration {path}: {error}") from error
    if not isinstance(data, dict):
        raise UnreadableError(f"{path} is not a JSON object")
    return from_json(data, path.parent)


def from_json(data: Mapping[str, Any], base: Path) -> RelayConfig:
    """Check a configuration; relative paths are taken from ``base``. Raises ConfigError naming the key."""
    plain = {key: value for key, value in data.items() if value is not None} | {"credentials": {}}
    found = replace(strict.read(RelayConfig, plain, "relay"), credentials=_credentials(data.get("credentials")))
    for field in fields(RelayConfig):
        value = getattr(found, field.name)
        if isinstance(value, int | float) and value <= 0:
            raise ConfigError(f"relay.{field.name} is {value}", "it must be positive")
    if (found.tls_cert is None) != (found.tls_key is None):
        raise ConfigError("TLS needs both 'tls_cert' and 'tls_key'", "or neither: then it speaks HTTP")
    return replace(found, **{name: base / path for name in _PATHS if (path := getattr(found, name)) is not None})


def _credentials(entries: Any) -> dict[bytes, Credential]:
    if not isinstance(entries, list) or not entries:
        raise ConfigError("relay key 'credentials' is missing", "one {party, group, token} per party and group")
    found: dict[bytes, _Entry] = {}
    taken: set[tuple[str, int]] = set()
    for n, given in enumerate(entries):
        token, entry = _entry(n, given)
        if token_key(token) in found:
            raise ConfigError(f"credential {n} has the token of another one", "every party and group has its own")
        if (entry.group, entry.number) in taken:
            raise ConfigError(
                f"credential {n} is {entry.role} {called(entry.number)} of group {entry.group!r} once more",
                "who shares a number reads and deletes the other's mail; a data owner has {owner: 0, group, token}",
            )
        taken.add((entry.group, entry.number))
        found[token_key(token)] = entry
    return {key: _credential(entry, [n for group, n in taken if group == entry.group]) for key, entry in found.items()}


@dataclass(frozen=True, slots=True)
class _Entry:
    role: Role
    number: int
    group: str
    send_to: tuple[int, ...] | None


def _entry(n: int, entry: Any) -> tuple[str, _Entry]:
    """The token of a credential, and who it is for. Raises ConfigError."""
    roles = [role for role in Role if role.value in entry] if isinstance(entry, dict) else []
    if len(roles) != 1 or not {roles[0].value, "group", "token"} <= set(entry) <= {
        roles[0].value,
        "group",
        "token",
        "send_to",
    }:
        raise ConfigError(
            f"credential {n} is not {{party, group, token}}", "or owner, coordinator, auditor, client for party"
        )
    role, which, group, token = roles[0], entry[roles[0].value], entry["group"], entry["token"]
    if type(which) is not int or which not in range(SCOPES[role].count):
        raise ConfigError(f"credential {n} names {role} {which!r} of group {group!r}", _numbers(role))
    if not isinstance(group, str) or not group or len(group) > 128:
        raise ConfigError(f"credential {n} names {role} {which!r} of group {group!r}", "1 to 128 characters")
    if not isinstance(token, str) or len(token) < _MIN_TOKEN:
        raise ConfigError(f"the token of credential {n} is too short", f"at least {_MIN_TOKEN} characters")
    send_to = entry.get("send_to")
    if send_to is not None:
        good = SCOPES[role].mail and isinstance(send_to, list) and all(type(to) is int for to in send_to)
        if not good or not set(send_to) <= set(range(PARTIES)):
            raise ConfigError(
                f"credential {n} may send to {send_to!r}", "a list of parties; for a party, an owner or a client"
            )
        send_to = tuple(send_to)
    return token, _Entry(role, number_of(role, which), group, send_to)


def _numbers(role: Role) -> str:
    return f"0 to {SCOPES[role].count - 1}"


def _credential(entry: _Entry, group: list[int]) -> Credential:
    send_to = may_send_to(entry.role, entry.send_to, entry.number, group)
    return Credential(entry.number, entry.group, send_to, entry.role)
