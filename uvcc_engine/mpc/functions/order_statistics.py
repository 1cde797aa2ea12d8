"""The least, the greatest and quantiles of each secret column: by bisection, and nothing is opened.

For a candidate the number of rows below it is a sum of secret bits, and whether it is small enough is a secret bit as
well; that bit, not anybody's look at it, decides where the search goes on. The kinds and sizes of messages follow from
the numbers of rows, columns and steps alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from uvcc_engine.mpc.comparisons.selection import drelu_arithmetic_protocol
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.products.arithmetic import DEALER, add, add_ring, public, scale_int, sub


def order_statistics_protocol(
    rt: Runtime, x: Share, ranks: Sequence[int], log_limit: int, log_step: int, *, dealer: int = DEALER
) -> MpcProtocol[Share]:
    """The values of ``ranks`` (0: the least) in each column of ``x [rows, columns]``: ``[ranks, columns]``.

    Each is the largest multiple of ``2^log_step`` that is not above it. ``|x|`` is below ``2^log_limit``, and
    ``-log_step`` at most ``x.f``. ``2 (log_limit - log_step + 1)`` comparisons after each other, of 5 to 7 rounds each:
    of all rows for each rank, and of a number for each rank and column.
    """
    rows, columns = x.shape
    wanted = torch.tensor([[rows - rank] for rank in ranks], dtype=torch.int64, device=rt.device)
    found = public(rt, torch.full((len(ranks), columns), -(2.0**log_limit)), f=x.f).to(rt.device)
    for bit in range(log_limit, log_step - 1, -1):
        size = 1 << (x.f + bit)
        candidate = add_ring(rt, found, size)
        above = yield from drelu_arithmetic_protocol(
            rt, sub(x.reshape(1, rows, columns), candidate.reshape(len(ranks), 1, columns)), dealer=dealer
        )
        enough = yield from drelu_arithmetic_protocol(rt, add_ring(rt, above.sum(1), -wanted), dealer=dealer)
        found = add(found, scale_int(enough, size).with_f(x.f))
    return found
