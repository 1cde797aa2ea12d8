"""What a party keeps of the products of a step, so that they can be proved before anything is opened (``proofs``).

A ledger is a party's own notes: what it put into a product, what it sent, what it received. Recording sends nothing.
All parties file the same claims in the same order, because they run the same program.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.foundation.share import Share

MATMUL: Final = "matmul"  # [m, k] @ [k, n]
ELEMENTWISE: Final = "elementwise"  # broadcasting
LINEAR: Final = "linear"  # a public integer times one share


@dataclass(slots=True, eq=False)
class TruncationNotes:
    """One party's part of a proved truncation (``proved_truncation``); None for what it must not know.

    ``a`` and ``b``: the mask's two XOR summands. ``upper``: the output component that dealer and left share, ``lower``
    the one that dealer and right share. ``k_*`` and ``m_*``: summands modulo 2^s. ``part_*``: what the online parties
    sent each other. ``opened``: the masked value.
    """

    s: int
    a: Tensor | None = None
    b: Tensor | None = None
    upper: Tensor | None = None
    lower: Tensor | None = None
    k_left: Tensor | None = None
    k_right: Tensor | None = None
    m_left: Tensor | None = None
    m_right: Tensor | None = None
    masked: Tensor | None = None
    part_left: Tensor | None = None
    part_right: Tensor | None = None
    opened: Tensor | None = None


@dataclass(slots=True, eq=False)
class ProductNotes:
    """One party's part of ``factor * form(x, y)``, its own summand ``z`` and those that it received, by sender.

    ``own`` and ``following``: its draws of the components ``party`` and ``party + 1`` for the zero share. ``dealer``:
    of the truncation that follows, None where the summands are reshared.
    """

    form: str
    x: Share
    y: Share | None
    factor: int
    dealer: int | None
    own: Tensor
    following: Tensor
    z: Tensor
    received: dict[int, Tensor] = field(default_factory=dict)
    truncation: TruncationNotes | None = None

    @property
    def count(self) -> int:
        """How many entries the product has."""
        return self.z.numel()


class ClaimLedger:
    """The claims of one party and stream that are not proved yet."""

    def __init__(self) -> None:
        self._open: list[ProductNotes] = []

    def file(self, notes: ProductNotes) -> ProductNotes:
        """Keep what a product will be proved with. Raises ConfigError for a product that has no proof."""
        if notes.form not in (MATMUL, ELEMENTWISE, LINEAR) or (notes.form == MATMUL and notes.z.dim() != 2):
            raise ConfigError(
                f"a product {notes.form or 'of its own kind'} of shape {tuple(notes.z.shape)} has no proof",
                "verify: off, or a model of dense layers",
            )
        if notes.z.device.type != "cpu":
            raise ConfigError("proofs are computed on processors only", "device: cpu, or verify: off")
        self._open.append(notes)
        return notes

    @property
    def last(self) -> ProductNotes:
        """What was filed last."""
        return self._open[-1]

    def take(self) -> list[ProductNotes]:
        """All claims since the last call, in the order in which they were filed."""
        found, self._open = self._open, []
        return found

    def __len__(self) -> int:
        return len(self._open)
