"""What carries frames between parties. A link may lose, repeat and reorder them; it never interprets a body."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

from uvcc_engine.contract.run_files.eventlog import Notice
from uvcc_engine.plane.api import Buffer
from uvcc_engine.plane.frame import Header
from uvcc_engine.plane.timing import LinkTiming, Outgoing


def no_work() -> None:
    """What there is to do meanwhile, where there is nothing."""


class Arrival(NamedTuple):
    """A frame from the link. ``path`` is whatever the link needs to be told that the sender was proven."""

    header: Header
    body: Buffer
    path: object


class Link(Protocol):
    """One party's access to its peers. Used by one thread at a time; only :meth:`exchange` may block."""

    kind: str
    policy: LinkTiming
    eager: bool  # a message is sent at once; otherwise those of a round travel together
    batch_bytes: int  # queued bytes of one peer that are sent without waiting for the end of the round

    def ready(self, dst: int) -> bool:
        """True if frames for ``dst`` can be taken now."""

    def send(self, dst: int, out: Outgoing) -> None:
        """Take a frame; it leaves with the next :meth:`flush` or :meth:`exchange`."""

    def flush(self) -> None:
        """Move taken frames on as far as that goes without waiting, where the link can."""

    def exchange(self, wait: float, src: int | None, meanwhile: Callable[[], None] = no_work) -> list[Arrival]:
        """Send what was taken and return what has arrived, after at most ``wait`` seconds if nothing has.

        ``src`` is the party whose message is awaited most. ``meanwhile`` is called at most once: when what was taken is
        on its way, and before it waits. It raises nothing. Raises UnreachableError if the link is down for good.
        """

    def proven(self, src: int, path: object) -> None:
        """The frame that came by ``path`` was sealed by ``src``."""

    def resets(self) -> list[int]:
        """Peers whose path was set up anew since the last call: what was under way to them may be lost."""

    def notices(self) -> list[Notice]:
        """What happened since the last call."""

    def lost(self, dst: int) -> float:
        """Seconds for which the peer's host has refused to be reached after it once was; 0 if it has not."""

    def away_s(self) -> float:
        """Seconds for which what stands between the parties was not reached; 0 while it is, and if nothing does."""

    def trouble(self, dst: int) -> str:
        """Why there is no way to the peer now, as far as this end knows, with the address; "" while there is one."""

    def pending(self) -> bool:
        """True while taken frames have not left yet."""

    def unconfirmed(self) -> bool:
        """True while a store may not hold everything that was taken; for links without a store, as :meth:`pending`."""

    def close(self) -> None:
        """Release sockets."""


_Inner = TypeVar("_Inner", bound=Link)


class LinkWrapper(Generic[_Inner]):
    """A link that hands on to an inner one whatever it does not do itself."""

    def __init__(self, inner: _Inner) -> None:
        self._inner = inner
        self.kind, self.policy = inner.kind, inner.policy
        self.eager, self.batch_bytes = inner.eager, inner.batch_bytes

    def ready(self, dst: int) -> bool:
        return self._inner.ready(dst)

    def send(self, dst: int, out: Outgoing) -> None:
        self._inner.send(dst, out)

    def flush(self) -> None:
        self._inner.flush()

    def proven(self, src: int, path: object) -> None:
        self._inner.proven(src, path)

    def resets(self) -> list[int]:
        return self._inner.resets()

    def notices(self) -> list[Notice]:
        return self._inner.notices()

    def lost(self, dst: int) -> float:
        return self._inner.lost(dst)

    def away_s(self) -> float:
        return self._inner.away_s()

    def trouble(self, dst: int) -> str:
        return self._inner.trouble(dst)

    def unconfirmed(self) -> bool:
        return self._inner.unconfirmed()

    def pending(self) -> bool:
        return self._inner.pending()

    def close(self) -> None:
        self._inner.close()
