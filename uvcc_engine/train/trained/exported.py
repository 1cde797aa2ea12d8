"""A trained language model as a folder of its own: what it is, its weights, and how to read its tokens.

``config.json`` names shapes, tokenizer and where the weights come from (run, step, SHA-256 of the checkpoint);
``model.safetensors`` holds the weights by their parameter's name. The tokenizer's own file, if it has one, is there as
``vocab.bpe`` or ``tokenizer.json``. ``README.md`` says the same in words. Whoever loads it executes nothing in it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from uvcc_engine.contract.checkpoints import checkpoint as ck
from uvcc_engine.contract.errors import ConfigError, UnreadableError, VerificationError
from uvcc_engine.contract.parsing import strict
from uvcc_engine.contract.run_files import files
from uvcc_engine.nsa.config import ModelConfig
from uvcc_engine.nsa.model import LanguageModel, parameter_count
from uvcc_engine.nsa.outlines import shapes_alone
from uvcc_engine.train import config as lm_config
from uvcc_engine.train.text.tokenizer import Tokenizer, make_tokenizer

FORMAT: Final = "uvcc-lm-1"
CONFIG: Final = "config.json"
WEIGHTS: Final = "model.safetensors"
MERGES: Final = "vocab.bpe"
TOKENIZER: Final = "tokenizer.json"
_FILE_OF: Final = {"gpt2": MERGES, "file": TOKENIZER}  # by the name of the tokenizer
_WIDTHS: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
MOST_LAYERS: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where weights come from: the run, its optimizer steps, the SHA-256 of that checkpoint's manifest."""

    run: str
    step: int
    checkpoint: str
    seq_len: int
    tokens: int  # read so far by all ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedConfig:
    """``config.json``. ``sha256`` is that of the weights' file."""

    model: ModelConfig
    origin: Origin
    tokenizer: str = "byte"
    precision: str = "fp32"
    sha256: str = ""
    format: str = FORMAT
    architectures: list[str] = field(default_factory=lambda: ["UvccNativeSparseAttention"])
    model_type: str = "uvcc_nsa"


@dataclass(frozen=True, slots=True)
class Exported:
    """A model that was read back, in evaluation mode, and its tokenizer."""

    config: ExportedConfig
    model: LanguageModel
    tokenizer: Tokenizer


def check_new(folder: Path) -> None:
    """Raises ConfigError for a folder that holds something, or a file."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already", "name a new folder")


def run_facts(run: Path) -> tuple[dict[str, Any], lm_config.LMConfig]:
    """``run.json`` of a language model's run directory, and the config in it. Raises UnreadableError, ConfigError."""
    path = run / files.RUN_JSON
    facts = files.read_json(path)
    if facts.get("kind") != "lm" or not isinstance(facts.get("config"), Mapping):
        raise UnreadableError(f"{path} is not that of a language model's training", "name the directory of its --out")
    return facts, lm_config.from_mapping(facts["config"])


@dataclass(frozen=True, slots=True)
class Taken:
    """What a checkpoint holds of a model, on its way into a folder; ``own``: the tokenizer's file."""

    said: ExportedConfig
    weights: dict[str, Tensor]
    own: Path | None


def export(run: Path, folder: Path, *, step: int = -1, precision: str = "fp32") -> ExportedConfig:
    """Write the weights of a run's verified checkpoint into a new ``folder``, which appears whole or not at all.

    Raises ConfigError for a folder that is not empty, and as ``take`` does.
    """
    check_new(folder)
    taken = take(run, step=step, precision=precision)
    return write(folder, taken.said, taken.weights, taken.own)


def take(run: Path, *, step: int = -1, precision: str = "fp32") -> Taken:
    """The model of a run's verified checkpoint. ``step``: of which; the newest by default.

    Raises ConfigError (no such checkpoint), VerificationError (an altered one).
    """
    if precision not in _WIDTHS:
        raise ConfigError(f"precision {precision!r} is unknown", " | ".join(_WIDTHS))
    facts, cfg = run_facts(run)
    root = run / files.CHECKPOINTS
    there = ck.steps_present(root)
    if not there:
        raise ConfigError(f"{run} has no checkpoint yet", "halt the training, or wait for train.save_every")
    if step >= 0 and step not in there:
        raise ConfigError(f"there is no checkpoint of step {step}", f"there are those of {', '.join(map(str, there))}")
    manifest = ck.verify_step(root, there[0] if step < 0 else step, run=str(facts.get("run", "")))
    weights = {n: t.to(_WIDTHS[precision]) for n, t in _weights_of(manifest).items()}
    per_step = cfg.train.batch_size * cfg.train.accumulate * cfg.train.seq_len
    origin = Origin(
        run=manifest.run,
        step=manifest.step,
        checkpoint=manifest.sha256,
        seq_len=cfg.train.seq_len,
        tokens=manifest.step * per_step,
    )
    said = ExportedConfig(model=cfg.model, origin=origin, tokenizer=cfg.data.tokenizer, precision=precision)
    return Taken(said, weights, _tokenizer_file(cfg.data))


def _tokenizer_file(data: lm_config.DataConfig) -> Path | None:
    """The file that the training's tokenizer came from; None where it came with the package."""
    name = data.tokenizer_file or data.merges
    return Path(name).expanduser() if name else None


def _weights_of(manifest: ck.CheckpointManifest) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    path = manifest.path / ck.rank_file(min(manifest.ranks))
    try:
        with safe_open(path, framework="pt") as f:
            return {n.removeprefix("model."): f.get_tensor(n) for n in f.keys() if n.startswith("model.")}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise VerificationError("checkpoint", f"{path} cannot be loaded: {error}", ck.EARLIER) from error


def write(folder: Path, said: ExportedConfig, weights: dict[str, Tensor], own: Path | None) -> ExportedConfig:
    """Write a new ``folder`` whole or not at all; the config with its weights' hash. ``own``: the tokenizer's file.

    Raises UvccError where the disk refuses.
    """

    def documents(sha256: str) -> dict[str, bytes]:
        hashed = dataclasses.replace(said, sha256=sha256)
        config = json.dumps(dataclasses.asdict(hashed), indent=2) + "\n"
        found = {CONFIG: config.encode(), "README.md": _card(hashed).encode()}
        return found if own is None else {**found, _FILE_OF[said.tokenizer]: own.read_bytes()}

    return dataclasses.replace(said, sha256=write_folder(folder, weights, documents))


def write_folder(folder: Path, weights: Mapping[str, Tensor], documents: Callable[[str], Mapping[str, bytes]]) -> str:
    """Write a new ``folder`` of weights and other files, whole or not at all. ``documents``: these files, given the
    SHA-256 of the weights' file, which is returned. Raises UvccError where the disk refuses."""
    making = folder.with_name(f"{folder.name}.making-{os.getpid()}")
    try:
        making.mkdir(parents=True)
        write_tensors(weights, making / WEIGHTS, {"format": "pt"})
        digest = _sha256(making / WEIGHTS)
        for name, data in documents(digest).items():
            (making / name).write_bytes(data)
        if folder.exists():
            folder.rmdir()
        os.rename(making, folder)
    except OSError as error:
        raise files.write_failed(folder, error) from error
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return digest


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _card(said: ExportedConfig) -> str:
    m, o = said.model, said.origin
    return (
        f"# {o.run}, step {o.step}\n\n"
        f"A decoder of {m.n_layers} layers, width {m.dim}, {m.n_heads} heads over {m.n_kv_groups} key-value groups, "
        f"attention: {m.attention}; {parameter_count(m):,} parameters in {said.precision}.\n"
        f"Trained on {o.tokens:,} tokens in rows of {o.seq_len}; tokens are those of the `{said.tokenizer}` "
        f"tokenizer.\n\n"
        f"Weights: `{WEIGHTS}`, SHA-256 `{said.sha256}`, taken from the checkpoint `{o.checkpoint}`.\n\n"
        "```bash\nuvcc-engine generate . --prompt 'Once'\n```\n"
    )


def read_config(folder: Path) -> ExportedConfig:
    """``config.json`` of an exported folder. Raises UnreadableError naming what is not as it should be."""
    path = folder / CONFIG
    if not path.is_file():
        raise UnreadableError(f"{folder} holds no {CONFIG}", "make such a folder: uvcc-engine export RUN --out DIR")
    raw = files.read_json(path)
    if raw.get("format") != FORMAT:
        raise UnreadableError(f"{path} is of format {str(raw.get('format'))[:40]!r}", f"this version reads {FORMAT}")
    said = strict.read(ExportedConfig, raw, str(path))
    if said.tokenizer not in lm_config.TOKENIZERS or said.precision not in _WIDTHS:
        raise UnreadableError(f"{path}: tokenizer {said.tokenizer!r}, precision {said.precision!r}", "export it again")
    if said.model.n_layers > MOST_LAYERS:
        raise UnreadableError(f"{path} asks for {said.model.n_layers} layers", f"at most {MOST_LAYERS}")
    if said.model.vocab != lm_config.VOCAB.get(said.tokenizer, said.model.vocab):
        raise UnreadableError(f"{path}: {said.model.vocab} symbols do not fit the tokenizer {said.tokenizer}")
    return said


def read_weights(folder: Path) -> tuple[ExportedConfig, dict[str, Tensor]]:
    """Config and fp32 weights of an exported folder, each tensor of the shape that the config asks for.

    Raises UnreadableError, and VerificationError where the weights are not those that the config was written with.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    said, path = read_config(folder), folder / WEIGHTS
    with shapes_alone():
        wanted = {n: p.shape for n, p in LanguageModel(said.model).named_parameters()}
    try:
        if _sha256(path) != said.sha256:
            raise VerificationError("export", f"{path} was altered after it was written", "export it again")
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UnreadableError(f"cannot load {path}: {error}", "export it again") from error
    for name in sorted(wanted.keys() ^ found.keys()):
        raise UnreadableError(f"{name} is only in {'the weights' if name in found else 'the config'} of {folder}")
    for name, shape in wanted.items():
        if found[name].shape != shape or not found[name].isfinite().all():
            raise UnreadableError(f"{name} in {path} is no finite tensor of shape {tuple(shape)}", "export it again")
    return said, {n: t.float() for n, t in found.items()}


def load(folder: Path) -> Exported:
    """The model of an exported folder, ready to generate. Raises as ``read_weights`` does."""
    said, weights = read_weights(folder)
    with shapes_alone():
        model = LanguageModel(said.model)
    model.load_state_dict(weights, assign=True)
    own = folder / _FILE_OF.get(said.tokenizer, MERGES)
    there = str(own) if own.exists() or said.tokenizer == "file" else ""
    tokenizer = make_tokenizer(said.tokenizer, there, said.model.vocab)
    return Exported(said, model.eval(), tokenizer)


@torch.no_grad()
def start_from(model: LanguageModel, folder: Path) -> str:
    """Put an exported folder's weights into a fresh ``model``; returns their SHA-256.

    A model on torch's meta device takes none: then this only tells whether it could. Raises ConfigError for weights of
    other shapes, and as ``read_weights`` does.
    """
    said, weights = read_weights(folder)
    own = dict(model.named_parameters())
    for name in sorted(own.keys() ^ weights.keys()):
        raise ConfigError(f"train.init={folder}: {name} is only on one side", "set model to that of its config.json")
    for name, p in own.items():
        if p.shape != weights[name].shape:
            shapes = f"{tuple(weights[name].shape)}, the model's {tuple(p.shape)}"
            raise ConfigError(f"train.init={folder}: {name} is {shapes}", "set model to that of its config.json")
        p.copy_(weights[name])
    return said.sha256


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a file of safetensors. Raises OSError, as any other write, where the system refuses: safetensors hides its
    error in a sentence of its own."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, metadata=metadata)
    except SafetensorError as error:
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error
