"""The operations that differ per device. Everything else in the protocols is plain tensor arithmetic."""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError


class Kernels(Protocol):
    """Local arithmetic on int64 tensors that wrap modulo 2^64."""

    def mul(self, x_lo: Tensor, y_lo: Tensor, x_hi: Tensor, y_hi: Tensor) -> Tensor:
        """``x_lo (y_lo + y_hi) + x_hi y_lo`` elementwise, broadcasting: this party's part of a product."""

    def matmul(self, x_lo: Tensor, y_lo: Tensor, x_hi: Tensor, y_hi: Tensor) -> Tensor:
        """The same for matrices ``[..., m, k]`` and ``[..., k, n]``: two local matrix products."""

    def to_planes(self, x: Tensor) -> Tensor:
        """``[n]`` elements -> ``[64, ceil(n / 64)]`` words: bit ``e`` of ``planes[b, w]`` is bit ``b`` of ``x[64 w +
        e]``."""

    def bits_to_ints(self, words: Tensor, n: int) -> Tensor:
        """``[..., ceil(n / 64)]`` words -> ``[..., n]`` int64 zeros and ones."""


@lru_cache(maxsize=8)
def kernels_for(device: torch.device) -> Kernels:
    """The kernels of a device. ConfigError for a device without any."""
    if device.type == "cpu":
        from uvcc_engine.mpc.kernels.cpu import CpuKernels

        return CpuKernels()
    raise ConfigError(f"no secret-sharing kernels for device {device}", "run the job on cpu")
