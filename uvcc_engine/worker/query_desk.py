"""Where one party of a served model takes queries in and hands answers out, beside the thread that computes.

A query is on disk before its arrival is acknowledged, still sealed, and an answer before the step that computed it is
over; both are named by the query's id, so nothing is answered twice or lost when a process dies. What comes from a
client may be anything: it is counted and dropped unless it opens, fits the model and is new.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, ProtocolError, UnreachableError, UnreadableError, UvccError
from uvcc_engine.contract.job.link_spec import LinkSpec
from uvcc_engine.contract.parsing.canonical import sorted_json
from uvcc_engine.contract.run_files import files
from uvcc_engine.plane.links.relay_locator import RelayLocator
from uvcc_engine.plane.links.relay_mail import MailFullError, RelayMail, TakenMessage, box_of
from uvcc_engine.relay.relay_roles import Role, number_of
from uvcc_engine.sealing.queries import OpenedQuery, ServedJob, open_query
from uvcc_engine.transcript.leaves.json_lines import LineLog
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.worker.served_batches import (
    MOST_LISTED,
    BatchTerms,
    DeskWord,
    QueryBatch,
    WaitingQuery,
    agreed,
    held_to,
    read_batch,
)

QUERIES: Final = "queries"
ANSWERS: Final = "answers"
FIRST_CLIENT: Final = number_of(Role.CLIENT, 0)
"""The relay's number of the first client."""
WAITING_OF_CLIENT: Final = 32
"""Queries of one client that wait at once; what comes beyond is dropped, and asked again by its client."""
STALE_S: Final = 300.0
"""After so long a query that the other parties do not have is dropped: its client sent it to one of them only."""
_POLL_S: Final = 2.0
_RETRY_S: Final = 1.0
_TELL_S: Final = 60.0
_SUFFIX: Final = ".box"


class QueryDesk:
    """Queries that wait at one party, and answers on their way. The computing thread calls everything but the threads'
    own methods; ``tell`` may be called from any thread."""

    def __init__(
        self,
        folder: Path,
        served: ServedJob,
        *,
        party: int,
        identity: Identity,
        link: LinkSpec,
        tell: Callable[[str, dict[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``folder``: the run directory, in which what was taken in before is read again. Raises UnreadableError."""
        self._served, self._party, self._identity = served, party, identity
        self._tell, self._clock = tell, clock
        self._queries, self._answers = folder / QUERIES, folder / ANSWERS
        for path in (self._queries, self._answers):
            path.mkdir(mode=0o700, exist_ok=True)
        self._lock = threading.Lock()
        self._news, self._closing, self._outgoing = threading.Event(), threading.Event(), threading.Event()
        self._log = LineLog(self._queries / "decided.jsonl")
        self._decided = self._read_decided()
        self._of_query = {q.id: step for step, batch in self._decided.items() for q in batch}
        self._waiting: dict[str, tuple[OpenedQuery, float]] = {}
        self._refused: Counter[str] = Counter()
        self._told_at = float("-inf")
        self._asked_at = clock()
        self._waits: deque[float] = deque(maxlen=512)
        self._arrived: dict[str, float] = {}
        self._answered = Counter[int]()
        self._read_spool()
        self._link = link
        self._threads = [
            threading.Thread(target=self._run, args=(serve, where), name=name, daemon=True)
            for name, serve, where in (("queries", self._take, "in"), ("answers", self._send, "out"))
        ]

    def open(self) -> None:
        """Begin to take queries."""
        for thread in self._threads:
            thread.start()
        self._outgoing.set()

    def close(self, patience_s: float = 0.0) -> None:
        """Stop; with ``patience_s`` what lies here for clients is sent first, for so long. Harmless twice."""
        if self._closing.is_set():
            return
        end = self._clock() + patience_s
        while any(self._answers.glob(f"*{_SUFFIX}")) and self._clock() < end:
            self._outgoing.set()
            self._closing.wait(0.05)
        self._closing.set()
        self._outgoing.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(_POLL_S + 1.0)
        self._log.close()

    # -- what is decided ---------------------------------------------------------------------------------------------

    def _read_decided(self) -> dict[int, QueryBatch]:
        found: dict[int, QueryBatch] = {}
        for said, _ in self._log.take():
            step = said.get("step") if isinstance(said, dict) else None
            batch = read_batch(said.get("batch")) if isinstance(said, dict) else None
            if type(step) is not int or batch is None or step in found:
                raise UnreadableError(f"{self._log.path} is damaged", "start a new run: what was answered is not known")
            found[step] = batch
        return found

    def word(self, step: int, idle_s: float) -> DeskWord:
        """What this party says before a step: what waits here, what it has decided, whether nobody asks any more."""
        with self._lock:
            listed = [WaitingQuery(q.id, q.client, q.rows) for q, _ in self._waiting.values()]
            idle = 0 < idle_s <= self._clock() - self._asked_at
        free = [q for q in listed if self._of_query.get(q.id, step) >= step]
        return DeskWord(tuple(free[:MOST_LISTED]), self._decided.get(step), idle)

    def agree(self, words: Mapping[int, DeskWord], step: int, terms: BatchTerms) -> QueryBatch | None:
        """The batch of three words (``agreed``), each held to the job's terms; what breaks them is refused and told.

        Raises ProtocolError if two parties have decided differently.
        """
        answered = {name for name, at in self._of_query.items() if at < step}
        kept, refused = held_to(terms, words, answered)
        for why in refused:
            self._refuse(why)
        return agreed(kept, step, terms.most_rows)

    def forget_stale(self, common: Sequence[DeskWord]) -> None:
        """Drop what waited long and is not at the other parties; ``common``: what they said, unless that is as much as
        a word holds: then more may wait there."""
        if any(len(word.waiting) == MOST_LISTED for word in common):
            return
        now = self._clock()
        theirs = [{q.id for q in word.waiting} for word in common]
        with self._lock:
            old = [name for name, (_, at) in self._waiting.items() if now - at > STALE_S]
            gone = [name for name in old if not all(name in ids for ids in theirs) and name not in self._of_query]
            for name in gone:
                del self._waiting[name]
        for name in gone:
            self._path(name).unlink(missing_ok=True)
            self._refuse("not sent to all three parties")

    def decide(self, step: int, batch: QueryBatch) -> list[OpenedQuery]:
        """Put a batch on disk before it is computed; this party's parts of its queries.

        Raises ProtocolError if it names a query that was answered before, or another one than lies here, ConfigError if
        one does not lie here at all.
        """
        found = []
        for query in batch:
            if self._of_query.get(query.id, step) < step:
                raise ProtocolError(f"query {query.id[:12]} would be answered twice", "a peer repeats an old one")
            with self._lock:
                opened = self._waiting.get(query.id)
            if opened is None:
                raise ConfigError(
                    f"step {step} answered query {query.id[:12]}, which does not lie here",
                    "this pod lost its run directory; start a new run",
                )
            if (opened[0].client, opened[0].rows) != (query.client, query.rows):
                raise ProtocolError(f"query {query.id[:12]} is not as a peer says", "the parties hold other queries")
            found.append(opened[0])
        if step not in self._decided:
            line = sorted_json({"step": step, "batch": [q.to_json() for q in batch]})
            self._log.append(line.encode() + b"\n")
            self._log.sync()
            self._decided[step] = batch
            self._of_query |= {q.id: step for q in batch}
        return found

    def wait(self, seconds: float) -> None:
        """Until something new came, or so long."""
        self._news.wait(seconds)
        self._news.clear()

    # -- answers -----------------------------------------------------------------------------------------------------

    def deliver(self, answers: Sequence[tuple[OpenedQuery, str, bytes]]) -> None:
        """Hand out sealed answers, each under a name that no other has; on disk when this returns."""
        now = self._clock()
        for query, name, box in answers:
            path = self._answers / f"{query.client}-{name}{_SUFFIX}"
            files.write_atomic(path, box, mode=0o600)
        with self._lock:
            for query, _, _ in answers:
                if (at := self._arrived.pop(query.id, None)) is not None:
                    self._waits.append(now - at)
                self._answered[query.client] += 1
            if answers:
                self._asked_at = now
        self._outgoing.set()

    def forget(self, before: int) -> None:
        """Delete the queries of steps before this one: no checkpoint that is kept goes back so far."""
        done = [q.id for step, batch in self._decided.items() if step < before for q in batch]
        with self._lock:
            gone = [name for name in done if self._waiting.pop(name, None) is not None]
        for name in gone:
            self._path(name).unlink(missing_ok=True)

    def figures(self) -> dict[str, Any]:
        """Counts since this process started, and how long queries waited here until their answer was sealed, in s."""
        with self._lock:
            waits = sorted(self._waits)
            decided = sum(1 for name in self._waiting if name in self._of_query)
            found: dict[str, Any] = {
                "waiting": len(self._waiting) - decided,
                "answered": sum(self._answered.values()),
                "clients": len(self._answered),
                "refused": sum(self._refused.values()),
            }
        if waits:
            found |= {"p50_s": round(waits[len(waits) // 2], 3), "p95_s": round(waits[len(waits) * 95 // 100], 3)}
        return found

    # -- the threads -------------------------------------------------------------------------------------------------

    def _run(self, serve: Callable[[RelayMail], None], where: str) -> None:
        """Serve over one connection, made anew after trouble and where the relay goes."""
        at, mail, told = RelayLocator(self._link, self._queries.parent / files.LINK), None, False
        while not self._closing.is_set():
            try:
                if at.moved() or mail is None:
                    link = at.link
                    box = box_of("served", link.group)
                    mail = RelayMail.of_file(link.relay_url, link.token_file, box, link.ca_file)
                serve(mail)
                told = False
            except MailFullError:
                self._closing.wait(_RETRY_S)
            except (UvccError, OSError) as error:
                if not told:
                    self._tell("queries_stuck", {"way": where, "why": str(error)[:200]})
                mail, told = None, True
                self._closing.wait(_RETRY_S)
        if mail is not None:
            mail.close()

    def _take(self, mail: RelayMail) -> None:
        taken = mail.take(_POLL_S)
        for message in taken:
            self._take_in(message)
        mail.acknowledge([message.delivery for message in taken])

    def _take_in(self, message: TakenMessage) -> None:
        if not message.payload:
            return  # an answer that its client never took
        try:
            query = open_query(message.payload, self._served, party=self._party, identity=self._identity)
        except UvccError as error:
            self._refuse(error.what)
            return
        if message.sender != FIRST_CLIENT + query.client:
            self._refuse("it came by the mail of another client")
            return
        now = self._clock()
        with self._lock:
            known = query.id in self._waiting or query.id in self._of_query
            mine = sum(1 for q, _ in self._waiting.values() if q.client == query.client and q.id not in self._of_query)
        if known or mine >= WAITING_OF_CLIENT:
            self._refuse("it is a repetition" if known else "its client has too many waiting")
            return
        files.write_atomic(self._path(query.id), message.payload, mode=0o600)
        with self._lock:
            self._waiting[query.id] = query, now
            self._arrived[query.id] = self._asked_at = now
        self._news.set()

    def _refuse(self, why: str) -> None:
        """Count it; say so at once for the first, then once a minute."""
        now = self._clock()
        with self._lock:
            self._refused[why[:120]] += 1
            due = now - self._told_at >= _TELL_S
            counts = dict(self._refused.most_common(8))
            if due:
                self._told_at = now
        if due:
            self._tell("queries_refused", {"why": counts})

    def _send(self, mail: RelayMail) -> None:
        self._outgoing.wait(_POLL_S)
        self._outgoing.clear()
        for path in sorted(self._answers.glob(f"*{_SUFFIX}"), key=os.path.getmtime):
            client, _, name = path.name.removesuffix(_SUFFIX).partition("-")
            try:
                mail.send(FIRST_CLIENT + int(client), name, path.read_bytes())
            except (MailFullError, UnreachableError):
                self._outgoing.set()  # the others wait their turn behind it
                raise
            path.unlink()

    def _path(self, name: str) -> Path:
        return self._queries / f"{name}{_SUFFIX}"

    def _read_spool(self) -> None:
        """What was taken in before this process; a file that a dying process left behind otherwise is dropped."""
        now = self._clock()
        for path in sorted(self._queries.glob(f"*{_SUFFIX}"), key=os.path.getmtime):
            try:
                query = open_query(path.read_bytes(), self._served, party=self._party, identity=self._identity)
            except UvccError:
                path.unlink()
                continue
            self._waiting[query.id] = query, now
