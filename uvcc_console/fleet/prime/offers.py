"""Choosing offers: a funnel of constraints, three distinct providers, one image in common. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from uvcc_console.fleet.cloud.choice import OfferChoice, OfferFilter, VolumeAt, apply_filters, volume_tests, why_none
from uvcc_console.fleet.prime.models import MarketOffer
from uvcc_console.fleet.provider import FunnelStep, NoOffer
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.machine import torch_floor

# newest PyTorch first, none that is too old; the plain CUDA image comes last, it would have to install torch
IMAGES = (
    "cuda_12_6_pytorch_2_7",
    "cuda_12_4_pytorch_2_6",
    "cuda_12_4_pytorch_2_5",
    "ubuntu_22_cuda_12",
)


def _fits_disk(offer: MarketOffer, size: int) -> bool:
    spec = offer.disk
    if spec is None or spec.default_count is None:
        return False
    fixed = spec.min_count is None and spec.max_count is None
    return spec.default_count >= size if fixed else (spec.max_count or spec.default_count) >= size


def _memory(offer: MarketOffer) -> float:
    """GiB of one GPU: rows give it per GPU or in total, so the smaller reading counts."""
    total = offer.gpu_memory or 0.0
    known = offer.gpu_type.rpartition("_")[2].removesuffix("GB")
    return min(total, float(known)) if known.isdigit() else total / max(1, offer.gpu_count or 1)


def _tests(w: OfferFilter, at: VolumeAt | None) -> list[tuple[str, Callable[[MarketOffer], bool]]]:
    tests: list[tuple[str, Callable[[MarketOffer], bool], bool]] = [
        (f"gpu {w.gpu}", lambda o: o.gpu_type == w.gpu, bool(w.gpu)),
        (f"{w.gpus} gpus", lambda o: o.gpu_count == w.gpus, bool(w.gpus)),
        (f"gpu memory {w.gpu_memory} GiB", lambda o: _memory(o) >= w.gpu_memory, bool(w.gpu_memory)),
        (f"socket {w.socket}", lambda o: o.socket == w.socket, bool(w.socket)),
        (f"region {'/'.join(w.regions)}", lambda o: o.region in w.regions, bool(w.regions)),
        (f"country {w.country}", lambda o: o.country == w.country, bool(w.country)),
        (f"data centre {w.data_center}", lambda o: o.data_center == w.data_center, bool(w.data_center)),
        (f"provider {'/'.join(w.per_party)}", lambda o: o.provider in w.per_party, bool(w.per_party)),
        ("spot" if w.spot else "on demand", lambda o: bool(o.is_spot) == w.spot, True),
        ("no prepayment", lambda o: not o.prepaid_time, True),
        ("in stock", lambda o: o.stock_status != "Unavailable", True),
        ("priced in USD", lambda o: (o.price() or 0.0) > 0 and o.prices.currency == "USD", True),
        (f"image {w.image}", lambda o: w.image in o.images, bool(w.image)),
        (f"disk {w.disk} GiB", lambda o: _fits_disk(o, w.disk), bool(w.disk)),
        (
            f"at most {w.max_price or 0:.2f} $/h",
            lambda o: (o.price(w.disk) or 0.0) <= (w.max_price or 0.0),
            w.max_price is not None,
        ),
        *volume_tests(w, at),
    ]
    return [(name, test) for name, test, applies in tests if applies]


def filter_offers(
    offers: Iterable[MarketOffer], wanted: OfferFilter, at: VolumeAt | None = None
) -> tuple[list[MarketOffer], list[FunnelStep]]:
    """Offers that fit, cheapest first, and what each constraint removed."""
    left, funnel = apply_filters(offers, _tests(wanted, at))
    return sorted(left, key=lambda o: (o.price(wanted.disk) or 0.0, o.key)), funnel


def choose(
    offers: Iterable[MarketOffer],
    wanted: OfferFilter,
    parties: Collection[int],
    settled: Mapping[int, str] | None = None,
    *,
    at: VolumeAt | None = None,
) -> OfferChoice:
    """Distinct providers for the parties, the cheapest that share an image.

    ``settled`` parties keep the provider that they have, even if it offers nothing more. Raises ConfigError saying what
    is missing.
    """
    settled = settled or {}
    fitting, funnel = filter_offers(offers, wanted, at)
    if not fitting:
        raise NoOffer(f"no offer fits: {why_none(funnel)}", "loosen that constraint")
    if len(set(wanted.per_party)) != len(wanted.per_party):
        raise ConfigError("fleet.per_party names a provider twice", "the three parties need three distinct providers")
    for image in [wanted.image] if wanted.image else _images(fitting):
        by_provider: dict[str, list[MarketOffer]] = {}
        for offer in fitting:
            if image in offer.images:
                by_provider.setdefault(offer.provider, []).append(offer)
        domains = {**_assign(by_provider, wanted, sorted(set(parties) - set(settled)), settled), **settled}
        if set(domains) >= set(parties):
            return OfferChoice(domains, image, by_provider, tuple(funnel))
    have = ", ".join(sorted({o.provider for o in fitting}))
    raise NoOffer(
        f"{len(parties)} distinct providers with one image in common are needed, the market has {have}",
        "loosen a constraint, or name another image",
    )


def _images(offers: Sequence[MarketOffer]) -> list[str]:
    """Images that are offered at all, preferred ones first; none that needs a template of its own or whose torch
    is too old."""
    known = {i for o in offers for i in o.images if i != "custom_template" and not torch_floor.image_is_old(i)}
    return [i for i in IMAGES if i in known] + sorted(i for i in known if "pytorch" in i and i not in IMAGES)


def _assign(
    by_provider: Mapping[str, Sequence[MarketOffer]],
    wanted: OfferFilter,
    parties: Sequence[int],
    settled: Mapping[int, str],
) -> dict[int, str]:
    if wanted.per_party:
        return {p: wanted.per_party[p] for p in parties if wanted.per_party[p] in by_provider}
    free = [name for name in by_provider if name not in settled.values()]
    cheapest = sorted(free, key=lambda name: (by_provider[name][0].price(wanted.disk) or 0.0, name))
    return dict(zip(parties, cheapest, strict=False))


def request_body(
    offer: MarketOffer, wanted: OfferFilter, *, name: str, image: str, key_id: str, cap: float
) -> dict[str, Any]:
    """The body of a create: one offer row echoed, its data centre always named, a real price cap, nothing unknown."""
    pod: dict[str, Any] = {
        "name": name,
        "cloudId": offer.cloud_id,
        "gpuType": offer.gpu_type,
        "socket": offer.socket,
        "gpuCount": offer.gpu_count,
        "image": image,
        "maxPrice": cap,
        "autoRestart": False,
    }
    optional = {"dataCenterId": offer.data_center, "country": offer.country, "security": offer.security}
    pod |= {k: v for k, v in optional.items() if v}
    if key_id:
        pod["sshKeyId"] = key_id
    if size := _disk_size(offer, wanted.disk):
        pod["diskSize"] = size
    body: dict[str, Any] = {"pod": pod, "provider": {"type": offer.provider}}
    return body | ({"disks": [wanted.volume.id]} if wanted.volume is not None else {})


def _disk_size(offer: MarketOffer, wanted: int) -> int:
    """A size to ask for, in the offer's steps; 0 where the offer fixes it or none is wanted."""
    spec = offer.disk
    if not wanted or spec is None or (spec.min_count is None and spec.max_count is None):
        return 0
    low, step = int(spec.min_count or 0), max(1, int(spec.step or 1))
    size = max(wanted, low)
    return min(low + -(-(size - low) // step) * step, int(spec.max_count or 1 << 31))
