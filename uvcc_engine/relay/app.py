"""The relay's HTTP front: ``/exchange`` for this product's own clients, JSON for everybody else.

``POST /exchange`` carries everything of a round in one request (see ``wire``). ``POST /enqueue``, ``/poll`` and
``/ack`` do the same in JSON with base64 payloads, ``POST /records`` serves small signed records. Every request but
``GET /healthz`` carries ``Authorization: Bearer``; it decides who the sender or receiver is, never the body.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from uvcc_engine.relay import wire
from uvcc_engine.relay.config import Credential, RelayConfig, token_key
from uvcc_engine.relay.hub import Hub
from uvcc_engine.relay.records import Records

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
_MAX_WAIT_S: Final = 60.0
_BEARER: Final = b"Bearer "


class Fault(Exception):
    """A request that is answered with an error status."""

    def __init__(self, status: int, error: str) -> None:
        super().__init__(error)
        self.status, self.error = status, error


class _LongPoll:
    """A request that is answered when there is something to take."""

    def __init__(self, woken: asyncio.Future[None]) -> None:
        self.woken = woken

    def wake(self) -> None:
        if not self.woken.done():
            self.woken.set_result(None)

    superseded = wake


class Front:
    """What both HTTP and the stream front do with a request."""

    def __init__(self, hub: Hub, config: RelayConfig) -> None:
        self.hub = hub
        self._config = config

    def credential(self, token: str) -> Credential:
        """Who a token speaks for. Raises Fault 401."""
        found = self._config.credentials.get(token_key(token))
        if found is None:
            raise Fault(401, "unauthorized")
        return found

    async def enqueue(self, who: Credential, box: int, items: Sequence[wire.Item]) -> bytes:
        """The fates of ``items`` once they are durable."""
        if not items:
            return b""
        done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def settle(fates: bytes) -> None:
            if not done.done():  # else the requester has gone
                done.set_result(fates)

        self.hub.enqueue(who, box, items, settle)
        return await done

    async def wait(self, who: Credential, box: int, seconds: float) -> None:
        """Return when there is something for ``who``, a newer consumer asks, time is up, or the relay drains."""
        hub = self.hub
        if hub.draining or seconds <= 0 or hub.has_for(who, box):
            return
        loop = asyncio.get_running_loop()
        poll = _LongPoll(loop.create_future())
        hub.await_mail(who, box, poll)
        timer = loop.call_later(min(seconds, _MAX_WAIT_S), poll.wake)
        try:
            await poll.woken
        finally:
            timer.cancel()
            hub.stop_awaiting(who, box, poll)

    async def exchange(self, who: Credential, body: bytes) -> list[wire.Buffer]:
        """Serve one combined request. Raises Fault 400."""
        try:
            request = wire.read_request(body)
        except ValueError as error:
            raise Fault(400, str(error)) from None
        hub = self.hub
        if request.acks:
            hub.acknowledge(who, request.box, request.acks)
        fates = await self.enqueue(who, request.box, request.items)
        if request.flags & wire.RESYNC:
            hub.release_leases(who, request.box)
        messages: list[wire.Message] = []
        if request.max_bytes:
            await self.wait(who, request.box, request.wait_ms / 1000)
            messages = hub.take(who, request.box, request.max_bytes, consumer=request.consumer)
        return wire.reply_pieces(wire.DRAINING if hub.draining else 0, fates, messages)


class RelayApp:
    """ASGI application. The hot path goes around the router."""

    def __init__(self, front: Front, config: RelayConfig, metrics: Callable[[], str], stream: str = "") -> None:
        """``stream``: ``host:port`` of the stream front, told by ``/healthz``."""
        self._front = front
        self._stream = stream
        self._max_body = config.max_body
        self._metrics = metrics
        self._records = Records()
        self._routes = Starlette(
            routes=[
                Route("/healthz", self._healthz),
                Route("/metrics", self._metrics_page),
                Route("/enqueue", self._json(self._enqueue), methods=["POST"]),
                Route("/poll", self._json(self._poll), methods=["POST"]),
                Route("/ack", self._json(self._ack), methods=["POST"]),
                Route("/records", self._json(self._exchange_records), methods=["POST"]),
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != wire.PATH:
            await self._routes(scope, receive, send)  # type: ignore[arg-type]
            return
        try:
            who = self._authorize(scope)
            body = await self._body(scope, receive)
            pieces = await self._front.exchange(who, body)
        except Fault as fault:
            await _respond(send, fault.status, b"application/json", [json.dumps({"error": fault.error}).encode()])
            return
        await _respond(send, 200, wire.CONTENT_TYPE.encode(), pieces)

    def _authorize(self, scope: Scope) -> Credential:
        for name, value in scope["headers"]:
            if name == b"authorization" and value.startswith(_BEARER):
                return self._front.credential(value[len(_BEARER) :].decode("latin-1"))
        raise Fault(401, "unauthorized")

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        message = await receive()
        body: bytes = message.get("body", b"")
        if not message.get("more_body"):
            return body
        pieces, size = [body], len(body)
        while message.get("more_body"):
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Fault(400, "the request was cut off")
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            if size > self._max_body:
                raise Fault(413, f"a body may have {self._max_body} bytes")
        return b"".join(pieces)

    # -- JSON --------------------------------------------------------------------------------------------------------

    async def _healthz(self, request: HttpRequest) -> Response:
        return JSONResponse({"ok": not self._front.hub.draining, "version": 1, "stream": self._stream})

    async def _metrics_page(self, request: HttpRequest) -> Response:
        try:
            self._authorize(request.scope)  # type: ignore[arg-type]
        except Fault as fault:
            return JSONResponse({"ok": False, "error": fault.error}, fault.status)
        return PlainTextResponse(self._metrics())

    def _json(
        self, serve: Callable[[Credential, dict[str, Any]], Awaitable[tuple[int, dict[str, Any]]]]
    ) -> Callable[[HttpRequest], Awaitable[Response]]:
        async def endpoint(request: HttpRequest) -> Response:
            try:
                who = self._authorize(request.scope)  # type: ignore[arg-type]
                body = await self._body(request.scope, request.receive)  # type: ignore[arg-type]
                data = json.loads(body)
                if not isinstance(data, dict):
                    raise Fault(400, "not an object")
                if data.get("group_id", who.group) != who.group:
                    raise Fault(403, "this credential is of another group")
                status, answer = await serve(who, data)
            except Fault as fault:
                return JSONResponse({"ok": False, "error": fault.error}, fault.status)
            except (ValueError, KeyError, TypeError, binascii.Error) as error:
                return JSONResponse({"ok": False, "error": f"bad request: {error}"}, 400)
            return JSONResponse({"ok": status == 200} | answer, status)

        return endpoint

    async def _enqueue(self, who: Credential, data: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """``{messages: [{msg_id, receiver, payload_b64, ttl_s?}]}`` or one such object itself."""
        entries = data.get("messages", [data])
        items = []
        for entry in entries:
            if entry.get("sender", who.party) != who.party:
                raise Fault(403, "this credential is of another party")
            msg_id = str(entry["msg_id"]).encode()
            if not 0 < len(msg_id) <= 255:
                raise Fault(400, "msg_id must have 1 to 255 bytes")
            payload = base64.b64decode(entry["payload_b64"], validate=True)
            items.append(wire.Item(int(entry["receiver"]), wire.STORE, int(entry.get("ttl_s") or 0), msg_id, payload))
        fates = await self._front.enqueue(who, int(data.get("box", 0)), items)
        statuses = [wire.FATES[f] for f in fates]
        answer: dict[str, Any] = {"status": statuses[0]} if "messages" not in data else {"statuses": statuses}
        worst = max(fates, default=0)
        if worst <= wire.DUPLICATE:
            return 200, answer
        codes = {wire.QUOTA: 429, wire.COLLISION: 409, wire.FORBIDDEN: 403, wire.FAILED: 507}
        return codes[worst], answer | {"error": wire.FATES[worst]}

    async def _poll(self, who: Credential, data: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """``{wait_s?, max_bytes?, box?}``; the wait is relative, so clocks do not matter."""
        if data.get("receiver", who.party) != who.party:
            raise Fault(403, "this credential is of another party")
        box = int(data.get("box", 0))
        await self._front.wait(who, box, float(data.get("wait_s", 2.0)))
        found = self._front.hub.take(who, box, int(data.get("max_bytes", 8 << 20)))
        return 200, {
            "messages": [
                {
                    "delivery": m.delivery,
                    "sender": m.sender,
                    "kind": "expired" if m.slot == wire.EXPIRED else "message",
                    "payload_b64": base64.b64encode(m.payload).decode(),
                }
                for m in found
            ]
        }

    async def _ack(self, who: Credential, data: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        deliveries = [int(d) for d in data["deliveries"]]
        fates = self._front.hub.acknowledge(who, int(data.get("box", 0)), deliveries)
        return (200 if all(fates) else 409), {"acked": fates}

    async def _exchange_records(self, who: Credential, data: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """``{put?: {name, body}, after?, want?, wait_s?}``: leave a record, take what is newer than ``after``."""
        put, after, want = data.get("put"), int(data.get("after", -1)), str(data.get("want", ""))
        if put is not None:
            self._records.put(who.group, who.party, str(put["name"]), str(put["body"]))
        wait = 0.0 if self._front.hub.draining else min(float(data.get("wait_s", 0.0)), _MAX_WAIT_S)
        found = await self._records.wait(who.group, after, want, wait)
        newest = found[-1].seq if found else max(after, self._records.newest if after < 0 else after)
        return 200, {
            "seq": newest,
            "records": [{"party": r.party, "name": r.name, "seq": r.seq, "body": r.body} for r in found],
        }


async def _respond(send: Send, status: int, content_type: bytes, pieces: Sequence[wire.Buffer]) -> None:
    body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
