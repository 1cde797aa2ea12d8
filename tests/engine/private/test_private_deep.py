"""Layers and models of deep networks on shares, against torch's own layers, gradients and training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from private_kit import OWNER, PARTIES

from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.sets import Dataset
from uvcc_engine.model import layers as nn
from uvcc_engine.model.definition.specs import (
    Attention,
    BatchNorm,
    Dense,
    Embedding,
    Gelu,
    Image,
    LayerNorm,
    LayerSpec,
    LeakyRelu,
    ModelSpec,
    Residual,
    RmsNorm,
    Sigmoid,
    Silu,
    Tanh,
    find_model,
)
from uvcc_engine.model.learning.plaintext import forward, train_plaintext
from uvcc_engine.model.learning.training import PrivateTrainer
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.foundation.share import Share, reconstruct
from uvcc_engine.mpc.products.arithmetic import public
from uvcc_engine.owner.client import dataset_for
from uvcc_engine.sealing.inputs import open_inputs, share_dataset

torch.set_num_threads(1)
STACKS: dict[str, tuple[tuple[LayerSpec, ...], int]] = {
    "gelu": ((Gelu(6),), 6),
    "leaky-relu": ((LeakyRelu(6, 0.25), Dense(6, 6), LeakyRelu(6)), 6),
    "rms-norm": ((RmsNorm(8), Dense(8, 3)), 8),
    "sigmoid": ((Sigmoid(6),), 6),
    "silu": ((Silu(6),), 6),
    "tanh": ((Tanh(6),), 6),
    "layer-norm": ((LayerNorm(8),), 8),
    "batch-norm": ((BatchNorm(Image(3, 2, 2)),), 12),
    "attention": ((Attention(4, 6, 2),), 18),
    "residual": ((Residual((LayerNorm(6), Dense(6, 6), Gelu(6), Dense(6, 6))), Dense(6, 3)), 6),
}


@pytest.mark.parametrize("f", [16, 22])
@pytest.mark.parametrize("name", sorted(STACKS))
def test_every_gradient_is_torchs(name: str, f: int) -> None:
    specs, width = STACKS[name]
    model = ModelSpec(name, (Dense(5, width), *specs), 5, 1)  # a layer below, so that input gradients are seen
    rng = np.random.default_rng(5)
    x = torch.from_numpy(rng.normal(size=(8, 5)))
    weights = [torch.from_numpy(rng.normal(size=layer.weight_shape)) * 0.7 for layer in model.weights]
    for layer, w in zip(model.weights, weights, strict=True):
        if isinstance(layer, BatchNorm):
            w[1:3] = w[1:3].abs()
    before = [w.clone().requires_grad_() for w in weights]
    y = forward(model, before, x, training=True)
    grad = torch.from_numpy(rng.normal(size=y.shape))
    exact = torch.autograd.grad(y, before, grad)

    def body(rt: Runtime) -> tuple[Share, dict[int, Share], list[Share]]:
        layers = nn.build(model, [public(rt, w, f=f) for w in weights])
        nn.set_training(layers, True)
        order, found = nn.weighted(layers), {}

        def update(layer: nn.Layer, g: Share) -> Any:
            found[order.index(layer)] = yield from layer.weight_gradient_protocol(rt, g, 0.5)

        out = rt.run(nn.forward_protocol(rt, layers, public(rt, x, f=f)))
        rt.run(nn.backward_protocol(rt, layers, public(rt, grad, f=f), update))
        return out, found, [layer.weight for layer in order if layer.weight is not None]

    results = LocalPlanes(4).run_three(body)
    assert (reconstruct([r[0] for r in results]) - y.detach()).abs().max() < 8e-3
    for i, theirs in enumerate(exact):
        ours = reconstruct([r[1][i] for r in results])
        assert (ours - theirs / 2).abs().max() < 1e-2 * (1.0 + theirs.abs().max())
    for i, w in enumerate(before):  # batch normalisation's running statistics moved alike
        assert (reconstruct([r[2][i] for r in results]) - w.detach()).abs().max() < 1e-3


def test_a_secret_lookup_is_the_table_row() -> None:
    spec = Embedding(5, 3, 4)
    table = torch.randn(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    letters = torch.eye(5, dtype=torch.float64)[torch.tensor([[0, 4, 2], [1, 1, 3]])]
    model = ModelSpec("lookup", (spec,), 15, 4, 3)

    def body(rt: Runtime) -> Share:
        layers = nn.build(model, [public(rt, table, f=16)])
        return rt.run(nn.forward_protocol(rt, layers, public(rt, letters.reshape(2, 15), f=16)))

    got = reconstruct(LocalPlanes(4).run_three(body))
    assert (got - forward(model, [table], letters.reshape(2, 15))).abs().max() < 1e-4


def train(job: PrivateJob, data: Dataset) -> tuple[list[float], int]:
    made = share_dataset(data, job.frac_bits, tuple(p.public for p in PARTIES), OWNER, seed=1)
    inputs = [open_inputs(made.boxes[i], party=i, identity=PARTIES[i], **made.public()) for i in range(3)]

    def body(rt: Runtime) -> tuple[list[float], int]:
        trainer = PrivateTrainer(rt, job, find_model(job.model), inputs[rt.party])
        found = []
        for step in range(job.steps):
            rt.begin_epoch(step)
            loss = trainer.step(step).loss
            assert loss is not None
            found.append(loss)
        return found, trainer.count_correct()

    return LocalPlanes(2).run_three(body)[0]


@pytest.mark.parametrize(
    ("job", "fall", "off"),
    [
        pytest.param(
            PrivateJob(model="gpt-tiny", steps=6, batch=16, lr=0.02, optimizer="adam", test_rows=10),
            0.5,
            0.03,
            marks=pytest.mark.ci(__file__),
        ),
        pytest.param(
            PrivateJob(model="gpt-tiny", steps=3, batch=16, lr=0.1, frac_bits=20, test_rows=10),
            0.05,
            0.01,
            marks=pytest.mark.ci(__file__),
        ),
        (PrivateJob(model="cnn-digits-norm", steps=5, batch=32, lr=0.2, test_rows=60), 0.3, 0.02),
    ],
    ids=["gpt-adam", "gpt-f20", "norm"],
)
def test_a_deep_model_trains_on_shares_as_in_clear(job: PrivateJob, fall: float, off: float) -> None:
    data = dataset_for(job)
    losses, correct = train(job, data)
    clear = train_plaintext(job, data)
    assert np.allclose(losses, clear.losses, atol=off)
    assert losses[-1] < losses[0] - fall
    assert abs(correct - clear.correct) <= max(2, 0.05 * data.test_y.size)


def cifar_like(rows: int) -> Dataset:
    rng = np.random.default_rng(0)
    x, y = rng.uniform(-1, 1, (rows + 1, 3072)), np.arange(rows + 1) % 10
    return Dataset(x[:rows], y[:rows], x[rows:], y[rows:], 10)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rows"), [("alexnet-cifar", 4), ("vgg16-cifar", 2)])
def test_one_step_of_a_cifar_network_is_that_of_the_clear_one(name: str, rows: int) -> None:
    job = PrivateJob(model=name, steps=2, batch=rows, lr=0.01, frac_bits=22, test_rows=1, momentum=0.0)
    losses, _ = train(job, cifar_like(rows))
    assert np.allclose(losses, train_plaintext(job, cifar_like(rows)).losses, atol=2e-2)
