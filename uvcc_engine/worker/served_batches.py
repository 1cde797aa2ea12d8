"""Which queries are answered in the next batch: the same ones, in the same order, at all three parties, each once.

Every party says which queries wait at its desk; a query can be answered when it waits at all three. The order is the
first party's, one query of each client in turn, so that a client that asks a lot keeps no other waiting. What was
decided is on disk before anything is computed: a party that starts again repeats it, and tells the others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from uvcc_engine.contract.errors import ProtocolError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.parsing.canonical import sorted_json
from uvcc_engine.contract.parsing.untrusted import as_object
from uvcc_engine.contract.run_files.records import Malformed

MOST_LISTED: Final = 512
_MOST_BYTES: Final = 1 << 20
_DIGITS: Final = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class WaitingQuery:
    """A query by its id; whose it is, by its place among the job's clients, and how many rows it has."""

    id: str
    client: int
    rows: int

    def to_json(self) -> list[Any]:
        return [self.id, self.client, self.rows]


QueryBatch = tuple[WaitingQuery, ...]


@dataclass(frozen=True, slots=True)
class DeskWord:
    """What a party says of its desk. ``decided``: the batch of this step that it has on disk, None if there is none;
    ``idle``: that nobody has asked for as long as the job waits."""

    waiting: QueryBatch = ()
    decided: QueryBatch | None = None
    idle: bool = False

    def encode(self) -> bytes:
        found: dict[str, Any] = {"idle": self.idle, "waiting": [q.to_json() for q in self.waiting]}
        found |= {} if self.decided is None else {"decided": [q.to_json() for q in self.decided]}
        return sorted_json(found).encode()


def read_word(note: bytes) -> DeskWord | Malformed:
    """What a peer says of its desk. Total."""
    found = as_object(note, _MOST_BYTES)
    if found is None or not isinstance(found.get("idle"), bool):
        return Malformed("a malformed word of its queries")
    waiting = read_batch(found.get("waiting"))
    decided = read_batch(found["decided"]) if "decided" in found else None
    if waiting is None or ("decided" in found and decided is None):
        return Malformed("a malformed list of queries")
    return DeskWord(waiting, decided, found["idle"])


def read_batch(listed: object) -> QueryBatch | None:
    """A list of queries; None for anything else, also for one that names a query twice. Total."""
    if not isinstance(listed, list) or len(listed) > MOST_LISTED:
        return None
    read = [_query(one) for one in listed]
    good = [q for q in read if q is not None]
    return tuple(good) if len(good) == len(listed) == len({q.id for q in good}) else None


def _query(found: object) -> WaitingQuery | None:
    if not isinstance(found, list) or len(found) != 3:
        return None
    name, client, rows = found
    good = isinstance(name, str) and len(name) == 64 and set(name) <= _DIGITS
    good = good and type(client) is int and client >= 0 and type(rows) is int and 0 < rows < 1 << 31
    return WaitingQuery(name, client, rows) if good else None


@dataclass(frozen=True, slots=True)
class BatchTerms:
    """What a batch of a job must keep to: its rows at most, and whether it may be empty, since nobody asks any more."""

    most_rows: int
    may_be_empty: bool

    def broken_by(self, batch: QueryBatch, answered: Collection[str]) -> str:
        """Why no honest party has this batch on disk; "" if one may. ``answered``: queries of the steps before."""
        if not batch and not self.may_be_empty:
            return "a batch of no query in a job that never idles"
        rows = sum(query.rows for query in batch)
        if rows > self.most_rows:
            return f"a batch of {rows} rows, more than job.batch ({self.most_rows})"
        again = next((query for query in batch if query.id in answered), None)
        return "" if again is None else f"a batch with query {again.id[:12]}, which is answered already"


def held_to(
    terms: BatchTerms, words: Mapping[int, DeskWord], answered: Collection[str]
) -> tuple[dict[int, DeskWord], list[str]]:
    """Words without what no honest party says, and what was left out of whose.

    All honest parties know the terms and what is answered, so they leave out the same. Whoever said it is as one that
    has decided nothing: it stops no others, and nothing of it comes to their disks, from where they would repeat it.
    """
    kept, refused = dict(words), []
    for party, word in words.items():
        if word.idle and not terms.may_be_empty:
            kept[party] = replace(kept[party], idle=False)
            refused.append(f"P{party} says that nobody asks any more in a job that never idles")
        if word.decided is not None and (why := terms.broken_by(word.decided, answered)):
            kept[party] = replace(kept[party], decided=None)
            refused.append(f"P{party} names {why}")
    return kept, refused


def agreed(words: Mapping[int, DeskWord], step: int, most_rows: int) -> QueryBatch | None:
    """The batch that three words give, the same at all parties; None where there is nothing to answer yet.

    An empty batch: the first party found that nobody asks any more. Raises ProtocolError if two parties have decided
    differently, naming the second.
    """
    decided = [(party, word.decided) for party, word in sorted(words.items()) if word.decided is not None]
    for party, batch in decided:
        if batch != decided[0][1]:
            raise ProtocolError(
                f"P{decided[0][0]} and P{party} answered other queries in step {step}",
                "one of them lost what it had decided, or altered it; do not resume",
                party=party,
            )
    if decided:
        return decided[0][1]
    common = set(words[0].waiting).intersection(*(words[party].waiting for party in range(1, PARTIES)))
    if common:
        return in_turn([q for q in words[0].waiting if q in common], step, most_rows)
    return () if words[0].idle else None


def in_turn(queries: Sequence[WaitingQuery], step: int, most_rows: int) -> QueryBatch:
    """One query of each client after the other, whose turn begins moves with ``step``, as long as they fit."""
    by_client: dict[int, list[WaitingQuery]] = {}
    for query in queries:
        by_client.setdefault(query.client, []).append(query)
    clients = sorted(by_client)
    first = step % len(clients) if clients else 0
    waiting = [by_client[c] for c in clients[first:] + clients[:first]]
    chosen: list[WaitingQuery] = []
    left = most_rows
    while waiting:
        still = []
        for mine in waiting:
            if mine[0].rows <= left and len(chosen) < MOST_LISTED:
                query, *rest = mine
                left -= query.rows
                chosen.append(query)
                if rest:
                    still.append(rest)
        waiting = still
    return tuple(chosen)
