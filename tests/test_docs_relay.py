"""The relay's OpenAPI document, held against what a running relay takes and answers."""

from __future__ import annotations

import base64
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Final

import jsonschema
import pytest

sys.path.insert(0, str(Path(__file__).parent / "console" / "haltd"))
from relaykit import TOKENS, relay_of

from uvcc_engine.relay.relay_roles import SCOPES, Role

DOCUMENT: Final = Path(__file__).parents[1] / "docs" / "specifications" / "relay-openapi.json"
MESSAGE: Final = {"msg_id": "m-1", "receiver": 1, "payload_b64": base64.b64encode(b"sealed").decode()}
EXCHANGES: Final[tuple[tuple[int, str, Any], ...]] = (
    (0, "/enqueue", MESSAGE),
    (0, "/enqueue", {"messages": [MESSAGE, MESSAGE | {"msg_id": "m-2", "ttl_s": 60}], "box": 0}),
    (1, "/poll", {"wait_s": 0, "max_bytes": 4096, "box": 0}),
    (1, "/ack", None),  # of what was polled
    (0, "/records", {"put": {"name": "report/x", "body": "{}"}, "want": "report/"}),
    (2, "/records", {"after": -1, "wait_s": 0}),
)


def asked(url: str, path: str, body: Any = None, token: str = "") -> tuple[int, Any]:
    """The status and the answer of one request."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=120) as answer:
            text = answer.read()
            return answer.status, json.loads(text) if answer.headers["Content-Type"].startswith(
                "application/json"
            ) else text
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_a_running_relay_speaks_as_its_document_says(tmp_path: Path) -> None:
    paths = json.loads(DOCUMENT.read_text(encoding="utf-8"))["paths"]
    with relay_of(tmp_path, [{"party": p, "group": "g", "token": t} for p, t in enumerate(TOKENS)]) as url:
        seen, answer = {"/healthz", "/metrics", "/exchange"}, None
        for party, path, body in EXCHANGES:
            post = paths[path]["post"]
            if body is None:
                body = {"deliveries": [m["delivery"] for m in answer["messages"]], "box": 0}
            jsonschema.validate(body, post["requestBody"]["content"]["application/json"]["schema"])
            status, answer = asked(url, path, body, TOKENS[party])
            assert status == 200, (path, answer)
            jsonschema.validate(answer, post["responses"]["200"]["content"]["application/json"]["schema"])
            seen.add(path)
        assert seen == set(paths)
        jsonschema.validate(
            asked(url, "/healthz")[1],
            paths["/healthz"]["get"]["responses"]["200"]["content"]["application/json"]["schema"],
        )
        assert b"uvcc_relay_enqueued_total" in asked(url, "/metrics", token=TOKENS[0])[1]
        codes = paths["/enqueue"]["post"]["responses"]
        for body, token in (({"messages": 3}, TOKENS[0]), (MESSAGE, "x" * 20), (MESSAGE | {"sender": 2}, TOKENS[0])):
            assert str(asked(url, "/enqueue", body, token)[0]) in codes.keys() - {"200"}
        collides = MESSAGE | {"payload_b64": base64.b64encode(b"other").decode()}
        assert asked(url, "/enqueue", collides, TOKENS[0])[0] == 409


@pytest.mark.parametrize("path", ["/enqueue", "/records"])
def test_the_document_refuses_what_the_relay_refuses(path: str) -> None:
    paths = json.loads(DOCUMENT.read_text(encoding="utf-8"))["paths"]
    schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    bad = {"/enqueue": {"msg_id": "m"}, "/records": {"put": {"name": "a b", "body": ""}}}[path]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(bad, schema)


def test_the_page_says_what_each_role_may_do() -> None:
    page = (DOCUMENT.parent / "relay-api.md").read_text(encoding="utf-8")
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    told = {row[0]: dict(zip(Role, row[1:], strict=True)) for row in rows if len(row) == 1 + len(Role)}

    def listed(prefixes: tuple[str, ...]) -> str:
        return "all" if prefixes == ("",) else ", ".join(f"`{p}`" for p in prefixes) or "none"

    for role, scope in SCOPES.items():
        assert told["number in its group"][role] == f"{scope.first} to {scope.first + scope.count - 1}"
        assert (told["takes and acknowledges messages"][role] == "to its number") == scope.mail
        assert (told["sends messages to"][role] != "nobody") == scope.mail
        but = f" but {listed(scope.not_writes)}" if scope.not_writes else ""
        assert told["leaves records named"][role] == listed(scope.writes) + but
        assert told["reads records named"][role] == listed(scope.reads)
        assert told["reads `/metrics`"][role] == ("yes" if scope.metrics else "no")
