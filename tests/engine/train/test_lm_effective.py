"""What the environment says has effect also where torch was imported long before, and is read back where it acts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lm_kit import small
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.train import effective
from uvcc_engine.train import env as lm_env
from uvcc_engine.train.distributed import RankGroup, wrap

FORKED = """
import os, torch.distributed as dist
from uvcc_engine.train import effective
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "detail"
before = dist.get_debug_level().name
effective.take(os.environ)
print(before, dist.get_debug_level().name)
del os.environ["TORCH_DISTRIBUTED_DEBUG"]
effective.take(os.environ)
print(dist.get_debug_level().name)
"""


@pytest.mark.ci(__file__)
def test_a_level_that_is_set_after_the_import_has_effect() -> None:
    told = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=True).stdout
    assert told.split() == ["OFF", "DETAIL", "OFF"], "without the second look torch keeps what it read at the import"


@pytest.mark.parametrize("bears", [True, False])
def test_a_level_that_ends_the_process_is_kept_from_groups(bears: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.13's DDP dies of a group that was made under DETAIL: it gets the level behind it."""
    monkeypatch.setattr(effective, "groups_bear_detail", lambda: bears)
    two = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "WORLD_SIZE": "2"}
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    try:
        effective.take(two)
        assert dist.get_debug_level().name == ("DETAIL" if bears else "INFO")
        effective.take(two, grouped=True)
        assert dist.get_debug_level().name == "DETAIL"
        effective.take({**two, "WORLD_SIZE": "1"})
        assert dist.get_debug_level().name == "DETAIL", "one rank has no group"
    finally:
        monkeypatch.delenv("TORCH_DISTRIBUTED_DEBUG")
        effective.take({})


def test_a_level_that_torch_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="one of OFF, INFO, DETAIL"):
        effective.take({"TORCH_DISTRIBUTED_DEBUG": "VERBOSE"})


@pytest.fixture
def two(tmp_path: Path) -> Iterator[RankGroup]:
    """A world of one that is wrapped like two."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield RankGroup(0, 2, torch.device("cpu"))
    dist.destroy_process_group()


def test_values_come_from_where_they_act_and_a_false_one_ends_the_run(
    two: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {
        "NCCL_ALGO": "Ring",
        "NSA_DDP_BUCKET_MB": "9",
        "NSA_DDP_COMPRESS": "off",
        "NSA_DDP_FIND_UNUSED": "1",
        "NSA_DDP_STATIC_GRAPH": "0",
        "NSA_LR": "0.5",
        "NSA_NVTX": "0",
        "NSA_OPT_FUSED": "1",
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    cfg, effects = lm_env.apply(small(), environ)
    model = wrap(nn.Linear(2, 2), two, cfg.ddp)
    assert effective.read_back(effects, cfg, model) == {
        "NCCL_ALGO": "Ring in this process, where its library reads it",
        "NSA_DDP_BUCKET_MB": "9 in the DDP wrapper",
        "NSA_DDP_COMPRESS": "off in the DDP wrapper",
        "NSA_DDP_FIND_UNUSED": "True in the DDP wrapper",
        "NSA_DDP_STATIC_GRAPH": "False in the DDP wrapper",
        "NSA_LR": "train.lr = 0.5",
        "NSA_NVTX": "runtime.nvtx = False",
        "NSA_OPT_FUSED": "fused AdamW (always on)",
    }
    assert isinstance(model, DistributedDataParallel)
    model.find_unused_parameters = False
    with pytest.raises(ConfigError, match="NSA_DDP_FIND_UNUSED=1 is set, but False acts"):
        effective.read_back(effects, cfg, model)


def test_one_rank_says_that_it_reduces_nothing() -> None:
    cfg, effects = lm_env.apply(small(), {"NSA_DDP_BUCKET_MB": "9"})
    found = effective.read_back(effects, cfg, nn.Linear(2, 2))
    assert found == {"NSA_DDP_BUCKET_MB": "ddp.bucket_mb: no effect, one rank reduces nothing"}


def test_a_variable_that_did_not_reach_the_c_library_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_PROTO", raising=False)
    cfg, effects = lm_env.apply(small(), {"NCCL_PROTO": "Simple"})
    with pytest.raises(ConfigError, match="NCCL_PROTO=Simple is set, but nothing acts"):
        effective.read_back(effects, cfg, nn.Linear(2, 2))
