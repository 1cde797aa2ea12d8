"""JSON requests of the relay: each body is a request whose fields are in bounds, or malformed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uvcc_engine.contract.run_files.records import Malformed
from uvcc_engine.relay import json_requests

KINDS = [
    json_requests.EnqueueRequest,
    json_requests.PollRequest,
    json_requests.AckRequest,
    json_requests.RecordsRequest,
]
MESSAGE = {"msg_id": "m", "receiver": 1, "payload_b64": "AAE="}
WHOLE: dict[str, Any] = {"messages": [MESSAGE], "deliveries": [1, 2], "put": {"name": "n", "body": "b"}, "box": 4}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def test_a_message_alone_is_a_list_of_one() -> None:
    found = json_requests.parse(json_requests.EnqueueRequest, json.dumps(MESSAGE | {"ttl_s": 5, "sender": 2}).encode())
    message = json_requests.EnqueuedMessage(2, 1, b"m", b"\0\1", 5)
    assert found == json_requests.EnqueueRequest(group=None, box=0, messages=(message,), alone=True)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_every_request_reads_its_own_fields(kind: type[json_requests.JsonRequest]) -> None:
    assert isinstance(json_requests.parse(kind, json.dumps(WHOLE | {"group_id": "g"}).encode()), kind)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.sampled_from(["messages", "deliveries", "put", "box", "group_id", "receiver", "wait_s", "max_bytes", "after"]),
    JSON,
)
def test_whatever_a_body_holds_is_a_request_or_malformed(
    kind: type[json_requests.JsonRequest], key: str, odd: Any
) -> None:
    assert isinstance(json_requests.parse(kind, json.dumps(WHOLE | {key: odd}).encode()), kind | Malformed)
    assert isinstance(json_requests.parse(kind, json.dumps(odd).encode()[:-1]), kind | Malformed)


@pytest.mark.parametrize("change", [
    {"payload_b64": "A"},
    {"payload_b64": "é"},
    {"msg_id": ""},
    {"msg_id": "x" * 65},
    {"receiver": 256},
    {"receiver": True},
    {"ttl_s": -1},
    {"sender": "0"},
])  # fmt: skip
def test_a_message_out_of_bounds_is_malformed(change: dict[str, Any]) -> None:
    assert isinstance(
        json_requests.parse(json_requests.EnqueueRequest, json.dumps(MESSAGE | change).encode()), Malformed
    )
