"""How large a kernel's tiles are and how many warps and load stages it takes: what a measurement on a GPU found best.

``measured_tiles.json`` ships the winners of ``uvcc-engine bench nsa --tune`` for a compute capability, for inputs of 16
bits and heads of at most 64. Other inputs of 16 bits take the default, wider ones small tiles; both fit every GPU since
sm_80.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from uvcc_engine.nsa.config import ModelConfig

MEASURED: Final = Path(__file__).with_name("measured_tiles.json")
SEGMENT: Final = 16_384  # queries, over all rows, whose choices the selection holds at once
WIDEST: Final = 64  # the head's width up to which winners hold: they were measured at it
KERNELS: Final = (
    "band.forward",
    "band.backward_q",
    "band.backward_kv",
    "topk",
    "selection.forward",
    "selection.backward",
    "selection.slots",
)
WITHOUT_PRODUCTS: Final = ("selection.slots",)


@dataclass(frozen=True, slots=True)
class Tiles:
    """``rows``: queries of a tile, or (query, head) pairs of the selection's; ``keys`` of a tile, where it is free.

    ``tma``: tiles are named by descriptors and copied by the device's own unit, from sm_90 on. ``edges``: only tiles
    that some query sees in part are masked.
    """

    rows: int = 64
    keys: int = 64
    warps: int = 4
    stages: int = 3
    tma: bool = False
    edges: bool = False

    @property
    def launch(self) -> dict[str, int]:
        """What a launch of any kernel takes."""
        return {"num_warps": self.warps, "num_stages": self.stages}

    def to_json(self) -> dict[str, int]:
        """As it stands in the file of winners."""
        return asdict(self)


def selection_bytes(cfg: ModelConfig, queries: int) -> int:
    """What the selection holds for a moment, of so many queries: a number of 32 bits for each of their choices'
    outputs, or of its gradients: 0.8 GB of M7C."""
    return 4 * min(SEGMENT, queries) * cfg.nsa.n_sel * cfg.n_heads * max(cfg.d_k, cfg.d_v)


_forced: dict[str, Tiles] = {}


def force(kernel: str, tiles: Tiles | None) -> None:
    """Use these tiles for a kernel from now on (tests, tuning); None chooses again."""
    if tiles is None:
        _forced.pop(kernel, None)
    else:
        _forced[kernel] = tiles


def forced(kernel: str) -> Tiles | None:
    """The tiles that a kernel was told to use."""
    return _forced.get(kernel)


def tiles_for(kernel: str, x: Tensor) -> Tiles:
    """The tiles of a kernel for heads like those of ``x`` [..., d]."""
    if kernel in _forced:
        return _forced[kernel]
    if x.device.type != "cuda":
        return Tiles()
    if x.element_size() != 2:
        return of_single_products(kernel, x.shape[-1])
    return Tiles() if x.shape[-1] > WIDEST else winners_of(x.device).get(kernel, Tiles())


def of_single_products(kernel: str, width: int) -> Tiles:
    """The tiles of inputs of more than 16 bits, whose products no tensor core computes exactly.

    Each thread multiplies its numbers one by one, and the compiler writes every product of a tile down. The default's
    tiles made programs of a megabyte and a half, which took the assembler minutes and held thousands of bytes outside
    of registers; loads ahead of the loop (``stages``) made both worse.
    """
    if kernel in WITHOUT_PRODUCTS:
        return Tiles()
    # a selection's tile meets a whole block of keys
    side = 32 if width <= WIDEST and not kernel.startswith("selection.") else 16
    return Tiles(side, side, warps=8, stages=1)


@lru_cache(maxsize=8)
def winners_of(device: torch.device) -> Mapping[str, Tiles]:
    """Kernel -> what was found best on a GPU like this one; nothing for another kind."""
    major, minor = torch.cuda.get_device_capability(device)
    return measured().get(f"{major}.{minor}", {})


@lru_cache(maxsize=1)
def measured() -> Mapping[str, Mapping[str, Tiles]]:
    """Compute capability -> kernel -> winner."""
    known: dict[str, dict[str, dict[str, Any]]] = json.loads(MEASURED.read_text())
    return {at: {name: Tiles(**one) for name, one in winners.items()} for at, winners in known.items()}
