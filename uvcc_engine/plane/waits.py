"""How long a party waits: for its peers, for what stands between them, and how much less once it is asked to end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from uvcc_engine.contract.errors import PeerLostError

_STOPPED_S: Final = 5.0  # so much longer than it was to wait: this process did not run
_WORTH_ASKING_S: Final = 2.0  # of silence: whoever is heard needs no question whether to go on waiting


@dataclass(frozen=True, slots=True)
class Waits:
    """How long to be patient, in seconds."""

    peer_s: float = 180.0  # without any sign of life of the peer
    first_s: float = 0.0  # the same until its first sign of life, if that is longer: pods start minutes apart
    refused_s: float = 10.0  # its host refuses connections after it had accepted one
    order_s: float = 30.0  # the peer is alive and sends, but not what is due
    proof_s: float = 300.0  # the peer is alive, and owes its part of a proof
    away_s: float = 900.0  # the relay cannot be reached: it may be started again, or elsewhere
    halting_s: float = 25.0  # either of the two, once the run is to halt: a halt's own patience is a minute
    report_s: float = 5.0  # before a wait is worth an event
    close_s: float = 10.0  # for the last acknowledgements
    look_s: float = 0.005  # between two looks beside the user thread; more where workers outnumber processors
    idle_s: float = 0.02  # the same while there is nothing to do for it


def lost(peer: int, why: str, silent: float, trouble: str) -> PeerLostError:
    """``trouble``: why there was never a way to this peer, "" where there was one."""
    if trouble:
        hint = "is a firewall between the two? nc -vz ADDRESS PORT, from the machine that connects"
        return PeerLostError(f"party {peer} {why}, for {silent:.0f} s: {trouble}", hint, party=peer)
    hint = "look at that party's log; resume from the last common checkpoint when it is back"
    return PeerLostError(f"party {peer} {why} (last sign of life {silent:.0f} s ago)", hint, party=peer)


def away_hint(kind: str) -> str:
    """What to do about a relay, or a broker, that a link of this kind does not reach."""
    if kind == "nats":
        return "see that it runs, and that nats.url, nats.token_file and nats.ca_file are its own; then uvcc resume"
    return "relay.log beside its store says why it ended; uvcc resume RUN starts it again"


class HaltPatience:
    """Whether it is sensible to wait on for somebody who is silent while this party is asked to halt.

    The parties stop at the same step by a vote. Where a vote cannot arrive, a halt would wait as long as a run does;
    who asked for it has given the worker up by then, and pays for it all the same.
    """

    def __init__(self, halting_s: float) -> None:
        self._limit = halting_s
        self._since: float | None = None
        self.asked: Callable[[], bool] = lambda: False

    def over(self, quiet: float, now: float) -> bool:
        """``quiet``: seconds for which nothing came by now. A request that is taken back counts from anew."""
        if quiet < _WORTH_ASKING_S or not self.asked():
            self._since = None
            return False
        self._since = now if self._since is None else self._since
        return min(quiet, now - self._since) > self._limit


def stopped_for(seconds: float, longest_s: float) -> float:
    """How long this process was stopped, or had no processor, between two looks that lie ``seconds`` apart.

    ``longest_s``: the longest wait. What came meanwhile lies there still unread, and no peer kept it back.
    """
    lost = seconds - longest_s
    return lost if lost > _STOPPED_S else 0.0
