"""What a training refuses before it starts, and how it names what could not be seen before."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from lm_kit import SMALL, run_here, small, with_hub
from safetensors import SafetensorError

from uvcc_engine.contract.checkpoints import checkpoint as ck
from uvcc_engine.contract.errors import ConfigError, PeerLostError, UnreachableError, UvccError, VerificationError
from uvcc_engine.nsa import dispatch
from uvcc_engine.nsa.config import ModelConfig, NSAConfig
from uvcc_engine.nsa.model import LanguageModel
from uvcc_engine.train import config as lm_config
from uvcc_engine.train import env as lm_env
from uvcc_engine.train import lm_job, memory_plan, worker
from uvcc_engine.train.check import check
from uvcc_engine.train.config import DataConfig
from uvcc_engine.train.distributed import RankGroup
from uvcc_engine.train.only_training import only_training
from uvcc_engine.train.text.data import Packer
from uvcc_engine.train.text.sources import make_source
from uvcc_engine.train.text.tokenizer import ByteTokenizer, make_tokenizer
from uvcc_engine.train.trained import exported
from uvcc_engine.train.worker import cli, train

CPU = torch.device("cpu")


def test_a_row_shorter_than_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.seq_len=7 is shorter than .* \(nsa\.l=8\)"):
        small(seq_len=7)
    dense = {**SMALL, "model": {**SMALL["model"], "attention": "dense"}, "train": {"seq_len": 7}}
    assert lm_config.from_mapping(dense).train.seq_len == 7


@pytest.mark.parametrize("over", [{"nsa": {"l": 4}}, {"model": {"nsa": {"l": 4}}}])
def test_a_block_is_set_beside_the_model_or_inside_it_wherever_the_others_stand(over: dict[str, Any]) -> None:
    wanted = replace(small().model.nsa, l=4)
    for config in (SMALL, lm_config.to_mapping(small())):
        assert lm_job.resolve({"config": config, "overrides": over}).model.nsa == wanted


def test_a_batch_that_the_ranks_cannot_share_is_refused_before_they_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ConfigError, match=r"train\.batch_size=4 cannot be shared by 8 ranks.*multiple of 8"):
        worker.train(small(), tmp_path, "lm")
    assert not torch.distributed.is_initialized()


def test_the_number_of_gpus_picks_torchrun_or_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(worker.os, "execv", lambda path, argv: became.append(argv))
    monkeypatch.setattr(worker, "train", lambda *args, **more: 0)
    config = tmp_path / "small.json"
    config.write_text(json.dumps({**SMALL, "runtime": {"device": "auto", "precision": "fp32"}}))
    command = [str(config), "--out", str(tmp_path / "run")]
    assert worker.cli(command) == 0
    assert became == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    worker.cli(command)
    launched = [sys.executable, "-m", "uvcc_engine.train.launched", str(tmp_path / "run"), "2"]
    assert became == [[*launched, "--standalone", "--nproc-per-node=2", "-m", "uvcc_engine.cli", "train", *command]]
    worker.cli([*command, "--set", "runtime.device=cpu"])
    assert len(became) == 1
    with pytest.raises(ConfigError, match="cannot be shared by 3 ranks"):
        worker.cli([*command, "--ranks", "3"])
    for refused in ("train.sinks=nosuch", "runtime.precision=fp8"):
        with pytest.raises(ConfigError, match=refused.partition("=")[2]):
            worker.cli([*command, "--ranks", "2", "--set", refused, "--set", "runtime.device=cpu"])
    assert len(became) == 1


@pytest.mark.parametrize(
    ("key", "wrong"), [("parameters", 1), ("seq_len", 2048), ("precision", "bf16"), ("save_every", 9), ("steps", 13)]
)
def test_a_config_that_is_not_the_planned_one_is_refused(key: str, wrong: object) -> None:
    facts = check({**SMALL, "plan": {"seq_len": 48, "precision": "fp32"}}, 1, {})
    assert facts["parameters"] > 0
    with pytest.raises(ConfigError, match=f"{key} is .*, the plan says {wrong}"):
        check({**SMALL, "plan": {key: wrong}}, 1, {})


def test_a_missing_tokenizer_is_named_with_its_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    job = {**SMALL, "model": {**SMALL["model"], "vocab": 50257}, "data": {"source": "synthetic", "tokenizer": "gpt2"}}
    with pytest.raises(ConfigError, match=r"gpt2 tokenizer needs tiktoken.*data\.tokenizer: byte"):
        check(job, 1, {})
    assert worker.train(lm_config.from_mapping(job), tmp_path, "lm") == 2
    report = json.loads((tmp_path / "exit.json").read_text())
    assert (report["status"], report["hint"]) == ("failed", "pip install 'uvcc[train]', or data.tokenizer: byte")


def test_a_vocabulary_that_cannot_be_fetched_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(name: str) -> None:
        raise ConnectionError("no route to host")

    module = ModuleType("tiktoken")
    module.get_encoding = offline  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tiktoken", module)
    with pytest.raises(UnreachableError, match=r"cannot fetch the GPT-2 vocabulary.*TIKTOKEN_CACHE_DIR"):
        make_tokenizer("gpt2")


def _hub_packer(retries: int, pauses: list[float]) -> Packer:
    source = make_source(DataConfig(source="fineweb_edu"), 0)
    more = {"val": False, "val_percent": 0, "retries": retries, "pause": pauses.append}
    return Packer(source, ByteTokenizer(), seq_len=63, rank=1, world=2, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [ConnectionError("reset"), httpx.ConnectError("no route")])
def test_a_hub_that_fails_now_and_then_costs_no_document(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    calls = iter(range(10_000))

    def fail() -> None:
        if next(calls) % 3 == 2:
            raise error

    opened, pauses = with_hub(monkeypatch, fail), []
    packer = _hub_packer(3, pauses)
    text = bytes(packer.batch(20).tokens.flatten().tolist()).decode()
    whole = text.split("\0")[:-1]
    assert whole == [f"shard 1 row {n}. " * 4 for n in range(len(whole))]
    assert len(opened) == len(pauses) + 1 > 3


def test_an_unreachable_hub_is_named_after_its_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ConnectionError("name resolution failed")

    with_hub(monkeypatch, fail)
    pauses: list[float] = []
    with pytest.raises(UnreachableError, match=r"name resolution failed.*data\.source: local"):
        _hub_packer(3, pauses).batch(1)
    assert pauses == [0.5, 1.0, 2.0]


def test_too_much_memory_is_refused_before_a_launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory_plan, "free_mib", lambda device: 150)
    with pytest.raises(ConfigError, match=r"needs about \d+ MiB on this machine, 150 MiB are free.*batch_size"):
        check(SMALL, 1, {})
    config = tmp_path / "small.json"
    config.write_text(json.dumps(SMALL))
    with pytest.raises(ConfigError, match="150 MiB are free"):
        worker.cli([str(config), "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_running_out_of_memory_is_named_after() -> None:
    alone, pair = RankGroup(0, 1, CPU), RankGroup(0, 2, CPU)
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55)
    named = worker.name_failure(caught.value, pair)
    assert (type(named), named.hint) == (UvccError, memory_plan.HINT)
    assert named.what.startswith("out of memory: ")
    ladder = ("train.batch_size", "train.accumulate", "runtime.gradient_checkpointing", "train.loss_chunk", "ddp.shard")
    places = [named.hint.index(key) for key in (*ladder, "train.seq_len")]
    assert places == sorted(places), "what changes the training least comes first"
    assert worker.name_failure(torch.OutOfMemoryError("40 GiB"), alone).what == "out of memory: 40 GiB"
    with pytest.raises(RuntimeError), pair.trace.of("backward"):
        raise RuntimeError("Connection closed by peer")
    gloo = "Connection closed by peer. This is typically caused by a remote worker. GLHF!\n\nAt:\n  loop.py(1)"
    lost = worker.name_failure(RuntimeError(gloo), pair)
    assert isinstance(lost, PeerLostError)
    assert lost.what.startswith("a collective failed in backward")
    assert lost.what.endswith(": Connection closed by peer.")
    assert worker.name_failure(RuntimeError("sizes differ"), alone).what == "the step failed: sizes differ"


@pytest.mark.ci(__file__)
def test_the_estimate_is_what_the_step_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same count over real tensors; short rows and rows that take the path for long ones."""
    shape = ModelConfig(
        dim=64, n_layers=2, n_heads=4, d_k=16, d_v=16, nsa=NSAConfig(l=16, d=8, l_sel=32, n_sel=4, w=64)
    )
    for rows, s in ((2, 256), (1, 1088)):
        wanted = memory_plan.peak_of(shape, rows, s, bf16=False, recompute=False)
        torch.manual_seed(0)
        with memory_plan.PeakBytes() as peak:
            model = LanguageModel(shape)
            tokens = torch.zeros(rows, s, dtype=torch.int64)
            loss = F.cross_entropy(model(tokens, torch.zeros_like(tokens)).flatten(0, 1), tokens.flatten())
            loss.backward()
        assert wanted == pytest.approx(peak.peak, rel=0.1)


@pytest.mark.ci(__file__)
def test_the_estimate_follows_batch_ranks_and_recomputation() -> None:
    cfg = small(batch_size=16)
    one = memory_plan.estimate(cfg, 1)
    assert memory_plan.estimate(cfg, 4) < one
    assert memory_plan.estimate(small(batch_size=64), 1) > 2 * one
    deep = replace(cfg, model=replace(cfg.model, n_layers=8))
    less = replace(deep, runtime=replace(deep.runtime, gradient_checkpointing=True))
    assert memory_plan.estimate(less, 1) < memory_plan.estimate(deep, 1) / 2


def test_a_gpu_s_plan_counts_what_its_kernels_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choices of 16,384 queries at once, and of fewer where there are no more; nothing where another path is."""
    cfg = lm_config.from_mapping(lm_config.load("m7c_125m_80g"))
    monkeypatch.setattr(memory_plan, "estimate", lambda cfg, ranks: 1000)
    monkeypatch.setattr(memory_plan, "free_mib", lambda device: 1 << 30)
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    base = 1000 + memory_plan.BASE_MIB["cuda"]
    for rows, seq_len, queries in ((8, 4096, 16_384), (2, 2048, 4096), (64, 512, 0)):
        some = replace(cfg, train=replace(cfg.train, batch_size=rows, seq_len=seq_len))
        needed = memory_plan.check(some, 1, torch.device("cuda")).needed_mib
        assert needed - base == 4 * queries * 16 * 12 * 64 // (1 << 20)


def test_every_variable_of_the_seeds_has_an_effect_that_is_shown() -> None:
    environ = {
        "NSA_PREFILL_BATCHED": "1",
        "NSA_SEL_RANGES_V2": "1",
        "NSA_DDP_COMPRESS": "off",
        "NSA_DDP_STATIC_GRAPH": "1",
        "NSA_DDP_FIND_UNUSED": "1",
        "NSA_DDP_SAFE_GC_LAYERS": "1:2",
        "NSA_PG_TIMEOUT_MIN": "30",
        "NCCL_ALGO": "Ring",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "HOME": "elsewhere",
    }
    deep = replace(small(), model=replace(small().model, n_layers=3))
    cfg, effects = lm_env.apply(deep, environ)
    assert (cfg.ddp.compress, cfg.ddp.static_graph, cfg.ddp.find_unused, cfg.ddp.timeout_min) == ("off", True, True, 30)
    assert cfg.runtime.recomputed(3) == range(1, 2)
    assert {e.name: e.value for e in effects} == {k: v for k, v in environ.items() if k != "HOME"}
    assert next(e for e in effects if e.name == "NCCL_ALGO").meaning == "read by NCCL"
    safe, _ = lm_env.apply(cfg, {"NSA_DDP_SAFE_MODE": "1"})
    assert (safe.ddp.bucket_mb, safe.ddp.static_graph, safe.ddp.find_unused) == (2, False, False)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("NSA_USE_SEL_MASK", "1", "NSA_USE_SEL_MASK is set but has no effect here"),
        ("NSA_DDP_BUKET_MB", "1", "did you mean NSA_DDP_BUCKET_MB"),
        ("NSA_DDP_COMPRESS", "fp16", "did you mean bf16"),
        ("NSA_DDP_STATIC_GRAPH", "yes", "wanted 0 or 1"),
        ("NSA_GC_REENTRANT", "1", "only 0"),
        ("NSA_GC_RANGE", "0:9", 'write it like "0:1"'),
    ],
)
def test_a_variable_without_effect_or_sense_is_refused(name: str, value: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        lm_env.apply(small(), {name: value})
    assert text in str(caught.value)


def test_a_broken_checkpoint_is_refused_by_name_and_nothing_older_is_taken_in_silence(tmp_path: Path) -> None:
    assert worker.train(small(steps=6, save_every=2), tmp_path, "lm") == 0
    newest = tmp_path / "checkpoints" / "step-6" / "rank0.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(VerificationError, match=r"step-6/rank0\.safetensors was altered.*--from STEP"):
        worker.train(small(steps=8, save_every=2), tmp_path, "lm")


def test_marks_for_a_profiler_need_a_cuda_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, (effect,) = lm_env.apply(small(steps=2), {"NSA_NVTX": "1"})
    assert (effect.name, effect.value, effect.meaning) == ("NSA_NVTX", "1", "runtime.nvtx")
    assert cfg.runtime.nvtx
    with pytest.raises(ConfigError, match=r"runtime\.nvtx marks ranges for a CUDA profiler, but no CUDA device"):
        check(SMALL, 1, {"NSA_NVTX": "1"})
    monkeypatch.setattr("uvcc_engine.train.loop.check_marks", lambda nvtx, device: None)
    open_ranges: list[str] = []
    seen: list[str] = []

    def push(name: str) -> None:
        open_ranges.append(name)
        seen.append("/".join(open_ranges))

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", push)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", open_ranges.pop)
    run_here(cfg, tmp_path)
    assert seen == ["fetch", "forward", "backward", "optimizer"] * 2
    assert open_ranges == []


def test_the_cheat_sheets_environment_is_taken_whole() -> None:
    """Every NSA_*, NCCL_* and torch variable that the operators' pages name, with the values that they give."""
    environ = {
        "NSA_PREFILL_BATCHED": "1",
        "NSA_SEL_RANGES_V2": "1",
        "NSA_DDP_COMPRESS": "bf16",
        "NSA_DDP_BUCKET_MB": "25",
        "NSA_DDP_FIND_UNUSED": "0",
        "NSA_DDP_STATIC_GRAPH": "1",
        "NSA_DDP_DISABLE_GC": "1",
        "NSA_PG_TIMEOUT_MIN": "15",
        "NSA_NVTX": "1",
        "NSA_SDPA_AUDIT": "1",
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "Simple",
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "^lo,docker0",
        "NCCL_DEBUG": "WARN",
        "NCCL_ASYNC_ERROR_HANDLING": "1",
        "NCCL_BLOCKING_WAIT": "1",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        "CUDA_LAUNCH_BLOCKING": "1",
        "HF_DATASETS_CACHE": "/data/hub",
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:256,expandable_segments:True",
    }
    _, effects = lm_env.apply(small(), environ)
    assert {e.name: e.value for e in effects} == environ
    assert all(e.meaning for e in effects)
    old = next(e for e in effects if e.name == "NCCL_BLOCKING_WAIT")
    assert "TORCH_NCCL_BLOCKING_WAIT" in old.meaning


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("train", "weight_decay", math.inf),
        ("train", "seed", 10**30),
        ("train", "warmup", 10**30),
        ("train", "seq_len", 10**30),
        ("model", "dim", 10**30),
        ("ddp", "bucket_mb", 10**30),
        ("ddp", "timeout_min", 0.0),
        ("ddp", "timeout_min", math.nan),
        ("ddp", "timeout_min", 1e308),
        ("data", "retries", -1),
    ],
)
def test_numbers_that_nothing_can_hold_are_refused(section: str, key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"{section}\.{key}="):
        lm_config.from_mapping({**SMALL, section: {**SMALL.get(section, {}), key: value}})


@pytest.mark.parametrize("out", ["a file", "a file/run"])
def test_a_file_where_the_runs_directory_is_to_be_is_named(tmp_path: Path, out: str) -> None:
    (tmp_path / "a file").write_text("mine")
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    with pytest.raises(ConfigError, match="a file is no directory"):
        cli([str(tmp_path / "small.json"), "--out", str(tmp_path / out)])
    assert (tmp_path / "a file").read_text() == "mine"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["runtime.precision=fp8"], "runtime.precision is fp8, and a cpu device has no such products"),
        (["data.source=local", "data.path=no such.txt"], "no text at no such.txt"),
    ],
)
def test_what_ends_a_training_by_hand_is_told_as_every_error_is(
    settings: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.json").write_text(json.dumps(SMALL))
    sets = [part for one in [*settings, "runtime.device=cpu"] for part in ("--set", one)]
    assert cli(["small.json", "--out", "run", *sets]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {said}")


def test_a_warm_up_longer_than_the_training_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    command = [str(tmp_path / "small.json"), "--out", str(tmp_path / "run"), "--set", "train.steps=2"]
    warned = "warning: train.warmup=3 is more than train.steps=2: the learning rate never reaches train.lr=0.01"
    for more, told in (("3", True), ("2", False)):
        assert cli([*command, "--set", f"train.warmup={more}", "--check"]) == 0
        assert (warned in capsys.readouterr().err.splitlines()) is told
    assert cli([*command, "--set", "train.warmup=3"]) == 0
    assert warned in capsys.readouterr().err.splitlines()


def test_a_second_training_in_the_same_directory_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    run = tmp_path / "zweite Läufe"  # a folder's name may be any; the run's id is made of it
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    command = [str(tmp_path / "small.json"), "--out", str(run), "--set", "train.steps=2"]
    assert cli(command) == 0
    assert json.loads((run / "run.json").read_text())["run"] == "zweite-L-ufe"
    (run / ".HALT").touch()
    os.utime(run / ".HALT", (0, 0))
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    with only_training(run, leads=True):
        for again in (command, ["--resume", str(run)]):
            with pytest.raises(ConfigError, match="another training runs in"):
                cli(again)
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == before
    assert cli(command) == 0


def test_a_full_disk_ends_a_training_and_an_export_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The library that writes tensors has an error of its own for what the system says."""
    run = tmp_path / "run"
    assert train(small(steps=2, save_every=1), run, "lm") == 0

    def full(tensors: Mapping[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    assert train(small(steps=4, save_every=1), run, "lm") == 1
    said = json.loads((run / "exit.json").read_text())
    assert "No space left on device" in said["error"]
    assert "free space" in said["hint"]
    assert ck.steps_present(run / "checkpoints") == [2, 1]
    with pytest.raises(UvccError, match="No space left on device"):
        exported.export(run, tmp_path / "model")
    assert not list(tmp_path.glob("model*"))
