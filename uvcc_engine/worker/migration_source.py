"""The sending side of a migration: a checkpoint's shares go to the pods of the next policy; worker kind ``handover``.

Nothing is kept in escrow for the day on which a pod is lost, no key and no copy: two parties hold every component of
the state anyway. Each surviving pod hands what it holds to the pods that are entitled to it under the new policy: both
components to pods of its own party, and, where no pod of a party goes on (:func:`migration_plan.unvouched`), the
component that it has in common with that party. Boxes are sealed to the receiving pod's own key, so whoever carries
them learns nothing, and the receiver checks them against digests that all three old parties signed (``commit_record``):
a pod that hands over something else is found out, except where it and the lost party had agreed on that before.

A policy can be drawn up by anybody who gets the agents to sign it. What limits that: an identity that no pod of its
party vouched for gets one party's shares at most in the chain of migrations of a job, which are worth nothing alone.
The limit stands in every policy (``Migration.restored``), and each pod remembers which party it has handed shares to,
beside its identity, so that two policies that fork off the same one do not come around it.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from safetensors.torch import load
from torch import Tensor

from uvcc_engine.checkpoint.commits import RECORD, read_record
from uvcc_engine.checkpoint.encryption import decrypt, rest_key, state_name
from uvcc_engine.checkpoint.migration_target import START, about_box, box_name, pod_name, slice_name
from uvcc_engine.contract.checkpoints import checkpoint as ck
from uvcc_engine.contract.errors import ConfigError, ProtocolError, UnreadableError
from uvcc_engine.contract.job.migration import Migration
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.spec import WorkerSpec
from uvcc_engine.contract.job.topology import PARTIES, Coord
from uvcc_engine.contract.parsing.untrusted import json_of
from uvcc_engine.contract.run_files import files
from uvcc_engine.contract.run_files.writer import RunWriter
from uvcc_engine.model.learning.state_digests import HALVES, blind_at, half_of
from uvcc_engine.sealing.box import seal
from uvcc_engine.sealing.components import encode_component
from uvcc_engine.transcript.proof.bundle import POLICY_FILE
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.transcript.terms.migration_plan import migration_after, unvouched
from uvcc_engine.transcript.terms.policy import Policy, check_signatures, read_signatures
from uvcc_engine.worker.admission import own_code_hash
from uvcc_engine.worker.checkpoints import about
from uvcc_engine.worker.outcome import state_blinds

MEMORY: Final = "handovers.jsonl"
_ASKED: Final = ("from", "policy", "step")


def main(spec: WorkerSpec) -> int:
    """Send the shares of one migration; returns the exit code. ``start/`` in the run directory goes to the new pods."""
    with RunWriter.open(Path(spec.dir), spec.run, spec.rank, spec.coord, lead=spec.lead) as writer:
        names = send_shares(spec)
        writer.event("handed_over", step=int(spec.job["step"]), boxes=names)
        writer.exit("done", step=int(spec.job["step"]))
    return 0


def send_shares(spec: WorkerSpec) -> list[str]:
    """Seal what this pod holds of a checkpoint to whom the new policy entitles to it; returns the boxes' names.

    ``spec.coord`` names this pod in the old policy, ``spec.job`` = ``{from: old run directory, policy: old policy file,
    step}``, ``spec.policy`` and ``spec.signatures`` are the new ones. Raises ConfigError if the new policy does not
    start from this checkpoint or this pod must not hand over to it, VerificationError if a signature or the checkpoint
    does not hold, ProtocolError if shares of a second party are asked for.
    """
    run_dir, old, step = _asked(spec.job)
    coord, identity = Coord.parse(spec.coord), Identity.load(Path(spec.identity_dir))
    if old.public(coord.party, coord.replica) != identity.public:
        raise ConfigError(f"this pod is not {pod_name(coord)} of the policy", "ask the pod that wrote the checkpoint")
    new = _agreed(spec)
    folder = ck.step_dir(run_dir / files.CHECKPOINTS, step)
    manifest, record = ck.verify(folder), read_record(folder, old)
    start = migration_after(old, record, new.parties)
    if new.migration != start:
        raise ConfigError(
            f"the new policy does not start from step {step} of {old.hash.hex()[:12]} as it was committed here",
            "make it with migration_plan.migration_after and the COMMIT record of this pod",
        )
    strangers = unvouched(old, new.parties)
    remember(Path(spec.identity_dir), start)
    state = _state(identity, old, manifest)
    plain = _components(state, state_blinds(identity, old, coord), coord.party, old, step)
    out = Path(spec.dir) / START
    out.mkdir(parents=True, exist_ok=True, mode=0o700)
    files.write_atomic(out / POLICY_FILE, old.canonical)
    files.write_json(out / RECORD, record)
    names = []
    for target in _pods(new):
        if target.party != coord.party and target.party not in strangers:
            continue
        for component in sorted({target.party, (target.party + 1) % PARTIES} & plain.keys()):
            to = new.public(target.party, target.replica).x25519
            box = seal(plain[component], sender=identity, to=to, about=about_box(new, component, step))
            names.append(box_name(component, target, coord))
            files.write_atomic(out / names[-1], box, mode=0o600)
    return names


def _asked(job: Mapping[str, Any]) -> tuple[Path, Policy, int]:
    step = job.get("step")
    if sorted(job) != list(_ASKED) or not isinstance(step, int):
        raise ConfigError(f"a migration was asked for with {sorted(job)}", f"it needs {', '.join(_ASKED)}")
    return Path(str(job["from"])), Policy.load(Path(str(job["policy"]))), step


def _agreed(spec: WorkerSpec) -> Policy:
    """The new policy, if all three parties signed it and it runs the code of this pod."""
    new = Policy.load(Path(spec.policy))
    check_signatures(new, read_signatures(Path(spec.signatures)))
    if new.code_hash != own_code_hash():
        raise ConfigError("the new policy is for other code than this pod runs", "bootstrap the same wheel")
    return new


def _pods(policy: Policy) -> list[Coord]:
    return [c for c in policy.topology.coords() if c.stage == c.tensor == 0]


def _state(
    identity: Identity, old: Policy, manifest: ck.CheckpointManifest
) -> dict[tuple[int, int], dict[str, Tensor]]:
    """This pod's part of the state by (stage, tensor), decrypted."""
    key = rest_key(identity, old.sid_job)
    found = {}
    for rank, part in sorted(manifest.ranks.items()):
        sealed = (manifest.path / state_name(rank)).read_bytes()
        coord = Coord.parse(part.coord)
        found[coord.stage, coord.tensor] = load(decrypt(key, sealed, about(part.coord, manifest.step)))
    size = old.topology
    if len(found) != size.stages * size.tensor:
        raise UnreadableError(f"{manifest.path} holds {len(found)} parts of the state", "ask a pod that holds all")
    return found


def _components(
    state: Mapping[tuple[int, int], Mapping[str, Tensor]], blinds: bytes, party: int, old: Policy, step: int
) -> dict[int, bytes]:
    """Both components of the whole state by their number: what blinds the digest, then every rank's tensors."""
    frac_bits = PrivateJob.from_json(old.job).frac_bits
    found = {}
    for half, blind, component in zip(HALVES, (blinds[:32], blinds[32:]), (party, (party + 1) % PARTIES), strict=True):
        tensors = {
            slice_name(at, name): value.numpy()
            for at, part in state.items()
            for name, value in half_of(part, half).items()
        }
        found[component] = blind_at(blind, step) + encode_component(component, frac_bits, tensors)
    return found


def remember(identity_dir: Path, start: Migration) -> None:
    """Note whose shares a stranger gets in this chain of migrations. Raises ProtocolError for a second party."""
    if not start.restored:
        return
    party = start.restored[0]
    fd = os.open(identity_dir / MEMORY, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "r+b") as memory:
        fcntl.flock(memory, fcntl.LOCK_EX)
        try:
            lines = [json_of(line) for line in memory]
            before = {int(line["restored"]) for line in lines if line["root"] == start.root}
        except (ValueError, KeyError, TypeError) as error:
            raise UnreadableError(f"{identity_dir / MEMORY} is damaged", "this pod hands over nothing more") from error
        if before - {party}:
            raise ProtocolError(
                f"this pod has handed over P{before.pop()}'s shares in this chain of migrations; "
                f"P{party}'s would complete them",
                "start the job anew",
            )
        if not before:
            files.write_all(memory.fileno(), json.dumps({"root": start.root, "restored": party}).encode() + b"\n")
            os.fsync(memory.fileno())
