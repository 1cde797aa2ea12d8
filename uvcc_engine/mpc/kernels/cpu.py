"""Kernels on the CPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class CpuKernels:
    """``kernels.base.Kernels`` with torch and numpy."""

    def mul(self, x_lo: Tensor, y_lo: Tensor, x_hi: Tensor, y_hi: Tensor) -> Tensor:
        return (x_lo * (y_lo + y_hi)).add_(x_hi * y_lo)

    def matmul(self, x_lo: Tensor, y_lo: Tensor, x_hi: Tensor, y_hi: Tensor) -> Tensor:
        return (x_lo @ (y_lo + y_hi)).add_(x_hi @ y_lo)

    def to_planes(self, x: Tensor) -> Tensor:
        flat = x.contiguous().reshape(-1)
        words = -(-flat.numel() // 64)
        raw = np.zeros((words * 64, 8), dtype=np.uint8)
        raw[: flat.numel()] = flat.numpy().view(np.uint8).reshape(-1, 8)
        bits = np.unpackbits(raw, axis=1, bitorder="little")
        packed = np.packbits(np.ascontiguousarray(bits.T), axis=1, bitorder="little")
        return torch.from_numpy(packed.view(np.int64))

    def bits_to_ints(self, words: Tensor, n: int) -> Tensor:
        raw = words.contiguous().numpy().view(np.uint8)
        bits = np.unpackbits(raw, axis=-1, count=n, bitorder="little")
        return torch.from_numpy(bits.astype(np.int64))
