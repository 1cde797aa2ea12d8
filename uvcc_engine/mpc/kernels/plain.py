"""The reference kernels: torch operations alone, right on any device, quick for small tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from uvcc_engine.mpc.kernels.layout import Level, Patches, wire_dtype
from uvcc_engine.mpc.kernels.proving import binary_words

_SWAPS = (
    (32, 0x00000000FFFFFFFF),
    (16, 0x0000FFFF0000FFFF),
    (8, 0x00FF00FF00FF00FF),
    (4, 0x0F0F0F0F0F0F0F0F),
    (2, 0x3333333333333333),
    (1, 0x5555555555555555),
)


def shift_logical(x: Tensor, s: int) -> Tensor:
    """``x >> s`` of the unsigned reading, on int64. Any shape."""
    return (x >> s) & ((1 << (64 - s)) - 1) if s else x


def narrow(x: Tensor, s: int) -> Tensor:
    """To the wire type for numbers modulo 2^s. Masks fill the whole type, so no carry above bit ``s`` shows.

    Any shape.
    """
    return x.to(wire_dtype(s))


class PlainKernels:
    """``kernels.base.Kernels`` in torch."""

    def mul(self, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
        total = xs[0] * ys[0]
        for x, y in zip(xs[1:], ys[1:], strict=True):
            total += x * y
        return total

    def right_factor(self, ys: Sequence[Tensor], rows: int) -> Callable[[Sequence[Tensor]], Tensor]:
        def apply(xs: Sequence[Tensor]) -> Tensor:
            total = xs[0] @ ys[0]
            for x, y in zip(xs[1:], ys[1:], strict=True):
                if x.dim() == 2 and y.dim() == 2:
                    total.addmm_(x, y)  # without a tensor for the second product
                else:
                    total += x @ y
            return total

        return apply

    def cut_patches(self, images: Tensor, of: Patches, more: int = 0) -> Tensor:
        whole = images.reshape(-1, of.channels, of.height, of.width)
        if of.above or of.beside:
            whole = torch.nn.functional.pad(whole, (of.beside, of.beside, of.above, of.above))
        cut = whole.unfold(2, of.high, of.down).unfold(3, of.wide, of.across).permute(0, 2, 3, 1, 4, 5)
        if not more:
            return cut.reshape(-1, of.each)
        out = images.new_empty(*cut.shape[:3], of.each + more)
        torch.unflatten(out[..., : of.each], -1, cut.shape[3:]).copy_(cut)
        out[..., of.each :] = 0
        return out.reshape(-1, of.each + more)

    def add_patches(self, patches: Tensor, of: Patches) -> Tensor:
        parts = patches.reshape(-1, of.lines, of.columns, of.channels, of.high, of.wide).permute(0, 3, 1, 2, 4, 5)
        high, wide = of.height + 2 * of.above, of.width + 2 * of.beside
        total = patches.new_zeros(parts.shape[0], of.channels, high, wide)
        if (of.down, of.across) == (of.high, of.wide):  # no two of them meet
            inner = total[:, :, : of.lines * of.high, : of.columns * of.wide]
            lines = torch.unflatten(inner, 2, (of.lines, of.high))
            torch.unflatten(lines, 4, (of.columns, of.wide)).copy_(parts.transpose(3, 4))
        else:
            for i in range(of.high):
                lines = total[:, :, i : i + of.down * of.lines : of.down]
                for j in range(of.wide):
                    lines[..., j : j + of.across * of.columns : of.across] += parts[..., i, j]
        inner = total[:, :, of.above : high - of.above, of.beside : wide - of.beside]
        return inner.reshape(parts.shape[0], of.image)

    def blind(self, z: Tensor, factor: int, plus: Tensor, minus: Tensor) -> Tensor:
        return (z * factor if factor != 1 else z) + plus - minus

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
        both = y[0] + y[1] if first or second else y[0]
        if first and second:
            return self.blind(self.mul([x[0] + x[1]], [both]), factor, plus, minus)
        return self.blind(self.mul(x, [both if first else y[1], both if second else y[0]]), factor, plus, minus)

    def truncate_deal(
        self, z: Tensor, left: Tensor, right: Tensor, k: Tensor, m: Tensor, low: Tensor, s: int
    ) -> tuple[Tensor, Tensor]:
        total = -(left + right)
        r = (total << s) | (low.to(torch.int64) & ((1 << s) - 1))
        # -(X + Y) = (r >> s) + 2^(64-s) k, so subtracting r >> s leaves X + Y + 2^(64-s) k
        return z + r, narrow(torch.stack([shift_logical(total, 64 - s) - k, shift_logical(r, 63) - m]), s)

    def truncate_deal_own(
        self, z: Tensor, left: Tensor, drawn: Tensor, more: Tensor, low: Tensor, s: int, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        modulus = (1 << s) - 1
        shown = (z + low) & modulus
        r = shown - z
        overflow = (drawn[0].to(torch.int64) + more) << (64 - s)
        right = -(shift_logical(r, s) + left + overflow)
        dealt = narrow(torch.stack([shown, (shift_logical(r, 63) - drawn[1]) & modulus]), s)
        return dealt, right if out is None else out.copy_(right)

    def truncate_open(
        self, z: Tensor, a: Tensor, b: Tensor, k: Tensor, m: Tensor, s: int, bits: int = 64
    ) -> tuple[Tensor, Tensor]:
        c = z + a + (b if bits == 64 else b.to(torch.int64) & ((1 << bits) - 1)) + (1 << 62)
        return c, narrow(k.to(torch.int64) + (m & ~(c >> 63)), s)

    def truncate_close(self, c: Tensor, part: Tensor, theirs: Tensor, s: int, out: Tensor | None = None) -> Tensor:
        top = (part.to(torch.int64) + theirs.to(torch.int64)) << (64 - s)
        result = shift_logical(c, s) - (1 << (62 - s)) + top
        return result if out is None else out.copy_(result)

    def pack(self, x: Tensor, size: int) -> Tensor:
        return x.contiguous().view(torch.uint8).view(*x.shape, 8)[..., :size].contiguous()

    def select_deal(self, rho: Tensor, us: list[Tensor], right: Tensor) -> Tensor:
        bits = self.bits_to_ints(rho, right.shape[-1])
        return torch.stack([bits, *[bits * u for u in us]]) - right

    def select(
        self, delta: Tensor, mine: list[Tensor], online: list[Tensor], dealt: Tensor, lead: int
    ) -> tuple[list[Tensor], Tensor]:
        bits = self.bits_to_ints(delta, dealt.shape[-1])
        sign = 1 - 2 * bits
        own = sign * dealt[0] + bits * lead
        return [bits * a + sign * d + own * v for a, v, d in zip(mine, online, dealt[1:], strict=True)], own

    def to_planes(self, x: Tensor, bits: int = 64) -> Tensor:
        flat = x.reshape(-1)
        words = -(-flat.numel() // 64)
        grid = torch.nn.functional.pad(flat, (0, words * 64 - flat.numel())).view(words, 64).t().contiguous()
        for j, low in _SWAPS:  # the 64 x 64 bit transposition of Warren, "Hacker's Delight", section 7-3
            pairs = grid.view(64 // (2 * j), 2, j, words)
            a, b = pairs[:, 0], pairs[:, 1]
            t = ((a >> j) ^ b) & low
            pairs[:, 1] = b ^ t
            pairs[:, 0] = a ^ (t << j)
        return grid[:bits]

    def bits_to_ints(self, words: Tensor, n: int) -> Tensor:
        bits = (words.unsqueeze(-1) >> torch.arange(64, device=words.device)) & 1
        return bits.reshape(*words.shape[:-1], -1)[..., :n].contiguous()

    def binary_multiply(self, a: Tensor, b: Tensor) -> Tensor:
        return binary_words.multiply(a, b)

    def binary_powers(self, of: Tensor, count: int) -> Tensor:
        found, step = torch.ones(1, dtype=torch.int64), of
        while len(found) < count:
            found = torch.cat([found, binary_words.multiply(found, step)])
            step = binary_words.multiply(step, step)
        return found[:count]

    def binary_inner(self, a: Tensor, b: Tensor) -> Tensor:
        return binary_words.total(binary_words.multiply(a, b)).reshape(1)

    def binary_columns(self, x: Tensor, factors: Tensor) -> Tensor:
        return binary_words.total(binary_words.multiply(x, factors.unsqueeze(-1)))

    def binary_diagonals(self, u: Tensor, v: Tensor) -> Tensor:
        pairs = binary_words.multiply(u.unsqueeze(2), v.unsqueeze(1))  # [b, k, k, n]
        return torch.stack([binary_words.diagonals(binary_words.total(one.permute(2, 0, 1))) for one in pairs])

    def binary_product(self, u: Tensor, v: Tensor) -> Tensor:
        k = len(u)
        found = torch.zeros(2 * k - 1, dtype=torch.int64)
        for j, row in enumerate(v):
            found[k - 1 - j : 2 * k - 1 - j] ^= binary_words.total(binary_words.multiply(u, row).T)
        return found

    def ternary_bits(self, u: Sequence[Tensor], v: Sequence[Tensor], weights: Tensor) -> Tensor:
        products = binary_words.multiply(binary_words.meeting_bits(u, v), weights)
        return binary_words.joined(binary_words.total(products.T))

    def turned_sums(self, x: Tensor, weights: Tensor) -> Tensor:
        return binary_words.total(binary_words.multiply(binary_words.turned(x), weights).T)

    def block_weights(self, weights: Tensor, count: int) -> Tensor:
        powers = torch.ones(64, 1, dtype=torch.int64) << torch.arange(64).unsqueeze(-1)
        found = binary_words.multiply(powers, weights.reshape(-1, 1, 8))
        return found.reshape(-1)[:count]

    def chosen_places(
        self, words: Tensor, weights: Tensor, factors: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        found = binary_words.chosen_places(words, binary_words.byte_tables(weights))
        found = found if factors is None else binary_words.multiply(found, factors)
        return found if out is None else out.copy_(found)

    def weigh(self, x: Tensor, weights: Tensor, degree: int) -> Tensor:
        return _bits_of(weights, degree).T @ x

    def weigh_columns(self, x: Tensor, weights: Tensor, degree: int) -> Tensor:
        return x @ _bits_of(weights, degree)

    def weigh_pairs(self, u: Tensor, v: Tensor, weights: Tensor, degree: int) -> Tensor:
        pairs = (u.unsqueeze(-1) * v.unsqueeze(-2)).sum(0)
        return self.weigh(pairs.reshape(len(weights), -1), weights, degree).reshape(degree, *pairs.shape[1:])

    def ternary_numbers(self, u: Sequence[Tensor], v: Sequence[Tensor], weights: Tensor, degree: int) -> Tensor:
        sides = zip(u, v, strict=True)
        each = [binary_words.halved(x, torch.add) * binary_words.halved(y, torch.add) for x, y in sides]
        products = torch.stack(each).sum(0)
        return binary_words.joined(self.weigh_columns(products, weights, degree), torch.sub)

    def weigh_elements(self, x: Tensor, weights: Tensor, tap: int, out: Tensor | None = None) -> Tensor:
        d = x.shape[1]
        wide = torch.zeros(x.shape[0], 2 * d, dtype=torch.int64)
        for c in range(d):
            wide[:, c : c + d] += x * ((weights >> c) & 1).unsqueeze(-1)
        found = _reduced(wide, d, tap)
        return found if out is None else out.copy_(found)

    def add_degrees(self, products: Tensor) -> Tensor:
        blocks, rows, d, columns, e = products.shape
        found = torch.zeros(blocks, rows + columns - 1, d + e - 1, dtype=torch.int64)
        for i in range(rows):
            for k in range(d):
                found[:, i : i + columns, k : k + e] += products[:, i, k]
        return found

    def multiply_wide(self, x: Tensor, y: Tensor) -> Tensor:
        return self.add_degrees((x[:, :, None, :, :, None] * y[:, None, :, :, None, :]).sum(3).transpose(2, 3))

    def multiply_elements(self, u: Tensor, v: Tensor) -> Tensor | None:
        return None

    def ring_multiply(self, a: Tensor, b: Tensor, tap: int) -> Tensor:
        d = a.shape[-1]
        outer = a.unsqueeze(-1) * b.unsqueeze(-2)
        wide = torch.zeros(*outer.shape[:-2], 2 * d, dtype=torch.int64)
        at = torch.arange(d)
        wide.index_add_(-1, (at[:, None] + at).reshape(-1), outer.reshape(*outer.shape[:-2], d * d))
        return _reduced(wide, d, tap)

    def ring_powers(self, of: Tensor, count: int, tap: int) -> Tensor:
        found, step = torch.nn.functional.one_hot(torch.tensor([0]), len(of)), of
        while len(found) < count:  # twice as many: those there are times the next power
            found = torch.cat([found, self.ring_multiply(found, step, tap)])
            step = self.ring_multiply(step, step, tap)
        return found[:count]

    def deal_digits(self, planes: Tensor, k: int, mask: Tensor, out: Tensor) -> None:
        digits = planes.reshape(-1, k, planes.shape[-1])
        codes = [digits[:, 0]]
        for i in range(1, k):
            bit = digits[:, i]
            codes = [bit | c for c in codes] + [bit] + [bit & c for c in codes]
        torch.bitwise_xor(torch.cat(codes), mask, out=out)

    def pick_digits(self, table: Tensor, planes: Tensor, k: int, one: int) -> tuple[Tensor, Tensor]:
        words = planes.shape[-1]
        digits = planes.reshape(-1, k, words)
        codes = table.reshape((1 << k) - 1, -1, words)
        edge = torch.full_like(codes[:1], one)
        generate = torch.cat([codes, torch.zeros_like(edge)])
        both = torch.stack([generate, generate ^ torch.cat([edge, codes])])
        for i in range(k):
            even, odd = both[:, 0::2], both[:, 1::2]
            both = odd ^ (digits[:, i] & (even ^ odd))
        return both[0, 0], both[1, 0]

    def mask_products(self, plan: Level, left: Tensor, right: Tensor, mask: Tensor, out: Tensor) -> None:
        single = left ^ right
        m = plan.m
        table = torch.full_like(single[:1], -1)
        for k in range(m - 1):
            table = torch.cat([table, table & single[k]])
        parts = [table]
        if plan.generate:
            parts += [table[:: 1 << j] & single[m - 1 + j] for j in range(m)]
        if plan.carry_on:
            parts.append(table & single[-1])
        torch.bitwise_xor(torch.cat(parts)[list(plan.products)], mask, out=out)

    def close(self, plan: Level, g: Tensor | None, p: Tensor, single: Tensor, out: Tensor) -> None:
        m, words = plan.m, p.shape[-1]
        passes = p.view(-1, m, words).transpose(0, 1)
        values = [passes[1:]]
        if plan.generate and g is not None:
            values.append(g.view(-1, m, words).transpose(0, 1))
        if plan.carry_on:
            values.append(passes[:1])
        torch.bitwise_xor(torch.cat(values), single, out=out)

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
        m = plan.m
        half = 1 << (m - 1)
        table = torch.empty(plan.entries, *single.shape[1:], dtype=torch.int64, device=single.device)
        table[0] = one
        table[list(plan.singles)] = single
        table[list(plan.products)] = product
        base = table[:half]
        if plan.generate and g_out is not None:
            at = half
            h = (opened[m - 1] & base) ^ table[at : at + half]
            for j in range(1, m):
                at += 1 << (m - j)
                tail = table[at : at + (1 << (m - 1 - j))]
                h = (opened[m - 1 + j] & base[:: 1 << j]) ^ tail ^ (opened[j - 1] & h[0::2]) ^ h[1::2]
            g_out.copy_(h[0])
        if plan.carry_on and p_out is not None:
            q = (opened[-1] & base) ^ table[-half:]
            for j in range(1, m):
                q = (opened[j - 1] & q[0::2]) ^ q[1::2]
            p_out.copy_(q[0])


def _bits_of(words: Tensor, count: int) -> Tensor:
    """``[n, count]``: the lowest bits as numbers."""
    return (words.unsqueeze(-1) >> torch.arange(count)) & 1


def _reduced(wide: Tensor, d: int, tap: int) -> Tensor:
    """Coefficients ``[..., 2 d]``, of which the last is zero, modulo ``X^d + X^tap + 1`` (``2 tap - 2 < d``):
    ``[..., d]``. ``X^(d+j) = -X^j - X^(j+tap)``, twice."""
    low, high = wide[..., :d].clone(), wide[..., d:]
    low -= high
    low[..., tap:] -= high[..., : d - tap]
    over = high[..., d - tap :]
    low[..., :tap] += over
    low[..., tap : 2 * tap] += over
    return low
