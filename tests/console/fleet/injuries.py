"""Ways in which the market and its pods go wrong: each injures a world before its fleet is rented."""

from __future__ import annotations

from primeoffers import offer
from primeworld import RUN, World


def stock_gone(w: World) -> None:
    w.of("hyperstack")[0]["sim"] = {"capacity": 0}


def all_stock_gone(w: World) -> None:
    w.sim("hyperstack", capacity=0)


def price_up(w: World) -> None:
    w.of("crusoecloud")[0]["sim"] = {"price_factor": 1.5}


def wrong_provider(w: World) -> None:
    w.of("lambdalabs")[0]["sim"] = {"provider": "hyperstack"}


def create_500_committed(w: World) -> None:
    w.fake.fail("POST", "/pods", "commit_then_500", 1)


def create_500(w: World) -> None:
    w.fake.fail("POST", "/pods", "answer", 1, 2, status=500)


def create_timeout_committed(w: World) -> None:
    w.fake.fail("POST", "/pods", "commit_then_timeout", 2)


def create_timeout_committed_and_invisible(w: World) -> None:
    w.fake.visible_after = 25.0
    w.fake.fail("POST", "/pods", "commit_then_timeout", 2)


def create_html(w: World) -> None:
    w.fake.fail("POST", "/pods", "html", 1)


def busy(w: World) -> None:
    w.fake.fail("POST", "/pods", "answer", 1, status=429, body={"detail": "slow down"}, headers={"Retry-After": "7"})
    w.fake.fail("GET", "/pods", "answer", 2, 3, status=429, body={"detail": "slow down"})


def flaky_reads(w: World) -> None:
    w.fake.fail("GET", "/", "answer", *range(2, 200, 5), status=503)
    w.fake.fail("GET", "/", "timeout", *range(3, 200, 7))


def market_blinks(w: World) -> None:
    w.fake.fail("GET", "/availability/gpus", "answer", 1, 2, status=200, body={"items": [], "totalCount": 0})


def invisible_at_first(w: World) -> None:
    w.fake.visible_after = 25.0


def stuck(w: World) -> None:
    w.of("hyperstack")[0]["sim"] = {"boot_s": 1e9}


def errs(w: World) -> None:
    w.of("hyperstack")[0]["sim"] = {"timeline": [(30.0, {"status": "ERROR", "installationFailure": "no driver"})]}


def install_fails(w: World) -> None:
    w.of("hyperstack")[0]["sim"] = {"timeline": [(100.0, {"installationStatus": "ERROR"})]}


def install_hangs(w: World) -> None:
    hang = {"installationStatus": "ACTIVE", "installationProgress": 99}
    w.of("hyperstack")[0]["sim"] = {"timeline": [(100.0, hang)]}


def vanishes(w: World) -> None:
    w.of("hyperstack")[0]["sim"] = {"vanish_s": 70.0}


def no_address(w: World) -> None:
    w.of("hyperstack")[0]["sim"] = {"ssh": [None], "ip": None}


def placeholder_address(w: World) -> None:
    w.of("hyperstack")[0]["sim"] = {"ssh": "ubuntu@ -p 22", "ip": None}


def only_an_ip(w: World) -> None:
    w.sim("crusoecloud", ssh=None, ip=["10.0.0.7", None])


def wrong_user(w: World) -> None:
    w.sim("crusoecloud", ssh="root@{host} -p 22")


def login_fails(w: World) -> None:
    w.of("hyperstack")[0]["sim"] = {"at": ("ubuntu", "10.6.6.6", 22)}
    w.logins["10.6.6.6"] = "nvidia-smi failed: no devices were found"


def unknown_for_a_while(w: World) -> None:
    flap = [(40.0, {"status": "UNKNOWN"}), (100.0, {"status": "PENDING"}), (200.0, {"status": "ACTIVE"})]
    w.sim("hyperstack", timeline=flap)


def unknown_for_ever(w: World) -> None:
    w.of("hyperstack")[0]["sim"] = {"timeline": [(40.0, {"status": "UNKNOWN"})]}


def strange_values(w: World) -> None:
    w.fake.drifts = True
    w.sim("hyperstack", timeline=[(10.0, {"status": "WARMING_UP", "brandNew": {"x": 1}, "gpuCount": "1"})], boot_s=20.0)
    for row in w.of("hyperstack"):
        row["sim"]["timeline"].append((40.0, {"status": "ACTIVE"}))
    w.fake.offers.append({"provider": None, "prices": None, "images": "none"})


def delete_500(w: World) -> None:
    w.sim("crusoecloud", refuse_deletes=3)


def delete_ignored(w: World) -> None:
    w.fake.fail("DELETE", "/pods", "ignore", 1, 2)


def delete_slow(w: World) -> None:
    w.sim("lambdalabs", delete_s=100.0)


def delete_timeouts(w: World) -> None:
    w.fake.fail("DELETE", "/pods", "timeout", 1, 2, 3)


def many_pods(w: World) -> None:
    w.fake.max_instances = 500
    for n in range(250):
        w.fake.foreign(f"other-{n}")


def scope_missing_is_unknown(w: World) -> None:
    w.fake.scope = {}


def market_has_decoys(w: World) -> None:
    w.fake.offers[:0] = [
        offer("dc_gnu", "trap", "X", 0.01, stockStatus="Unavailable"),
        offer("dc_gnu", "trap", "Y", 0.01, prepaidTime=24),
        offer("dc_gnu", "trap", "Z", 0.01, isSpot=True),
    ]


def no_money(w: World) -> None:
    w.fake.fail("POST", "/pods", "answer", 3, status=402, body={"detail": "Insufficient balance"})


def key_revoked(w: World) -> None:
    w.fake.fail("POST", "/pods", "answer", 2, status=403, body={"detail": "Permission denied"})


def too_many(w: World) -> None:
    w.fake.max_instances = 2


def nothing_in_stock(w: World) -> None:
    for row in w.fake.offers:
        row["sim"] = {"capacity": 0}


def every_pod_fails(w: World) -> None:
    for row in w.fake.offers:
        row["sim"] = {"timeline": [(30.0, {"status": "ERROR"})]}


def all_pages_lie(w: World) -> None:
    w.fake.total_lies = 7


def pages_overlap(w: World) -> None:
    many_pods(w)
    w.fake.repeat_rows = True


def no_max_price(w: World) -> None:
    w.fake.fail("POST", "/pods", "answer", 1, status=400, body={"detail": "Missing field: max_price not specified"})


def no_data_center(w: World) -> None:
    w.fake.fail(
        "POST", "/pods", "answer", 1, status=400, body={"detail": "Missing field: data_center_id not specified"}
    )


def image_unsupported(w: World) -> None:
    body = {"detail": "Provider Hyperstack is not supported for image cuda_12_6_pytorch_2_7"}
    w.fake.fail("POST", "/pods", "answer", 1, status=400, body=body)


def extra_inputs_errors(w: World) -> None:
    body = {"errors": [{"param": "pod.x", "details": "Extra inputs are not permitted"}]}
    w.fake.fail("POST", "/pods", "answer", 1, status=422, body=body)


def extra_inputs_detail(w: World) -> None:
    body = {"detail": [{"loc": ["body", "pod", "x"], "msg": "Extra inputs are not permitted", "type": "extra"}]}
    w.fake.fail("POST", "/pods", "answer", 1, status=422, body=body)


def create_reset_committed(w: World) -> None:
    w.fake.fail("POST", "/pods", "commit_then_reset", 3)


def slow_body(w: World) -> None:
    w.fake.fail("GET", "/pods", "slow", 1, 2)


def redirected(w: World) -> None:
    w.fake.fail("GET", "/", "redirect", *range(1, 60, 2))
    w.fake.fail("POST", "/pods", "redirect", 1)


def delete_404(w: World) -> None:
    w.fake.fail("DELETE", "/pods", "answer", 1, status=404, body={"detail": "Pod not found"})


def wallet_500(w: World) -> None:
    w.fake.fail("GET", "/billing/wallet", "answer", status=500)


def wallet_of_another_form(w: World) -> None:
    w.fake.fail("GET", "/billing/wallet", "answer", status=200, body={"data": {"balance": "a lot"}})


def numbers_as_text(w: World) -> None:
    w.fake.drifts = True
    for name, price in (("hyperstack", "1.9"), ("crusoecloud", "2.1"), ("lambdalabs", "2.49")):
        w.sim(
            name, timeline=[(5.0, {"resources": {"memory": "180", "vcpus": "26"}, "priceHr": price, "gpuCount": "1"})]
        )


def addresses_as_lists(w: World) -> None:
    w.sim("hyperstack", ssh=["{user}@10.0.0.1 -p 22", None])
    w.sim("crusoecloud", ssh=["ubuntu@10.0.0.1", "-p", "22"])


def foreign_pods(w: World) -> None:
    for name in ("uvcc-other-20260101-0000-ffff-p0r0xabcdef", "uvcc", f"{RUN}-p0r0", f"{RUN}0-p0r0xabcdef"):
        w.fake.foreign(name)


def active_then_error(w: World) -> None:
    w.of("hyperstack")[0]["sim"] = {"timeline": [(100.0, {"status": "ERROR"})]}


def slow_auth(w: World) -> None:
    w.faltering["10.0.0.1"] = ["the login took longer than 8 s"] * 4


def denied_at_first(w: World) -> None:
    w.faltering["10.0.0.1"] = ["permission denied: the key is not injected yet"] * 6
