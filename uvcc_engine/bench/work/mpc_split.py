"""Rows of ``bench mpc --split``: what of a piece of work depends on no data, and what is left of it.

Random numbers that two parties draw alike, and what a dealer sends, are fixed by the session's keys and the program:
they can be made before the data are there. ``..._offline`` is the processor time of drawing and the bytes of dealers,
``..._online`` all else, each held against the whole. What a dealer computes from its random numbers counts as online,
since it is done where the message is built. ``..._ahead`` is the processor time of the thread that computes, held
against the same where it draws for itself, when a thread beside it draws the next run's numbers (``drawn_ahead``): what
a step takes where a core is idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.machine.benchrows import Row, row


def table(measured: Sequence[dict[str, Any]], names: Sequence[str]) -> list[Row]:
    """Three rows of seconds and two of bytes a party, of each piece of work that was measured with its split.

    Seconds are processor time of the party that has the most of it.
    """
    out: list[Row] = []
    for name in (n for n in names if "drawing" in measured[0].get(n, {})):
        parts = [party[name] for party in measured]
        whole = [max(run) for run in zip(*(p["cpu"] for p in parts), strict=True)]
        drawn = [max(run) for run in zip(*(p["drawing"] for p in parts), strict=True)]
        middle = sorted(whole)[len(whole) // 2]
        sent, dealt = (sum(p[part] for p in parts) / PARTIES for part in ("bytes", "dealt"))
        out.append(row(f"{name}_offline", "seconds", "s", drawn, middle))
        out.append(row(f"{name}_online", "seconds", "s", [a - b for a, b in zip(whole, drawn, strict=True)], middle))
        alone, beside = (
            [max(run) for run in zip(*(p[part] for p in parts), strict=True)] for part in ("thread", "ahead")
        )
        out.append(row(f"{name}_ahead", "seconds", "s", beside, sorted(alone)[len(alone) // 2]))
        out.append(row(f"{name}_offline", "bytes_per_party", "B", [dealt], sent))
        out.append(row(f"{name}_online", "bytes_per_party", "B", [sent - dealt], sent))
    return out
