"""A domain vouches for its own pods: the workers on them, their identities, where they listen, which code they run.

One roster per domain, proposal and attempt, signed with the domain's key. The three together are what each domain
builds its own pods' policy and links from, and what a data owner seals shares to. Whoever signs two rosters for one
attempt is named, with both as evidence.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, ProtocolError, UnreadableError
from uvcc_engine.contract.job.topology import PARTIES, Coord
from uvcc_engine.contract.parsing import strict
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.transcript.formats.reading import parse_json
from uvcc_engine.transcript.signed import orders
from uvcc_engine.transcript.signing import sshsig
from uvcc_engine.transcript.signing.identity import PublicIdentity
from uvcc_engine.transcript.terms.proposal import Proposal

ROSTER_NAMESPACE: Final = "uvcc-roster"
FILE: Final = "rosters.json"
"""In a run's artifacts: the rosters of its attempt, as their domains signed them."""
VERSION: Final = 1
LARGEST: Final = 24 << 10
"""Bytes of a roster: with its signature it fits into one record of a relay."""
MOST_ATTEMPTS: Final = 1 << 31
_TYPE: Final = "roster"
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_WORD: Final = re.compile(r"[A-Za-z0-9._ :/-]{1,100}", re.ASCII)
_HOST_KEY: Final = re.compile(r"SHA256:[A-Za-z0-9+/]{43}", re.ASCII)
_ENDPOINT: Final = re.compile(r"(?:[A-Za-z0-9.-]{1,253}|\[[0-9a-fA-F:]{2,45}\]):([1-9][0-9]{0,4})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterPod:
    """One pod. ``identity``: born on it, its signing and its agreement key; sealed shares are for the latter.

    ``endpoints``: by coordinate, ``host:port`` where that worker listens for the other parties; none where the parties
    meet at a relay. ``host_key``: its SSH host key's fingerprint, "" if the domain does not tell.
    """

    pod: str
    coords: tuple[str, ...]
    identity: PublicIdentity
    endpoints: dict[str, str]
    host_key: str = ""

    def __post_init__(self) -> None:
        places = {Coord.parse(c) for c in self.coords}
        if not places or len(places) != len(self.coords) or len({(c.party, c.replica) for c in places}) != 1:
            raise ConfigError(
                f"a pod of the roster hosts {', '.join(self.coords)[:80]}", "workers of one replica, once"
            )
        if self.pod != f"p{self.where.party}r{self.where.replica}":
            raise ConfigError(
                f"the pod {self.pod[:40]!r} hosts {self.coords[0]}", "it has the name of party and replica"
            )
        if not set(self.endpoints) <= set(self.coords) or not all(map(_is_endpoint, self.endpoints.values())):
            raise ConfigError(f"the endpoints of {self.pod} are not its workers'", "host:port by coordinate")
        if self.host_key and not _HOST_KEY.fullmatch(self.host_key):
            raise ConfigError(f"the host key of {self.pod} is no fingerprint", "SHA256: and 43 letters")

    @property
    def where(self) -> Coord:
        """The coordinate of the pod's first worker."""
        return Coord.parse(self.coords[0])


@dataclass(frozen=True, kw_only=True)
class Roster:
    """What one domain says of its own pods. ``proposal``: the proposal's id; ``code_hash``: of the engine's wheel.

    ``collector``: the key under which this domain's console signs manifests of what it hands over, "" if it tells none.
    """

    version: int
    proposal: str
    attempt: int
    party: int
    domain: str
    code_hash: str
    provider: str
    region: str
    pods: tuple[RosterPod, ...]
    collector: str = ""

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ConfigError(f"the roster has version {self.version}", f"this code knows version {VERSION}")
        if not _HASH.fullmatch(self.proposal) or not _HASH.fullmatch(self.code_hash):
            raise ConfigError("the roster names no proposal or no code", "64 lower-case hex digits each")
        if not 0 <= self.attempt < MOST_ATTEMPTS or self.party not in range(PARTIES):
            raise ConfigError(f"the roster is of P{self.party}, attempt {self.attempt}", "0, 1 or 2; attempts from 0")
        if not _WORD.fullmatch(self.provider) or not _WORD.fullmatch(self.region):
            raise ConfigError("the roster's provider or region is no word", "letters, digits, . _ : / -")
        sshsig.person_material(self.domain)
        if self.collector:
            sshsig.public_raw(self.collector)
        names = [pod.pod for pod in self.pods]
        if names != [f"p{self.party}r{n}" for n in range(len(names))] or not names:
            raise ConfigError(f"the roster of P{self.party} lists {', '.join(names)[:80]}", "p0r0, p0r1, ... in order")
        keys = [key for pod in self.pods for key in (pod.identity.ed25519, pod.identity.x25519)]
        if len(set(keys)) != len(keys):
            raise ConfigError(f"two pods of P{self.party}'s roster have one key", "an identity is born on each pod")
        _ = self.canonical

    def to_json(self) -> dict[str, Any]:
        return {k: v for k, v in asdict(self).items() if k not in ("canonical", "digest")}

    @cached_property
    def canonical(self) -> bytes:
        """What is hashed. Raises ConfigError if it is too much for one record."""
        made = canonical(self.to_json())
        if len(made) > LARGEST:
            raise ConfigError(f"the roster has {len(made)} bytes", f"at most {LARGEST}: fewer pods for each party")
        return made

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical bytes, in hex."""
        return hashlib.sha256(self.canonical).hexdigest()

    def pod(self, replica: int) -> RosterPod:
        """The pod of a replica. Raises ConfigError if the roster has none."""
        if replica not in range(len(self.pods)):
            raise ConfigError(f"the roster of P{self.party} has no pod of replica {replica}")
        return self.pods[replica]


def _is_endpoint(text: str) -> bool:
    found = _ENDPOINT.fullmatch(text)
    return found is not None and int(found[1]) < 65536


def signed(roster: Roster, sign: Callable[[bytes], str]) -> str:
    """The roster with its signature, as it is sent and kept. ``sign`` signs under ``ROSTER_NAMESPACE``."""
    return orders.sealed({"type": _TYPE, **roster.to_json()}, sign)


def opened(body: str, key: str) -> Roster | None:
    """What the domain of this key vouches for; None if it did not sign this, or it is no roster. Never raises."""
    content = orders.opened(body, ROSTER_NAMESPACE, [key])
    if content is None or content.get("type") != _TYPE or content.get("domain") != key:
        return None
    try:
        return strict.read(Roster, {k: v for k, v in content.items() if k != "type"}, "a roster")
    except (ConfigError, UnreadableError):
        return None


def says(body: str) -> tuple[str, int, int]:
    """Of which proposal, attempt and party a record says it is the roster; ("", -1, -1) if it is none. Never raises."""
    try:
        found = parse_json(body.encode(), "a roster")["content"]
        if found["type"] == _TYPE and isinstance(found["proposal"], str):
            return found["proposal"], int(found["attempt"]), int(found["party"])
    except (UnreadableError, KeyError, TypeError, ValueError, OverflowError):
        pass
    return "", -1, -1


def check(roster: Roster, proposal: Proposal) -> None:
    """Hold a roster against the proposal that it is for. Raises ConfigError naming the domain and what is wrong."""
    whose = f"P{roster.party}'s roster"
    if roster.proposal != proposal.id or roster.domain != proposal.domains[roster.party]:
        raise ConfigError(f"{whose} is of another proposal or another domain", "each signs for itself, once a proposal")
    if roster.code_hash != proposal.code_hash:
        what = f"{whose} runs the code {roster.code_hash[:16]}, approved was {proposal.code_hash[:16]}"
        raise ConfigError(what, "every domain installs the very release that the proposal names")
    if roster.provider != proposal.providers[roster.party]:
        wanted = proposal.providers[roster.party]
        raise ConfigError(f"{whose} is of pods at {roster.provider}, approved was {wanted}", "propose it anew")
    listed = sorted(c for pod in roster.pods for c in pod.coords)
    if listed != sorted(str(c) for c in proposal.topology.coords() if c.party == roster.party):
        raise ConfigError(f"{whose} lists the workers {', '.join(listed)[:80]}", "those of the proposal, each once")


def check_reachable(roster: Roster) -> None:
    """See that others can reach every worker of a roster. Raises ProtocolError naming the domain."""
    silent = [c for pod in roster.pods for c in pod.coords if c not in pod.endpoints]
    if silent:
        what = f"P{roster.party}'s roster does not say where {', '.join(silent)[:80]} listens"
        raise ProtocolError(what, "links between domains are direct: host:port for each worker", party=roster.party)


def signed_among(proposal: Proposal, attempt: int, bodies: Iterable[str]) -> list[str]:
    """Of whatever lies at a rendezvous, what the proposal's domains signed as rosters of one attempt, each once."""

    def theirs(body: str) -> bool:
        of, when, party = says(body)
        if of != proposal.id or when != attempt or party not in range(PARTIES):
            return False
        return opened(body, proposal.domains[party]) is not None

    return [body for body in dict.fromkeys(bodies) if theirs(body)]


def gathered(proposal: Proposal, attempt: int, bodies: Iterable[str]) -> dict[int, Roster]:
    """The rosters of one attempt by party, out of whatever lies at a rendezvous; those that are there. Pure.

    What a domain did not sign is passed over. Raises ConfigError for a roster that is not what was approved, and
    ProtocolError for two rosters of one domain, or a pod's key in two of them, naming the domain.
    """
    found: dict[int, Roster] = {}
    for body in bodies:
        of, when, party = says(body)
        if of != proposal.id or when != attempt or party not in range(PARTIES):
            continue
        roster = opened(body, proposal.domains[party])
        if roster is None:
            continue
        check(roster, proposal)
        if (other := found.setdefault(party, roster)) != roster:
            what = f"P{party}'s domain ({roster.domain}) signed two rosters of attempt {attempt}"
            raise ProtocolError(f"{what}: {other.digest[:16]} and {roster.digest[:16]}", "keep both", party=party)
    seen: dict[str, int] = {}
    for party, roster in sorted(found.items()):
        for key in (k for pod in roster.pods for k in (pod.identity.ed25519, pod.identity.x25519)):
            if seen.setdefault(key, party) != party:
                what = f"P{party}'s roster lists a key of a pod of P{seen[key]}"
                raise ProtocolError(what, "an identity is born on one pod; one of the two lies", party=party)
    return found
