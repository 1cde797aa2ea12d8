"""Everything that can happen to a run, as frozen records.

Operations append events to the journal; the reducer folds them; nothing else holds state. An event is written
once and never changed, so a field is only ever added, with a default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import NoneType, UnionType
from typing import Any, ClassVar, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from uvcc_engine.contract.outside import WIDE, moment
from uvcc_engine.contract.text import clean

_REGISTRY: dict[str, type[Event]] = {}
_E = TypeVar("_E", bound="type[Event]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events. ``ts`` is the console's wall clock in seconds (0.0 = to be stamped by the journal)."""

    kind: ClassVar[str] = ""
    ts: float = 0.0


def _event(kind: str) -> Any:
    def register(cls: _E) -> _E:
        cls.kind = kind
        _REGISTRY[kind] = cls
        return cls

    return register


@_event("run_created")
@dataclass(frozen=True, slots=True, kw_only=True)
class RunCreated(Event):
    """A rollout was planned. ``profile`` is the resolved profile; ``stages`` the plan in order.

    ``seed`` makes identities and nonces repeatable (demonstrations only); None draws them fresh. ``patient``: somebody
    sits in front of it, so every failed stage waits for a decision, not only those of the training itself.
    """

    run: str
    profile_name: str
    job_kind: str
    replicas: int
    pipeline_stages: int
    tensor: int
    stages: list[str]
    profile: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    patient: bool = False


@_event("stage")
@dataclass(frozen=True, slots=True, kw_only=True)
class StageChanged(Event):
    """A rollout stage moved: pending | running | ok | failed | skipped | waiting.

    ``until`` > 0: the pods are kept and a decision (resume, retry, skip) is waited for until that time.
    """

    name: str
    status: str
    detail: str = ""
    until: float = 0.0


@_event("gate")
@dataclass(frozen=True, slots=True, kw_only=True)
class GateMeasured(Event):
    """One gate with what was wanted and what was measured."""

    name: str
    ok: bool
    wanted: str
    measured: str


@_event("pod")
@dataclass(frozen=True, slots=True, kw_only=True)
class PodChanged(Event):
    """A pod's life: planned | creating | booting | ready | agent | lost | deleting | gone | failed.

    ``address`` is ``user@host:port``; ``host_key`` the pinned SSH host key (``ssh-ed25519 AAAA...``); ``identity`` the
    OpenSSH public key of the party identity born on the pod. Empty values keep what was known.
    """

    pod: str
    party: int
    replica: int
    provider: str
    state: str
    address: str = ""
    price_hr: float = 0.0
    detail: str = ""
    identity: str = ""
    host_key: str = ""


@_event("link")
@dataclass(frozen=True, slots=True, kw_only=True)
class LinkChanged(Event):
    """The console's path to a pod (path: ssh | relay | peer | lease | api) went up or down."""

    pod: str
    path: str
    up: bool
    detail: str = ""


@_event("phase")
@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseStarted(Event):
    """The smoke or full job begins under ``engine_run`` (the run id on the pods); ``attempt`` counts resumes.

    ``certificate``: SHA-256 of the halt certificate that the pods' checkpoints were held against. ``start``: the step
    that the operator chose to go on from, -1 if nobody did; ``masks``: the attempt number that the masks depend on.
    """

    phase: str
    engine_run: str
    steps: int
    sid_job: str
    attempt: int = 0
    certificate: str = ""
    start: int = -1
    masks: int = 0


@_event("heartbeat")
@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat(Event):
    """One heartbeat record of one worker, as written on the pod (``record``: contract/records.py)."""

    pod: str
    coord: str
    record: dict[str, Any]


@_event("metric")
@dataclass(frozen=True, slots=True, kw_only=True)
class Metric(Event):
    """One row of training.csv (or val.csv with split="val") of one worker."""

    coord: str
    step: int
    values: dict[str, float]
    split: str = "train"


@_event("engine")
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEvent(Event):
    """One line of a pod's events.jsonl."""

    pod: str
    level: str
    event: str
    fields: dict[str, Any]
    at: float = 0.0


@_event("lines")
@dataclass(frozen=True, slots=True, kw_only=True)
class LogLines(Event):
    """Plain text lines of one file on one pod, in order."""

    pod: str
    src: str
    lines: list[str]


@_event("worker")
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProcess(Event):
    """A worker process started or exited. ``signal`` names what ended it, if a signal did."""

    pod: str
    coord: str
    state: str
    pid: int = 0
    rc: int | None = None
    signal: str = ""


@_event("root")
@dataclass(frozen=True, slots=True, kw_only=True)
class RootReported(Event):
    """A worker finalised an epoch: its root and, per peer, the digest of the leaves both should hold."""

    coord: str
    epoch: int
    root: str
    pairs: dict[str, str] = field(default_factory=dict)


@_event("fork")
@dataclass(frozen=True, slots=True, kw_only=True)
class ForkDetected(Event):
    """Two parties disagree about what they exchanged in an epoch."""

    epoch: int
    parties: list[int]
    detail: str = ""


@_event("telemetry")
@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry(Event):
    """A pod's vital signs, now and then: share of its processors, memory in use and disk free (MiB), its GPUs."""

    pod: str
    cpu: float = 0.0
    mem_mib: float = 0.0
    disk_free_mib: float = 0.0
    gpus: list[dict[str, Any]] = field(default_factory=list)


@_event("cursor")
@dataclass(frozen=True, slots=True, kw_only=True)
class CursorMoved(Event):
    """How far a pod's files have become events: ``run/file`` -> [inode, offset]. Written with those events."""

    pod: str
    cursors: dict[str, list[int]]


@_event("halt_requested")
@dataclass(frozen=True, slots=True, kw_only=True)
class HaltRequested(Event):
    """Somebody wants the run held, halted or released. Written first, or, by the sidecar's door, once it is sent."""

    nonce: str
    mode: str
    by: str
    drill: bool = False
    reason: str = ""


@_event("halt_ack")
@dataclass(frozen=True, slots=True, kw_only=True)
class HaltAck(Event):
    """Evidence from one pod for one nonce: sent | seen | held | halted | gone | released | unknown.

    ``gpu`` comes with a later word about a pod whose processes are gone: empty | used | unknown, or none without a GPU.
    """

    pod: str
    nonce: str
    stage: str
    step: int = -1
    checkpoint: str = ""
    detail: str = ""
    path: str = "ssh"
    gpu: str = ""


@_event("halt_done")
@dataclass(frozen=True, slots=True, kw_only=True)
class HaltDone(Event):
    """The ladder ended: how many pods verified at which step in how many seconds.

    ``certificate``: SHA-256 of the signed halt certificate; empty where not every pod was verified, or for a drill.
    """

    nonce: str
    mode: str
    verified: int
    total: int
    step: int
    seconds: float
    drill: bool = False
    certificate: str = ""


@_event("cost")
@dataclass(frozen=True, slots=True, kw_only=True)
class CostTick(Event):
    """Spending so far and its rate, in US dollars. ``at``: the run's own time, which no setting of the clock moves."""

    hourly: float
    spent: float
    forecast: float = 0.0
    runway_h: float | None = None
    at: float = 0.0


@_event("result")
@dataclass(frozen=True, slots=True, kw_only=True)
class ResultReported(Event):
    """One worker's final result as its pod streamed it: hash and what the policy reveals. Nothing of it is verified."""

    coord: str
    phase: str
    result_hash: str
    values: dict[str, float]
    pod: str = ""


@_event("verdict")
@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict(Event):
    """The verifier's word on a proof bundle, with what its certificate says of the result.

    ``files``: SHA-256 (hex) of every file that it was given, by name relative to the phase's folder; ``level``: see
    ``transcript.verifier.Certificate``; ``pinned``: whether the identities were those that the console had seen itself.
    """

    phase: str
    ok: bool
    global_root: str
    sid_job: str
    detail: str = ""
    bundle: str = ""
    values: dict[str, float] = field(default_factory=dict)
    result_hashes: list[str] = field(default_factory=list)
    run_root: str = ""
    level: str = ""
    pinned: bool = False
    files: dict[str, str] = field(default_factory=dict)


@_event("alert")
@dataclass(frozen=True, slots=True, kw_only=True)
class Alert(Event):
    """Something the operator should see: level info | warn | error, evidence and remedy."""

    level: str
    name: str
    text: str
    remedy: str = ""
    subject: str = ""


@_event("checkpoint_home")
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointHome(Event):
    """A checkpoint of ``pod`` was fetched and verified here; ``path`` is relative to the run's folder."""

    pod: str
    engine_run: str
    step: int
    sha256: str
    path: str
    bytes: int = 0


@_event("intent")
@dataclass(frozen=True, slots=True, kw_only=True)
class Intent(Event):
    """Somebody asked for something: resume | teardown | stop | retry | skip | confirm, ...

    ``args["from"]`` of a resume: the step of the checkpoint that was chosen.
    """

    action: str
    by: str
    args: dict[str, Any] = field(default_factory=dict)


@_event("action_done")
@dataclass(frozen=True, slots=True, kw_only=True)
class ActionDone(Event):
    """What became of an action on a pod that an intent asked for: what it did, or why it could not be done."""

    action: str
    pod: str
    ok: bool
    detail: str = ""


@_event("flight")
@dataclass(frozen=True, slots=True, kw_only=True)
class FlightRead(Event):
    """The workers' flight recorders were read: who answered, what is wrong, and each worker's newest collective.

    ``folder``: where the answers lie, relative to the run's.
    """

    folder: str
    newest: dict[str, str]
    silent: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)


@_event("triage")
@dataclass(frozen=True, slots=True, kw_only=True)
class TriageTried(Event):
    """The run goes on from step ``step`` with one more change: ``rung`` of the triage ladder."""

    rung: str
    step: int
    by: str = ""


@_event("consent")
@dataclass(frozen=True, slots=True, kw_only=True)
class Consent(Event):
    """A domain signed for something that needs the word of several: full | terminate."""

    what: str
    by: str


@_event("forecast")
@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast(Event):
    """What the smoke says of the full run: value and error (one standard deviation) of seconds, dollars and bytes."""

    steps: int
    seconds: float
    seconds_error: float
    cost: float = 0.0
    cost_error: float = 0.0
    bytes: float = 0.0
    bytes_error: float = 0.0


@_event("forecast_scored")
@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastScored(Event):
    """What the full run really took; ``sigmas``: how many errors the forecast of its time (of its bytes) was off."""

    seconds: float
    cost: float
    bytes: float
    sigmas: float
    bytes_sigmas: float = 0.0


@_event("run_ended")
@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded(Event):
    """The rollout is over: ok | failed | halted | torn_down. ``leaks`` must be empty."""

    status: str
    detail: str = ""
    leaks: list[str] = field(default_factory=list)


@_event("malformed")
@dataclass(frozen=True, slots=True, kw_only=True)
class Malformed(Event):
    """Lines that could not be used: ``count`` of them from ``where`` (a pod, or ``journal``), with a ``sample`` now and
    then. Written where a pod's lines come in, and read in place of a journal row that cannot be an event."""

    where: str
    count: int = 1
    src: str = ""
    sample: str = ""


def to_json(event: Event) -> dict[str, Any]:
    """The event's fields without its kind."""
    return {f.name: getattr(event, f.name) for f in dataclasses.fields(event) if f.name != "ts"}


def from_json(kind: str, ts: object, data: object) -> Event | None:
    """Read an event back; None for a kind this version does not know. Unknown fields are dropped. Never raises.

    Whatever is not of its field's type, or lacks a field, comes back as :class:`Malformed`. Text is cleaned: a journal
    may be older than the care that is taken of what comes in.
    """
    cls = _REGISTRY.get(kind)
    if cls is None:
        return None
    at = moment(ts)
    if at is None or not isinstance(data, Mapping):
        return _malformed(kind, at, data, "no object" if at is not None else "no time")
    checks = _checks(kind)
    try:
        fields = {name: check(data[name]) for name, check in checks.items() if name in data}
        return cls(ts=at, **fields)
    except (TypeError, ValueError, RecursionError) as e:
        return _malformed(kind, at, data, str(e))


def _malformed(kind: str, ts: float | None, data: object, why: str) -> Malformed:
    pod = data.get("pod") if isinstance(data, Mapping) else None
    where = clean(pod, 32) if isinstance(pod, str) and pod else "journal"
    return Malformed(ts=ts or 0.0, where=where, src=f"journal, {kind}", sample=clean(why, 200))


_Check = Callable[[Any], Any]
_TEXT: Final = 1 << 16


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"text wanted, got {type(value).__name__}")
    return value if value.isprintable() and len(value) <= _TEXT else clean(value, _TEXT)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -WIDE <= value <= WIDE:
        raise TypeError(f"whole number wanted, got {type(value).__name__}")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"number wanted, got {type(value).__name__}")
    if isinstance(value, int) and not -WIDE <= value <= WIDE:
        raise TypeError("a number too large")
    return float(value)


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"true or false wanted, got {type(value).__name__}")
    return value


def _any(value: Any) -> Any:
    """Any JSON value with its text cleaned."""
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, dict):
        return {_text(k): _any(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_any(v) for v in value]
    if isinstance(value, int) and not -WIDE <= value <= WIDE:
        return None  # nothing that counts so far, and too large for a float
    return value


def _list(inner: _Check) -> _Check:
    def check(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise TypeError(f"list wanted, got {type(value).__name__}")
        return [inner(v) for v in value]

    return check


def _texts(value: Any) -> list[str]:
    """A list of texts: log lines, which come by the hundred, mostly with nothing to clean."""
    if not isinstance(value, list):
        raise TypeError(f"list wanted, got {type(value).__name__}")
    joined = "".join(value)
    return value if joined.isprintable() and len(joined) <= _TEXT else [_text(v) for v in value]


def _object(inner: _Check) -> _Check:
    def check(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise TypeError(f"object wanted, got {type(value).__name__}")
        return {_text(k): inner(v) for k, v in value.items()}

    return check


def _own_object(value: Any) -> dict[str, Any]:
    """The operator's own words (a profile, an intent's arguments) stay as they were written."""
    if not isinstance(value, dict):
        raise TypeError(f"object wanted, got {type(value).__name__}")
    return value


def _or_none(inner: _Check) -> _Check:
    return lambda value: None if value is None else inner(value)


_BY_TYPE: Final[dict[Any, _Check]] = {str: _text, int: _whole, float: _number, bool: _truth, Any: _any}


def _check_of(wanted: Any) -> _Check:
    """What holds a value against a field's annotation."""
    if wanted in _BY_TYPE:
        return _BY_TYPE[wanted]
    origin, args = get_origin(wanted), get_args(wanted)
    if origin is list and args[0] is str:
        return _texts
    if origin is list:
        return _list(_check_of(args[0]))
    if origin is dict and args[0] is str:
        return _object(_check_of(args[1]))
    if origin in (Union, UnionType) and len(args) == 2 and args[1] is NoneType:
        return _or_none(_check_of(args[0]))
    raise TypeError(f"no check for {wanted}")  # an event's field of a new form: give it one


@cache
def _checks(kind: str) -> dict[str, _Check]:
    cls = _REGISTRY[kind]
    hints = get_type_hints(cls)
    found = {f.name: _check_of(hints[f.name]) for f in dataclasses.fields(cls) if f.name != "ts"}
    for name in ("profile", "args"):
        if name in found:
            found[name] = _own_object
    return found
