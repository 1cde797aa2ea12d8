"""The job of a private run: what is trained, how, and what it reveals. Standard library only."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, get_args

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.column_join import ColumnJoin
from uvcc_engine.contract.job.loss_weights import check_weighting, weight_bits
from uvcc_engine.contract.job.migration import Migration
from uvcc_engine.contract.job.proof_mode import (
    AUDIT_HINT,
    AUDIT_ONE_IN,
    LEAST_ONE_IN,
    MOST_ONE_IN,
    OFF,
    ProofMode,
    Proving,
)
from uvcc_engine.contract.job.served_clients import check_clients, misplaced
from uvcc_engine.contract.parsing import strict
from uvcc_engine.contract.parsing.canonical import sorted_json
from uvcc_engine.contract.parsing.suggest import did_you_mean

MetricName = Literal[
    "accuracy", "confusion", "auc", "precision", "recall", "perplexity", "rmse", "r2", "overflow", "inertia"
]
ValidationName = Literal[
    "val_loss",
    "val_accuracy",
    "val_auc",
    "val_precision",
    "val_recall",
    "val_perplexity",
    "val_rmse",
    "val_r2",
    "val_overflow",
]
SealedName = Literal["weights", "statistics", "standard_errors", "predictions"]
Reveal = Literal["loss", MetricName, ValidationName, SealedName, "answers", "seeds"]
Schedule = Literal["linear", "constant", "cosine"]
OptimizerName = Literal["sgd", "adam"]
Objective = Literal["cross-entropy", "mse", "huber", "binary", "poisson", "inertia"]
Task = Literal["train", "infer", "serve"]
Device = Literal["auto", "cpu", "cuda"]
Rounds = Literal["few", "sparing"]
StandardiseBy = Literal["deviation", "range", "quantiles"]
METRICS: Final[tuple[str, ...]] = get_args(MetricName)
VALIDATIONS: Final[tuple[str, ...]] = get_args(ValidationName)
UNDEFINED: Final[Mapping[str, str]] = {
    "auc": "all rows are of one class",
    "precision": "no row was taken for the second class",
    "recall": "no row is of the second class",
    "perplexity": "the loss is too large for it",
    "r2": "all targets are the same",
}
"""Metrics that may come out as no number, also of validation, and why: nothing is revealed of them then."""
MAY_LACK: Final = frozenset(f"val_{name}" for name in UNDEFINED)
"""What a step that validates may leave unsaid, since it came out as no number."""
SEALED: Final[tuple[str, ...]] = get_args(SealedName)
"""What goes to the data owner alone, sealed."""
STANDARD_ERRORS: Final = "standard_errors"
REVEALABLE: Final[tuple[str, ...]] = get_args(Reveal)
SCHEDULES: Final[tuple[str, ...]] = get_args(Schedule)
OPTIMIZERS: Final[tuple[str, ...]] = get_args(OptimizerName)
OBJECTIVES: Final[tuple[str, ...]] = get_args(Objective)
TASKS: Final[tuple[str, ...]] = get_args(Task)
DEVICES: Final[tuple[str, ...]] = get_args(Device)
ROUNDS: Final[tuple[str, ...]] = get_args(Rounds)
HIGHEST_LOG_RATE: Final = 4.0
"""A Poisson rate is at most e^4, about 54.6: larger ones would leave the fixed point too few bits."""

STANDARDISED_LIMIT: Final = 128.0
"""What a feature may reach where its column is standardised under sharing: a sum of squares has room in the ring then,
of ``STANDARDISED_LEAST`` to ``STANDARDISED_ROWS`` rows."""
STANDARDISED_LEAST: Final = 16
STANDARDISED_ROWS: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class Bounds:
    """Between which numbers a key of the job lies, and what to give. ``low`` itself counts unless ``above``, ``high``
    unless ``below``; with ``from_nothing`` 0 counts as well, and what else counts begins at ``low``.
    """

    hint: str
    low: float
    high: float = math.inf
    above: bool = False
    below: bool = False
    from_nothing: bool = False

    def hold(self, value: float) -> bool:
        """Whether the value lies between them. NaN and infinity do not."""
        if self.from_nothing and value == 0:
            return True
        over = value > self.low if self.above else value >= self.low
        return over and (value < self.high if self.below else value <= self.high) and math.isfinite(value)

    def limits(self) -> dict[str, float]:
        """The same as limits of a schema (``gt``, ``ge``, ``lt``, ``le``), which knows no hole above 0."""
        low = 0 if self.from_nothing else self.low
        found = {"gt" if self.above else "ge": low}
        return found if self.high == math.inf else found | {"lt" if self.below else "le": self.high}


_COUNT: Final = Bounds("it must be at least 1", 0, above=True)
BOUNDS: Final[Mapping[str, Bounds]] = {
    **dict.fromkeys(("steps", "batch", "loss_every", "checkpoint_every", "test_rows", "min_rows"), _COUNT),
    "lr": Bounds("give a learning rate in (0, 16]", 0, 16, above=True),
    "momentum": Bounds("give a momentum in [0, 1)", 0, 1, below=True),
    "weight_decay": Bounds("give a weight decay in [0, 1], like 0.01", 0, 1),
    "clip_norm": Bounds("give a norm of 0.01 to 64, or 0 for none", 0.01, 64, from_nothing=True),
    "warmup": Bounds("give a number of steps, 0 for none", 0),
    "frac_bits": Bounds("give 8 to 24 fractional bits; 16 is usual", 8, 24),
    **dict.fromkeys(("val_rows", "val_every", "val_budget", "patience"), Bounds("it must be 0 or more", 0)),
    "label_smoothing": Bounds("give a smoothing in [0, 1), like 0.1", 0, 1, below=True),
    "seed": Bounds("give a seed of 0 to 2^63 - 1", 0, 2**63, below=True),
    "threshold": Bounds("give a probability in (0, 1), like 0.5", 0, 1, above=True, below=True),
    "audit_one_in": Bounds(AUDIT_HINT, LEAST_ONE_IN, MOST_ONE_IN),
    "beta2": Bounds("give Adam's second decay rate in [0.5, 0.999]", 0.5, 0.999),
}
"""The one place that says between which numbers a job's keys lie; profiles ask for the same."""
CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "schedule": SCHEDULES,
    "optimizer": OPTIMIZERS,
    "objective": OBJECTIVES,
    "task": TASKS,
    "device": DEVICES,
    "rounds": ROUNDS,
    "standardise_by": get_args(StandardiseBy),
}


@dataclass(frozen=True, slots=True)
class PrivateJob:
    """One secret-shared training job; the policy carries it, so every party trains exactly this.

    ``reveal`` lists what is opened: ``loss`` (the batch mean, every ``loss_every`` steps), the ``METRICS`` (sums over
    all test rows, once at the end, see ``model.learning.answer_metrics``), ``weights`` (the final ones, sealed to the
    data owner) and ``seeds`` (each party's secrets of this one session, sealed to the data owner, who can then replay
    the run and learns all of it). No number is revealed that is of fewer than ``min_rows`` rows. The batch order, the
    initial weights and the schedule are public functions of ``seed``. ``objective`` is the loss that is trained on;
    ``huber``, ``binary`` and ``poisson`` take models of one output, and of such a model ``mse`` fits numbers. Of
    ``inertia``, which k-means has, the loss is a row's squared distance to the nearest centroid.
    In task ``infer`` a trained model answers queries, ``batch`` rows a step, and the only thing to reveal are the
    ``predictions``, sealed to the owner. In task ``serve`` it answers those of ``clients`` (X25519 keys in hex), in
    ``steps`` batches of at most ``batch`` rows, and the ``answers`` are sealed to whoever asked; after ``idle`` seconds
    without a query it stops waiting (0: never). ``momentum`` is Adam's first decay rate, too, and ``beta2`` its second.
    ``schedule``: how the learning rate falls, to nothing by a line or a cosine, or not at all; before, it rises by a
    line over ``warmup`` steps. ``weight_decay`` takes so much of every matrix per unit of the learning rate, apart from
    its gradient (as AdamW does, with any optimiser; normalisations keep theirs). ``clip_norm``: the gradient of each
    weight is scaled down to this norm where it is longer; 0 for never.
    ``model``: a shipped name, or the JSON of ``layer_list`` as canonical text; in JSON that is an object, not a text.
    ``device``: where shares are computed; ``auto`` is each pod's GPU, if it has one, and ``cuda`` insists on one and
    has the masks drawn there (``random_generator``). All give the same bits. Ranks of a pod share its GPUs out; NCCL
    carries their sums where each rank of a group has one of its own, else they pass through the host.
    ``rounds``: ``few`` where the parties lie far apart, though it takes about twice the bytes and work; ``sparing``
    where they share a machine or a rack. The weights differ in their last bits.
    ``verify``: what is proved of the computation (``proof_mode``); ``audit_one_in``: with ``covert``, how rarely.
    ``standardise``: every column is brought to mean 0 and deviation 1 over all owners' training rows, by statistics
    that are computed in shares and stay there; ``statistics`` in ``reveal`` seals them to the owner beside the weights.
    ``standard_errors`` in ``reveal`` seals to the owner what those of a regression's coefficients follow from: the
    information matrix over all training rows (``model.learning.information``), which the owner inverts.
    ``standardise_by``: ``deviation`` is as above, ``range`` brings each column to 0 to 1 from its least to its greatest
    value, ``quantiles`` to 0 to 1 between those of 0.01 and 0.99, and cuts it there.
    ``val_rows`` rows are neither trained on nor tested: after every ``val_every`` steps and after the last (with 0 only
    there) the ``VALIDATIONS`` in ``reveal`` are opened of them, ``val_budget`` times at most (0: however often).
    ``patience``: the training ends when ``val_loss`` has not fallen in so many of them (0: never). ``keep_best``: what
    is tested and released are the weights of the least ``val_loss``.
    ``base``: the SHA-256 of the safetensors file whose public tensors the model's layers name (``base_model``); every
    pod has it, and computes with nothing else.
    ``class_weights``: how much a row of each class counts in the loss, and ``row_weights``: that each row brings a
    secret weight of its own, up to ``MOST_WEIGHT`` with its class's; the loss is the mean over the rows of weight times
    loss. ``label_smoothing`` e: targets of K classes are e / K, and 1 - e + e / K at the row's class. Both are of the
    rows that are trained on alone, not of what is tested or validated.
    ``threshold``: ``precision`` and ``recall`` count a row for the second class from this probability on.
    ``tokenizer``: the SHA-256 of the owner's tokenizer file, where a text is learned by one; only the owner has it.
    ``join``: several owners hold different columns of the same rows (``ColumnJoin``); without it they hold rows.
    ``start``: the committed checkpoint of another policy that the job goes on from; the beginning without it.
    """

    model: str = "mlp-digits"
    steps: int = 60
    batch: int = 128
    lr: float = 0.5
    momentum: float = 0.9
    schedule: Schedule = "linear"
    seed: int = 7
    frac_bits: int = 16
    reveal: tuple[Reveal, ...] = ("loss", "accuracy")
    loss_every: int = 1
    checkpoint_every: int = 10
    test_rows: int = 360
    kind: str = "private"
    optimizer: OptimizerName = "sgd"
    beta2: float = 0.99
    objective: Objective = "cross-entropy"
    task: Task = "train"
    start: Migration | None = None
    min_rows: int = 1
    weight_decay: float = 0.0
    clip_norm: float = 0.0
    warmup: int = 0
    device: Device = "auto"
    rounds: Rounds = "few"
    verify: ProofMode = "off"
    audit_one_in: int = AUDIT_ONE_IN
    clients: tuple[str, ...] = ()
    idle: float = 0.0
    standardise: bool = False
    val_rows: int = 0
    val_every: int = 0
    val_budget: int = 0
    patience: int = 0
    keep_best: bool = False
    base: str = ""
    class_weights: tuple[float, ...] = ()
    label_smoothing: float = 0.0
    row_weights: bool = False
    threshold: float = 0.5
    join: ColumnJoin | None = None
    standardise_by: StandardiseBy = "deviation"
    tokenizer: str = ""

    def __post_init__(self) -> None:
        if self.kind != "private":
            raise ConfigError(f"job.kind is {self.kind!r}", "a private job has kind 'private'")
        if self.model.startswith("{") and self.model != _model_text(_model_json(self.model)):
            raise ConfigError("job.model is not in its canonical form", "give it as an object, or by name")
        for name, bounds in BOUNDS.items():
            if not bounds.hold(getattr(self, name)):
                raise ConfigError(f"job.{name} is {getattr(self, name)}", bounds.hint)
        if self.start is not None and (self.start.step >= self.steps or self.task != "train"):
            raise ConfigError(
                f"job.start is at step {self.start.step} of {self.steps} of task {self.task!r}",
                "go on from a checkpoint of a training that has steps left",
            )
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"job.{name} is {getattr(self, name)!r}", f"one of {', '.join(known)}")
        Proving.of(self.verify, self.audit_one_in)
        for item in self.reveal:
            if item not in REVEALABLE:
                raise ConfigError(f"job.reveal: unknown item {item!r}", did_you_mean(item, REVEALABLE))
            if trouble := misplaced(item, self.task):
                raise ConfigError(f"job.reveal: {item!r} in task {self.task!r}", trouble)
        check_clients(self.task, self.clients, self.idle)
        self._check_standardising()
        self._check_standard_errors()
        self._check_validation()
        check_weighting(self.objective, self.task, self.class_weights, self.label_smoothing, self.row_weights)
        self._check_join()
        if self.tokenizer and (self.task != "train" or not re.fullmatch(r"[0-9a-f]{64}", self.tokenizer)):
            what = f"job.tokenizer is {self.tokenizer[:80]!r} in task {self.task!r}"
            raise ConfigError(what, "a training's policy names a tokenizer by its file's SHA-256 in hex")
        if self.base and not re.fullmatch(r"[0-9a-f]{64}", self.base):
            raise ConfigError(f"job.base is {self.base[:80]!r}", "the policy names a base by its file's SHA-256 in hex")

    def _check_join(self) -> None:
        if self.join is not None and self.task != "train":
            raise ConfigError(f"job.join in task {self.task!r}", "only what is trained on is put together by a key")
        if self.join is not None and "seeds" in self.reveal:
            raise ConfigError("job.reveal: 'seeds' with job.join", "they would open every owner's columns to the first")
        if self.join is not None and (self.row_weights or self.class_weights or self.label_smoothing):
            what = "job.join with weights of rows or classes, or smoothed labels"
            raise ConfigError(what, "those are prepared by an owner of whole rows: leave them out")

    def _check_validation(self) -> None:
        if bool(self.val_rows) != any(name in self.reveal for name in VALIDATIONS):
            raise ConfigError(
                f"job.val_rows is {self.val_rows}, and job.reveal lists {', '.join(self.reveal)}",
                f"rows for validation, and what is told of them: {', '.join(VALIDATIONS)}; or none of both",
            )
        if self.val_rows and self.task != "train":
            raise ConfigError(f"job.val_rows in task {self.task!r}", "only a training is validated")
        if (self.patience or self.keep_best) and "val_loss" not in self.reveal:
            what = "job.patience" if self.patience else "job.keep_best"
            raise ConfigError(f"{what} without 'val_loss' in job.reveal", "it follows the revealed loss of validation")
        if (self.patience or self.keep_best) and self.start is not None:
            raise ConfigError("job.patience or job.keep_best with job.start", "leave them out to go on elsewhere")
        if self.val_budget and (often := self.validations) > self.val_budget:
            raise ConfigError(
                f"validation would be revealed {often} times, job.val_budget is {self.val_budget}",
                f"give val_every at least {-(-self.steps // self.val_budget)}, or a larger budget",
            )

    def _check_standardising(self) -> None:
        if self.standardise_by != "deviation" and not self.standardise:
            raise ConfigError(f"job.standardise_by {self.standardise_by!r} without job.standardise", "set it to true")
        if self.standardise and self.task != "train":
            raise ConfigError(
                f"job.standardise in task {self.task!r}", "the owner brings its queries to scale by itself"
            )
        if "statistics" in self.reveal and not (self.standardise and "weights" in self.reveal):
            what = "job.reveal: 'statistics' without job.standardise, or without 'weights'"
            raise ConfigError(what, "they are sealed to the owner beside the weights that they are needed for")

    def _check_standard_errors(self) -> None:
        if STANDARD_ERRORS not in self.reveal:
            return
        odd = [
            what
            for what, there in (
                ("without 'weights'", "weights" not in self.reveal),
                (f"of objective {self.objective!r}", self.objective not in ("mse", "binary", "poisson")),
                ("with weights of rows or classes", self.row_weights or bool(self.class_weights)),
                ("with label_smoothing", self.label_smoothing > 0),
                ("with weight_decay, which draws coefficients to 0", self.weight_decay > 0),
                ("with job.base", bool(self.base)),
                ("with job.join, whose owners' columns they would tell of each other", self.join is not None),
            )
            if there
        ]
        if odd:
            raise ConfigError(
                f"job.reveal: 'standard_errors' {odd[0]}",
                "they are of a linear, logistic or Poisson regression (mse, binary, poisson) whose weights go to the"
                " owner",
            )

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> PrivateJob:
        """Read a job. Raises ConfigError naming an unknown key and the nearest known one, or a wrong type."""
        values = dict(found) | ({"start": Migration.of_job(found)} if "start" in found else {})
        values |= {"join": ColumnJoin.of_job(found)} if "join" in found else {}
        if isinstance(found.get("model"), Mapping):
            values["model"] = _model_text(found["model"])
        return strict.read(cls, values, "job")

    def to_json(self) -> dict[str, Any]:
        """All fields as plain JSON values; ``from_json`` reads it back unchanged."""
        join = None if self.join is None else self.join.to_json()
        found = asdict(self) | {"reveal": list(self.reveal), "join": join}
        del found["start"]
        found = where_it_says_something(found)
        if self.model.startswith("{"):
            found["model"] = _model_json(self.model)
        return found if self.start is None else found | {"start": self.start.to_json()}

    @property
    def first_step(self) -> int:
        """The step that this job starts with, from 0."""
        return self.start.step if self.start is not None else 0

    @property
    def proves(self) -> bool:
        """Whether products are proved, always or by chance."""
        return self.verify != OFF

    @property
    def proving(self) -> Proving:
        """What is proved, and how often."""
        return Proving.of(self.verify, self.audit_one_in)

    @property
    def weighted(self) -> bool:
        """Whether rows count differently in the loss."""
        return bool(self.class_weights) or self.row_weights

    @property
    def random_generator(self) -> str:
        """Which generator draws the parties' masks: ChaCha20 where all are sure to have a GPU, which computes it."""
        return "chacha20" if self.device == "cuda" else "aes"

    def lr_at(self, step: int) -> float:
        """Learning rate of step ``step`` (from 0)."""
        if step < self.warmup:
            return self.lr * (step + 1) / (self.warmup + 1)
        done = (step - self.warmup) / (self.steps - self.warmup)
        if self.schedule == "cosine":
            return self.lr * (1.0 + math.cos(math.pi * done)) / 2.0
        return self.lr * (1.0 - done) if self.schedule == "linear" else self.lr

    def rate_at(self, step: int) -> float:
        """lr / batch of a step, rounded to the few significant bits that leave room for the product it scales."""
        room = 60 - 2 * self.frac_bits - self.batch.bit_length() - weight_bits(self.class_weights, self.row_weights)
        bits = max(2, min(10, room))
        mantissa, exponent = math.frexp(self.lr_at(step) / self.batch)
        return math.ldexp(round(mantissa * 2.0**bits), exponent - bits)

    def decay_at(self, step: int) -> float:
        """What momentum keeps of the last update, which was made at the last step's learning rate."""
        return self.momentum * self.lr_at(step) / self.lr_at(step - 1) if step else 0.0

    @property
    def validations(self) -> int:
        """How often validation is revealed, at most."""
        if not self.val_rows:
            return 0
        return -(-self.steps // self.val_every) if self.val_every else 1

    def validates(self, step: int) -> bool:
        """Whether the revealed numbers of validation are opened after this step."""
        due = self.val_every and (step + 1) % self.val_every == 0
        return bool(self.val_rows and (due or step == self.steps - 1))

    def reveals_loss(self, step: int) -> bool:
        """Whether the mean loss of this step is opened (the first and last step always are, if loss is revealed)."""
        return "loss" in self.reveal and (step % self.loss_every == 0 or step == self.steps - 1)


LATER: Final = (
    *("min_rows", "weight_decay", "clip_norm", "warmup", "device", "rounds", "verify", "audit_one_in"),
    *("clients", "idle", "standardise", "base", "join", "standardise_by"),
    *("val_rows", "val_every", "val_budget", "patience", "keep_best"),
    *("class_weights", "label_smoothing", "row_weights", "threshold", "tokenizer"),
)
"""Keys that a policy names only where they say something."""
DEFAULTS: Final = PrivateJob()


def where_it_says_something(found: Mapping[str, Any]) -> dict[str, Any]:
    """A job's keys without those of ``LATER`` that have their default: pods of an older version do not know them."""
    plain = {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}
    return {key: found[key] for key, value in plain.items() if key not in LATER or value != getattr(DEFAULTS, key)}


def _model_text(found: Any) -> str:
    try:
        return sorted_json(_as_canonical(found))
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"job.model cannot be written as JSON: {str(error)[:80]}", "numbers, words and lists"
        ) from error


def _as_canonical(value: Any) -> Any:
    """Whole numbers as canonical JSON writes them: the policy's 0 is this text's 0.0."""
    if isinstance(value, dict):
        return {key: _as_canonical(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_canonical(item) for item in value]
    whole = isinstance(value, float) and value.is_integer() and abs(value) < 2.0**53
    return int(value) if whole else value


def _model_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"job.model is no JSON: {str(error)[:80]}", "give a name, or a list of layers") from error
