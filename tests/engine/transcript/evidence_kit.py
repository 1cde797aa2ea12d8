"""Three workers of one subsession with their real evidence, without a network."""

from __future__ import annotations

from pathlib import Path

from uvcc_engine.bench.work.rehearsal import (
    CODE_HASH,
    agree,
    commitment,
    exchange,
    finish,
    make_policy,
    open_worker,
    revealed,
)
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.transcript.exchange.evidence import WorkerEvidence
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.proof.bundle import POLICY_FILE, SIGNATURES_FILE, assemble_folder
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.transcript.terms.policy import sign_policy, write_signatures

STEPS = 4
Workers = dict[int, WorkerEvidence]


class World:
    """Three workers of one subsession on their own pods."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.identities = [Identity.create_seeded(folder / f"id{p}", b"%d" % p) for p in range(3)]
        self.policy = make_policy(self.identities, Topology(), STEPS)
        self.workers: Workers = {}

    def open(self, resume: int | None = None) -> Workers:
        self.close()
        self.workers = {
            p: open_worker(self.folder, self.identities[p], self.policy, Coord(0, p, 0, 0), resume) for p in range(3)
        }
        if resume:
            agree(self.workers)
        return self.workers

    def steps(self, epochs: range) -> None:
        for epoch in epochs:
            for p, w in self.workers.items():
                if epoch == 0:
                    w.input(commitment(p))
                w.begin(epoch)
            exchange(self.workers, epoch)
            end_epoch(self.workers, epoch)
            agree(self.workers)

    def end(self) -> None:
        for w in self.workers.values():
            w.begin(STEPS)
        exchange(self.workers, STEPS)
        finish(self.workers)

    def roots(self, party: int) -> list[bytes]:
        return (self.folder / f"pod{party}" / f"transcript_p{party}r0s0t0" / leaf_file.ROOTS).read_bytes().splitlines()

    def close(self) -> None:
        for w in self.workers.values():
            w.close()

    def transcript(self, party: int) -> Path:
        return self.folder / f"pod{party}" / f"transcript_p{party}r0s0t0"

    def bundle(self) -> Path:
        """The finished run's bundle."""
        (self.folder / POLICY_FILE).write_bytes(self.policy.canonical)
        signed = {p: sign_policy(i, self.policy, CODE_HASH) for p, i in enumerate(self.identities)}
        write_signatures(self.folder / SIGNATURES_FILE, signed)
        return assemble_folder(self.folder)


def end_epoch(workers: Workers, epoch: int) -> None:
    for w in workers.values():
        w.finish(epoch, revealed(w.policy, epoch))
