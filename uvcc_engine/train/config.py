"""What a language-model run is: one frozen tree, read strictly from YAML, overridden by the known environment names.

A key or an ``NSA_*`` variable that would have no effect is an error: a flag that is silently ignored once cost a
day on the wrong model.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.job.spec import LM_SEED
from uvcc_engine.contract.parsing import yaml_text
from uvcc_engine.contract.parsing.small_text import read_small
from uvcc_engine.contract.parsing.suggest import CLOSE, nearest
from uvcc_engine.nsa.config import ModelConfig, NSAConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Where text comes from. ``source``: local (files below ``path``), python_docs (the manual that each Python
    carries), fineweb_edu (hub stream; ``path`` may name another dataset or a folder of its shards), prepared (the
    folder ``path`` that ``uvcc-engine data prepare`` wrote), hidden_letters (of that manual or of files below ``path``,
    with letters hidden and asked for) or synthetic."""

    source: str = "local"
    path: str = ""
    tokenizer: str = "byte"  # byte (256 symbols, 0 = end of document), gpt2 (50257, 50256 = end of document) or file
    tokenizer_file: str = ""  # of "file": what `uvcc-engine data tokenizer` or Hugging Face's tokenizers wrote
    merges: str = ""  # file with GPT-2's merges (vocab.bpe or merges.txt); empty = tiktoken fetches them
    shuffle: bool = False  # prepared text in another order in each pass, which follows from train.seed
    val_percent: int = 1  # documents whose hash falls in this share are held out, for ever
    queue: int = 4  # prefetched batches
    retries: int = 5  # attempts per fetch before a source counts as unreachable


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """How it is computed. Weights and optimizer states stay fp32; ``precision`` is that of the arithmetic: ``fp8`` that
    of the blocks' linear layers in training, on GPUs of compute capability 8.9 or newer, with bf16 for the rest."""

    device: str = "auto"  # auto | cpu | cuda
    precision: str = "bf16"  # bf16 | fp32 | fp8
    gradient_checkpointing: bool = False
    checkpoint_layers: str = ""  # "a:b" = blocks a to b - 1 only; empty = all
    compile: bool = False  # torch.compile, block by block: the blocks share what is compiled
    nvtx: bool = False  # mark fetch, forward, backward and optimizer for a CUDA profiler

    @property
    def narrow(self) -> bool:
        """Whether the arithmetic is in 16 bits, or in part in 8."""
        return self.precision != "fp32"

    def recomputed(self, n_layers: int) -> range:
        """The blocks whose activations are computed again in the backward pass. Raises ConfigError."""
        if not self.gradient_checkpointing:
            return range(0)
        low, colon, high = (self.checkpoint_layers or f"0:{n_layers}").partition(":")
        if not (colon and low.isdecimal() and high.isdecimal() and int(low) < int(high) <= n_layers):
            raise ConfigError(
                f"runtime.checkpoint_layers={self.checkpoint_layers!r}", f'write it like "0:{n_layers}", first:behind'
            )
        return range(int(low), int(high))


@dataclass(frozen=True, slots=True, kw_only=True)
class DDPConfig:
    """Knobs of DistributedDataParallel. ``shard``: torch's fully_shard (FSDP2) instead, where every rank keeps a part
    of the weights, gradients and moments; the knobs of DDP then have no effect and are refused. ``tensor``: so many
    neighbouring ranks compute each block of a sharded model together, on the same rows. ``context``: so many
    neighbouring ranks share the tokens of each row, for rows that are too long for one."""

    shard: bool = False
    tensor: int = 1
    context: int = 1
    compress: str = "bf16"  # bf16 | off
    bucket_mb: int = 25
    static_graph: bool = False
    find_unused: bool = False
    broadcast_buffers: bool = False
    gradient_as_bucket_view: bool = True
    timeout_min: float = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """``batch_size`` is global (all ranks, one micro-batch); a step is one optimizer step.

    ``nonfinite``: what follows a gradient that is not a number: ``stop``, ``skip`` the step, five in a row at most, or
    ``rollback`` to the last checkpoint and do the steps again, three times at most without coming further; that also
    follows a loss or a weight that is none.
    ``schedule``: after the warm-up the rate follows a cosine down to ``min_lr``, stays (``constant``), or stays and
    falls in a straight line to ``min_lr`` over the last ``decay_steps`` (``wsd``, Hu et al. 2024, section 4).
    ``sample_tokens``: the finished model writes so many, for the result screen and ``sample.txt``.
    ``init``: a folder that ``uvcc-engine export`` made, whose weights a new training begins with.
    ``optimizer``: adamw, or muon for the matrices inside the blocks with AdamW for the rest, at one rate.
    ``loss_chunk``: tokens whose logits are held at once; 0: all of a micro-batch.
    ``sinks``: services that are told of losses and rates: wandb, mlflow, or what other packages plug in; ``project``:
    the project or experiment that they file the run under.
    """

    steps: int = 200
    seq_len: int = 128
    batch_size: int = 8
    accumulate: int = 1
    lr: float = 3e-4
    warmup: int = 20
    schedule: str = "cosine"  # cosine | wsd | constant
    min_lr: float = 0.0
    decay_steps: int = 0  # of wsd; 0 = a tenth of the steps
    init: str = ""
    optimizer: str = "adamw"  # adamw | muon
    loss_chunk: int = 0
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    nonfinite: str = "stop"  # stop | skip | rollback
    seed: int = LM_SEED
    log_every: int = 1
    eval_every: int = 0  # 0 = never
    eval_batches: int = 10
    save_every: int = 0  # 0 = at the end and on halt only
    keep: int = 3  # verified checkpoints
    sample_tokens: int = 0  # at most 4096
    sinks: str = ""  # names, comma-separated
    project: str = "uvcc"


@dataclass(frozen=True, slots=True, kw_only=True)
class LMConfig:
    """The whole configuration of a language-model run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    ddp: DDPConfig = field(default_factory=DDPConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        _one_of("data.source", self.data.source, SOURCES)
        _one_of("data.tokenizer", self.data.tokenizer, TOKENIZERS)
        _one_of("runtime.device", self.runtime.device, ("auto", "cpu", "cuda"))
        _one_of("runtime.precision", self.runtime.precision, ("bf16", "fp32", "fp8"))
        if self.runtime.precision == "fp8":
            self._check_fp8()
        _one_of("ddp.compress", self.ddp.compress, ("bf16", "off"))
        if self.data.source in ("local", "prepared") and not self.data.path:
            raise ConfigError("data.path is missing", "name a file or folder of text, or set data.source")
        if self.data.shuffle and self.data.source != "prepared":
            hint = "prepare the text (uvcc-engine data prepare) and set data.source: prepared, or remove it"
            raise ConfigError(f"data.shuffle has no effect with data.source={self.data.source}", hint)
        if self.data.source == "hidden_letters" and self.data.tokenizer != "byte":
            raise ConfigError("data.source=hidden_letters is text of bytes", "data.tokenizer: byte")
        if self.data.path and self.data.source not in ("local", "fineweb_edu", "prepared", "hidden_letters"):
            raise ConfigError(f"data.path has no effect with data.source={self.data.source}", "remove one of them")
        if self.data.merges and self.data.tokenizer != "gpt2":
            raise ConfigError(f"data.merges has no effect with data.tokenizer={self.data.tokenizer}", "remove it")
        self._check_own_tokenizer()
        wanted = VOCAB.get(self.data.tokenizer, self.model.vocab)
        if self.model.vocab != wanted:
            raise ConfigError(
                f"model.vocab={self.model.vocab} does not fit data.tokenizer={self.data.tokenizer}",
                f"set it to {wanted}",
            )
        _one_of("train.nonfinite", self.train.nonfinite, ("stop", "skip", "rollback"))
        if self.train.nonfinite == "rollback" and not self.train.save_every:
            raise ConfigError("train.nonfinite=rollback has nothing to go back to", "train.save_every, above 0")
        for name in ("steps", "seq_len", "batch_size", "accumulate", "log_every", "eval_batches", "keep"):
            _at_least(f"train.{name}", getattr(self.train, name), 1)
        if not 0 <= self.train.sample_tokens <= MOST_SAMPLED:
            raise ConfigError(f"train.sample_tokens={self.train.sample_tokens}", f"it must be 0 to {MOST_SAMPLED}")
        _one_of("train.optimizer", self.train.optimizer, ("adamw", "muon"))
        for name in ("warmup", "weight_decay", "loss_chunk", "eval_every", "save_every", "seed"):
            _at_least(f"train.{name}", getattr(self.train, name), 0)
        for name in ("lr", "grad_clip"):
            value = getattr(self.train, name)
            if not (0.0 < value < math.inf):
                raise ConfigError(f"train.{name}={value}", "it must be a number above 0")
        if self.train.weight_decay == math.inf:
            raise ConfigError("train.weight_decay=inf", "it must be a number of at least 0")
        if not 0.0 < self.ddp.timeout_min <= LONGEST_TIMEOUT_MIN:
            hint = f"it must be above 0 and at most {LONGEST_TIMEOUT_MIN}, a week"
            raise ConfigError(f"ddp.timeout_min={self.ddp.timeout_min}", hint)
        self._check_schedule()
        for path, value in (("data.queue", self.data.queue), ("ddp.bucket_mb", self.ddp.bucket_mb)):
            _at_least(path, value, 1)
        _at_least("data.retries", self.data.retries, 0)
        if not 0 <= self.data.val_percent < 100:
            raise ConfigError(f"data.val_percent={self.data.val_percent}", "it must be 0 to 99")
        if self.train.eval_every and not self.data.val_percent:
            what = f"data.val_percent=0 holds nothing out to evaluate every {self.train.eval_every} steps"
            raise ConfigError(what, "train.eval_every: 0, or data.val_percent above 0")
        self.runtime.recomputed(self.model.n_layers)
        if self.model.attention == "nsa" and self.train.seq_len < self.model.nsa.l:
            raise ConfigError(
                f"train.seq_len={self.train.seq_len} is shorter than one compression block (nsa.l={self.model.nsa.l})",
                f"train.seq_len of at least {self.model.nsa.l}, or smaller blocks",
            )

        self._check_shard()

    def _check_fp8(self) -> None:
        m, each = self.model, self.train.seq_len // self.ddp.context
        for name, there in (("runtime.compile", self.runtime.compile), ("ddp.tensor", self.ddp.tensor > 1)):
            if there:
                raise ConfigError(f"{name} and runtime.precision=fp8", "leave one of them out")
        sides = {"model.dim": m.dim, "model.n_heads * d_v": m.n_heads * m.d_v, "train.seq_len of a rank": each}
        if m.attention == "nsa":
            hidden = max(16, m.dim // 16)
            sides["projected width"] = (m.n_heads + 3 * m.n_kv_groups) * m.d_k + 3 * m.n_kv_groups * m.d_v + hidden
        else:
            sides |= {"n_heads * d_k": m.n_heads * m.d_k, "n_kv_groups * (d_k + d_v)": m.n_kv_groups * (m.d_k + m.d_v)}
        for name, size in sides.items():
            if size % EIGHT_BITS:
                raise ConfigError(f"{name} is {size}", f"runtime.precision=fp8 takes multiples of {EIGHT_BITS}")

    def _check_own_tokenizer(self) -> None:
        own = self.data.tokenizer == "file"
        if own != bool(self.data.tokenizer_file):
            what = "data.tokenizer_file is missing" if own else "data.tokenizer_file has no effect"
            raise ConfigError(f"{what} with data.tokenizer={self.data.tokenizer}", "name both, or neither")
        if own and not LEAST_VOCAB <= self.model.vocab <= MOST_VOCAB:
            raise ConfigError(
                f"model.vocab={self.model.vocab}", f"a tokenizer has {LEAST_VOCAB} to {MOST_VOCAB} symbols"
            )

    def _check_shard(self) -> None:
        for name in ("tensor", "context"):
            _at_least(f"ddp.{name}", getattr(self.ddp, name), 1)
        if self.ddp.context > 1:
            self._check_context(self.ddp.context)
        if self.ddp.tensor > 1:
            self._check_tensor(self.ddp.tensor)
        if not self.ddp.shard:
            return
        plain = DDPConfig()
        for name in ("bucket_mb", "static_graph", "find_unused", "broadcast_buffers", "gradient_as_bucket_view"):
            if getattr(self.ddp, name) != getattr(plain, name):
                raise ConfigError(f"ddp.{name} has no effect with ddp.shard", "remove one of them")
        if self.train.optimizer == "muon":
            hint = "train.optimizer: adamw, or ddp.shard: false"
            raise ConfigError(
                "train.optimizer=muon needs whole matrices, and ddp.shard leaves a part to each rank", hint
            )

    def _check_context(self, ranks: int) -> None:
        for name, there in (("runtime.compile", self.runtime.compile), ("ddp.tensor", self.ddp.tensor > 1)):
            if there:
                raise ConfigError(f"{name} and ddp.context={ranks}", "leave one of them out")
        if self.model.attention != "nsa":
            raise ConfigError(f"ddp.context={ranks} with model.attention={self.model.attention}", "it is there for nsa")
        least = 2 * max(ranks, self.model.nsa.l)  # so that each rank's late slice sees a whole compression block
        if self.train.seq_len % (2 * ranks) or self.train.seq_len < least:
            what = f"train.seq_len={self.train.seq_len} cannot be shared by ddp.context={ranks} ranks"
            raise ConfigError(what, f"a multiple of {2 * ranks} of at least {least}: each computes two slices")

    def _check_tensor(self, ranks: int) -> None:
        if not self.ddp.shard:
            raise ConfigError(f"ddp.tensor={ranks} needs parameters in parts", "ddp.shard: true")
        if self.runtime.compile:
            raise ConfigError(f"runtime.compile and ddp.tensor={ranks}", "leave one of them out")
        if self.model.n_kv_groups % ranks:
            raise ConfigError(
                f"model.n_kv_groups={self.model.n_kv_groups} cannot be shared by ddp.tensor={ranks} ranks",
                "each of them computes whole groups of heads: make the groups a multiple of the ranks",
            )
        if 4 * self.model.dim % ranks:
            raise ConfigError(f"model.dim={self.model.dim} cannot be shared by ddp.tensor={ranks} ranks", "take fewer")

    def _check_schedule(self) -> None:
        t = self.train
        _one_of("train.schedule", t.schedule, ("cosine", "wsd", "constant"))
        if not 0.0 <= t.min_lr <= t.lr:
            raise ConfigError(f"train.min_lr={t.min_lr}", f"it must be 0 to train.lr ({t.lr})")
        if t.min_lr and t.schedule == "constant":
            raise ConfigError("train.min_lr has no effect with train.schedule=constant", "remove one of them")
        if t.decay_steps and t.schedule != "wsd":
            raise ConfigError(f"train.decay_steps has no effect with train.schedule={t.schedule}", "set it to wsd")
        if not 0 <= t.decay_steps <= t.steps:
            raise ConfigError(f"train.decay_steps={t.decay_steps}", f"it must be 0 to train.steps ({t.steps})")


LONGEST_TIMEOUT_MIN: Final = 7 * 24 * 60
LARGEST: Final = 1 << 53  # of a whole number: more is no seed or size for torch, and not exact for every JSON reader
EIGHT_BITS: Final = 16  # what every side of a product of 8-bit floats is a multiple of
SOURCES: Final = ("local", "python_docs", "fineweb_edu", "prepared", "hidden_letters", "synthetic")
MOST_SAMPLED: Final = 4096
VOCAB: Final = {"byte": 256, "gpt2": 50257}
TOKENIZERS: Final = (*VOCAB, "file")
BY_VRAM: Final = {"m7c_125m_80g": 75_000, "m7c_125m_40g": 35_000, "m7c_125m_24g": 0}  # at least so many MiB
LEAST_VOCAB, MOST_VOCAB = 257, 1 << 16  # the bytes and an end; what prepared text has room for


def _at_least(name: str, value: float, least: int) -> None:
    if not value >= least:
        raise ConfigError(f"{name}={value}", f"it must be at least {least}")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        near = nearest(value, known, CLOSE)
        raise ConfigError(f"{name}={value!r} is unknown", f"did you mean {near}?" if near else " | ".join(known))


def _build(cls: type[Any], raw: Any, where: str) -> Any:
    """A dataclass from a mapping; every key must exist, every value must have the field's type."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where or 'config'} is {type(raw).__name__}", "it must be a mapping")
    hints = typing.get_type_hints(cls)
    known = {f.name for f in fields(cls)}
    values: dict[str, Any] = {}
    for key, value in raw.items():
        path = f"{where}.{key}" if where else str(key)
        if key not in known:
            near = nearest(str(key), known, CLOSE)
            raise ConfigError(
                f"unknown key {path}", f"did you mean {near}?" if near else f"known: {', '.join(sorted(known))}"
            )
        values[key] = _coerce(hints[key], value, path)
    return cls(**values)


def _coerce(wanted: Any, value: Any, path: str) -> Any:
    if is_dataclass(wanted) and isinstance(wanted, type):
        return _build(wanted, value, path)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if wanted is float and isinstance(value, str):  # YAML reads 2e-4 as text
        try:
            return float(value)
        except ValueError:
            pass
    if (
        isinstance(wanted, types.UnionType)
        or (wanted is int and isinstance(value, bool))
        or not isinstance(value, wanted)
    ):
        raise ConfigError(f"{path} is {value!r}", f"wanted: {getattr(wanted, '__name__', wanted)}")
    if wanted is int and abs(value) > LARGEST:
        raise ConfigError(f"{path}={value}", f"it must be at most {LARGEST}")
    return value


def from_mapping(raw: Mapping[str, Any]) -> LMConfig:
    """Read a resolved mapping. Raises ConfigError naming the key and the nearest known one.

    ``nsa`` may stand beside ``model``, as in the older configs.
    """
    built: LMConfig = _build(LMConfig, nested(raw), "")
    return built


def nested(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with ``nsa`` inside ``model``; of a key that stands in both places, the one beside ``model`` is taken."""
    tree = {k: dict(v) if isinstance(v, Mapping) else v for k, v in raw.items()}
    model = tree.get("model", {})
    if "nsa" in tree and isinstance(model, Mapping):
        beside, inside = tree.pop("nsa"), model.get("nsa")
        both = {**inside, **beside} if isinstance(beside, Mapping) and isinstance(inside, Mapping) else beside
        tree["model"] = {**model, "nsa": both}
    return tree


def load(name_or_path: str) -> dict[str, Any]:
    """A packaged config by name (``m7c_125m_80g``) or a YAML file: the raw mapping. Raises UnreadableError."""
    import yaml

    packaged = resources.files("uvcc_engine.train") / "configs" / f"{name_or_path}.yaml"
    path = Path(name_or_path)
    if packaged.is_file():
        text = packaged.read_text(encoding="utf-8")
    elif path.is_file():
        try:
            text = read_small(path)
        except (OSError, ValueError) as e:
            why = e.strerror if isinstance(e, OSError) else e
            raise UnreadableError(f"cannot read the config {name_or_path}: {why}") from e
    else:
        names = sorted(p.name[:-5] for p in (resources.files("uvcc_engine.train") / "configs").iterdir())
        near = nearest(name_or_path, names, CLOSE)
        raise UnreadableError(f"no config {name_or_path}", f"did you mean {near}?" if near else ", ".join(names))
    try:
        raw = yaml_text.load(text)
    except yaml.YAMLError as e:
        raise UnreadableError(f"{name_or_path} is not YAML: {' '.join(str(e).split())}") from e
    if not isinstance(raw, dict):
        raise UnreadableError(f"{name_or_path} holds no mapping")
    return raw


def pick_for_vram(mib: int) -> str:
    """The M7C config for a GPU's memory."""
    return next(name for name, least in BY_VRAM.items() if mib >= least)


def to_mapping(cfg: LMConfig) -> dict[str, Any]:
    """The effective config as plain data, for run.json."""
    return dataclasses.asdict(cfg)


def with_nsa(cfg: LMConfig, **over: int) -> LMConfig:
    """A copy with other block geometry."""
    nsa: NSAConfig = replace(cfg.model.nsa, **over)
    return replace(cfg, model=replace(cfg.model, nsa=nsa))
