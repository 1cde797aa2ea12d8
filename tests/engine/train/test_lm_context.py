"""Ranks that share the rows: the losses, gradients and weights of ranks that have whole rows, and exact resumes."""

from __future__ import annotations

import csv
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_kit import SMALL, free_port, start_ranks
from safetensors.torch import load_file
from test_lm_exact import exact, started

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.train import config as lm_config
from uvcc_engine.train import memory_plan
from uvcc_engine.train.lm_job import check_world

pytestmark = pytest.mark.timeout(900)  # a busy machine
STEPS = 3


def trained(folder: Path, world: int, **ddp: object) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Loss and norm of the gradient of each step, and what the last checkpoint holds."""
    sets = {f"ddp.{key}": value for key, value in {"compress": "'off'", **ddp}.items()} | {"train.steps": STEPS}
    sets |= {"train.eval_every": STEPS, "train.eval_batches": 1, "model.n_layers": 2, "train.loss_chunk": 32}
    changed = [word for key, value in sets.items() for word in ("--set", f"{key}={str(value).lower()}")]
    processes = start_ranks(folder, free_port(), *changed, world=world)
    said = [p.communicate(timeout=300)[1] for p in processes]
    assert [p.returncode for p in processes] == [0] * world, said
    rows = [*csv.DictReader((folder / "run" / "training.csv").open())]
    beats = [json.loads(x) for x in (folder / "run" / "heartbeat_rank0.jsonl").read_text().splitlines()]
    norms = {b["step"]: float(b["grad_norm"]) for b in beats if b["msg"] == "progress"}  # again where a step is slow
    curves = [[float(row["loss"]), norm] for row, norm in zip(rows, norms.values(), strict=True)]
    (val,) = csv.DictReader((folder / "run" / "val.csv").open())
    tensors = load_file(folder / "run" / "checkpoints" / f"step-{STEPS}" / "rank0.safetensors")
    return [*curves, [float(val["loss"])]], tensors


@pytest.mark.parametrize(
    ("plain", "world", "ddp"),
    [
        pytest.param(1, 2, {"context": 2}, marks=pytest.mark.ci("tests/engine/nsa/test_nsa_context.py")),
        pytest.param(1, 4, {"context": 4, "shard": True}, marks=pytest.mark.slow),
        pytest.param(2, 4, {"context": 2}, marks=pytest.mark.slow),
    ],
    ids=["one row", "in parts", "two rows"],
)
def test_a_shared_row_trains_as_a_whole_one(tmp_path: Path, plain: int, world: int, ddp: dict[str, object]) -> None:
    wanted, whole = trained(tmp_path / "plain", plain)
    found, shared = trained(tmp_path / "shared", world, **ddp)
    assert len(wanted) == STEPS + 1
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    for name in (n for n in whole if n.endswith(".exp_avg")):  # what the gradients were
        torch.testing.assert_close(
            shared[name], whole[name], rtol=1e-3, atol=1e-6 + 1e-4 * float(whole[name].abs().max())
        )


@pytest.mark.ci(__file__)
def test_a_kill_changes_nothing(tmp_path: Path) -> None:
    more: dict[str, Any] = {"compress": ["off"], "ddp": {"context": 2}}
    codes = started(tmp_path / "run", 2, "2", killed=[1, 3], **more)
    assert codes[1] == -signal.SIGKILL
    assert codes[0] != 0
    ((straight, again),) = exact(tmp_path / "run", 2, "2", killed=[], **more).values()
    assert straight == again


def settings(ddp: dict[str, object], **more: dict[str, object]) -> lm_config.LMConfig:
    sections = {name: {**SMALL.get(name, {}), **more.get(name, {})} for name in {*SMALL, *more}}
    return lm_config.from_mapping({**sections, "ddp": ddp})


@pytest.mark.parametrize(
    ("ddp", "more", "words"),
    [
        ({"context": 0}, {}, "ddp.context=0"),
        ({"context": 2}, {"runtime": {"compile": True}}, "runtime.compile and ddp.context=2"),
        ({"context": 2, "tensor": 2, "shard": True}, {"model": {"n_kv_groups": 2}}, "ddp.tensor and ddp.context=2"),
        ({"context": 2}, {"model": {"attention": "dense"}}, "model.attention=dense"),
        ({"context": 2}, {"train": {"seq_len": 50}}, "train.seq_len=50 cannot be shared"),
        ({"context": 2}, {"train": {"seq_len": 8}}, "train.seq_len=8 cannot be shared"),
    ],
)
def test_what_it_cannot_go_with_is_refused(
    ddp: dict[str, object], more: dict[str, dict[str, object]], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        settings(ddp, **more)


@pytest.mark.ci(__file__)
def test_ranks_are_a_multiple_and_a_rank_needs_less_memory() -> None:
    shared = settings({"context": 4}, train={"seq_len": 512, "batch_size": 1})
    check_world(shared, 4)
    with pytest.raises(ConfigError, match=r"ddp\.context=4 of 6 ranks"):
        check_world(shared, 6)
    whole = settings({}, train={"seq_len": 512, "batch_size": 1})
    both = [
        memory_plan.peak_of(c.model, 1, 512, bf16=False, recompute=False, context=c.ddp.context)
        for c in (shared, whole)
    ]
    assert both[0] < both[1] / 2
