"""What a decoder remembers of the past: growing rows in storage that doubles, or a window in storage that slides."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class Rows:
    """[B, n, G, d], appended to along n without copying what is there each time.

    ``keep``: only so many newest rows are promised (0 = all); the storage is then at most twice that.
    """

    def __init__(self, first: Tensor, keep: int = 0) -> None:
        self._keep = keep
        self._low = self._high = 0
        b, n, g, d = first.shape
        self._data = first.new_empty(b, max(n, 2 * keep, 64), g, d)
        self.append(first)

    def __len__(self) -> int:
        return self._high - self._low

    @property
    def view(self) -> Tensor:
        """The rows kept, oldest first."""
        return self._data[:, self._low : self._high]

    def append(self, rows: Tensor) -> None:
        """Add ``rows`` [B, m, G, d] behind the others."""
        if self._keep and rows.shape[1] > self._keep:
            rows = rows[:, -self._keep :]
        if self._high + rows.shape[1] > self._data.shape[1]:
            self._make_room(rows.shape[1])
        self._data[:, self._high : self._high + rows.shape[1]] = rows
        self._high += rows.shape[1]
        if self._keep:
            self._low = max(self._low, self._high - self._keep)

    def drop_oldest(self, n: int) -> None:
        """Forget the first ``n`` rows."""
        self._low += n

    def drop_newest(self, n: int) -> None:
        """Take back the last ``n`` rows (a measurement repeats a token)."""
        self._high -= n

    def _make_room(self, more: int) -> None:
        """Slide to the front; into larger storage unless that frees at least a quarter of what there is."""
        old = self.view
        b, cap, g, d = self._data.shape
        while len(self) + more > (cap if self._keep else cap * 3 // 4):
            cap *= 2
        self._data = torch.empty(b, cap, g, d, dtype=old.dtype, device=old.device)
        self._data[:, : old.shape[1]] = old
        self._low, self._high = 0, old.shape[1]


@dataclass(slots=True)
class LayerCache:
    """Of one layer: the raw tail that the next compressed block needs, all compressed blocks, all selection keys
    (blocks may be chosen from anywhere), the last w window keys; and the values of each."""

    raw_k: Rows
    raw_v: Rows
    cmp_k: Rows
    cmp_v: Rows
    sel_k: Rows
    sel_v: Rows
    win_k: Rows
    win_v: Rows


@dataclass(slots=True)
class BranchCache:
    """Of one layer with a single branch: its keys and values."""

    k: Rows
    v: Rows
