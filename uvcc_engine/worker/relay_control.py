"""The worker's end of the halt path over the relay: obeys signed orders, and publishes signed signs of life.

One request every two seconds does both: it leaves the newest heartbeat and waits for an order. An order becomes the
control file ``.HALT``, exactly as the agent writes it, so everything after it is the same whichever way it came.

A sign of life is sealed to the consoles that may read it, and padded: the relay sees that there is one, from which
worker and when. Without readers nothing of it leaves this process. An order that is signed counts, sealed or not.

The standard library's HTTP client, not httpx: one thread with one connection needs no pool, it may be used right after
a fork, and a halt depends on no package.
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.job.link_spec import LinkSpec
from uvcc_engine.contract.parsing.small_text import MOST_TOKEN, read_small
from uvcc_engine.contract.peer_protocol import relay_words
from uvcc_engine.contract.peer_protocol.whole_answer import limited
from uvcc_engine.contract.run_files import control, files
from uvcc_engine.contract.run_files.control import HaltRequest
from uvcc_engine.contract.run_files.records import Malformed, ReportedRoot
from uvcc_engine.plane.links.relay_locator import RelayLocator
from uvcc_engine.transcript.signed import boxes, orders

BEAT_S: Final = 2.0
RETRY_S: Final = 2.0
TIMEOUT_S: Final = 10.0


class Roots:
    """The roots that a worker has signed last, for who sees nothing of it but its signs of life.

    Parties leave theirs at moments seconds apart, so besides the newest epochs those that are multiples of
    ``STRIDE`` stay for longer: of these all parties' roots meet in one picture.
    """

    STRIDE: Final = 16
    KEEP: Final = 8

    def __init__(self) -> None:
        self._new: deque[ReportedRoot] = deque(maxlen=self.KEEP)
        self._old: deque[ReportedRoot] = deque(maxlen=self.KEEP)

    def note(self, event: str, fields: Mapping[str, Any]) -> None:
        """Hear of an event of the run."""
        if event == "epoch_root":
            root = ReportedRoot(epoch=fields["epoch"], root=fields["root"], pairs=dict(fields.get("pairs") or {}))
            self._new.append(root)
            if root.epoch % self.STRIDE == 0:
                self._old.append(root)

    def listed(self) -> list[ReportedRoot]:
        """Every root kept, by epoch."""
        found = {root.epoch: root for root in (*self._old, *self._new)}
        return [found[epoch] for epoch in sorted(found)]


class Orders:
    """A thread beside the worker; use as a context. Without a relay or keys it does nothing.

    ``sign`` signs with the party's identity, ``last`` gives the newest heartbeat record, ``roots`` those of the last
    epochs; ``told`` hears of an order.
    """

    def __init__(
        self,
        link: LinkSpec,
        run: str,
        coord: str,
        directory: Path,
        *,
        sign: Callable[[bytes], str],
        last: Callable[[], Mapping[str, Any]],
        told: Callable[[HaltRequest], None],
        roots: Callable[[], Sequence[ReportedRoot]] = tuple,
    ) -> None:
        self._run, self._coord, self._directory = run, coord, directory
        self._keys = link.halt_keys
        self._readers = boxes.read_keys(link.halt_readers)
        self._seal = boxes.read_seal(link.halt_seal)
        self._at = RelayLocator(link, directory / files.LINK)
        self._url = self._token = self._ca_file = ""
        self._look()
        self._sign, self._last, self._told, self._roots = sign, last, told, roots
        self._nonces: set[str] = set()
        self._after = -1
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="orders", daemon=True)

    def _look(self) -> bool:
        """Whether the relay is elsewhere than before; its records are others, too."""
        moved = self._at.moved()
        link, before = self._at.link, self._url
        self._url = link.relay_url if self._keys else ""
        self._token, self._ca_file = link.token_file, link.ca_file
        if moved and before:
            self._after = 0  # all that it has was said after this worker started
        return moved

    def __enter__(self) -> Orders:
        if self._url:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the last word, if an order had come this way: it is the evidence where no agent answers."""
        self._ending.set()
        if self._url and self._nonces:
            try:
                self.ask(self._connect(1.0), 0.0)
            except (OSError, http.client.HTTPException, ValueError, UvccError):
                return  # the agent's word and exit.json say the same

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        at = urlsplit(self._url)
        host = at.hostname or ""
        if at.scheme == "https":
            tls = ssl.create_default_context(cafile=self._ca_file or None)
            return limited(http.client.HTTPSConnection(host, at.port, timeout=timeout, context=tls))
        return limited(http.client.HTTPConnection(host, at.port, timeout=timeout))

    def _serve(self) -> None:
        connection: http.client.HTTPConnection | None = None
        while not self._ending.is_set():
            try:
                if self._look():
                    connection = None
                connection = connection or self._connect(TIMEOUT_S)
                first = self._after < 0
                for body in self.ask(connection, 0.0 if first else BEAT_S):
                    if not first:  # orders from before this worker started are not meant for it
                        self.obey(body)
            except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, RecursionError, UvccError):
                connection = None  # the relay is away, or an older one: the other paths remain
                self._ending.wait(RETRY_S)

    def ask(self, connection: http.client.HTTPConnection, wait_s: float) -> list[str]:
        """Leave the heartbeat, wait for orders; their bodies. Raises OSError, HTTPException or ValueError."""
        asked: dict[str, Any] = {"after": self._after, "wait_s": wait_s, "want": orders.ORDER}
        if self._readers:
            asked["put"] = {"name": orders.BEAT + self._coord, "body": boxes.seal_to(self._beat(), self._readers)}
        token = read_small(Path(self._token), MOST_TOKEN).strip()
        headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        connection.request("POST", "/records", json.dumps(asked), headers)
        reply = connection.getresponse()
        text = reply.read(relay_words.MOST_BYTES + 1)
        found = relay_words.answer(text)
        if reply.status != http.client.OK or isinstance(found, Malformed):
            raise ValueError(f"the relay answered {reply.status} and {len(text)} bytes")
        self._after = max(self._after, found.seq)
        return [r.body for r in found.records]

    def _beat(self) -> str:
        """The newest heartbeat, signed."""
        content = relay_words.of_life(self._run, self._coord, self._last(), self._roots(), time.time())
        return orders.sealed(content, self._sign)

    def obey(self, body: str) -> None:
        """Do what an order asks, if a key of this run signed it; anything else is nothing."""
        text = boxes.unseal_with(body, self._seal) if self._seal else body
        content = orders.opened(text, orders.ORDER_NAMESPACE, self._keys)
        order = relay_words.order(content or {})
        if not isinstance(order, relay_words.HaltOrder) or order.run != self._run:
            return
        deadline = time.time() + order.deadline_s if order.deadline_s > 0 else 0.0
        asked = HaltRequest(order.mode, order.nonce, self._run, deadline)
        self._nonces.add(asked.nonce)
        before = control.read_halt(self._directory, self._run)
        if control.verdict(before, asked, time.time()) == control.HaltVerdict.OBEY:
            control.write_halt(self._directory, asked)
            self._told(asked)
