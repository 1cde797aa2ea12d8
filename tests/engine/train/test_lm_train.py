"""The trainer on real (if small) text: loss falls, halts together, resumes bit for bit, dies by name."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_kit import PATIENCE_S, SMALL, free_port, packer_of, run_here, small, start_ranks, wait_for_step
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from uvcc_engine.contract.checkpoints import checkpoint as ck
from uvcc_engine.contract.errors import ConfigError, UnreadableError, UvccError
from uvcc_engine.train import config as lm_config
from uvcc_engine.train import effective
from uvcc_engine.train import env as lm_env
from uvcc_engine.train.learning_rate import lr_at
from uvcc_engine.train.lm_job import check_plan, resolve
from uvcc_engine.train.loop import NotFiniteError
from uvcc_engine.train.text.data import Cursor, Packer, Prefetcher, doc_ids, held_out
from uvcc_engine.train.text.sources import LocalText, PythonManual, Synthetic
from uvcc_engine.train.text.tokenizer import ByteTokenizer
from uvcc_engine.train.watchdog import Watchdog


def test_loss_falls_and_the_contract_is_written(tmp_path: Path) -> None:
    outcome = run_here(small(eval_every=6, eval_batches=2), tmp_path)
    rows = [line.split(",") for line in (tmp_path / "training.csv").read_text().splitlines()]
    assert rows[0] == ["step", "loss", "lr", "toks_per_s", "toks_per_s_rank", "tflops_rank"]
    losses = [float(r[1]) for r in rows[1:]]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 1.0
    assert (tmp_path / "val.csv").read_text().splitlines()[0] == "step,loss,ppl"
    beats = [json.loads(x) for x in (tmp_path / "heartbeat_rank0.jsonl").read_text().splitlines()]
    assert {"gate_entropy_mean", "gate_collapse_frac", "dt_fetch_s", "fetch_p95_ms"} <= set(beats[3])
    assert ck.verify(tmp_path / "checkpoints" / "step-12").sha256 == outcome.checkpoint


def test_in_bf16_the_weights_stay_fp32_and_a_resume_keeps_its_bits(tmp_path: Path) -> None:
    cfg = lm_config.from_mapping({**SMALL, "runtime": {"device": "cpu", "precision": "bf16"}})
    whole = run_here(cfg, tmp_path / "whole")
    run_here(cfg, tmp_path / "cut", halt_at=5)
    assert run_here(cfg, tmp_path / "cut", resume=True).tensors_sha256 == whole.tensors_sha256
    tensors = load_file(tmp_path / "whole" / "checkpoints" / "step-12" / "rank0.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.float32}
    assert whole.tensors_sha256 != run_here(small(), tmp_path / "fp32").tensors_sha256


def test_halt_and_resume_end_in_the_same_bits(tmp_path: Path) -> None:
    whole = run_here(small(), tmp_path / "whole")
    halted = run_here(small(), tmp_path / "cut", halt_at=5)
    assert (halted.status, halted.step) == ("halted", 5)
    resumed = run_here(small(), tmp_path / "cut", resume=True)
    assert resumed.tensors_sha256 == whole.tensors_sha256

    def losses(run: str) -> list[str]:
        return [",".join(x.split(",")[:3]) for x in (tmp_path / run / "training.csv").read_text().splitlines()]

    assert losses("cut") == losses("whole")


def test_a_step_waits_for_its_device_once(tmp_path: Path) -> None:
    """A row of the tables may ask more of it; what is read in between leaves a GPU without work meanwhile."""
    asked: list[str] = []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func._schema.name.removeprefix("aten::")
            if name in ("_local_scalar_dense", "nonzero", "equal", "is_nonzero"):
                asked.append(name)
            return func(*args, **(kwargs or {}))

    tolist = torch.Tensor.tolist

    def read(self: torch.Tensor) -> Any:
        asked.append("tolist")
        return tolist(self)

    counts = []
    for steps in (3, 8):  # what beginning and end of a run ask, a checkpoint above all, does not count
        asked.clear()
        with pytest.MonkeyPatch.context() as patch, Watched():
            patch.setattr(torch.Tensor, "tolist", read)
            run_here(small(steps=steps, log_every=100, accumulate=2), tmp_path / str(steps))
        counts.append(Counter(asked))
    assert counts[1] - counts[0] == {"tolist": 5}


def test_batches_wait_in_pinned_memory_where_a_gpu_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []

    def pin(self: torch.Tensor) -> torch.Tensor:
        pinned.append(self)
        return self.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    for asked in (True, False):
        data = Prefetcher(packer_of(small(), False, None), 2, 1, pinned=asked)
        batch = data.get()
        data.stop()
        assert any(torch.equal(batch.tokens, p) and batch.tokens is not p for p in pinned) == asked
        pinned.clear()


def test_a_broken_checkpoint_falls_back_to_the_previous_one(tmp_path: Path) -> None:
    run_here(small(save_every=4), tmp_path)
    newest = tmp_path / "checkpoints" / "step-12" / "rank0.safetensors"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    bad: list[str] = []
    found = ck.latest_verified(tmp_path / "checkpoints", run="lm", on_bad=lambda p, e: bad.append(p.name))
    assert found is not None
    assert (found.step, bad) == (8, ["step-12"])


def test_not_a_number_stops_with_the_last_good_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(NotFiniteError, match="not finite"):
        run_here(small(lr=1e30, save_every=1, warmup=1), tmp_path)
    found = ck.latest_verified(tmp_path / "checkpoints")
    assert found is not None


def test_rows_continue_where_the_cursor_says() -> None:
    cfg = small()
    whole = packer_of(cfg, False, None)
    first, second, third = whole.batch(3), whole.batch(3), whole.batch(3)
    again = packer_of(cfg, False, Cursor.from_json(json.loads(json.dumps(first.cursor))))
    assert torch.equal(again.batch(3).tokens, second.tokens)
    assert torch.equal(again.batch(3).tokens, third.tokens)


def test_ranks_share_documents_without_overlap_and_validation_is_held_out() -> None:
    docs = {n: t for n, t in zip(range(60), (t for _, t in Synthetic(1).numbered_documents(0)), strict=False)}
    seen: dict[tuple[int, bool], str] = {}
    for rank in (0, 1):
        for val in (False, True):
            p = Packer(Synthetic(1), ByteTokenizer(), seq_len=63, rank=rank, world=2, val=val, val_percent=30)
            seen[rank, val] = bytes(p.batch(8).tokens.flatten().tolist()).decode()
    for (rank, val), text in seen.items():
        for document in text.split("\0")[:-1]:
            number = next(n for n, t in docs.items() if t == document)
            assert number % 2 == rank
            assert held_out(document, 30) == val


def test_document_ids_end_with_their_token() -> None:
    assert doc_ids(torch.tensor([[5, 6, 0, 7, 0, 0, 8]]), 0).tolist() == [[0, 0, 0, 1, 1, 2, 3]]


def test_local_text_and_its_errors(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.jsonl").write_text('{"text": "three"}\n')
    stream = LocalText(tmp_path).open(1, 0, 1, {})
    assert [next(stream) for _ in range(4)] == [(1, "two\n"), (2, "three"), (3, "one"), (4, "two\n")]
    assert next(LocalText(tmp_path).open(3_000_001, 0, 1, {})) == (3_000_001, "two\n")
    with pytest.raises(UnreadableError, match="no text"):
        next(LocalText(tmp_path / "none").open(0, 0, 1, {}))
    (tmp_path / "b.jsonl").write_text('{"txt": "three"}\n')
    with pytest.raises(UnreadableError, match=r"b\.jsonl line 1 holds no document"):
        next(LocalText(tmp_path).open(2, 0, 1, {}))


def test_the_manual_of_python_is_text_enough() -> None:
    packer = Packer(PythonManual(), ByteTokenizer(), seq_len=511, rank=0, world=2, val=False, val_percent=5)
    text = bytes(packer.batch(200).tokens.flatten().tolist()).decode(errors="replace")
    assert len(set(text.split())) > 1000


def test_the_cosine_ends_where_the_steps_end() -> None:
    cfg = small(steps=100, warmup=10, lr=1.0).train
    assert lr_at(cfg, 0) == pytest.approx(0.1)
    assert lr_at(cfg, 10) == pytest.approx(1.0)
    assert lr_at(cfg, 100) == pytest.approx(0.0)


@pytest.mark.parametrize(
    "name", ["m7c_125m_24g", "m7c_125m_40g", "m7c_125m_80g", "m7c_125m_2xa100_production", "train_showcase"]
)
def test_packaged_configs_are_whole(name: str) -> None:
    lm_config.from_mapping(lm_config.load(name))


def test_bad_keys_and_ignored_flags_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.seq_length.*seq_len"):
        lm_config.from_mapping({**SMALL, "train": {"seq_length": 3}})
    with pytest.raises(ConfigError, match=r"NSA_DDP_BUCKET.*NSA_DDP_BUCKET_MB"):
        lm_env.apply(small(), {"NSA_DDP_BUCKET": "1"})
    with pytest.raises(ConfigError, match="no other path"):
        lm_env.apply(small(), {"NSA_PREFILL_BATCHED": "0"})
    cfg, effects = lm_env.apply(small(), {"NSA_DDP_COMPRESS": "off", "NSA_DDP_BUCKET_MB": "100", "HOME": "x"})
    assert (cfg.ddp.compress, cfg.ddp.bucket_mb, len(effects)) == ("off", 100, 2)
    with pytest.raises(UvccError, match="seq_len is 48, the plan says 2048"):
        check_plan(resolve(SMALL), {"seq_len": 2048})


def test_watchdog_uses_the_runs_own_pace(tmp_path: Path) -> None:
    now = [0.0]
    found: list[float] = []
    dog = Watchdog(tmp_path, 0, lambda age, limit, name: found.append(age), floor_s=2.0, clock=lambda: now[0])
    for _ in range(5):
        now[0] += 1.0
        dog.beat()
    now[0] += 9.0
    assert not dog.check()
    now[0] += 2.0
    assert dog.check()
    assert not dog.check()
    assert found == [11.0]
    assert "test_watchdog" in (tmp_path / "stackdump_rank0_0.txt").read_text()


@pytest.mark.ci("tests/console/rollout/test_rollout_lm.py")
@pytest.mark.timeout(600)
def test_two_gloo_ranks_lose_one_by_name_then_resume_on_one(tmp_path: Path) -> None:
    both = start_ranks(tmp_path, free_port())
    wait_for_step(tmp_path, 5, both)
    both[1].send_signal(signal.SIGKILL)
    assert both[0].wait(timeout=PATIENCE_S) == 4  # at once, unless the machine is busy with other tests
    report = json.loads((tmp_path / "run" / "exit.json").read_text())
    assert report["status"] == "failed"
    assert "collective failed" in report["error"]
    acts = {
        "NSA_DDP_STATIC_GRAPH": "1",
        "NSA_DDP_BUCKET_MB": "7",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        "NCCL_ALGO": "Ring",
    }
    both = start_ranks(tmp_path, free_port(), "--set", "train.steps=500", more=acts)
    wait_for_step(tmp_path, 8, both)
    (tmp_path / "run" / ".HALT").touch()
    assert [p.wait(timeout=PATIENCE_S) for p in both] == [0, 0]
    ends = [json.loads((tmp_path / "run" / n).read_text()) for n in ("exit.json", "exit_rank1.json")]
    assert ends[0]["status"] == ends[1]["status"] == "halted"
    assert ends[0]["step"] == ends[1]["step"]
    assert ends[0]["checkpoint"] == ends[1]["checkpoint"]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    proven = [e["fields"]["values"] for e in events if e["event"] == "environment_proven"]
    assert proven, "each rank reads back what its environment sets"
    assert all(values == proven[0] for values in proven)
    assert proven[0] == {
        "NCCL_ALGO": "Ring in this process, where its library reads it",
        "NSA_DDP_BUCKET_MB": "7 in the DDP wrapper",
        "NSA_DDP_STATIC_GRAPH": "True in the DDP wrapper",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL in torch's process groups"
        if effective.groups_bear_detail()
        else f"DETAIL in DDP alone: torch {torch.__version__} dies of groups that have it",
    }
