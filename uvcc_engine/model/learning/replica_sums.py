"""Sums over the rows of all replicas of a party, for what is grown or moved by sums instead of by gradients.

Every replica has rows of its own and adds them up; what is computed of the whole sums is divided among the replicas
and gathered, so that all of them hold identical shares. A replica alone has all rows and computes all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from uvcc_engine.model.additive import product, settle_protocol
from uvcc_engine.model.parts import gather_rows
from uvcc_engine.model.tensor_parallel import bounds
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime, par
from uvcc_engine.mpc.foundation.share import Share, cat
from uvcc_engine.mpc.products.arithmetic import DEALER, matmul_protocol, public
from uvcc_engine.parallel.group import Communicator

ALONE = Communicator("dp", [0], 0)


@dataclass(frozen=True, slots=True)
class ReplicaSums:
    """What one replica of the group ``dp`` adds up with its sisters. All of them call everything in one order."""

    dp: Communicator = ALONE

    def mine(self, n: int) -> slice:
        """Which of ``n`` things this replica computes."""
        return bounds(n, self.dp.size, self.dp.index)

    def summed(self, x: Share) -> Share:
        """The sum of all replicas' shares of this shape. Local to the party."""
        if self.dp.size == 1:
            return x
        both = self.dp.sum_(torch.stack([x.first, x.second]))
        return Share(both[0], both[1], x.f)

    def gathered(self, x: Share, count: int) -> Share:
        """All replicas' :meth:`mine` of ``count`` along the first axis, in order: [count, ...] of [this one's, ...]."""
        return gather_rows(self.dp, x, count)

    def matmuls_protocol(
        self, rt: Runtime, pairs: Sequence[tuple[Share, Share]], scale: float, columns: slice
    ) -> MpcProtocol[Share]:
        """``(x @ y) * scale`` of each pair side by side over the rows of all replicas, these ``columns`` of it, of
        which every replica asks for others: ``x`` [m, this replica's rows], ``y`` [this replica's rows, n]. Costs as
        ``matmul_protocol``.

        Additive terms are summed before the one truncation. Where products are proved each replica's product is a claim
        of its own, truncated by itself, and shares are summed.
        """
        x, y = pairs[0]
        if self.dp.size == 1 or rt.ledger is not None:
            each: MpcProtocol[list[Share]] = par(*(matmul_protocol(rt, a, b, scale=scale) for a, b in pairs))
            return self.summed(cat((yield from each), 1)).index((slice(None), columns))
        z = self.dp.sum_(torch.cat([product(rt, a, b, DEALER) for a, b in pairs], 1))[:, columns].contiguous()
        if not z.numel():
            return self.nothing(rt, x.shape[0], x.f)
        return (yield from settle_protocol(rt, z, y.f, x.f, DEALER, scale))

    def nothing(self, rt: Runtime, rows: int, f: int) -> Share:
        """What a replica has that computes none of ``rows`` numbers side by side: [rows, 0]."""
        empty: Tensor = torch.zeros(rows, 0)
        return public(rt, empty, f=f)
