"""A small vision transformer for the 8 x 8 digits, written as its user would: a module of torch's own layers."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from uvcc_engine.model.definition.torch_module import model_of_module
from uvcc_engine.model.model_spec import ModelSpec

WIDTH: Final = 32
HEADS: Final = 4
SQUARES: Final = 16  # of 2 x 2 pixels
CLASSES: Final = 10


class SmallVit(nn.Module):
    """One block of attention and a wider layer over an image's squares, and a last layer over all of them.

    With a class token instead a change of the start by 1e-4 moved the accuracy by up to four points, in clear, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(1, WIDTH, 2, 2)
        self.places = nn.Parameter(torch.zeros(1, SQUARES, WIDTH))
        self.before, self.mix = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.between, self.wide, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.out = nn.Linear(SQUARES * WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """x [rows, 1, 8, 8] -> [rows, 10]."""
        y = self.cut(x).flatten(2).transpose(1, 2) + self.places
        near = self.before(y)
        y = y + self.mix(near, near, near, need_weights=False)[0]
        y = y + self.narrow(torch.relu(self.wide(self.between(y))))
        found: Tensor = self.out(y.flatten(1))
        return found


def small_vit() -> ModelSpec:
    """What it computes, as a job names it."""
    return model_of_module(SmallVit(), (1, 8, 8), CLASSES).model
