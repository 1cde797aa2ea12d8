"""The epoch roots that workers publish at the relay: how a domain's console sees agreement, and a fork.

Nobody conducts a domain's console, so it holds the parties' words against each other itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from uvcc_console.core import events as ev
from uvcc_console.core.reported_state import disagreement
from uvcc_console.core.snapshot import EpochAgreement
from uvcc_engine.contract.job.topology import Coord
from uvcc_engine.contract.parsing.outside import STEPS, parsed
from uvcc_engine.contract.run_files import records

KEEP: Final = 64
PAST_STEPS: Final = 16


class Published:
    """Turns signed lists of roots into events, each root once, and the first disagreement into a fork."""

    def __init__(self) -> None:
        self._epochs: dict[int, EpochAgreement] = {}
        self._forked = False

    def take(self, coord: str, listed: object, steps: int = 0) -> list[ev.Event]:
        """What is new in a worker's list (JSON text). A root that differs from the one it gave before is kept out.

        ``steps`` > 0: no epoch lies much beyond.
        """
        found: list[ev.Event] = []
        for epoch, root, pairs in _read(listed, steps + PAST_STEPS if steps else STEPS):
            known = self._epochs.get(epoch, EpochAgreement(epoch))
            if coord in known.roots:
                continue
            known = EpochAgreement(epoch, {**known.roots, coord: root}, {**known.pairs, coord: pairs})
            self._epochs[epoch] = known
            found.append(ev.RootReported(coord=coord, epoch=epoch, root=root, pairs=pairs))
            pair = disagreement(known)
            if pair is not None and not self._forked:
                self._forked = True
                parties = sorted({Coord.parse(c).party for c in pair})
                detail = f"{pair[0]} and {pair[1]} published different messages"
                found.append(ev.ForkDetected(epoch=epoch, parties=parties, detail=detail))
        for epoch in sorted(self._epochs)[:-KEEP]:
            del self._epochs[epoch]
        return found


def _read(listed: object, most: int) -> list[tuple[int, str, dict[str, str]]]:
    """The roots of a list; nothing of one that is damaged."""
    try:
        found = parsed(listed) if isinstance(listed, str) and listed else []
    except ValueError:
        return []
    read = [records.epoch_root(r, most) for r in found if isinstance(r, Mapping)] if isinstance(found, list) else []
    good = [(r.epoch, r.root, dict(r.pairs)) for r in read if isinstance(r, records.ReportedRoot)]
    return sorted(good, key=lambda r: r[0])[-KEEP:] if len(good) == len(read) else []
