"""NATS JetStream link (extra ``nats``): the way beyond one relay, for fleets with a replicated broker.

Frames go through a file-backed work-queue stream and are acknowledged to it when the plane has them; signs of life go
as plain messages. JetStream forgets message ids after its duplicate window, so the channel's own sequence numbers are
what makes delivery exactly once. A frame larger than the server's ``max_payload`` travels in pieces.

Subjects: ``uvcc.<group>.<box>.<src>.<dst>`` (stored) and ``uvccp.<...>`` (passing). Permissions per party belong into
the server's configuration: publish ``*.<group>.*.<party>.*``, subscribe ``*.<group>.*.*.<party>``.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import re
import ssl
import struct
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, ProtocolError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.run_files.eventlog import Notice
from uvcc_engine.plane import frame as fr
from uvcc_engine.plane.channel import Timing
from uvcc_engine.plane.links.link import Arrival, no_work
from uvcc_engine.plane.links.nats_stream import ANSWER_S, GroupStream
from uvcc_engine.plane.links.relay_client import read_token
from uvcc_engine.plane.timing import LinkTiming, Outgoing

NATS_POLICY: Final = LinkTiming(
    timing=Timing(rto_s=3.0, rto_floor_s=0.75, rto_cap_s=60.0), hello_s=0.5, ack_delay_s=0.1, ack_frames=64
)
PIECE = struct.Struct("<QIQHHHxx")  # session, stream, seq, try, piece, pieces
_UNSENT: Final = 32 << 20
_FETCH: Final = 32  # messages of a megabyte at most: a server ends a connection on which 64 MiB wait
_FETCH_S: Final = 5.0
_PARTIES: Final = frozenset(map(str, range(PARTIES)))
_RETRY_S: Final = 1.0
_PING_S: Final = 2.0
_PINGS: Final = 2
"""A broker that stands still behind a connection that holds is known as away after three pings: in ten seconds the
parties would take each other for silent, and the run would end."""
_AGAIN_S: Final = 2.0  # between two tries of what the broker refused
_LAST_S: Final = 5.0  # for what is still to be said to a broker at the end
_REST_S: Final = 0.02
_WAITING: Final = 2048  # messages taken from the broker and not from us: then it keeps them, and passing ones are lost
_PIECES: Final = 1024  # of a frame
UNFINISHED: Final = 64  # frames of which pieces are missing
_FRAME_BYTES: Final = fr.HEADER_BYTES + fr.MAX_BODY


def subject_word(text: str) -> str:
    """A group's name as one word of a subject."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", text)


def sender_in(subject: str) -> int:
    """The sender that the broker let publish under a subject; -1 for a word that is no party."""
    words = subject.split(".")
    return int(words[-2]) if len(words) > 2 and words[-2] in _PARTIES else -1


class NatsLink:
    """Implements ``links.Link`` over NATS. The client runs on its own thread's event loop."""

    kind = "nats"
    eager = False
    batch_bytes = 1 << 20

    def __init__(
        self,
        *,
        url: str,
        party: int,
        group: str,
        box: int,
        token_file: Path | None = None,
        ca_file: Path | None = None,
        max_bytes: int = 1 << 30,
        clock: Callable[[], float] = time.monotonic,
        policy: LinkTiming = NATS_POLICY,
    ) -> None:
        """``max_bytes`` bounds the stored stream; beyond it publishing is refused. ConfigError without nats-py."""
        try:
            import nats  # noqa: F401
        except ImportError as error:
            raise ConfigError("link nats needs the nats client", "pip install 'uvcc[nats]'") from error
        self.policy = policy
        self._url = url
        self._party = party
        self._peers = [p for p in range(PARTIES) if p != party]
        self._stream = GroupStream(subject_word(group), f"{box:016x}", party, max_bytes)
        self._prefix = f"{subject_word(group)}.{box:016x}"
        self._token = read_token(token_file) if token_file else None
        self._tls = ssl.create_default_context(cafile=ca_file) if ca_file else None
        self._clock = clock
        self._items: list[tuple[int, Outgoing]] = []
        self._bytes = 0
        self._unsent = 0  # bytes handed over and not stored yet
        self._lock = threading.Lock()
        self._inbox: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self._pieces: dict[tuple[int, bytes], list[bytes | None]] = {}
        self._notices: list[Notice] = []
        self._resets: list[int] = []
        self._portion = _FETCH  # messages asked for at once
        self._fetched = 0  # times that so many came through
        self._refused = False  # whether the broker would not store what was sent to it last
        self._tried_at = float("-inf")  # when that was sent again
        self._in_doubt = False  # whether the stream may be another one than the one that was made
        self._down_since: float | None = clock()
        self._why = ""  # told last of this outage
        self._client: Any = None
        self._jetstream: Any = None
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="plane-nats", daemon=True)
        self._thread.start()

    # -- Link --------------------------------------------------------------------------------------------------------

    def ready(self, dst: int) -> bool:
        return self._jetstream is not None and self._bytes + self._unsent < _UNSENT

    def send(self, dst: int, out: Outgoing) -> None:
        self._items.append((dst, out))
        self._bytes += out.size

    def flush(self) -> None:
        """Frames leave with the next exchange."""

    def exchange(self, wait: float, src: int | None, meanwhile: Callable[[], None] = no_work) -> list[Arrival]:
        if self._items and self._jetstream is not None:
            items, self._items = self._items, []
            with self._lock:
                self._unsent += self._bytes
            self._bytes = 0
            self._call(self._publish_all(items))
        end = self._clock() + wait
        meanwhile()
        wait = end - self._clock()
        found: list[Arrival] = []
        try:
            found += self._arrivals(*self._inbox.get(timeout=wait) if wait > 0 else self._inbox.get_nowait())
            while True:
                found += self._arrivals(*self._inbox.get_nowait())
        except queue.Empty:
            return found

    def proven(self, src: int, path: object) -> None:
        """The broker says who sent a frame; the seal proves it."""

    def resets(self) -> list[int]:
        found, self._resets = self._resets, []
        return found

    def notices(self) -> list[Notice]:
        found, self._notices = self._notices, []
        return found

    def lost(self, dst: int) -> float:
        return 0.0

    def away_s(self) -> float:
        return 0.0 if self._down_since is None else self._clock() - self._down_since

    def trouble(self, dst: int) -> str:
        return ""  # of the server, not of a peer: notices tell it

    def unconfirmed(self) -> bool:
        return self.pending()

    def pending(self) -> bool:
        return bool(self._items) or self._unsent > 0

    def down_s(self) -> float:
        """Seconds since the broker was last reached; 0 while it is."""
        return 0.0 if self._down_since is None else self._clock() - self._down_since

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join()

    # -- incoming ----------------------------------------------------------------------------------------------------

    def _arrivals(self, sender: int, data: bytes) -> list[Arrival]:
        try:
            whole = self._assemble(sender, data)
            if whole is None:
                return []
            header = fr.read_header(memoryview(whole)[: fr.HEADER_BYTES])
            if header.src != sender:
                raise ProtocolError(f"a frame that says it is of party {header.src}", party=sender)
        except (ProtocolError, struct.error) as error:
            what = {"party": sender, "what": str(error), "dropped": True}
            self._notices.append(Notice("protocol_error", what))
            return []
        return [Arrival(header, memoryview(whole)[fr.HEADER_BYTES :], None)]

    def _assemble(self, sender: int, data: bytes) -> bytes | None:
        """The frame that ``data`` completes; None while pieces are missing (the sender repeats what is lost).

        Whoever may publish may send anything: of what is begun only the newest is kept. Raises ProtocolError.
        """
        *_, piece, pieces = PIECE.unpack_from(data)
        body = data[PIECE.size :]
        if pieces == 1:
            return body
        key = sender, data[: PIECE.size - 6]
        known = self._pieces.get(key)
        if not piece < pieces <= _PIECES or (known is not None and len(known) != pieces) or not body:
            raise ProtocolError(f"piece {piece} of {pieces}")
        parts = self._pieces.setdefault(key, [None] * pieces)
        parts[piece] = body
        if sum(len(p) for p in parts if p) > _FRAME_BYTES:
            del self._pieces[key]
            raise ProtocolError("a frame in pieces that are too large")
        if len(self._pieces) > UNFINISHED:
            del self._pieces[next(k for k in self._pieces if k[0] == sender)]
        if not all(parts):
            return None
        self._pieces.pop(key, None)
        return b"".join(p for p in parts if p)

    # -- on the client's thread --------------------------------------------------------------------------------------

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        import nats.errors

        fetching: asyncio.Task[None] | None = None
        while not self._ended.is_set() and fetching is None:
            try:
                subscription = await self._connected()
                if subscription is not None:
                    fetching = asyncio.create_task(self._fetch(subscription))
            except (OSError, nats.errors.Error) as error:
                self._say_down(error)
                if self._client is not None:
                    await self._client.close()  # the next try has one of its own
                await self._pause()
        await self._ended.wait()
        if fetching is not None:
            fetching.cancel()
        if self._client is not None and not self._client.is_closed:
            try:
                await asyncio.wait_for(self._leave(), _LAST_S)
            except (TimeoutError, OSError, nats.errors.Error) as error:
                self._say_down(error)
            await self._client.close()

    async def _leave(self) -> None:
        from nats.js.errors import NotFoundError

        await self._client.flush()  # what was taken leaves before the end
        if self._jetstream is not None and self._client.is_connected:
            with contextlib.suppress(NotFoundError):  # another was faster, or the broker lost its store
                await self._stream.leave(self._client)

    async def _pause(self) -> None:
        try:
            await asyncio.wait_for(self._ended.wait(), _RETRY_S)
        except TimeoutError:
            return

    async def _connected(self) -> Any:
        """What :meth:`_connect` returns, or None where the end comes first: of a broker that is not there, or refuses
        this party, the client never has enough, and a worker that gave up would not end."""
        work = [asyncio.ensure_future(self._connect()), asyncio.ensure_future(self._ended.wait())]
        await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        if work[0].done():
            work[1].cancel()
            return work[0].result()
        work[0].cancel()
        await asyncio.wait(work)
        return None

    def _made(self) -> Any:
        """A client that says nothing, and so no token, to a server without TLS where TLS was asked for: the library
        goes by what the server's first line says, and somebody on the way can write that."""
        import nats.errors
        from nats.aio.client import Client

        sealed = self._tls is not None or self._url.startswith("tls:")

        class Careful(Client):
            def _connect_command(self) -> bytes:
                if sealed and not self._server_info.get("tls_required"):
                    raise nats.errors.Error("it offers no TLS, which nats.url or nats.ca_file asks for")
                return bytes(super()._connect_command())

        return Careful()

    async def _connect(self) -> Any:
        """Connect, make sure of the stream and subscribe; returns the pull subscription."""
        self._client = self._made()  # known before it is connected: it is closed also where it never is
        await self._client.connect(
            self._url,
            token=self._token,
            tls=self._tls,
            connect_timeout=ANSWER_S,
            allow_reconnect=True,
            max_reconnect_attempts=-1,
            reconnect_time_wait=_RETRY_S / 4,
            ping_interval=_PING_S,
            max_outstanding_pings=_PINGS,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            name=f"uvcc party {self._party}",
        )
        subscription = await self._stream.provide(self._client)
        await self._client.subscribe(f"uvccp.{self._prefix}.*.{self._party}", cb=self._on_passing)
        self._jetstream = self._client.jetstream()
        self._say_up()
        return subscription

    async def _fetch(self, subscription: Any) -> None:
        import nats.errors

        while True:
            try:
                while self._inbox.qsize() > _WAITING:
                    await asyncio.sleep(_REST_S)
                self._try_again()
                if self._in_doubt:
                    subscription = await self._anew(subscription)
                wait = _AGAIN_S if self._refused else _FETCH_S
                for message in await subscription.fetch(self._portion, timeout=wait):
                    self._inbox.put((sender_in(message.subject), message.data))
                    await message.ack()
                self._fetched += 1
                if self._fetched >= _FETCH:
                    self._portion, self._fetched = min(_FETCH, 2 * self._portion), 0
                if self._down_since is not None and self._client.is_connected and not self._refused:
                    self._say_up()
            except (TimeoutError, nats.errors.TimeoutError):
                self._in_doubt = self._client.is_connected  # silence is also what a stream has to say that is gone
            except (OSError, nats.errors.Error) as error:
                self._in_doubt = True
                self._say_down(error)
                await self._pause()

    async def _anew(self, subscription: Any) -> Any:
        """The subscription, if the broker still has what it leads to; else it is made anew, and everything that the
        peers have not acknowledged themselves is sent again: a broker that lost its store has lost that."""
        from nats.js.errors import NotFoundError

        try:
            await subscription.consumer_info()
        except NotFoundError as error:
            self._say_down(error)
            subscription = await self._stream.provide(self._client)
            self._resets += self._peers
        self._in_doubt = False
        if self._down_since is not None and not self._refused:
            self._say_up()
        return subscription

    def _try_again(self) -> None:
        """What the broker refused is sent again every now and then: by its own clock the channel waits up to a minute,
        also when the stream has had room for long."""
        now = self._clock()
        if self._refused and now - self._tried_at >= _AGAIN_S:
            self._tried_at = now
            self._resets += self._peers

    async def _publish_all(self, items: list[tuple[int, Outgoing]]) -> None:
        import nats.errors
        from nats.js.errors import APIError

        try:
            await asyncio.gather(*(self._publish(dst, out) for dst, out in items))
            if self._refused and not all(out.slot for _, out in items):
                self._refused = False
                self._say_up()
        except APIError as error:
            self._refused = True
            self._say_down(error)
        except (TimeoutError, OSError, nats.errors.Error) as error:
            # what was not stored is not acknowledged by the peer either, so the channel sends it again
            self._in_doubt = True
            self._notices.append(Notice("relay_refused", {"why": str(error) or type(error).__name__}))
        finally:
            with self._lock:
                self._unsent -= sum(out.size for _, out in items)

    async def _publish(self, dst: int, out: Outgoing) -> None:
        subject = f"{self._prefix}.{self._party}.{dst}"
        data = b"".join(out.buffers)
        if out.slot:
            await self._client.publish(f"uvccp.{subject}", PIECE.pack(0, 0, 0, 0, 0, 1) + data)
            return
        size = self._client.max_payload - 4096  # leaves room for headers
        count = -(-len(data) // size)
        for n in range(count):
            head = PIECE.pack(*out.key, n, count)
            ident = {"Nats-Msg-Id": f"{self._party}.{dst}.{head.hex()}"}
            await self._jetstream.publish(f"uvcc.{subject}", head + data[n * size : (n + 1) * size], headers=ident)

    async def _on_passing(self, message: Any) -> None:
        if self._inbox.qsize() <= _WAITING:
            self._inbox.put((sender_in(message.subject), message.data))

    async def _on_error(self, error: Exception) -> None:
        if self._down_since is not None:
            self._say_down(error)
            return
        self._notices.append(Notice("link_down", {"kind": self.kind, "why": str(error) or type(error).__name__}))

    async def _on_disconnected(self) -> None:
        self._portion, self._fetched = max(1, self._portion // 8), 0  # for a server that found it too slow
        if self._jetstream is not None and not self._ended.is_set():  # before it was up, why it is not is said already
            self._say_down(ConnectionError("disconnected"))

    async def _on_reconnected(self) -> None:
        self._in_doubt = True
        self._resets += self._peers  # what was under way when the connection broke
        self._say_up()

    def _say_down(self, error: Exception) -> None:
        """Once an outage, and again for another reason; reconnecting fails several times a second."""
        why = self._stream.words(error)
        if why != self._why:
            self._notices.append(Notice("relay_down", {"url": self._url, "why": why}))
        self._why = why
        self._down_since = self._clock() if self._down_since is None else self._down_since

    def _say_up(self) -> None:
        self._down_since, self._why = None, ""
        self._notices.append(Notice("relay_up", {"url": self._url, "kind": self.kind}))
