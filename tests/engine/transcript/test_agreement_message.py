"""What parties show each other after an epoch: it comes back as it was, and whatever a peer sends, nothing raises."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uvcc_engine.contract.run_files.records import Malformed
from uvcc_engine.transcript.exchange.agreement_message import AgreementMessage
from uvcc_engine.transcript.signed.statements import Signed

OWN, THIRD = Signed({"epoch": 3}, "signed"), Signed({"epoch": 2}, "signed, too")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("third", [None, THIRD])
def test_a_message_comes_back_as_it_was(third: Signed | None) -> None:
    message = AgreementMessage("root", OWN, third)
    assert AgreementMessage.parse("root", message.encode()) == message
    assert isinstance(AgreementMessage.parse("result", message.encode()), Malformed)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["root", "third"]), JSON)
def test_whatever_a_peer_sends_is_a_message_or_malformed(key: str, odd: Any) -> None:
    said = json.loads(AgreementMessage("root", OWN, THIRD).encode()) | {key: odd}
    assert isinstance(AgreementMessage.parse("root", json.dumps(said).encode()), AgreementMessage | Malformed)
    assert isinstance(AgreementMessage.parse("root", json.dumps(odd).encode()), Malformed)


@pytest.mark.parametrize("body", [b"", b"\xff", b"[" * 99_999, b'{"root": {}, "third": null, "more": 1}'])
def test_bytes_that_are_none_say_so(body: bytes) -> None:
    assert isinstance(AgreementMessage.parse("root", body), Malformed)
