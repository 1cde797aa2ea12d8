"""What the fleet costs: every pod counts from the moment its creation was asked for until it is proven gone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from uvcc_console.core import events as ev
from uvcc_console.core import pod_states
from uvcc_console.fleet.provider import Books


@dataclass(slots=True)
class _Meter:
    """``price_hr``: what it costs now. ``rises``: from when it cost how much more an hour than before. ``asked``: no
    machine is there yet, so that its price is the quote's, or was asked for before it was known."""

    price_hr: float
    since: float
    asked: bool
    until: float | None = None
    rises: list[tuple[float, float]] = field(default_factory=list)

    def told(self, price_hr: float, when: float, asked: bool) -> None:
        """A higher price counts from when it is told on, that of the machine itself from its creation on."""
        if (more := price_hr - self.price_hr) > 0:
            if self.price_hr > 0 and not self.asked:
                self.rises.append((when, more))
            self.price_hr = price_hr
        self.asked = self.asked and asked

    def cost(self, now: float) -> float:
        end = now if self.until is None else self.until
        first = self.price_hr - sum(more for _, more in self.rises)
        return sum(more * max(0.0, end - since) for since, more in ((self.since, first), *self.rises)) / 3600.0


@dataclass(slots=True)
class Ledger:
    """Accrues US dollars from PodChanged events, so that it can be rebuilt from the journal at any time.

    ``hourly_cap`` and ``total_cap``: 0 means that nothing may be spent. ``wallet`` is the provider's balance if known.
    ``clock`` should be the run's, which no setting of the machine's clock moves. ``books``: what is known of each try
    at a rented pod, and of its bill. They alone count for the pods that they tell of: one that was asked for and never
    came has cost nothing, and one that its provider has ended costs no more, whenever the run hears of it.
    """

    hourly_cap: float = 0.0
    total_cap: float = 0.0
    wallet: float | None = None
    clock: Callable[[], float] = time.time
    books: Books = field(default_factory=Books)
    _shift: float = 0.0  # from the journal's wall clock to the run's, as last told
    _meters: dict[str, list[_Meter]] = field(default_factory=dict)

    def apply(self, event: ev.Event, at: float | None = None) -> None:
        """Start, re-price or stop a pod's meter. A pod of state failed or lost may still be billed: it runs on.

        A meter starts without a price too: the price counts from there on once it is known, and one that rises later
        from then on. One that falls is not believed: the provider's bill decides. ``at``: the run's time,
        for events that have just happened; those of a journal that is read again are placed by its ticks.
        """
        if isinstance(event, ev.CostTick) and event.at > 0 and at is None:
            self._shift = event.at - event.ts
            for meters in self._meters.values():
                meters[-1].since = min(meters[-1].since, event.at)
        if not isinstance(event, ev.PodChanged):
            return
        when = event.ts + self._shift if at is None else at
        asked = event.state == pod_states.CREATING
        known = self._meters.get(event.pod, [])
        running = known[-1] if known and known[-1].until is None else None
        if event.state in pod_states.ABSENT:
            if running is not None:
                running.until = when
        elif running is None:
            self._meters.setdefault(event.pod, []).append(_Meter(max(0.0, event.price_hr), when, asked))
        else:
            running.told(event.price_hr, when, asked)

    @property
    def hourly(self) -> float:
        """US dollars an hour of all pods that are not proven gone."""
        return self._with_ours(self.books.hourly, lambda m: m.price_hr if m.until is None else 0.0)

    def _with_ours(self, theirs: float, ours: Callable[[_Meter], float]) -> float:
        """What the books say, and of pods that they do not tell of what our own meters do."""
        known = self.books.pods
        if known is None:
            return max(theirs, sum(ours(m) for meters in self._meters.values() for m in meters))
        others = (m for pod, meters in self._meters.items() if pod not in known for m in meters)
        return theirs + sum(ours(m) for m in others if not m.asked)

    @property
    def counting(self) -> bool:
        """Whether any pod is not proven gone, with a price or without one."""
        return any(meters[-1].until is None for meters in self._meters.values())

    def spent(self, now: float | None = None) -> float:
        """US dollars so far: by our own clock, or by the provider's bill where that says more."""
        at = self.clock() if now is None else now
        return self._with_ours(self.books.spent, lambda m: m.cost(at))

    def tick(self, remaining_s: float | None = None) -> ev.CostTick:
        """The event for now; ``remaining_s``: how long the run may go on. Its forecast is what it costs then at most:
        the run is torn down before it meets its cap."""
        now = self.clock()
        spent, hourly = self.spent(now), self.hourly
        then = spent + hourly * remaining_s / 3600.0 if remaining_s is not None else 0.0
        forecast = max(spent, min(then, self.total_cap)) if then else 0.0
        left = self.wallet if self.wallet is not None else None
        runway = left / hourly if left is not None and hourly > 0 else None
        return ev.CostTick(hourly=hourly, spent=spent, forecast=forecast, runway_h=runway, at=now)

    def allows(self, extra_hourly: float, hours: float = 0.0) -> str:
        """Why pods for ``extra_hourly`` more, held for ``hours``, may not be created; empty when they may."""
        if extra_hourly <= 0:
            return ""
        if self.hourly + extra_hourly > self.hourly_cap:
            return f"{self.hourly + extra_hourly:.2f} $/h is over limits.hourly {self.hourly_cap:.2f}"
        total = self.spent() + (self.hourly + extra_hourly) * hours
        if total > self.total_cap:
            return f"{total:.2f} $ over {hours:.1f} h is over limits.total {self.total_cap:.2f}"
        if self.wallet is not None and total > self.wallet:
            return f"{total:.2f} $ over {hours:.1f} h is over the wallet's {self.wallet:.2f}"
        return ""

    def breach(self) -> str:
        """Which cap the fleet is over now; empty when none. The total is met before it is passed by a minute's cost."""
        hourly, spent = self.hourly, self.spent()
        if hourly > self.hourly_cap:
            return f"{hourly:.2f} $/h is over limits.hourly {self.hourly_cap:.2f}"
        if hourly > 0 and spent + hourly / 60.0 > self.total_cap:
            return f"{spent:.2f} $ spent reaches limits.total {self.total_cap:.2f}"
        return ""
