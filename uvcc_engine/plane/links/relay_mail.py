"""Single messages through a relay's JSON interface: what is neither a frame of the plane nor one of its rounds.

Queries to a served model and their answers go this way, each in a box of its own beside the plane's. One connection is
kept and made anew after trouble. The standard library's client: a client's machine has no more, and few requests come.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import http.client
import json
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from uvcc_engine.contract.errors import UnreachableError, UvccError
from uvcc_engine.contract.machine import host_names
from uvcc_engine.contract.parsing.untrusted import as_int, as_object
from uvcc_engine.contract.peer_protocol.whole_answer import limited

MOST_BYTES: Final = 64 << 20  # of an answer
AT_ONCE: Final = 8 << 20  # bytes of messages in an answer
TIMEOUT_S: Final = 30.0
_TOLD: Final = 200


def box_of(purpose: str, group: str) -> int:
    """The number of the mailbox for one purpose in one group."""
    return int.from_bytes(hashlib.sha256(f"UVCC_MAIL_V1|{purpose}|{group}".encode()).digest()[:7], "big")


class MailFullError(UvccError):
    """The receiver has not taken enough of what lies there for it."""


class RelayAwayError(UnreachableError):
    """The relay did not answer, or has trouble of its own: what was asked may be asked again, as often as one likes."""


@dataclass(frozen=True, slots=True)
class TakenMessage:
    """A message as the relay hands it out. ``sender``: the number of the credential that left it."""

    delivery: int
    sender: int
    payload: bytes


class RelayMail:
    """One credential's mail in one box. Use each from one thread."""

    def __init__(self, url: str, token: str, box: int, *, ca_file: str = "", ca_text: str = "") -> None:
        """``ca_file``, ``ca_text``: the relay's certificate as a file or PEM text, where it speaks TLS."""
        self._url, self._token, self._box = url, token, box
        self._tls: ssl.SSLContext | None = None
        if url.startswith("https://"):
            self._tls = ssl.create_default_context(cafile=ca_file or None, cadata=ca_text or None)
        self._connection: http.client.HTTPConnection | None = None

    @classmethod
    def of_file(cls, url: str, token_file: str, box: int, ca_file: str = "") -> RelayMail:
        """With the token that lies in a file. Raises UnreachableError if it cannot be read."""
        try:
            return cls(url, Path(token_file).read_text().strip(), box, ca_file=ca_file)
        except (OSError, ssl.SSLError, ValueError) as error:
            raise UnreachableError(f"the relay's token or certificate cannot be read: {error}") from error

    def send(self, receiver: int, name: str, payload: bytes, ttl_s: int = 0) -> bool:
        """Leave one message; False if one of this name with another content lies there already.

        Returns once it is on the relay's disk. Raises MailFullError, UnreachableError; where that is a RelayAwayError,
        the same call may be made again: what lies there already is not stored twice.
        """
        entry = {
            "box": self._box,
            "msg_id": name,
            "receiver": receiver,
            "payload_b64": base64.b64encode(payload).decode(),
            "ttl_s": ttl_s,
        }
        status, found = self._ask("/enqueue", entry)
        if status == http.client.TOO_MANY_REQUESTS:
            raise MailFullError("the relay takes no more for now", "it goes on when some of it was taken")
        if status not in (http.client.OK, http.client.CONFLICT):
            raise self._refused("/enqueue", status, found)
        return status == http.client.OK

    def take(self, wait_s: float) -> list[TakenMessage]:
        """What is there, after ``wait_s`` seconds at most. Each comes again until it is acknowledged."""
        status, found = self._ask("/poll", {"box": self._box, "wait_s": wait_s, "max_bytes": AT_ONCE})
        listed = found.get("messages")
        if status != http.client.OK or not isinstance(listed, list):
            raise self._refused("/poll", status, found)
        read = [_message(one) for one in listed]
        return [message for message in read if message is not None]

    def acknowledge(self, deliveries: Sequence[int]) -> None:
        """These were taken. Raises UnreachableError; what was acknowledged before is passed over."""
        if deliveries:
            status, found = self._ask("/ack", {"box": self._box, "deliveries": list(deliveries)})
            if status not in (http.client.OK, http.client.CONFLICT):
                raise self._refused("/ack", status, found)

    def _refused(self, path: str, status: int, found: Mapping[str, Any]) -> UnreachableError:
        why = found.get("error")
        told = f": {why[:_TOLD]}" if isinstance(why, str) else ""
        what = f"the relay at {self._url} answers {status} to {path}{told}"
        if status >= http.client.INTERNAL_SERVER_ERROR or status == http.client.TOO_MANY_REQUESTS:
            return RelayAwayError(what, "it goes on when the relay's trouble is over")
        return UnreachableError(what, "is the token its own?")

    def _ask(self, path: str, asked: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        try:
            connection = self._connection or self._connect()
            headers = {"authorization": f"Bearer {self._token}", "content-type": "application/json"}
            connection.request("POST", path, json.dumps(asked), headers)
            reply = connection.getresponse()
            found = as_object(reply.read(MOST_BYTES + 1), MOST_BYTES)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            said = host_names.why(error, self._url)
            raise RelayAwayError(f"the relay at {self._url} does not answer: {said}", "is it up?") from error
        return reply.status, found or {}

    def _connect(self) -> http.client.HTTPConnection:
        at = urlsplit(self._url)
        host = at.hostname or ""
        if self._tls is not None:
            tls = http.client.HTTPSConnection(host, at.port, timeout=TIMEOUT_S, context=self._tls)
            self._connection = limited(tls)
        else:
            self._connection = limited(http.client.HTTPConnection(host, at.port, timeout=TIMEOUT_S))
        return self._connection

    def close(self) -> None:
        """End the connection; the next request makes another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _message(found: object) -> TakenMessage | None:
    """One entry of the relay's answer, None for what is none. A notice that one expired has no content."""
    if not isinstance(found, dict) or not isinstance(found.get("payload_b64"), str):
        return None
    delivery, sender = (as_int(found.get(name), 0, (1 << 64) - 1) for name in ("delivery", "sender"))
    try:
        payload = base64.b64decode(found["payload_b64"], validate=True) if found.get("kind") == "message" else b""
    except (binascii.Error, ValueError):
        payload = b""
    return None if delivery is None or sender is None else TakenMessage(delivery, sender, payload)
