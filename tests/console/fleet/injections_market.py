"""What the market and its pods do wrong, by the names of the failure table; each says what the console did about it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import injuries
import pytest
from primeworld import RUN, World

from uvcc_console.fleet.prime.client import CloudRefused
from uvcc_console.fleet.provider import PodRequest
from uvcc_engine.contract.errors import UvccError

Act = Callable[[World], Awaitable[str]]


def fleet(injure: Callable[[World], None]) -> Act:
    """A fleet's whole life under this injury, and what the console did: seen in what it asked the market."""

    async def act(w: World) -> str:
        injure(w)
        try:
            pods = await w.up()
        except UvccError as e:
            await w.down()
            return f"stopped: {e.kind}" if isinstance(e, CloudRefused) else "stopped"
        assert len({p.provider for p in pods}) == 3
        assert len(w.ours) == 3  # no double, no ghost
        creates, born = len(w.fake.asked("POST", "/pods/")), sum(not p.foreign for p in w.fake.pods.values())
        committed = any(f.action.startswith("commit") for f in w.fake.faults)
        await w.down()
        if born > 3:
            return "replaced the pod"
        return "looked it up, adopted it" if committed and creates == 3 else "next offer" if creates > 3 else "went on"

    return act


async def key_refused_mid_run(w: World) -> str:
    """401 from everything: nothing is created, and deleting goes on until it is obeyed."""
    pods = await w.up()
    w.fake.fail("POST", "/pods", "answer", status=401, body={"detail": "Invalid token"})
    w.fake.fail("DELETE", "/pods", "answer", 1, 2, status=401, body={"detail": "Invalid token"})
    with pytest.raises(CloudRefused) as caught:
        await w.provider.create(PodRequest(f"{RUN}-p0r9", 0, 9, max_price_hr=3.0))
    assert caught.value.stops_spending
    for pod in pods:
        await w.provider.delete(pod)
    return "created no more, went on deleting"


async def doubled_names(w: World) -> str:
    """A second pod under the very name of one of ours: a create that the market obeyed twice."""
    pods = await w.up()
    twin = next(n for n in w.ours if "-p1r0x" in n)
    w.fake.pods[w.fake.foreign(twin)].foreign = False
    again = await w.console().create(w.requests()[1])
    assert again.provider_id in {p.provider_id for p in pods}
    assert len(w.ours) == 3
    await w.down()
    return "kept the older, deleted the other"


async def spot_vanishes(w: World) -> str:
    pods = await w.up()
    w.fake.kill(w.fake.pods[pods[0].provider_id])
    w.fake.pods[pods[0].provider_id].sim["vanish_s"] = 0.0
    assert len(await w.provider.list(f"{RUN}-")) == 2
    for pod in pods:
        await w.provider.delete(pod)
    return "listed it no more, proved it gone"


async def wallet_runs_dry(w: World) -> str:
    pods = await w.up()
    w.fake.balance = 0.001
    await w.clock.sleep(600.0)
    assert await w.provider.list(f"{RUN}-") == []
    for pod in pods:
        await w.provider.delete(pod)
    return "listed them no more, proved them gone"


WENT_ON, NEXT, REPLACED, ADOPTED = "went on", "next offer", "replaced the pod", "looked it up, adopted it"
API: list[tuple[str, Act, str]] = [
    ("empty_200_availability", fleet(injuries.market_blinks), WENT_ON),
    ("totalCount_lies", fleet(injuries.all_pages_lie), WENT_ON),
    ("page_dup/shift", fleet(injuries.pages_overlap), WENT_ON),
    ("stock_gone_on_create", fleet(injuries.stock_gone), NEXT),
    ("stock_gone_on_create: a whole provider", fleet(injuries.all_stock_gone), NEXT),
    ("stock_gone_on_create: everywhere", fleet(injuries.nothing_in_stock), "stopped"),
    ("price_changed", fleet(injuries.price_up), REPLACED),
    ("missing_max_price 400", fleet(injuries.no_max_price), NEXT),
    ("missing_data_center 400", fleet(injuries.no_data_center), NEXT),
    ("image_unsupported 400", fleet(injuries.image_unsupported), NEXT),
    ("extra_inputs 422 errors", fleet(injuries.extra_inputs_errors), NEXT),
    ("extra_inputs 422 detail", fleet(injuries.extra_inputs_detail), NEXT),
    ("instance_limit 400", fleet(injuries.too_many), "stopped: limit"),
    ("401 mid-run", key_refused_mid_run, "created no more, went on deleting"),
    ("402 on create", fleet(injuries.no_money), "stopped: payment"),
    ("403 scope", fleet(injuries.key_revoked), "stopped: auth"),
    ("403 scope: not told", fleet(injuries.scope_missing_is_unknown), WENT_ON),
    ("404 get-before-visible", fleet(injuries.invisible_at_first), WENT_ON),
    ("429 Retry-After", fleet(injuries.busy), NEXT),
    ("500 create without commit", fleet(injuries.create_500), NEXT),
    ("500 create with commit", fleet(injuries.create_500_committed), ADOPTED),
    ("commit_then_timeout", fleet(injuries.create_timeout_committed), ADOPTED),
    ("commit_then_timeout, invisible", fleet(injuries.create_timeout_committed_and_invisible), ADOPTED),
    ("commit_then_reset", fleet(injuries.create_reset_committed), ADOPTED),
    ("html_502", fleet(injuries.create_html), NEXT),
    ("5xx and timeouts of reads", fleet(injuries.flaky_reads), WENT_ON),
    ("slow_body", fleet(injuries.slow_body), WENT_ON),
    ("redirect_307", fleet(injuries.redirected), NEXT),
    ("delete_500", fleet(injuries.delete_500), WENT_ON),
    ("delete_200_but_alive", fleet(injuries.delete_ignored), WENT_ON),
    ("delete_stuck_DELETING", fleet(injuries.delete_slow), WENT_ON),
    ("delete_404", fleet(injuries.delete_404), WENT_ON),
    ("delete times out", fleet(injuries.delete_timeouts), WENT_ON),
    ("wallet_500", fleet(injuries.wallet_500), WENT_ON),
    ("wallet shape drift", fleet(injuries.wallet_of_another_form), WENT_ON),
    ("null fields, unknown enum, extra field", fleet(injuries.strange_values), WENT_ON),
    ("string vs int resources", fleet(injuries.numbers_as_text), WENT_ON),
    ("list vs string ssh", fleet(injuries.addresses_as_lists), WENT_ON),
    ("duplicate pod names", doubled_names, "kept the older, deleted the other"),
    ("foreign pods in list", fleet(injuries.foreign_pods), WENT_ON),
    (">100 pods (paging)", fleet(injuries.many_pods), WENT_ON),
    ("decoys: unavailable, prepaid, spot", fleet(injuries.market_has_decoys), WENT_ON),
]
LIFE: list[tuple[str, Act, str]] = [
    ("stuck_PROVISIONING", fleet(injuries.stuck), REPLACED),
    ("ACTIVE_no_ssh", fleet(injuries.login_fails), REPLACED),
    ("ssh 'ubuntu@ -p 22'", fleet(injuries.placeholder_address), REPLACED),
    ("[null]", fleet(injuries.no_address), REPLACED),
    ("no ssh but an ip", fleet(injuries.only_an_ip), WENT_ON),
    ("wrong user", fleet(injuries.wrong_user), WENT_ON),
    ("wrong providerType", fleet(injuries.wrong_provider), REPLACED),
    ("ERROR+installationFailure", fleet(injuries.errs), REPLACED),
    ("installation ERROR", fleet(injuries.install_fails), REPLACED),
    ("install 99% forever", fleet(injuries.install_hangs), REPLACED),
    ("ACTIVE->ERROR", fleet(injuries.active_then_error), REPLACED),
    ("ERROR of every pod", fleet(injuries.every_pod_fails), "stopped"),
    ("vanishes while booting", fleet(injuries.vanishes), REPLACED),
    ("spot_vanish (404)", spot_vanishes, "listed it no more, proved it gone"),
    ("wallet_zero_delete", wallet_runs_dry, "listed them no more, proved them gone"),
    ("UNKNOWN flap", fleet(injuries.unknown_for_a_while), WENT_ON),
    ("UNKNOWN for ever", fleet(injuries.unknown_for_ever), REPLACED),
    ("slow auth", fleet(injuries.slow_auth), WENT_ON),
    ("auth denied first n s", fleet(injuries.denied_at_first), WENT_ON),
]
