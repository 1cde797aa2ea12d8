"""Which kernels a device gets."""

from __future__ import annotations

from functools import lru_cache

import torch

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.kernels.base import Kernels
from uvcc_engine.mpc.kernels.cpu import CpuKernels


@lru_cache(maxsize=8)
def kernels_for(device: torch.device) -> Kernels:
    """The kernels of a device. ConfigError for a device without any."""
    if device.type == "cpu":
        return CpuKernels()
    if device.type == "cuda":
        try:
            from uvcc_engine.mpc.kernels.cuda import CudaKernels
        except ImportError as why:
            raise ConfigError(f"device {device} needs Triton: {why}", "install triton, or run the job on cpu") from why
        return CudaKernels()
    raise ConfigError(f"no secret-sharing kernels for device {device}", "run the job on cpu")
