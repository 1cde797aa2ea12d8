"""The meaning of F9 and of the rhythm of keys, without a screen."""

from __future__ import annotations

import random

from ui_journals import T0, Story

from uvcc_console.core.folding.state import fold
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.ui.halting.halt_switch import Cadence, HaltSwitch


def running() -> Snapshot:
    return fold(Story().full(3).events)


def after(story: Story) -> tuple[Snapshot, float]:
    return fold(story.events), story.now


def test_one_press_holds_with_a_fresh_nonce() -> None:
    a, b = (HaltSwitch().press(100.0, T0, running(), 0) for _ in range(2))
    assert (a.mode, b.mode) == ("hold", "hold")
    assert a.nonce != b.nonce


def test_a_second_press_commits_the_same_nonce_and_a_repeating_key_does_not() -> None:
    snap, now = after(Story().full(3).halt("hold", nonce="aa11", acks=False))
    switch = HaltSwitch()
    switch.press(100.0, now - 10, running(), 0)
    assert switch.press(100.03, now + 0.03, snap, 0).mode == ""
    assert switch.press(100.06, now + 0.06, snap, 0).mode == ""
    late = switch.press(100.40, now + 0.40, snap, 0)
    assert (late.mode, late.nonce) == ("halt", "aa11")


def test_a_hold_that_nobody_answered_can_still_be_committed() -> None:
    snap, now = after(Story().full(3).halt("hold", nonce="aa11", acks=False))
    assert HaltSwitch().press(200.0, now + 30, snap, 0).mode == "halt"


def test_f9_inside_pasted_text_is_ignored_but_a_single_one_after_typing_works() -> None:
    assert HaltSwitch().press(100.0, T0, running(), 5).mode == ""
    assert HaltSwitch().press(100.0, T0, running(), 1).mode == "hold"


def test_a_drill_does_not_block_a_real_halt() -> None:
    story = Story().full(3)
    story.halt("hold", nonce="d1", drill=True)
    snap, now = after(story)
    assert HaltSwitch().press(100.0, now, snap, 0).mode == "hold"


def test_release_only_inside_the_three_seconds() -> None:
    snap, now = after(Story().full(3).halt("hold", nonce="aa11", acks=False))
    assert HaltSwitch().release(now + 1, snap).mode == "release"
    assert HaltSwitch().release(now + 4, snap).mode == ""


def test_a_finished_run_has_nothing_to_halt() -> None:
    snap, now = after(Story(steps=3).finished())
    decision = HaltSwitch().press(100.0, now, snap, 0)
    assert decision.mode == ""
    assert "nothing to halt" in decision.why


def test_the_cadence_tells_fingers_from_pastes() -> None:
    cadence = Cadence()
    rnd = random.Random(3)
    at = 0.0
    for _ in range(50):
        at += rnd.uniform(0.03, 0.3)
        cadence.note(at)
        assert not cadence.pasted
    for n in range(1, 6):
        at += 0.001
        cadence.note(at)
        assert cadence.burst == n


def test_pods_that_proved_nothing_get_the_same_halt_again() -> None:
    snap, now = after(Story().halted(unknown=1))
    decision = HaltSwitch().press(100.0, now, snap, 0)
    assert (decision.mode, decision.nonce) == ("halt", snap.halt.nonce)


def test_who_asked_stays_named_when_the_sidecar_commits() -> None:
    from uvcc_console.core import events as ev

    story = Story().full(3).halt("hold", nonce="aa11", acks=False)
    story.add(ev.HaltRequested(nonce="aa11", mode="halt", by="haltd"), 3.0)
    snap, _ = after(story)
    assert (snap.halt.mode, snap.halt.by) == ("halt", "ada@ops tui")
