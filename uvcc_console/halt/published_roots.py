"""The epoch roots that workers publish at the relay: how a domain's console sees agreement, and a fork.

Nobody conducts a domain's console, so it holds the parties' words against each other itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from uvcc_console.core import events as ev
from uvcc_console.core.folding.reported_state import disagreement
from uvcc_console.core.snapshot import EpochAgreement
from uvcc_engine.contract.job.topology import Coord
from uvcc_engine.contract.parsing.untrusted import STEPS
from uvcc_engine.contract.run_files.records import ReportedRoot

KEEP: Final = 64
PAST_STEPS: Final = 16


class Published:
    """Turns signed lists of roots into events, each root once, and the first disagreement into a fork."""

    def __init__(self) -> None:
        self._epochs: dict[int, EpochAgreement] = {}
        self._forked = False

    def take(self, coord: str, listed: Sequence[ReportedRoot], steps: int = 0) -> list[ev.Event]:
        """What is new in a worker's list, by epoch. A root that differs from the one it gave before is kept out.

        ``steps`` > 0: a list with an epoch much beyond it is damaged, and nothing of it counts.
        """
        found: list[ev.Event] = []
        most = steps + PAST_STEPS if steps else STEPS
        for said in listed[-KEEP:] if all(r.epoch <= most for r in listed) else ():
            epoch, root, pairs = said.epoch, said.root, dict(said.pairs)
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
