"""A rendezvous that does not answer: told once, soon, and the end of the run only after the whole silence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from uvcc_console.core import events as ev
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
