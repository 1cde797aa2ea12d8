"""When a run's conductor has died, somebody must still stop what runs and what costs. Pure: it says when, not how."""

from __future__ import annotations

from dataclasses import dataclass, field

from uvcc_console.core import events as ev
from uvcc_console.core import pod_states
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.fleet.spend_ledger import Ledger
from uvcc_console.plan.own_resumes import ordered
from uvcc_console.plan.schema import LimitsPart
from uvcc_engine.contract.errors import ConfigError

ENDS = ("teardown", "stop")  # what an operator asks for who wants the pods gone
AGAIN_S = 60.0
SUCCESSOR_S = 10.0  # twice as long each time; whoever was killed by hand may be started again by hand
ALONE_S = 5.0
FROZEN_S = 60.0  # one that is stopped may be let go on; the other domains wait half as long again
ENDING_S = 15.0  # by then a conductor that was started for the teardown has said who it is


@dataclass(slots=True)
class Reaper:
    """Counts how long the run has been without a conductor. All times are the run's own, see ``fleet.runclock``."""

    ledger: Ledger = field(default_factory=Ledger)
    resumable: bool = True  # one domain's part of a run is not: nobody comes back for it
    _ending: bool = False
    _alone_since: float = -1.0
    _asked: float = float("-inf")
    _resumes: int = 0  # so often the run went on by itself
    _followed: float = float("-inf")

    def see(self, event: ev.Event, at: float | None = None) -> None:
        """``at``: the run's time, for an event that has just happened."""
        self.ledger.apply(event, at)
        self._resumes += ordered(event)
        if isinstance(event, ev.Intent) and event.action in (*ENDS, "resume"):
            self._ending = event.action in ENDS
        elif isinstance(event, ev.StageChanged) and event.name == "teardown":
            self._ending = event.status == "running"
        elif isinstance(event, ev.ActionDone) and event.action in ENDS and not event.ok:  # not all domains have signed
            self._ending = False

    def due(self, s: Snapshot, *, conducted: bool, now: float, frozen: bool = False) -> str:
        """Why the run must be ended now; empty while a conductor looks after it, or while one may still come back.

        Without a conductor the caps and the time to live hold at once, and ``limits.wait`` is how long one may be away;
        ``ALONE_S`` where no other could go on with the run (``FROZEN_S`` where this one still could: it is ``frozen``),
        ``ENDING_S`` where it died while its teardown was asked for or under way.
        """
        left = [p for p in s.pods.values() if p.state not in pod_states.ABSENT]
        if conducted or not left:
            self._alone_since = -1.0
            return ""
        if self._alone_since < 0:
            self._alone_since = now
        limits = _limits(s)
        self.ledger.hourly_cap, self.ledger.total_cap = limits.hourly, limits.total
        alone = now - self._alone_since
        patience = limits.wait if self.resumable else FROZEN_S if frozen else ALONE_S
        why = ""
        if now - s.created > limits.ttl:
            why = f"its time to live of {limits.ttl:.0f} s is over"
        elif breach := self.ledger.breach():
            why = breach
        elif self._ending and alone >= ENDING_S:
            why = "its conductor died before the teardown was done"
        elif alone >= patience:
            why = f"it has had no conductor for {alone:.0f} s"
        if not why or now - self._asked < AGAIN_S:
            return ""
        self._asked = now
        return why

    def successor(self, s: Snapshot, *, now: float) -> str:
        """Whether another conductor is due for one that has died, by ``limits.resumes``: which time it is, ``2 of 3``.

        Empty where it is not: while somebody has to decide, or has asked for a halt or the end. To be called after
        :meth:`due`, with the run's time; whether the conductor is dead, and not merely frozen, knows the caller.
        """
        most, stage = _limits(s).resumes, s.stage
        goes = stage is not None and (stage.status == "running" or stage.again > 0)
        wanted = s.halt.nonce and not s.halt.drill and not s.halt.done  # somebody wants it to stand still
        if self._alone_since < 0 or self._ending or not self.resumable or not goes or wanted or self._resumes >= most:
            return ""
        if now - max(self._alone_since, self._followed) < SUCCESSOR_S * 2.0**self._resumes:
            return ""
        self._followed = now
        return f"{self._resumes + 1} of {most}"


def _limits(s: Snapshot) -> LimitsPart:
    """The profile's limits; the strictest where they cannot be read."""
    try:
        return LimitsPart.model_validate(dict(s.profile.get("limits", {})))
    except (ValueError, ConfigError):
        return LimitsPart()
