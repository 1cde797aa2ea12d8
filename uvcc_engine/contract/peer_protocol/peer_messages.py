"""What the workers of the three parties tell each other beside the protocol: one frozen record per topic.

Messages are JSON on the plane's control stream: sealed, in order, never part of the transcript. A peer may say
anything: :func:`parse` answers for every text there is, with a record whose fields are of their types and in their
ranges, or with what is wrong with it. Text that may end up in a log is cut and cleaned.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Final

from uvcc_engine.contract.job.proof_mode import OFF
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.parsing.canonical import sorted_json
from uvcc_engine.contract.parsing.untrusted import as_float, as_object
from uvcc_engine.contract.run_files.control import MODES, HaltRequest
from uvcc_engine.contract.run_files.records import Malformed

GO_ON: Final = 0
HOLD: Final = 1
HALT: Final = 2
MOST_BYTES: Final = 64 << 20  # of a message
MOST_STEPS: Final = 1 << 17  # of a list of checkpoints
MOST_NUMBER: Final = (1 << 53) - 1
MOST_TEXT: Final = 64 << 10
MOST_NONCE: Final = 128
_SHOWN: Final = 400
_HASH: Final = 64


class Topic(StrEnum):
    """What a message is about; those after ``STOPPED`` are notes, whose bytes another room makes and reads."""

    VOTE = "vote"
    HOLD = "hold"
    BATCH = "batch"
    RESUME = "resume"
    STATE = "state"
    STOPPED = "stopped"
    ROOT = "root"
    SAVED = "saved"
    REPLAYED = "replayed"
    CLOSING = "closing"
    DISPUTE = "dispute"
    FINDING = "finding"


@dataclass(frozen=True, slots=True)
class Vote:
    """What a party wants (0 go on, 1 hold, 2 halt) and the halt request's nonce, if one caused it.

    ``saved``: the step of the newest checkpoint on its disk, -1 if there is none.
    """

    vote: int = GO_ON
    nonce: str = ""
    saved: int = -1

    @classmethod
    def of(cls, request: HaltRequest | None) -> Vote:
        """The vote that a control file asks for."""
        return cls() if request is None else cls(request.vote, request.nonce)

    @property
    def mode(self) -> str:
        return MODES[self.vote]

    def to_json(self) -> dict[str, Any]:
        return {"vote": self.vote, "nonce": self.nonce, "saved": self.saved}


@dataclass(frozen=True, slots=True)
class StepVote:
    """A party's vote at the start of a step, with its signed root of the epoch before as ``note``.

    ``stated``: its signed statement about the checkpoint of ``vote.saved``, "" where there is nothing new.
    """

    topic: ClassVar[Topic] = Topic.VOTE
    step: int
    vote: Vote = Vote()
    stated: str = ""
    note: bytes = b""

    @property
    def place(self) -> dict[str, int | str]:
        return {"step": self.step}


@dataclass(frozen=True, slots=True)
class HoldVote:
    """A party's vote in one turn of a hold."""

    topic: ClassVar[Topic] = Topic.HOLD
    step: int
    turn: int
    vote: Vote = Vote()

    @property
    def place(self) -> dict[str, int | str]:
        return {"step": self.step, "turn": self.turn}


@dataclass(frozen=True, slots=True)
class BatchTurn:
    """A party's vote while a served model waits for queries, and what waits at its desk as ``note``."""

    topic: ClassVar[Topic] = Topic.BATCH
    step: int
    turn: int
    vote: Vote = Vote()
    note: bytes = b""

    @property
    def place(self) -> dict[str, int | str]:
        return {"step": self.step, "turn": self.turn}


@dataclass(frozen=True, slots=True)
class Resume:
    """Which checkpoints a party holds verified, and by what it works.

    ``attempt`` counts the starts of the run, ``start`` is the step that the operator decided on (-1: the newest),
    ``policy`` the policy's hash in hexadecimal, ``verify`` what is proved.
    """

    topic: ClassVar[Topic] = Topic.RESUME
    steps: tuple[int, ...] = ()
    attempt: int = 0
    start: int = -1
    policy: str = ""
    verify: str = OFF

    @property
    def place(self) -> dict[str, int | str]:
        return {"attempt": self.attempt, "policy": self.policy, "start": self.start}


@dataclass(frozen=True, slots=True)
class FinalState:
    """Blinded digests (64 hexadecimal digits) of the components of the final state that a party holds, by number."""

    topic: ClassVar[Topic] = Topic.STATE
    digests: Mapping[int, str] = field(default_factory=dict)

    @property
    def place(self) -> dict[str, int | str]:
        return {}


@dataclass(frozen=True, slots=True)
class Stopped:
    """A party's last words: why it ended, and which party it blames (None: nobody). Its word, no evidence.

    ``halted``: it was asked to halt before the first step, as the others are, too.
    """

    topic: ClassVar[Topic] = Topic.STOPPED
    error: str = ""
    hint: str = ""
    party: int | None = None
    halted: bool = False

    @property
    def place(self) -> dict[str, int | str]:
        return {}


@dataclass(frozen=True, slots=True)
class AttachedNote:
    """Bytes of another room about a step or an epoch: a root, a checkpoint's statement, a list of leaves."""

    topic: Topic
    step: int = -1
    note: bytes = b""

    @property
    def place(self) -> dict[str, int | str]:
        return {"step": self.step}


@dataclass(frozen=True, slots=True)
class PairFigures:
    """What two parties measured of their link before a run: round trip in ms, out and in as the measuring end sees."""

    rtt_ms: float
    out_mib_s: float
    in_mib_s: float

    def seen_from_the_other_end(self) -> PairFigures:
        """The same link as the other party sees it."""
        return PairFigures(self.rtt_ms, self.in_mib_s, self.out_mib_s)

    @classmethod
    def parse(cls, body: bytes) -> PairFigures | Malformed:
        """What the other end measured. Total."""
        return cls.of(as_object(body, 4096))

    @classmethod
    def of(cls, found: object) -> PairFigures | Malformed:
        """Three finite numbers, and nothing else. Total."""
        names = ("rtt_ms", "out_mib_s", "in_mib_s")
        if not isinstance(found, Mapping) or set(found) != set(names):
            return Malformed("malformed measurements")
        good = [value for name in names if (value := as_float(found[name], 0.0, 1e12)) is not None]
        return cls(*good) if len(good) == len(names) else Malformed("malformed measurements")


PeerMessage = StepVote | HoldVote | BatchTurn | Resume | FinalState | Stopped | AttachedNote


@dataclass(frozen=True, slots=True)
class Heard:
    """A message and the run that it is about."""

    run: str
    message: PeerMessage


def where(message: PeerMessage) -> str:
    """At what point of the conversation a message is, in words."""
    return " ".join([message.topic, *(f"{k} {shown(v, 40)}" for k, v in message.place.items())])


def encode(run: str, message: PeerMessage) -> bytes:
    """A message as it travels."""
    found: dict[str, Any] = {"topic": message.topic.value, "run": run}
    match message:
        case StepVote():
            found |= {"step": message.step, "stated": message.stated, **message.vote.to_json()}
            found["note"] = base64.b64encode(message.note).decode()
        case HoldVote():
            found |= {"step": message.step, "turn": message.turn, **message.vote.to_json()}
        case BatchTurn():
            found |= {"step": message.step, "turn": message.turn, **message.vote.to_json()}
            found["note"] = base64.b64encode(message.note).decode()
        case Resume():
            found |= {**message.place, "steps": list(message.steps), "verify": message.verify}
        case FinalState():
            found["digests"] = {str(c): d for c, d in message.digests.items()}
        case Stopped():
            found |= {"error": message.error, "hint": message.hint}
            found |= {} if message.party is None else {"party": message.party}
            found |= {"halted": True} if message.halted else {}
        case AttachedNote():
            found |= {"step": message.step, "note": base64.b64encode(message.note).decode()}
    return sorted_json(found).encode()


class _OddError(ValueError):
    """A field that holds something else than it must; its text names the field."""


def parse(body: bytes | memoryview) -> Heard | Malformed:
    """The record that a message holds, or what is wrong with it. Total: any bytes may be given."""
    if len(body) > MOST_BYTES:
        return Malformed(f"a control message of {len(body)} bytes")
    try:
        found = json.loads(bytes(body), parse_constant=_no_number)
    except (ValueError, RecursionError):
        found = None
    topic, run = (found.get("topic"), found.get("run")) if isinstance(found, dict) else (None, None)
    if not isinstance(found, dict) or not isinstance(topic, str) or not isinstance(run, str):
        return Malformed("a malformed control message")
    if topic not in _READERS:
        return Malformed(f"a control message about {shown(topic, 40)!r}, which nothing here is about")
    try:
        return Heard(shown(run, 256), _READERS[Topic(topic)](found))
    except _OddError as odd:
        return Malformed(f"a malformed {odd}")


def note_text(data: bytes) -> str | Malformed:
    """A note that is text."""
    try:
        return _text(data.decode(), "note", MOST_TEXT)
    except (UnicodeDecodeError, _OddError):
        return Malformed("a malformed note")


def shown(value: Any, limit: int = _SHOWN) -> str:
    """Whatever it is, as it may stand in an error and in a log: short, on one line, without control characters."""
    cut = value[:limit] if isinstance(value, str) else str(value)[:limit] if isinstance(value, int | float) else ""
    return "".join(c if c.isprintable() else " " for c in cut)


# -- fields: each is exactly what is due (true is no number, and neither is 1.0), or _OddError names it ----------------


def _no_number(name: str) -> Any:
    raise ValueError(name)


def _number(value: Any, what: str, *, low: int = 0, high: int = MOST_NUMBER) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _OddError(what)
    return value


def _text(value: Any, what: str, limit: int) -> str:
    if not isinstance(value, str) or len(value) > limit:
        raise _OddError(what)
    return value


def _vote(found: Mapping[str, Any]) -> Vote:
    nonce = _text(found.get("nonce"), "vote", MOST_NONCE)
    if not nonce.isprintable():
        raise _OddError("vote")
    vote = _number(found.get("vote"), "vote", low=GO_ON, high=HALT)
    return Vote(vote, nonce, _number(found.get("saved", -1), "vote", low=-1))


def _note(found: Mapping[str, Any]) -> bytes:
    try:
        return base64.b64decode(_text(found.get("note"), "note", MOST_BYTES), validate=True)
    except ValueError:
        raise _OddError("note") from None


def _step_vote(found: Mapping[str, Any]) -> StepVote:
    stated = _text(found.get("stated", ""), "statement", MOST_TEXT)
    return StepVote(_number(found.get("step"), "step"), _vote(found), stated, _note(found))


def _hold_vote(found: Mapping[str, Any]) -> HoldVote:
    return HoldVote(_number(found.get("step"), "step"), _number(found.get("turn"), "turn"), _vote(found))


def _batch_turn(found: Mapping[str, Any]) -> BatchTurn:
    step, turn = _number(found.get("step"), "step"), _number(found.get("turn"), "turn")
    return BatchTurn(step, turn, _vote(found), _note(found))


def _resume(found: Mapping[str, Any]) -> Resume:
    listed, what = found.get("steps"), "list of checkpoints"
    if not isinstance(listed, list) or len(listed) > MOST_STEPS:
        raise _OddError(what)
    return Resume(
        tuple(_number(s, what) for s in listed),
        _number(found.get("attempt", 0), "attempt"),
        _number(found.get("start", -1), "start", low=-1),
        _text(found.get("policy", ""), "hash of the policy", _HASH),
        shown(_text(found.get("verify", OFF), "proof mode", MOST_TEXT), 40),
    )


def _final_state(found: Mapping[str, Any]) -> FinalState:
    given = found.get("digests")
    if not isinstance(given, dict) or not set(given) <= {str(c) for c in range(PARTIES)}:
        raise _OddError("list of state digests")
    return FinalState({int(c): _digest(d) for c, d in given.items()})


def _digest(value: Any) -> str:
    found = _text(value, "state digest", _HASH)
    if len(found) != _HASH or set(found) - set("0123456789abcdef"):
        raise _OddError("state digest")
    return found


def _stopped(found: Mapping[str, Any]) -> Stopped:
    """Last words count whatever they are: what cannot be shown is left out."""
    given = found.get("party")
    named = next((p for p in range(PARTIES) if type(given) is int and given == p), None)
    return Stopped(shown(found.get("error")), shown(found.get("hint")), named, found.get("halted") is True)


def _noted(topic: Topic) -> Callable[[Mapping[str, Any]], AttachedNote]:
    return lambda found: AttachedNote(topic, _number(found.get("step"), "step", low=-1), _note(found))


_READERS: Final[dict[str, Callable[[Mapping[str, Any]], PeerMessage]]] = {
    Topic.VOTE: _step_vote,
    Topic.HOLD: _hold_vote,
    Topic.BATCH: _batch_turn,
    Topic.RESUME: _resume,
    Topic.STATE: _final_state,
    Topic.STOPPED: _stopped,
    **{
        topic: _noted(topic)
        for topic in (Topic.ROOT, Topic.SAVED, Topic.REPLAYED, Topic.CLOSING, Topic.DISPUTE, Topic.FINDING)
    },
}
