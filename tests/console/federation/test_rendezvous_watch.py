"""A rendezvous that does not answer: told once, soon, and the end of the run only after the whole silence."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from uvcc_console.core import events as ev
from uvcc_console.halt.relay_path import RelayMailbox
from uvcc_console.rollout.federated import from_owners
from uvcc_console.rollout.federated.rendezvous_watch import RendezvousWatch
from uvcc_engine.contract.errors import UnreachableError

REFUSED = UnreachableError("the relay at http://r refuses")


def test_who_is_alone_hears_of_it_long_before_the_run_ends() -> None:
    now, said = [100.0], list[ev.Alert]()
    watch = RendezvousWatch(cast(Any, SimpleNamespace(record=said.extend)), 60.0, lambda: now[0])
    for _ in range(5):
        assert watch.failed(REFUSED) is None
    assert said == []  # a relay is started again in less
    for now[0] in (111.0, 130.0, 160.0):
        assert watch.failed(REFUSED) is None
    assert [(a.level, a.text) for a in said] == [
        ("error", "the relay of the domains has not answered for 11 s: the relay at http://r refuses")
    ]
    assert "after 60 s this domain ends safe" in said[0].hint
    watch.answered()
    watch.answered()
    assert [(a.level, a.text) for a in said[1:]] == [("info", "the relay of the domains answers again")]
    now[0] = 221.0
    lost = watch.failed(REFUSED)
    assert lost is not None
    assert lost.what == "the rendezvous has not answered for 61 s"


def test_a_relay_that_is_started_again_costs_no_domain_that_waits_for_owners_its_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first connection that was refused ended the stage: only a relay that is out of reach is asked again."""
    monkeypatch.setattr(from_owners, "LOOK_S", 0.0)
    monkeypatch.setattr(from_owners, "fingerprint", str)
    visits = [lambda: RelayMailbox("http://127.0.0.1:1", "g", "r", ("token",)).exchange(None, ""), lambda: []]
    parcels = SimpleNamespace(
        proposal=SimpleNamespace(owners=("key",)),
        poll=lambda: visits.pop(0)(),
        laid=lambda replicas: {"of": replicas},
    )
    found = asyncio.run(from_owners.shares_of_owners(cast(Any, parcels), 2, 3600.0, lambda _: None))
    assert found == {"of": 2}
