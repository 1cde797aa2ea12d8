"""What waits to be journalled: all of it is written, evidence first when it is much."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from uvcc_console.core import events as ev
from uvcc_console.rollout.outbox import EventOutbox, key_of


def beat(worker: int, step: int) -> ev.Event:
    return ev.HeartbeatRead(pod="p0r0", coord=f"p0r0s0t{worker}", record={"step": step})


def line(n: int) -> ev.Event:
    return ev.LogLines(pod="p0r0", src="w", lines=[str(n)])


def cursor(n: int) -> ev.Event:
    return ev.CursorMoved(pod="p0r0", cursors={"r/w": [1, n]})


def ended(n: int) -> ev.Event:
    return ev.WorkerProcess(pod="p0r0", coord=f"p0r0s0t{n}", state="exited", rc=0)


def test_ends_and_results_pass_a_flood_of_lines() -> None:
    box = EventOutbox()
    for n in range(5000):
        box.put([line(n), cursor(n)])
    box.put([ended(1)])
    first = box.take(100)
    assert first[0] == ended(1)
    assert first[1:] == [e for n in range(50) for e in (line(n), cursor(n))]


def test_few_events_keep_their_order() -> None:
    box = EventOutbox()
    for event in (line(0), ended(1), line(1)):
        box.put([event])
    assert box.take() == [line(0), ended(1), line(1)]
    assert len(box) == 0


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("beat"), st.integers(0, 3)),
        st.tuples(st.just("line"), st.just(0)),
        st.tuples(st.just("ended"), st.just(0)),
        st.tuples(st.just("take"), st.integers(1, 6)),
        st.tuples(st.just("fail"), st.integers(1, 6)),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_nothing_is_lost_but_what_was_superseded(steps: list[tuple[str, int]]) -> None:
    box, written, put = EventOutbox(), list[ev.Event](), list[ev.Event]()
    for number, (what, n) in enumerate(steps):
        if what in ("beat", "line", "ended"):
            events = {"beat": [beat(n, number)], "line": [line(number), cursor(number)], "ended": [ended(number)]}[what]
            put += events
            box.put(events)
        else:
            taken = box.take(n)
            if what == "fail":
                box.put_back(taken)
            else:
                written += taken
    while left := box.take(3):
        written += left
    assert len(box) == 0
    lasting = [e for e in put if key_of(e) is None]
    assert sorted(map(repr, (e for e in written if key_of(e) is None))) == sorted(map(repr, lasting))
    for kind in (ev.LogLines, ev.CursorMoved, ev.WorkerProcess):
        of_kind = [e for e in lasting if isinstance(e, kind)]
        assert [e for e in written if isinstance(e, kind)] == of_kind
    for worker in range(4):
        steps_put = [e.record["step"] for e in put if isinstance(e, ev.HeartbeatRead) and e.coord == f"p0r0s0t{worker}"]
        shown = [e.record["step"] for e in written if isinstance(e, ev.HeartbeatRead) and e.coord == f"p0r0s0t{worker}"]
        assert shown[-1:] == steps_put[-1:]
        assert set(shown) <= set(steps_put)
