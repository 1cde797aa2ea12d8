"""Public coins: long ones expanded from short seeds.

The seed of the coins on a prover's messages is a piece of the other two parties' common random stream, which the prover
does not know. Each of the two tells it a half once it has received all messages that the coins are about, so the prover
learns the seed only after both are fixed.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

from uvcc_engine.proofs.algebra import Algebra

SEED_WORDS = 4  # 256 bits, of which each verifier tells a half


class PublicCoins:
    """The coins that follow from a seed, in an order that all who know it keep: ChaCha20 (RFC 8439)."""

    def __init__(self, algebra: Algebra, seed: Tensor, label: bytes) -> None:
        """``seed``: int64 ``[SEED_WORDS]``; ``label`` says what for."""
        key = hashlib.sha256(b"UVCC_PROOF_COINS_V1" + label + seed.contiguous().numpy().tobytes()).digest()
        self._algebra = algebra
        self._stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()

    def words(self, count: int) -> Tensor:
        """The next ``count`` challenges, as the words that they come from: ``[count]``."""
        found = np.zeros(count, np.int64)
        self._stream.update_into(found.data.cast("B"), found.data.cast("B"))
        return torch.from_numpy(found)

    def take(self, count: int) -> Tensor:
        """The next ``count`` challenges: ``[count, width]``."""
        return self._algebra.challenges(self.words(count))
