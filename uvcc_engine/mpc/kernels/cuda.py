"""Kernels on a CUDA device: tensor cores on byte digits for large products, Triton for the fused loops."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from uvcc_engine.mpc.kernels import triton_ops
from uvcc_engine.mpc.kernels.base import RightFactor
from uvcc_engine.mpc.kernels.gemm import limbs
from uvcc_engine.mpc.kernels.layout import broadcast_shape
from uvcc_engine.mpc.kernels.plain import PlainKernels

LIMBS_FROM = 1 << 27  # multiplications; below, digits cut in registers have less to prepare


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
        # the byte product wants more than 16 rows, and lines of a multiple of 16 bytes
        fits = rows > 16 and n % 8 == 0 and all(one.shape[0] % 16 == 0 for one in ys)
        if not fits or rows * inner * n < LIMBS_FROM or not limbs.has_fast_bytes(y.device):
            return lambda xs: _sum([triton_ops.gemm64(a, b) for a, b in zip(xs, ys, strict=True)])
        places = limbs.blocks([one.shape[0] for one in ys])
        rights = [triton_ops.split_right([ys[i][lo:hi] for i, lo, hi in block]).view(n, -1).t() for block in places]

        def apply(xs: Sequence[Tensor]) -> Tensor:
            if xs[0].shape[0] <= 16:
                return _sum([triton_ops.gemm64(a, b) for a, b in zip(xs, ys, strict=True)])
            parts = []
            for block, right in zip(places, rights, strict=True):
                left = triton_ops.split_left([xs[i][:, lo:hi] for i, lo, hi in block])
                parts.append(triton_ops.combine(limbs.products(left.view(left.shape[0], -1), right)))
            return _sum(parts)

        return apply

    def truncate_deal(
        self, z: Tensor, left: Tensor, right: Tensor, k: Tensor, m: Tensor, low: Tensor, s: int
    ) -> tuple[Tensor, Tensor]:
        return triton_ops.truncate_deal(z.contiguous(), left, right, k.contiguous(), m.contiguous(), low, s)

    def truncate_deal_own(
        self, z: Tensor, left: Tensor, drawn: Tensor, more: Tensor, low: Tensor, s: int, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        narrow = (drawn.contiguous(), more.contiguous(), low.contiguous())
        return triton_ops.truncate_deal_own(z.contiguous(), left.contiguous(), *narrow, s, out)

    def truncate_open(
        self, z: Tensor, a: Tensor, b: Tensor, k: Tensor, m: Tensor, s: int, bits: int = 64
    ) -> tuple[Tensor, Tensor]:
        given = (z.contiguous(), a.contiguous(), b.contiguous(), k.contiguous(), m.contiguous())
        return triton_ops.truncate_open(*given, bits)

    def truncate_close(self, c: Tensor, part: Tensor, theirs: Tensor, s: int, out: Tensor | None = None) -> Tensor:
        return triton_ops.truncate_close(c, part, theirs.contiguous(), s, out)


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _batched(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
    """Products over leading axes, which broadcast: one launch for all of them."""

    def one(x: Tensor, y: Tensor) -> Tensor:
        lead = broadcast_shape(x.shape[:-2], y.shape[:-2])
        a = x.expand(*lead, *x.shape[-2:]).reshape(-1, *x.shape[-2:])
        b = y.expand(*lead, *y.shape[-2:]).reshape(-1, *y.shape[-2:])
        return triton_ops.gemm64(a, b).reshape(*lead, x.shape[-2], y.shape[-1])

    return _sum([one(x, y) for x, y in zip(xs, ys, strict=True)])
