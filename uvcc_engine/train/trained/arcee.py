"""A dense model as Hugging Face's transformers reads it, and back: ``export --format transformers``, ``import``.

Of its architectures Arcee's is the one that computes what a dense model here does: a Llama whose MLP has no gate. The
weights are the same numbers under that architecture's names; the rows of queries and keys change places within a head,
since a rotation pairs neighbours here and the two halves of a head there. Both ways lose nothing. None of transformers'
architectures computes native sparse attention: such a model is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.machine.raising_parser import RaisingParser
from uvcc_engine.contract.run_files import files
from uvcc_engine.nsa.config import ModelConfig
from uvcc_engine.train.config import VOCAB
from uvcc_engine.train.text.tokenizer import END, GPT2_END, ByteTokenizer, OwnTokenizer, byte_characters
from uvcc_engine.train.trained import exported
from uvcc_engine.train.trained.exported import CONFIG, TOKENIZER, WEIGHTS, ExportedConfig, Origin

EPSILON: Final = torch.finfo(torch.float32).eps  # that of nn.RMSNorm, which the models here use
_INDEX: Final = f"{WEIGHTS}.index.json"
_TOKENIZER_CONFIG: Final = "tokenizer_config.json"
_LARGEST_JSON: Final = 64 << 20
_NO_NSA: Final = "none of transformers' architectures computes native sparse attention"
_FIXED: Final[Mapping[str, Any]] = {
    "hidden_act": "gelu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "tie_word_embeddings": True,
}
"""What the models here always are, by the names of Arcee's config."""
_WHOLE: Final = {
    "norm_a.weight": "input_layernorm.weight",
    "norm_m.weight": "post_attention_layernorm.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "up.weight": "mlp.up_proj.weight",
    "down.weight": "mlp.down_proj.weight",
}
"""Tensors of a block that only change their names."""


def config_of(said: ExportedConfig) -> dict[str, Any]:
    """Arcee's ``config.json`` for a dense model. Raises ConfigError for what that architecture does not compute."""
    m = said.model
    if m.attention != "dense":
        hint = "leave --format out: safetensors reads that folder's weights, and uvcc-engine generate runs them"
        raise ConfigError(f"this model's attention is {m.attention}, and {_NO_NSA}", hint)
    if m.d_k != m.d_v:
        raise ConfigError(
            f"d_k={m.d_k} and d_v={m.d_v}: Arcee's architecture has one size of heads", "leave --format out"
        )
    if m.dim % m.n_heads:
        what = f"dim={m.dim} is no multiple of n_heads={m.n_heads}, which transformers asks of Arcee's models"
        raise ConfigError(what, "leave --format out")
    scaling = {"rope_type": "linear", "type": "linear", "factor": m.rope_scale} if m.rope_scale != 1.0 else None
    return {
        "architectures": ["ArceeForCausalLM"],
        "model_type": "arcee",
        "vocab_size": m.vocab,
        "hidden_size": m.dim,
        "intermediate_size": 4 * m.dim,
        "num_hidden_layers": m.n_layers,
        "num_attention_heads": m.n_heads,
        "num_key_value_heads": m.n_kv_groups,
        "head_dim": m.d_k,
        "rms_norm_eps": EPSILON,
        "rope_theta": m.rope_base,
        "rope_scaling": scaling,
        "max_position_embeddings": said.origin.seq_len,
        "bos_token_id": None,
        "torch_dtype": "float32" if said.precision == "fp32" else "bfloat16",
        **_FIXED,
        "uvcc": {"origin": dataclasses.asdict(said.origin), "tokenizer": said.tokenizer},
    }


def weights_to(m: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A dense model's tensors under Arcee's names."""
    found = {"model.embed_tokens.weight": weights["embed.weight"], "model.norm.weight": weights["norm.weight"]}
    halves = _halves(m.d_k)
    for i in range(m.n_layers):
        ours, theirs = f"blocks.{i}.", f"model.layers.{i}."
        found |= {theirs + b: weights[ours + a] for a, b in _WHOLE.items()}
        k, v = torch.chunk(weights[f"{ours}attention.kv.weight"], 2)
        found[f"{theirs}self_attn.q_proj.weight"] = _within_heads(weights[f"{ours}attention.q.weight"], halves)
        found[f"{theirs}self_attn.k_proj.weight"] = _within_heads(k, halves)
        found[f"{theirs}self_attn.v_proj.weight"] = v
    return {name: tensor.contiguous() for name, tensor in found.items()}


def weights_from(m: ModelConfig, theirs: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """The inverse of ``weights_to``. Raises UnreadableError naming a tensor that is missing, unknown or misshapen."""
    wanted = dict(_shapes(m))
    found = dict(theirs)
    head = found.pop("lm_head.weight", None)  # a tied output may be written twice
    for name in sorted(wanted.keys() ^ found.keys()):
        raise UnreadableError(f"{name} is only in {'the weights' if name in found else 'the config'} of {where}")
    for name, shape in wanted.items():
        if tuple(found[name].shape) != shape or not found[name].isfinite().all():
            raise UnreadableError(f"{name} in {where} is no finite tensor of shape {shape}")
    embed = found["model.embed_tokens.weight"]
    if head is not None and not torch.equal(head, embed):
        raise UnreadableError(f"lm_head.weight in {where} is not the embedding, to which the models here tie it")
    back = torch.argsort(_halves(m.d_k))
    ours = {"embed.weight": embed, "norm.weight": found["model.norm.weight"]}
    for i in range(m.n_layers):
        to, of = f"blocks.{i}.", f"model.layers.{i}."
        ours |= {to + a: found[of + b] for a, b in _WHOLE.items()}
        ours[f"{to}attention.q.weight"] = _within_heads(found[f"{of}self_attn.q_proj.weight"], back)
        k = _within_heads(found[f"{of}self_attn.k_proj.weight"], back)
        ours[f"{to}attention.kv.weight"] = torch.cat([k, found[f"{of}self_attn.v_proj.weight"]])
    return {name: tensor.contiguous() for name, tensor in ours.items()}


def _halves(d: int) -> Tensor:
    """The rows of a head in Arcee's order: the first of each rotated pair, then the second of each."""
    return torch.cat([torch.arange(0, d, 2), torch.arange(1, d, 2)])


def _within_heads(weight: Tensor, order: Tensor) -> Tensor:
    """weight [heads * d, dim] with each head's rows in another ``order`` [d]."""
    return weight.view(-1, len(order), weight.shape[1])[:, order].flatten(0, 1)


def _shapes(m: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Arcee's tensors, without its output, which is tied."""
    queries, keys = m.n_heads * m.d_k, m.n_kv_groups * m.d_k
    yield "model.embed_tokens.weight", (m.vocab, m.dim)
    yield "model.norm.weight", (m.dim,)
    for i in range(m.n_layers):
        at = f"model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}{name}.weight", (m.dim,)
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{at}self_attn.{name}_proj.weight", (rows, m.dim)
        yield f"{at}self_attn.o_proj.weight", (m.dim, queries)
        yield f"{at}mlp.up_proj.weight", (4 * m.dim, m.dim)
        yield f"{at}mlp.down_proj.weight", (m.dim, 4 * m.dim)


def export(run: Path, folder: Path, *, step: int = -1, precision: str = "fp32") -> ExportedConfig:
    """Write a run's checkpoint for transformers into a new ``folder``. Raises as ``exported.export`` and ``write``."""
    exported.check_new(folder)
    taken = exported.take(run, step=step, precision=precision)
    return write(folder, taken.said, taken.weights, taken.own)


def write(folder: Path, said: ExportedConfig, weights: Mapping[str, Tensor], own: Path | None) -> ExportedConfig:
    """Write a new ``folder`` for ``transformers.AutoModelForCausalLM``, whole or not at all. ``own``: the tokenizer's
    file. Raises ConfigError for a model that Arcee's architecture does not say, UvccError where the disk refuses."""
    config = config_of(said)
    config["eos_token_id"] = _end_of(said.tokenizer, own)
    documents = {CONFIG: _json(config), "README.md": _card(said).encode()}
    if said.tokenizer != "gpt2":
        documents[TOKENIZER] = _json(_byte_tokenizer()) if own is None else own.read_bytes()
        documents[_TOKENIZER_CONFIG] = _json(
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False}
        )
    sha256 = exported.write_folder(folder, weights_to(said.model, weights), lambda digest: documents)
    return dataclasses.replace(said, sha256=sha256)


def _end_of(tokenizer: str, own: Path | None) -> int:
    if tokenizer == "file":
        assert own is not None
        return OwnTokenizer(own).eos
    return {"byte": ByteTokenizer.eos, "gpt2": GPT2_END}[tokenizer]


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _byte_tokenizer() -> dict[str, Any]:
    """The byte tokenizer as a ``tokenizer.json``: byte pairs without a merge; a zero byte in a text is a space."""
    vocab = {c: b for b, c in enumerate(byte_characters())} | {END: ByteTokenizer.eos}
    del vocab[byte_characters()[ByteTokenizer.eos]]
    ended = {"id": ByteTokenizer.eos, "content": END, "single_word": False, "lstrip": False, "rstrip": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**ended, "normalized": False, "special": True}],
        "normalizer": {"type": "Replace", "pattern": {"String": "\0"}, "content": " "},
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "vocab": vocab, "merges": []},
    }


def _card(said: ExportedConfig) -> str:
    where = '"gpt2"' if said.tokenizer == "gpt2" else '"."'
    return (
        f"# {said.origin.run}, step {said.origin.step}\n\n"
        f"A dense decoder trained on {said.origin.tokens:,} tokens in rows of {said.origin.seq_len}, in the form of "
        "transformers' Arcee architecture.\n\n"
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained(".")\n'
        f"tokenizer = AutoTokenizer.from_pretrained({where})\n```\n\n"
        "`uvcc-engine import . --out DIR` takes it back, for `train.init` or `uvcc-engine generate`.\n"
    )


def read_model(config: Mapping[str, Any], where: str) -> ModelConfig:
    """The shapes in an Arcee ``config.json``. Raises UnreadableError for what a model here would compute otherwise."""

    def number(name: str, kind: type[int] | type[float], default: float | None = None) -> Any:
        value = config.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float) or not value > 0:
            raise UnreadableError(f"{where}: {name} is {str(value)[:40]!r}", "it must be a number above 0")
        return kind(value)

    kind = str(config.get("model_type"))[:40]
    if kind != "arcee":
        hint = "only Arcee's has an MLP without a gate and no biases, as the models here"
        raise UnreadableError(f"{where} is of the architecture {kind!r}", hint)
    for name, wanted in _FIXED.items():
        if config.get(name) != wanted:
            raise UnreadableError(
                f"{where}: {name} is {str(config.get(name))[:40]!r}", f"the models here have {wanted!r}"
            )
    if abs(number("rms_norm_eps", float) - EPSILON) > 1e-6:
        what = f"{where}: rms_norm_eps is {config['rms_norm_eps']}"
        raise UnreadableError(what, f"the models here have {EPSILON:.3g}, and would compute something else")
    dim, heads, layers = (
        number("hidden_size", int),
        number("num_attention_heads", int),
        number("num_hidden_layers", int),
    )
    if number("intermediate_size", int) != 4 * dim:
        raise UnreadableError(f"{where}: intermediate_size is not four times hidden_size", "the models here have that")
    if layers > exported.MOST_LAYERS:
        raise UnreadableError(f"{where} asks for {layers} layers", f"at most {exported.MOST_LAYERS}")
    size = number("head_dim", int, dim // heads)
    base, scale = _rope(config, where)
    try:
        return ModelConfig(
            vocab=number("vocab_size", int),
            dim=dim,
            n_layers=layers,
            n_heads=heads,
            n_kv_groups=number("num_key_value_heads", int, heads),
            d_k=size,
            d_v=size,
            rope_base=base,
            rope_scale=scale,
            attention="dense",
        )
    except ConfigError as error:
        raise UnreadableError(f"{where}: {error.what}", error.hint) from error


def _rope(config: Mapping[str, Any], where: str) -> tuple[float, float]:
    """Base and scale of the rotation, in the words of transformers 5 (``rope_parameters``) or of 4."""
    said = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(said, Mapping):
        raise UnreadableError(f"{where}: rope_parameters is {str(said)[:40]!r}", "it must be an object")
    kind = said.get("rope_type", said.get("type", "default"))
    base, scale = said.get("rope_theta", config.get("rope_theta", 10_000.0)), said.get("factor", 1.0)
    if kind not in ("default", "linear"):
        raise UnreadableError(f"{where}: rope_type is {str(kind)[:40]!r}", "default or linear")
    for value in (base, scale):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < math.inf:
            raise UnreadableError(f"{where}: a rotation of base {str(base)[:40]} and factor {str(scale)[:40]}")
    return float(base), float(scale) if kind == "linear" else 1.0


def import_model(source: Path, folder: Path) -> ExportedConfig:
    """Write the model of a ``transformers`` folder as one of ours. Raises UnreadableError naming what does not fit."""
    exported.check_new(folder)
    where = source / CONFIG
    config = files.read_json(where)
    model = read_model(config, str(where))
    theirs, digest = _tensors(source)
    weights = weights_from(model, theirs, str(source))
    bf16 = all(t.dtype == torch.bfloat16 for t in weights.values())
    ours = config.get("uvcc")
    tokenizer, own = _tokenizer(source, ours if isinstance(ours, Mapping) else {}, model.vocab)
    said = ExportedConfig(
        model=model, origin=_origin(source, config, digest), tokenizer=tokenizer, precision="bf16" if bf16 else "fp32"
    )
    return exported.write(folder, said, weights if bf16 else {n: t.float() for n, t in weights.items()}, own)


def _origin(source: Path, config: Mapping[str, Any], digest: str) -> Origin:
    """Where the weights come from: the run that the folder names, or else the folder."""
    length = config.get("max_position_embeddings")
    seq_len = length if isinstance(length, int) and length > 0 else 1
    run = source.resolve().name
    return Origin(run=run, step=0, checkpoint=digest, seq_len=seq_len, tokens=0)


def _tensors(source: Path) -> tuple[dict[str, Tensor], str]:
    """Every tensor of the folder's safetensors files, and the SHA-256 of the one, or of their index."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    index = source / _INDEX
    names, path = {WEIGHTS}, source / WEIGHTS
    if index.is_file():
        said, path = files.read_json(index).get("weight_map"), index
        if not isinstance(said, Mapping) or not all(isinstance(n, str) and n == Path(n).name for n in said.values()):
            raise UnreadableError(f"{index} names no files beside it", "its weight_map says which file holds a tensor")
        names = set(said.values())
    found: dict[str, Tensor] = {}
    try:
        for name in sorted(names):
            found |= load_file(source / name)
        return found, hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, SafetensorError) as error:
        hint = "the model must be saved with safetensors: save_pretrained(DIR, safe_serialization=True)"
        raise UnreadableError(f"cannot load the weights of {source}: {error}", hint) from error


def _tokenizer(source: Path, ours: Mapping[str, Any], vocab: int) -> tuple[str, Path | None]:
    """The tokenizer by its name, and its file where it has one."""
    name = ours.get("tokenizer")
    if name in VOCAB:
        return str(name), None
    own = source / TOKENIZER
    if not own.is_file():
        raise UnreadableError(f"{source} holds no {TOKENIZER}", "save the tokenizer beside the model")
    OwnTokenizer(own, vocab)
    return "file", own


def main(argv: list[str]) -> int:
    """``uvcc-engine import DIR --out DIR``: a model that transformers saved, as ``uvcc-engine export`` writes one."""
    parser = RaisingParser(prog="uvcc-engine import", description="take a model of Hugging Face's transformers")
    parser.add_argument("folder", type=Path, help="what save_pretrained or export --format transformers wrote")
    parser.add_argument("--out", type=Path, required=True, help="the new folder")
    args = parser.parse_args(argv)
    said = import_model(args.folder, args.out)
    print(f"{args.out}: {said.model.n_layers} layers, weights {said.sha256}")
    return 0
