"""Ways of training beside the plain one: parts of the weights at each rank, Muon, logits in chunks, compiled blocks."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lm_kit import SMALL, free_port, run_here, small, start_ranks
from safetensors.torch import load_file
from test_lm_exact import exact

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.nsa.config import ModelConfig
from uvcc_engine.nsa.model import LanguageModel, token_loss
from uvcc_engine.train import config as lm_config
from uvcc_engine.train import env as lm_env
from uvcc_engine.train import lm_optimizers, memory_plan, model_flops
from uvcc_engine.train.dimensions import sharded
from uvcc_engine.train.sinks.printed_rows import PrintedRows


def test_parts_at_each_rank_train_what_whole_copies_train(tmp_path: Path) -> None:
    """Two ranks, four steps, gradients sent as they are: only the order of sums differs."""
    weights = []
    for folder, ddp in (("whole", {"bucket_mb": 1}), ("parts", {"shard": True})):
        (name,) = exact(tmp_path / folder, 2, "2", ddp=ddp, compress=["off"], once=True)
        there = tmp_path / folder / name.replace(" ", "_").replace(",", "") / "checkpoints" / "step-4"
        weights.append(load_file(there / "rank0.safetensors"))
    whole, parts = weights
    assert whole.keys() == parts.keys()
    for tensor in whole:
        assert torch.allclose(whole[tensor], parts[tensor], rtol=1e-3, atol=1e-6), tensor
    assert not torch.equal(whole["model.embed.weight"], LanguageModel(small().model).embed.weight)


@pytest.mark.parametrize(
    "attention",
    [pytest.param("nsa", marks=pytest.mark.ci(__file__)), pytest.param("dense", marks=pytest.mark.slow)],
)
def test_ranks_that_compute_each_block_together_train_what_one_does(tmp_path: Path, attention: str) -> None:
    """Two ranks read the same rows as one alone; only the order of sums differs. Metrics are of all heads."""
    told: list[list[float]] = []
    weights, model = [], {"n_kv_groups": 2, "n_heads": 4, "attention": attention}
    for folder, world, ddp in (("one", 1, {"bucket_mb": 1}), ("two", 2, {"shard": True, "tensor": 2})):
        (name,) = exact(tmp_path / folder, world, "2", ddp=ddp, compress=["off"], model=model)
        there = tmp_path / folder / name.replace(" ", "_").replace(",", "")
        weights.append(load_file(there / "checkpoints" / "step-4" / "rank0.safetensors"))
        beats = [json.loads(line) for line in (there / "heartbeat_rank0.jsonl").read_text().splitlines()]
        names = ["loss", "grad_norm", *(["gate_entropy_mean", "gate_max_gate"] if attention == "nsa" else [])]
        told.append([b[name] for b in beats if b["step"] == 1 and "grad_norm" in b for name in names][: len(names)])
    assert told[0] == pytest.approx(told[1], rel=1e-4)
    assert len(told[0]) == (4 if attention == "nsa" else 2)
    one, two = weights
    assert one.keys() == two.keys()
    far = {name: float((one[name] - two[name]).norm() / one[name].norm().clamp_min(1e-12)) for name in one}
    assert max(far.values()) < 5e-3, far  # of a few entries Adam takes the sign of what rounding left


@pytest.mark.parametrize("chunk", [1, 7, 32, 96, 1000])
def test_logits_in_chunks_give_the_same_loss_and_gradient(chunk: int) -> None:
    torch.manual_seed(1)
    hidden = torch.randn(2, 48, 32, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(256, 32, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 256, (2, 48))
    plain = torch.autograd.grad(token_loss(hidden, weight, labels), (hidden, weight))
    parts = torch.autograd.grad(token_loss(hidden, weight, labels, chunk), (hidden, weight))
    assert torch.allclose(token_loss(hidden, weight, labels), token_loss(hidden, weight, labels, chunk))
    assert all(torch.allclose(a, b) for a, b in zip(plain, parts, strict=True))


@pytest.mark.ci(__file__)
def test_chunks_take_the_logits_out_of_a_steps_memory() -> None:
    """1,024 tokens of 50,257 symbols: 196 MiB of logits in fp32, their gradient and their softmax."""
    cfg = ModelConfig(vocab=50257, dim=64, n_layers=1, n_heads=2, n_kv_groups=1, d_k=16, d_v=16)
    whole, parts = (memory_plan.peak_of(cfg, 2, 512, bf16=False, recompute=False, chunk=c) for c in (0, 64))
    logits = 4 * 1024 * 50257
    assert whole - parts > logits


@pytest.mark.ci(__file__)
def test_a_model_in_parts_needs_less_at_each_rank() -> None:
    cfg = small(batch_size=4)
    cfg = replace(cfg, model=replace(cfg.model, dim=512, n_heads=8, d_k=64, d_v=64, n_layers=12))
    copies = memory_plan.estimate(cfg, 4)
    parts = memory_plan.estimate(replace(cfg, ddp=replace(cfg.ddp, shard=True)), 4)
    assert parts < 0.5 * copies


def test_muon_takes_the_matrices_inside_the_blocks_and_learns(tmp_path: Path) -> None:
    cfg = small(optimizer="muon", steps=30)
    run_here(cfg, tmp_path)
    rows = list(csv.DictReader((tmp_path / "training.csv").open()))
    assert float(rows[-1]["loss"]) < 0.8 * float(rows[0]["loss"])
    saved = load_file(tmp_path / "checkpoints" / "step-30" / "rank0.safetensors")
    by_muon = {n.removeprefix("optim.").removesuffix(".momentum_buffer") for n in saved if "momentum_buffer" in n}
    named = dict(LanguageModel(cfg.model).named_parameters())
    assert by_muon == {n for n, p in named.items() if p.ndim == 2 and n.startswith("blocks.")}
    assert "optim.embed.weight.exp_avg" in saved


def test_muon_is_refused_where_torch_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ConfigError, match="muon, which torch") as caught:
        lm_optimizers.make_optimizers(LanguageModel(small().model), small(optimizer="muon").train)
    assert "torch 2.9" in caught.value.hint


def test_an_old_torch_computes_no_block_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.6.1")
    with pytest.raises(ConfigError, match=r"ddp\.tensor=2 needs what torch 2\.6\.1"):
        sharded.shard(LanguageModel(small().model), torch.device("cpu"), 2, "off", 2)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"ddp": {"shard": True, "bucket_mb": 2}}, r"ddp\.bucket_mb has no effect with ddp\.shard"),
        ({"ddp": {"shard": True, "static_graph": True}}, r"ddp\.static_graph has no effect"),
        ({"ddp": {"shard": True}, "train": {**SMALL["train"], "optimizer": "muon"}}, "muon needs whole matrices"),
        ({"ddp": {"tensor": 2}}, r"ddp\.tensor=2 needs parameters in parts"),
        ({"ddp": {"shard": True, "tensor": 2}}, r"n_kv_groups=1 cannot be shared by ddp\.tensor=2"),
        ({"ddp": {"shard": True, "tensor": 0}}, r"ddp\.tensor=0"),
        ({"train": {**SMALL["train"], "optimizer": "sgd"}}, r"train\.optimizer='sgd' is unknown"),
        ({"train": {**SMALL["train"], "loss_chunk": -1}}, r"train\.loss_chunk=-1"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(more: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        lm_config.from_mapping({**SMALL, **more})


def test_a_setting_of_the_environment_that_sharding_leaves_without_effect_is_refused() -> None:
    cfg = lm_config.from_mapping({**SMALL, "ddp": {"shard": True}})
    with pytest.raises(ConfigError, match=r"no effect with ddp\.shard"):
        lm_env.apply(cfg, {"NSA_DDP_BUCKET_MB": "2"})


def test_rows_hold_the_rate_of_one_rank_and_its_arithmetic(tmp_path: Path) -> None:
    cfg = small(steps=4)
    run_here(cfg, tmp_path)
    row = list(csv.DictReader((tmp_path / "training.csv").open()))[-1]
    assert float(row["toks_per_s_rank"]) == pytest.approx(float(row["toks_per_s"]), rel=1e-6)
    operations = model_flops.operations_a_token(cfg.model, cfg.train.seq_len)
    assert float(row["tflops_rank"]) == pytest.approx(float(row["toks_per_s"]) * operations / 1e12, rel=1e-4)
    assert "mfu" not in row  # of a CPU nobody states a peak
    beat = json.loads((tmp_path / "heartbeat_rank0.jsonl").read_text().splitlines()[-1])
    assert beat["tflops_rank"] > 0


def test_the_count_of_operations_is_torchs_own() -> None:
    """Against torch's counter of the products that the dense twin runs; embedding look-ups cost none."""
    from torch.utils.flop_counter import FlopCounterMode

    cfg = ModelConfig(attention="dense", vocab=256, dim=64, n_layers=2, n_heads=4, n_kv_groups=2, d_k=16, d_v=16)
    model, tokens = LanguageModel(cfg), torch.zeros(1, 128, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(tokens, labels=tokens).backward()
    counted = counter.get_total_flops() / 128
    # torch's plain kernel multiplies what causality hides, too
    hidden = 6 * cfg.n_layers * cfg.n_heads * (cfg.d_k + cfg.d_v) * (128 - model_flops.keys_seen(cfg, 128))
    assert model_flops.operations_a_token(cfg, 128) == pytest.approx(counted - hidden, rel=1e-6)


def test_a_query_sees_what_the_masks_let_it_see() -> None:
    from uvcc_engine.nsa import blocks

    nsa, length = small().model.nsa, 48
    at, starts = torch.arange(length), torch.zeros(1, length, dtype=torch.int64)
    seen = blocks.cmp_visible(nsa, at, starts, nsa.n_cmp(length)).sum()
    seen = seen + blocks.window_mask(nsa, at, starts, length).sum()
    score = torch.rand(1, 1, length, nsa.n_blocks(length))
    chosen = blocks.select_blocks(nsa, score, at, starts)
    seen = seen + blocks.token_mask(nsa, chosen, at, starts, length).sum()
    assert model_flops.keys_seen(small().model, length) * length == pytest.approx(float(seen))


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("Some Other", 0.0),
    ],
)
def test_a_gpus_peak_is_known_by_its_drivers_name(name: str, peak: float) -> None:
    assert model_flops.peak_by_name(name) == peak
    mfu = model_flops.Effort(1e9, peak, 2).at(2e5).get("mfu")
    assert mfu == (pytest.approx(1e14 / peak) if peak else None)


def test_a_training_by_hand_tells_its_rows() -> None:
    said: list[str] = []
    times = iter([10.0, 30.0, 7000.0])
    progress = PrintedRows(2000, clock=lambda: next(times), say=said.append)
    for step in (10, 20, 1000):
        progress.show(step, {"loss": 2.5, "lr": 3e-3, "toks_per_s": 27742.9})
    assert said == [
        "step 10/2000  loss 2.5000  lr 3.00e-03  27,743 tokens/s",
        "step 20/2000  loss 2.5000  lr 3.00e-03  27,743 tokens/s  1:06:00 left",
        "step 1000/2000  loss 2.5000  lr 3.00e-03  27,743 tokens/s  1:57:40 left",
    ]


@pytest.mark.ci(__file__)
def test_a_sharded_training_writes_its_sample_and_says_how_gradients_are_sent(tmp_path: Path) -> None:
    ddp = ("--set", "ddp.shard=true", "--set", "train.steps=4", "--set", "train.sample_tokens=8")
    ranks = start_ranks(tmp_path, free_port(), *ddp, more={"NSA_DDP_COMPRESS": "bf16"})
    said = [p.communicate(timeout=500) for p in ranks]
    assert [p.returncode for p in ranks] == [0, 0], said
    assert (tmp_path / "run" / "sample.txt").exists()
    events = [json.loads(x) for x in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    proven = next(e["fields"]["values"] for e in events if e["event"] == "environment_proven")
    assert proven["NSA_DDP_COMPRESS"] == "bf16 in the sharded model"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_blocks_train_as_the_plain_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    losses = []
    for compiled in (False, True):
        cfg = small(steps=6)
        cfg = replace(cfg, runtime=replace(cfg.runtime, compile=compiled))
        losses.append(run_here(cfg, tmp_path / str(compiled)).loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert any(p.suffix == ".so" for p in (tmp_path / "compiled").rglob("*")), os.listdir(tmp_path)
