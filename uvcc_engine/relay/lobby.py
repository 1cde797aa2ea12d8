"""The lobby of a listening port: little room for connections that have not proven themselves, few lines about them.

A peer may share its address with a stranger (one host, one gateway), so nobody is refused for an address: an address
has a share of the room, in which the oldest silent connection makes way for the newest.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Final, Generic, Protocol, TypeVar

from uvcc_engine.contract.run_files.eventlog import Notice

SILENT_S: Final = 5.0  # for a connection to prove itself
ROOM: Final = 256  # silent connections in all
SHARE: Final = 128  # of them, of one address


class _Visitor(Protocol):
    address: str
    since: float

    @property
    def fd(self) -> int: ...


_V = TypeVar("_V", bound=_Visitor)


class Lobby(Generic[_V]):
    """The strangers, as many as there is room for."""

    def __init__(self, room: int = ROOM, share: int = SHARE) -> None:
        self._room, self._share = room, share
        self._of: dict[str, OrderedDict[int, _V]] = {}  # by address, the oldest first
        self.by_fd: dict[int, _V] = {}

    def enter(self, visitor: _V) -> _V | None:
        """Let one in; returns who has to leave for it, if anybody."""
        mine = self._of.get(visitor.address) or OrderedDict[int, _V]()
        leaves = None
        if len(mine) >= self._share:
            leaves = next(iter(mine.values()))
        elif len(self.by_fd) >= self._room:
            leaves = next(iter(max(self._of.values(), key=len).values()))
        if leaves is not None:
            self.leave(leaves)
        self._of.setdefault(visitor.address, OrderedDict())[visitor.fd] = visitor
        self.by_fd[visitor.fd] = visitor
        return leaves

    def leave(self, visitor: _V) -> None:
        if self.by_fd.get(visitor.fd) is not visitor:
            return
        del self.by_fd[visitor.fd]
        mine = self._of[visitor.address]
        del mine[visitor.fd]
        if not mine:
            del self._of[visitor.address]

    def overdue(self, now: float, patience_s: float = SILENT_S) -> list[_V]:
        """Who has been here for too long."""
        return [v for v in self.by_fd.values() if now - v.since > patience_s]

    def __len__(self) -> int:
        return len(self.by_fd)

    def __iter__(self) -> Iterator[_V]:
        return iter(tuple(self.by_fd.values()))


class Rejections:
    """Counts who was turned away and says so sparingly: at once for the first, then once a minute for all others."""

    EVERY_S: Final = 60.0
    LINES: Final = 4  # addresses named a minute
    KEPT: Final = 1024  # addresses told apart in that time

    def __init__(self) -> None:
        self._since: float | None = None
        self._counts: dict[str, Counter[str]] = {}
        self.total = 0

    def note(self, address: str, why: str, now: float) -> Notice | None:
        """Count one; the first after a quiet time is worth a line."""
        self.total += 1
        if self._since is None:
            self._since = now
            return Notice("connections_rejected", {"address": address, "count": 1, "why": why})
        if address not in self._counts and len(self._counts) >= self.KEPT:
            address = "others"
        self._counts.setdefault(address, Counter())[why] += 1
        return None

    def due(self, now: float) -> list[Notice]:
        """What there is to say, if the time has come (``now`` infinite: the end)."""
        if self._since is None or now - self._since < self.EVERY_S:
            return []
        counts, self._counts = self._counts, {}
        self._since = now if counts else None
        ranked = sorted(((sum(c.values()), address, c) for address, c in counts.items()), key=lambda r: (-r[0], r[1]))
        named = [_line(address, why) for _, address, why in ranked[: self.LINES]]
        if rest := ranked[self.LINES :]:
            named.append(_line(f"{len(rest)} other addresses", sum((why for _, _, why in rest), Counter())))
        return named


def _line(address: str, why: Counter[str]) -> Notice:
    reasons = ", ".join(f"{n} {what}" for what, n in why.most_common())
    fields = {"address": address, "count": sum(why.values()), "why": reasons, "within_s": int(Rejections.EVERY_S)}
    return Notice("connections_rejected", fields)
