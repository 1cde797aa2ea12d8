"""The immutable picture of one run. TUI, CLI, replay and detectors read this and nothing else.

The large records have no slots: folding copies one of them, all its fields, for every event (``reducing.changed``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from uvcc_console.core import pod_states
from uvcc_console.core.series import Series
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.proof_mode import Proving
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.transcript.terms.operation import Operation

EMPTY: Mapping[str, Any] = MappingProxyType({})
AGENT_PATHS = ("ssh", "file")  # the paths by which what happens on a pod is heard at all


@dataclass(frozen=True, slots=True)
class StageView:
    """One rollout stage. status: pending | running | waiting | ok | failed | skipped; the rest as in StageChanged."""

    name: str
    status: str = "pending"
    detail: str = ""
    started: float = 0.0
    ended: float = 0.0
    until: float = 0.0
    again: float = 0.0


@dataclass(frozen=True, slots=True)
class GateView:
    """One gate of the rollout: what it wanted, what was measured, and whether that is enough."""

    name: str
    ok: bool
    wanted: str
    measured: str


@dataclass(frozen=True, slots=True)
class GpuView:
    """One card: percent in use, MiB, degrees Celsius, watts; None where it did not say. ``errors``: not corrected."""

    index: int
    name: str = ""
    used: float | None = None
    memory_used: float | None = None
    memory: float | None = None
    celsius: float | None = None
    watts: float | None = None
    most_watts: float | None = None
    errors: int = 0


@dataclass(frozen=True)
class PodView:
    """One pod. ``paths`` maps a halt path to (up, since); ``trouble``: why the one through its agent is down.

    Its vital signs over the console's time: ``disk`` free MiB, ``cpu`` share in use (0 to 1), ``memory`` MiB in use,
    ``gpu`` mean utilisation in percent of all its cards; ``gpus``: what each card said last."""

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
    paths: Mapping[str, tuple[bool, float]] = field(default_factory=lambda: EMPTY)
    trouble: str = ""
    disk: Series = field(default_factory=Series)
    cpu: Series = field(default_factory=Series)
    memory: Series = field(default_factory=Series)
    gpu: Series = field(default_factory=Series)
    gpus: tuple[GpuView, ...] = ()

    @property
    def said(self) -> str:
        """What its detail tells of the pod itself, not of how far a stage is."""
        return "" if self.detail == pod_states.LOOKED_AT else self.detail


@dataclass(frozen=True)
class WorkerView:
    """One worker. ``beat``: its last heartbeat; ``begun``: the first of its step and phase, or behind a hold;
    ``beat_ts``, ``step_ts``: when the console had the last, and one of another step; ``error``, ``hint``: what its exit
    record said, heard at ``exited``; ``earlier``: its process of the attempt before, which may end once more."""

    coord: str
    pod: str = ""
    phase: str = ""
    step: int = -1
    beat_ts: float = 0.0
    step_ts: float = 0.0
    beat: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    begun: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    root_epoch: int = -1
    root: str = ""
    state: str = ""
    rc: int | None = None
    signal: str = ""
    pid: int = 0
    error: str = ""
    hint: str = ""
    exited: float = 0.0
    earlier: int = 0


@dataclass(frozen=True, slots=True)
class EpochAgreement:
    """What is known of one epoch: roots by worker and whether every pair of parties agrees so far."""

    epoch: int
    roots: Mapping[str, str] = field(default_factory=lambda: EMPTY)
    pairs: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: EMPTY)


@dataclass(frozen=True, slots=True)
class HaltView:
    """The running or last halt. ``acks``: pod -> (stage, step, checkpoint, ts). mode: hold | halt | release.

    ``gpus``: pod -> empty | used | unknown | none, once its processes are gone and its GPUs were looked at.
    """

    nonce: str = ""
    mode: str = ""
    by: str = ""
    drill: bool = False
    asked: float = 0.0
    acks: Mapping[str, tuple[str, int, str, float]] = field(default_factory=lambda: EMPTY)
    gpus: Mapping[str, str] = field(default_factory=lambda: EMPTY)
    done: bool = False
    verified: int = 0
    total: int = 0
    step: int = -1
    seconds: float = 0.0
    last_drill_s: float | None = None


@dataclass(frozen=True, slots=True)
class FlightView:
    """The newest reading of the flight recorders: see ``FlightRead``."""

    ts: float
    folder: str
    newest: Mapping[str, str]
    silent: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WaitView:
    """A long wait between parties that a worker told of, and why, if it knows: nothing but a missing connection."""

    peer: str
    since_s: float
    ts: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class OutageView:
    """What stands between the parties, a relay or a broker, is out of reach: since ``ts``, of a pod's workers."""

    url: str
    why: str
    ts: float


@dataclass(frozen=True)
class PairView:
    """What a worker last said of its traffic with its peer in another party; totals since its process ``began``.

    Bytes with frames and repeats; ``waited_s``: for this peer's messages; ``round_trip_s``: 0.0 if none was measured.
    ``out_s``, ``in_s``: bytes a second between the last two sayings, ``wait_share``: the part of that time that it
    waited; -1.0 before there are two. ``said``: the worker's own time, ``ts``: the console's.
    """

    coord: str
    party: int
    peer: int
    began: float
    ts: float
    said: float
    bytes_out: int = 0
    bytes_in: int = 0
    messages: int = 0
    retransmits: int = 0
    waited_s: float = 0.0
    round_trip_s: float = 0.0
    out_s: float = -1.0
    in_s: float = -1.0
    wait_share: float = -1.0


@dataclass(frozen=True, slots=True)
class TriageView:
    """One change that was tried: where the run stood, and what came of it (\"\" while it still runs)."""

    rung: str
    step: int
    ts: float = 0.0
    outcome: str = ""


@dataclass(frozen=True, slots=True)
class ForetoldView:
    """What the plan said of a step of the full run: see ``PlanForetold``."""

    steps: int
    rounds: float
    bytes: float
    seconds: float
    rtt_s: float
    low: float = 0.0
    high: float = 0.0
    early: float = 1.0
    more: float = 0.0
    here: bool = False
    audits: float = 0.0
    audited: float = 0.0
    audit_rounds: float = 0.0
    audit_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class ForecastView:
    """The forecast of the full run with its errors, and, once it has ended, what it really took."""

    steps: int
    seconds: float
    seconds_error: float
    cost: float
    cost_error: float
    bytes: float
    bytes_error: float
    scored: bool = False
    took_s: float = 0.0
    cost_was: float = 0.0
    bytes_were: float = 0.0
    sigmas: float = 0.0
    bytes_sigmas: float = 0.0
    beside_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One line of the merged event log. ``area``: what it is about, where that is known.

    ``text`` is the same for every pod that says the same, ``detail`` what is this pod's own: hashes, numbers.
    ``alert``: the name of the alert that the line is, by which its runbook is found.
    """

    ts: float
    level: str
    source: str
    text: str
    area: str = ""
    detail: str = ""
    alert: str = ""


@dataclass(frozen=True, slots=True)
class VerdictView:
    """The verifier's word at ``ts``. What to show of it says ``answers.shown``; fields: see ``events.Verdict``."""

    ok: bool
    global_root: str
    sid_job: str
    detail: str
    bundle: str
    ts: float = 0.0
    values: Mapping[str, float] = field(default_factory=lambda: EMPTY)
    result_hashes: tuple[str, ...] = ()
    run_root: str = ""
    level: str = ""
    pinned: bool = False
    files: Mapping[str, str] = field(default_factory=lambda: EMPTY)


@dataclass(frozen=True, slots=True)
class ReportView:
    """What a pod said of a worker's result."""

    pod: str
    coord: str
    phase: str
    result_hash: str
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class DomainView:
    """Another domain, by its own signed reports: see ``events.DomainReported``. ``ts``: when it was heard last."""

    party: int
    stage: str
    status: str
    step: int = -1
    steps: int = 0
    detail: str = ""
    ts: float = 0.0

    def words(self) -> str:
        """Stage, status, step and detail in one line."""
        step = f", step {max(0, self.step)} of {self.steps}" if self.steps else ""
        return f"{self.stage} {self.status}{step}" + (f": {self.detail}" if self.detail else "")


@dataclass(frozen=True)
class Snapshot:
    """One run at one moment. ``seq`` is the journal sequence it reflects.

    ``status``: planned | running | halted | failed while the run lives (the last two can be resumed); once ``ended``
    is set (a time stamp), the final word of ``RunEnded``. ``seed``, ``patient``, ``apart``: see ``RunCreated``.
    ``checkpoints``: per pod the newest (step, hash); ``home``: the newest that was fetched and verified. ``facts``:
    what each directory's lead worker said it runs. ``waits``: by worker, or by pod where the event does not name one.
    ``malformed``: how many lines of a pod, or of the journal itself, could not be used. ``results``, ``result_hashes``,
    ``reports`` are the pods' words, ``verdicts`` the verifier's; what of them is shown says ``answers.shown`` alone.
    """

    run: str = ""
    profile_name: str = ""
    profile: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    job_kind: str = ""
    status: str = "planned"
    detail: str = ""
    created: float = 0.0
    updated: float = 0.0
    seq: int = 0
    phase: str = ""
    phase_began: float = 0.0  # when its workers were last told to start
    engine_run: str = ""
    attempt: int = 0
    resumes: int = 0  # how often workers went on from a checkpoint, over all phases
    masks: int = 0  # the attempt that the masks depend on: roots of another are not comparable
    first_step: int = 0  # of the policy that is in force: its epoch e is step first_step + e
    steps_planned: int = 0
    sid_job: str = ""
    replicas: int = 1
    pipeline_stages: int = 1
    tensor: int = 1
    stages: tuple[StageView, ...] = ()
    gates: tuple[GateView, ...] = ()
    pods: Mapping[str, PodView] = field(default_factory=lambda: EMPTY)
    workers: Mapping[str, WorkerView] = field(default_factory=lambda: EMPTY)
    series: Mapping[str, Mapping[str, Series]] = field(default_factory=lambda: EMPTY)
    agreement: tuple[EpochAgreement, ...] = ()
    agreed_epoch: int = -1
    fork: str = ""
    halt: HaltView = field(default_factory=HaltView)
    hourly: float = 0.0
    spent: float = 0.0
    forecast: float = 0.0
    runway_h: float | None = None
    clock_shift: float = 0.0  # seconds from the wall clock to the run's own, which no setting of the clock moves
    results: Mapping[str, Mapping[str, float]] = field(default_factory=lambda: EMPTY)
    result_hashes: Mapping[str, str] = field(default_factory=lambda: EMPTY)
    reports: Mapping[str, ReportView] = field(default_factory=lambda: EMPTY)
    verdicts: Mapping[str, VerdictView] = field(default_factory=lambda: EMPTY)
    alerts: tuple[LogEntry, ...] = ()
    log: tuple[LogEntry, ...] = ()
    leaks: tuple[str, ...] = ()
    checkpoints: Mapping[str, tuple[int, str]] = field(default_factory=lambda: EMPTY)
    home: Mapping[str, tuple[int, str]] = field(default_factory=lambda: EMPTY)
    refused_checkpoints: Mapping[str, str] = field(default_factory=lambda: EMPTY)
    sample: str = ""  # what a finished language model wrote, in the pod's words
    repeated: Mapping[str, Any] = field(default_factory=lambda: EMPTY)  # of steps that a resume did again
    failed_proofs: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: EMPTY)  # by pod, of this phase
    watchdog_dumps: int = 0  # stalls that the workers' own watchdogs saw in this phase
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: EMPTY)
    triage: tuple[TriageView, ...] = ()
    changed_settings: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    flight: FlightView | None = None
    waits: Mapping[str, WaitView] = field(default_factory=lambda: EMPTY)
    outages: Mapping[str, OutageView] = field(default_factory=lambda: EMPTY)  # by pod, of this attempt
    pairs: Mapping[str, PairView] = field(default_factory=lambda: EMPTY)  # by worker and peer, e.g. p0r0s0t0>1
    foretold: ForetoldView | None = None
    prediction: ForecastView | None = None
    consents: tuple[tuple[str, str], ...] = ()
    domains: Mapping[int, DomainView] = field(default_factory=lambda: MappingProxyType({}))  # the others', federated
    ended: float = 0.0
    followed: str = ""  # the folder that is only followed, as it was written: nothing there is ever ended
    no_halt: str = ""  # why nothing can be halted there; "" where it can, as in every run of the console's own
    seed: int | None = None
    patient: bool = False
    apart: bool = False
    malformed: Mapping[str, int] = field(default_factory=lambda: EMPTY)
    odd: tuple[tuple[str, str], ...] = ()  # (whose, kind) of journal rows that were told to be unusable

    @property
    def prefix(self) -> str:
        """What the names of its pods begin with at their provider: its own, or of the run that kept them for it."""
        kept = self.profile.get("fleet", EMPTY)
        return (str(kept.get("attach_prefix", "")) if isinstance(kept, Mapping) else "") or f"uvcc-{self.run}-"

    @property
    def proves(self) -> bool:
        """Whether this kind of job signs a transcript: only private training yields a proof bundle."""
        return self.job_kind not in ("lm", "command")

    @property
    def ended_early(self) -> bool:
        """Whether validation ended the phase's training before the last planned step (``job.patience``)."""
        job = self.profile.get("job")
        patient = isinstance(job, Mapping) and bool(job.get("patience"))
        return patient and self.step < self.steps_planned and {w.phase for w in self.workers.values()} == {"done"}

    @property
    def operation(self) -> tuple[str, ...]:
        """Who could look into this run, how traffic is protected, what is proved; nothing of jobs without secrets."""
        if not self.proves:
            return ()
        sizes = (max(1, n) for n in (self.replicas, self.pipeline_stages, self.tensor))
        return Operation.of(Topology(*sizes), apart=self.apart).sentences(self.proving)

    @property
    def proving(self) -> Proving:
        """What is proved of a private run's computation (``contract.proof_mode``); nothing where that is unreadable."""
        job = self.profile.get("job")
        try:
            return Proving.of_job(job) if isinstance(job, Mapping) else Proving()
        except ConfigError:
            return Proving()

    @property
    def stage(self) -> StageView | None:
        """The stage that is running or waiting, else the last one that ended."""
        ended = [s for s in self.stages if s.status in ("ok", "failed", "skipped")]
        return next((s for s in self.stages if s.status in ("running", "waiting")), ended[-1] if ended else None)

    @property
    def agreed_step(self) -> int:
        """The training step of the newest epoch in which all agree; -1 before the first."""
        return self.first_step + self.agreed_epoch if self.agreed_epoch >= 0 else -1

    @property
    def step(self) -> int:
        """How many steps every worker has done; -1 before the first heartbeat. Every surface shows this number."""
        return min((w.step for w in self.workers.values()), default=-1)
