"""The trainer on real (if small) text: loss falls, halts together, resumes bit for bit, dies by name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from uvcc_engine.contract import checkpoint as ck
from uvcc_engine.contract.control import HaltRequest, write_halt
from uvcc_engine.contract.errors import ConfigError, UnreadableError, UvccError
from uvcc_engine.contract.writer import RunWriter
from uvcc_engine.train import config as lm_config
from uvcc_engine.train import env as lm_env
from uvcc_engine.train.data import (
    ByteTokenizer,
    Cursor,
    Packer,
    doc_ids,
    held_out,
)
from uvcc_engine.train.distributed import Group
from uvcc_engine.train.job import check_plan, resolve
from uvcc_engine.train.loop import NotFiniteError, Outcome, Trainer
from uvcc_engine.train.schedule import lr_at
from uvcc_engine.train.sources import LocalText, PythonManual, Synthetic
from uvcc_engine.train.watchdog import Watchdog

SMALL = {
    "model": {"vocab": 256, "dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_groups": 1, "d_k": 16, "d_v": 16},
    "nsa": {"l": 8, "d": 4, "l_sel": 8, "n_sel": 4, "w": 16},
    "data": {"source": "synthetic", "tokenizer": "byte", "val_percent": 20},
    "runtime": {"device": "cpu", "precision": "fp32"},
    "train": {"steps": 12, "seq_len": 48, "batch_size": 4, "lr": 0.01, "warmup": 2, "log_every": 1},
}


def _config(**train: object) -> lm_config.LMConfig:
    return lm_config.from_mapping({**SMALL, "train": {**SMALL["train"], **train}})


def _packer(cfg: lm_config.LMConfig, val: bool, cursor: Cursor | None) -> Packer:
    source = Synthetic(cfg.train.seed)
    return Packer(
        source, ByteTokenizer(), seq_len=cfg.train.seq_len, rank=0, world=1, val=val, val_percent=20, cursor=cursor
    )


def _run(cfg: lm_config.LMConfig, directory: Path, *, halt_at: int = 0, resume: bool = False) -> Outcome:
    manifest = ck.latest_verified(directory / "checkpoints", run="lm") if resume else None
    if resume:
        (directory / ".HALT").unlink()
    with RunWriter.open(directory, "lm", resume_step=manifest.step if manifest else None) as writer:
        steps: list[int] = []

        def on_alive(stepped: bool) -> None:
            steps.extend([1] * stepped)
            if stepped and len(steps) == halt_at - 1:
                write_halt(directory, HaltRequest("halt", "n1", "lm"))

        trainer = Trainer(
            cfg,
            Group(0, 1, torch.device("cpu")),
            writer,
            ByteTokenizer(),
            lambda val, cursor: _packer(cfg, val, cursor),
            on_alive=on_alive,
        )
        if manifest:
            trainer.resume_from(manifest)
        return trainer.run()


def test_loss_falls_and_the_contract_is_written(tmp_path: Path) -> None:
    outcome = _run(_config(eval_every=6, eval_batches=2), tmp_path)
    rows = [line.split(",") for line in (tmp_path / "training.csv").read_text().splitlines()]
    assert rows[0] == ["step", "loss", "lr", "toks_per_s"]
    losses = [float(r[1]) for r in rows[1:]]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 1.0
    assert (tmp_path / "val.csv").read_text().splitlines()[0] == "step,loss,ppl"
    beats = [json.loads(x) for x in (tmp_path / "heartbeat_rank0.jsonl").read_text().splitlines()]
    assert {"gate_entropy_mean", "gate_collapse_frac", "dt_fetch_s", "fetch_p95_ms"} <= set(beats[3])
    assert ck.verify(tmp_path / "checkpoints" / "step-12").sha256 == outcome.checkpoint


def test_halt_and_resume_end_in_the_same_bits(tmp_path: Path) -> None:
    whole = _run(_config(), tmp_path / "whole")
    halted = _run(_config(), tmp_path / "cut", halt_at=5)
    assert (halted.status, halted.step) == ("halted", 5)
    resumed = _run(_config(), tmp_path / "cut", resume=True)
    assert resumed.tensors_sha256 == whole.tensors_sha256

    def losses(run: str) -> list[str]:
        return [",".join(x.split(",")[:3]) for x in (tmp_path / run / "training.csv").read_text().splitlines()]

    assert losses("cut") == losses("whole")


def test_a_broken_checkpoint_falls_back_to_the_previous_one(tmp_path: Path) -> None:
    _run(_config(save_every=4), tmp_path)
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
        _run(_config(lr=1e30, save_every=1, warmup=1), tmp_path)
    found = ck.latest_verified(tmp_path / "checkpoints")
    assert found is not None


def test_rows_continue_where_the_cursor_says() -> None:
    cfg = _config()
    whole = _packer(cfg, False, None)
    first, second, third = whole.batch(3), whole.batch(3), whole.batch(3)
    again = _packer(cfg, False, Cursor.from_json(json.loads(json.dumps(first.cursor))))
    assert torch.equal(again.batch(3).tokens, second.tokens)
    assert torch.equal(again.batch(3).tokens, third.tokens)


def test_ranks_share_documents_without_overlap_and_validation_is_held_out() -> None:
    docs = {n: t for n, t in zip(range(60), (t for _, t in Synthetic(1)._documents(0)), strict=False)}
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
    cfg = _config(steps=100, warmup=10, lr=1.0).train
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
        lm_env.apply(_config(), {"NSA_DDP_BUCKET": "1"})
    with pytest.raises(ConfigError, match="no other path"):
        lm_env.apply(_config(), {"NSA_PREFILL_BATCHED": "0"})
    cfg, effects = lm_env.apply(_config(), {"NSA_DDP_COMPRESS": "off", "NSA_DDP_BUCKET_MB": "100", "HOME": "x"})
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


def _ranks(directory: Path, port: int, *extra: str) -> list[subprocess.Popen[str]]:
    text = directory / "text.txt"
    if not text.exists():
        directory.mkdir(parents=True, exist_ok=True)
        text.write_text(
            "\n\n".join(t for _, t in zip(range(40), (t for _, t in Synthetic(3)._documents(0)), strict=False))
        )
    config = directory / "small.json"  # YAML reads JSON
    data = {"source": "local", "path": str(text), "tokenizer": "byte", "val_percent": 10}
    config.write_text(json.dumps({**SMALL, "data": data, "train": {**SMALL["train"], "save_every": 3, "steps": 400}}))
    code = "import sys; from uvcc_engine.train.worker import cli; sys.exit(cli(sys.argv[1:]))"
    command = [sys.executable, "-c", code, str(config), "--out", str(directory / "run"), "--run", "lm", *extra]
    env = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    return [
        subprocess.Popen(command, env={**env, "RANK": str(r), "LOCAL_RANK": str(r)}, stderr=subprocess.PIPE, text=True)
        for r in (0, 1)
    ]


def _free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _wait_for_step(directory: Path, step: int, processes: list[subprocess.Popen[str]]) -> None:
    beats = directory / "run" / "heartbeat_rank1.jsonl"
    while all(p.poll() is None for p in processes):
        if beats.exists() and any(
            json.loads(x)["step"] >= step for x in beats.read_text().splitlines() if x.endswith("}")
        ):
            return
    raise AssertionError([p.communicate()[1] for p in processes])


def test_two_gloo_ranks_lose_one_by_name_then_resume_on_one(tmp_path: Path) -> None:
    both = _ranks(tmp_path, _free_port())
    _wait_for_step(tmp_path, 5, both)
    both[1].send_signal(signal.SIGKILL)
    assert both[0].wait(timeout=15) == 4
    report = json.loads((tmp_path / "run" / "exit.json").read_text())
    assert report["status"] == "failed"
    assert "collective failed" in report["error"]
    both = _ranks(tmp_path, _free_port(), "--set", "train.steps=500")
    _wait_for_step(tmp_path, 8, both)
    (tmp_path / "run" / ".HALT").touch()
    assert [p.wait(timeout=30) for p in both] == [0, 0]
    ends = [json.loads((tmp_path / "run" / n).read_text()) for n in ("exit.json", "exit_rank1.json")]
    assert ends[0]["status"] == ends[1]["status"] == "halted"
    assert ends[0]["step"] == ends[1]["step"]
    assert ends[0]["checkpoint"] == ends[1]["checkpoint"]
