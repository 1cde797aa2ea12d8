"""What each kind of token may do at a running relay: whose mail it takes, whom it writes to, which records it sees."""

from __future__ import annotations

import base64
import json
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "console" / "haltd"))
from relaykit import relay_of

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.peer_protocol import record_names as names
from uvcc_engine.relay import binary, relay_roles
from uvcc_engine.relay.config import from_json
from uvcc_engine.relay.relay_roles import SCOPES, Role
from uvcc_engine.relay.stream import MAGIC, hello
from uvcc_engine.transcript.signed import orders

PEOPLE = [("party", 0), ("party", 1), ("owner", 0), ("owner", 1), ("coordinator", 0), ("auditor", 0)]
PEOPLE += [("client", 0), ("client", 1)]
CREDENTIALS: Final = [{role: n, "group": "g", "token": f"token-of-{role}-{n}-0123"} for role, n in PEOPLE]
BOX: Final = 5
OTHERS: Final = ("order/", "beat/", "consent/", "x")  # of runs; nobody's but the parties'
SENDS: Final = {  # to whom each may write
    "party": {"party", "owner", "client"},
    "owner": {"party", "owner"},
    "client": {"party"},
    "coordinator": set[str](),
    "auditor": set[str](),
}
AGREED: Final = {names.PROPOSALS, names.APPROVALS, names.ROSTERS}
OWNERS: Final = {names.OWNER_KEYS, names.OWNER_SHARES, names.OWNER_JOINS}
EVERY: Final = {*AGREED, names.BARRIERS, names.REPORTS, names.SIGNATURES, *OWNERS, *OTHERS}
LEAVES: Final = {
    "party": EVERY - OWNERS,
    "owner": OWNERS,
    "coordinator": {names.PROPOSALS},
    "auditor": set[str](),
    "client": set[str](),
}
READS: Final = {
    "party": EVERY,
    "owner": AGREED | {names.OWNER_KEYS, names.OWNER_JOINS},
    "coordinator": AGREED | {names.BARRIERS, names.REPORTS},
    "auditor": EVERY - {names.OWNER_JOINS, *OTHERS},
    "client": set[str](),
}


def token(role: str, n: int) -> str:
    return f"token-of-{role}-{n}-0123"


def ask(url: str, who: tuple[str, int], path: str, body: Any) -> tuple[int, Any]:
    """The status and the answer of one request in JSON, or of ``GET`` without a body."""
    headers = {"Authorization": f"Bearer {token(*who)}", "Content-Type": "application/json"}
    data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=120) as answer:
            text = answer.read()
            return answer.status, json.loads(text) if text[:1] == b"{" else text
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def number(role: str, n: int) -> int:
    return relay_roles.number_of(Role(role), n)


def send(url: str, who: tuple[str, int], to: int, what: str) -> tuple[int, Any]:
    payload = base64.b64encode(what.encode()).decode()
    return ask(url, who, "/enqueue", {"msg_id": what, "receiver": to, "payload_b64": payload, "box": BOX})


def taken(url: str, who: tuple[str, int], **more: Any) -> tuple[int, list[Any]]:
    status, answer = ask(url, who, "/poll", {"box": BOX, "wait_s": 0} | more)
    return status, answer.get("messages", [])


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with relay_of(tmp_path_factory.mktemp("relay"), CREDENTIALS, quota_messages=8) as url:
        yield url


def test_everybody_writes_to_whom_its_role_may_and_takes_and_deletes_only_its_own(url: str) -> None:
    for who in PEOPLE:
        for to in PEOPLE:
            may = to[0] in SENDS[who[0]] and to != who
            status, answer = send(url, who, number(*to), f"{who}->{to}")
            assert (status == 200) == may, (who, to, answer)
            assert may or status == 403
    claims = {"sender": 0, "msg_id": "m", "receiver": 1, "payload_b64": ""}
    assert ask(url, ("owner", 0), "/enqueue", claims)[0] == 403  # in a party's name
    held: dict[tuple[str, int], list[int]] = {}
    for who in PEOPLE:
        assert taken(url, who, receiver=number("party", (who[1] + 1) % 2))[0] == 403  # another's mail, by its number
        status, found = taken(url, who)
        texts = {base64.b64decode(m["payload_b64"]).decode() for m in found}
        assert texts == {f"{w}->{who}" for w in PEOPLE if who[0] in SENDS[w[0]] and w != who}
        assert {m["sender"] for m in found} == {number(*w) for w in PEOPLE if who[0] in SENDS[w[0]] and w != who}
        assert status == (200 if SENDS[who[0]] else 403)
        held[who] = [m["delivery"] for m in found]
    everything = sorted(d for ids in held.values() for d in ids)
    for who in PEOPLE[2:]:  # nobody deletes a party's mail, nor an owner another's
        status, answer = ask(url, who, "/ack", {"box": BOX, "deliveries": everything})
        assert status == (409 if held[who] else 403)
        assert answer.get("acked", []) == ([d in held[who] for d in everything] if held[who] else [])
    for who in PEOPLE[:2]:
        assert held[who]
        assert ask(url, who, "/ack", {"box": BOX, "deliveries": held[who]})[0] == 200


@pytest.mark.parametrize("who", PEOPLE[2:])
def test_the_combined_request_gives_nobody_more(url: str, who: tuple[str, int]) -> None:
    assert send(url, ("party", 1), 0, f"for P0, before {who}")[0] == 200
    (mine,) = taken(url, ("party", 0))[1]
    body = b"".join(
        binary.request_pieces(BOX, 1, 0, 1 << 20, [mine["delivery"]], [binary.Item(192, 0, 0, b"m", b"x")], 1)
    )
    status, answer = ask(url, who, binary.PATH, body)
    if SENDS[who[0]]:
        found = binary.read_reply(answer)
        assert (status, found.fates, found.messages) == (200, bytes([binary.FORBIDDEN]), [])
    else:
        assert (status, answer) == (403, {"error": f"{who[0]} tokens have no mailbox"})
    assert ask(url, ("party", 0), "/ack", {"box": BOX, "deliveries": [mine["delivery"]]})[0] == 200


def test_the_stream_lets_in_who_has_a_mailbox(tmp_path: Path) -> None:
    with relay_of(tmp_path, CREDENTIALS, stream_listen="127.0.0.1:0") as url:
        host, _, port = ask(url, ("party", 0), "/healthz", None)[1]["stream"].rpartition(":")
        for who in PEOPLE:
            with socket.create_connection((host, int(port)), timeout=120) as sock:
                sock.sendall(hello(token(*who)))
                assert sock.recv(4) == (MAGIC if SENDS[who[0]] else b""), who


def test_everybody_leaves_and_reads_the_records_of_its_role(url: str) -> None:
    for prefix in EVERY:
        for who in PEOPLE:
            put = {"name": f"{prefix}of-{who[0]}-{who[1]}", "body": "{}"}
            status, _ = ask(url, who, "/records", {"put": put, "want": "\n"})
            assert status == (200 if prefix in LEAVES[who[0]] else 403), (prefix, who)
    left = {f"{p}of-{w[0]}-{w[1]}" for p in EVERY for w in PEOPLE if p in LEAVES[w[0]]}
    for who in PEOPLE:
        may = {name for name in left if any(name.startswith(p) for p in READS[who[0]])}
        for want in ("", *EVERY):  # whatever it asks for
            _, answer = ask(url, who, "/records", {"want": want})
            assert {r["name"] for r in answer["records"]} == {n for n in may if n.startswith(want)}, (who, want)


def test_a_wait_is_not_ended_by_what_one_may_not_read(url: str) -> None:
    _, before = ask(url, ("owner", 0), "/records", {"want": ""})
    ask(url, ("party", 0), "/records", {"put": {"name": "order/new", "body": "{}"}, "want": "\n"})
    status, answer = ask(url, ("owner", 0), "/records", {"after": before["seq"], "want": "", "wait_s": 0.05})
    assert (status, answer["records"]) == (200, [])


def test_only_parties_see_the_counters(url: str) -> None:
    assert send(url, ("owner", 0), 0, "something to count")[0] == 200
    for who in PEOPLE:
        assert ask(url, who, "/metrics", None)[0] == (200 if who[0] == "party" else 403)
    assert b'party="owner-0"' in ask(url, ("party", 0), "/metrics", None)[1]


def test_an_owner_that_fills_its_quota_takes_nothing_of_a_party(tmp_path: Path) -> None:
    with relay_of(tmp_path, CREDENTIALS, quota_messages=3) as url:
        fates = [send(url, ("owner", 0), 0, str(n))[0] for n in range(5)]
        assert fates == [200, 200, 200, 429, 429]
        assert send(url, ("party", 0), 1, "a party's")[0] == 200
        assert send(url, ("owner", 1), 0, "another owner's")[0] == 200


def test_scopes_do_not_overlap_and_know_every_order() -> None:
    taken_ = [n for scope in SCOPES.values() for n in range(scope.first, scope.first + scope.count)]
    assert len(taken_) == len(set(taken_))
    assert max(taken_) < 256
    assert {orders.ORDER, orders.BEAT} <= set(OTHERS)
    for role, which in ((Role.OWNER, 64), (Role.OWNER, -1), (Role.PARTY, 3)):
        with pytest.raises(ValueError, match="0 to"):
            relay_roles.number_of(role, which)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"party": 0, "owner": 1}, "is not"),
        ({}, "is not"),
        ({"owner": 64}, "names owner 64"),
        ({"owner": True}, "names owner True"),
        ({"coordinator": 0, "send_to": [0]}, "may send to"),
        ({"owner": 0, "send_to": [16]}, "may send to"),
        ({"party": 0, "send_to": [0, 1, 2]}, "is party 0 of group 'g' once more"),
    ],
)
def test_a_credential_that_is_none_or_shares_a_number_is_refused(entry: dict[str, Any], said: str) -> None:
    listed = [CREDENTIALS[0], entry | {"group": "g", "token": "another-token-0123456789"}]
    with pytest.raises(ConfigError, match=said):
        from_json({"db": "relay.db", "credentials": listed}, Path())
