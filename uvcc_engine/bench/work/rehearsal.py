"""A whole run's evidence without a network: every worker's real keys and stores, random messages, real agreement.

Benchmarks and tests use it wherever a genuine three-party transcript is needed quickly. As a command,
``python -m MODULE FOLDER REPLICAS STAGES TENSOR STEPS OPS``, for who has no import of it.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uvcc_engine.contract.job.topology import PARTIES, Coord, Topology
from uvcc_engine.transcript.exchange.evidence import WorkerEvidence
from uvcc_engine.transcript.formats import kinds
from uvcc_engine.transcript.proof.bundle import POLICY_FILE, SIGNATURES_FILE, assemble_folder
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.transcript.terms.policy import Policy, PolicyParty, sign_policy, write_signatures

CODE_HASH = hashlib.sha256(b"the wheel").hexdigest()
VALUES = {"loss": 0.25, "accuracy": 0.96875}
_WIRE = (kinds.OPEN, kinds.RESHARE, kinds.DEALER)
_SIZES = (1, 8, 32, 200)
MODEL_JOB: Mapping[str, Any] = {"model": "logistic-digits", "batch": 8, "test_rows": 8}
_RESHARED = 512


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Where the evidence lies and who made it."""

    folder: Path
    identities: Sequence[Identity]
    policy: Policy
    bundle: Path


def commitment(party: int) -> str:
    """SHA-256 of a party's sealed inputs in the rehearsal."""
    return hashlib.sha256(b"sealed inputs %d" % party).hexdigest()


def state_digests(replica: int = 0) -> list[str]:
    """Stand-ins for the digests of the three final share components."""
    return [hashlib.sha256(b"component %d" % i).hexdigest() for i in range(PARTIES)]


def make_policy(
    identities: Sequence[Identity],
    topology: Topology,
    steps: int,
    nonce: str = "00" * 32,
    job: Mapping[str, Any] | None = None,
) -> Policy:
    """A policy that names these identities; ``job`` says more of the job than that there is one."""
    places = (("north", "eu"), ("west", "us"), ("south", "ap"))
    return Policy.build(
        job={"kind": "private", "steps": steps, "lr": 0.1, **(job or {})},
        model_hash=hashlib.sha256(b"the model").hexdigest(),
        code_hash=CODE_HASH,
        topology=topology,
        parties=[PolicyParty(p, identities[p].public, *places[p]) for p in range(PARTIES)],
        owner="clinic",
        commitments=[commitment(p) for p in range(PARTIES)],
        reveal=["loss", "accuracy"],
        limits={"total": 0},
        nonce=nonce,
    )


def exchange(workers: Mapping[int, Any], epoch: int, *, seed: str = "", ops: int = 6) -> None:
    """Random messages between the three workers of a subsession, recorded at both ends."""
    rng = random.Random(f"{seed}/{epoch}")
    for op in range(ops):
        for src in range(PARTIES):
            for dst in range(PARTIES):
                if src == dst or rng.random() < 0.2:
                    continue
                payload = rng.randbytes(rng.choice(_SIZES))
                tag = (epoch, rng.randrange(2), op, rng.choice(_WIRE))
                workers[src].recorder.record(0, dst, tag, payload)
                workers[dst].recorder.record(1, src, tag, payload)


def in_form(workers: Mapping[int, Any], epoch: int, *, seed: str = "", ops: int = 6) -> None:
    """As :func:`exchange`, with the kinds and sizes that a step of ``MODEL_JOB`` cannot do without."""
    rng = random.Random(f"{seed}/{epoch}")
    for op in range(ops):
        for src in range(PARTIES):
            for dst in range(PARTIES):
                if src != dst:
                    for kind, size in ((kinds.RESHARE, _RESHARED), (kinds.OPEN, 16)):
                        payload = rng.randbytes(size)
                        workers[src].recorder.record(0, dst, (epoch, 0, op, kind), payload)
                        workers[dst].recorder.record(1, src, (epoch, 0, op, kind), payload)


def agree(workers: Mapping[int, WorkerEvidence]) -> None:
    """Every worker of a subsession sends both peers its root and checks theirs."""
    for a in workers:
        for b in workers:
            if a != b:
                workers[b].check(a, workers[a].agreement(b))


def revealed(policy: Policy, epoch: int) -> dict[str, float]:
    """What the step of an epoch reveals in the rehearsal; the last one what the result repeats."""
    left = policy.steps - policy.first_step - 1 - epoch
    return {name: VALUES[name] + left / 3.0 for name in policy.step_values(epoch)}


def finish(workers: Mapping[int, WorkerEvidence], values: Mapping[str, float] = VALUES) -> None:
    """Last epoch, its agreement, result and closing of one subsession."""
    for w in workers.values():
        w.outcome(values, state_digests(w.coord.replica))
    agree(workers)
    for w in workers.values():
        w.result()
    for a in workers:
        for b in workers:
            if a != b:
                workers[b].check_closing(a, workers[a].closing(b))


def rehearse(
    folder: Path,
    *,
    topology: Topology | None = None,
    steps: int = 3,
    ops: int = 6,
    nonce: str = "00" * 32,
    seed: bytes = b"rehearsal",
    checkpoint_every: int = 2,
    traffic: Callable[..., None] = exchange,
    job: Mapping[str, Any] | None = None,
) -> Rehearsal:
    """Run ``steps`` epochs and the result epoch of every subsession, then assemble ``folder/proof_bundle.json``.

    Messages are random, so that they have no program's form: a ``job`` that names a model wants ``traffic`` of its own.
    """
    topology = topology or Topology()
    identities = [Identity.create_seeded(folder / "identity" / str(p), seed + b" party %d" % p) for p in range(PARTIES)]
    more = {} if job is None else {"job": job}
    policy = make_policy(identities, topology, steps, nonce, **more)
    (folder / POLICY_FILE).write_bytes(policy.canonical)
    write_signatures(
        folder / SIGNATURES_FILE, {p: sign_policy(identities[p], policy, CODE_HASH) for p in range(PARTIES)}
    )
    for anchor in [c for c in topology.coords() if c.party == 0]:
        workers = {p: open_worker(folder, identities[p], policy, _with_party(anchor, p)) for p in range(PARTIES)}
        for epoch in range(steps + 1):
            for p, w in workers.items():
                if epoch == 0:
                    w.input(commitment(p))
                elif epoch % checkpoint_every == 0:
                    w.checkpoint(epoch - 1, hashlib.sha256(b"checkpoint %d of %d" % (epoch, p)).hexdigest())
                w.begin(epoch)
            traffic(workers, epoch, seed=str(anchor), ops=ops)
            if epoch < steps:
                for w in workers.values():
                    w.finish(epoch, revealed(policy, epoch))
                agree(workers)
        finish(workers)
        for w in workers.values():
            w.close()
    return Rehearsal(folder, identities, policy, assemble_folder(folder))


def open_worker(
    folder: Path, identity: Identity, policy: Policy, coord: Coord, resume: int | None = None
) -> WorkerEvidence:
    """One worker's evidence below ``folder``, each party in its own run folder."""
    run = folder / f"pod{coord.party}"
    return WorkerEvidence.open(run, identity, policy, coord, resume_epoch=resume)


def _with_party(coord: Coord, party: int) -> Coord:
    return Coord(coord.replica, party, coord.stage, coord.tensor)


def main(argv: Sequence[str]) -> int:
    """Write the evidence of such a run into a folder."""
    folder, (replicas, stages, tensor, steps, ops) = Path(argv[0]), map(int, argv[1:6])
    topology = Topology(replicas, stages, tensor)
    rehearse(folder, topology=topology, steps=steps, ops=ops, traffic=in_form, job=MODEL_JOB)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
