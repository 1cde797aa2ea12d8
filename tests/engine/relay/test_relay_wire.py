"""Binary bodies and the configuration of the relay."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.relay import binary, config

ITEMS = st.lists(
    st.builds(
        binary.Item,
        st.integers(0, 255),
        st.integers(0, 255),
        st.integers(0, 2**32 - 1),
        st.binary(max_size=255),
        st.binary(max_size=50),
    ),
    max_size=5,
)
MESSAGES = st.lists(
    st.builds(
        binary.Message, st.integers(0, 2**64 - 1), st.integers(0, 255), st.integers(0, 255), st.binary(max_size=50)
    ),
    max_size=5,
)


@given(ITEMS, st.lists(st.integers(0, 2**64 - 1), max_size=5), st.integers(0, 2**64 - 1))
def test_a_request_comes_back(items: list[binary.Item], acks: list[int], box: int) -> None:
    body = b"".join(binary.request_pieces(box, 5, 100, 200, acks, items, binary.RESYNC))
    assert binary.read_request(body) == binary.Request(binary.RESYNC, box, 5, 100, 200, tuple(acks), items)
    for cut in (body[:-1], body + b"x", b"XXXX" + body[4:], b""):
        with pytest.raises(ValueError):
            binary.read_request(cut)


@given(MESSAGES, st.binary(max_size=9))
def test_a_reply_comes_back(messages: list[binary.Message], fates: bytes) -> None:
    body = b"".join(binary.reply_pieces(0, fates, messages))
    assert binary.read_reply(body) == binary.Reply(0, fates, messages)
    for cut in (body[:-1], body + b"x", b"XXXX" + body[4:]):
        with pytest.raises(ValueError):
            binary.read_reply(cut)


GOOD = {"db": "r.db", "credentials": [{"party": 0, "group": "g", "token": "0123456789abcdef"}]}


def test_the_configuration_is_strict(tmp_path: Path) -> None:
    found = config.from_json(GOOD, tmp_path)
    who = found.credentials[config.token_key("0123456789abcdef")]
    assert who == config.Credential(0, "g", frozenset({1, 2}))
    assert found.db == tmp_path / "r.db"
    bad = [
        ({"lease": 5}, "lease_s"),
        ({"lease_s": 0}, "positive"),
        ({"lease_s": "5"}, "lease_s"),
        ({"tls_cert": "x"}, "TLS"),
        ({"credentials": []}, "credentials"),
        ({"credentials": [{"party": 3, "group": "g", "token": "0123456789abcdef"}]}, "party 3"),
        ({"credentials": [{"party": 0, "group": "g", "token": "short"}]}, "too short"),
        ({"credentials": GOOD["credentials"] * 2}, "token of another"),
        ({"credentials": [{"party": 0, "group": "g", "token": "0123456789abcdef", "send_to": [9]}]}, "may send"),
    ]
    for change, what in bad:
        with pytest.raises(ConfigError, match=what):
            config.from_json(GOOD | change, tmp_path)


def test_a_configuration_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "relay.json"
    path.write_text(json.dumps(GOOD))
    os.chmod(path, 0o644)
    with pytest.raises(ConfigError, match="readable by others"):
        config.load(path)
    os.chmod(path, 0o600)
    assert config.load(path).db.name == "r.db"
    path.write_text("{")
    with pytest.raises(UnreadableError):
        config.load(path)
