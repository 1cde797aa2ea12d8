"""The GPU's own rates, and those of products modulo 2^64 on it: what bounds ``bench mpc --device cuda``.

A product modulo 2^64 is 36 products of 8-bit digits (``kernels.gemm.limbs``), so the rate of 8-bit products over 36 is
its floor. Times are the device's own, of calls that follow one another.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from uvcc_engine.contract.machine.benchrows import Row, held, row
from uvcc_engine.mpc.kernels.choose import kernels_for

DIGIT_PRODUCTS: Final = 36
RING_SHARE: Final = 0.5  # of the 8-bit rate over 36, that large products must have
GOAL: Final = 10e12  # multiplications modulo 2^64 a second, of products of 8,192, on an H100
SIDES: Final = (1024, 4096, 8192)
_COPIED: Final = 1 << 30
_LEAST_MS: Final = 20.0


def measured(runs: int) -> dict[str, list[float]]:
    """Name -> rates a second: ``int8`` and ``ring_N`` multiplications, ``copied`` bytes (read and written)."""
    device = torch.device("cuda")
    found: dict[str, list[float]] = {}
    side = SIDES[-1]
    a, b = (torch.randint(-128, 128, (side, side), dtype=torch.int8, device=device) for _ in range(2))
    found["int8"] = _rates(lambda: torch._int_mm(a, b.t()), side**3, runs)
    source = torch.randint(0, 255, (_COPIED,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found["copied"] = _rates(lambda: target.copy_(source), 2 * _COPIED, runs)
    for n in SIDES:
        x, y = (_ring(n, device) for _ in range(2))
        found[f"ring_{n}"] = _rates(lambda x=x, y=y, n=n: kernels_for(device).right_factor([y], n)([x]), n**3, runs)  # type: ignore[misc]
    return found


def rows(rates: dict[str, list[float]]) -> list[Row]:
    """As rows of a benchmark."""
    digits = statistics.median(rates["int8"])
    made = [
        row("machine_int8_gemm", "rate", "TMAC/s", [one / 1e12 for one in rates["int8"]]),
        row("machine_gpu_copy", "rate", "GB/s", [one / 1e9 for one in rates["copied"]]),
    ]
    for n in SIDES:
        floor = digits / DIGIT_PRODUCTS / 1e12
        one = row(f"ring_gemm_gpu_{n}", "rate", "TMAC/s", [rate / 1e12 for rate in rates[f"ring_{n}"]], floor)
        made.append(held(one, RING_SHARE * floor, at_least=True) if n == SIDES[-1] else one)
    return made


def described() -> str:
    """The GPU, and what drives it."""
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"


def _ring(n: int, device: torch.device) -> Tensor:
    words = torch.randint(-(2**31), 2**31, (n, 2 * n), dtype=torch.int32, device=device)
    return words.view(torch.int64)


def _rates(work: Callable[[], object], size: float, runs: int) -> list[float]:
    """``size`` over the seconds of a call, of so many runs."""
    work()
    found: list[float] = []
    calls = 1
    while len(found) < runs:
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begun.record()
        for _ in range(calls):
            work()
        ended.record()
        ended.synchronize()
        took = begun.elapsed_time(ended)
        if took < _LEAST_MS:
            calls *= 2
            continue
        found.append(size * calls / (took / 1e3))
    return found
