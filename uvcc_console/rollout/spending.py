"""What a run has cost and how long it has lived, held against its limits: by the run's own clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar

from uvcc_console.core import events as ev
from uvcc_console.core import pod_states
from uvcc_console.fleet.provider import Caps, Provider, Rents
from uvcc_console.fleet.runclock import RunClock
from uvcc_console.fleet.spend_ledger import Ledger
from uvcc_console.plan.schema import LimitsPart


@dataclass
class Spending:
    """One run's ledger, its provider's books, and the time that is left. ``created``: when the run was born."""

    KINDS: ClassVar = (ev.PodChanged.kind, ev.CostTick.kind)  # what the ledger is rebuilt from
    limits: LimitsPart
    provider: Provider
    clock: RunClock
    created: float
    ledger: Ledger = field(init=False)
    _told: set[str] = field(default_factory=set)
    _shown: ev.CostTick | None = None
    _risen: set[tuple[str, float]] = field(default_factory=set)
    _pods: dict[str, ev.PodChanged] = field(default_factory=dict)  # what was last said of each

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.limits.hourly, self.limits.total, clock=self.clock.now)
        if isinstance(self.provider, Rents):
            self.provider.caps = Caps(self.limits.hourly, self.limits.total)

    def heard(self, event: ev.Event) -> None:
        """An event that has just happened."""
        self._know(event)
        self.ledger.apply(event, self.clock.now())

    def replay(self, events: Iterable[ev.Event]) -> None:
        """What the journal tells of before this process."""
        for event in events:
            self._know(event)
            self.ledger.apply(event)

    def _know(self, event: ev.Event) -> None:
        if isinstance(event, ev.CostTick):
            self._shown = event
        if isinstance(event, ev.PodChanged):
            self._pods[event.pod] = event

    @property
    def remaining(self) -> float:
        """Seconds until the run's time to live is over."""
        return max(0.0, self.limits.ttl - (self.clock.now() - self.created))

    def look(self) -> list[ev.Event]:
        """The spending of now, while there is a pod, and every bill that is larger than our own count, once.

        Of pods that cost nothing, too: a console takes the journal's silence for a conductor that does not go on. And
        once more when the last pod is gone: what its end took is paid for, and nothing is any more.
        """
        said: list[ev.Event] = []
        if isinstance(self.provider, Rents):
            self.ledger.books = self.provider.books()
        said += self._dearer()
        for name, ours, theirs in self.ledger.books.over:
            if name not in self._told:
                self._told.add(name)
                text = f"the provider billed {theirs:.2f} $ for pod {name}; by its price and our clock it is {ours:.2f}"
                hint = "the larger counts for limits.total; ask the provider for the bill"
                said.append(ev.Alert(level="error", name="billed", text=text, hint=hint, subject=name))
        now = self.ledger.tick(self.remaining)
        changed = self._shown is not None and (self._shown.hourly, self._shown.spent) != (now.hourly, now.spent)
        if self.ledger.counting or now.hourly > 0 or said or changed:
            said.append(now)
            self._shown = now
        return said

    def _dearer(self) -> list[ev.Event]:
        """Each pod in use whose price has risen: what it costs now, and once for each price an alert."""
        said: list[ev.Event] = []
        for name, first, price in self.ledger.books.dearer:
            pod = self._pods.get(name.rpartition("-")[2])
            if pod is None or pod.state in pod_states.ABSENT or pod.price_hr >= price:
                continue
            said.append(replace(pod, ts=0.0, price_hr=price, detail=f"it costs {price:.2f} $/h now"))
            if (name, price) not in self._risen:
                self._risen.add((name, price))
                text = f"pod {pod.pod} costs {price:.2f} $/h now, {first:.2f} were agreed to; it counts from now on"
                hint = "end or replace it if that is too much: limits.hourly and limits.total hold as before"
                said.append(ev.Alert(level="warn", name="dearer", text=text, hint=hint, subject=pod.pod))
        return said

    def over(self) -> str:
        """Why the run has to end now; empty while it may go on."""
        if breach := self.ledger.breach():
            return f"spend guard: {breach}"
        return "" if self.remaining > 0 else f"its time to live of {self.limits.ttl:.0f} s is over"
