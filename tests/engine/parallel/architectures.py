"""Modules as users write them, one for each architecture that is named in the manual, small enough for a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

EPSILON = 2.0**-10  # the layers' own


class Mlp(nn.Module):
    """Gated, as newer language models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(fn.silu(self.gate(x)) * self.up(x) * 0.5)
        return found


class ResNet(nn.Module):
    """A block whose way past is a convolution of its own, as where a residual network halves its images."""

    input_shape = (1, 8, 8)

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 3, 3, 2, 1), nn.Conv2d(3, 3, 3, 1, 1)
        self.past, self.out = nn.Conv2d(1, 3, 1, 2), nn.Linear(12, 3)
        self.norm = nn.BatchNorm2d(3, EPSILON) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.relu(self.norm(self.first(x))))
        y = torch.relu(y + self.past(x))
        found: Tensor = self.out(fn.avg_pool2d(y, 2).flatten(1))
        return found


class Sequence(nn.Module):
    """Letters through a convolution along the text; their mean and their maximum side by side."""

    vocabulary, input_shape = 5, (8,)

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.conv, self.out = nn.Embedding(5, 6), nn.Conv1d(6, 4, 3, padding=1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.conv(self.letters(x).transpose(1, 2)))
        found: Tensor = self.out(torch.cat([y.mean(2), y.amax(2)], 1))
        return found


class Attend(nn.Module):
    """Attention as small language models write it."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.qkv, self.proj, self.heads, self.causal = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            heads,
            causal,
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, lines, width = x.shape
        q, k, v = (t.view(rows, lines, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(width, dim=2))
        y = fn.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        found: Tensor = self.proj(y.transpose(1, 2).contiguous().view(rows, lines, width))
        return found


class Block(nn.Module):
    """Pre-normalised attention and a wider layer."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(width, EPSILON), nn.LayerNorm(width, EPSILON)
        self.attend = Attend(width, heads, causal)
        self.think = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.one(x))
        found: Tensor = x + self.think(self.two(x))
        return found


class Gpt(nn.Module):
    """A decoder with learned places."""

    vocabulary, input_shape = 7, (4,)

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(7, 4), nn.Embedding(9, 4)
        self.block, self.norm, self.out = Block(4, 2, True), nn.LayerNorm(4, EPSILON), nn.Linear(4, 7)

    def forward(self, x: Tensor) -> Tensor:
        y = self.letters(x) + self.places(torch.arange(x.shape[1]))
        found: Tensor = self.out(self.norm(self.block(y)))
        return found


class Vit(nn.Module):
    """An encoder of an image's squares behind a class token, of torch's own attention."""

    input_shape = (1, 4, 4)

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(1, 4, 2, 2)
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, 4)), nn.Parameter(torch.zeros(1, 5, 4))
        self.norm, self.mix = nn.LayerNorm(4, EPSILON), nn.MultiheadAttention(4, 2, batch_first=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.cut(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.token.expand(len(y), -1, -1), y], 1) + self.places
        near = self.norm(y)
        y = y + self.mix(near, near, near, need_weights=False)[0]
        found: Tensor = self.out(y[:, 0])
        return found


class Written(nn.Module):
    """Attention written out, keys and values shared by two heads each, over the lines of a table."""

    input_shape = (3, 4)

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = nn.Linear(4, 8), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(-1, 3, 4, 2).transpose(1, 2)
        k, v = (one(x).view(-1, 3, 2, 2).transpose(1, 2).repeat_interleave(2, 1) for one in (self.k, self.v))
        scores = (q @ k.transpose(-2, -1)) / 2**0.5
        scores = scores.masked_fill(torch.ones(3, 3).tril() == 0, float("-inf"))
        mixed = torch.softmax(scores, -1) @ v
        found: Tensor = self.out(mixed.transpose(1, 2).reshape(-1, 3, 8).mean(1))
        return found


class Rotary(nn.Module):
    """Queries and keys turned by their places, in halves of a head or by neighbours; all heads share keys."""

    input_shape = (5, 8)

    def __init__(self, *, neighbours: bool = False, base: float = 10000.0, apart: float = 1.0) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.neighbours, self.apart = neighbours, apart
        self.turns = torch.outer(torch.arange(5.0), base ** (-torch.arange(0, 4, 2) / 4))

    def turned(self, x: Tensor, apart: float = 1.0) -> Tensor:
        cos, sin = torch.cos(self.turns * apart), torch.sin(self.turns * apart)
        if self.neighbours:
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
        a, b = x.chunk(2, -1)
        return x * torch.cat([cos, cos], -1) + torch.cat([-b, a], -1) * torch.cat([sin, sin], -1)

    def forward(self, x: Tensor) -> Tensor:
        q = self.turned(self.q(x).view(-1, 5, 2, 4).transpose(1, 2))
        k, v = (one.view(-1, 5, 1, 4).transpose(1, 2).expand(-1, 2, -1, -1) for one in self.kv(x).chunk(2, -1))
        mixed = fn.scaled_dot_product_attention(q, self.turned(k, self.apart), v, is_causal=True)
        found: Tensor = self.out(mixed.transpose(1, 2).reshape(-1, 5, 8).mean(1))
        return found


class TiedHead(nn.Module):
    """A small transformer's frame whose logits are products with the table that its letters were looked up in."""

    vocabulary = 7
    input_shape = (4,)

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(7, 6), nn.Embedding(4, 6)
        self.norm, self.think, self.head = nn.LayerNorm(6, eps=2**-10), nn.Linear(6, 6), nn.Linear(6, 7, bias=bias)
        self.head.weight = self.letters.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.letters(x) + self.places(torch.arange(4))
        found: Tensor = self.head(h + fn.relu(self.think(self.norm(h))))
        return found


@dataclass(frozen=True)
class Architecture:
    """A module, the parts whose weights it uses, in order, and what its data are."""

    make: Callable[[], nn.Module]
    order: tuple[str, ...]
    classes: int
    positions: int = 1


ARCHITECTURES: dict[str, Architecture] = {
    "mlp": Architecture(Mlp, ("gate", "up", "down"), 3),
    "resnet": Architecture(ResNet, ("first", "second", "past", "out"), 3),
    "sequence": Architecture(Sequence, ("letters", "conv", "out"), 3),
    "gpt": Architecture(
        Gpt,
        (
            *("letters+places", "block.one", "block.attend.qkv", "block.attend.proj"),
            *("block.two", "block.think.0", "block.think.2", "norm", "out"),
        ),
        7,
        4,
    ),
    "tied": Architecture(TiedHead, ("letters+places", "norm", "think"), 7, 4),
    "vit": Architecture(Vit, ("cut", "token", "places", "norm", "mix", "mix.out_proj", "out"), 3),
    "rotary": Architecture(Rotary, ("q+kv", "out"), 2),
    "written": Architecture(Written, ("q+k+v", "out"), 2),
}


def weights_of(module: nn.Module, order: tuple[str, ...], positions: int) -> list[Tensor]:
    """The module's own weights as the layers lay them out."""
    return [torch.cat([*_of(module, name, positions)], 0 if "letters" in name else 1).double() for name in order]


def _of(module: nn.Module, names: str, positions: int) -> list[Tensor]:
    found: list[Tensor] = []
    for name in names.split("+"):
        part = getattr(module, name) if "." not in name else module.get_submodule(name)
        if isinstance(part, nn.Parameter):
            found.append(part.detach()[0])
        elif isinstance(part, nn.Embedding):
            found.append(part.weight.detach()[:positions] if name == "places" else part.weight.detach())
        elif isinstance(part, nn.MultiheadAttention):
            assert part.in_proj_weight is not None
            found.append(torch.cat([part.in_proj_weight.T, part.in_proj_bias[None]]).detach())
        elif isinstance(part, nn.LayerNorm):
            found.append(torch.stack([part.weight, part.bias]).detach())
        else:
            assert isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d)
            assert part.bias is not None
            found.append(torch.cat([part.weight.flatten(1).T, part.bias[None]]).detach())
    return found
