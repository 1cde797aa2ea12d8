"""Kernels on the CPU: numpy and torch for small tensors, compiled loops for large ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from uvcc_engine.mpc.kernels.base import RightFactor
from uvcc_engine.mpc.kernels.compiled_kernels import as_flat, as_rows
from uvcc_engine.mpc.kernels.cpu_proofs import ProvingKernels
from uvcc_engine.mpc.kernels.gemm import gemm
from uvcc_engine.mpc.kernels.layout import Level, Patches, wire_dtype
from uvcc_engine.mpc.kernels.threads import over_threads

_GRAIN: Final = 64
"""Elements, or words of bit planes, that a part begins at multiples of: whole blocks of every loop, and whole lines of
the caches, so that no two threads write to one."""


class CpuKernels(ProvingKernels):
    """``kernels.base.Kernels`` for the CPU."""

    def mul(self, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
        first = xs[0]
        same = all(t.shape == first.shape for t in (*xs, *ys))
        if not same or not self._sums(first.numel(), *xs, *ys):
            return super().mul(xs, ys)
        out = torch.empty_like(first)
        arrays = [as_flat(t) for t in (first, ys[0], xs[-1], ys[-1], out)]
        _by_parts(arrays, lambda *part: self._jit.cross(len(xs), *part))
        return out

    def right_factor(self, ys: Sequence[Tensor], rows: int) -> RightFactor:
        return gemm.right_factor(ys, rows)

    def cut_patches(self, images: Tensor, of: Patches, more: int = 0) -> Tensor:
        rows = images.numel() // of.image
        each = of.lines * of.columns * (of.each + more)
        if not self._sums(rows * each, images):
            return super().cut_patches(images, of, more)
        out = torch.empty(rows * of.lines * of.columns, of.each + more, dtype=torch.int64)
        given, found = as_flat(images).reshape(rows, of.image), as_flat(out)

        def some(start: int, stop: int) -> None:
            self._jit.cut_patches(given[start:stop], *_sizes(of), more, found[start * each : stop * each])

        over_threads(rows * each, rows, some)
        return out

    def add_patches(self, patches: Tensor, of: Patches) -> Tensor:
        if not self._sums(patches.numel(), patches):
            return super().add_patches(patches, of)
        each = of.lines * of.columns * of.each
        rows = patches.numel() // each
        out = torch.empty(rows, of.image, dtype=torch.int64)
        given, found = as_flat(patches), as_rows(out)

        def some(start: int, stop: int) -> None:
            self._jit.add_patches(given[start * each : stop * each], *_sizes(of), found[start:stop])

        over_threads(patches.numel(), rows, some)
        return out

    def blind(self, z: Tensor, factor: int, plus: Tensor, minus: Tensor) -> Tensor:
        if self._sums(z.numel(), z, plus, minus):
            _by_parts([as_flat(t) for t in (z, plus, minus)], lambda x, p, m: self._jit.blind(x, factor, p, m))
            return z
        return super().blind(z, factor, plus, minus)

    def mul_blinded(
        self,
        first: bool,
        second: bool,
        x: tuple[Tensor, Tensor],
        y: tuple[Tensor, Tensor],
        factor: int,
        plus: Tensor,
        minus: Tensor,
    ) -> Tensor:
        given = (*x, *y, plus, minus)
        if any(t.shape != plus.shape for t in given) or not self._sums(plus.numel(), *given):
            return super().mul_blinded(first, second, x, y, factor, plus, minus)
        out = torch.empty_like(plus)
        arrays = [as_flat(t) for t in (*given, out)]
        _by_parts(arrays, lambda *part: self._jit.mul_blinded(first, second, *part[:-1], factor, part[-1]))
        return out

    def truncate_deal(
        self, z: Tensor, left: Tensor, right: Tensor, k: Tensor, m: Tensor, low: Tensor, s: int
    ) -> tuple[Tensor, Tensor]:
        if not self._sums(z.numel(), z, left, right, k, m, low):
            return super().truncate_deal(z, left, right, k, m, low, s)
        masked = torch.empty_like(z)
        dealt = torch.empty((2, *z.shape), dtype=wire_dtype(s))
        arrays = [as_flat(t) for t in (z, left, right, k, m, low, masked, *dealt)]
        _by_parts(arrays, lambda *part: self._jit.truncate_deal(*part[:6], s, *part[6:]))
        return masked, dealt

    def truncate_deal_own(
        self, z: Tensor, left: Tensor, drawn: Tensor, more: Tensor, low: Tensor, s: int, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if not self._sums(z.numel(), z, left, drawn, more, low):
            return super().truncate_deal_own(z, left, drawn, more, low, s, out)
        dealt = torch.empty((2, *z.shape), dtype=wire_dtype(s))
        right = torch.empty_like(z) if out is None else out
        arrays = [as_flat(t) for t in (z, left, *drawn, more, low, *dealt, right)]
        _by_parts(arrays, lambda *part: self._jit.truncate_deal_own(*part[:6], s, *part[6:]))
        return dealt, right

    def truncate_open(
        self, z: Tensor, a: Tensor, b: Tensor, k: Tensor, m: Tensor, s: int, bits: int = 64
    ) -> tuple[Tensor, Tensor]:
        if not self._sums(z.numel(), z, a, b, k, m):
            return super().truncate_open(z, a, b, k, m, s, bits)
        c, part = torch.empty_like(z), torch.empty_like(k)
        arrays = [as_flat(t) for t in (z, a, b, k, m, c, part)]
        _by_parts(arrays, lambda *some: self._jit.truncate_open(*some[:5], bits, *some[5:]))
        return c, part

    def truncate_close(self, c: Tensor, part: Tensor, theirs: Tensor, s: int, out: Tensor | None = None) -> Tensor:
        if not self._sums(c.numel(), c, part, theirs):
            return super().truncate_close(c, part, theirs, s, out)
        if out is None:
            out = torch.empty_like(c)
        arrays = [as_flat(t) for t in (c, part, theirs, out)]
        _by_parts(arrays, lambda *some: self._jit.truncate_close(*some[:3], s, some[3]))
        return out

    def to_planes(self, x: Tensor, bits: int = 64) -> Tensor:
        flat = x.contiguous().reshape(-1)
        words = -(-flat.numel() // 64)
        if self._sums(flat.numel(), flat):
            out = torch.empty((bits, words), dtype=torch.int64)
            given, found = flat.numpy(), out.numpy()
            _by_words(64, words, lambda start, stop: self._jit.to_planes(given, start, stop, found))
            return out
        raw = np.zeros((words * 64, 8), dtype=np.uint8)
        raw[: flat.numel()] = flat.numpy().view(np.uint8).reshape(-1, 8)
        used = np.unpackbits(raw[:, : -(-bits // 8)], axis=1, bitorder="little")[:, :bits]
        packed = np.packbits(np.ascontiguousarray(used.T), axis=1, bitorder="little")
        return torch.from_numpy(packed.view(np.int64))

    def bits_to_ints(self, words: Tensor, n: int) -> Tensor:
        raw = words.contiguous().numpy().view(np.uint8)
        bits = np.unpackbits(raw, axis=-1, count=n, bitorder="little")
        return torch.from_numpy(bits.astype(np.int64))

    def pack(self, x: Tensor, size: int) -> Tensor:
        if not self._sums(x.numel(), x):
            return super().pack(x, size)
        out = torch.empty((*x.shape, size), dtype=torch.uint8)
        self._jit.pack(as_flat(x), size, as_flat(out))
        return out

    def select_deal(self, rho: Tensor, us: list[Tensor], right: Tensor) -> Tensor:
        if right.dim() != 2 or not self._sums(right.shape[-1], right, rho, *us):
            return super().select_deal(rho, us, right)
        out = torch.empty_like(right)
        self._jit.deal_bits(as_flat(rho), as_flat(right[0]), as_flat(out[0]))
        for i, u in enumerate(us, 1):
            self._jit.deal_chosen(as_flat(rho), as_flat(u), as_flat(right[i]), as_flat(out[i]))
        return out

    def select(
        self, delta: Tensor, mine: list[Tensor], online: list[Tensor], dealt: Tensor, lead: int
    ) -> tuple[list[Tensor], Tensor]:
        if dealt.dim() != 2 or not self._sums(dealt.shape[-1], delta, dealt, *mine, *online):
            return super().select(delta, mine, online, dealt, lead)
        bits, own = as_flat(delta), torch.empty_like(dealt[0])
        self._jit.choose_bits(bits, as_flat(dealt[0]), lead, as_flat(own))
        products = []
        for a, v, d in zip(mine, online, dealt[1:], strict=True):
            out = torch.empty_like(own)
            self._jit.choose(bits, as_flat(a), as_flat(v), as_flat(d), as_flat(own), as_flat(out))
            products.append(out)
        return products, own

    def deal_digits(self, planes: Tensor, k: int, mask: Tensor, out: Tensor) -> None:
        if k == 3 and self._bits(planes.shape[-1], planes, mask, out):
            given, found = (planes.numpy(), mask.numpy()), out.numpy()
            _by_words(len(out), planes.shape[1], lambda start, stop: self._jit.deal_digits(*given, start, stop, found))
        else:
            super().deal_digits(planes, k, mask, out)

    def pick_digits(self, table: Tensor, planes: Tensor, k: int, one: int) -> tuple[Tensor, Tensor]:
        if k != 3 or not self._bits(planes.shape[-1], planes, table):
            return super().pick_digits(table, planes, k, one)
        g = torch.empty(planes.shape[0] // 3, planes.shape[1], dtype=torch.int64)
        p = torch.empty_like(g)
        given, found = (table.numpy(), planes.numpy(), one), (g.numpy(), p.numpy())
        _by_words(len(table), g.shape[1], lambda start, stop: self._jit.pick_digits(*given, start, stop, *found))
        return g, p

    def mask_products(self, plan: Level, left: Tensor, right: Tensor, mask: Tensor, out: Tensor) -> None:
        if self._bits(out.shape[-1], left, right, mask, out):
            given, found = (left.numpy(), right.numpy(), mask.numpy()), out.numpy()
            kind = plan.m, plan.generate, plan.carry_on
            _by_words(
                out[..., 0].numel(),
                out.shape[-1],
                lambda start, stop: self._jit.mask_products(*kind, *given, start, stop, found),
            )
        else:
            super().mask_products(plan, left, right, mask, out)

    def close(self, plan: Level, g: Tensor | None, p: Tensor, single: Tensor, out: Tensor) -> None:
        first = p if g is None else g
        if self._bits(p.shape[-1], first, p, single, out):
            given, found = (first.numpy(), p.numpy(), single.numpy()), out.numpy()
            kind = plan.m, plan.generate, plan.carry_on
            _by_words(
                out[..., 0].numel(),
                out.shape[-1],
                lambda start, stop: self._jit.close(*kind, *given, start, stop, found),
            )
        else:
            super().close(plan, g, p, single, out)

    def merge(
        self,
        plan: Level,
        opened: Tensor,
        single: Tensor,
        product: Tensor,
        one: int,
        g_out: Tensor | None,
        p_out: Tensor | None,
    ) -> None:
        g_to, p_to = (opened[0] if out is None else out for out in (g_out, p_out))
        if not self._bits(opened.shape[-1], opened, single, product, g_to, p_to):
            super().merge(plan, opened, single, product, one, g_out, p_out)
            return
        kind = plan.m, plan.generate and g_out is not None, plan.carry_on and p_out is not None
        given, found = (opened.numpy(), single.numpy(), product.numpy(), one), (g_to.numpy(), p_to.numpy())
        _by_words(
            product[..., 0].numel(),
            opened.shape[-1],
            lambda start, stop: self._jit.merge(*kind, *given, start, stop, *found),
        )


def _by_parts(arrays: Sequence[Any], loop: Callable[..., None]) -> None:
    """``loop`` over flat arrays of one length, in parts over threads."""
    size = len(arrays[0])
    over_threads(size, size, lambda start, stop: loop(*(x[start:stop] for x in arrays)), _GRAIN)


def _by_words(each: int, words: int, loop: Callable[[int, int], None]) -> None:
    """``loop`` over columns of bit planes, ``each`` operations to the word, in parts over threads."""
    over_threads(each * words, words, loop, _GRAIN)


def _sizes(
    of: Patches,
) -> tuple[int, tuple[int, int], tuple[int, int], tuple[int, int], tuple[int, int], tuple[int, int]]:
    """As the loops take them: the channels, and pairs of heights and widths."""
    image, kernel, stride = (of.height, of.width), (of.high, of.wide), (of.down, of.across)
    return of.channels, image, kernel, stride, (of.above, of.beside), (of.lines, of.columns)
