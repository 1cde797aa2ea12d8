"""The traffic between two parties, from what their workers' planes counted. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from uvcc_console.core import events as ev
from uvcc_console.core.folding.reducing import changed, put
from uvcc_console.core.snapshot import PairView, Snapshot
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.topology import PARTIES, Coord
from uvcc_engine.contract.parsing.untrusted import LATEST, as_float, as_int


def counted(s: Snapshot, e: ev.EngineEvent) -> Snapshot:
    """The snapshot with what a worker says of its traffic with a peer; unchanged where it does not say whose it is."""
    f = e.fields
    coord, peer, began = f.get("coord"), as_int(f.get("peer"), 0, PARTIES - 1), as_float(f.get("began"), 0.0, LATEST)
    if not isinstance(coord, str) or peer is None or began is None or coord not in s.workers:
        return s
    try:
        own = Coord.parse(coord).party
    except ConfigError:
        return s
    if own == peer or own >= PARTIES:
        return s
    key = f"{coord}>{peer}"
    now = PairView(
        coord,
        own,
        peer,
        began,
        e.ts,
        e.at or e.ts,
        bytes_out=_count(f, "bytes_out"),
        bytes_in=_count(f, "bytes_in"),
        messages=_count(f, "messages"),
        retransmits=_count(f, "retransmits"),
        waited_s=_count(f, "waited_ms") / 1000,
        round_trip_s=_count(f, "round_trip_us") / 1e6,
    )
    return changed(s, pairs=put(s.pairs, key, _paced(now, s.pairs.get(key))))


def _paced(now: PairView, before: PairView | None) -> PairView:
    """With what happened since the last word of the same process; of two in one breath the earlier pace stays."""
    if before is None or before.began != now.began:
        return now
    seconds = now.said - before.said
    if seconds < 0.5:
        return changed(now, out_s=before.out_s, in_s=before.in_s, wait_share=before.wait_share)
    return changed(
        now,
        out_s=max(0, now.bytes_out - before.bytes_out) / seconds,
        in_s=max(0, now.bytes_in - before.bytes_in) / seconds,
        wait_share=min(1.0, max(0.0, now.waited_s - before.waited_s) / seconds),
    )


def _count(fields: Mapping[str, Any], name: str) -> int:
    return as_int(fields.get(name), 0) or 0


@dataclass(frozen=True, slots=True)
class PairTraffic:
    """Two parties, all their workers together: bytes a second from the first to the second, and so on.

    ``out_s``: None before it can be told; ``round_trip_s``: median over the workers, None where none was measured;
    ``wait_share``: the mean part of the time that workers of ``src`` wait for ``dst``; ``waited_s``: their sum so far.
    """

    src: int
    dst: int
    workers: int
    bytes_out: int
    out_s: float | None
    round_trip_s: float | None
    waited_s: float
    wait_share: float | None
    retransmits: int
    ts: float


def by_party(s: Snapshot) -> list[PairTraffic]:
    """Every ordered pair of parties that was heard of, the one that is waited for longest first."""
    groups: dict[tuple[int, int], list[PairView]] = {}
    for view in s.pairs.values():
        groups.setdefault((view.party, view.peer), []).append(view)
    found = []
    for (src, dst), views in groups.items():
        paced = [v for v in views if v.out_s >= 0]
        trips = [v.round_trip_s for v in views if v.round_trip_s > 0]
        found.append(
            PairTraffic(
                src,
                dst,
                len(views),
                sum(v.bytes_out for v in views),
                sum(v.out_s for v in paced) if paced else None,
                statistics.median(trips) if trips else None,
                sum(v.waited_s for v in views),
                statistics.fmean(v.wait_share for v in paced) if paced else None,
                sum(v.retransmits for v in views),
                max(v.ts for v in views),
            )
        )
    return sorted(found, key=lambda p: (-(p.waited_s / p.workers), p.src, p.dst))


def moved_so_far(s: Snapshot) -> int:
    """Bytes that all workers sent in this phase, frames and repeats included, as their planes count them."""
    told = sum(as_int(w.beat.get("sent_bytes"), 0) or 0 for w in s.workers.values())
    return told or sum(v.bytes_out for v in s.pairs.values())


def foretold_so_far(s: Snapshot) -> tuple[float, float] | None:
    """(bytes, their error) that the forecast of the full run gives for the steps done; None without one."""
    p = s.prediction
    if p is None or s.phase != "full" or not p.steps or s.step < 1 or not p.bytes:
        return None
    share = min(1.0, s.step / p.steps)
    return p.bytes * share, p.bytes_error * share
