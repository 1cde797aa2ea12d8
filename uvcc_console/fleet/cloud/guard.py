"""What one run may spend at the market, and which of its tries are one too many; by what is on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from uvcc_console.fleet.cloud.ends import Ends
from uvcc_console.fleet.cloud.intents import Try, run_books
from uvcc_console.fleet.cloud.vendor import CloudOffer, CloudPod
from uvcc_console.fleet.provider import Books, Caps, Pod, PodRequest
from uvcc_engine.contract.errors import UvccError


class OverCap(UvccError):
    """A create that would pass the run's caps: it is not asked for."""


@dataclass
class Guard:
    """Keeps one run's caps; without caps everything is allowed."""

    ends: Ends
    caps: Caps | None = None

    def books(self) -> Books:
        """What the run has cost until now: by our clock or by the provider's bill, whichever is more."""
        found = run_books(self.ends.run_dir, self.ends.clock.now())
        return replace(found, pods=found.pods or frozenset())  # what nobody has tried to rent yet costs nothing

    def over_cap(self, price: float) -> str:
        """Why one more pod at this price may not be rented; empty if it may."""
        if self.caps is None:
            return ""
        now = self.books()
        if now.hourly + price > self.caps.hourly + 1e-9:
            return f"one more pod makes {now.hourly + price:.2f} $/h, limits.hourly is {self.caps.hourly:.2f}"
        if now.spent + (now.hourly + price) / 60.0 > self.caps.total:
            return f"{now.spent:.2f} $ are spent, one more pod passes limits.total {self.caps.total:.2f}"
        return ""

    def refuse_over_cap(self, price: float) -> None:
        """Raises OverCap with the reason."""
        if why := self.over_cap(price):
            raise OverCap(why, "nothing more is created; raise limits.hourly or limits.total")

    def loose(self) -> bool:
        """Whether creates are under way of which nobody knows yet what comes of them."""
        return any(t.open and not t.held and t.name not in self.ends.asking for t in self.ends.tries().values())

    def is_stray(self, t: Try) -> bool:
        """It was not what was asked for, or the run holds another pod in its place."""
        held = {o.base for o in self.ends.tries().values() if o.held and o.open and o.name != t.name}
        return t.rejected or (not t.held and t.base in held)


def unfit(request: PodRequest, pod: Pod, domains: Mapping[int, str], slack: float) -> str:
    """Why a pod that was found is not what this request may have; empty for one that is. ``domains``: by party."""
    if pod.provider in {d for p, d in domains.items() if p != request.party}:
        return f"{pod.provider} already hosts another party"
    if pod.price_hr > (request.max_price_hr or float("inf")) * slack:
        return f"costs {pod.price_hr:.4f} $/h"
    return ""


def wrong(made: CloudPod, offer: CloudOffer, got: float, price: float, cap: float, others: set[str]) -> str:
    """Why a pod that was made is not the one that was asked for; empty if it is. ``others``: the other parties'."""
    if made.provider_type and made.provider_type != offer.provider:
        return f"came from {made.provider_type}, not from {offer.provider}"
    if (made.provider_type or offer.provider) in others:
        return f"{made.provider_type} already hosts another party"
    if got > cap + 1e-9 or got < 0:
        return f"costs {got:.4f} $/h, quoted were {price:.4f}"
    return ""
