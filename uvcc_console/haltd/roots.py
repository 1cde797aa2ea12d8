"""The epoch roots that workers publish at the relay: how a domain's console sees agreement, and a fork.

Nobody conducts a domain's console, so it holds the parties' words against each other itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from uvcc_console.core import events as ev
from uvcc_console.core.snapshot import EpochAgreement
from uvcc_console.core.state import disagreement
from uvcc_engine.parallel.topology import Coord

KEEP: Final = 64


class Published:
    """Turns signed lists of roots into events, each root once, and the first disagreement into a fork."""

    def __init__(self) -> None:
        self._epochs: dict[int, EpochAgreement] = {}
        self._forked = False

    def take(self, coord: str, listed: object) -> list[ev.Event]:
        """What is new in a worker's list (JSON text). A root that differs from the one it gave before is kept out."""
        found: list[ev.Event] = []
        for root in _read(listed):
            epoch = int(root["epoch"])
            known = self._epochs.get(epoch, EpochAgreement(epoch))
            if coord in known.roots:
                continue
            pairs = {str(k): str(v) for k, v in root["pairs"].items()}
            known = EpochAgreement(epoch, {**known.roots, coord: str(root["root"])}, {**known.pairs, coord: pairs})
            self._epochs[epoch] = known
            found.append(ev.RootReported(coord=coord, epoch=epoch, root=str(root["root"]), pairs=pairs))
            pair = disagreement(known)
            if pair is not None and not self._forked:
                self._forked = True
                parties = sorted({Coord.parse(c).party for c in pair})
                detail = f"{pair[0]} and {pair[1]} published different messages"
                found.append(ev.ForkDetected(epoch=epoch, parties=parties, detail=detail))
        for epoch in sorted(self._epochs)[:-KEEP]:
            del self._epochs[epoch]
        return found


def _read(listed: object) -> list[Mapping[str, Any]]:
    """The roots of a list; nothing of one that is damaged."""
    try:
        found = json.loads(str(listed)) if listed else []
        good = [r for r in found if isinstance(r["pairs"], dict) and int(r["epoch"]) >= 0 and r["root"]]
    except (ValueError, TypeError, KeyError):
        return []
    return sorted(good, key=lambda r: int(r["epoch"]))
