"""Queries to a served model, and their answers: sealed by a client to each party, and by each party to that client.

A query is split like any input: three components, two of them to each party, each with a blinded commitment. Its id is
the hash of everything that is public of it (session, client, rows, commitments), so three parties that name the same id
hold the same query, and a client that hands out different versions of a component has made queries of different ids,
which no two parties answer together. The answer's box names the id, the batch and the attempt, and only the key that
sealed the query opens it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from uvcc_engine.contract.errors import ConfigError, UnreadableError, VerificationError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.data.sets import Floats
from uvcc_engine.sealing.box import seal, sender_of, unseal
from uvcc_engine.sealing.box_keys import derive, sha256
from uvcc_engine.sealing.commitments import commitment
from uvcc_engine.sealing.components import Ring, decode_component, encode_component, pack_halves, unpack_halves
from uvcc_engine.sealing.inputs import encode_fixed, split_ring
from uvcc_engine.transcript.signing.identity import Identity, PublicIdentity

QUESTION: Final = "query_x"
ANSWER: Final = "answer"
_QUERY_FORMAT: Final = "uvcc-query-1"
_ANSWER_FORMAT: Final = "uvcc-answer-1"
_NO_BLIND: Final = bytes(32)
_SPOILT: Final = "seal the query again"
LARGEST: Final = 8 << 20
"""Bytes of a query's box, or of its answer's, at most: a relay takes messages of twice as many."""
_BOTH: Final = 2 * 8  # bytes of a number in two components


@dataclass(frozen=True, slots=True)
class ServedJob:
    """What a query must fit: the session, who may ask, the model's input width, its rows at most, the fixed point."""

    sid_job: str
    clients: tuple[str, ...]
    features: int
    most_rows: int
    frac_bits: int


@dataclass(frozen=True, slots=True)
class SealedQuery:
    """A query as its client sends it: a box for each party."""

    id: str
    rows: int
    boxes: tuple[bytes, bytes, bytes]


@dataclass(frozen=True, slots=True)
class OpenedQuery:
    """One party's part of a query: both of its components, (rows, features); ``client``: whose, by its place."""

    id: str
    client: int
    rows: int
    first: Ring
    second: Ring


def most_rows(batch: int, features: int, outputs: int) -> int:
    """Rows of one query at most: those of a job's batch, as far as a relay passes on their boxes and the answers'.

    ``features``, ``outputs``: numbers of a row that is asked, and of its answer.
    """
    return max(1, min(batch, LARGEST // (_BOTH * max(features, outputs))))


def query_id(sid_job: str, client: str, rows: int, commitments: Sequence[str]) -> str:
    """The id of a query: SHA-256 (hex) of what is public of it."""
    told = {"client": client, "commitments": list(commitments), "rows": rows, "sid_job": sid_job}
    return sha256(b"UVCC_QUERY_V1", canonical(told)).hex()


def seal_query(x: Floats, served: ServedJob, client: Identity, parties: Sequence[PublicIdentity]) -> SealedQuery:
    """Split rows (rows, features) and seal two components to each party; every call gives another id.

    Raises ConfigError for rows that the model does not take or numbers beyond the fixed point's range.
    """
    rows = len(x)
    if x.ndim != 2 or x.shape[1] != served.features or not 1 <= rows <= served.most_rows:
        raise ConfigError(
            f"a query of shape {x.shape}, the model takes 1 to {served.most_rows} rows of {served.features} columns",
            "ask with the columns that the model was trained on",
        )
    secret = os.urandom(32)
    halves = split_ring(encode_fixed("the query", x, served.frac_bits), derive(secret, "split"))
    blinds = [derive(secret, f"blind|{c}") for c in range(PARTIES)]
    parts = [encode_component(c, served.frac_bits, {QUESTION: halves[c]}) for c in range(PARTIES)]
    commitments = [commitment(blind, part) for blind, part in zip(blinds, parts, strict=True)]
    about = {"commitments": commitments, "format": _QUERY_FORMAT, "rows": rows, "sid_job": served.sid_job}
    boxes = [
        seal(
            pack_halves([(blinds[c], parts[c]) for c in (party, (party + 1) % PARTIES)]),
            sender=client,
            to=parties[party].x25519,
            about=about | {"party": party},
        )
        for party in range(PARTIES)
    ]
    made = query_id(served.sid_job, client.public.x25519, rows, commitments)
    return SealedQuery(made, rows, (boxes[0], boxes[1], boxes[2]))


def open_query(box: bytes, served: ServedJob, *, party: int, identity: Identity) -> OpenedQuery:
    """A party's part of a query. The box may hold anything.

    Raises VerificationError for one by somebody who is no client, or that is not what it says, UnreadableError for one
    that cannot be read.
    """
    sender = sender_of(box)
    if sender not in served.clients:
        raise VerificationError("query", "it is sealed by no client of this job", "job.clients lists who may ask")
    plain, about = unseal(box, recipient=identity, sender=sender)
    rows, commitments = _checked(about, served, party)
    halves = []
    for slot, (blind, encoded) in enumerate(unpack_halves(plain)):
        component = (party + slot) % PARTIES
        if commitment(blind, encoded) != commitments[component]:
            raise VerificationError("query", f"component {component} is not the one it commits to", _SPOILT)
        frac_bits, tensors = decode_component(component, encoded)
        shapes = {name: ring.shape for name, ring in tensors.items()}
        if frac_bits != served.frac_bits or shapes != {QUESTION: (rows, served.features)}:
            raise VerificationError("query", f"component {component} is not of {rows} rows as it says", _SPOILT)
        halves.append(tensors[QUESTION])
    name = query_id(served.sid_job, sender, rows, commitments)
    return OpenedQuery(name, served.clients.index(sender), rows, halves[0], halves[1])


def _checked(about: Mapping[str, Any], served: ServedJob, party: int) -> tuple[int, list[str]]:
    rows, commitments = about.get("rows"), about.get("commitments")
    wanted = {"format": _QUERY_FORMAT, "party": party, "sid_job": served.sid_job}
    if {k: v for k, v in about.items() if k not in ("rows", "commitments")} != wanted or type(
        about["party"]
    ) is not int:
        raise VerificationError("query", "it is for another session or party", _SPOILT)
    if type(rows) is not int or not 1 <= rows <= served.most_rows:
        raise VerificationError("query", f"it is not of 1 to {served.most_rows} rows", "ask in smaller parts")
    listed = commitments if isinstance(commitments, list) else []
    if len(listed) != PARTIES or not all(isinstance(c, str) and len(c) == 64 for c in listed):
        raise VerificationError("query", "it does not commit to three components", _SPOILT)
    return rows, listed


# -- answers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """One party's part of an answer. ``batch``: the step that computed it, in which ``attempt`` of the run."""

    query: str
    batch: int
    attempt: int
    components: Mapping[int, Ring]
    frac_bits: int


def seal_answer(
    halves: tuple[Ring, Ring],
    *,
    query: str,
    batch: int,
    attempt: int,
    party: int,
    frac_bits: int,
    identity: Identity,
    client: str,
    sid_job: str,
) -> bytes:
    """One party's components of an answer (rows, outputs), sealed to the client (X25519, hex) that asked."""
    parts = [
        (_NO_BLIND, encode_component((party + slot) % PARTIES, frac_bits, {ANSWER: ring}))
        for slot, ring in enumerate(halves)
    ]
    about = {
        "attempt": attempt,
        "batch": batch,
        "format": _ANSWER_FORMAT,
        "party": party,
        "query": query,
        "sid_job": sid_job,
    }
    return seal(pack_halves(parts), sender=identity, to=client, about=about)


def open_answer(box: bytes, *, client: Identity, party: int, sender: PublicIdentity, sid_job: str) -> AnswerPart:
    """What ``party`` sealed to this client. Raises VerificationError, UnreadableError for anything else."""
    plain, about = unseal(box, recipient=client, sender=sender.x25519)
    named = {"format": _ANSWER_FORMAT, "party": party, "sid_job": sid_job}
    query, batch, attempt = (about.get(name) for name in ("query", "batch", "attempt"))
    if {name: about.get(name) for name in named} != named or not isinstance(query, str):
        raise VerificationError("answer", f"P{party} sealed something else", "it answers another session")
    if type(batch) is not int or type(attempt) is not int:
        raise VerificationError("answer", f"P{party} names no batch", "it is of another version")
    components: dict[int, Ring] = {}
    bits = 0
    for slot, (_, encoded) in enumerate(unpack_halves(plain)):
        component = (party + slot) % PARTIES
        bits, tensors = decode_component(component, encoded)
        if set(tensors) != {ANSWER} or tensors[ANSWER].ndim != 2 or not 0 <= bits < 64:
            raise UnreadableError(f"the answer of P{party} holds something else", "it is of another version")
        components[component] = tensors[ANSWER]
    return AnswerPart(query, batch, attempt, components, bits)


def whole_answer(parts: Sequence[AnswerPart], rows: int) -> Floats:
    """The answer (rows, outputs) in clear from the parts of P0, P1 and P2.

    Raises VerificationError where two parties hold different copies of a component, or the parts are not of one answer.
    """
    first = parts[0]
    places = {(part.query, part.batch, part.attempt, part.frac_bits) for part in parts}
    shapes = {ring.shape for part in parts for ring in part.components.values()}
    if len(parts) != PARTIES or len(places) != 1 or len(shapes) != 1 or next(iter(shapes))[0] != rows:
        raise VerificationError("answer", "the parties' parts are not of one answer", "ask again")
    for component in range(PARTIES):
        copies = [(p, part.components[component]) for p, part in enumerate(parts) if component in part.components]
        (holder, one), (other, two) = copies
        if not np.array_equal(one, two):
            what = f"P{holder} and P{other} hold different copies of component {component}"
            raise VerificationError("answer", what, "one of them altered it; do not use this answer")
    with np.errstate(over="ignore"):
        total = sum((parts[c].components[c] for c in range(1, PARTIES)), first.components[0])
    found: Floats = total.astype(np.float64) / 2.0**first.frac_bits
    return found
