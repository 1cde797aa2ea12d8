"""How long a plane waits: for what it missed while it was stopped, and for the silent once it is to end. Clocks are
the test's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from plane_kit import IDENTITIES, PUBLIC, SID, Log

from uvcc_engine.contract.errors import PeerLostError, ProtocolError, UnreachableError
from uvcc_engine.contract.run_files.eventlog import Notice
from uvcc_engine.plane.api import Tag
from uvcc_engine.plane.endpoint import Endpoint
from uvcc_engine.plane.live import LivePlane
from uvcc_engine.plane.timing import LinkTiming
from uvcc_engine.plane.waits import HaltPatience, Waits
from uvcc_engine.transcript.formats import kinds


class TimedLink:
    """Nothing comes over it; each look takes as long as it may, and the looks in ``stopped`` so much longer."""

    kind, policy, eager, batch_bytes = "direct", LinkTiming(), False, 1 << 20

    def __init__(self, stopped: dict[int, float]) -> None:
        self.now, self.looks, self._stopped = 0.0, 0, stopped

    def clock(self) -> float:
        return self.now

    def exchange(self, wait: float, src: int | None, meanwhile: Callable[[], None]) -> list[Any]:
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

    def trouble(self, dst: int) -> str:
        return ""

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


class AwayLink(TimedLink):
    """What stands between the parties is away from ``gone`` on; who asks is told so once."""

    def __init__(self, gone: float) -> None:
        super().__init__({})
        self._gone, self._told = gone, False

    def away_s(self) -> float:
        return max(0.0, self.now - self._gone)

    def notices(self) -> list[Any]:
        if self._told or not self.away_s():
            return []
        self._told = True
        return [Notice("relay_down", {"url": "http://h:1", "why": "refused"})]


def halted_plane(link: TimedLink, halted_at: float, log: Log, heard: float = 0.0) -> LivePlane:
    """A plane of party 0 whose run is asked to halt at that moment, and whose peers were heard last at another."""
    endpoints = {p: Endpoint(0, p, SID, IDENTITIES[0], PUBLIC[p], heard) for p in (1, 2)}
    plane = LivePlane(0, endpoints, link, log, log.event, Waits(), link.clock)
    plane.patience.asked = lambda: link.now >= halted_at
    return plane


@pytest.mark.parametrize(
    ("gone", "halted_at", "ends"), [(10.0, 100.0, 125.0), (100.0, 10.0, 125.0), (10.0, 1e9, 910.0)]
)
def test_a_halt_does_not_wait_for_a_relay_that_is_away(gone: float, halted_at: float, ends: float) -> None:
    """A halt's rung lasts a minute; what cannot vote within it ends, and says that the relay was the reason."""
    link = AwayLink(gone)
    plane = halted_plane(link, halted_at, Log(), heard=1e9)  # the peers are not to blame
    with pytest.raises(UnreachableError, match=r"the relay http://h:1 has not been reached for \d+ s") as ended:
        plane.recv(1, Tag(0, 0, 0, kinds.OPEN))
    assert ends <= link.now < ends + 4
    assert ("the run is to halt" in ended.value.what) == (halted_at < 1e9)
    assert "uvcc resume" in ended.value.hint
    plane.close(graceful=False)


def test_a_halt_does_not_wait_for_a_silent_peer_as_a_run_does() -> None:
    link, log = TimedLink({}), Log()
    plane = halted_plane(link, 60.0, log)
    with pytest.raises(PeerLostError, match="is silent, and the run is to halt"):
        plane.recv(1, Tag(0, 0, 0, kinds.OPEN))
    assert 85.0 <= link.now < 88.0
    assert log.named("peer_lost")[0]["party"] == 1
    plane.close(graceful=False)


def test_a_halt_that_is_taken_back_or_a_peer_that_is_heard_counts_from_anew() -> None:
    wanted, patience = [True], HaltPatience(25.0)
    patience.asked = lambda: wanted[0]
    assert not patience.over(30.0, 100.0)  # asked for just now
    assert not patience.over(54.0, 124.0)
    wanted[0] = False
    assert not patience.over(60.0, 130.0)
    wanted[0] = True
    assert not patience.over(70.0, 140.0)
    assert not patience.over(0.5, 150.0)  # it was heard
    assert not patience.over(20.0, 170.0)
    assert not patience.over(24.0, 174.0)
    assert patience.over(46.0, 196.0)
