"""Offers, prices and addresses: pure functions over everything that the market has been seen to say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from primeoffers import market, offer

from uvcc_console.fleet.prime.access import SshTarget, parse, targets
from uvcc_console.fleet.prime.models import ApiPod, MarketOffer, read_offers
from uvcc_console.fleet.prime.offers import OfferFilter, choose, filter_offers, request_body
from uvcc_console.fleet.provider import PodRequest
from uvcc_engine.contract.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("root@1.2.3.4 -p 22022", SshTarget("root", "1.2.3.4", 22022)),
        ("ubuntu@1.2.3.4", SshTarget("ubuntu", "1.2.3.4", 22)),
        ("ssh ubuntu@1.2.3.4 -p 2222", SshTarget("ubuntu", "1.2.3.4", 2222)),
        ("ssh -p 2222 ubuntu@1.2.3.4", SshTarget("ubuntu", "1.2.3.4", 2222)),
        ("ssh -p2222 -o X=y ubuntu@h", None),
        ("u@h:2222", SshTarget("u", "h", 2222)),
        (["u@h1 -p 22", "u@h2 -p 22"], SshTarget("u", "h1", 22)),
        ([None, "u@h2 -p 23"], SshTarget("u", "h2", 23)),
        (["u@h", "-p", "2222"], SshTarget("u", "h", 2222)),
        ("ubuntu@ -p 22", None),
        ([None], None),
        (None, None),
        ("", None),
        ({"host": "h"}, None),
        ("u@h -p 99999", SshTarget("u", "h", 22)),
    ],
)
def test_addresses_in_every_form_seen(text: Any, expected: SshTarget | None) -> None:
    assert parse(text) == expected


@given(st.recursive(st.none() | st.text(max_size=30) | st.integers(), lambda x: st.lists(x, max_size=4), max_leaves=6))
def test_no_address_however_odd_raises(value: Any) -> None:
    found = parse(value)
    assert found is None or (found.user and found.host and 0 < found.port < 65536)


def pod(**fields: Any) -> ApiPod:
    return ApiPod.model_validate({"id": "x", "providerType": "hyperstack", **fields})


def test_what_is_told_comes_first_and_nothing_is_tried_twice() -> None:
    found = targets(pod(sshConnection="root@1.1.1.1 -p 2200", ip="1.1.1.1"))
    assert found[0] == SshTarget("root", "1.1.1.1", 2200)
    assert len(found) == len(set(found))
    assert SshTarget("ubuntu", "1.1.1.1", 22) in found


def test_an_address_is_derived_where_none_is_told() -> None:
    mapping = [{"internal": "22", "external": "22022", "usedBy": "SSH"}, None, {"internal": "*", "external": "*"}]
    found = targets(pod(providerType="runpod", sshConnection=None, ip=["9.9.9.9", None], primePortMapping=mapping))
    assert found[0] == SshTarget("root", "9.9.9.9", 22022)
    assert SshTarget("root", "9.9.9.9", 1234) in targets(pod(providerType="datacrunch", ip="9.9.9.9"))
    assert targets(pod()) == []


def test_ready_is_what_the_provider_says_not_more() -> None:
    assert pod(status="ACTIVE", installationStatus="FINISHED").installed
    assert pod(status="ACTIVE", installationProgress="100", installationStatus="ACTIVE").installed
    assert pod(status="ACTIVE").installed
    assert not pod(status="ACTIVE", installationStatus="ACTIVE", installationProgress=99).installed
    assert not pod(status="PROVISIONING").installed
    assert pod(status="DELETING").dying
    assert not pod(status="DELETING").over


@given(
    st.dictionaries(
        st.sampled_from(["provider", "prices", "images", "disk", "gpuCount", "gpuMemory", "stockStatus", "region"]),
        st.none() | st.text(max_size=5) | st.integers() | st.lists(st.text(max_size=3), max_size=2) | st.just({}),
    )
)
def test_a_row_of_another_form_never_stops_the_market(row: dict[str, Any]) -> None:
    good = offer("hyperstack", "x", "Y", 1.0)
    found = read_offers([row, good])
    assert found[-1].provider == "hyperstack"
    filter_offers(found, OfferFilter())


def test_prices_are_for_the_box_and_disks_cost_extra() -> None:
    row = offer("x", "c", "d", 2.0)
    assert MarketOffer.model_validate(row).price() == 2.0
    row["prices"]["communityPrice"] = 1.5
    assert MarketOffer.model_validate(row).price() == 1.5
    row["disk"] = {"minCount": 50, "defaultCount": 100, "maxCount": 1000, "pricePerUnit": 0.001, "step": 25}
    assert MarketOffer.model_validate(row).price() == pytest.approx(1.6)
    assert MarketOffer.model_validate(row).price(500) == pytest.approx(2.0)
    row["disk"]["defaultIncludedInPrice"] = True
    assert MarketOffer.model_validate(row).price(500) == pytest.approx(1.9)
    row["prices"] = {"onDemand": None, "communityPrice": None}
    assert MarketOffer.model_validate(row).price() is None


def test_two_rows_with_one_cloud_id_are_two_offers() -> None:
    rows = read_offers(market())
    assert len({o.key for o in rows}) == len(rows)


def wanted(**more: Any) -> OfferFilter:
    return OfferFilter(gpu="H100_80GB", gpus=1, **more)


def test_the_image_in_common_decides_before_the_price() -> None:
    rows = market()
    rows[0]["images"] = rows[1]["images"] = ["ubuntu_22_cuda_12"]  # the cheapest provider lacks PyTorch
    found = choose(read_offers(rows), wanted(), (0, 1, 2))
    assert found.image == "cuda_12_6_pytorch_2_7"
    assert set(found.domains.values()) == {"crusoecloud", "lambdalabs", "datacrunch"}


def test_named_providers_are_kept_to_their_parties() -> None:
    found = choose(read_offers(market()), wanted(per_party=("datacrunch", "hyperstack", "lambdalabs")), (0, 1, 2))
    assert dict(found.domains) == {0: "datacrunch", 1: "hyperstack", 2: "lambdalabs"}
    with pytest.raises(ConfigError, match="3 distinct providers"):
        choose(read_offers(market()), wanted(per_party=("vultr", "hyperstack", "lambdalabs")), (0, 1, 2))


def test_a_settled_party_keeps_its_provider_though_it_sold_out() -> None:
    rows = [r for r in market() if r["provider"] != "hyperstack"]
    found = choose(read_offers(rows), wanted(), (0, 1, 2), {1: "hyperstack"})
    assert found.domains[1] == "hyperstack"
    assert len(set(found.domains.values())) == 3


def test_two_providers_are_not_three() -> None:
    rows = [r for r in market() if r["provider"] in ("hyperstack", "crusoecloud")]
    with pytest.raises(ConfigError, match="the market has crusoecloud, hyperstack"):
        choose(read_offers(rows), wanted(), (0, 1, 2))


@pytest.mark.parametrize(
    ("field", "value", "constraint"),
    [
        ("gpu", "B200_180GB", "gpu B200_180GB"),
        ("gpus", 8, "8 gpus"),
        ("gpu_memory", 200, "gpu memory 200 GiB"),
        ("socket", "SXM5", "socket SXM5"),
        ("regions", ("africa",), "region africa"),
        ("country", "FR", "country FR"),
        ("data_center", "MOON-1", "data centre MOON-1"),
        ("disk", 5000, "disk 5000 GiB"),
        ("max_price", 0.01, "at most 0.01 $/h"),
        ("image", "nope", "image nope"),
    ],
)
def test_every_constraint_is_named_when_it_leaves_nothing(field: str, value: Any, constraint: str) -> None:
    base = {"gpu": "H100_80GB", "gpus": 1}
    with pytest.raises(ConfigError, match="no offer fits") as caught:
        choose(read_offers(market()), OfferFilter(**{**base, field: value}), (0, 1, 2))
    assert constraint in caught.value.what


def test_the_body_echoes_one_row_and_asks_for_nothing_unknown() -> None:
    row = offer("hyperstack", "c", "CANADA-1", 2.0)
    row["disk"] = {"minCount": 50, "defaultCount": 100, "maxCount": 1000, "pricePerUnit": 0.001, "step": 25}
    found = request_body(
        MarketOffer.model_validate(row), wanted(disk=110), name="uvcc-x-p0r0xabcdef", image="i", key_id="k", cap=2.05
    )
    assert found == {
        "pod": {
            "name": "uvcc-x-p0r0xabcdef",
            "cloudId": "c",
            "gpuType": "H100_80GB",
            "socket": "PCIe",
            "gpuCount": 1,
            "image": "i",
            "maxPrice": 2.05,
            "autoRestart": False,
            "dataCenterId": "CANADA-1",
            "country": "US",
            "security": "secure_cloud",
            "sshKeyId": "k",
            "diskSize": 125,
        },
        "provider": {"type": "hyperstack"},
    }


def test_a_request_may_be_stricter_than_its_profile() -> None:
    fleet = {"gpu": "H100_80GB", "gpus": 8, "regions": ["canada"], "disk": 200, "per_party": ["a", "b", "c"]}
    found = OfferFilter.of(fleet, PodRequest("n", 0, 0, image="i", max_price_hr=4.0, disk_gib=300))
    assert (found.gpus, found.regions, found.image, found.max_price, found.disk) == (8, ("canada",), "i", 4.0, 300)


@pytest.mark.parametrize("price", [float("nan"), float("inf"), "nan", "-inf", "1e999", 10**400, True, [], {}])
def test_a_price_that_is_no_number_is_no_price(price: object) -> None:
    from uvcc_console.fleet.prime.models import MarketOffer, Prices

    assert Prices.model_validate({"onDemand": price}).hourly is None
    assert MarketOffer.model_validate({"prices": {"onDemand": price}, "gpuCount": price}).price() is None


def test_what_the_market_says_holds_nothing_that_a_terminal_obeys() -> None:
    from uvcc_console.fleet.prime.models import ApiPod, MarketOffer

    bad = "eu\x1b[31m\u202e\x9b2J\nx"
    assert MarketOffer.model_validate({"provider": bad, "cloudId": bad, "region": bad}).label == "eu x/eu x@eu x"
    assert ApiPod.model_validate({"name": bad, "installationFailure": bad}).installation_failure == "eu x"
