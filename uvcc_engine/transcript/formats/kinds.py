"""Kinds of transcript messages. Numbers are part of the leaf format: never reuse one."""

from __future__ import annotations

from typing import Final

OPEN: Final = 1  # a missing share or half of one, or its hash, of a value that becomes public; a verdict before it
RESHARE: Final = 2  # the additive product share that re-establishes replication
DEALER: Final = 3  # truncation and comparison material from the dealing party
INPUT: Final = 5  # a client input was unsealed (local leaf)
RESULT: Final = 6  # a revealed or final value (local leaf)
CHECKPOINT: Final = 7  # a checkpoint became durable (local leaf)
POLICY: Final = 8  # the policy this session runs under (local leaf)
PIPELINE: Final = 9  # activations, gradients or a shared weight between stages, inside a party (local leaf)
START: Final = 10  # the committed checkpoint of another policy that this session starts from (local leaf)
PROOF: Final = 11  # a share of a proof's coefficients, a masked end of its vectors, or a verdict
COIN: Final = 12  # a verifier's coins, told to the prover after what they are about
FINDING: Final = 13  # of the second round, after a proof that failed: no finished epoch has one
AUDIT: Final = 14  # what three coins drew, by which proofs of a covert step are made or left out

NAMES: Final = {
    OPEN: "OPEN",
    RESHARE: "RESHARE",
    DEALER: "DEALER",
    INPUT: "INPUT",
    RESULT: "RESULT",
    CHECKPOINT: "CHECKPOINT",
    POLICY: "POLICY",
    PIPELINE: "PIPELINE",
    START: "START",
    PROOF: "PROOF",
    COIN: "COIN",
    FINDING: "FINDING",
    AUDIT: "AUDIT",
}
