"""What a profile may say: strict models, every field with its meaning and default."""

from __future__ import annotations

import re
from functools import cache
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, ConfigDict, Field, PrivateAttr, WithJsonSchema, create_model, model_validator

from uvcc_console.core.rungs import HaltRung
from uvcc_console.fleet.by_party import settings_for
from uvcc_console.fleet.provider_kinds import FleetSettings, Strict, kind_of
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job import owner_files
from uvcc_engine.contract.job.column_join import ColumnJoin, KeyForm
from uvcc_engine.contract.job.link_spec import LinkKind
from uvcc_engine.contract.job.loss_weights import check_weighting
from uvcc_engine.contract.job.private_job import (
    BOUNDS,
    DEFAULTS,
    Device,
    Objective,
    OptimizerName,
    Reveal,
    Rounds,
    Schedule,
    StandardiseBy,
    Task,
)
from uvcc_engine.contract.job.proof_mode import OFF, ProofMode, Proving, why_not
from uvcc_engine.contract.job.served_clients import check_clients, misplaced
from uvcc_engine.contract.job.spec import LM_SEED
from uvcc_engine.contract.job.topology import MOST_OF_PROFILE, PARTIES

SECRET_NAME: Final = "^[A-Za-z_][A-Za-z0-9_]{0,63}$"
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(value: Any) -> Any:
    """``90``, ``"90s"``, ``"15m"``, ``"1h30m"`` -> seconds. Anything unreadable is left for the model to refuse."""
    if not isinstance(value, str):
        return value
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|[smhd])", value)
    if not parts or "".join(n + u for n, u in parts) != value.replace(" ", ""):
        raise ValueError("a duration like 90s, 15m or 1h")
    return sum(float(n) * _UNITS[u] for n, u in parts)


_DURATION: dict[str, Any] = {
    "description": "seconds, or a duration like 90s, 15m or 1h30m",
    "anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": "^([0-9.]+ *[smhd]? *)+$"}],
}
Seconds = Annotated[float, BeforeValidator(seconds), Field(ge=0), WithJsonSchema(_DURATION, mode="validation")]


def _model(value: Any) -> Any:
    if isinstance(value, str | list) or (isinstance(value, dict) and "layers" in value):
        return value
    raise ValueError("a model's name, or a list of layers like [{linear: 16}, relu, linear]")


def _off(value: Any) -> Any:
    """YAML reads the word off as false."""
    return OFF if value is False else value


def _proof_mode(value: Any) -> Any:
    value = _off(value)
    if reason := why_not(value):
        raise ValueError(reason)
    return value


def _limits(name: str) -> dict[str, Any]:
    """Between which numbers a key of the private job lies, as the engine says it."""
    return dict(BOUNDS[name].limits())


def _needed(name: str) -> Any:
    """A number of the private job that every profile gives, with the engine's limits."""
    return Field(**_limits(name))


def _bounded(name: str) -> Any:
    """A number of the private job, with the engine's default and limits."""
    return Field(default=getattr(DEFAULTS, name), **_limits(name))


class AdapterSettings(Strict):
    """What of a public base is trained in secret; see the engine's ``Adapters``."""

    rank: int = Field(default=4, ge=0, le=256)
    scale: float = Field(default=1.0, gt=0, le=64)
    layers: list[str] = []
    head: Literal["train", "adapter", "new", "public"] = "train"


class JoinSettings(Strict):
    """Owners hold different columns of the same rows; see the engine's ``ColumnJoin``. ``outputs``: those of a model
    that is a list of layers: its classes, or 1.
    """

    key: str
    columns: list[int]
    label: int = Field(ge=0)
    form: KeyForm = "text"
    outputs: int = Field(default=2, ge=1)


def _steps_or_epochs(schema: dict[str, Any]) -> None:
    schema["required"].remove("steps")
    schema["anyOf"] = [{"required": ["steps"]}, {"required": ["epochs"]}]


class PrivateJobSettings(Strict):
    """Learning or inference on secret shares, three parties. ``data``, ``labels``, ``weights``: the owner's files.

    ``schema``: what the columns of ``data`` are, which also decides the rows held out. ``model``: a shipped
    one by name, or a list of layers whose shapes follow from the data; the plan replaces it by a model with all shapes.
    ``epochs``: so many passes over the training rows instead of ``steps``, which the plan counts then; ``val_every`` is
    one of them, if it is not given.
    ``rounds``: ``auto`` is ``sparing`` for local pods, which share this machine, and ``few`` for all others.
    ``base``: a file of public weights that the model is made around, ``adapters`` says of what; the policy names it by
    its hash, which ``base_sha256`` may fix beforehand.
    ``clients``, ``idle``: of task ``serve``, who may ask and how long it waits for them.
    All other keys go into the policy: they are those of the engine's private job, with the same meaning and range.
    """

    model_config = ConfigDict(populate_by_name=True, json_schema_extra=_steps_or_epochs)

    kind: Literal["private"]
    model: Annotated[Any, BeforeValidator(_model)] = DEFAULTS.model
    steps: int = _needed("steps")
    epochs: int = Field(default=0, ge=0)
    batch: int = _bounded("batch")
    lr: float = _bounded("lr")
    momentum: float = _bounded("momentum")
    schedule: Schedule = DEFAULTS.schedule
    warmup: int = _bounded("warmup")
    weight_decay: float = _bounded("weight_decay")
    clip_norm: float = _bounded("clip_norm")
    seed: int = _bounded("seed")
    frac_bits: int = _bounded("frac_bits")
    reveal: list[Reveal] = list(DEFAULTS.reveal)
    loss_every: int = _bounded("loss_every")
    checkpoint_every: int = _bounded("checkpoint_every")
    test_rows: int = _bounded("test_rows")
    optimizer: OptimizerName = DEFAULTS.optimizer
    beta2: float = _bounded("beta2")
    objective: Objective = DEFAULTS.objective
    min_rows: int = _bounded("min_rows")
    task: Task = DEFAULTS.task
    device: Device = DEFAULTS.device
    rounds: Rounds | Literal["auto"] = "auto"
    verify: Annotated[ProofMode, BeforeValidator(_proof_mode)] = DEFAULTS.verify
    audit_one_in: int = _bounded("audit_one_in")
    standardise: bool = DEFAULTS.standardise
    standardise_by: StandardiseBy = DEFAULTS.standardise_by
    val_rows: int = _bounded("val_rows")
    val_every: int = _bounded("val_every")
    val_budget: int = _bounded("val_budget")
    patience: int = _bounded("patience")
    keep_best: bool = DEFAULTS.keep_best
    class_weights: list[float] = []
    label_smoothing: float = _bounded("label_smoothing")
    row_weights: bool = DEFAULTS.row_weights
    threshold: float = _bounded("threshold")
    data: str = ""
    data_schema: str = Field(default="", alias="schema")
    labels: str = ""
    weights: str = ""
    base: str = ""
    base_sha256: str = Field(default="", pattern="^([0-9a-f]{64})?$")
    adapters: AdapterSettings = AdapterSettings()
    tokenizer: str = Field(default="", pattern="^([0-9a-f]{64})?$")
    join: JoinSettings | None = None
    clients: list[str] = []
    idle: Seconds = DEFAULTS.idle

    _train_rows: int = PrivateAttr(0)

    def of_rows(self, rows: int) -> PrivateJobSettings:
        """The same job, whose data was looked at and has so many rows to train on."""
        found = self.model_copy()
        found._train_rows = rows
        return found

    @property
    def train_rows(self) -> int:
        """How many rows there are to train on; 0 where nobody has counted them."""
        return self._train_rows

    @model_validator(mode="before")
    @classmethod
    def _steps_of_epochs(cls, given: Any) -> Any:
        """Until the plan has counted the steps of epochs there is one for each."""
        if isinstance(given, dict) and given.get("epochs") and "steps" not in given:
            return {**given, "steps": given["epochs"] if isinstance(given["epochs"], int) else 1}
        return given

    @model_validator(mode="after")
    def _reveals_what_it_has(self) -> PrivateJobSettings:
        if not BOUNDS["clip_norm"].hold(self.clip_norm):
            raise ValueError(f"clip_norm {self.clip_norm:g} is too short: {BOUNDS['clip_norm'].hint}")
        for item in self.reveal:
            if trouble := misplaced(item, self.task):
                raise ValueError(f"task {self.task} cannot reveal {item}: {trouble}")
        try:
            Proving.of(self.verify, self.audit_one_in)
            check_clients(self.task, self.clients, self.idle)
            smooth, rows = self.label_smoothing, self.row_weights
            check_weighting(self.objective, self.task, self.class_weights, smooth, rows)
            ColumnJoin.of_job({"join": self.join.model_dump(exclude={"outputs"})} if self.join else {})
        except ConfigError as e:
            raise ValueError(f"{e.what}: {e.hint}") from e
        if self.join is not None and (self.data or self.labels or self.data_schema or self.epochs):
            what = "job.join is of several owners' tables, which they name themselves"
            raise ValueError(f"{what}: leave job.data out, and give steps in place of epochs")
        if self.task == "serve" and (not self.weights or self.data or self.labels):
            raise ValueError("task serve takes the owner's job.weights and no job.data: its clients ask")
        if self.adapters != AdapterSettings() and not self.base:
            raise ValueError("job.adapters belong to a public base: name its file in job.base")
        if self.data_schema not in ("", owner_files.NO_SCHEMA) and (
            self.task != "train" or not self.data or self.labels
        ):
            raise ValueError("job.schema describes the table in job.data that is trained on, labels included")
        return self


class LmJobSettings(Strict):
    """Ordinary multi-GPU language-model training with the engine's trainer.

    ``config`` names a packaged or own configuration, ``overrides`` its sections' keys; ``plan`` holds facts that must
    be true of it (parameters, seq_len, precision, save_every), else the worker refuses to start. Each checkpoint of the
    full run comes home while it goes on, the last one in any case, unless ``fetch_checkpoint`` is false; a lost pod can
    be replaced from there. ``fetch_mib_s``: so many MiB a second at most are fetched beside the training;
    ``fetch_keep``: so many of the newest are kept at home.
    """

    kind: Literal["lm"]
    config: str = "m7c_125m_80g"
    steps: int = Field(gt=0)
    ranks: int = Field(default=1, gt=0)
    seed: int = Field(default=LM_SEED, ge=0)
    overrides: dict[str, dict[str, Any]] = {}
    plan: dict[str, Any] = {}
    fetch_checkpoint: bool = True
    fetch_mib_s: float = Field(default=32.0, gt=0)
    fetch_keep: int = Field(default=2, ge=1)


class CommandJobSettings(Strict):
    """Any program that writes the run contract into ``$UVCC_RUN_DIR``.

    ``code``: a folder here that goes to the pods, without what git ignores and what looks like a secret; the command
    starts in a copy of it, one for each phase. ``setup``: a command that is run in it once on every pod, or ``auto``
    for what a requirements.txt or pyproject.toml asks for. ``artifacts``: patterns of files that come home from it.
    ``halt``: ``control-file``, or ``sigterm`` for a program that never looks at one.
    """

    kind: Literal["command"]
    argv: list[str] = Field(min_length=1)
    steps: int = Field(gt=0)
    ranks: int = Field(default=1, gt=0)
    cwd: str = ""
    code: str = ""
    code_include: list[str] = []
    code_exclude: list[str] = []
    code_mib: float = Field(default=256.0, gt=0)
    setup: str = ""
    artifacts: list[str] = []
    halt: Literal["control-file", "sigterm"] = "control-file"

    @model_validator(mode="after")
    def _of_a_folder(self) -> CommandJobSettings:
        if not self.code and (self.setup or self.artifacts or self.code_include or self.code_exclude):
            raise ValueError("job.setup, job.artifacts and job.code_* are about the folder that job.code uploads")
        if self.code and (self.cwd.startswith("/") or ".." in self.cwd.split("/")):
            raise ValueError(f"job.cwd {self.cwd!r}: with job.code it is a folder in the uploaded one")
        return self


class TopologyPart(Strict):
    replicas: int = Field(default=1, ge=1, le=MOST_OF_PROFILE["replicas"])
    stages: int = Field(default=1, ge=1, le=MOST_OF_PROFILE["stages"])
    tensor: int = Field(default=1, ge=1, le=MOST_OF_PROFILE["tensor"])
    microbatches: int = Field(default=1, ge=1, le=MOST_OF_PROFILE["microbatches"])


class SmokePart(Strict):
    """What the smoke changes; everything else is as in the full run. ``steps: 0`` leaves the smoke out."""

    replicas: int = Field(default=1, ge=1)
    steps: int = Field(default=2, ge=0)


class GatesPart(Strict):
    """What must be measured before the full run starts. ``toks_per_s`` and ``gate_entropy`` are floors, 0 = no gate;
    ``gate_collapse`` (share of collapsed gates, 1 = no gate), ``gpu_mem_mib`` (reserved, 0 = no gate) and
    ``watchdog_dumps`` (stalls, -1 = no gate) and ``fetch_s`` (seconds a step waits for data, 0 = no gate) ceilings.
    ``at``: steps of the full run at which what its rows show is measured again. ``resume_at``: a step of a language
    model's full run (0 = no gate) at which it is halted and resumed from the checkpoint before; the steps that it does
    again must come out the same. ``attention``: how thoroughly a
    language model's attention is tried on the pods before training; auto is full on GPUs, nothing on processors."""

    loss_falls: bool = True
    result_hashes: int = Field(default=1, ge=1)
    verifier: Literal["ok", "any"] = "ok"
    halt_drill_s: float = Field(default=5.0, ge=0)
    clock_skew_s: float = Field(default=30.0, gt=0)
    disk_free_mib: int = Field(default=512, ge=0)
    toks_per_s: float = Field(default=0.0, ge=0)
    gate_entropy: float = Field(default=0.0, ge=0)
    gate_collapse: float = Field(default=1.0, ge=0, le=1)
    gpu_mem_mib: float = Field(default=0.0, ge=0)
    watchdog_dumps: int = Field(default=-1, ge=-1)
    fetch_s: float = Field(default=0.0, ge=0)
    at: list[Annotated[int, Field(gt=0)]] = Field(default_factory=list, max_length=16)
    resume_at: int = Field(default=0, ge=0)
    attention: Annotated[Literal["auto", "off", "quick", "full"], BeforeValidator(_off)] = "auto"


class LimitsPart(Strict):
    """Caps in US dollars (0 = nothing may be spent) and lifetimes.

    ``ttl``: the run's whole life; ``wait``: how long a halted run, or one that failed in training, a gate or its
    verification, keeps its pods for a decision (headless as well: the command ends with 1, the pods wait);
    ``stall``: how long no worker may give a sign of life before the run has failed; ``resumes``: how often it then, or
    when a worker or its conductor was killed, goes on by itself.
    """

    hourly: float = Field(default=0.0, ge=0)
    total: float = Field(default=0.0, ge=0)
    ttl: Seconds = 3600.0
    wait: Seconds = 900.0
    stall: Seconds = 120.0
    resumes: int = Field(default=0, ge=0, le=100)


class HaltPart(Strict):
    """``lease``: the pods halt by themselves when nobody renewed for so long. ``auto``: rungs that are climbed.

    ``patience``: how long a pod may take to show that it holds, which is a step; in a drill, which may include the
    workers' start, 20 s more; a halt may take six times that. A step that is foretold to take long lengthens it.
    """

    lease: Seconds = 60.0
    patience: Seconds = 10.0
    auto: list[HaltRung] = ["hold", "halt", "term"]


class ConsentPart(Strict):
    """How many of the three domains must sign: before the full run, a resume, and the end of pods on request."""

    full: int = Field(default=0, ge=0, le=PARTIES)
    resume: int = Field(default=0, ge=0, le=PARTIES)
    terminate: int = Field(default=0, ge=0, le=PARTIES)


class NatsPart(Strict):
    """The JetStream server of ``link: nats``: its address, and the files here with its token and certificate."""

    url: str = ""
    token_file: str = ""
    ca_file: str = ""


_SERVICE: Final = r"^(https?://[^\s/@]+(/[^\s@]*)?)?$"


class EvidencePart(Strict):
    """``timestamp``: an RFC 3161 service that dates each phase's policy before its first step, and its proof bundle.
    ``log``: a transparency log with Rekor's interface, in which both are entered; ``log_key``: a file with its key.

    Only their hashes are sent. Without an answer the phase does not begin.
    """

    timestamp: str = Field(default="", pattern=_SERVICE)
    log: str = Field(default="", pattern=_SERVICE)
    log_key: str = ""


# checkpoints of shares are encrypted under a key of their pod's identity, which ends with it: no later pod reads them
_NO_VOLUME: Final = {
    "private": "fleet.volume is for language models: checkpoints of shares open under their own pod's key alone, and a "
    "pod that replaces a lost one gets the state from the other two parties",
    "command": "fleet.volume is for language models: a command has no checkpoints that a new pod could go on from",
}


class Profile(Strict):
    """One way of running. ``dp_preflight``: before the smoke, the run's own layout of ranks meets and is measured."""

    job: PrivateJobSettings | LmJobSettings | CommandJobSettings = Field(discriminator="kind")
    topology: TopologyPart = TopologyPart()
    fleet: FleetSettings = FleetSettings()
    link: LinkKind = "auto"
    nats: NatsPart = NatsPart()
    smoke: SmokePart = SmokePart()
    gates: GatesPart = GatesPart()
    limits: LimitsPart = LimitsPart()
    halt: HaltPart = HaltPart()
    consent: ConsentPart = ConsentPart()
    evidence: EvidencePart = EvidencePart()
    env: dict[str, str] = {}
    secrets: list[Annotated[str, Field(pattern=SECRET_NAME)]] = Field(default=[], max_length=32)
    dp_preflight: bool = True

    @model_validator(mode="after")
    def _fits(self) -> Profile:
        if self.smoke.replicas > self.topology.replicas:
            raise ValueError(
                f"smoke.replicas is {self.smoke.replicas} but topology.replicas only {self.topology.replicas}"
            )
        if taken := sorted({*self.secrets} & {*self.env}) or sorted({n for n in self.secrets if n.startswith("UVCC_")}):
            raise ValueError(
                f"secrets: {taken[0]} is {'in env, too' if taken[0] in self.env else 'set by uvcc itself'}"
            )
        if self.link == "nats" and not self.nats.url.startswith(("nats://", "tls://")):
            raise ValueError(f"link nats needs the server's address in nats.url, not {self.nats.url!r}")
        if not isinstance(self.job, LmJobSettings) and any(self.fleet.of(p).volume for p in range(PARTIES)):
            raise ValueError(_NO_VOLUME[self.job.kind])
        if isinstance(self.job, PrivateJobSettings) and self.job.task != "train" and self.smoke.steps:
            raise ValueError(f"a job of task {self.job.task} answers its queries once: give smoke.steps 0")
        if isinstance(self.job, PrivateJobSettings) and self.job.task == "serve" and self.link in ("direct", "nats"):
            raise ValueError(f"clients of a served model ask through the relay: link {self.link} has none; give relay")
        if self.limits.resumes and self.consent.resume:
            raise ValueError(
                "limits.resumes: a resume that domains must sign (consent.resume) is never by itself; give 0"
            )
        return self


@cache
def profile_model(provider: str, *parties: str) -> type[Profile]:
    """The profile whose ``fleet`` section is of this provider, or of these, one for each of the parties.

    Raises ConfigError for an unknown provider.
    """
    settings: Any = settings_for(parties) if parties else kind_of(provider).settings
    fleet = (settings, Field(default_factory=settings))
    return create_model("Profile", __base__=Profile, fleet=fleet)
