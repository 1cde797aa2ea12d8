"""Relay link: every frame goes through the relay's HTTP API, one request per round.

A request carries the frames of the round for both peers, the acknowledgements of what came before, and then waits for
what arrives. One kept-alive connection; the reply is parsed in C (httptools), nothing is encoded twice. The relay keeps
a frame until it is taken, so a lost connection costs a repeat of the last request and nothing else.
"""

from __future__ import annotations

import os
import random
import socket
import ssl
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httptools

from uvcc_engine.contract.errors import ConfigError, ProtocolError, UnreachableError, UnreadableError
from uvcc_engine.contract.machine import host_names
from uvcc_engine.contract.parsing.small_text import MOST_TOKEN, read_small
from uvcc_engine.contract.run_files.eventlog import Notice
from uvcc_engine.plane import frame as fr
from uvcc_engine.plane.api import Buffer
from uvcc_engine.plane.channel import Timing
from uvcc_engine.plane.links.link import Arrival, no_work
from uvcc_engine.plane.timing import LinkTiming, Outgoing
from uvcc_engine.relay import binary

RELAY_POLICY: Final = LinkTiming(
    timing=Timing(rto_s=4.0, rto_floor_s=0.75, rto_cap_s=60.0),
    hello_s=0.5,
    hello_cap_s=4.0,
    ack_delay_s=0.25,
    ack_frames=64,
)
_MAX_REQUEST: Final = 8 << 20
_MAX_REPLY: Final = 16 << 20
_MOST_REPLY: Final = 128 << 20  # bytes; a relay may be hostile, and one message may be larger than what was asked for
_SLACK_S: Final = 10.0  # a reply may come this much later than the wait that was asked for
_BACKOFF_S: Final = (0.05, 2.0)
_TURNED_AWAY: Final = "refuses this party; check its token file"
_IOV: Final = 64
_KEY = struct.Struct(">QIQH")  # big-endian, so that ids of one session sort by sequence number


def read_token(path: Path) -> str:
    """The bearer token. Raises UnreadableError."""
    try:
        return read_small(path, MOST_TOKEN).strip()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UnreadableError(f"cannot read the relay token {path}: {why}") from error


class HttpError(Exception):
    """The relay answered with an error status."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP {status}: {body[:200].decode(errors='replace')}")
        self.status = status


class HttpConnection:
    """One kept-alive HTTP/1.1 connection for POST requests with binary bodies."""

    def __init__(self, url: str, token: str, ca_file: Path | None) -> None:
        """Raises ConfigError if ``url`` is not http or https."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"not a relay URL: {url!r}", "write it like https://relay.example:8443")
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._tls = ssl.create_default_context(cafile=str(ca_file) if ca_file else None)
        self._head = (
            f"POST {parts.path.rstrip('/')}{binary.PATH} HTTP/1.1\r\nhost: {parts.netloc}\r\n"
            f"authorization: Bearer {token}\r\ncontent-type: {binary.CONTENT_TYPE}\r\ncontent-length: "
        ).encode()
        self._sock: socket.socket | None = None
        self._buffer = bytearray(1 << 18)
        self._body: list[bytes] = []
        self._complete = False

    def on_body(self, data: bytes) -> None:
        """For httptools."""
        self._body.append(data)

    def on_message_complete(self) -> None:
        """For httptools."""
        self._complete = True

    def connect(self, timeout: float) -> None:
        """Connect if needed, within ``timeout`` seconds. Raises OSError."""
        if self._sock is not None:
            return
        sock = socket.create_connection((self._host, self._port), timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = self._tls.wrap_socket(sock, server_hostname=self._host) if self._tls else sock

    def post(self, pieces: list[Buffer], timeout: float, meanwhile: Callable[[], None] = no_work) -> bytes:
        """Send a request and return the reply's body; each wait takes at most ``timeout`` seconds.

        Raises OSError or HttpError.
        """
        self.connect(timeout)
        sock = self._sock
        assert sock is not None
        sock.settimeout(timeout)
        try:
            length = sum(len(p) for p in pieces)
            _send_all(sock, [b"%b%d\r\n\r\n" % (self._head, length), *pieces])
            meanwhile()
            self._body, self._complete = [], False
            parser = httptools.HttpResponseParser(self)
            view, end, got = memoryview(self._buffer), time.monotonic() + timeout, 0
            while not self._complete:
                count = sock.recv_into(self._buffer)
                if not count:
                    raise ConnectionResetError("the relay closed the connection")
                got += count
                if got > _MOST_REPLY or time.monotonic() > end:
                    raise ConnectionError(f"the relay's answer of {got} bytes does not end")
                parser.feed_data(view[:count])
            status = parser.get_status_code()
            if not parser.should_keep_alive():
                self.close()
        except (OSError, httptools.HttpParserError) as error:
            self.close()
            raise error if isinstance(error, OSError) else ConnectionError(f"not HTTP: {error}") from error
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        if status != 200:
            raise HttpError(status, body)
        return body

    def close(self) -> None:
        """Drop the connection; the next request makes a new one."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def _send_all(sock: socket.socket, pieces: list[Buffer]) -> None:
    if isinstance(sock, ssl.SSLSocket):
        for start in range(0, len(pieces), _IOV):
            sock.sendall(b"".join(pieces[start : start + _IOV]))
        return
    for start in range(0, len(pieces), _IOV):
        some = pieces[start : start + _IOV]
        sent, total = sock.sendmsg(some), sum(len(p) for p in some)
        if sent < total:
            sock.sendall(memoryview(b"".join(some))[sent:])


@dataclass(slots=True)
class RelayStanding:
    """Whether the relay has taken this party's token before, at any of its fronts and wherever it was."""

    accepted: bool = False


class RelayBase:
    """What the links through a relay have in common: frames as stored messages, and what their fates mean."""

    kind = "relay"
    eager = False
    batch_bytes = 2 << 20

    def __init__(
        self,
        *,
        url: str,
        box: int,
        policy: LinkTiming,
        standing: RelayStanding | None = None,
        ttl_s: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``standing``: shared with the other fronts of the same relay, and with what follows it when it moves."""
        self.policy = policy
        self._standing = standing or RelayStanding()
        self._url = url
        self._box = box
        self._ttl_s = ttl_s
        self._clock = clock
        self._consumer = int.from_bytes(os.urandom(8), "little")
        self._items: list[binary.Item] = []
        self._bytes = 0
        self._acks: list[int] = []
        self._notices: list[Notice] = []
        self._down_since: float | None = None
        self._down_why = ""
        self._retry_at = 0.0
        self._backoff = _BACKOFF_S[0]
        self._jitter = random.Random(self._consumer)

    def ready(self, dst: int) -> bool:
        return self._bytes < _MAX_REQUEST

    def send(self, dst: int, out: Outgoing) -> None:
        payload = out.buffers[0] if len(out.buffers) == 1 else b"".join(out.buffers)
        msg_id = b"" if out.slot else _KEY.pack(*out.key)
        self._items.append(binary.Item(dst, out.slot, self._ttl_s, msg_id, payload))
        self._bytes += len(payload)

    def flush(self) -> None:
        """Frames leave with the next exchange only: a request per message would cost more than the message."""

    def _resting(self, wait: float) -> bool:
        """True while the relay is left alone after a failure; sleeps at most ``wait``."""
        now = self._clock()
        if now < self._retry_at:
            time.sleep(min(wait, self._retry_at - now))
        return self._clock() < self._retry_at

    def _refused(self, items: list[binary.Item], fates: bytes) -> list[binary.Item]:
        """The items to try again; a full queue is reported, never hidden. Raises ConfigError if trying is no use."""
        again: list[binary.Item] = []
        if len(fates) != len(items) or any(f >= len(binary.FATES) for f in fates):
            raise ValueError("a reply to another request")
        if not any(f > binary.DUPLICATE for f in fates):
            return again
        for item, fate in zip(items, fates, strict=True):
            if fate in (binary.QUOTA, binary.FAILED):
                again.append(item)
            elif fate in (binary.FORBIDDEN, binary.COLLISION):
                raise ConfigError(
                    f"the relay refused a frame for party {item.receiver}: {binary.FATES[fate]}",
                    "check the party and group of the relay credential",
                )
        if again:
            why = binary.FATES[max(f for f in fates if f in (binary.QUOTA, binary.FAILED))]
            self._notices.append(Notice("relay_refused", {"why": why, "messages": len(again)}))
            self._hold_off()
        return again

    def _arrivals(self, messages: list[binary.Message]) -> list[Arrival]:
        """Frames among messages; everything is acknowledged with the next request."""
        self._acks += [m.delivery for m in messages if m.delivery]
        return [a for m in messages if (a := self._arrival(m)) is not None]

    def _arrival(self, message: binary.Message) -> Arrival | None:
        if message.slot == binary.EXPIRED:
            receiver = message.payload[0] if len(message.payload) else -1
            self._notices.append(Notice("relay_expired", {"receiver": receiver}))
            return None
        view = memoryview(message.payload)
        what = "not a frame"
        if len(view) >= fr.HEADER_BYTES:
            try:
                header = fr.read_header(view[: fr.HEADER_BYTES])
                if header.src == message.sender:
                    return Arrival(header, view[fr.HEADER_BYTES :], None)
                what = f"a frame that says it is of party {header.src}"
            except ProtocolError as error:
                what = error.what
        self._notices.append(Notice("protocol_error", {"party": message.sender, "what": what, "dropped": True}))
        return None

    def _up(self) -> None:
        self._standing.accepted = True
        if self._down_since is not None:
            down = round(self._clock() - self._down_since, 1)
            self._notices.append(Notice("relay_up", {"url": self._url, "down_s": down}))
            self._down_since, self._down_why, self._backoff = None, "", _BACKOFF_S[0]

    def _down(self, why: str) -> None:
        if self._down_since is None:
            self._down_since = self._clock()
        elif why != _TURNED_AWAY or why == self._down_why:  # one line an outage, and one more if it turns us away
            self._hold_off()
            return
        self._down_why = why
        self._notices.append(Notice("relay_down", {"url": self._url, "why": why}))
        self._hold_off()

    def _turned_away(self, told: str) -> None:
        """A relay that does not know this party's token. Raises UnreachableError unless it was taken before.

        If it was, the relay has been restarted without it, or has moved and a stranger has its address: the run may
        still be told where it is now, within the time that a relay may be away.
        """
        if not self._standing.accepted:
            raise UnreachableError(f"the relay {self._url} refuses this party{told}", "check its token file")
        self._down(_TURNED_AWAY)

    def _hold_off(self) -> None:
        self._retry_at = self._clock() + self._backoff * self._jitter.uniform(0.5, 1.0)
        self._backoff = min(2 * self._backoff, _BACKOFF_S[1])

    def proven(self, src: int, path: object) -> None:
        """The relay says who sent a frame; the seal proves it. Nothing to choose here."""

    def resets(self) -> list[int]:
        """The relay keeps what it took, so nothing is lost with a connection."""
        return []

    def notices(self) -> list[Notice]:
        found, self._notices = self._notices, []
        return found

    def lost(self, dst: int) -> float:
        return 0.0

    def away_s(self) -> float:
        return self.down_s()

    def trouble(self, dst: int) -> str:
        return ""  # of the relay, not of a peer: notices tell it

    def down_s(self) -> float:
        """Seconds since the relay was last reached; 0 while it is."""
        return 0.0 if self._down_since is None else self._clock() - self._down_since


class RelayLink(RelayBase):
    """Implements ``links.Link`` over a relay's HTTP API."""

    def __init__(
        self,
        *,
        url: str,
        token_file: Path,
        ca_file: Path | None,
        box: int,
        policy: LinkTiming = RELAY_POLICY,
        standing: RelayStanding | None = None,
    ) -> None:
        super().__init__(url=url, box=box, policy=policy, standing=standing)
        self._http = HttpConnection(url, read_token(token_file), ca_file)

    def exchange(self, wait: float, src: int | None, meanwhile: Callable[[], None] = no_work) -> list[Arrival]:
        """See ``Link.exchange``. Raises UnreachableError if the relay refuses from the beginning."""
        if self._resting(wait):
            return []
        items, acks = self._items[: binary.MAX_ITEMS], self._acks[: binary.MAX_ITEMS]
        flags = binary.RESYNC if self._down_since is not None else 0
        pieces = binary.request_pieces(self._box, self._consumer, int(wait * 1000), _MAX_REPLY, acks, items, flags)
        try:
            reply = binary.read_reply(self._http.post(pieces, wait + _SLACK_S, meanwhile))
            again = self._refused(items, reply.fates)
        except HttpError as error:
            if error.status in (401, 403):
                self._turned_away(f": {error}")
                return []
            self._down(str(error))
            return []
        except (OSError, ValueError) as error:
            self._down(host_names.why(error, self._url))
            return []
        self._up()
        self._acks = self._acks[len(acks) :]
        self._items = again + self._items[len(items) :]
        self._bytes = sum(len(i.payload) for i in self._items)
        return self._arrivals(reply.messages)

    def unconfirmed(self) -> bool:
        return bool(self._items)

    def pending(self) -> bool:
        return bool(self._items)

    def close(self) -> None:
        self._http.close()
