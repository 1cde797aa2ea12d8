"""Everything that can happen to a run, as frozen records.

Operations append events to the journal; the reducer folds them; nothing else holds state. An event is written
once and never changed, so a field is only ever added, with a default. Here is what the console itself does and
decides; what pods report is in ``reported``, and both are reached as ``events.Name``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from uvcc_console.core.events.event_base import Event as Event
from uvcc_console.core.events.event_base import LinesMalformed as LinesMalformed
from uvcc_console.core.events.event_base import checks as checks
from uvcc_console.core.events.event_base import event
from uvcc_console.core.events.event_base import from_json as from_json
from uvcc_console.core.events.event_base import kinds as kinds
from uvcc_console.core.events.event_base import to_json as to_json
from uvcc_console.core.events.reported import CursorMoved as CursorMoved
from uvcc_console.core.events.reported import EngineEvent as EngineEvent
from uvcc_console.core.events.reported import HeartbeatRead as HeartbeatRead
from uvcc_console.core.events.reported import LogLines as LogLines
from uvcc_console.core.events.reported import Metric as Metric
from uvcc_console.core.events.reported import PodTelemetry as PodTelemetry
from uvcc_console.core.events.reported import ResultReported as ResultReported
from uvcc_console.core.events.reported import RootReported as RootReported
from uvcc_console.core.events.reported import WorkerProcess as WorkerProcess


@event("run_created")
@dataclass(frozen=True, slots=True, kw_only=True)
class RunCreated(Event):
    """A rollout was planned. ``profile`` is the resolved profile; ``stages`` the plan in order.

    ``seed`` makes identities and nonces repeatable (demonstrations only); None draws them fresh. ``patient``: somebody
    sits in front of it, so every failed stage waits for a decision, not only those of the training itself. ``apart``:
    it is one domain's part of a run that three domains conduct.
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
    apart: bool = False


@event("stage")
@dataclass(frozen=True, slots=True, kw_only=True)
class StageChanged(Event):
    """A rollout stage moved: pending | running | ok | failed | skipped | waiting.

    ``until`` > 0: the pods are kept and a decision (resume, retry, skip) is waited for until that time; ``again`` > 0:
    at that time it goes on by itself.
    """

    name: str
    status: str
    detail: str = ""
    until: float = 0.0
    again: float = 0.0


@event("gate")
@dataclass(frozen=True, slots=True, kw_only=True)
class GateMeasured(Event):
    """One gate with what was wanted and what was measured."""

    name: str
    ok: bool
    wanted: str
    measured: str


@event("pod")
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


@event("link")
@dataclass(frozen=True, slots=True, kw_only=True)
class LinkChanged(Event):
    """The console's path to a pod (path: ssh | relay | peer | lease | api) went up or down."""

    pod: str
    path: str
    up: bool
    detail: str = ""


@event("phase")
@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseStarted(Event):
    """The smoke or full job begins under ``engine_run`` (the run id on the pods); ``attempt`` counts resumes.

    ``certificate``: SHA-256 of the halt certificate that the pods' checkpoints were held against. ``start``: the step
    that the operator chose to go on from, -1 if nobody did; ``masks``: the attempt number that the masks depend on.
    ``first_step``: what was done under an earlier policy, before a pod was replaced; epoch e is ``first_step`` + e.
    """

    phase: str
    engine_run: str
    steps: int
    sid_job: str
    attempt: int = 0
    certificate: str = ""
    start: int = -1
    masks: int = 0
    first_step: int = 0


@event("fork")
@dataclass(frozen=True, slots=True, kw_only=True)
class ForkDetected(Event):
    """Two parties disagree about what they exchanged in an epoch."""

    epoch: int
    parties: list[int]
    detail: str = ""


@event("halt_requested")
@dataclass(frozen=True, slots=True, kw_only=True)
class HaltRequested(Event):
    """Somebody wants the run held, halted or released. Written first, or, by the sidecar's door, once it is sent."""

    nonce: str
    mode: str
    by: str
    drill: bool = False
    reason: str = ""


@event("halt_ack")
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


@event("halt_done")
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


@event("cost")
@dataclass(frozen=True, slots=True, kw_only=True)
class CostTick(Event):
    """Spending so far and its rate, in US dollars. ``forecast``: what the run may cost at most, by its limits. ``at``:
    the run's own time, which no setting of the clock moves."""

    hourly: float
    spent: float
    forecast: float = 0.0
    runway_h: float | None = None
    at: float = 0.0


@event("verdict")
@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseVerdict(Event):
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


@event("alert")
@dataclass(frozen=True, slots=True, kw_only=True)
class Alert(Event):
    """Something the operator should see: level info | warn | error, evidence and hint."""

    level: str
    name: str
    text: str
    hint: str = ""
    subject: str = ""


@event("checkpoint_home")
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointHome(Event):
    """A checkpoint of ``pod`` was fetched and verified here; ``path`` is relative to the run's folder."""

    pod: str
    engine_run: str
    step: int
    sha256: str
    path: str
    bytes: int = 0


@event("intent")
@dataclass(frozen=True, slots=True, kw_only=True)
class Intent(Event):
    """Somebody asked for something: resume | teardown | stop | retry | skip | confirm, ...

    ``args["from"]`` of a resume: the step of the checkpoint that was chosen.
    """

    action: str
    by: str
    args: dict[str, Any] = field(default_factory=dict)


@event("action_done")
@dataclass(frozen=True, slots=True, kw_only=True)
class ActionDone(Event):
    """What became of an action on a pod that an intent asked for: what it did, or why it could not be done.

    ``order``: what whoever asked calls it, if anything: two may ask for the same of the same pod.
    """

    action: str
    pod: str
    ok: bool
    detail: str = ""
    order: str = ""


@event("flight")
@dataclass(frozen=True, slots=True, kw_only=True)
class FlightRead(Event):
    """The workers' flight recorders were read: who answered, what is wrong, and each worker's newest collective.

    ``folder``: where the answers lie, relative to the run's.
    """

    folder: str
    newest: dict[str, str]
    silent: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)


@event("settings")
@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsChanged(Event):
    """From its next attempt on the run's trainer has these settings (``section.key``); None takes a change back."""

    changes: dict[str, Any]
    by: str = ""


@event("triage")
@dataclass(frozen=True, slots=True, kw_only=True)
class TriageTried(Event):
    """The run goes on from step ``step`` with one more change: ``rung`` of the triage ladder."""

    rung: str
    step: int
    by: str = ""


@event("consent")
@dataclass(frozen=True, slots=True, kw_only=True)
class Consent(Event):
    """A domain signed for something that needs the word of several: full | resume-N | terminate.

    ``own``: it is this console's own domain that signed.
    """

    what: str
    by: str
    own: bool = False


@event("pod_vouched")
@dataclass(frozen=True, slots=True, kw_only=True)
class PodVouched(Event):
    """Another domain vouches, by its signed roster, for the identity of one of its pods."""

    pod: str
    party: int
    replica: int
    identity: str


@event("domain")
@dataclass(frozen=True, slots=True, kw_only=True)
class DomainReported(Event):
    """What another domain's conductor signed about itself: its stage, and ``step`` of ``steps`` in a phase.

    ``status``: running | reached | failed | halt | silent; only the last is this console's own finding.
    """

    party: int
    stage: str
    status: str
    step: int = -1
    steps: int = 0
    detail: str = ""


@event("plan_foretold")
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanForetold(Event):
    """What the plan says of a step of the full run, from a rehearsal: message rounds of the worker that has
    most, those of its microbatches added up, and bytes of all workers without frames (0: not foretold); seconds over
    links with a round trip of ``rtt_s``.

    ``low`` and ``high``: the range of the seconds, 0 where none is said; ``early``: how many times as long a run's
    second and third step take; ``more``: seconds that a step takes longer than one of the smoke; ``here``: on the
    processors that were rehearsed on.
    ``audits``, ``audited``: under ``verify: covert``, how many audits a step has on average and in which share of the
    steps there is one; ``audit_rounds``, ``audit_bytes``: what of rounds and bytes such a step, or one audit, adds.
    """

    steps: int
    rounds: float
    bytes: float
    seconds: float
    rtt_s: float = 0.0
    low: float = 0.0
    high: float = 0.0
    early: float = 1.0
    more: float = 0.0
    here: bool = False
    audits: float = 0.0
    audited: float = 0.0
    audit_rounds: float = 0.0
    audit_bytes: float = 0.0


@event("forecast")
@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast(Event):
    """What the smoke says of the full run: value and error (one standard deviation) of seconds, dollars and bytes.

    ``beside_s``: what of the seconds are no steps, but starting and ending.
    """

    steps: int
    seconds: float
    seconds_error: float
    cost: float = 0.0
    cost_error: float = 0.0
    bytes: float = 0.0
    bytes_error: float = 0.0
    beside_s: float = 0.0


@event("forecast_scored")
@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastScored(Event):
    """What the full run really took; ``sigmas``: how many errors the forecast of its time (of its bytes) was off."""

    seconds: float
    cost: float
    bytes: float
    sigmas: float
    bytes_sigmas: float = 0.0


@event("followed")
@dataclass(frozen=True, slots=True, kw_only=True)
class Followed(Event):
    """A folder that the console did not start is followed (``uvcc adopt``): ``target`` as it was written.

    ``contract``: it has the run contract, so a halt is possible; ``no_halt`` says why not where it is not.
    """

    pod: str
    target: str
    contract: bool
    no_halt: str = ""


@event("run_ended")
@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded(Event):
    """The rollout is over: ok | failed | halted | torn_down. ``leaks`` must be empty."""

    status: str
    detail: str = ""
    leaks: list[str] = field(default_factory=list)
