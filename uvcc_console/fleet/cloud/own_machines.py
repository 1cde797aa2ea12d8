"""A vendor that sells its own machines: one kind of settings, one way to choose, one way to make the provider."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from uvcc_console.fleet.cloud import api_keys, hosts
from uvcc_console.fleet.cloud.choice import OfferChoice, OfferFilter, VolumeAt, apply_filters, volume_tests, why_none
from uvcc_console.fleet.provider import NoOffer
from uvcc_console.fleet.provider_kinds import FleetSettings
from uvcc_console.fleet.runclock import FILE as CLOCK
from uvcc_console.fleet.runclock import RunClock

if TYPE_CHECKING:
    from uvcc_console.fleet.cloud.clock import Clock
    from uvcc_console.fleet.cloud.saga import CloudProvider
    from uvcc_console.fleet.cloud.vendor import Cloud


KIND_TESTS = 3  # of choose: GPU, number and memory are the machine's own; the others change with the stock


class CloudFleet(FleetSettings):
    """``account``: one of several at this vendor, whose key is found under its own name. ``base_url``: another address
    of its API, which needs the user's own consent unless it is this machine's."""

    account: str = Field(default="", pattern=f"^({api_keys.ACCOUNT})?$")
    base_url: str = ""

    @model_validator(mode="after")
    def _one_operator(self) -> CloudFleet:
        if self.per_party:
            raise ValueError("this vendor is one operator: give each party a provider with fleet.parties")
        return self


@dataclass(frozen=True, slots=True)
class PlainOffer:
    """One thing to rent. ``price_hr``: US dollars for the whole pod; ``disk_price``: for each GiB of disk beside."""

    id: str
    provider: str
    region: str
    gpu_type: str
    gpu_count: int
    price_hr: float
    gpu_memory: float = 0.0
    country: str = ""
    spot: bool = False
    stock: bool = True
    once: bool = False
    steady: bool = False
    disk: float = float("inf")  # so much of it can be had
    disk_price: float = 0.0
    provisioning_time: float | None = None
    more: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def key(self) -> tuple[Any, ...]:
        return self.provider, self.id, self.region, self.gpu_count, self.spot

    @property
    def label(self) -> str:
        return f"{self.provider}/{self.id}@{self.region or 'anywhere'}{' spot' if self.spot else ''}"

    def price(self, disk_gib: int = 0) -> float:
        return self.price_hr + disk_gib * self.disk_price


def choose(
    offers: Iterable[PlainOffer],
    wanted: OfferFilter,
    parties: Collection[int],
    vendor: str,
    image: str,
    *,
    free: bool = False,
    fleeting: bool = False,
    at: VolumeAt | None = None,
) -> OfferChoice:
    """Every fitting offer, cheapest first; all parties are this one vendor's. ``free``: it may cost nothing.

    ``fleeting``: what is not to be had now is not listed at all. ``at``: where a volume would be made. Raises NoOffer
    saying what is missing; it passes by itself where the vendor does have such machines.
    """
    w, most = wanted, wanted.max_price
    tests: list[tuple[str, Callable[[PlainOffer], bool], bool]] = [
        (f"gpu {w.gpu}", lambda o: o.gpu_type == w.gpu, bool(w.gpu)),
        (f"{w.gpus} gpus", lambda o: o.gpu_count == w.gpus, bool(w.gpus)),
        (f"gpu memory {w.gpu_memory} GiB", lambda o: o.gpu_memory >= w.gpu_memory, bool(w.gpu_memory)),
        (f"region {'/'.join(w.regions)}", lambda o: o.region in w.regions, bool(w.regions)),
        (f"country {w.country}", lambda o: o.country == w.country, bool(w.country)),
        ("spot" if w.spot else "on demand", lambda o: o.spot == w.spot, True),
        ("in stock", lambda o: o.stock, True),
        ("priced", lambda o: o.price_hr > 0, not free),
        (f"disk {w.disk} GiB", lambda o: o.disk >= w.disk, bool(w.disk)),
        (f"at most {most or 0:.2f} $/h", lambda o: o.price(w.disk) <= (most or 0), most is not None),
        *volume_tests(w, at),
    ]
    rows = list(offers)
    left, funnel = apply_filters(rows, [(name, test) for name, test, applies in tests if applies])
    if not left:
        kind, _ = apply_filters(rows, [(name, test) for name, test, applies in tests[:KIND_TESTS] if applies])
        what = f"no offer of {vendor} fits: {why_none(funnel)}"
        raise NoOffer(what, "loosen that constraint", passing=bool(kind) or fleeting or not rows)
    found = sorted(left, key=lambda o: (o.price(w.disk), o.key))
    return OfferChoice(dict.fromkeys(parties, vendor), w.image or image, {vendor: found}, tuple(funnel))


@dataclass(frozen=True, slots=True)
class Vendor:
    """Where a vendor's API is, where its keys are found, and what makes its client: (address, key, clock)."""

    name: str
    url: str
    variables: Sequence[str]
    client: Callable[[str, str, Clock], Cloud]
    files: Sequence[str] = ()

    def account(self, fleet: Mapping[str, Any], env: Mapping[str, str]) -> tuple[str, str]:
        """Address and key. Raises ConfigError where there is no key, or the address is none that it may go to."""
        given = str(fleet.get("base_url", ""))
        host = self.url.partition("//")[2].partition("/")[0]
        url = hosts.checked(given or self.url, env, own=not given, vendor=host, kind=self.name).rstrip("/")
        if name := str(fleet.get("account", "")):
            return url, api_keys.named(self.name, name, env)[0]
        return url, api_keys.usual(self.name, self.variables, env, self.files)[0]

    def make(self, fleet: Mapping[str, Any], run_dir: Path, ttl_s: float) -> CloudProvider:
        from uvcc_console.fleet.cloud.intents import Intents
        from uvcc_console.fleet.cloud.saga import CloudProvider

        url, key = self.account(fleet, os.environ)
        known = (run_dir / CLOCK).exists() or Intents.of(run_dir).path.exists()
        return CloudProvider(self.client(url, key, RunClock(run_dir if known else None)), fleet, run_dir)
