"""Triton kernels: fused ring arithmetic, a plain 64-bit matrix product, byte digits, and the ChaCha20 key stream.

Each gives the bits of its CPU counterpart; Triton's interpreter runs them all without a GPU.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from uvcc_engine.mpc.kernels.gemm.limbs import EXACT_INNER

_ELEMENTS = 1024


def _grid(n: int, block: int = _ELEMENTS) -> tuple[int]:
    return (triton.cdiv(n, block),)


@triton.jit
def _cross(a, b, c, d, out, n, TERMS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.load(a + at, mask=inside, other=0) * tl.load(b + at, mask=inside, other=0)
    if TERMS == 2:
        total += tl.load(c + at, mask=inside, other=0) * tl.load(d + at, mask=inside, other=0)
    tl.store(out + at, total, mask=inside)


def cross(xs: list[Tensor], ys: list[Tensor]) -> Tensor:
    """``sum_i xs[i] ys[i]`` for one or two terms of equal, contiguous shape."""
    out = torch.empty_like(xs[0])
    n = out.numel()
    _cross[_grid(n)](xs[0], ys[0], xs[-1], ys[-1], out, n, TERMS=len(xs), BLOCK=_ELEMENTS)
    return out


@triton.jit(do_not_specialize=["scale"])
def _blind(z, plus, minus, out, scale, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(z + at, mask=inside, other=0) * scale.to(tl.int64)
    value += tl.load(plus + at, mask=inside, other=0) - tl.load(minus + at, mask=inside, other=0)
    tl.store(out + at, value, mask=inside)


def blind(z: Tensor, factor: int, plus: Tensor, minus: Tensor) -> Tensor:
    """``z factor + plus - minus``. All have one shape."""
    out = torch.empty_like(z)
    _blind[_grid(z.numel())](z, plus, minus, out, factor, z.numel(), BLOCK=_ELEMENTS)
    return out


@triton.jit
def _truncate_deal(z, left, right, k, m, low, masked, dealt, n, S: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = -(tl.load(left + at, mask=inside, other=0) + tl.load(right + at, mask=inside, other=0))
    ones: tl.constexpr = (1 << S) - 1
    r = (total << S) | (tl.load(low + at, mask=inside, other=0).to(tl.int64) & ones)
    tl.store(masked + at, tl.load(z + at, mask=inside, other=0) + r, mask=inside)
    overflow = ((total >> (64 - S)) & ones) - tl.load(k + at, mask=inside, other=0).to(tl.int64)
    top = ((r >> 63) & 1) - tl.load(m + at, mask=inside, other=0).to(tl.int64)
    kind = dealt.dtype.element_ty
    tl.store(dealt + at, overflow.to(kind), mask=inside)
    tl.store(dealt + n + at, top.to(kind), mask=inside)


def truncate_deal(
    z: Tensor, left: Tensor, right: Tensor, k: Tensor, m: Tensor, low: Tensor, s: int
) -> tuple[Tensor, Tensor]:
    """See ``Kernels.truncate_deal``."""
    masked = torch.empty_like(z)
    dealt = torch.empty((2, *z.shape), dtype=k.dtype, device=z.device)
    n = z.numel()
    _truncate_deal[_grid(n)](z, left, right, k, m, low, masked, dealt, n, S=s, BLOCK=_ELEMENTS)
    return masked, dealt


@triton.jit
def _truncate_deal_own(z, left, drawn, more, low, dealt, right, n, S: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    own = tl.load(z + at, mask=inside, other=0)
    ones: tl.constexpr = (1 << S) - 1
    upper: tl.constexpr = (1 << (64 - S)) - 1
    seen = (own + tl.load(low + at, mask=inside, other=0).to(tl.int64)) & ones
    r = seen - own
    overflow = tl.load(drawn + at, mask=inside, other=0).to(tl.int64)
    overflow += tl.load(more + at, mask=inside, other=0).to(tl.int64)
    total = ((r >> S) & upper) + tl.load(left + at, mask=inside, other=0) + (overflow << (64 - S))
    top = ((r >> 63) & 1) - tl.load(drawn + n + at, mask=inside, other=0).to(tl.int64)
    kind = dealt.dtype.element_ty
    tl.store(dealt + at, seen.to(kind), mask=inside)
    tl.store(dealt + n + at, (top & ones).to(kind), mask=inside)
    tl.store(right + at, -total, mask=inside)


def truncate_deal_own(
    z: Tensor, left: Tensor, drawn: Tensor, more: Tensor, low: Tensor, s: int, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See ``Kernels.truncate_deal_own``."""
    right = torch.empty_like(z) if out is None else out
    dealt = torch.empty((2, *z.shape), dtype=drawn.dtype, device=z.device)
    n = z.numel()
    _truncate_deal_own[_grid(n)](z, left, drawn, more, low, dealt, right, n, S=s, BLOCK=_ELEMENTS)
    return dealt, right


@triton.jit
def _truncate_open(z, a, b, k, m, c, part, n, BITS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(z + at, mask=inside, other=0) + tl.load(a + at, mask=inside, other=0)
    third = tl.load(b + at, mask=inside, other=0).to(tl.int64)
    if BITS < 64:
        third = third & ((1 << BITS) - 1)
    value += third + (1 << 62)
    tl.store(c + at, value, mask=inside)
    clear = ((value >> 63) & 1) - 1  # all ones where the top bit is clear
    found = tl.load(k + at, mask=inside, other=0).to(tl.int64)
    found += tl.load(m + at, mask=inside, other=0).to(tl.int64) & clear
    tl.store(part + at, found.to(part.dtype.element_ty), mask=inside)


def truncate_open(z: Tensor, a: Tensor, b: Tensor, k: Tensor, m: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """See ``Kernels.truncate_open``."""
    c, part = torch.empty_like(z), torch.empty_like(k)
    n = z.numel()
    _truncate_open[_grid(n)](z, a, b, k, m, c, part, n, BITS=bits, BLOCK=_ELEMENTS)
    return c, part


@triton.jit
def _truncate_close(c, part, theirs, out, n, S: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    ones: tl.constexpr = (1 << (64 - S)) - 1
    offset: tl.constexpr = 1 << (62 - S)
    top = tl.load(part + at, mask=inside, other=0).to(tl.int64) + tl.load(theirs + at, mask=inside, other=0).to(
        tl.int64
    )
    value = ((tl.load(c + at, mask=inside, other=0) >> S) & ones) - offset + (top << (64 - S))
    tl.store(out + at, value, mask=inside)


def truncate_close(c: Tensor, part: Tensor, theirs: Tensor, s: int, out: Tensor | None) -> Tensor:
    """See ``Kernels.truncate_close``."""
    to = torch.empty_like(c) if out is None else out
    n = c.numel()
    _truncate_close[_grid(n)](c, part, theirs, to, n, S=s, BLOCK=_ELEMENTS)
    return to


@triton.jit
def _digit(x, D: tl.constexpr):
    return (x >> (8 * D)).to(tl.int8)


@triton.jit
def _gemm64(
    a, b, out, m, n, k, a_b, a_m, a_k, b_b, b_k, b_n,
    CHUNK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """One tile of one product of a batch: digits are cut in registers, and multiplied by the 8-bit units."""
    rows = tl.program_id(0) * M + tl.arange(0, M)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    batch = tl.program_id(2).to(tl.int64)
    bias: tl.constexpr = -0x7F7F7F7F7F7F7F80  # 0x8080808080808080
    total = tl.zeros((M, N), dtype=tl.int64)
    for chunk in range(0, k, CHUNK):
        c0, c1 = tl.zeros((M, N), dtype=tl.int32), tl.zeros((M, N), dtype=tl.int32)
        c2, c3 = tl.zeros((M, N), dtype=tl.int32), tl.zeros((M, N), dtype=tl.int32)
        c4, c5 = tl.zeros((M, N), dtype=tl.int32), tl.zeros((M, N), dtype=tl.int32)
        c6, c7 = tl.zeros((M, N), dtype=tl.int32), tl.zeros((M, N), dtype=tl.int32)
        for start in range(chunk, tl.minimum(chunk + CHUNK, k), K):
            inner = start + tl.arange(0, K)
            at_x = a + batch * a_b + rows[:, None].to(tl.int64) * a_m + inner[None, :].to(tl.int64) * a_k
            at_y = b + batch * b_b + inner[:, None].to(tl.int64) * b_k + columns[None, :].to(tl.int64) * b_n
            x = tl.load(at_x, mask=(rows[:, None] < m) & (inner[None, :] < k), other=0)
            y = tl.load(at_y, mask=(inner[:, None] < k) & (columns[None, :] < n), other=0)
            x, y = (x + bias) ^ bias, (y + bias) ^ bias
            x0, x1, x2, x3 = _digit(x, 0), _digit(x, 1), _digit(x, 2), _digit(x, 3)
            x4, x5, x6, x7 = _digit(x, 4), _digit(x, 5), _digit(x, 6), _digit(x, 7)
            y0, y1, y2, y3 = _digit(y, 0), _digit(y, 1), _digit(y, 2), _digit(y, 3)
            y4, y5, y6, y7 = _digit(y, 4), _digit(y, 5), _digit(y, 6), _digit(y, 7)
            c0 = tl.dot(x0, y0, c0, out_dtype=tl.int32)
            c1 = tl.dot(x1, y0, tl.dot(x0, y1, c1, out_dtype=tl.int32), out_dtype=tl.int32)
            c2 = tl.dot(x1, y1, tl.dot(x0, y2, c2, out_dtype=tl.int32), out_dtype=tl.int32)
            c2 = tl.dot(x2, y0, c2, out_dtype=tl.int32)
            c3 = tl.dot(x1, y2, tl.dot(x0, y3, c3, out_dtype=tl.int32), out_dtype=tl.int32)
            c3 = tl.dot(x3, y0, tl.dot(x2, y1, c3, out_dtype=tl.int32), out_dtype=tl.int32)
            c4 = tl.dot(x1, y3, tl.dot(x0, y4, c4, out_dtype=tl.int32), out_dtype=tl.int32)
            c4 = tl.dot(x3, y1, tl.dot(x2, y2, c4, out_dtype=tl.int32), out_dtype=tl.int32)
            c4 = tl.dot(x4, y0, c4, out_dtype=tl.int32)
            c5 = tl.dot(x1, y4, tl.dot(x0, y5, c5, out_dtype=tl.int32), out_dtype=tl.int32)
            c5 = tl.dot(x3, y2, tl.dot(x2, y3, c5, out_dtype=tl.int32), out_dtype=tl.int32)
            c5 = tl.dot(x5, y0, tl.dot(x4, y1, c5, out_dtype=tl.int32), out_dtype=tl.int32)
            c6 = tl.dot(x1, y5, tl.dot(x0, y6, c6, out_dtype=tl.int32), out_dtype=tl.int32)
            c6 = tl.dot(x3, y3, tl.dot(x2, y4, c6, out_dtype=tl.int32), out_dtype=tl.int32)
            c6 = tl.dot(x5, y1, tl.dot(x4, y2, c6, out_dtype=tl.int32), out_dtype=tl.int32)
            c6 = tl.dot(x6, y0, c6, out_dtype=tl.int32)
            c7 = tl.dot(x1, y6, tl.dot(x0, y7, c7, out_dtype=tl.int32), out_dtype=tl.int32)
            c7 = tl.dot(x3, y4, tl.dot(x2, y5, c7, out_dtype=tl.int32), out_dtype=tl.int32)
            c7 = tl.dot(x5, y2, tl.dot(x4, y3, c7, out_dtype=tl.int32), out_dtype=tl.int32)
            c7 = tl.dot(x7, y0, tl.dot(x6, y1, c7, out_dtype=tl.int32), out_dtype=tl.int32)
        total += c0.to(tl.int64) + (c1.to(tl.int64) << 8) + (c2.to(tl.int64) << 16) + (c3.to(tl.int64) << 24)
        total += (c4.to(tl.int64) << 32) + (c5.to(tl.int64) << 40) + (c6.to(tl.int64) << 48) + (c7.to(tl.int64) << 56)
    place = batch * m * n + rows[:, None].to(tl.int64) * n + columns[None, :]
    tl.store(out + place, total, mask=(rows[:, None] < m) & (columns[None, :] < n))


def gemm64(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` modulo 2^64 for ``[m, k]`` and ``[k, n]``, or batches ``[B, m, k]`` and ``[B, k, n]`` of them, of any
    strides and sizes: digits as in ``limbs``, but never written to memory."""
    x, y = (one if one.dim() == 3 else one[None] for one in (a, b))
    (batch, m, k), n = x.shape, y.shape[2]
    out = torch.empty(batch, m, n, dtype=torch.int64, device=a.device)
    grid = triton.cdiv(m, 64), triton.cdiv(n, 16), batch  # eight sums of a wider tile do not fit into registers
    _gemm64[grid](
        x, y, out, m, n, k, *x.stride(), *y.stride(),
        CHUNK=EXACT_INNER, M=64, N=16, K=32, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out if a.dim() == 3 else out[0]


@triton.jit
def _split(x, out, rows, columns, row_step, digit_step, REVERSED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < rows * columns
    bias: tl.constexpr = -0x7F7F7F7F7F7F7F80  # 0x8080808080808080
    value = (tl.load(x + at, mask=inside, other=0) + bias) ^ bias
    place = (at // columns) * row_step + at % columns
    for d in tl.static_range(8):
        to = 7 - d if REVERSED else d
        tl.store(out + place + to * digit_step, (value >> (8 * d)).to(tl.int8), mask=inside)


def split_left(xs: list[Tensor]) -> Tensor:
    """Matrices ``[m, k]`` side by side to digits ``[m, 8, sum k]``; see ``limbs``."""
    inner = sum(x.shape[1] for x in xs)
    out = torch.empty(xs[0].shape[0], 8, inner, dtype=torch.int8, device=xs[0].device)
    at = 0
    for x in xs:
        m, k = x.shape
        _split[_grid(m * k)](x.contiguous(), out[:, :, at:], m, k, 8 * inner, inner, REVERSED=False, BLOCK=_ELEMENTS)
        at += k
    return out


def split_right(ys: list[Tensor]) -> Tensor:
    """Matrices ``[k, n]`` one above the other to digits ``[n, 8, sum k]``, highest first: as 8-bit units want a right
    factor, column by column."""
    inner, n = sum(y.shape[0] for y in ys), ys[0].shape[1]
    out = torch.empty(n, 8, inner, dtype=torch.int8, device=ys[0].device)
    at = 0
    for y in ys:
        k = y.shape[0]
        _split[_grid(k * n)](y.t().contiguous(), out[:, :, at:], n, k, 8 * inner, inner, REVERSED=True, BLOCK=_ELEMENTS)
        at += k
    return out


@triton.jit
def _combine(a, b, c, d, e, f, g, h, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.load(a + at, mask=inside, other=0).to(tl.int64)
    total += tl.load(b + at, mask=inside, other=0).to(tl.int64) << 8
    total += tl.load(c + at, mask=inside, other=0).to(tl.int64) << 16
    total += tl.load(d + at, mask=inside, other=0).to(tl.int64) << 24
    total += tl.load(e + at, mask=inside, other=0).to(tl.int64) << 32
    total += tl.load(f + at, mask=inside, other=0).to(tl.int64) << 40
    total += tl.load(g + at, mask=inside, other=0).to(tl.int64) << 48
    total += tl.load(h + at, mask=inside, other=0).to(tl.int64) << 56
    tl.store(out + at, total, mask=inside)


def combine(parts: list[Tensor]) -> Tensor:
    """``sum_s parts[s] 2^(8 s)`` of eight int32 matrices."""
    out = torch.empty(parts[0].shape, dtype=torch.int64, device=parts[0].device)
    _combine[_grid(out.numel())](*parts, out, out.numel(), BLOCK=_ELEMENTS)
    return out


@triton.jit
def _rotate(x, LEFT: tl.constexpr):
    return (x << LEFT) | (x >> (32 - LEFT))


@triton.jit
def _quarter(a, b, c, d):
    a += b
    d = _rotate(d ^ a, 16)
    c += d
    b = _rotate(b ^ c, 12)
    a += b
    d = _rotate(d ^ a, 8)
    c += d
    b = _rotate(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _word(x, BLOCK: tl.constexpr):
    return tl.zeros((BLOCK,), dtype=tl.uint32) + x.to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7", "first", "n0", "n1", "n2"])
def _chacha20(out, k0, k1, k2, k3, k4, k5, k6, k7, first, n0, n1, n2, blocks, BLOCK: tl.constexpr):
    block = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = block < blocks
    none = tl.zeros((BLOCK,), dtype=tl.uint32)
    i0, i1, i2, i3 = none + 0x61707865, none + 0x3320646E, none + 0x79622D32, none + 0x6B206574  # "expand 32-byte k"
    i4, i5, i6, i7 = _word(k0, BLOCK), _word(k1, BLOCK), _word(k2, BLOCK), _word(k3, BLOCK)
    i8, i9, i10, i11 = _word(k4, BLOCK), _word(k5, BLOCK), _word(k6, BLOCK), _word(k7, BLOCK)
    i12 = _word(first, BLOCK) + block.to(tl.uint32)
    i13, i14, i15 = _word(n0, BLOCK), _word(n1, BLOCK), _word(n2, BLOCK)
    x0, x1, x2, x3, x4, x5, x6, x7 = i0, i1, i2, i3, i4, i5, i6, i7
    x8, x9, x10, x11, x12, x13, x14, x15 = i8, i9, i10, i11, i12, i13, i14, i15
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    to = out + block * 16
    tl.store(to, x0 + i0, mask=inside)
    tl.store(to + 1, x1 + i1, mask=inside)
    tl.store(to + 2, x2 + i2, mask=inside)
    tl.store(to + 3, x3 + i3, mask=inside)
    tl.store(to + 4, x4 + i4, mask=inside)
    tl.store(to + 5, x5 + i5, mask=inside)
    tl.store(to + 6, x6 + i6, mask=inside)
    tl.store(to + 7, x7 + i7, mask=inside)
    tl.store(to + 8, x8 + i8, mask=inside)
    tl.store(to + 9, x9 + i9, mask=inside)
    tl.store(to + 10, x10 + i10, mask=inside)
    tl.store(to + 11, x11 + i11, mask=inside)
    tl.store(to + 12, x12 + i12, mask=inside)
    tl.store(to + 13, x13 + i13, mask=inside)
    tl.store(to + 14, x14 + i14, mask=inside)
    tl.store(to + 15, x15 + i15, mask=inside)


def chacha20(key: bytes, nonce: bytes, block: int, out: Tensor) -> None:
    """RFC 8439 key stream from ``block`` on into ``out``: 32-byte key, 12-byte nonce, contiguous, of any shape."""
    nbytes = out.numel() * out.element_size()
    blocks = triton.cdiv(nbytes, 64)
    whole = out.view(-1).view(torch.uint8)
    straight = nbytes % 64 == 0 and whole.storage_offset() % 4 == 0
    stream = whole.view(torch.int32) if straight else torch.empty(blocks * 16, dtype=torch.int32, device=out.device)
    # The key goes as arguments of the launch: a tensor of it would be a copy to the device that the host waits for.
    words = struct.unpack("<8i", key), _signed(block), *struct.unpack("<3i", nonce)
    _chacha20[_grid(blocks, 128)](stream, *words[0], *words[1:], blocks, BLOCK=128)
    if not straight:
        whole.copy_(stream.view(torch.uint8)[:nbytes])


def _signed(word: int) -> int:
    """The signed number of 32 bits that has the bits of ``word``."""
    return (word + (1 << 31)) % (1 << 32) - (1 << 31)
