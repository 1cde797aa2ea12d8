"""Named ranges in a CUDA profiler's timeline (NVTX), when ``runtime.nvtx`` asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from uvcc_engine.contract.errors import ConfigError


@contextmanager
def marked(name: str, on: bool) -> Iterator[None]:
    """A range around the body, if ``on``."""
    if not on:
        yield
        return
    torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


def check_marks(on: bool, device: torch.device) -> None:
    """Refuse to mark ranges that no profiler can see."""
    if on and device.type != "cuda":
        raise ConfigError("runtime.nvtx marks ranges for a CUDA profiler, but no CUDA device is used", "leave it out")
