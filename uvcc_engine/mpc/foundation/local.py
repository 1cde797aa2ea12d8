"""All three parties in one process: threads and queues behind the plane's interface. For tests and rehearsals."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from uvcc_engine.contract.errors import PeerLostError, ProtocolError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.mpc.foundation.prg import PairKeys
from uvcc_engine.mpc.foundation.range_watch import RangeWatch
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.plane.api import Buffer, Tag

T = TypeVar("T")
_Item = tuple[Tag, bytes]


@dataclass
class Wire:
    """The queues between the three parties, and everything that each of them received if ``keep`` is set."""

    keep: bool = False
    tamper: Callable[[int, int, Tag, bytes], bytes] | None = None
    wait_s: float = 60.0
    main: dict[tuple[int, int], queue.Queue[_Item | None]] = field(default_factory=dict)
    control: dict[tuple[int, int], queue.Queue[bytes]] = field(default_factory=dict)
    received: dict[int, list[tuple[int, Tag, bytes]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for a in range(PARTIES):
            self.received[a] = []
            for b in range(PARTIES):
                self.main[a, b] = queue.Queue()
                self.control[a, b] = queue.Queue()

    def abort(self) -> None:
        """Wake every waiting receiver after one party failed."""
        for one in self.main.values():
            one.put(None)


class LocalPlane:
    """``plane.api.Plane`` for one party over a ``Wire``."""

    def __init__(self, wire: Wire, party: int) -> None:
        self.wire = wire
        self._kept: dict[tuple[int, Tag], bytes] = {}  # of streams that nobody has asked for yet
        self.party = party

    def send(self, dst: int, tag: Tag, payload: Buffer) -> None:
        body = bytes(payload)
        if self.wire.tamper is not None:
            body = self.wire.tamper(self.party, dst, tag, body)
        self.wire.main[self.party, dst].put((tag, body))

    def recv(self, src: int, tag: Tag) -> memoryview:
        while (body := self._kept.pop((src, tag), None)) is None:
            self._take(src, tag)
        if self.wire.keep:
            self.wire.received[self.party].append((src, tag, body))
        return memoryview(body)

    def _take(self, src: int, due: Tag) -> None:
        """Keep the next message of ``src``, which must be ``due`` or of another stream."""
        try:
            item = self.wire.main[src, self.party].get(timeout=self.wire.wait_s)
        except queue.Empty:
            raise PeerLostError(f"party {src} sent nothing for {self.wire.wait_s:g} s", party=src) from None
        if item is None:
            raise PeerLostError(f"party {src} stopped", party=src)
        if item[0] != due and item[0].stream == due.stream:
            raise ProtocolError(f"party {src} sent {item[0]}, expected {due}", party=src)
        self._kept[src, item[0]] = item[1]

    def arrived(self, wants: Iterable[tuple[int, Tag]]) -> bool:
        missing = [want for want in wants if want not in self._kept]
        for src, tag in missing:
            while (src, tag) not in self._kept and not self.wire.main[src, self.party].empty():
                self._take(src, tag)
        return all(want in self._kept for want in missing)

    def wait_any(self, wants: Sequence[Sequence[tuple[int, Tag]]], other: Callable[[], bool] | None = None) -> None:
        if any(all(want in self._kept for want in one) for one in wants):
            return  # looking for one message took in others, which may complete another task's
        if other is None:  # whichever is first: the caller comes back for the rest
            missing = next(want for want in wants[0] if want not in self._kept)
            self._take(*missing)

    def send_control(self, dst: int, body: bytes) -> None:
        self.wire.control[self.party, dst].put(body)

    def recv_control(self, src: int, timeout: float | None = None) -> bytes:
        """See ``Plane.recv_control``. Raises TimeoutError."""
        try:
            return self.wire.control[src, self.party].get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"no control message of party {src} within {timeout} s") from None

    def close(self, *, graceful: bool = True) -> None:
        return None


def rehearsal_keys(seed: int) -> list[PairKeys]:
    """Keys of three parties from a seed. Rehearsals only: anybody can compute them."""
    component = [hashlib.sha256(f"component {c} {seed}".encode()).digest() for c in range(PARTIES)]
    own = [hashlib.sha256(f"own {p} {seed}".encode()).digest() for p in range(PARTIES)]
    return [PairKeys(prev=component[p], next=component[(p + 1) % PARTIES], own=own[p]) for p in range(PARTIES)]


class LocalPlanes:
    """Three planes on one ``Wire``, and runtimes on them."""

    def __init__(
        self,
        seed: int = 0,
        *,
        keep: bool = False,
        tamper: Callable[[int, int, Tag, bytes], bytes] | None = None,
        few_rounds: bool = True,
        watch_range: bool = False,
        device: str | torch.device = "cpu",
        prg: str = "aes",
    ) -> None:
        """``watch_range``: raise RingRangeError where a value passes 2^62 before a truncation (``range_watch``).

        ``device``: where all three keep their shares; ``prg``: what draws their random numbers.
        """
        self.wire = Wire(keep=keep, tamper=tamper)
        self.planes = [LocalPlane(self.wire, p) for p in range(PARTIES)]
        sid = hashlib.sha256(f"sid {seed}".encode()).digest()
        keys = rehearsal_keys(seed)
        self.runtimes = [
            Runtime(p, self.planes[p], keys[p], sid, few_rounds=few_rounds, device=device, prg=prg)
            for p in range(PARTIES)
        ]
        if watch_range:
            self.watch_range()

    def watch_range(self) -> None:
        """Have one watch look at what the three runtimes truncate."""
        watch = RangeWatch()
        for rt in self.runtimes:
            rt.range_watch = watch

    def run_three(self, fn: Callable[[Runtime], T]) -> list[T]:
        """Run ``fn(rt)`` for the three parties in threads; results by party.

        The first failure stops the others and is raised here (a protocol error before the lost peers it causes).
        """
        results: dict[int, T] = {}
        failures: list[BaseException] = []

        def body(party: int) -> None:
            try:
                results[party] = fn(self.runtimes[party])
            except BaseException as why:  # noqa: BLE001 - handed to the caller's thread below
                failures.append(why)
                self.wire.abort()

        threads = [threading.Thread(target=body, args=(p,), name=f"party{p}", daemon=True) for p in range(PARTIES)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise next((why for why in failures if not isinstance(why, PeerLostError)), failures[0])
        return [results[p] for p in range(PARTIES)]


def run_three(fn: Callable[[Runtime], T], *, seed: int = 0) -> list[T]:
    """``LocalPlanes(seed).run_three(fn)``."""
    return LocalPlanes(seed).run_three(fn)
