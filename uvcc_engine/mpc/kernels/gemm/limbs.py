"""Matrix products modulo 2^64 on units that multiply 8-bit integers: AMX or VNNI on CPUs, tensor cores on GPUs.

Every ring element is written in eight balanced digits, ``x = sum d_i 2^(8 i) (mod 2^64)`` with ``-128 <= d_i <=
127``, and the product is ``sum_s 2^(8 s) sum_(i+j=s) X_i Y_j`` for ``s < 8``: 36 small products instead of 64. Those
of one ``s`` are a single product of concatenated digits, accumulated in 32 bits. That is exact for ``s < 4`` as long
as ``(s + 1) k 2^14 < 2^31``; for ``s >= 4`` only the result modulo 2^32 matters, and wrapping around is harmless.
(The digit form of Ootomo et al., "DGEMM on integer matrix multiplication unit", IJHPCA 2024, cut to the ring.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)
_BIAS = -0x7F7F7F7F7F7F7F80  # 0x8080808080808080 as a signed number
MAX_INNER = 1 << 15  # (3 + 1) * 2^15 * 2^14 = 2^31: the sum of two such blocks would no longer be exact
EXACT_INNER = 1 << 13  # 8 * 2^13 * 2^14 = 2^30: no sum of 32 bits overflows, so units that saturate will do
DIGITS = 8
UNITS = ("_is_amx_tile_supported", "_is_vnni_supported", "_is_avx512_vnni_supported")  # of torch's versions
RightFactor = Callable[[Tensor, Tensor], Tensor]


def digits(x: Tensor) -> Tensor:
    """Balanced digits, lowest first: int64 ``[...]`` to int8 ``[..., 8]`` (a new tensor)."""
    return ((x + _BIAS) ^ _BIAS).contiguous().view(torch.int8).view(*x.shape, DIGITS)


def split_left(x: Tensor) -> Tensor:
    """``[m, k]`` to int8 ``[m, 8 k]``: digit 0 of the row, then digit 1, and so on."""
    return digits(x).permute(0, 2, 1).reshape(x.shape[0], -1)


def split_right(y: Tensor) -> Tensor:
    """``[k, n]`` to int8 ``[8 k, n]``: digit 7 of all rows first, digit 0 last."""
    return digits(y).permute(2, 0, 1).flip(0).reshape(-1, y.shape[1])


def combine(parts: list[Tensor]) -> Tensor:
    """``sum_s parts[s] 2^(8 s)`` of int32 tensors, modulo 2^64."""
    total = parts[0].to(torch.int64)
    for s, part in enumerate(parts[1:], 1):
        total += part.to(torch.int64) << (8 * s)
    return total


def products(left: Tensor, right: Tensor) -> list[Tensor]:
    """The eight partial products of split matrices ``[m, 8 k]`` and ``[8 k, n]``: int32 ``[m, n]`` each."""
    k = right.shape[0] // DIGITS
    return [torch._int_mm(left[:, : (s + 1) * k], right[(DIGITS - 1 - s) * k :]) for s in range(DIGITS)]


@lru_cache(maxsize=4)
def wraps_and_is_exact(device: torch.device) -> bool:
    """Whether the device's 8-bit products are what this needs: exact below 2^31 (units that add pairs in 16 bits are
    not, at the extremes), wrapping (not saturating) above."""
    try:
        k = 1 << 18
        ones = torch.full((32, k), 127, dtype=torch.int8, device=device)
        high = torch._int_mm(ones, ones.t().contiguous())
        exact = all(_small_is_exact(device, by_column=by_column) for by_column in (False, True))
        exact = exact and all(extremes_are_exact(device, u, v) for u in (-128, 127) for v in (-128, 127))
    except (RuntimeError, NotImplementedError):
        return False
    wrapped = (127 * 127 * k + (1 << 31)) % (1 << 32) - (1 << 31)
    return exact and bool((high == wrapped).all())


def extremes_are_exact(device: torch.device, u: int, v: int) -> bool:
    """Whether products of nothing but ``u`` by nothing but ``v`` are exact, right factors by row and by column."""
    k = 1 << 10
    left, right = (torch.full((32, k), x, dtype=torch.int8, device=device) for x in (u, v))
    found = [torch._int_mm(left, right.t()), torch._int_mm(left, right.t().contiguous())]
    return all(bool((one == u * v * k).all()) for one in found)


@lru_cache(maxsize=4)
def is_exact(device: torch.device) -> bool:
    """Whether the device's 8-bit products, right factors column by column, are exact over ``EXACT_INNER`` elements."""
    k = DIGITS * EXACT_INNER
    try:
        ones = torch.full((32, k), 127, dtype=torch.int8, device=device)
        high = torch._int_mm(ones, ones.t())
        small = _small_is_exact(device, by_column=True)
    except (RuntimeError, NotImplementedError):
        return False
    return small and bool((high == 127 * 127 * k).all())


def _small_is_exact(device: torch.device, *, by_column: bool) -> bool:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-128, 128, (64, 64), generator=generator, dtype=torch.int8) for _ in range(2))
    right = b.t().contiguous().t() if by_column else b
    return torch.equal(torch._int_mm(a.to(device), right.to(device)).cpu(), a.int() @ b.int())


def blocks(lengths: Sequence[int], most: int = EXACT_INNER) -> list[list[tuple[int, int, int]]]:
    """Inner sizes, one after the other, cut into blocks of at most ``most``: each a list of (which, from, to)."""
    made: list[list[tuple[int, int, int]]] = [[]]
    room = most
    for which, length in enumerate(lengths):
        at = 0
        while at < length:
            if room == 0:
                made.append([])
                room = most
            step = min(room, length - at)
            made[-1].append((which, at, at + step))
            at, room = at + step, room - step
    return made


def has_fast_bytes(device: torch.device) -> bool:
    """Whether 8-bit products may be fast enough to be worth 36 of them, and are exact: what has the units for it."""
    if device.type == "cuda":
        return is_exact(device)
    checks: list[Any] = [getattr(torch.cpu, name, None) for name in UNITS]
    if not any(check is not None and bool(check()) for check in checks):
        return False
    exact = wraps_and_is_exact(device)
    if not exact:
        log.info("this processor has units for 8-bit products, but those of torch %s are not exact", torch.__version__)
    return exact
