"""Replicated secret sharing over Z_2^64 (Araki et al., CCS 2016) and fixed-point encoding.

A secret ``x = x_0 + x_1 + x_2 (mod 2^64)`` is held as three components; party ``i`` has ``(x_i, x_{i+1 mod 3})``.
Component ``c`` is therefore known to party ``c`` and to party ``c - 1``, and to nobody else. Ring elements are
carried in ``torch.int64`` tensors, whose arithmetic wraps exactly like the ring's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError

DEFAULT_F = 16
RandomBytes = Callable[[int], bytes]


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One party's view of a secret tensor: ``first`` = component ``party``, ``second`` = component ``party + 1``.

    Both have the shape of the secret. The secret number is ``(x_0 + x_1 + x_2) / 2^f`` with the sum read as a signed
    64-bit integer.
    """

    first: Tensor
    second: Tensor
    f: int = DEFAULT_F

    def __post_init__(self) -> None:
        if self.first.dtype != torch.int64 or self.second.dtype != torch.int64:
            raise ConfigError(f"a share has dtype {self.first.dtype}/{self.second.dtype}", "encode the tensor first")
        if self.first.shape != self.second.shape:
            raise ConfigError(f"share components have shapes {tuple(self.first.shape)} and {tuple(self.second.shape)}")
        if self.first.device != self.second.device:
            raise ConfigError(
                f"share components lie on {self.first.device} and {self.second.device}", "move both to one device"
            )

    @property
    def shape(self) -> torch.Size:
        """The shape of the secret, and of both components."""
        return self.first.shape

    @property
    def n(self) -> int:
        """Number of elements."""
        return self.first.numel()

    def map(self, fn: Callable[[Tensor], Tensor]) -> Share:
        """Apply a linear, value-independent map (reshape, transpose, index, sum, integer factor) to both components."""
        return Share(fn(self.first), fn(self.second), self.f)

    def reshape(self, *shape: int) -> Share:
        """The same elements in another shape."""
        return self.map(lambda t: t.reshape(*shape))

    def transpose(self, a: int, b: int) -> Share:
        """The same with two axes exchanged."""
        return self.map(lambda t: t.transpose(a, b))

    @property
    def T(self) -> Share:
        """The same with the last two axes exchanged."""
        return self.map(lambda t: t.transpose(-1, -2))

    def sum(self, dim: int, keepdim: bool = False) -> Share:
        """The sum along one axis, at the same scale; the caller sees to it that it fits the 64-bit range."""
        return self.map(lambda t: t.sum(dim, keepdim=keepdim))

    def index(self, key: object) -> Share:
        """What indexing with ``key`` gives, of both components."""
        return self.map(lambda t: t[key])  # type: ignore[index]

    def expand(self, *shape: int) -> Share:
        """The same, repeated along axes of length 1 without a copy."""
        return self.map(lambda t: t.expand(*shape))

    def to(self, device: torch.device) -> Share:
        """The same on another device."""
        return self.map(lambda t: t.to(device))

    def with_f(self, f: int) -> Share:
        """Read the same ring elements at another scale (a free multiplication by a power of two)."""
        return replace(self, f=f)


@dataclass(frozen=True, slots=True, eq=False)
class BoolShare:
    """XOR-shared words, replicated like ``Share``: ``x = x_0 ^ x_1 ^ x_2``, bit-sliced 64 elements to the word.

    ``first`` and ``second`` are int64 tensors of shape ``[..., ceil(n / 64)]``; bit ``e`` of word ``w`` belongs to
    element ``64 w + e``.
    """

    first: Tensor
    second: Tensor
    n: int


def placed(x: Share, out: Share | None) -> Share:
    """``x``, or its components in ``out``, of the same shape, where memory for it was given."""
    if out is None:
        return x
    out.first.copy_(x.first)
    out.second.copy_(x.second)
    return out


def cat(parts: list[Share], dim: int = 0) -> Share:
    """Concatenate shares of one scale along ``dim``. Raises ConfigError where the scales differ.

    All other axes have one length.
    """
    scales = {p.f for p in parts}
    if len(scales) != 1:
        raise ConfigError(f"shares of different scales {sorted(scales)} cannot be concatenated", "bring them to one f")
    return Share(torch.cat([p.first for p in parts], dim), torch.cat([p.second for p in parts], dim), parts[0].f)


def stack(parts: list[Share], dim: int = 0) -> Share:
    """Stack shares of one scale and shape along a new ``dim``."""
    return cat([p.map(lambda t: t.unsqueeze(dim)) for p in parts], dim)


def encode(x: Tensor, f: int = DEFAULT_F, *, name: str = "tensor") -> Tensor:
    """Real tensor -> ring elements ``round(x * 2^f)`` (int64, same shape).

    Refuses (ConfigError naming the tensor) NaN, infinities and values at or above ``2^(62 - 2 f)``: those could not be
    multiplied by one without leaving the 62 bits that the protocols allow.
    """
    if not 0 <= f <= 30:
        raise ConfigError(f"{name}: {f} fractional bits", "choose f between 0 and 30")
    if not x.is_floating_point():
        x = x.to(torch.float64)
    x = x.to(torch.float64)
    if x.numel():
        peak = float(x.abs().max())
        if not peak < 2.0 ** (62 - 2 * f):  # also false for NaN
            raise ConfigError(
                f"{name}: largest magnitude {peak:g} does not fit the ring at f={f} (below {2.0 ** (62 - 2 * f):g})",
                "rescale the data, or choose a smaller f",
            )
    return torch.round(x * 2.0**f).to(torch.int64)


def decode(x: Tensor, f: int = DEFAULT_F) -> Tensor:
    """Ring elements -> float64 ``x / 2^f`` (same shape)."""
    return x.to(torch.float64) / 2.0**f


def random_ring(shape: torch.Size, random_bytes: RandomBytes) -> Tensor:
    """Uniform ring elements from a byte source. int64 of the given shape."""
    count = shape.numel()
    if count == 0:
        return torch.zeros(shape, dtype=torch.int64)
    return torch.frombuffer(bytearray(random_bytes(8 * count)), dtype=torch.int64).reshape(shape)


def split(x: Tensor, f: int, random_bytes: RandomBytes, *, name: str = "tensor") -> tuple[Tensor, Tensor, Tensor]:
    """The data owner's sharing: real tensor -> three components, two of them uniform.

    ``random_bytes(k)`` must be a cryptographic source such as ``secrets.token_bytes``. Party ``i`` is given components
    ``i`` and ``i + 1`` (``share_of``). Shape of the tensor.
    """
    ring = encode(x, f, name=name)
    first = random_ring(ring.shape, random_bytes)
    second = random_ring(ring.shape, random_bytes)
    return first, second, ring - first - second


def share_of(components: tuple[Tensor, Tensor, Tensor], party: int, f: int = DEFAULT_F) -> Share:
    """What ``party`` holds of a split tensor. Shape of what was split."""
    return Share(components[party], components[(party + 1) % 3], f)


def reconstruct(shares: list[Share]) -> Tensor:
    """The inverse of ``split`` for tests and for a client that got all three parties' shares: float64.

    Refuses a set that is not three shares, and components whose two copies differ.
    Raises ConfigError for fewer than three shares, or for copies that differ. Shape of the shares.
    """
    if len(shares) != 3:
        raise ConfigError(f"{len(shares)} shares given", "a secret needs the shares of all three parties")
    for i in range(3):
        if not torch.equal(shares[i].second, shares[(i + 1) % 3].first):
            raise ConfigError(f"parties {i} and {(i + 1) % 3} hold different copies of component {(i + 1) % 3}")
    return decode(shares[0].first + shares[1].first + shares[2].first, shares[0].f)
