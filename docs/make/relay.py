"""The relay's HTTP interface as OpenAPI. The paths and methods are those of the app; what bodies hold is told here."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any, Final

_OK: Final = {"type": "boolean"}
_BOX: Final = {"type": "integer", "minimum": 0, "default": 0, "description": "separates the subsessions of a group"}
_GROUP: Final = {"type": "string", "description": "if given, it must be the credential's own"}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties}


_MESSAGE: Final = _object(
    ["msg_id", "receiver", "payload_b64"],
    msg_id={"type": "string", "minLength": 1, "maxLength": 64, "description": "unique by sender, receiver and box"},
    receiver={"type": "integer", "minimum": 0, "maximum": 255},
    payload_b64={"type": "string", "contentEncoding": "base64"},
    ttl_s={"type": "integer", "minimum": 0, "description": "seconds until it expires; 0 takes the relay's own"},
    sender={"type": "integer", "description": "if given, it must be the credential's own number"},
)
_RECORD: Final = _object(
    ["name", "body"],
    name={"type": "string", "pattern": "^[A-Za-z0-9._:/-]{1,160}$"},
    body={"type": "string", "maxLength": 32768},
)
BODIES: Final[dict[str, tuple[str, dict[str, Any] | None, dict[str, Any] | None]]] = {
    "/healthz": (
        "Whether it serves; needs no token.",
        None,
        _object(["ok", "version", "stream"], ok=_OK, version={"const": 1}, stream={"type": "string"}),
    ),
    "/metrics": ("Counters in Prometheus' text format.", None, None),
    "/enqueue": (
        "Store messages. Answered once they are durable. Takes one message, or a list under `messages`.",
        {"oneOf": [_MESSAGE, _object(["messages"], messages={"type": "array", "items": _MESSAGE}, box=_BOX)]},
        _object(
            ["ok"],
            ok=_OK,
            status={"enum": ["enqueued", "dedup", "quota", "collision", "forbidden", "failed"]},
            statuses={"type": "array", "items": {"type": "string"}},
            error={"type": "string"},
        ),
    ),
    "/poll": (
        "Take what is there for the credential's party, or wait for it. A message stays leased until acknowledged.",
        _object(
            [],
            wait_s={"type": "number", "minimum": 0, "maximum": 60, "default": 2.0},
            max_bytes={"type": "integer", "minimum": 0, "default": 8388608, "description": "at most 16 MiB"},
            box=_BOX,
            group_id=_GROUP,
        ),
        _object(
            ["ok", "messages"],
            ok=_OK,
            messages={
                "type": "array",
                "items": _object(
                    ["delivery", "sender", "kind", "payload_b64"],
                    delivery={"type": "integer"},
                    sender={"type": "integer"},
                    kind={"enum": ["message", "expired"]},
                    payload_b64={"type": "string", "contentEncoding": "base64"},
                ),
            },
        ),
    ),
    "/ack": (
        "The receiver is done with deliveries: they are deleted. 409 where one of them was not known.",
        _object(["deliveries"], deliveries={"type": "array", "items": {"type": "integer"}}, box=_BOX, group_id=_GROUP),
        _object(["ok", "acked"], ok=_OK, acked={"type": "array", "items": {"type": "boolean"}}),
    ),
    "/records": (
        "Leave a small signed record, and take what is newer than `after`. The newest by party and name counts.",
        _object(
            [],
            put=_RECORD,
            after={"type": "integer", "default": -1},
            want={"type": "string", "maxLength": 160, "description": "names that begin so"},
            wait_s={"type": "number", "minimum": 0, "maximum": 60, "default": 0.0},
            group_id=_GROUP,
        ),
        _object(
            ["ok", "seq", "records"],
            ok=_OK,
            seq={"type": "integer"},
            records={
                "type": "array",
                "items": _object(
                    ["party", "name", "seq", "body"],
                    party={"type": "integer"},
                    name={"type": "string"},
                    seq={"type": "integer"},
                    body={"type": "string"},
                ),
            },
        ),
    ),
}
"""Path -> (what it does, the request's body, the answer's body)."""
ERRORS: Final = {
    "400": "malformed",
    "401": "no token, or an unknown one; the connection is closed",
    "403": "the token is of another party or group",
    "409": "collision: the id was used for another content; or an unknown delivery",
    "413": "too large; the connection is closed",
    "429": "over quota, or what was sent is not read: try again later",
    "507": "the store could not write",
}


def routes() -> dict[str, list[str]]:
    """Path -> methods, as the app has them."""
    from uvcc_engine.relay import binary
    from uvcc_engine.relay.app import RelayApp, RelayFront
    from uvcc_engine.relay.config import RelayConfig

    class Nothing:
        """Stands where the app would serve; only its routes are read."""

    assert "config" in inspect.signature(RelayApp).parameters
    front: RelayFront = Nothing()  # type: ignore[assignment]
    app = RelayApp(front, RelayConfig(Path(), {}), str)
    found = {r.path: sorted((r.methods or set()) - {"HEAD"}) for r in app._routes.routes}  # type: ignore[attr-defined]
    return found | {binary.PATH: ["POST"]}


def openapi() -> str:
    """The document."""
    from uvcc_engine.relay import binary

    paths: dict[str, Any] = {}
    for path, methods in routes().items():
        if path == binary.PATH:
            does = "Acknowledge, enqueue and poll in one request, in the binary form of the relay API's specification."
            content = {binary.CONTENT_TYPE: {"schema": {"type": "string", "format": "binary"}}}
            request, answer = content, content
        else:
            does, wanted, given = BODIES[path]
            request = {"application/json": {"schema": wanted}} if wanted else {}
            answer = {"application/json": {"schema": given}} if given else {"text/plain": {}}
        one: dict[str, Any] = {"summary": does, "responses": {"200": {"description": "done", "content": answer}}}
        if path != "/healthz":
            one["security"] = [{"token": []}]
            one["responses"] |= {code: {"description": why} for code, why in ERRORS.items()}
        if request:
            one["requestBody"] = {"required": True, "content": request}
        paths[path] = {method.lower(): one for method in methods}
    found = {
        "openapi": "3.1.0",
        "info": {"title": "UVCC relay", "version": "1", "description": "Stores and forwards sealed messages."},
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "paths": dict(sorted(paths.items())),
    }
    return json.dumps(found, indent=1) + "\n"
