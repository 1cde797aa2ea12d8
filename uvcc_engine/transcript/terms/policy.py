"""The policy: what the three parties agreed to run, as canonical JSON that each of them signs before the first step.

``policy_hash = SHA256(canonical bytes)``, ``sid_job = SHA256("UVCC_SID_JOB_V1" || policy_hash)``. A policy is signed as
its canonical bytes, so ``ssh-keygen -Y verify -n uvcc-policy < policy.json`` checks a signature on the file itself.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, UnreadableError, VerificationError
from uvcc_engine.contract.job.migration import Migration
from uvcc_engine.contract.job.private_job import DEFAULTS, VALIDATIONS
from uvcc_engine.contract.job.proof_mode import OFF, Proving
from uvcc_engine.contract.job.topology import PARTIES, Topology
from uvcc_engine.contract.parsing import strict
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.transcript.formats import reading
from uvcc_engine.transcript.formats.reading import OLD, parse_canonical
from uvcc_engine.transcript.signing.identity import Identity, PublicIdentity, verify_signature
from uvcc_engine.transcript.signing.sshsig import POLICY_NAMESPACE
from uvcc_engine.transcript.terms.operation import Operation

VERSION: Final = 3  # with it the digests of messages are BLAKE3; with 2 they were SHA-256
EVERYBODY: Final = "all"
LARGEST: Final = 4 * reading.MIB
_HEX = re.compile(r"[0-9a-f]{64}")
_FIELDS: Final = (
    "version",
    "job",
    "model_hash",
    "code_hash",
    "topology",
    "operation",
    "parties",
    "inputs",
    "reveal",
    "limits",
    "nonce",
)
_INPUTS: Final = ("owner", "commitments")
_TOPOLOGY: Final = ("replicas", "stages", "tensor", "microbatches")
_PARTY: Final = ("party", "ed25519", "x25519", "provider", "region", "seeded")


def _hex(where: str, value: Any) -> str:
    if not isinstance(value, str) or not _HEX.fullmatch(value):
        raise ConfigError(f"{where} is {_shown(value)}", "it must be a SHA-256: 64 lower-case hex digits")
    return value


def _shown(value: Any) -> str:
    """A value of unknown size and depth for a message."""
    return reading.shown(repr(value) if not isinstance(value, (dict, list)) else "an object or a list", 100)


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where} is {_shown(value)}", "it must be a non-empty text")
    return value


@dataclass(frozen=True, slots=True)
class PolicyParty:
    """One party as the policy names it. ``public`` is the party's identity, born on the pod of its first replica.

    ``pods`` lists the identities that the pods of replicas 1, 2, ... made for themselves: no private key ever leaves
    its pod, and the party's signature of the policy vouches for them. Empty where all replicas work with ``public``.
    """

    party: int
    public: PublicIdentity
    provider: str
    region: str
    pods: tuple[PublicIdentity, ...] = ()

    def of_replica(self, replica: int) -> PublicIdentity:
        """The identity that this replica's workers sign and agree keys with."""
        return self.pods[replica - 1] if replica and self.pods else self.public

    def to_json(self) -> dict[str, Any]:
        named: dict[str, Any] = {"party": self.party, "provider": self.provider, "region": self.region}
        if self.pods:
            named["pods"] = [p.to_json() for p in self.pods]
        return {**named, **self.public.to_json()}

    @classmethod
    def from_json(cls, party: int, data: Any) -> PolicyParty:
        where = f"policy.parties[{party}]"
        has_pods = isinstance(data, dict) and "pods" in data
        found = strict.exact(data, (*_PARTY, "pods") if has_pods else _PARTY, where)
        if found["party"] != party or isinstance(found["party"], bool):
            raise ConfigError(f"{where}.party is {_shown(found['party'])}", "list the parties 0, 1, 2 in order")
        try:
            public = PublicIdentity.from_json({k: found[k] for k in ("ed25519", "x25519", "seeded")})
            pods = tuple(PublicIdentity.from_json(p) for p in _pods(where, found.get("pods")))
        except UnreadableError as e:
            raise ConfigError(f"{where}: {e.what}", e.hint) from e
        provider, region = _text(f"{where}.provider", found["provider"]), _text(f"{where}.region", found["region"])
        return cls(party, public, provider, region, pods)


def _pods(where: str, data: Any) -> list[dict[str, Any]]:
    if data is None:
        return []
    if not isinstance(data, list) or not data or not all(isinstance(p, dict) for p in data):
        raise ConfigError(
            f"{where}.pods is not a list of identities", "one per replica after the first, or leave it out"
        )
    return data


@dataclass(frozen=True)
class Policy:
    """A checked policy. Build one with :meth:`build`, read one with :meth:`from_bytes` or :meth:`load`.

    ``commitments``: SHA-256 of each party's sealed input file; ``reveal``: (value, to) pairs, ``to`` = "all" or a name;
    whatever is not listed stays shared. ``nonce``: 64 hex digits, fresh unless a rerun was asked for. ``proposal``: the
    id of the proposal that the inputs were sealed for, in its ``attempt``; empty where there is none.
    """

    job: Mapping[str, Any]
    model_hash: str
    code_hash: str
    topology: Topology
    parties: tuple[PolicyParty, PolicyParty, PolicyParty]
    owner: str
    commitments: tuple[str, str, str]
    reveal: tuple[tuple[str, str], ...]
    limits: Mapping[str, Any]
    nonce: str
    proposal: str = ""
    attempt: int = 0

    @classmethod
    def build(
        cls,
        *,
        job: Mapping[str, Any],
        model_hash: str,
        code_hash: str,
        topology: Topology,
        parties: Sequence[PolicyParty],
        owner: str,
        commitments: Sequence[str],
        reveal: Sequence[str | tuple[str, str]],
        limits: Mapping[str, Any],
        nonce: str = "",
        proposal: str = "",
        attempt: int = 0,
    ) -> Policy:
        """Make a policy; an empty ``nonce`` draws a fresh one. Raises ConfigError naming the offending field."""
        shown = [(r, EVERYBODY) if isinstance(r, str) else r for r in reveal]
        return cls.from_json(
            {
                "version": VERSION,
                "job": dict(job),
                "model_hash": model_hash,
                "code_hash": code_hash,
                "topology": {k: getattr(topology, k) for k in _TOPOLOGY},
                "operation": Operation.of(topology, apart=bool(proposal)).to_json(),
                "parties": [p.to_json() for p in parties],
                "inputs": _inputs(owner, commitments, proposal, attempt),
                "reveal": [{"value": value, "to": to} for value, to in shown],
                "limits": dict(limits),
                "nonce": nonce or secrets.token_hex(32),
            }
        )

    @classmethod
    def from_json(cls, data: Any) -> Policy:
        """Read strictly. Raises ConfigError naming the offending field."""
        stated = data.get("version", VERSION) if isinstance(data, dict) else VERSION
        if stated != VERSION or isinstance(stated, bool):
            raise ConfigError(f"policy.version is {_shown(stated)}; this release reads version {VERSION}", OLD)
        found = strict.exact(data, _FIELDS, "policy")
        parties = found["parties"]
        if not isinstance(parties, list) or len(parties) != PARTIES:
            raise ConfigError("policy.parties must list exactly three parties", "one entry per domain")
        named = [PolicyParty.from_json(i, p) for i, p in enumerate(parties)]
        topology = _topology(found["topology"])
        _check_keys(named, topology)
        inputs, proposal, attempt = _read_inputs(found["inputs"])
        Operation.from_json(found["operation"], topology, apart=bool(proposal))
        commitments = inputs["commitments"]
        if not isinstance(commitments, list) or len(commitments) != PARTIES:
            raise ConfigError("policy.inputs.commitments must list three hashes", "one per party's sealed input file")
        sealed = [_hex(f"policy.inputs.commitments[{i}]", c) for i, c in enumerate(commitments)]
        policy = cls(
            job=_job(found["job"]),
            model_hash=_hex("policy.model_hash", found["model_hash"]),
            code_hash=_hex("policy.code_hash", found["code_hash"]),
            topology=topology,
            parties=(named[0], named[1], named[2]),
            owner=_text("policy.inputs.owner", inputs["owner"]),
            commitments=(sealed[0], sealed[1], sealed[2]),
            reveal=_reveal(found["reveal"]),
            limits=_limits(found["limits"]),
            nonce=_hex("policy.nonce", found["nonce"]),
            proposal=proposal,
            attempt=attempt,
        )
        _ = policy.canonical  # what cannot be canonical is refused here, not at signing
        return policy

    @classmethod
    def from_bytes(cls, data: bytes) -> Policy:
        """Read canonical bytes. Raises UnreadableError if they are not canonical JSON, ConfigError if not a policy."""
        return cls.from_json(parse_canonical(data, "the policy"))

    @classmethod
    def load(cls, path: Path) -> Policy:
        """Read a policy file. Raises UnreadableError, ConfigError."""
        return cls.from_bytes(reading.read_file(path, LARGEST, named=True))

    def to_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "job": dict(self.job),
            "model_hash": self.model_hash,
            "code_hash": self.code_hash,
            "topology": {k: getattr(self.topology, k) for k in _TOPOLOGY},
            "operation": self.operation.to_json(),
            "parties": [p.to_json() for p in self.parties],
            "inputs": _inputs(self.owner, self.commitments, self.proposal, self.attempt),
            "reveal": [{"value": value, "to": to} for value, to in self.reveal],
            "limits": dict(self.limits),
            "nonce": self.nonce,
        }

    @cached_property
    def canonical(self) -> bytes:
        """The bytes that are hashed and signed."""
        return canonical(self.to_json())

    @cached_property
    def hash(self) -> bytes:
        return hashlib.sha256(self.canonical).digest()

    @cached_property
    def sid_job(self) -> bytes:
        """Session id of the whole job: 32 bytes."""
        return hashlib.sha256(b"UVCC_SID_JOB_V1" + self.hash).digest()

    @property
    def steps(self) -> int:
        return int(self.job["steps"])

    @property
    def operation(self) -> Operation:
        """Who operates it, and what a party's traffic is: only three that each conduct a part name a proposal."""
        return Operation.of(self.topology, apart=bool(self.proposal))

    @property
    def migration(self) -> Migration | None:
        """The checkpoint of another policy that this one starts from; None if it starts at the beginning."""
        return Migration.of_job(self.job)

    @property
    def first_step(self) -> int:
        """Steps that were done before this policy; its transcript's epoch e is training step ``first_step`` + e."""
        return self.migration.step if self.migration is not None else 0

    def public(self, party: int, replica: int = 0) -> PublicIdentity:
        """The identity of a party's pod; that of replica 0 is the party's own, which signs the policy."""
        return self.parties[party].of_replica(replica)

    def peers(self, party: int, replica: int = 0) -> dict[int, PublicIdentity]:
        """The other two parties' identities in one replica."""
        return {p.party: p.of_replica(replica) for p in self.parties if p.party != party}

    def party_of(self, public: PublicIdentity) -> int:
        """Which party this identity, or one of whose pods, is. Raises ConfigError if the policy does not name it."""
        for p in self.parties:
            if public in (p.public, *p.pods):
                return p.party
        raise ConfigError("this policy does not name this pod's identity", "it was made for other pods")

    def reveals(self, value: str, to: str = EVERYBODY) -> bool:
        return (value, to) in self.reveal

    @property
    def proves(self) -> bool:
        """Whether every root statement says what was proved of its epoch."""
        return self.proving.mode != OFF

    @property
    def proving(self) -> Proving:
        """What is proved of the computation, and how often."""
        return Proving.of_job(self.job)

    def step_values(self, epoch: int) -> tuple[str, ...]:
        """What every worker states in its root statement of this epoch: the loss of every ``loss_every``-th step,
        validation after ``val_every`` steps, both of the job's last step, where they are revealed to all."""
        step, last, listed = self.first_step + epoch, self.steps - 1, self.job.get("reveal", DEFAULTS.reveal)
        every, validated = self.job.get("loss_every", DEFAULTS.loss_every), self.job.get("val_every", 0)
        due = ["loss"] if step % every == 0 or step == last else []
        due += VALIDATIONS if step == last or (validated and (step + 1) % validated == 0) else []
        return tuple(name for name in due if step <= last and self.reveals(name) and name in listed)

    @property
    def seeded(self) -> tuple[int, ...]:
        """Parties whose identity comes from a public seed (demonstration only)."""
        return tuple(p.party for p in self.parties if any(i.seeded for i in (p.public, *p.pods)))


def _inputs(owner: str, commitments: Sequence[str], proposal: str, attempt: int) -> dict[str, Any]:
    """``policy.inputs``; without a proposal it says nothing of one."""
    of = {"proposal": proposal, "attempt": attempt} if proposal else {}
    return {"owner": owner, "commitments": list(commitments), **of}


def _read_inputs(data: Any) -> tuple[Mapping[str, Any], str, int]:
    """``policy.inputs``, and which proposal, in which attempt, the inputs were sealed for ("" and 0: none)."""
    proposed = isinstance(data, dict) and "proposal" in data
    found = strict.exact(data, (*_INPUTS, "proposal", "attempt") if proposed else _INPUTS, "policy.inputs")
    if not proposed:
        return found, "", 0
    attempt = found["attempt"]
    if not isinstance(attempt, int) or isinstance(attempt, bool) or not 0 <= attempt < 2**31:
        raise ConfigError(f"policy.inputs.attempt is {_shown(attempt)}", "it must be a whole number from 0")
    return found, _hex("policy.inputs.proposal", found["proposal"]), attempt


def _job(data: Any) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise ConfigError("policy.job is not an object", "it needs at least kind and steps")
    _text("policy.job.kind", data.get("kind"))
    steps = data.get("steps")
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ConfigError(f"policy.job.steps is {_shown(steps)}", "it must be a whole number of at least 1")
    for name, least in (("loss_every", 1), ("val_every", 0), ("patience", 0)):
        every = data.get(name, getattr(DEFAULTS, name))
        if not isinstance(every, int) or isinstance(every, bool) or every < least:
            raise ConfigError(f"policy.job.{name} is {_shown(every)}", f"it must be a whole number of at least {least}")
    if not isinstance(data.get("reveal", []), list):
        raise ConfigError(f"policy.job.reveal is {_shown(data['reveal'])}", "it must be a list of words")
    Proving.of_job(data)
    start = Migration.of_job(data)
    if start is not None and start.step >= steps:
        raise ConfigError(f"policy.job starts at step {start.step} of {steps}", "there is nothing left to do")
    return data


def _topology(data: Any) -> Topology:
    found = strict.exact(data, _TOPOLOGY, "policy.topology")
    for key in _TOPOLOGY:
        if not isinstance(found[key], int) or isinstance(found[key], bool):
            raise ConfigError(
                f"policy.topology.{key} is {_shown(found[key])}", "it must be a whole number of at least 1"
            )
    return Topology(**{k: found[k] for k in _TOPOLOGY})


def _check_keys(parties: Sequence[PolicyParty], topology: Topology) -> None:
    """Every identity is there once, and each party that lists pods lists all of them."""
    everybody = [i for p in parties for i in (p.public, *p.pods)]
    for key in ("ed25519", "x25519"):
        if len({getattr(i, key) for i in everybody}) != len(everybody):
            raise ConfigError(f"policy.parties: two parties or pods have the same {key} key", "each pod makes its own")
    for p in parties:
        if p.pods and len(p.pods) != topology.replicas - 1:
            raise ConfigError(
                f"policy.parties[{p.party}].pods lists {len(p.pods)} pods for {topology.replicas} replicas",
                "one identity per replica after the first",
            )


def _reveal(data: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(data, list):
        raise ConfigError("policy.reveal is not a list", 'write [{"value": "loss", "to": "all"}]')
    shown: list[tuple[str, str]] = []
    for i, entry in enumerate(data):
        found = strict.exact(entry, ("value", "to"), f"policy.reveal[{i}]")
        shown.append((_text(f"policy.reveal[{i}].value", found["value"]), _text(f"policy.reveal[{i}].to", found["to"])))
    if len(set(shown)) != len(shown):
        raise ConfigError("policy.reveal lists something twice", "list each value once per recipient")
    return tuple(shown)


def _limits(data: Any) -> Mapping[str, Any]:
    if not isinstance(data, dict) or not all(isinstance(v, (int, float, str)) for v in data.values()):
        raise ConfigError("policy.limits is not an object of numbers and texts", "see limits in the profile")
    return data


def sign_policy(identity: Identity, policy: Policy, code_hash: str) -> str:
    """Sign a policy after checking that it names this identity and this code. Raises ConfigError if it does not."""
    policy.party_of(identity.public)
    if policy.code_hash != code_hash:
        raise ConfigError(
            f"the policy is for code {policy.code_hash[:12]}, this pod runs {code_hash[:12]}",
            "bootstrap the same wheel",
        )
    return identity.sign(POLICY_NAMESPACE, policy.canonical)


def check_signatures(policy: Policy, signatures: Mapping[int, str]) -> None:
    """Check that exactly the three named parties signed. Raises VerificationError naming the party."""
    if set(signatures) != set(range(PARTIES)):
        raise VerificationError(
            "policy signature", f"signatures of parties {sorted(signatures)}", "all of 0, 1, 2 must sign"
        )
    for party, text in sorted(signatures.items()):
        if not verify_signature(policy.public(party), POLICY_NAMESPACE, policy.canonical, text):
            raise VerificationError(
                "policy signature", f"P{party}'s signature does not hold for policy {policy.hash.hex()}"
            )


def check_policy(policy: Policy, signatures: Mapping[int, str], identity: Identity, code_hash: str) -> int:
    """What a worker checks before its first step; returns its party.

    Raises ConfigError if the policy names another identity or other code, VerificationError if a signature fails.
    """
    party = policy.party_of(identity.public)
    if policy.code_hash != code_hash:
        raise ConfigError(
            f"the policy is for code {policy.code_hash[:12]}, this worker is {code_hash[:12]}",
            "bootstrap the same wheel",
        )
    check_signatures(policy, signatures)
    return party


def write_signatures(path: Path, signatures: Mapping[int, str]) -> None:
    """Write policy signatures as ``{"0": "-----BEGIN SSH SIGNATURE...", ...}``."""
    path.write_text(json.dumps({str(p): s for p, s in sorted(signatures.items())}, indent=1) + "\n")


def read_signatures(path: Path) -> dict[int, str]:
    """Read what :func:`write_signatures` wrote. Raises UnreadableError."""
    data = reading.read_json(path)
    known = {str(p): p for p in range(PARTIES)}
    if (
        not isinstance(data, dict)
        or not data.keys() <= known.keys()
        or not all(isinstance(s, str) for s in data.values())
    ):
        raise UnreadableError(f"{reading.shown(path)} does not hold policy signatures", 'it reads {"0": "...", ...}')
    return {known[p]: s for p, s in data.items()}
