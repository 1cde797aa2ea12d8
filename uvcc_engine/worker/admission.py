"""Whether this worker may start: the policy, its signatures, its own code, its sealed inputs, its session id.

Nothing is sent before all of it holds.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from uvcc_engine.contract.errors import ConfigError, ProtocolError, UnreadableError
from uvcc_engine.contract.job.model_hash import model_hash
from uvcc_engine.contract.job.owner_files import BASE
from uvcc_engine.contract.job.private_job import SEALED, PrivateJob
from uvcc_engine.contract.job.served_clients import ANSWERED_ONLY, CLIENTS
from uvcc_engine.contract.job.spec import WorkerSpec
from uvcc_engine.contract.job.topology import Coord
from uvcc_engine.contract.parsing.untrusted import json_of
from uvcc_engine.contract.run_files import files
from uvcc_engine.model.definition.base_model import attached, read_base
from uvcc_engine.model.definition.specs import ModelSpec
from uvcc_engine.sealing.inputs import PartyInputs
from uvcc_engine.sealing.joint import open_set
from uvcc_engine.sealing.purpose import ProposedUse
from uvcc_engine.sealing.seeds import SEEDS
from uvcc_engine.sharding.validation import check_counts, check_statistics, check_tensors, fit_model, shapes_of
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.transcript.terms.policy import Policy, check_policy, read_signatures

SITE: Final = Path(__file__).parents[2]
CODE_HASH: Final = "CODE_HASH"
REGISTRY: Final = "sessions.jsonl"
OWNER: Final = "owner"
"""To whom a policy reveals what is SEALED; also where it says "all", that is sealed to the owner."""


@dataclass(frozen=True, slots=True)
class Admission:
    """What an admitted worker works with."""

    policy: Policy
    identity: Identity
    job: PrivateJob
    model: ModelSpec
    inputs: PartyInputs
    coord: Coord

    @property
    def party(self) -> int:
        return self.coord.party


def own_code_hash(site: Path = SITE) -> str:
    """SHA-256 of the wheel that this process runs from, as bootstrap wrote it. Raises UnreadableError."""
    try:
        return (site / CODE_HASH).read_text().strip()
    except OSError as error:
        raise UnreadableError(
            f"this code has no {CODE_HASH} beside it: {error.strerror}", "start workers from a bootstrapped pod"
        ) from error


def admit(spec: WorkerSpec, *, site: Path = SITE) -> Admission:
    """Check everything that can be checked alone.

    Raises ConfigError (policy for another identity, code, coordinate or job), VerificationError (a signature, a
    commitment or the public base's hash does not hold), UnreadableError (a file), ProtocolError (the session id belongs
    to another policy).
    """
    identity = Identity.load(Path(spec.identity_dir))
    policy = Policy.load(Path(spec.policy))
    party = check_policy(policy, read_signatures(Path(spec.signatures)), identity, own_code_hash(site))
    coord = _coordinate(spec, policy, identity, party)
    job = PrivateJob.from_json(policy.job)
    if policy.model_hash != model_hash(job.to_json() | dict(policy.job)):
        raise ConfigError("the policy's model_hash is of another model than its job", "draft the policy anew")
    size = policy.topology
    workers = size.workers_per_party * size.microbatches
    model = fit_model(
        job,
        workers=workers,
        replicas=size.replicas,
        stages=size.stages,
        tensor=size.tensor,
        microbatches=size.microbatches,
    )
    if job.base:
        model = attached(model, read_base(Path(spec.policy).parent / BASE, job.base))
    if spec.job and (asked := PrivateJob.from_json(spec.job)).proving != job.proving:
        raise ConfigError(
            f"the worker's job has verify {asked.proving.word!r}, the signed policy {job.proving.word!r}",
            "launch it with the policy's job",
        )
    if spec.job and PrivateJob.from_json(spec.job) != job:
        raise ConfigError("the worker's job is not the job of the signed policy", "launch it with the policy's job")
    for value in job.reveal:
        owner_only = value in (*SEALED, SEEDS) and policy.reveals(value, OWNER)
        to_clients = value == ANSWERED_ONLY["serve"] and policy.reveals(value, CLIENTS)
        if not owner_only and not to_clients and not policy.reveals(value):
            raise ConfigError(f"the job reveals {value!r}, the policy does not", "list it in the policy, or not at all")
    inputs = open_set(
        _read_box(spec.inputs),
        party=party,
        identity=identity,
        owner=policy.owner,
        commitments=policy.commitments,
        job=job,
        use=ProposedUse.of(policy),
    )
    _check_shapes(inputs, job, model)
    claim_session(Path(spec.identity_dir), policy, spec.run)
    return Admission(policy, identity, job, model, inputs, coord)


def claim_session(identity_dir: Path, policy: Policy, run: str) -> None:
    """Note that this identity took part in this session, for ever.

    Raises ProtocolError if the session id is known under another policy: its masks would meet other messages.
    """
    sid, policy_hash = policy.sid_job.hex(), policy.hash.hex()
    fd = os.open(identity_dir / REGISTRY, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "r+b") as registry:
        fcntl.flock(registry, fcntl.LOCK_EX)  # several workers of a party share the identity
        for number, line in enumerate(registry, 1):
            try:
                known = json_of(line)
                same_sid, same_policy = known["sid_job"] == sid, known["policy_hash"] == policy_hash
            except (ValueError, KeyError, TypeError) as error:
                raise UnreadableError(
                    f"line {number} of {identity_dir / REGISTRY} is damaged", "make a new identity for new sessions"
                ) from error
            if same_sid and not same_policy:
                raise ProtocolError("this session id was used under another policy", "make a policy with a fresh nonce")
            if same_sid:
                return
        record = {"sid_job": sid, "policy_hash": policy_hash, "run": run}
        files.write_all(registry.fileno(), json.dumps(record).encode() + b"\n")
        os.fsync(registry.fileno())


def _coordinate(spec: WorkerSpec, policy: Policy, identity: Identity, party: int) -> Coord:
    coord, topology = Coord.parse(spec.coord), policy.topology
    if coord.party != party:
        raise ConfigError(f"{spec.coord} was started with the identity of P{party}", "launch it on that party's pod")
    if coord not in set(topology.coords()):
        raise ConfigError(f"{spec.coord} is not in the topology of the policy", "launch the policy's coordinates only")
    if policy.public(party, coord.replica) != identity.public:
        raise ConfigError(f"{spec.coord} was started on another pod of P{party}", "launch it on its replica's pod")
    return coord


def _read_box(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UnreadableError(f"cannot read the sealed input {path!r}: {error.strerror}", "upload it again") from error


def _check_shapes(inputs: PartyInputs, job: PrivateJob, model: ModelSpec) -> None:
    if inputs.frac_bits != job.frac_bits:
        raise ConfigError(
            f"inputs have {inputs.frac_bits} fractional bits, the job {job.frac_bits}", "share them for this job"
        )
    check_tensors(shapes_of(inputs.tensors), job, model)
    check_counts(shapes_of(inputs.tensors), job)
    check_statistics(shapes_of(inputs.tensors), job)
