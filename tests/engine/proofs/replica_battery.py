"""The battery of lies at one of several workers, with proofs of everything. By hand, like ``battery``.

``python tests/engine/proofs/replica_battery.py --cases 100 --seed 1`` trains two steps on two replicas, stages or
tensor ranks for each case, and a silent one between them, whose verdicts are heard in the last. One worker of one party
lies once in a step: it stands by an altered message, or one message is altered on its way to one peer. From then on no
two honest parties may release what opens something, no honest worker may learn it, and every pair that one names must
have the liar in it. A lie without effect, in bits that mean nothing, leaves every share of every worker as in the
honest run: such a case is void.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter

import torch
from proof_kit import alter, altered
from replica_kit import Outcome, job_of, train

from uvcc_engine.contract.errors import ProofFailedError
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.plane.api import Tag
from uvcc_engine.transcript.formats import kinds

SIZES = (Topology(2), Topology(1, 2), Topology(1, 1, 2))
ERRORS = ("one", "top", "random", "bit", "swapped", "all")
JOB = job_of(verify="proofs", reveal=("loss",), steps=3, loss_every=2)
STREAM = 1000
"""How far apart the numbers of two streams' messages are (``replica_kit``)."""
_OF_THE_PROOF = (kinds.PROOF, kinds.COIN)


def one_lie(size: Topology, rng: random.Random) -> tuple[Outcome, int, int, str]:
    """What came of a lie: how all ended, the liar's party, the step, and what it did ("" if there was no such
    message)."""
    liar, epoch, how = rng.choice(list(size.coords())), rng.randrange(JOB.steps), rng.choice(ERRORS)
    number, did = STREAM * rng.randrange(3) + rng.randrange(60), list[str]()

    def stands_by(at: int, which: int, data: torch.Tensor) -> None:
        if (at, which) == (epoch, number) and not did:
            did.append(f"stands by {how}")
            alter(data, how, rng)

    if rng.random() < 0.5:
        return train(JOB, size, stands_by=stands_by, liar=liar, defers=True), liar.party, epoch, "".join(did)
    seen = Counter[int]()

    def tamper(c: Coord, dst: int, tag: Tag, body: bytes) -> bytes:
        if c != liar or tag.epoch != epoch or tag.kind in (*_OF_THE_PROOF, kinds.OPEN):
            return body
        seen[tag.stream] += 1
        if STREAM * tag.stream + seen[tag.stream] != number or did:
            return body
        did.append(f"tells one peer {how}")
        return altered(body, how, rng)

    return train(JOB, size, tamper=tamper, defers=True), liar.party, epoch, "".join(did)


def verdict(found: Outcome, honest: Outcome, liar: int, epoch: int) -> str:
    """``caught``, ``void``, or what is wrong."""
    if not any(found.errors.values()):
        same = all(
            torch.equal(t, honest.workers[c].state[name])
            for c, w in found.workers.items()
            for name, t in w.state.items()
        )
        return "void" if same else "undetected"
    released = {c.party for c, at in found.opened if at >= epoch} - {liar}
    silent = not JOB.reveals_loss(epoch)
    if len(released) == 2 or any(len(w.losses) > epoch + silent for c, w in found.workers.items() if c.party != liar):
        return "opened"
    for c, error in found.errors.items():
        if c.party != liar and isinstance(error, ProofFailedError) and liar not in error.pair:
            return "misnamed"
    proofs = [isinstance(e, ProofFailedError) for c, e in found.errors.items() if c.party != liar]
    return "caught by all" if all(proofs) else "caught otherwise"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    honest = {size: train(JOB, size, defers=True) for size in SIZES}
    counts = Counter[str]()
    tried = 0
    while sum(counts.values()) < args.cases:
        rng = random.Random(f"{args.seed} {tried}")
        tried += 1
        size = SIZES[tried % len(SIZES)]
        found, liar, epoch, did = one_lie(size, rng)
        if not did:
            continue
        word = verdict(found, honest[size], liar, epoch)
        counts[word] += 1
        if word in ("undetected", "opened", "misnamed"):
            case = {"case": tried - 1, "size": str(size), "liar": liar, "step": epoch, "lie": did, "is": word}
            print(json.dumps(case), flush=True)
        if sum(counts.values()) % 10 == 0:
            print(json.dumps(counts), file=sys.stderr, flush=True)
    print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main()
