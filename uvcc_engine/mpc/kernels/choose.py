"""Which kernels a device gets."""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache
from typing import Final

import torch

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.kernels.base import Kernels
from uvcc_engine.mpc.kernels.cpu import CpuKernels

KERNELS_ENV: Final = "UVCC_KERNELS"


def device_for(wanted: str) -> torch.device:
    """Where a private job computes: ``auto`` is a GPU that torch and Triton reach, else the CPU.

    Raises ConfigError for ``cuda`` where there is none.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    lacking = "" if torch.cuda.is_available() else f"torch {torch.__version__} reaches no GPU here"
    if not lacking and importlib.util.find_spec("triton") is None:
        lacking = "Triton, which the kernels need, is not installed"
    if not lacking:
        return torch.device("cuda", 0)
    if wanted == "cuda":
        raise ConfigError(f"job.device is cuda, and {lacking}", "take pods with GPUs and a CUDA build of PyTorch")
    return torch.device("cpu")


@lru_cache(maxsize=8)
def kernels_for(device: torch.device) -> Kernels:
    """The kernels of a device. ConfigError for a device without any.

    ``UVCC_KERNELS=triton`` takes those of a GPU on a CPU, too: for tests, in Triton's interpreter.
    """
    if device.type == "cpu" and os.environ.get(KERNELS_ENV, "") == "triton":
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise ConfigError(f"{KERNELS_ENV}=triton on a CPU", "set TRITON_INTERPRET=1, too")
        from uvcc_engine.mpc.kernels.cuda import CudaKernels

        return CudaKernels()
    if device.type == "cpu":
        return CpuKernels()
    if device.type == "cuda":
        try:
            from uvcc_engine.mpc.kernels.cuda import CudaKernels
        except ImportError as why:
            raise ConfigError(f"device {device} needs Triton: {why}", "install triton, or run the job on cpu") from why
        return CudaKernels()
    raise ConfigError(f"no secret-sharing kernels for device {device}", "run the job on cpu")
