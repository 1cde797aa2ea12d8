"""What a run leaves beside its tables: curves, metrics.json, env.json; and how another world resumes it."""

from __future__ import annotations

import csv
import errno
import json
import os
import shlex
import shutil
import signal
import struct
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
import torch
from lm_kit import PATIENCE_S, free_port, run_here, small, start_ranks, wait_for_step
from safetensors.torch import load_file

from uvcc_engine.contract.checkpoints import checkpoint as ck
from uvcc_engine.train import lm_state, worker
from uvcc_engine.train.distributed import RankGroup, nvidia_driver
from uvcc_engine.train.loop import LmTrainer
from uvcc_engine.train.telemetry import RankTelemetry
from uvcc_engine.train.tensorboard import ScalarFile
from uvcc_engine.train.worker import train


def _records(path: Path) -> Iterator[bytes]:
    """The records of a TFRecord file, every checksum checked."""

    def masked(data: bytes) -> int:
        crc = google_crc32c.value(data)
        return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

    data = path.read_bytes()
    while data:
        (length,) = struct.unpack_from("<Q", data)
        assert struct.unpack_from("<I", data, 8)[0] == masked(data[:8])
        body = data[12 : 12 + length]
        assert struct.unpack_from("<I", data, 12 + length)[0] == masked(body)
        yield body
        data = data[16 + length :]


def test_curves_are_records_that_tensorboard_reads(tmp_path: Path) -> None:
    curves = ScalarFile(tmp_path, clock=lambda: 5.0)
    curves.add(300, {"train/loss": 1.5})
    curves.close()
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("events.out.tfevents.5.")
    first, point = _records(file)
    assert first.endswith(b"brain.Event:2")
    # Event: wall time 5.0, step 300 as a varint, one summary value {tag, simple_value}
    value = b"\x0a\x0atrain/loss" + b"\x15" + struct.pack("<f", 1.5)
    summary = b"\x0a" + bytes([len(value)]) + value
    assert point == b"\x09" + struct.pack("<d", 5.0) + b"\x10\xac\x02" + b"\x2a" + bytes([len(summary)]) + summary


def test_points_that_come_again_are_not_doubled_in_tensorboard(tmp_path: Path) -> None:
    """A training that was killed at step 7 goes on from step 5, on a machine whose clock was set back meanwhile."""
    for now, steps in ((900.0, range(1, 8)), (20.0, range(6, 9))):
        curves = ScalarFile(tmp_path, clock=lambda now=now: now)  # type: ignore[misc]
        if steps[0] > 1:
            curves.restart(steps[0] - 1)
        for step in steps:
            curves.add(step, {"train/loss": now + step})
        curves.close()
    files = sorted(tmp_path.iterdir())
    assert [path.name.split(".")[3] for path in files] == ["900", "901"]
    assert list(_records(files[1]))[1].endswith(b"\x10\x06\x3a\x02\x08\x01")  # step 6, SessionLog{START}
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    seen = accumulator.EventAccumulator(str(tmp_path))
    seen.Reload()
    assert [(s.step, s.value) for s in seen.Scalars("train/loss")] == [
        *((step, 900.0 + step) for step in range(1, 6)),
        *((step, 20.0 + step) for step in range(6, 9)),
    ]


def test_a_pod_that_replaces_another_draws_its_curves_from_the_tables(tmp_path: Path) -> None:
    """It got the newest checkpoint and the tables from home; the curves were lost with the pod."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run_here(small(steps=6, eval_every=2), tmp_path, halt_at=4)
    shutil.rmtree(tmp_path / "tb")
    run_here(small(steps=6, eval_every=2), tmp_path, resume=True)
    seen = accumulator.EventAccumulator(str(tmp_path / "tb"))
    seen.Reload()
    for table, tag in (("training.csv", "train/loss"), ("val.csv", "val/loss")):
        rows = list(csv.DictReader((tmp_path / table).read_text().splitlines()))
        assert [int(row["step"]) for row in rows] == ([1, 2, 3, 4, 5, 6] if tag == "train/loss" else [2, 4, 6])
        drawn = {s.step: s.value for s in seen.Scalars(tag)}
        assert drawn == pytest.approx({int(row["step"]): float(row["loss"]) for row in rows})
        assert len(seen.Scalars(tag)) == len(rows)


def test_a_resumed_training_says_in_its_curves_where_it_goes_on(tmp_path: Path) -> None:
    run_here(small(steps=6), tmp_path, halt_at=4)
    run_here(small(steps=6), tmp_path, resume=True)
    restarts = [r for path in (tmp_path / "tb").iterdir() for r in _records(path) if b"\x3a\x02\x08\x01" in r]
    assert [r[9:11] for r in restarts] == [b"\x10\x05"]


def test_a_disk_that_is_full_leaves_no_remains_and_the_step_that_was_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each further try would take its part of the disk; what a killed process left half written goes at the next."""
    write = lm_state.write_tensors

    def full(tensors: dict[str, torch.Tensor], path: Path) -> None:
        path.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert train(small(steps=2), tmp_path, "lm") == 0
    killed = tmp_path / "checkpoints" / "step-4.tmp-0123456789ab"
    killed.mkdir()
    monkeypatch.setattr(lm_state, "write_tensors", full)
    assert train(small(steps=9, save_every=4), tmp_path, "lm") == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-2"]
    end = json.loads((tmp_path / "exit.json").read_text())
    assert (end["status"], end["step"]) == ("failed", 4)
    assert "No space left" in end["error"]
    monkeypatch.setattr(lm_state, "write_tensors", write)


def test_a_resume_with_another_model_loses_nothing_of_what_the_run_was_made_with(tmp_path: Path) -> None:
    """The next resume takes the config from ``run.json``: a slip in one must not stand there."""
    assert train(small(steps=2), tmp_path, "lm") == 0
    recorded = (tmp_path / "run.json").read_bytes()
    wrong = small(steps=4)
    assert train(replace(wrong, model=replace(wrong.model, dim=64)), tmp_path, "lm") == 1
    assert train(replace(wrong, model=replace(wrong.model, n_layers=2)), tmp_path, "lm") == 1
    assert (tmp_path / "run.json").read_bytes() == recorded
    end = json.loads((tmp_path / "exit.json").read_text())
    assert (end["step"], end["hint"]) == (2, lm_state.SAME_MODEL)
    assert train(wrong, tmp_path, "lm") == 0
    assert json.loads((tmp_path / "run.json").read_text())["config"]["train"]["steps"] == 4


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_a_training_goes_on_with_another_optimizer_and_without_the_first_ones_moments(tmp_path: Path) -> None:
    """AdamW died of a state that had Muon's moment alone; Muon carried AdamW's along in every checkpoint."""
    assert train(small(steps=2, optimizer="muon"), tmp_path, "lm") == 0
    assert train(small(steps=4), tmp_path, "lm") == 0
    assert train(small(steps=6, optimizer="muon"), tmp_path, "lm") == 0
    names = load_file(ck.step_dir(tmp_path / "checkpoints", 6) / "rank0.safetensors")
    inside = {name.rpartition(".")[2] for name in names if name.startswith("optim.blocks.0.attention.out.weight.")}
    assert inside == {"momentum_buffer"}


def test_one_ctrl_c_halts_a_training_by_hand_with_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun it arrives twice. A later one leaves at once."""
    now = [100.0]
    log = RankTelemetry.log
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background has it ignored

    def pressed(self: RankTelemetry, step: int, *args: Any) -> dict[str, Any]:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        if step == 2 and (tmp_path / "twice").exists():
            now[0] += worker.SAME_PRESS_S + 1
            os.kill(os.getpid(), signal.SIGINT)
        return log(self, step, *args)

    monkeypatch.setattr(RankTelemetry, "log", pressed)
    monkeypatch.setattr(worker.time, "monotonic", lambda: now[0])
    try:
        assert train(small(steps=400), tmp_path / "once", "lm", progress=True) == 0
        end = json.loads((tmp_path / "once" / "exit.json").read_text())
        assert (end["status"], end["step"]) == ("halted", 3)
        assert ck.verify(ck.step_dir(tmp_path / "once" / "checkpoints", 3)).sha256 == end["checkpoint"]
        (tmp_path / "twice").mkdir()
        with pytest.raises(KeyboardInterrupt):
            train(small(steps=400), tmp_path / "twice", "lm", progress=True)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_run_leaves_curves_metrics_and_what_each_heartbeat_says(tmp_path: Path) -> None:
    outcome = run_here(small(steps=6, eval_every=3, eval_batches=1), tmp_path)
    tags = b"".join(_records(next((tmp_path / "tb").iterdir())))
    for tag in (b"train/loss", b"train/toks_per_s", b"train/lr", b"val/loss", b"val/ppl"):
        assert tags.count(tag + b"\x15") == (6 if tag.startswith(b"train") else 2)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["steps"] == 6
    assert metrics["loss_last"] == pytest.approx(outcome.loss)
    assert metrics["loss_last"] < metrics["loss_first"]
    beat = json.loads((tmp_path / "heartbeat_rank0.jsonl").read_text().splitlines()[-2])
    assert {beat[f"attn_{branch}"] for branch in ("cmp", "sel", "win")} == {"masked"}
    assert 0 <= beat["own_share"] < 1
    assert beat["dt_fetch_s"] >= 0
    assert beat["queue_depth"] >= 0
    assert 0 < beat["fetch_p50_ms"] <= beat["fetch_p95_ms"]


def test_the_worker_names_versions_and_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    assert train(small(steps=2), tmp_path, "lm") == 0
    env = json.loads((tmp_path / "env.json").read_text())
    assert env["torch"] == torch.__version__
    assert env["env"]["NCCL_ALGO"] == "Ring"
    assert json.loads((tmp_path / "run.json").read_text())["parameters"] > 0


def test_a_signal_dumps_the_stacks_and_another_one_halts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RankTelemetry.log

    def and_signal(self: RankTelemetry, step: int, *args: Any) -> dict[str, Any]:
        if step in (2, 4):
            os.kill(os.getpid(), signal.SIGUSR1 if step == 2 else signal.SIGTERM)
        return log(self, step, *args)

    monkeypatch.setattr(RankTelemetry, "log", and_signal)
    assert train(small(steps=400), tmp_path, "lm") == 0
    end = json.loads((tmp_path / "exit.json").read_text())
    assert end["status"] == "halted"
    assert 4 <= end["step"] < 400
    assert ck.verify(ck.step_dir(tmp_path / "checkpoints", end["step"])).sha256 == end["checkpoint"]
    assert "in and_signal" in (tmp_path / "stackdump_rank0.txt").read_text()
    monkeypatch.setattr(RankTelemetry, "log", log)
    assert train(small(steps=end["step"] + 2), tmp_path, "lm") == 0
    assert json.loads((tmp_path / "exit.json").read_text())["status"] == "done"


def test_what_was_read_but_not_in_a_row_yet_survives_a_change_of_the_world(tmp_path: Path) -> None:
    """Checkpoints of two ranks, opened by one: the documents go on at the earlier rank's, no token is dropped."""
    from uvcc_engine.contract.run_files.writer import RunWriter

    cfg = small()
    with RunWriter.open(tmp_path / "x", "lm") as writer:
        packer = None
        trainer = LmTrainer(cfg, RankGroup(0, 1, torch.device("cpu")), writer, _Eos(), lambda val, cursor: packer)  # type: ignore[arg-type,return-value]
    token, root = "0" * 12, tmp_path / "checkpoints"
    tensors = lambda path: _save(trainer, path)  # noqa: E731
    for rank, (document, left) in enumerate([(9, [1, 2]), (6, [3])]):
        cursor = {"document": document, "tokens": left, "source": {}, "earlier": []}
        rank_state = ck.RankState(rank=rank, coord=f"p0r{rank}s0t0", cursors={"data": cursor}, rng={"torch": ""})
        ck.write_rank(root, 4, token, rank_state, {ck.rank_file(0): tensors} if rank == 0 else {})
    ck.commit(root, run="lm", step=4, token=token, ranks=[0, 1], topology={"replicas": 2, "stages": 1, "tensor": 1})
    manifest = ck.verify(ck.step_dir(root, 4))
    step, cursor = lm_state.restore(manifest, RankGroup(0, 1, torch.device("cpu")), trainer.model, trainer.optimizer)
    assert (step, cursor.document, cursor.tokens, cursor.earlier) == (4, 6, [1, 2, 3], [[9, 6]])
    _, other = lm_state.restore(manifest, _OnOnePod(2, 3, torch.device("cpu")), trainer.model, trainer.optimizer)
    assert (other.document, other.tokens, other.earlier) == (6, [], [[9, 6]])


class _OnOnePod(RankGroup):
    """Ranks that all see the same directory, and so would say the same."""

    def gather(self, value: object) -> list[object]:
        return [value] * self.world


class _Eos:
    eos = 0


def _save(trainer: LmTrainer, path: Path) -> None:
    from safetensors.torch import save_file

    save_file(lm_state.tensors_of(trainer.model, trainer.optimizer), path)


@pytest.mark.slow
def test_two_ranks_with_a_static_graph_are_resumed_by_one(tmp_path: Path) -> None:
    """The cheat sheet's fallback. Accumulation without synchronisation, a static graph, bf16 compression on gloo."""
    settings = ("train.accumulate=2", "ddp.static_graph=true", "ddp.bucket_mb=1", "train.batch_size=4")
    both = start_ranks(tmp_path, free_port(), *(x for s in settings for x in ("--set", s)))
    wait_for_step(tmp_path, 4, both)
    (tmp_path / "run" / ".HALT").touch()
    assert [p.wait(timeout=PATIENCE_S) for p in both] == [0, 0]
    halted = json.loads((tmp_path / "run" / "exit.json").read_text())
    os.utime(tmp_path / "run" / ".HALT", (0, 0))  # the forked rank's process began with this test's
    steps = halted["step"] + 3
    (one,) = start_ranks(tmp_path, free_port(), "--set", f"train.steps={steps}", world=1)
    assert one.wait(timeout=PATIENCE_S) == 0, one.communicate()[1]
    end = json.loads((tmp_path / "run" / "exit.json").read_text())
    assert (end["status"], end["step"]) == ("done", steps)
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert f'"checkpoint":"{halted["checkpoint"]}"' in events.replace(" ", "")
    rows = (tmp_path / "run" / "training.csv").read_text().splitlines()
    assert [int(r.split(",")[0]) for r in rows[1:]] == list(range(1, steps + 1))
    losses = [float(r.split(",")[1]) for r in rows[1:]]
    assert max(losses[-3:]) < losses[0]
    assert os.path.exists(tmp_path / "run" / "heartbeat_rank1.jsonl")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Fri May 31 09:35:42 UTC 2024\n", "550.90.07"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build\n", "570.124.06"),
        ("something else", ""),
        (None, ""),
    ],
)
def test_the_drivers_version_is_read_from_its_module(tmp_path: Path, text: str | None, version: str) -> None:
    told = tmp_path / "version"
    if text is not None:
        told.write_text(text)
    assert nvidia_driver(told) == version


def test_run_info_names_code_card_and_launch(tmp_path: Path) -> None:
    assert train(small(steps=2), tmp_path, "lm") == 0
    info = dict(line.split(": ", 1) for line in (tmp_path / "run.info").read_text().splitlines())
    assert {"code_hash", "driver", "gpu", "gpu_memory_mib", "torch"} <= info.keys()
    assert info["launch"] == shlex.join(sys.orig_argv)
