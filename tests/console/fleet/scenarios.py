"""What every provider that rents must bear: the scenarios of the conformance suite, each in one vendor's world.

The name of a function is the scenario's; it is told by its docstring. At the end of each the run is over, and the test
that plays it holds what still bills against nothing.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from cloudfake import KEY
from cloudworld import FAILED, RUN, UNCLEAR, CloudWorld

from uvcc_console.fleet.cloud import ready
from uvcc_console.fleet.cloud.calls import CloudRefused
from uvcc_console.fleet.cloud.ends import LAG_S
from uvcc_console.fleet.cloud.guard import OverCap
from uvcc_console.fleet.cloud.intents import Intents
from uvcc_console.fleet.provider import Caps, Pod
from uvcc_console.runs.sweep import sweep
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UvccError

OUTSIDE: Any = ["nobody said so"]


# the market, before any money is spent


async def quote_prices_every_pod(w: CloudWorld) -> None:
    quote = await w.provider.quote([w.request(p) for p in range(3)])
    assert 5.0 < quote.hourly < 7.0
    assert quote.funnel
    assert w.fake.asked("create") == []


async def no_stock_is_said_by_the_quote(w: CloudWorld) -> None:
    w.fake.stock = 0
    if w.vendor == "prime":
        for row in w.fake.offers:
            row["stockStatus"] = "Unavailable"
    with pytest.raises(ConfigError, match="no offer"):
        await w.provider.quote([w.request()])


async def a_gpu_that_nobody_has_is_named(w: CloudWorld) -> None:
    with pytest.raises(ConfigError, match=r"Z900|no offer"):
        await w.console(gpu="Z900").quote([w.request()])


async def a_price_ceiling_below_all_is_named(w: CloudWorld) -> None:
    with pytest.raises(ConfigError, match=r"at most 0\.05"):
        await w.provider.quote([w.request(max_price_hr=0.05)])


async def a_market_outside_its_schema(w: CloudWorld) -> None:
    w.fake.fail("market", "answer", status=200, body=OUTSIDE)
    with pytest.raises(UnreachableError, match="another form"):
        await w.provider.quote([w.request()])


async def a_market_that_is_down(w: CloudWorld) -> None:
    w.fake.fail("market", "answer", status=503, body={"error": "down"})
    with pytest.raises(UnreachableError, match=r"no usable answer|Unable to contact"):
        await w.provider.quote([w.request()])


async def a_market_behind_a_gateway_s_page(w: CloudWorld) -> None:
    w.fake.fail("market", "html", 1, 2)
    assert (await w.provider.quote([w.request()])).lines


async def a_market_that_asks_to_wait(w: CloudWorld) -> None:
    w.fake.fail("market", "answer", 1, status=429, body={"error": "slow"}, headers={"Retry-After": "33"})
    before = w.clock.now()
    assert (await w.provider.quote([w.request()])).lines
    assert w.clock.now() - before >= 33


async def a_key_that_is_refused(w: CloudWorld) -> None:
    w.fake.fail("list", "answer", status=401, body={"error": "no"})
    w.fake.fail("market", "answer", status=401, body={"error": "no"})
    if w.vendor == "vast":
        w.fake.OPS = {**w.fake.OPS, "me": ("GET", "/v0/users/")}
        w.fake.fail("me", "answer", status=401, body={"success": False, "error": "auth_error", "msg": "no"})
    with pytest.raises(CloudRefused) as error:
        await w.provider.quote([w.request()])
    assert error.value.kind == "auth"
    assert KEY not in str(error.value)


async def an_answer_that_leads_to_another_host(w: CloudWorld) -> None:
    if w.vendor == "prime":
        w.fake.fail("market", "answer", status=307, body={}, headers={"location": "https://elsewhere.example/"})
    else:
        w.fake.fail("market", "redirect")
    with pytest.raises(CloudRefused) as error:
        await w.provider.quote([w.request()])
    assert error.value.kind == "elsewhere"


# a create


async def a_pod_is_rented_and_given_back(w: CloudWorld) -> None:
    (pod,) = await w.up()
    assert (pod.name, pod.host != "", pod.price_hr > 0) == (f"{RUN}-p0r0", True, True)
    assert [p.name for p in await w.provider.list(RUN)] == [pod.name]
    assert w.provider.begun(RUN) == {pod.name}


async def three_pods_at_once(w: CloudWorld) -> None:
    pods = await w.up(3)
    assert len({p.provider_id for p in pods}) == 3
    assert len(w.fake.asked("create")) == 3


async def _lost(w: CloudWorld, action: str) -> None:
    w.fake.fail("create", action, 1)
    (pod,) = await w.up()
    assert (len(w.fake.billing), len(w.fake.asked("create"))) == (1, 1)
    assert pod.provider_id


async def the_answer_to_a_create_never_comes(w: CloudWorld) -> None:
    await _lost(w, "commit_then_timeout")


async def a_create_answers_500_and_makes_a_pod(w: CloudWorld) -> None:
    await _lost(w, "commit_then_500")


async def the_connection_breaks_after_a_create(w: CloudWorld) -> None:
    await _lost(w, "commit_then_reset")


async def the_answer_is_lost_and_the_list_late(w: CloudWorld) -> None:
    w.fake.visible_after = 40.0
    await _lost(w, "commit_then_timeout")


async def the_answer_is_lost_and_the_list_very_late(w: CloudWorld) -> None:
    """A second pod is rented, and of the two exactly the one that the run does not hold goes."""
    w.fake.fail("create", "commit_then_timeout", 1)
    w.fake.visible_after = 200.0
    (pod,) = await w.up()
    assert len(w.fake.asked("create")) == 2
    await w.clock.sleep(300.0)
    await w.provider.prove(ended=False)
    held = [t for t in Intents.of(w.run_dir).tries().values() if t.held and t.open]
    assert [t.id for t in held] == [pod.provider_id]
    assert w.fake.billing == [held[0].name]


async def a_create_that_nobody_heard(w: CloudWorld) -> None:
    """Nothing came of the first; the second counts, and the first is proven never to have been."""
    w.fake.fail("create", "timeout", 1)
    await w.up()
    assert len(w.fake.billing) == 1
    await w.clock.sleep(LAG_S)
    await w.provider.prove(ended=False)
    assert sorted(t.outcome for t in Intents.of(w.run_dir).tries().values()) == ["", "absent"]


async def a_create_without_a_connection_is_asked_again(w: CloudWorld) -> None:
    w.fake.fail("create", "refuse", 1, 2)
    await w.up()
    assert len(w.fake.billing) == 1


async def a_create_that_shall_wait(w: CloudWorld) -> None:
    w.fake.fail("create", "answer", 1, status=429, body={"error": "slow"}, headers={"Retry-After": "20"})
    await w.up()
    assert len(w.fake.billing) == 1


async def a_create_answered_outside_the_schema(w: CloudWorld) -> None:
    w.fake.fail("create", "answer", 1, status=200, body=OUTSIDE)
    await w.up()
    assert len(w.fake.billing) == 1


async def a_create_answered_with_html(w: CloudWorld) -> None:
    w.fake.fail("create", "html", 1)
    await w.up()
    assert len(w.fake.billing) == 1


async def a_quota_that_is_used_up(w: CloudWorld) -> None:
    w.fake.quota = 0
    with pytest.raises(CloudRefused) as error:
        await w.up()
    assert (error.value.kind, len(w.fake.asked("create"))) == ("limit", 1)


async def an_account_without_money(w: CloudWorld) -> None:
    w.fake.broke = True
    with pytest.raises(CloudRefused) as error:
        await w.up()
    assert (error.value.kind, len(w.fake.asked("create"))) == ("payment", 1)


async def stock_that_is_gone_after_the_quote(w: CloudWorld) -> None:
    await w.provider.quote([w.request()])
    w.fake.stock = 0
    with pytest.raises(UvccError, match="no offer worked"):
        await w.provider.create(w.request())
    assert all(t.outcome == "refused" for t in Intents.of(w.run_dir).tries().values())


async def a_pod_that_is_dearer_than_quoted_is_not_kept(w: CloudWorld) -> None:
    w.fake.price_factor = 1.4
    with pytest.raises(UvccError, match=r"quoted were|agreed to"):
        await w.up()


async def a_create_beyond_the_hourly_cap_is_not_asked_for(w: CloudWorld) -> None:
    w.provider.caps = Caps(4.5, 100.0)
    await w.up(2)
    with pytest.raises(OverCap, match=r"limits\.hourly"):
        await w.provider.create(w.request(2))
    assert len(w.fake.asked("create")) == 2


async def a_create_beyond_the_total_cap_is_not_asked_for(w: CloudWorld) -> None:
    w.provider.caps = Caps(100.0, 2.0)
    await w.up(1)
    await w.clock.sleep(3600.0)
    with pytest.raises(OverCap, match=r"limits\.total"):
        await w.provider.create(w.request(1))


async def the_intent_is_on_disk_before_the_request(w: CloudWorld) -> None:
    seen: list[bool] = []
    original = w.fake.rented if hasattr(w.fake, "rented") else w.fake.pods

    class Watched(dict):  # type: ignore[type-arg]
        def __setitem__(self, key: str, value: Any) -> None:
            name = value.name if hasattr(value, "name") else value.record["name"]
            seen.append(name in Intents.of(w.run_dir).tries())
            super().__setitem__(key, value)

    watched = Watched(original)
    if hasattr(w.fake, "rented"):
        w.fake.rented = watched
    else:
        w.fake.pods = watched
    await w.up()
    assert seen == [True]


async def a_disk_that_takes_no_intent_makes_no_pod(w: CloudWorld) -> None:
    await w.provider.quote([w.request()])
    (w.run_dir / "intents.jsonl").mkdir()
    with pytest.raises(UvccError, match="no offer worked"):
        await w.provider.create(w.request())
    assert w.fake.asked("create") == []
    (w.run_dir / "intents.jsonl").rmdir()


async def the_run_s_key_comes_first_and_leaves_last(w: CloudWorld) -> None:
    (pod,) = await w.up()
    body = json.dumps(w.fake.asked("create"))
    assert "ssh-ed25519" in body if w.vendor in ("runpod", "kubernetes", "skypilot", "slurm") else w.fake.keys
    await w.provider.delete(pod)
    assert w.fake.keys == {}


# whose is it?


async def somebody_else_s_pod_of_our_form_is_left_alone(w: CloudWorld) -> None:
    w.fake.foreign(f"{RUN}-p0r0xaaaaaa")
    w.fake.foreign("my-own-training")
    (pod,) = await w.up()
    assert len(w.fake.asked("create")) == 1
    assert [p.provider_id for p in await w.provider.list(RUN)] == [pod.provider_id]
    await w.down()
    assert len(w.fake.living) == 2


async def a_pod_that_is_not_ours_is_not_deleted(w: CloudWorld) -> None:
    with pytest.raises(ConfigError, match="no pod of ours"):
        await w.provider.delete(Pod("my-own-training", 0, 0, w.vendor, "id1001"))
    assert w.fake.asked("delete") == []


async def hostile_names_in_the_list(w: CloudWorld) -> None:
    for name in ("\x1b]0;owned\x07", "../../etc", f"{RUN}-p0r0xaaaaaa\n", "'; rm -rf ~", "\u202euvcc", "x" * 5000):
        w.fake.foreign(name)
    await w.up()
    listed = await w.provider.list("uvcc-")
    assert len(listed) == 1
    assert all(p.name.isprintable() for p in listed)


async def a_hostile_id_in_the_list(w: CloudWorld) -> None:
    w.fake.foreign("x")
    if w.vendor == "prime":
        record = next(iter(w.fake.pods.values())).record
        w.fake.drifts = True
        record["id"] = ""
    else:
        next(iter(w.fake.rented.values())).id = "" if w.vendor == "vast" else "../../keys"
    if w.vendor == "vast":
        w.fake.fail("list", "answer", status=200, body={"instances": [{"id": "../../keys", "label": "x"}]})
    with pytest.raises(UnreachableError):
        await w.provider.list(RUN)
    (w.fake.pods if w.vendor == "prime" else w.fake.rented).clear()


async def a_list_outside_its_schema_is_no_empty_list(w: CloudWorld) -> None:
    await w.up()
    w.fake.fail("list", "answer", *range(1, 9), status=200, body={"unexpected": True})
    with pytest.raises(UnreachableError, match="form"):
        await w.provider.list(RUN)


async def a_list_that_is_down_is_no_empty_list(w: CloudWorld) -> None:
    await w.up()
    w.fake.fail("list", "answer", status=500, body={"error": "x"})
    with pytest.raises(UnreachableError):
        await w.provider.list(RUN)


async def a_list_of_many_pages(w: CloudWorld) -> None:
    w.fake.stock = w.fake.quota = 999
    for n in range(120):
        w.fake.foreign(f"other-{n}")
    (pod,) = await w.up()
    assert [p.provider_id for p in await w.provider.list(RUN)] == [pod.provider_id]


# until it is ready


async def a_slow_boot_is_waited_for(w: CloudWorld) -> None:
    w.fake.boot_s = 300.0
    await w.up()
    assert len(w.fake.asked("create")) == 1


async def _replaced(w: CloudWorld) -> None:
    await w.provider.quote([w.request()])
    pod = await w.provider.create(w.request())
    for name, good in (("born_state", ""), ("vanish_s", float("inf"))):
        if w.vendor == "prime":
            w.fake.each(timeline=[], vanish_s=float("inf"))
        else:
            setattr(w.fake, name, good)
    ready = await w.provider.wait_ready(pod)
    assert ready.provider_id != pod.provider_id
    assert len(w.fake.billing) == 1


async def a_pod_that_fails_at_boot_is_replaced(w: CloudWorld) -> None:
    w.fake.born_state = FAILED[w.vendor]
    await _replaced(w)


async def a_pod_that_vanishes_at_boot_is_replaced(w: CloudWorld) -> None:
    w.fake.vanish_s = 30.0
    await _replaced(w)


async def a_pod_that_is_gone_before_it_was_ever_shown_is_replaced(w: CloudWorld) -> None:
    w.fake.vanish_s = 1.0
    w.fake.visible_after = 30.0
    await _replaced(w)


async def a_pod_in_an_unknown_state_for_long_is_given_up(w: CloudWorld) -> None:
    w.fake.born_state = UNCLEAR[w.vendor]
    await _replaced(w)


async def a_login_that_never_works_ends_the_pod(w: CloudWorld) -> None:
    w.logins = {"*": "permission denied"}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UvccError, match="never became ready"):
        patch.setattr(ready, "LEAST_S", 60.0)
        await w.up()


async def a_list_that_fails_while_waiting(w: CloudWorld) -> None:
    await w.provider.quote([w.request()])
    pod = await w.provider.create(w.request())
    w.fake.fail("list", "answer", *range(1, 14), status=500, body={"error": "x"})
    assert (await w.provider.wait_ready(pod)).provider_id == pod.provider_id


async def a_pod_that_is_shown_late(w: CloudWorld) -> None:
    w.fake.visible_after = 120.0
    await w.up()
    assert len(w.fake.asked("create")) == 1


# another process


async def another_process_takes_over_what_it_finds(w: CloudWorld) -> None:
    (pod,) = await w.up()
    other = w.console()
    again = await other.create(w.request())
    assert (again.provider_id, len(w.fake.asked("create"))) == (pod.provider_id, 1)
    assert other.begun(RUN) == {pod.name}
    await other.close()


async def a_crash_between_create_and_answer(w: CloudWorld) -> None:
    w.fake.fail("create", "commit_then_timeout", 1)
    await w.provider.quote([w.request()])
    asking = asyncio.ensure_future(w.provider.create(w.request()))
    while not w.fake.asked("create"):
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    other = w.console()
    pod = await other.create(w.request())
    assert (len(w.fake.asked("create")), len(w.fake.billing)) == (1, 1)
    assert pod.provider_id
    await other.close()


async def the_books_count_from_the_asking_on(w: CloudWorld) -> None:
    (pod,) = await w.up()
    await w.clock.sleep(3600.0)
    books = w.provider.books()
    assert books.hourly == pytest.approx(pod.price_hr)
    assert books.spent > pod.price_hr


# the end


async def a_second_delete_succeeds(w: CloudWorld) -> None:
    (pod,) = await w.up()
    await w.provider.delete(pod)
    await w.provider.delete(pod)
    assert w.fake.billing == []


async def a_delete_that_is_refused_three_times(w: CloudWorld) -> None:
    w.fake.refuse_deletes = 3
    (pod,) = await w.up()
    await w.provider.delete(pod)
    assert w.fake.billing == []


async def a_delete_that_is_never_obeyed_is_told(w: CloudWorld) -> None:
    (pod,) = await w.up()
    w.fake.fail("delete", "answer", status=500, body={"error": "x"})
    with pytest.raises(UnreachableError, match="not proven gone"):
        await w.provider.delete(pod)


async def a_delete_that_takes_minutes(w: CloudWorld) -> None:
    w.fake.delete_s = 100.0
    (pod,) = await w.up()
    await w.provider.delete(pod)
    assert w.fake.billing == []


async def a_list_that_is_down_at_the_end(w: CloudWorld) -> None:
    (pod,) = await w.up()
    w.fake.fail("list", "answer", *range(1, 12), status=503, body={"error": "x"})
    await w.provider.delete(pod)
    assert w.fake.billing == []


async def a_key_that_is_withdrawn_proves_nothing(w: CloudWorld) -> None:
    (pod,) = await w.up()
    for op in ("list", "delete"):
        w.fake.fail(op, "answer", status=401, body={"error": "no"})
    with pytest.raises((UnreachableError, CloudRefused)):
        await w.provider.delete(pod)


async def a_run_ends_with_a_create_still_unanswered(w: CloudWorld) -> None:
    """The pod shows long after the run's end, and is ended all the same."""
    w.fake.fail("create", "commit_then_timeout", 1)
    w.fake.visible_after = 400.0
    await w.provider.quote([w.request()])
    asking = asyncio.ensure_future(w.provider.create(w.request()))
    while not w.fake.asked("create"):
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    w.provider = w.console()
    assert w.provider.begun(RUN)


async def a_stray_goes_and_the_held_pod_stays(w: CloudWorld) -> None:
    (pod,) = await w.up()
    w.fake.foreign("not-ours")
    strays = [p for p in await w.provider.list("uvcc-") if p.stray]
    assert strays == []
    await w.provider.prove(ended=False)
    assert [p.provider_id for p in await w.provider.list(RUN)] == [pod.provider_id]


async def a_vendor_that_obeys_twice(w: CloudWorld) -> None:
    """Two pods under one try's name: the sweep ends the one that the run does not hold, by its id."""
    (pod,) = await w.up()
    (name,) = w.fake.billing
    w.fake.foreign(name).foreign = False
    assert len(w.fake.billing) == 2
    assert [p.name for p in await sweep(w.provider, f"{RUN}-")] == [name]
    assert [p.provider_id for p in await w.provider.list(RUN)] == [pod.provider_id]


async def another_party_s_account_is_not_judged(w: CloudWorld) -> None:
    """With a provider per party the run's file tells of other accounts too; what it tells of those stays untouched."""
    note = {"name": f"{RUN}-p1r0xbbbbbb", "provider": "elsewhere", "price_hr": 1.0}
    Intents.of(w.run_dir).note(w.clock.now() - 5000, **note)
    w.provider = w.console(party=0)
    (pod,) = await w.up()
    await w.provider.prove(ended=False)
    theirs = Intents.of(w.run_dir).tries()[note["name"]]
    assert (theirs.open, w.provider.begun(RUN)) == (True, {f"{RUN}-p0r0"})
    assert w.provider.books().hourly == pytest.approx(pod.price_hr + 1.0)  # but the caps hold for all of it


async def the_key_is_in_no_file_and_no_message(w: CloudWorld) -> None:
    w.fake.fail("create", "answer", status=400, body={"error": f"bad {KEY[:4]}"})
    with pytest.raises(UvccError) as error:
        await w.up()
    assert KEY not in str(error.value)
    assert not any(KEY.encode() in p.read_bytes() for p in w.run_dir.rglob("*") if p.is_file())


async def an_unchanged_pod_keeps_its_price(w: CloudWorld) -> None:
    (pod,) = await w.up()
    listed = (await w.provider.list(RUN))[0]
    assert replace(listed, region=pod.region).price_hr == pytest.approx(pod.price_hr)
