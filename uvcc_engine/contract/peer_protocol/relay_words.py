"""What workers and consoles leave for each other at the relay, as frozen records, and how each of them is read.

An order and a consent are signed by a console's key, a sign of life by the identity of its worker's party; signatures
and seals are the matter of ``transcript.signed``. What is read here may be anything: every parser is total.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.parsing.untrusted import as_int, as_object, load_json, scalar_text
from uvcc_engine.contract.run_files import records
from uvcc_engine.contract.run_files.control import HALT, Mode, checked_mode
from uvcc_engine.contract.run_files.records import Heartbeat, Malformed, ReportedRoot

MOST_BYTES: Final = 16 << 20  # of a relay's answer
RECORDS_AN_ANSWER: Final = 256
"""So many records a relay gives at most in one answer; fewer mean that there are no more."""
SHOWN: Final = (
    "step",
    "phase",
    "loss",
    "samples_per_s",
    "halt_nonce",
    "checkpoint",
    "waiting_on",
    "waiting_s",
    "ts",
    "pid",
)
"""What of a heartbeat is published at the relay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HaltOrder:
    """Stop, hold or go on: for every worker of ``run``. ``deadline_s``: how long a hold may last; 0 for ever."""

    run: str
    nonce: str = ""
    mode: Mode = HALT
    deadline_s: float = 0.0

    def to_json(self) -> dict[str, str]:
        return {
            "type": "order",
            "run": self.run,
            "nonce": self.nonce,
            "mode": self.mode,
            "deadline_s": str(self.deadline_s),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainConsent:
    """The word of a domain that ``what`` may be done in ``run``."""

    run: str
    what: str

    def to_json(self) -> dict[str, str]:
        return {"type": "consent", "run": self.run, "what": self.what}


@dataclass(frozen=True, slots=True, kw_only=True)
class SignOfLife:
    """A worker's newest heartbeat, and the roots that it has signed last."""

    run: str
    coord: str
    beat: Heartbeat
    halt_nonce: str = ""
    checkpoint: str = ""
    roots: Sequence[ReportedRoot] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedRecord:
    """One record that the relay holds; ``party``: whose credential left it, -1 where the relay does not say."""

    name: str
    body: str
    party: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayAnswer:
    """What the relay says to a look for records: the number of its newest, and those that are new."""

    seq: int
    records: Sequence[FetchedRecord] = ()


def order(content: Mapping[str, Any]) -> HaltOrder | DomainConsent | Malformed:
    """What a console's record asks for or allows."""
    run, kind = content.get("run"), content.get("type", "order")
    if not isinstance(run, str):
        return Malformed("an order that names no run")
    if kind == "consent":
        return DomainConsent(run=run, what=scalar_text(content.get("what"), 32))
    nonce, after = content.get("nonce", ""), _seconds(content.get("deadline_s"))
    if kind != "order" or not isinstance(nonce, str) or after is None:
        return Malformed("an order in another form")
    try:
        return HaltOrder(
            run=run, nonce=scalar_text(nonce), mode=checked_mode(scalar_text(content.get("mode"))), deadline_s=after
        )
    except ConfigError:
        return Malformed("an order of another mode")


def of_life(run: str, coord: str, beat: Mapping[str, Any], roots: Sequence[ReportedRoot], now: float) -> dict[str, Any]:
    """The content of a worker's sign of life, from its newest heartbeat record and its roots; ``now`` in seconds."""
    content: dict[str, Any] = {"type": "beat", "run": run, "coord": coord, "at": round(now, 3)}
    content |= {k: v for k, v in beat.items() if k in SHOWN and isinstance(v, str | int | float)}
    if roots:
        listed = [{k: v for k, v in asdict(r).items() if k in ("epoch", "root", "pairs")} for r in roots]
        content["roots"] = json.dumps(listed, separators=(",", ":"))
    return content


def sign_of_life(content: Mapping[str, Any]) -> SignOfLife | Malformed:
    """What a worker's record says. A list of roots that is damaged counts as none."""
    run, coord = content.get("run"), content.get("coord")
    if not isinstance(run, str) or not isinstance(coord, str):
        return Malformed("a sign of life of nobody")
    beat = records.heartbeat({k: v for k, v in content.items() if k not in ("type", "run", "coord", "roots")})
    if isinstance(beat, Malformed):
        return beat
    return SignOfLife(
        run=run,
        coord=coord,
        beat=beat,
        halt_nonce=scalar_text(content.get("halt_nonce")),
        checkpoint=scalar_text(content.get("checkpoint"), 128),
        roots=roots(content.get("roots")),
    )


def roots(listed: object) -> Sequence[ReportedRoot]:
    """The roots of a list in JSON, by epoch; nothing of a list that is damaged."""
    try:
        found = load_json(listed) if isinstance(listed, str) and listed else []
    except ValueError:
        return ()
    read = [records.epoch_root(r) for r in found if isinstance(r, Mapping)] if isinstance(found, list) else []
    good = [r for r in read if isinstance(r, ReportedRoot)]
    return sorted(good, key=lambda r: r.epoch) if len(good) == len(read) else ()


def answer(text: bytes) -> RelayAnswer | Malformed:
    """What the relay answered to a look for records; of a record that is none, nothing."""
    found = as_object(text, MOST_BYTES)
    seq, listed = (as_int(found.get("seq"), -1), found.get("records")) if found is not None else (None, None)
    if seq is None or not isinstance(listed, list):
        return Malformed("the relay answers in another form")
    kept = []
    for one in listed:
        name, body = (one.get("name"), one.get("body")) if isinstance(one, dict) else (None, None)
        if isinstance(name, str) and isinstance(body, str):
            party = as_int(one.get("party"), 0)
            kept.append(FetchedRecord(name=name, body=body, party=-1 if party is None else party))
    return RelayAnswer(seq=seq, records=kept)


def _seconds(value: object) -> float | None:
    """How long a hold may last, as an order says it; None if that is no number."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, str | int | float)):
        return None
    try:
        found = float(value or 0.0)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None
