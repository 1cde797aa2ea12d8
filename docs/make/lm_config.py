"""Every key of a language model's config with its default and meaning, as the trainer reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, Final

from docs.make.words import HEAD

ABOUT: Final[dict[str, str]] = {
    "model": "The transformer. `nsa` may stand at the top, beside `model`.",
    "model.nsa": "The block geometry of Native Sparse Attention (arXiv 2502.11089, section 3.3).",
    "data": "The text and how it becomes tokens.",
    "runtime": "Device and arithmetic. Weights and the optimizer's states are always fp32.",
    "ddp": "Several ranks, by DistributedDataParallel.",
    "train": "Steps, rates, what is written, and what is kept.",
}
MEANINGS: Final[dict[str, str]] = {
    "model.vocab": "symbols of the tokenizer: 256 for `byte`, 50257 for `gpt2`",
    "model.dim": "width of the residual stream",
    "model.n_layers": "blocks of attention and MLP",
    "model.n_heads": "query heads; a multiple of `n_kv_groups`",
    "model.n_kv_groups": "groups of query heads that share keys and values (GQA)",
    "model.d_k": "width of a query and a key; even",
    "model.d_v": "width of a value",
    "model.rope_base": "base of the rotary positions",
    "model.rope_scale": "positions are divided by this, for long context",
    "model.attention": "`nsa`, or `dense`: the same model with one full causal branch",
    "model.nsa.l": "tokens of a compression block; a multiple of `d`, at most `l_sel`",
    "model.nsa.d": "stride between compression blocks",
    "model.nsa.l_sel": "tokens of a selection block; a multiple of `d`",
    "model.nsa.n_sel": "selected blocks per query and group, the first and the two local ones included",
    "model.nsa.w": "tokens of the sliding window, the query's own included",
    "data.source": "`local` (files below `path`), `python_docs` (the manual that each Python carries), `fineweb_edu` "
    "(a stream of the hub), `prepared` (what `uvcc-engine data prepare` wrote to `path`), `hidden_letters` (passages "
    "of the manual or of `path` in which three letters are hidden and asked for) or `synthetic` (made up)",
    "data.path": "of `local` a .txt or .jsonl file or a folder of them; of `fineweb_edu` another dataset, a folder "
    "of its shards or of `save_to_disk`, or one .parquet or .jsonl file; of `prepared` its folder",
    "data.tokenizer": "`byte` (256 symbols, 0 ends a document), `gpt2` (50257, 50256 ends a document) or `file`",
    "data.tokenizer_file": "of `file`: what `uvcc-engine data tokenizer` or Hugging Face's tokenizers wrote",
    "data.merges": "a file with GPT-2's merges (vocab.bpe or merges.txt); without it tiktoken fetches them",
    "data.shuffle": "prepared text in another order in each pass, which follows from `train.seed`",
    "data.val_percent": "documents whose hash falls in this share are held out, for ever",
    "data.queue": "batches that are read ahead",
    "data.retries": "how often a failed read is repeated before the source counts as unreachable",
    "runtime.device": "`cpu`, `cuda`, or `auto`: a GPU where there is one",
    "runtime.precision": "`bf16` or `fp32` arithmetic",
    "runtime.gradient_checkpointing": "activations are computed again in the backward pass: less memory, more time",
    "runtime.checkpoint_layers": "only in the blocks `first:behind`, like `0:6`; empty: in all",
    "runtime.compile": "torch.compile, block by block",
    "runtime.nvtx": "mark fetch, forward, backward and optimizer for a CUDA profiler",
    "ddp.shard": "`true`: each rank keeps a part of weights, gradients and moments (torch's fully_shard, FSDP2)",
    "ddp.context": "so many neighbouring ranks share the tokens of each row, for rows that are too long for one GPU",
    "ddp.tensor": "with `ddp.shard`: so many neighbouring ranks compute each block together, on the same rows",
    "ddp.compress": "`bf16` sends gradients in half the bytes; `off` sends them as they are",
    "ddp.bucket_mb": "MiB of gradients that are sent together",
    "ddp.static_graph": "torch may assume that every step uses the same parameters",
    "ddp.find_unused": "look for parameters that a step did not use",
    "ddp.broadcast_buffers": "rank 0's buffers are sent to all before each step",
    "ddp.gradient_as_bucket_view": "gradients lie in the buckets themselves: one copy less",
    "ddp.timeout_min": "minutes until a collective that does not come is given up",
    "train.steps": "steps of the optimizer",
    "train.seq_len": "tokens of a row",
    "train.batch_size": "rows of one micro-batch, over all ranks",
    "train.accumulate": "micro-batches of a step",
    "train.lr": "the highest learning rate",
    "train.warmup": "steps over which the rate rises to it",
    "train.schedule": "then: `cosine` down to `min_lr`, `constant`, or `wsd` (constant, then a straight line down)",
    "train.min_lr": "the rate at the end",
    "train.decay_steps": "steps of the straight line of `wsd`; 0: a tenth of all",
    "train.init": "a folder that `uvcc-engine export` made, with whose weights a new training begins",
    "train.optimizer": "`adamw`, or `muon` for the matrices inside the blocks, with AdamW for the rest (torch 2.9)",
    "train.loss_chunk": "tokens whose logits are held at once; 0: all. Less memory with a large vocabulary",
    "train.weight_decay": "of AdamW",
    "train.grad_clip": "the gradient's largest norm",
    "train.nonfinite": "a gradient that is not a number: `stop`, `skip` the step (five in a row at most), or "
    "`rollback`: do the steps since the last checkpoint again, three times at most; what comes again ends the run",
    "train.seed": "of the first weights, of made-up text and of the shuffled order",
    "train.log_every": "steps between two rows of training.csv",
    "train.eval_every": "steps between two rows of val.csv; 0: never",
    "train.eval_batches": "batches of a validation",
    "train.save_every": "steps between two checkpoints; 0: at the end and on a halt only",
    "train.keep": "checkpoints that are kept",
    "train.sample_tokens": "the finished model writes so many, at most 4096, for the result screen and sample.txt",
    "train.sinks": "services that are told of every logged row: `wandb`, `mlflow`, both with a comma between them, or "
    "what another package plugs in; TensorBoard's curves are in `tb/` in any case",
    "train.project": "the project (Weights & Biases) or experiment (MLflow) that sinks file the run under",
}


def _sections(cls: Any, path: str) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    own, inner = [], []
    for field in fields(cls):
        value: Any = field.default_factory if is_dataclass(field.default_factory) else field.default
        (inner if is_dataclass(value) else own).append((f"{path}.{field.name}".lstrip("."), value))
    if own:
        yield path, own
    for name, part in inner:
        yield from _sections(part, name)


def sections() -> list[tuple[str, list[tuple[str, Any]]]]:
    """(section, its keys with their defaults), in the order of the config."""
    from uvcc_engine.train.config import LMConfig

    return list(_sections(LMConfig, ""))


def page() -> str:
    """Every key with its default and meaning, section by section."""
    lines = [
        "# A language model's config",
        "",
        HEAD,
        "",
        "`uvcc-engine train FILE.yaml` and a profile's `job.config` read it. A key or an `NSA_*` variable that would",
        "have no effect is an error that names the nearest known one. `--set section.key=value` (in a profile",
        "`job.overrides`) changes one key for one run. The [tutorial](../tutorials/language-model.md) writes one.",
        "",
    ]
    for section, keys in sections():
        lines += [f"## {section}", "", ABOUT[section], "", "| key | default | means |", "|---|---|---|"]
        for key, default in keys:
            shown = "" if default == "" else f"`{json.dumps(default)}`"
            lines.append(f"| `{key.removeprefix(section + '.')}` | {shown} | {MEANINGS[key]} |")
        lines.append("")
    return "\n".join(lines)
