"""What parties, workers and consoles say beside the protocol: every record comes back as it was, and nothing raises."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uvcc_engine.contract.peer_protocol import peer_messages, relay_words
from uvcc_engine.contract.peer_protocol.peer_messages import (
    AttachedNote,
    BatchTurn,
    FinalState,
    Heard,
    HoldVote,
    PairFigures,
    Resume,
    StepVote,
    Stopped,
    Topic,
    Vote,
)
from uvcc_engine.contract.peer_protocol.relay_words import DomainConsent, HaltOrder, SignOfLife
from uvcc_engine.contract.run_files.records import Heartbeat, Malformed, ReportedRoot

MESSAGES = [
    StepVote(3, Vote(1, "n", 2), "signed", b"root"),
    HoldVote(3, 4, Vote(2, "n")),
    BatchTurn(3, 4, Vote(1, "n"), b"queries"),
    Resume((4, 2), 1, 2, "ab" * 32, "products"),
    FinalState({0: "a" * 64, 1: "0" * 64}),
    Stopped("it broke", "mend it", 2),
    Stopped("it broke"),
    Stopped("it was asked to", halted=True),
    *(
        AttachedNote(t, 7, b"\0\xff")
        for t in (Topic.ROOT, Topic.SAVED, Topic.REPLAYED, Topic.CLOSING, Topic.DISPUTE, Topic.FINDING)
    ),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
KEYS = ("topic", "run", "step", "turn", "vote", "nonce", "saved", "note", "stated", "steps", "digests", "party", "type")
ODD = st.dictionaries(st.sampled_from((*KEYS, "mode", "deadline_s", "coord", "roots", "seq", "records")), JSON)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: f"{m.topic}")
def test_every_message_of_a_party_comes_back_as_it_was(message: Any) -> None:
    assert peer_messages.parse(peer_messages.encode("r", message)) == Heard("r", message)


def test_every_topic_has_a_record() -> None:
    assert {m.topic for m in MESSAGES} == set(Topic)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(list(Topic)), ODD)
def test_whatever_a_party_says_is_a_record_or_malformed(topic: Topic, odd: dict[str, Any]) -> None:
    found = peer_messages.parse(json.dumps({"run": "r", "topic": topic.value} | odd).encode())
    assert isinstance(found, Heard | Malformed)
    if isinstance(found, Heard):
        assert peer_messages.parse(peer_messages.encode(found.run, found.message)) == found
    else:
        assert found.why.isprintable()
        assert len(found.why) < 200


def test_figures_of_a_link_turn_around() -> None:
    told = PairFigures(1.5, 20.0, 30.0)
    assert PairFigures.parse(json.dumps(asdict(told)).encode()) == told
    assert told.seen_from_the_other_end() == PairFigures(1.5, 30.0, 20.0)
    for odd in (b"", b"[]", b"{}", b'{"rtt_ms": true, "out_mib_s": 1, "in_mib_s": 1}', b"[" * 3000):
        assert isinstance(PairFigures.parse(odd), Malformed)


@pytest.mark.parametrize(
    "told", [HaltOrder(run="r", nonce="n", mode="hold", deadline_s=2.5), DomainConsent(run="r", what="full")]
)
def test_orders_and_consents_come_back_as_they_were(told: HaltOrder | DomainConsent) -> None:
    assert relay_words.order(told.to_json()) == told


def test_a_sign_of_life_comes_back_with_its_roots_and_without_what_is_not_published() -> None:
    roots = [ReportedRoot(epoch=n, root="ab" * 32, pairs={"p1r0s0t0": "cd" * 32}) for n in (1, 2)]
    beat = {"step": 3, "phase": "train", "loss": 0.5, "halt_nonce": "n", "secret": "stays"}
    content = relay_words.of_life("r", "p0r0s0t0", beat, roots, 12.3456)
    assert content["at"] == 12.346
    assert "secret" not in content
    found = relay_words.sign_of_life(json.loads(json.dumps(content)))
    assert isinstance(found, SignOfLife)
    assert (found.run, found.coord, found.halt_nonce, list(found.roots)) == ("r", "p0r0s0t0", "n", roots)
    assert isinstance(found.beat, Heartbeat)
    assert (found.beat.step, found.beat.phase) == (3, "train")


@settings(max_examples=150, deadline=None)
@given(ODD)
def test_whatever_lies_at_the_relay_is_a_record_or_malformed(odd: dict[str, Any]) -> None:
    assert isinstance(relay_words.order(odd), HaltOrder | DomainConsent | Malformed)
    assert isinstance(relay_words.sign_of_life(odd), SignOfLife | Malformed)
    assert isinstance(relay_words.answer(json.dumps(odd).encode()), relay_words.RelayAnswer | Malformed)
