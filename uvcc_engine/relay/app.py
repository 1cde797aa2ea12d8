"""The relay's HTTP front: ``/exchange`` for this product's own clients, JSON for everybody else.

``POST /exchange`` carries everything of a round in one request (see ``wire``). ``POST /enqueue``, ``/poll`` and
``/ack`` do the same in JSON with base64 payloads, ``POST /records`` serves small signed records. Every request but
``GET /healthz`` carries ``Authorization: Bearer``; it decides who the sender or receiver is, never the body.
``relay_roles`` says what each may do.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from uvcc_engine.contract.run_files.records import Malformed
from uvcc_engine.relay import binary, json_requests
from uvcc_engine.relay.config import Credential, RelayConfig, token_key
from uvcc_engine.relay.gate import Gate, Visitor
from uvcc_engine.relay.hub import Hub
from uvcc_engine.relay.queues import NoRoomError
from uvcc_engine.relay.refusals import Refusal
from uvcc_engine.relay.relay_records import Records

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
R = TypeVar("R", bound=json_requests.JsonRequest)
AsgiSend = Callable[[dict[str, Any]], Awaitable[None]]
_MAX_TAKE: Final = 16 << 20  # bytes of one answer, if they are of more than one message
_BEARER: Final = b"Bearer "


class Fault(Exception):
    """A request that is answered with an error status."""

    def __init__(self, status: int, error: str) -> None:
        super().__init__(error)
        self.status, self.error = status, error


def check_mailbox(who: Credential) -> None:
    """Raises Fault 403 for somebody who has no mailbox."""
    if not who.scope.mail:
        raise Fault(403, f"{who.role} tokens have no mailbox")


class _LongPoll:
    """A request that is answered when there is something to take."""

    def __init__(self, woken: asyncio.Future[None]) -> None:
        self.woken = woken

    def wake(self) -> None:
        if not self.woken.done():
            self.woken.set_result(None)

    superseded = wake


class RelayFront:
    """What both HTTP and the stream front do with a request."""

    def __init__(self, hub: Hub, config: RelayConfig, gate: Gate) -> None:
        self.hub = hub
        self.gate = gate
        self._config = config

    def credential(self, token: str, visitor: Visitor) -> Credential:
        """Who a token speaks for. Raises Fault 401, or 429 where that has too many connections."""
        found = self._config.credentials.get(token_key(token))
        if found is None:
            self.gate.refused(visitor.address, Refusal.UNKNOWN_TOKEN)
            raise Fault(401, "unauthorized")
        if not visitor.login(found):
            raise Fault(429, "too many connections")
        return found

    def take(self, who: Credential, box: int, max_bytes: int, *, consumer: int = 0) -> list[binary.Message]:
        """As the hub's, within bounds. Raises Fault 429 while this credential does not read what it was sent."""
        if not self.gate.may_take(who):
            raise Fault(429, "what was sent is not read")
        return self.hub.take(who, box, min(max_bytes, _MAX_TAKE), consumer=consumer)

    async def enqueue(self, who: Credential, box: int, items: Sequence[binary.Item]) -> bytes:
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
        timer = loop.call_later(min(seconds, json_requests.MAX_WAIT_S), poll.wake)
        try:
            await poll.woken
        finally:
            timer.cancel()
            hub.stop_awaiting(who, box, poll)

    async def exchange(self, who: Credential, body: bytes) -> list[binary.Buffer]:
        """Serve one combined request. Raises Fault 400, 403."""
        check_mailbox(who)
        try:
            request = binary.read_request(body)
        except ValueError as error:
            raise Fault(400, str(error)) from None
        hub = self.hub
        hub.enter(who, request.box)
        if request.acks:
            hub.acknowledge(who, request.box, request.acks)
        fates = await self.enqueue(who, request.box, request.items)
        if request.flags & binary.RESYNC:
            hub.release_leases(who, request.box)
        messages: list[binary.Message] = []
        if request.max_bytes:
            await self.wait(who, request.box, request.wait_ms / 1000)
            messages = self.take(who, request.box, request.max_bytes, consumer=request.consumer)
        return binary.reply_pieces(binary.DRAINING if hub.draining else 0, fates, messages)


class RelayApp:
    """ASGI application. The hot path goes around the router."""

    def __init__(
        self,
        front: RelayFront,
        config: RelayConfig,
        metrics: Callable[[], str],
        stream: str = "",
        records: Records | None = None,
    ) -> None:
        """``stream``: ``host:port`` of the stream front, told by ``/healthz``."""
        self._front = front
        self._stream = stream
        self._max_body = config.max_body
        self._metrics = metrics
        self._records = records or Records()
        self._routes = Starlette(
            routes=[
                Route("/healthz", self._healthz),
                Route("/metrics", self._metrics_page),
                Route("/enqueue", self._json(json_requests.EnqueueRequest, self._enqueue), methods=["POST"]),
                Route("/poll", self._json(json_requests.PollRequest, self._poll), methods=["POST"]),
                Route("/ack", self._json(json_requests.AckRequest, self._ack), methods=["POST"]),
                Route("/records", self._json(json_requests.RecordsRequest, self._exchange_records), methods=["POST"]),
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: AsgiSend) -> None:
        if scope["type"] != "http" or scope["path"] != binary.PATH:
            await self._routes(scope, receive, send)  # type: ignore[arg-type]
            return
        try:
            who = self._authorize(scope)
            body = await self._body(scope, receive, self._max_body)
            pieces = await self._front.exchange(who, body)
        except (Fault, NoRoomError) as fault:
            status, error = (fault.status, fault.error) if isinstance(fault, Fault) else (429, str(fault))
            told = json.dumps({"error": error}).encode()
            await _respond(send, status, b"application/json", [told], ends=status in (401, 413))
            return
        await _respond(send, 200, binary.CONTENT_TYPE.encode(), pieces)

    def _authorize(self, scope: Scope) -> Credential:
        for name, value in scope["headers"]:
            if name == b"authorization" and value.startswith(_BEARER):
                return self._front.credential(value[len(_BEARER) :].decode("latin-1"), scope["visitor"])
        self._front.gate.refused(scope["visitor"].address, Refusal.NO_TOKEN)
        raise Fault(401, "unauthorized")

    async def _body(self, scope: Scope, receive: Receive, limit: int) -> bytes:
        message = await receive()
        body: bytes = message.get("body", b"")
        if not message.get("more_body"):
            if len(body) > limit:
                raise Fault(413, f"a body may have {limit} bytes")
            return body
        pieces, size, visitor = [body], len(body), scope["visitor"]
        try:
            while message.get("more_body"):
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Fault(400, "the request was cut off")
                pieces.append(message.get("body", b""))
                size += len(pieces[-1])
                if size > limit:
                    raise Fault(413, f"a body may have {limit} bytes")
                if not visitor.hold(len(pieces[-1])):
                    raise Fault(413, "too many bytes of unfinished requests")
        finally:
            visitor.release()
        return b"".join(pieces)

    # -- JSON --------------------------------------------------------------------------------------------------------

    async def _healthz(self, request: HttpRequest) -> Response:
        return JSONResponse({"ok": not self._front.hub.draining, "version": 1, "stream": self._stream})

    async def _metrics_page(self, request: HttpRequest) -> Response:
        try:
            who = self._authorize(request.scope)  # type: ignore[arg-type]
            if not who.scope.metrics:
                raise Fault(403, f"{who.role} tokens see no counters")
        except Fault as fault:
            return _refusal(fault.status, fault.error)
        return PlainTextResponse(self._metrics())

    def _json(
        self, kind: type[R], serve: Callable[[Credential, R], Awaitable[tuple[int, dict[str, Any]]]]
    ) -> Callable[[HttpRequest], Awaitable[Response]]:
        async def endpoint(request: HttpRequest) -> Response:
            try:
                who = self._authorize(request.scope)  # type: ignore[arg-type]
                body = await self._body(request.scope, request.receive, json_requests.MAX_BYTES)  # type: ignore[arg-type]
                found = json_requests.parse(kind, body)
                if isinstance(found, Malformed):
                    raise Fault(400, f"bad request: {found.why}")
                if found.group not in (None, who.group):
                    raise Fault(403, "this credential is of another group")
                status, answer = await serve(who, found)
            except Fault as fault:
                return _refusal(fault.status, fault.error)
            except NoRoomError as error:
                return _refusal(429, str(error))
            except ValueError as error:
                return _refusal(400, f"bad request: {error}")
            return JSONResponse({"ok": status == 200} | answer, status)

        return endpoint

    async def _enqueue(self, who: Credential, request: json_requests.EnqueueRequest) -> tuple[int, dict[str, Any]]:
        check_mailbox(who)
        if any(m.sender not in (None, who.number) for m in request.messages):
            raise Fault(403, "this credential has another number")
        items = [binary.Item(m.receiver, binary.STORE, m.ttl_s, m.msg_id, m.payload) for m in request.messages]
        fates = await self._front.enqueue(who, request.box, items)
        statuses = [binary.FATES[f] for f in fates]
        answer: dict[str, Any] = {"status": statuses[0]} if request.alone else {"statuses": statuses}
        worst = max(fates, default=0)
        if worst <= binary.DUPLICATE:
            return 200, answer
        codes = {binary.QUOTA: 429, binary.COLLISION: 409, binary.FORBIDDEN: 403, binary.FAILED: 507}
        return codes[worst], answer | {"error": binary.FATES[worst]}

    async def _poll(self, who: Credential, request: json_requests.PollRequest) -> tuple[int, dict[str, Any]]:
        check_mailbox(who)
        if request.receiver not in (None, who.number):
            raise Fault(403, "this credential has another number")
        self._front.hub.enter(who, request.box)
        await self._front.wait(who, request.box, request.wait_s)
        found = self._front.take(who, request.box, request.max_bytes)
        return 200, {
            "messages": [
                {
                    "delivery": m.delivery,
                    "sender": m.sender,
                    "kind": "expired" if m.slot == binary.EXPIRED else "message",
                    "payload_b64": base64.b64encode(m.payload).decode(),
                }
                for m in found
            ]
        }

    async def _ack(self, who: Credential, request: json_requests.AckRequest) -> tuple[int, dict[str, Any]]:
        check_mailbox(who)
        self._front.hub.enter(who, request.box)
        fates = self._front.hub.acknowledge(who, request.box, request.deliveries)
        return (200 if all(fates) else 409), {"acked": fates}

    async def _exchange_records(
        self, who: Credential, request: json_requests.RecordsRequest
    ) -> tuple[int, dict[str, Any]]:
        after, scope = request.after, who.scope
        if request.put is not None:
            if not scope.may_write(request.put[0]):
                raise Fault(403, f"{who.role} tokens leave no record of such a name")
            self._records.put(who.group, who.number, *request.put)
        wait = 0.0 if self._front.hub.draining else request.wait_s
        found = await self._records.wait(who.group, after, request.want, wait, scope.reads)
        newest = found[-1].seq if found else max(after, self._records.newest if after < 0 else after)
        return 200, {
            "seq": newest,
            "records": [{"party": r.writer, "name": r.name, "seq": r.seq, "body": r.body} for r in found],
        }


def _refusal(status: int, error: str) -> Response:
    """An error; the connection ends where the rest of the request, or its sender, is not worth reading on."""
    more = {"connection": "close"} if status in (401, 413) else None
    return JSONResponse({"ok": False, "error": error[:200]}, status, headers=more)


async def _respond(
    send: AsgiSend, status: int, content_type: bytes, pieces: Sequence[binary.Buffer], *, ends: bool = False
) -> None:
    body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    if ends:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
