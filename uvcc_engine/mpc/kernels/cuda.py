"""Kernels on a CUDA device: tensor cores on byte digits for large products, Triton for the fused loops."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from uvcc_engine.mpc.kernels import limbs, triton_ops
from uvcc_engine.mpc.kernels.base import RightFactor
from uvcc_engine.mpc.kernels.plain import PlainKernels

LIMBS_FROM = 1 << 21  # multiplications; below, the plain kernel has less to prepare


class CudaKernels(PlainKernels):
    """``kernels.base.Kernels`` for CUDA. Bit-sliced operations are torch's own elementwise ones."""

    def mul(self, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
        first = xs[0]
        if all(t.shape == first.shape and t.is_contiguous() for t in (*xs, *ys)):
            return triton_ops.cross(list(xs), list(ys))
        return super().mul(xs, ys)

    def blind(self, z: Tensor, factor: int, plus: Tensor, minus: Tensor) -> Tensor:
        return triton_ops.blind(z.contiguous(), factor, plus, minus)

    def right_factor(self, ys: Sequence[Tensor], rows: int) -> RightFactor:
        y = ys[0]
        if y.dim() != 2 or rows == 0:
            return lambda xs: _batched(xs, ys)
        inner, n = sum(one.shape[0] for one in ys), y.shape[1]
        # the byte product wants more than 16 rows and multiples of 8
        fits = rows > 16 and inner % 8 == 0 and n % 8 == 0 and inner <= limbs.MAX_INNER
        if not fits or rows * inner * n < LIMBS_FROM or not limbs.has_fast_bytes(y.device):
            return lambda xs: _sum([triton_ops.gemm64(a, b) for a, b in zip(xs, ys, strict=True)])
        right = triton_ops.split_right(list(ys)).view(-1, n)

        def apply(xs: Sequence[Tensor]) -> Tensor:
            if xs[0].shape[0] <= 16:
                return _sum([triton_ops.gemm64(a, b) for a, b in zip(xs, ys, strict=True)])
            left = triton_ops.split_left(list(xs))
            return triton_ops.combine(limbs.products(left.view(left.shape[0], -1), right))

        return apply

    def truncate_deal(
        self, z: Tensor, left: Tensor, right: Tensor, k: Tensor, m: Tensor, low: Tensor, s: int
    ) -> tuple[Tensor, Tensor]:
        return triton_ops.truncate_deal(z.contiguous(), left, right, k.contiguous(), m.contiguous(), low, s)

    def truncate_open(self, z: Tensor, a: Tensor, b: Tensor, k: Tensor, m: Tensor, s: int) -> tuple[Tensor, Tensor]:
        return triton_ops.truncate_open(z.contiguous(), a.contiguous(), b.contiguous(), k.contiguous(), m.contiguous())

    def truncate_close(self, c: Tensor, part: Tensor, theirs: Tensor, s: int, out: Tensor | None = None) -> Tensor:
        return triton_ops.truncate_close(c, part, theirs.contiguous(), s, out)


def _sum(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _batched(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
    """Products over leading axes, one matrix at a time."""

    def one(x: Tensor, y: Tensor) -> Tensor:
        lead = (x[..., 0, 0] + y[..., 0, 0]).shape
        a = x.expand(*lead, *x.shape[-2:]).reshape(-1, *x.shape[-2:])
        b = y.expand(*lead, *y.shape[-2:]).reshape(-1, *y.shape[-2:])
        made = torch.stack([triton_ops.gemm64(u, v) for u, v in zip(a, b, strict=True)])
        return made.reshape(*lead, x.shape[-2], y.shape[-1])

    return _sum([one(x, y) for x, y in zip(xs, ys, strict=True)])
