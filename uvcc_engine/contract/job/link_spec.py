"""How the parties of a run reach each other, as the console tells each worker. Standard library only."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.parsing import strict
from uvcc_engine.contract.run_files import files

LinkKind = Literal["auto", "direct", "relay", "stream", "nats"]
KINDS: Final[tuple[str, ...]] = get_args(LinkKind)
FAULT_KINDS: Final = ("drop", "duplicate", "reorder", "corrupt", "delay", "partition")
"""What a rehearsed bad network does to frames, as it is counted and told; see ``plane.links.faults``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayPlace:
    """``link.json``: where the relay of a run is, once it has moved; None: as it was, but for ``stream``, which goes.

    ``relay_url``: its HTTP front; ``stream``: host and port of its stream front; ``token_file``, ``ca_file``: paths.
    """

    relay_url: str
    stream: str | None = None
    token_file: str | None = None
    ca_file: str | None = None

    def __post_init__(self) -> None:
        if not self.relay_url.startswith(("http://", "https://")):
            raise ConfigError(f"not a relay URL: {self.relay_url!r}", "write it like https://relay.example:8443")

    @classmethod
    def from_json(cls, data: object) -> RelayPlace:
        """Strict: raises ConfigError naming what is wrong."""
        return strict.read(cls, data, "a relay's place")

    def to_json(self) -> dict[str, str]:
        """The keys that this file names, for JSON."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    @classmethod
    def of(cls, path: Path) -> RelayPlace:
        """Read ``link.json``; keys of a newer console are passed over. Raises UvccError for what is no such file."""
        known = {f.name for f in dataclasses.fields(cls)}
        return cls.from_json({k: v for k, v in files.read_json(path).items() if k in known})


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """One worker's link; "" where it has nothing of the kind, None where the plane's own default holds.

    ``kind``: one of ``KINDS``. ``relay_url``, ``stream`` (host:port), ``token_file``, ``ca_file``, ``group``: the relay
    and how to speak to it; ``nats_url``: the broker instead. ``listen``, ``peers``: addresses of this worker and, by
    party, of its peers. ``halt_keys`` (OpenSSH lines), ``halt_readers`` and ``halt_seal``: who may order a halt over
    the relay, and for whom the answer is sealed. ``durable``: the channels outlive the process. ``spins``: busy waiting
    for what is due at once. ``faults``: a rehearsed bad network, see ``plane.links.faults``. All ``*_s`` are seconds:
    ``peer_timeout_s`` and ``first_contact_s`` until a peer counts as lost, later and at the start; ``refused_s`` and
    ``relay_s`` until a refusal, a missing relay is final; ``order_s`` and ``report_s`` for what is out of order, and
    between two reports of waiting; ``proof_s`` for a living peer's part of a proof; ``close_s`` for the last words;
    ``rto_s`` before an unacknowledged frame is sent again; ``look_s`` and ``idle_s`` between two looks at the network,
    while waiting and while idle.
    """

    kind: str = ""
    relay_url: str = ""
    stream: str = ""
    token_file: str = ""
    ca_file: str = ""
    group: str = ""
    nats_url: str = ""
    listen: str = ""
    peers: dict[str, str] = field(default_factory=dict)
    halt_keys: list[str] = field(default_factory=list)
    halt_readers: list[str] = field(default_factory=list)
    halt_seal: str = ""
    durable: bool = False
    spins: bool | None = None
    faults: dict[str, Any] | None = None
    peer_timeout_s: float | None = None
    first_contact_s: float | None = None
    refused_s: float | None = None
    close_s: float | None = None
    order_s: float | None = None
    proof_s: float | None = None
    report_s: float | None = None
    relay_s: float | None = None
    look_s: float | None = None
    idle_s: float | None = None
    rto_s: float | None = None

    def __post_init__(self) -> None:
        if self.kind and self.kind not in KINDS:
            raise ConfigError(f"link kind {self.kind!r} is not known", f"use one of {', '.join(KINDS)}")
        if any(party not in ("0", "1", "2") for party in self.peers):
            raise ConfigError(f"link.peers names the parties {', '.join(self.peers)[:80]}", "they are 0, 1 and 2")

    @classmethod
    def from_json(cls, data: object) -> LinkSpec:
        """Strict: raises ConfigError naming an unknown key and the nearest known one, or a value of a wrong type."""
        return strict.read(cls, data, "link")

    def to_json(self) -> dict[str, Any]:
        """What it says; ``from_json`` reads it back unchanged."""
        return {f.name: v for f in dataclasses.fields(self) if (v := getattr(self, f.name)) not in ("", None, {}, [])}

    def or_else(self, other: LinkSpec) -> LinkSpec:
        """This link, with the other's waits where this one leaves the plane's own."""
        names = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) is None]
        return dataclasses.replace(self, **{name: getattr(other, name) for name in names})

    def at(self, place: RelayPlace) -> LinkSpec:
        """The same link with its relay elsewhere."""
        changed: dict[str, Any] = {"stream": "", **place.to_json()}
        return dataclasses.replace(self, **changed)
