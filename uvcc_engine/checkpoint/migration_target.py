"""The receiving side of a migration: the state of another policy's checkpoint is opened, checked and cut up anew.

``start/`` in the run directory holds the old policy, the COMMIT record and the boxes that ``migration_source`` made for
this pod. Which of a component's holders made its box does not matter: the digest that both of them signed decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from uvcc_engine.checkpoint.commits import RECORD, Said, check_record
from uvcc_engine.checkpoint.reshard import cut_state, join_state
from uvcc_engine.contract.errors import ConfigError, UnreadableError, UvccError, VerificationError
from uvcc_engine.contract.job.migration import Migration, record_hash
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import PARTIES, Coord, Topology
from uvcc_engine.contract.run_files import files
from uvcc_engine.model.definition.specs import find_model
from uvcc_engine.model.learning.state_digests import HALVES, component_digest, stored_name, whole_digest
from uvcc_engine.sealing.box import unseal
from uvcc_engine.sealing.components import Ring, decode_component
from uvcc_engine.transcript.proof.bundle import POLICY_FILE
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.transcript.terms.policy import Policy

START: Final = "start"
_FORMAT: Final = "uvcc-start-1"
_BLIND: Final = 32


def pod_name(pod: Coord) -> str:
    return f"p{pod.party}r{pod.replica}"


def box_name(component: int, to: Coord, by: Coord) -> str:
    """File name of one component's box for a pod of the new policy, made by a pod of the old one."""
    return f"c{component}_{pod_name(to)}_by_{pod_name(by)}.box"


def about_box(policy: Policy, component: int, step: int) -> dict[str, Any]:
    """What a box says of itself: which component, of which step, for which new policy."""
    return {"format": _FORMAT, "component": component, "step": step, "policy": policy.hash.hex()}


def slice_name(at: tuple[int, int], name: str) -> str:
    """Name of a tensor in a component: its stage and tensor rank, its name there."""
    return f"s{at[0]}t{at[1]}/{name}"


def read_migrated(
    folder: Path, start: Migration, policy: Policy, identity: Identity, coord: Coord, job: PrivateJob
) -> dict[str, Tensor]:
    """The state of the worker ``coord`` of ``policy`` at its first step.

    Raises ConfigError if the job is another one or the model cannot be cut up so, UnreadableError if something is
    missing in ``folder``, VerificationError if it is not what the three parties committed.
    """
    old = Policy.load(folder / POLICY_FILE)
    record = files.read_json(folder / RECORD)
    if old.hash.hex() != start.of or record_hash(record) != start.commit:
        what = f"{folder} holds another policy or COMMIT record than the policy starts from"
        raise VerificationError("start", what, "copy them from the pod that handed over")
    held = check_record(record, old)
    check_same_training(PrivateJob.from_json(old.job), old.topology, job, policy.topology)
    model, found = find_model(job.model), {}
    for half, component in zip(HALVES, (coord.party, (coord.party + 1) % PARTIES), strict=True):
        said = held[component]
        parts = _component(folder, policy, old, identity, coord, component, start.step, said)
        whole = join_state(model, old.topology, parts)
        mine = cut_state(model, policy.topology, coord.stage, coord.tensor, whole)
        found.update({stored_name(name, half): torch.from_numpy(value) for name, value in mine.items()})
    return found


def check_same_training(before: PrivateJob, size: Topology, job: PrivateJob, wanted: Topology) -> None:
    """Only where and when things are done may differ, not what is trained. Raises ConfigError naming what does."""
    free = ("batch", "reveal", "loss_every", "checkpoint_every", "test_rows", "start")
    same = replace(job, **{name: getattr(before, name) for name in free})
    for name in before.__dataclass_fields__:
        if getattr(before, name) != getattr(same, name):
            what = f"job.{name} is {getattr(job, name)!r}, the checkpoint is of {getattr(before, name)!r}"
            raise ConfigError(what, "go on with the job that wrote it")
    rows = before.batch * size.replicas, job.batch * wanted.replicas
    if rows[0] != rows[1]:
        raise ConfigError(
            f"job.batch of {job.batch} on {wanted.replicas} replicas makes steps of {rows[1]} rows, not of {rows[0]}",
            "batch times replicas must stay",
        )


def _component(
    folder: Path, policy: Policy, old: Policy, identity: Identity, coord: Coord, component: int, step: int, said: Said
) -> dict[tuple[int, int], dict[str, Ring]]:
    """One component of every (stage, tensor), from whichever box holds what was committed."""
    troubles = []
    for path in sorted(folder.glob(f"c{component}_{pod_name(coord)}_by_*.box")):
        try:
            by = Coord.parse(path.stem.rpartition("_")[2] + "s0t0")
            sender = old.public(by.party, by.replica).x25519
            plain, about = unseal(path.read_bytes(), recipient=identity, sender=sender)
            if about != about_box(policy, component, step):
                raise VerificationError("start", f"{path.name} says {about}", "hand over again for this policy")
            return _checked(plain, component, old.topology, said)
        except (UvccError, OSError, IndexError) as error:
            troubles.append(f"{path.name}: {error}")
    holders = f"P{component} or P{(component + 2) % PARTIES}"
    if not troubles:
        what = f"{folder} has no box with component {component} for {pod_name(coord)}"
        raise UnreadableError(what, f"have a pod of {holders} hand it over")
    raise VerificationError("start", "; ".join(troubles), f"have another pod of {holders} hand it over")


def _checked(
    plain: bytes | bytearray, component: int, size: Topology, said: Said
) -> dict[tuple[int, int], dict[str, Ring]]:
    blind = bytes(plain[:_BLIND])
    _, tensors = decode_component(component, memoryview(plain)[_BLIND:])
    places = [(s, t) for s in range(size.stages) for t in range(size.tensor)]
    parts = {at: _at(tensors, at) for at in places}
    digests = [
        component_digest([(n, torch.from_numpy(v)) for n, v in sorted(parts[at].items())], blind) for at in places
    ]
    if whole_digest(digests) != said["components"][0]:
        what = f"component {component} is not the one that the parties committed"
        raise VerificationError("start", what, "whoever handed it over altered it")
    return parts


def _at(tensors: Mapping[str, Ring], at: tuple[int, int]) -> dict[str, Ring]:
    prefix = slice_name(at, "")
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
