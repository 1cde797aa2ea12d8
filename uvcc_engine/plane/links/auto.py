"""Automatic link: direct to whoever can be reached, through the relay to everybody else, changing over while running.

A direct connection counts as reachable when sealed frames have come through it both ways; until then, and whenever it
breaks, frames of that peer go through the relay. Sessions and channels do not notice: they belong to the parties and
not to a path.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from uvcc_engine.contract.run_files.eventlog import Notice
from uvcc_engine.plane.channel import Timing
from uvcc_engine.plane.links.direct import DirectLink
from uvcc_engine.plane.links.link import Arrival, Link, no_work
from uvcc_engine.plane.timing import LinkTiming, Outgoing

AUTO_POLICY: Final = LinkTiming(
    timing=Timing(rto_s=2.0, rto_floor_s=0.75, rto_cap_s=30.0), hello_s=0.25, ack_delay_s=0.1, ack_frames=64
)
_GLANCE_S: Final = 0.25  # how often the path that is not waited for is looked at
_GIVE_UP_S: Final = 5.0  # a relay front that is down for so long is replaced by the next one


class RelayPath(Link, Protocol):
    """A link through the relay."""

    def down_s(self) -> float:
        """Seconds since the relay was last reached."""


class AutoLink:
    """Implements ``links.Link`` over a direct link and the fronts of a relay, the preferred first."""

    kind = "auto"
    eager = True
    batch_bytes = 0

    def __init__(
        self,
        direct: DirectLink,
        relays: Sequence[RelayPath],
        peers: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
        policy: LinkTiming = AUTO_POLICY,
    ) -> None:
        self.policy = policy
        self._direct = direct
        self._relays = relays
        self._relay = relays[0]
        self._peers = tuple(peers)
        self._clock = clock
        self._next_glance = 0.0
        self._told: dict[int, str] = {}
        self._resets: list[int] = []
        self._notices: list[Notice] = []

    def path_to(self, dst: int) -> str:
        """Kind of the path that frames for ``dst`` take now."""
        return self._direct.kind if self._direct.connected(dst) else self._relay.kind

    def ready(self, dst: int) -> bool:
        return self._direct.ready(dst) if self._direct.connected(dst) else self._relay.ready(dst)

    def send(self, dst: int, out: Outgoing) -> None:
        connected = self._direct.connected(dst)
        if not connected:
            self._relay.send(dst, out)
        if connected or out.slot:  # handshakes and signs of life also try an unproven connection, and so prove it
            self._direct.send(dst, out)

    def flush(self) -> None:
        self._direct.flush()

    def exchange(self, wait: float, src: int | None, meanwhile: Callable[[], None] = no_work) -> list[Arrival]:
        arrivals = self._direct.exchange(0.0, src)
        now = self._clock()
        end = now + wait
        while not arrivals:
            slice_s = max(0.0, min(end - now, _GLANCE_S))
            if (src is not None and self._direct.connected(src)) or all(map(self._direct.connected, self._peers)):
                if self._relay.pending() or now >= self._next_glance:
                    arrivals = self._by_relay(0.0, src, now)
                arrivals = arrivals or self._direct.exchange(slice_s, src, meanwhile)
            else:
                arrivals = self._by_relay(slice_s, src, now, meanwhile) or self._direct.exchange(0.0, src)
            now, meanwhile = self._clock(), no_work
            if now >= end or self._resets or self._notices:
                break
        self._tell()
        return arrivals

    def _by_relay(
        self, wait: float, src: int | None, now: float, meanwhile: Callable[[], None] = no_work
    ) -> list[Arrival]:
        self._next_glance = now + _GLANCE_S
        arrivals = self._relay.exchange(wait, src, meanwhile)
        if self._relay.down_s() > _GIVE_UP_S and len(self._relays) > 1:
            before = self._relay
            self._relay = self._relays[(self._relays.index(before) + 1) % len(self._relays)]
            why = f"{before.kind} does not answer"
            self._notices.append(Notice("link_choice", {"peer": None, "kind": self._relay.kind, "why": why}))
            self._resets += [p for p in self._peers if not self._direct.connected(p)]
        return arrivals

    def _tell(self) -> None:
        """Say which path each peer has, and why."""
        for peer in self._peers:
            kind = self.path_to(peer)
            if self._told.get(peer) == kind:
                continue
            if kind == self._direct.kind:
                why = "sealed frames passed both ways"
            else:
                why = "the direct connection broke" if peer in self._told else "not reachable directly (yet)"
            self._told[peer] = kind
            self._notices.append(Notice("link_choice", {"peer": peer, "kind": kind, "why": why}))

    def proven(self, src: int, path: object) -> None:
        if path is not None:
            self._direct.proven(src, path)
            self._tell()  # now: it may break before anybody asks this link for something again

    def resets(self) -> list[int]:
        found, self._resets = self._resets + self._direct.resets(), []
        for relay in self._relays:
            found += [p for p in relay.resets() if not self._direct.connected(p)]
        return found

    def notices(self) -> list[Notice]:
        found, self._notices = self._notices, []
        for link in (self._direct, *self._relays):
            found += link.notices()
        return found

    def lost(self, dst: int) -> float:
        return 0.0  # a refused connection says little where there is another way

    def away_s(self) -> float:
        return 0.0 if all(map(self._direct.connected, self._peers)) else self._relay.down_s()

    def trouble(self, dst: int) -> str:
        return ""  # there is another way

    def unconfirmed(self) -> bool:
        return self._direct.pending() or self._relay.unconfirmed()

    def pending(self) -> bool:
        return self._direct.pending() or self._relay.pending()

    def close(self) -> None:
        for link in (self._direct, *self._relays):
            link.close()
