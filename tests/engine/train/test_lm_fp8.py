"""Training with 8-bit products, in torch's emulation on a CPU: near bf16's losses; devices without are refused."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from lm_kit import SMALL, run_here

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.nsa.model import LanguageModel
from uvcc_engine.train import config as lm_config
from uvcc_engine.train import fp8_products
from uvcc_engine.train.check import check


def settings(precision: str = "fp8", **more: dict[str, object]) -> lm_config.LMConfig:
    asked = {"runtime": {"device": "cpu", "precision": precision}, "train": {"steps": 12}, **more}
    return lm_config.from_mapping({**SMALL, **{name: {**SMALL.get(name, {}), **over} for name, over in asked.items()}})


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a trainer take a CPU for such products, which it refuses."""
    monkeypatch.setattr(fp8_products, "check_device", lambda precision, device: None)


def losses(folder: Path, precision: str, **more: dict[str, object]) -> list[float]:
    run_here(settings(precision, **more), folder)
    return [float(row["loss"]) for row in csv.DictReader((folder / "training.csv").open())]


@pytest.mark.ci(__file__)
@pytest.mark.usefixtures("emulated")
def test_losses_follow_those_of_sixteen_bits(tmp_path: Path) -> None:
    wide, eight = (losses(tmp_path / name, name) for name in ("bf16", "fp8"))
    assert len(eight) == 12
    assert eight != wide
    assert eight[-1] < eight[0] - 0.5
    assert eight == pytest.approx(wide, rel=0.02)


@pytest.mark.usefixtures("emulated")
def test_blocks_that_are_computed_again_give_the_same(tmp_path: Path) -> None:
    """A recomputed block gives what it saved only once."""
    again = {"runtime": {"device": "cpu", "precision": "fp8", "gradient_checkpointing": True}, "train": {"steps": 2}}
    once = again | {"runtime": again["runtime"] | {"gradient_checkpointing": False}}
    assert losses(tmp_path / "again", "fp8", **again) == losses(tmp_path / "once", "fp8", **once)


def test_a_product_and_its_gradients_are_near_the_exact_ones_and_evaluation_is_not_rounded() -> None:
    torch.manual_seed(0)
    model = LanguageModel(settings().model)
    fp8_products.use_in(model)
    layer = model.blocks[0].get_submodule("up")
    assert isinstance(layer, torch.nn.Linear)
    x = torch.randn(2, 16, 32, requires_grad=True)
    made, exact = layer(x), x @ layer.weight.t()
    weight = torch.randn_like(exact)
    found = torch.autograd.grad(made, (x, layer.weight), weight.to(made.dtype))
    wanted = torch.autograd.grad(exact, (x, layer.weight), weight)
    for a, b in ((made, exact), *zip(found, wanted, strict=True)):
        error = float((a - b).norm() / b.norm())
        assert 0.005 < error < 0.1
    assert [g.dtype for g in found] == [torch.float32] * 2
    torch.testing.assert_close(layer.eval()(x), exact)


def test_a_gradient_that_is_no_number_stays_none() -> None:
    model = LanguageModel(settings().model)
    fp8_products.use_in(model)
    x = torch.ones(1, 16, 32).index_fill(2, torch.tensor([0]), torch.nan)
    assert model.blocks[0].get_submodule("up")(x).isnan().all()


def test_a_gpu_without_such_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(ConfigError, match="NVIDIA A100 has compute capability"):
        fp8_products.check_device("fp8", torch.device("cuda"))
    fp8_products.check_device("bf16", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    fp8_products.check_device("fp8", torch.device("cuda"))


def test_a_processor_is_refused_by_a_training_and_by_its_check(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a cpu device has no such products"):
        run_here(settings(), tmp_path)
    with pytest.raises(ConfigError, match="a cpu device has no such products"):
        check({"config": lm_config.to_mapping(settings())}, 1, {})


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"train": {"seq_len": 40}}, "train.seq_len of a rank is 40"),
        ({"model": {"dim": 24}}, "model.dim is 24"),
        ({"runtime": {"precision": "fp8", "compile": True}}, "runtime.compile and runtime.precision=fp8"),
    ],
)
def test_what_it_cannot_multiply_is_refused(more: dict[str, dict[str, object]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings(**more)
