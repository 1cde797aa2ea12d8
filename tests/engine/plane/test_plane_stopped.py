"""A process that was stopped, or had no processor, for long holds that against no peer: clocks are the test's."""

from __future__ import annotations

from typing import Any

import pytest
from plane_kit import IDENTITIES, PUBLIC, SID, Log

from uvcc_engine.contract.errors import ProtocolError
from uvcc_engine.plane.api import Tag
from uvcc_engine.plane.endpoint import Endpoint
from uvcc_engine.plane.live import LivePlane, Waits
from uvcc_engine.plane.timing import LinkTiming
from uvcc_engine.transcript.formats import kinds


class TimedLink:
    """Nothing comes over it; each look takes as long as it may, and the looks in ``stopped`` so much longer."""

    kind, policy, eager, batch_bytes = "direct", LinkTiming(), False, 1 << 20

    def __init__(self, stopped: dict[int, float]) -> None:
        self.now, self.looks, self._stopped = 0.0, 0, stopped

    def clock(self) -> float:
        return self.now

    def exchange(self, wait: float, src: int | None) -> list[Any]:
        if src is not None:  # of the thread that waits
            self.looks += 1
            self.now += wait + self._stopped.get(self.looks, 0.0)
        return []

    def ready(self, dst: int) -> bool:
        return False

    def send(self, dst: int, out: Any) -> None: ...
    def flush(self) -> None: ...
    def proven(self, src: int, path: object) -> None: ...
    def close(self) -> None: ...

    def resets(self) -> list[int]:
        return []

    def notices(self) -> list[Any]:
        return []

    def lost(self, dst: int) -> float:
        return 0.0

    def away_s(self) -> float:
        return 0.0

    def pending(self) -> bool:
        return False

    def unconfirmed(self) -> bool:
        return False


@pytest.mark.parametrize("stopped", [{}, {1: 400.0}, {50: 1000.0, 200: 350.0}])
def test_a_proof_is_withheld_only_by_time_in_which_somebody_looked_for_it(stopped: dict[int, float]) -> None:
    link, log = TimedLink(stopped), Log()
    endpoints = {p: Endpoint(0, p, SID, IDENTITIES[0], PUBLIC[p], 0.0) for p in (1, 2)}
    waits = Waits(peer_s=1e6, proof_s=300.0)
    plane = LivePlane(0, endpoints, link, log, log.event, waits, link.clock)
    with pytest.raises(ProtocolError, match=r"withholds its part of a proof for 30[12] s"):
        plane.recv(1, Tag(0, 0, 0, kinds.PROOF))
    assert link.looks > 300
    plane.close(graceful=False)
