"""A client of a served model: its key, its ticket, its rows, and the answers that only it can read.

A ticket says where the relay of a run is, under which token this client writes there, and the policy that three domains
signed, which names this client's key, the model and what is revealed. Rows are split and sealed here; what the three
parties send back is put together here. No torch.
"""

from __future__ import annotations

import argparse
import csv
import fcntl
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from uvcc_engine.contract.errors import ConfigError, PeerLostError, UnreadableError, UvccError, VerificationError
from uvcc_engine.contract.job import owner_files
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.served_clients import CLIENTS
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.machine.raising_parser import RaisingParser
from uvcc_engine.contract.parsing import strict
from uvcc_engine.contract.run_files import files
from uvcc_engine.data.data_files import read_queries
from uvcc_engine.data.decimal_commas import as_read
from uvcc_engine.data.features import transform
from uvcc_engine.data.schema import Schema, load_schema
from uvcc_engine.data.sets import Floats
from uvcc_engine.data.table_files import read_table
from uvcc_engine.model.definition.specs import find_model
from uvcc_engine.owner.own_data import numbers_of
from uvcc_engine.plane.links.relay_mail import MailFullError, RelayAwayError, RelayMail, box_of
from uvcc_engine.sealing.queries import (
    AnswerPart,
    SealedQuery,
    ServedJob,
    most_rows,
    open_answer,
    seal_query,
    whole_answer,
)
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.transcript.terms.policy import Policy, check_signatures

AT_ONCE: Final = 8
"""Queries of this client on their way at once; fewer than the parties let wait."""
POLL_S: Final = 2.0
LOOK_S: Final = 0.1
"""Between two looks whether another still asks with the same key."""
AGAIN_S: Final = 1.0
"""Between two tries of what a relay refused that was full or away."""
TOLD_AFTER_S: Final = 10.0
"""A wait that lasts is told of after so long, and then each minute."""
TOLD_EACH_S: Final = 60.0
TTL_S: Final = 3600
Tell = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a client needs beside its own key. ``client``: its place among the job's clients; ``ca``: the relay's
    certificate as PEM text, where it speaks TLS; ``policy``, ``signatures``: as the domains signed it."""

    relay: str
    group: str
    token: str
    client: int
    policy: dict[str, Any]
    signatures: dict[str, str]
    ca: str = ""


@dataclass(frozen=True, slots=True)
class ServedModelOf:
    """A ticket, read and checked. ``outputs`` of a row: the model's classes at each of its ``positions``."""

    ticket: Ticket
    policy: Policy
    job: PrivateJob
    served: ServedJob
    outputs: int
    positions: int = 1


def read_ticket(path: Path, client: Identity, policy_hash: str = "") -> ServedModelOf:
    """Read a ticket. Raises ConfigError for one of another client, model or policy, VerificationError where a domain's
    signature does not hold, UnreadableError for what is no ticket.
    """
    ticket = strict.read(Ticket, files.read_json(path), "the ticket")
    policy = Policy.from_json(ticket.policy)
    if any(p not in ("0", "1", "2") for p in ticket.signatures):
        raise UnreadableError(f"{path} names signatures of other parties", "ask the operator for the ticket again")
    check_signatures(policy, {int(p): text for p, text in ticket.signatures.items()})
    if policy_hash and policy.hash.hex() != policy_hash:
        raise ConfigError(
            f"the ticket is of policy {policy.hash.hex()[:16]}, you asked for {policy_hash[:16]}",
            "ask the operator which model this is",
        )
    job = PrivateJob.from_json(policy.job)
    if job.task != "serve" or not policy.reveals("answers", CLIENTS):
        raise ConfigError("the ticket's policy serves no model", "it reveals no answers to clients")
    if not 0 <= ticket.client < len(job.clients) or job.clients[ticket.client] != client.public.x25519:
        raise ConfigError(
            f"the ticket is for client {ticket.client}, whose key is another than yours",
            "ask with the key that job.clients names, or for the ticket of yours",
        )
    model = find_model(job.model)
    outputs = model.classes * model.positions
    rows = most_rows(job.batch, model.features, outputs)
    served = ServedJob(policy.sid_job.hex(), job.clients, model.features, rows, job.frac_bits)
    return ServedModelOf(ticket, policy, job, served, outputs, model.positions)


@dataclass(slots=True)
class _Asked:
    """A query on its way."""

    query: SealedQuery
    at: int  # its first row
    sent: float
    parts: dict[tuple[int, int], dict[int, AnswerPart]] = field(default_factory=dict)


class _Wait:
    """Tells of one wait that lasts, so that nobody looks at nothing for minutes."""

    def __init__(self, patience_s: float, tell: Tell) -> None:
        self._tell, self._ends = tell, time.monotonic() + patience_s
        self._due = time.monotonic() + TOLD_AFTER_S

    def goes_on(self, why: str) -> None:
        now = time.monotonic()
        if now >= self._due:
            self._due = now + TOLD_EACH_S
            self._tell(f"{owner_files.WAITS}: {why}; gives up in {max(0.0, self._ends - now):.0f} s")


class Asker:
    """Sends rows in queries and puts answers together, for one client. ``tell`` hears of a wait that lasts."""

    def __init__(
        self, model: ServedModelOf, client: Identity, patience_s: float, tell: Tell = lambda said: None
    ) -> None:
        self._tell = tell
        t = model.ticket
        self._model, self._client, self._patience_s = model, client, patience_s
        self._mail = RelayMail(t.relay, t.token, box_of("served", t.group), ca_text=t.ca)
        self._parties = [party.public for party in model.policy.parties]
        self.waits: list[float] = []
        self.strange = 0
        """Messages that were no answer of the party that they came from."""

    def ask(self, x: Floats) -> Floats:
        """Answers (rows, outputs) to rows (rows, features). A relay that is away for less than the patience is waited
        for: what was sent lies on its disk, and what it handed out and heard no word of comes again.

        Raises PeerLostError naming the parties that did not answer in time, VerificationError where two parties say
        different things, UnreachableError if the relay refuses this client or does not answer for so long.
        """
        size, found = self._model.served.most_rows, np.zeros((len(x), self._model.outputs))
        waiting: dict[str, _Asked] = {}
        at, last = 0, time.monotonic()
        wait = _Wait(self._patience_s, self._tell)
        while at < len(x) or waiting:
            while at < len(x) and len(waiting) < AT_ONCE:
                query = seal_query(x[at : at + size], self._model.served, self._client, self._parties)
                self._send(query)
                waiting[query.id] = _Asked(query, at, time.monotonic())
                at += query.rows
            done = self._patiently(lambda: self._take(waiting), last)
            for name, answer in done.items():
                one = waiting.pop(name)
                found[one.at : one.at + one.query.rows] = answer
                self.waits.append(time.monotonic() - one.sent)
            if done:
                last, wait = time.monotonic(), _Wait(self._patience_s, self._tell)
            else:
                wait.goes_on(f"{len(waiting)} queries have no whole answer yet; the model may be held, or halted")
            if time.monotonic() - last > self._patience_s:
                raise self._silent(waiting)
        return found

    def close(self) -> None:
        """End the connection."""
        self._mail.close()

    def _send(self, query: SealedQuery) -> None:
        for party, box in enumerate(query.boxes):
            send = partial(self._mail.send, party, query.id, box, TTL_S)
            self._patiently(send, time.monotonic())

    def _patiently(self, act: Callable[[], T], since: float) -> T:
        """Do it, again and again while the relay is full or away, until the patience is over ``since`` then."""
        wait = _Wait(self._patience_s, self._tell)
        while True:
            try:
                return act()
            except (MailFullError, RelayAwayError) as error:
                wait.goes_on(error.what)
                if time.monotonic() - since > self._patience_s:
                    raise
                time.sleep(AGAIN_S)

    def _take(self, waiting: dict[str, _Asked]) -> dict[str, Floats]:
        """Whole answers that came now, by the id of the query. What is not waited for is taken and forgotten."""
        done: dict[str, Floats] = {}
        taken = self._mail.take(POLL_S)
        for message in taken:
            if message.sender >= PARTIES or not message.payload:
                continue
            public, sid = self._parties[message.sender], self._model.served.sid_job
            try:
                part = open_answer(
                    message.payload, client=self._client, party=message.sender, sender=public, sid_job=sid
                )
            except UvccError:
                self.strange += 1
                continue
            asked = waiting.get(part.query)
            if asked is None or part.query in done:
                continue
            together = asked.parts.setdefault((part.attempt, part.batch), {})
            together[message.sender] = part
            if len(together) == PARTIES:
                answer = whole_answer([together[p] for p in range(PARTIES)], asked.query.rows)
                if answer.shape[1] != self._model.outputs:
                    raise VerificationError("answer", f"it has {answer.shape[1]} outputs", "the model has others")
                done[part.query] = answer
        self._mail.acknowledge([message.delivery for message in taken])
        return done

    def _silent(self, waiting: dict[str, _Asked]) -> PeerLostError:
        heard = {party for one in waiting.values() for parts in one.parts.values() for party in parts}
        missing = sorted(set(range(PARTIES)) - heard)
        who = ", ".join(f"P{party}" for party in missing) or "nobody more"
        what = f"{len(waiting)} queries had no whole answer after {self._patience_s:g} s: nothing came from {who}"
        hint = "is the model served, and not held? --wait gives it longer"
        return PeerLostError(what, hint, party=missing[0] if missing else 0)


@contextmanager
def only_asker(key: Path, patience_s: float, tell: Tell = lambda said: None) -> Iterator[None]:
    """Ask with this key alone: whoever takes a client's mail takes all of it, also the answers that another waits for.

    Waits for the others of this machine; raises ConfigError after ``patience_s``.
    """
    folder, began = os.open(key, os.O_RDONLY), time.monotonic()
    wait = _Wait(patience_s, tell)
    try:
        while True:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - began > patience_s:
                    what = f"others asked with the key in {key} for {patience_s:g} s"
                    raise ConfigError(what, "each who asks at the same time has a key of its own") from None
                wait.goes_on(f"another asks with the key in {key}")
                time.sleep(LOOK_S)
        yield
    finally:
        os.close(folder)


def make_key(args: argparse.Namespace) -> dict[str, Any]:
    """Make a client's key in a new folder; its public half goes into ``job.clients``."""
    return {"folder": str(args.key), "key": Identity.create(args.key).public.x25519}


def ask(args: argparse.Namespace) -> dict[str, Any]:
    """Ask the model about every row of a file; answers as CSV, figures as the result."""
    client = Identity.load(args.key)
    model = read_ticket(args.ticket, client, args.policy)
    schema = load_schema(args.schema) if args.schema is not None else None
    ids: Sequence[str] | None = None
    if schema is not None and schema.text is None:
        table = as_read(read_table(args.data), schema)
        x = transform(table, schema)
        ids = table.columns.get(schema.by) if schema.by else None
    else:
        x = read_queries(args.data)
    if x.shape[1] != model.served.features:
        raise ConfigError(
            f"{args.data.name} has {x.shape[1]} features, the model takes {model.served.features}",
            "name the fitted schema of the model's training with --schema",
        )
    asker = Asker(model, client, args.wait, _told)
    with only_asker(args.key, args.wait, _told):
        began = time.monotonic()
        try:
            answers = asker.ask(x)
        finally:
            asker.close()
    took = time.monotonic() - began
    text = answers_csv(answers, model, schema, ids)
    if args.out is None:
        sys.stdout.write(text)
    else:
        files.write_atomic(args.out, text.encode(), mode=0o600)
    waits = sorted(asker.waits)
    return {
        "rows": len(x),
        "queries": len(waits),
        "seconds": round(took, 3),
        "rows_per_s": round(len(x) / took, 1),
        "p50_s": round(waits[len(waits) // 2], 3),
        "p95_s": round(waits[len(waits) * 95 // 100], 3),
        "policy": model.policy.hash.hex(),
        "strange": asker.strange,
    }


def _told(said: str) -> None:
    print(said, file=sys.stderr, flush=True)


def answers_csv(answers: Floats, model: ServedModelOf, schema: Schema | None, ids: Sequence[str] | None) -> str:
    """One line for each row: its number or id, and its class by name or number, or the predicted number; of a text
    what it answers at each place."""
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    named = schema.by if schema is not None and ids else "row"
    places = model.positions
    what = "answer" if schema is None or places > 1 else schema.target or "cluster"  # k-means has no target
    lines.writerow([named, *([what] if places == 1 else [f"{what} {at}" for at in range(1, places + 1)])])
    each = answers.reshape(len(answers), places, -1)
    if each.shape[2] > 1 or model.job.objective == "binary":
        classes = each.argmax(2) if each.shape[2] > 1 else np.rint(each[:, :, 0]).astype(np.int64)
        values = schema.values if schema is not None else ()
        said = [[values[c] if c < len(values) else str(c) for c in row] for row in classes.tolist()]
    else:
        numbers = numbers_of(schema, answers) if schema is not None else answers[:, 0]
        said = [[f"{number:.9g}"] for number in numbers]
    for row, cells in enumerate(said):
        lines.writerow([ids[row] if ids else row + 1, *cells])
    return out.getvalue()


def main(argv: Sequence[str] | None = None) -> int:
    """``uvcc-engine ask``: returns the exit code; a summary goes to standard output where the answers go to a file."""
    parser = RaisingParser(prog="uvcc-engine ask", description="A client of a served private model.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    key = verbs.add_parser("key", help="make a client's key")
    key.add_argument("key", type=Path, help="a new folder, for the client's eyes only")
    rows = verbs.add_parser("rows", help="ask about every row of a file")
    rows.add_argument("--ticket", type=Path, required=True, help="what `uvcc infer ticket` wrote")
    rows.add_argument("--key", type=Path, required=True, help="the folder of the client's key")
    rows.add_argument("--data", type=Path, required=True, help="a CSV file with --schema, else .npy, .npz or IDX")
    rows.add_argument("--schema", type=Path, help="the fitted schema of the model's training")
    rows.add_argument("--out", type=Path, help="the answers' CSV file; standard output without it")
    rows.add_argument("--policy", default="", help="the policy's hash, if you know it: no other is asked")
    rows.add_argument("--wait", type=float, default=300.0, help="seconds without any answer until it gives up (300)")
    args = parser.parse_args(argv)
    try:
        done = {"key": make_key, "rows": ask}[args.verb](args)
    except UvccError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if args.verb == "key" or args.out is not None:
        print(json.dumps(done))
    return 0
