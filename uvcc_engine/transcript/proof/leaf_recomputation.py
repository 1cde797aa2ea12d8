"""A worker's leaves, recomputed: roots, counts and pair digests as it signed them, and what messages there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from uvcc_engine.contract.errors import VerificationError
from uvcc_engine.transcript.formats.reading import shown
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.leaves.replay import peers_of, summarise
from uvcc_engine.transcript.leaves.roots import sid_of
from uvcc_engine.transcript.proof.bundle import WorkerPart
from uvcc_engine.transcript.proof.form import MessageCount
from uvcc_engine.transcript.terms.policy import Policy


def equal(check: str, what: str, stated: Any, found: Any) -> None:
    """Raise VerificationError with both values unless they are equal."""
    if stated != found:
        one, two = (shown(v.hex() if isinstance(v, bytes) else v) for v in (stated, found))
        raise VerificationError(check, f"{what} is {one}, recomputed {two}")


def recompute(policy: Policy, worker: WorkerPart, folder: Path) -> list[MessageCount]:
    """Recompute every epoch root, count and pair digest of a worker from its leaves, streaming. Returns what messages
    each epoch has."""
    sid, tallies = sid_of(policy.sid_job, worker.coord), list[MessageCount]()
    at = 0
    for file, block in leaf_file.blocks(folder / leaf_file.LEAVES):
        where = f"epoch {block.epoch} of {worker.coord}"
        if at >= len(worker.roots):
            raise VerificationError("transcript", f"{where} follows the last signed epoch {len(worker.roots) - 1}")
        signed = worker.roots[at][1].root
        equal("transcript", f"epoch number {at} of {worker.coord}", block.epoch, signed.epoch)
        equal("transcript", f"session of {where}", block.sid_sub, sid)
        equal("transcript", f"leaves in {where}", block.count, signed.leaves)
        equal("transcript", f"the file's root of {where}", block.root, signed.root)
        tallies.append(MessageCount())
        records = tallies[-1].counted(leaf_file.chunks(file, block))
        found = summarise(records, sid, block.epoch, worker.coord.party)
        equal("transcript", f"the signed root of {where}", signed.root, found.root)
        equal("transcript", f"opened leaves in {where}", signed.opened, found.opened)
        for peer in peers_of(worker.coord.party):
            equal("pairing", f"digest of {where} with P{peer}", signed.pairs[peer], found.pairs[peer])
        at += 1
    equal("transcript", f"the number of epochs in the file of {worker.coord}", at, len(worker.roots))
    return tallies
