"""The passes of one stage on one tensor rank: through its parts, and out of it in rows. (The parts themselves are those
of the layer types: ``model.parts``, ``model.tensor_parallel``.)
"""

from __future__ import annotations

from uvcc_engine.model.parts import Pass, Plain, Settling, StagePart, gather_rows, leaves, my_rows
from uvcc_engine.model.parts import backward_parts_protocol as backward_protocol
from uvcc_engine.model.parts import forward_parts_protocol as forward_protocol
from uvcc_engine.mpc.foundation.runtime import MpcProtocol
from uvcc_engine.mpc.foundation.share import Share

__all__ = [
    "Pass",
    "Plain",
    "Settling",
    "StagePart",
    "ToRows",
    "backward_protocol",
    "forward_protocol",
    "leaves",
    "my_rows",
]


class ToRows(Plain):
    """Columns in, rows out: each rank gathers all columns and keeps its own rows. Backward the other way. Local."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self._columns = columns

    def forward_protocol(self, on: Pass, x: Share) -> MpcProtocol[Share]:
        whole = gather_rows(on.tp, x.T, self._columns)
        return whole.T.map(lambda t: my_rows(on.tp, t))
        yield  # a generator like its siblings

    def backward_protocol(self, on: Pass, grad: Share, wanted: bool) -> MpcProtocol[Share]:
        whole = gather_rows(on.tp, grad, on.rows)
        return whole.T.map(lambda t: my_rows(on.tp, t)).T
        yield  # a generator like its siblings
