"""A plane that waits for messages and for something else is brought back by who knows of the other thing."""

from __future__ import annotations

import threading
from typing import Any

from plane_kit import Log, make_plane

from uvcc_engine.plane.api import Tag, Wakeable
from uvcc_engine.plane.links.direct import DirectLink


def nowhere(**more: Any) -> dict[str, Any]:
    """A direct link to peers that never come."""
    return {"kind": "direct", "listen": "127.0.0.1:0", "peers": {}, "first_contact_s": 600.0, **more}


def test_a_nudge_lets_a_waiting_plane_ask_again_and_nothing_else_does() -> None:
    plane = make_plane(0, nowhere(), Log())
    asked, first, ready = [], threading.Event(), threading.Event()

    def other() -> bool:
        asked.append(ready.is_set())
        first.set()
        return ready.is_set()

    waiter = threading.Thread(target=plane.wait_any, args=([[(1, Tag(0, 1, 0, 1))]], other))
    waiter.start()
    assert isinstance(plane, Wakeable)
    assert first.wait(120)
    ready.set()
    plane.wake()
    waiter.join(120)
    assert not waiter.is_alive()
    assert asked[-1]
    plane.close(graceful=False)
    plane.wake()  # nobody waits any more


def test_a_nudge_before_the_wait_ends_it_and_is_used_up() -> None:
    link = DirectLink(0, "127.0.0.1:0", {}, clock=iter([0.0] * 99).__next__)
    link.wake()
    link.wake()
    assert link.exchange(3600.0, None) == []
    assert link._poll.select(0) == []
    link.close()


def test_the_quiet_thread_looks_less_and_less_often_up_to_its_limit() -> None:
    plane = make_plane(0, nowhere(idle_s=0.5), Log())
    pauses = [0.01]
    with plane._lock:
        for _ in range(8):
            pauses.append(plane._background_round(plane._link, pauses[-1]))
    assert pauses[:4] == [0.01, 0.02, 0.04, 0.08]
    assert pauses[-1] == 0.5
    plane.close(graceful=False)
