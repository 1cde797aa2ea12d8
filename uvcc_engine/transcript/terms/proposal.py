"""The proposal: what a coordinator asks three domains and the data owners to do together, before any pod exists.

It is canonical JSON, signed by the coordinator's key; its SHA-256 is its name. Each domain approves or refuses exactly
this text. What the pods' identities and the sealed inputs add later is in the policy, not here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.job.topology import PARTIES, Topology
from uvcc_engine.contract.parsing import strict
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.transcript.formats.reading import parse_canonical
from uvcc_engine.transcript.signing import sshsig
from uvcc_engine.transcript.terms.policy import Policy

VERSION: Final = 1
LARGEST: Final = 24 << 10
"""Bytes of a proposal: with its signature it fits into one record of a relay."""
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
EVERYBODY: Final = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Revealed:
    """A value that the run opens, and to whom: ``all`` or ``owner``."""

    value: str
    to: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposedLimits:
    """What the run may cost each domain, in US dollars, and how long it may last."""

    hourly: float
    total: float
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Consents:
    """How many of the three domains must sign: before the full run, a resume, and the end of pods on request."""

    full: int = 0
    resume: int = 0
    terminate: int = 0

    def __post_init__(self) -> None:
        for what, wanted in asdict(self).items():
            if wanted not in range(PARTIES + 1):
                raise ConfigError(f"the proposal wants {wanted} signatures for {what}", "0 to 3")


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """``domains``: the keys of P0, P1, P2 in this order; ``owners``: those of the data owners, the first one's first.

    Keys are OpenSSH lines. ``created`` and ``expires`` are seconds since 1970. ``consent``: what needs how many
    domains' word once the run is under way.
    """

    version: int
    name: str
    coordinator: str
    domains: tuple[str, str, str]
    owners: tuple[str, ...]
    job: Mapping[str, Any]
    topology: Topology
    code_hash: str
    reveal: tuple[Revealed, ...]
    providers: tuple[str, str, str]
    limits: ProposedLimits
    created: int
    expires: int
    nonce: str
    consent: Consents = Consents()

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ConfigError(f"the proposal has version {self.version}", f"this code knows version {VERSION}")
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"the proposal's name is {self.name[:80]!r}", "lower-case letters, digits, . _ -")
        for what, text in (("code_hash", self.code_hash), ("nonce", self.nonce)):
            if not _HASH.fullmatch(text):
                raise ConfigError(f"the proposal's {what} is no SHA-256", "64 lower-case hex digits")
        for key in (self.coordinator, *self.domains):
            _checked_key(key, sshsig.person_material)
        for key in self.owners:  # an owner's key lies beside the one that it seals with
            _checked_key(key, sshsig.public_raw)
        if len(set(self.domains)) != PARTIES:
            raise ConfigError("the proposal names a domain twice", "three domains that distrust each other")
        if not 0 <= self.created < self.expires:
            raise ConfigError("the proposal expires before it was made")
        if min(self.limits.hourly, self.limits.total, self.limits.ttl_s) < 0:
            raise ConfigError("the proposal's limits are negative")
        _ = self.canonical

    @classmethod
    def from_bytes(cls, data: bytes) -> Proposal:
        """Read canonical bytes. Raises UnreadableError, ConfigError naming the field."""
        if len(data) > LARGEST:
            raise UnreadableError(f"a proposal of {len(data)} bytes", f"at most {LARGEST}")
        return strict.read(cls, parse_canonical(data, "the proposal"), "the proposal")

    def to_json(self) -> dict[str, Any]:
        """``consent`` stands in it only where anything needs the word of several domains."""
        plain = self.consent == Consents()
        return {k: v for k, v in asdict(self).items() if k != "canonical" and not (k == "consent" and plain)}

    @cached_property
    def canonical(self) -> bytes:
        """The bytes that are hashed and signed. Raises ConfigError if they are too many."""
        made = canonical(self.to_json())
        if len(made) > LARGEST:
            raise ConfigError(f"the proposal has {len(made)} bytes", f"at most {LARGEST}: shorten the list of layers")
        return made

    @cached_property
    def id(self) -> str:
        """The proposal's name for all: SHA-256 of its canonical bytes, in hex."""
        return hashlib.sha256(self.canonical).hexdigest()

    def party_of(self, domain: str) -> int:
        """Which party this domain's key is. Raises ConfigError if the proposal does not name it."""
        if domain not in self.domains:
            raise ConfigError("this proposal does not name this domain", "uvcc domain show prints its key")
        return self.domains.index(domain)

    def differs(self, policy: Policy, *, smoke: bool = False) -> str:
        """In what a policy is not what was proposed; "" if it is. The owners' keys are not compared.

        A policy that names a proposal for its inputs must name this one. ``smoke``: it may have fewer steps and
        replicas.
        """
        job, topology = dict(self.job), asdict(self.topology)
        if smoke:
            job["steps"] = min(policy.steps, int(job.get("steps", 0)))
            topology["replicas"] = min(policy.topology.replicas, self.topology.replicas)
        limits = {"hourly": self.limits.hourly, "total": self.limits.total, "ttl_s": self.limits.ttl_s}
        pairs = {
            "job": (job, dict(policy.job)),
            "topology": (topology, asdict(policy.topology)),
            "code_hash": (self.code_hash, policy.code_hash),
            "reveal": ([[r.value, r.to] for r in self.reveal], [list(r) for r in policy.reveal]),
            "limits": (limits, {"hourly": 0, "total": 0, "ttl_s": 0} | dict(policy.limits)),
            "providers": (list(self.providers), [p.provider for p in policy.parties]),
            "inputs.proposal": (self.id, policy.proposal or self.id),
        }
        return ", ".join(name for name, (ours, theirs) in pairs.items() if canonical(ours) != canonical(theirs))


def _checked_key(line: str, read: Callable[[str], bytes]) -> None:
    try:
        read(line)
    except UnreadableError as e:
        raise ConfigError(f"the proposal: {e.what}", e.hint) from e
