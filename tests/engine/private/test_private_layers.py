"""Convolution and pooling on shares against torch's own layers and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from private_kit import OWNER, PARTIES
from torch import Tensor

from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.sets import load_digits
from uvcc_engine.model import im2col
from uvcc_engine.model import layers as nn
from uvcc_engine.model.definition.specs import MODELS, Conv2d, Image, ModelSpec, Pool, find_model, initial_weights
from uvcc_engine.model.layer_types.conv2d import ConvLayer
from uvcc_engine.model.layer_types.pool import AvgPoolLayer, MaxPoolLayer
from uvcc_engine.model.learning.plaintext import forward, train_plaintext
from uvcc_engine.model.learning.training import PrivateTrainer
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.foundation.share import Share, reconstruct
from uvcc_engine.mpc.kernels.plain import PlainKernels
from uvcc_engine.mpc.products.arithmetic import public
from uvcc_engine.sealing.inputs import open_inputs, share_dataset

torch.set_num_threads(1)
PLAIN = PlainKernels()
CONVS = [
    Conv2d(Image(2, 6, 5), 3, 3, padding=1),
    Conv2d(Image(1, 7, 7), 2, 3, stride=2),
    Conv2d(Image(3, 5, 6), 2, 4, stride=2, padding=2),
]
POOLS = [Pool(Image(2, 6, 4), 2, "avg"), Pool(Image(1, 7, 5), 3, "avg")]


def random_ring(rows: int, width: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, (rows, width)))


@pytest.mark.parametrize("conv", CONVS)
def test_patches_and_their_transpose_are_exact_on_ring_elements(conv: Conv2d) -> None:
    x, y = random_ring(2, conv.image.size), random_ring(2 * conv.out.height * conv.out.width, conv.inputs, 1)
    left = (im2col.cut_patches(PLAIN, x, conv) * y).sum()
    right = (x * im2col.add_patches(PLAIN, y, conv)).sum()
    assert left == right  # <Ax, y> = <x, A'y> modulo 2^64
    image = random_ring(2, conv.out.size)
    assert im2col.channels_first(im2col.channels_last(image, conv.out), conv.out).equal(image)


@pytest.mark.parametrize("pool", POOLS)
def test_windows_and_their_transpose_are_exact_on_ring_elements(pool: Pool) -> None:
    x, y = random_ring(3, pool.image.size), random_ring(3 * pool.out.size, pool.size**2, 1)
    assert (im2col.cut_windows(PLAIN, x, pool) * y).sum() == (x * im2col.lay_windows(PLAIN, y, pool)).sum()


def passes(layer_of: Callable[[Runtime], nn.Layer], x: Tensor, grad: Tensor) -> list[Tensor]:
    """Output, input gradient and (if it has a weight) half the weight gradient of a layer on shares, opened."""

    def body(rt: Runtime) -> list[Share]:
        layer = layer_of(rt)

        def steps() -> Any:
            found = [(yield from layer.forward_protocol(rt, public(rt, x, f=16)))]
            g = public(rt, grad, f=16)
            found.append((yield from layer.input_gradient_protocol(rt, g)))
            if layer.weight is not None:
                found.append((yield from layer.weight_gradient_protocol(rt, g, 0.5)))
            return found

        return rt.run(steps())

    results = LocalPlanes(4).run_three(body)
    return [reconstruct([r[i] for r in results]) for i in range(len(results[0]))]


@pytest.mark.parametrize("conv", CONVS)
def test_convolution_is_that_of_torch(conv: Conv2d) -> None:
    rng = np.random.default_rng(3)
    x = torch.from_numpy(rng.normal(size=(4, conv.image.size))).requires_grad_()
    w = torch.from_numpy(rng.normal(size=conv.weight_shape)).requires_grad_()
    model = ModelSpec("conv", (conv,), conv.image.size, conv.out.size)
    y = forward(model, [w], x)
    grad = torch.from_numpy(rng.normal(size=y.shape))
    exact = torch.autograd.grad(y, [x, w], grad)
    got = passes(lambda rt: ConvLayer(conv, public(rt, w.detach(), f=16)), x.detach(), grad)
    for ours, theirs in zip(got, (y.detach(), exact[0], exact[1] / 2), strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() < 2e-3


@pytest.mark.parametrize("kind", ["avg", "max"])
@pytest.mark.parametrize("shape", [(Image(2, 6, 4), 2), (Image(1, 7, 5), 3)])
def test_pooling_is_that_of_torch(kind: str, shape: tuple[Image, int]) -> None:
    rng = np.random.default_rng(4)
    pool = Pool(shape[0], shape[1], kind)
    x = torch.from_numpy(rng.normal(size=(5, pool.image.size))).requires_grad_()
    y = forward(ModelSpec("pool", (pool,), pool.image.size, pool.out.size), [], x)
    grad = torch.from_numpy(rng.normal(size=y.shape))
    (exact,) = torch.autograd.grad(y, x, grad)
    layer: type[Any] = AvgPoolLayer if kind == "avg" else MaxPoolLayer
    got = passes(lambda rt: layer(pool), x.detach(), grad)
    assert (got[0] - y.detach()).abs().max() < 1e-3
    assert (got[1] - exact).abs().max() < 1e-3


def test_a_convolutional_network_trains_on_shares_as_in_clear() -> None:
    job = PrivateJob(model="cnn-digits", steps=5, batch=32, test_rows=100)
    data = load_digits(job.seed, job.test_rows)
    made = share_dataset(data, 16, tuple(p.public for p in PARTIES), OWNER, seed=1)
    inputs = [open_inputs(made.boxes[i], party=i, identity=PARTIES[i], **made.public()) for i in range(3)]

    def body(rt: Runtime) -> tuple[list[float | None], int]:
        trainer = PrivateTrainer(rt, job, find_model(job.model), inputs[rt.party])
        found = []
        for step in range(job.steps):
            rt.begin_epoch(step)
            found.append(trainer.step(step).loss)
        return found, trainer.count_correct()

    losses, correct = LocalPlanes(2).run_three(body)[0]
    clear = train_plaintext(job, data)
    assert np.allclose(losses, clear.losses, atol=1e-2)  # type: ignore[arg-type]
    assert abs(correct - clear.correct) <= 2
    assert clear.losses[-1] < clear.losses[0]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.ci(__file__) if "vgg" in name else ()) for name in sorted(MODELS)],
)
def test_every_model_fits_together(name: str) -> None:
    model = MODELS[name]
    weights = initial_weights(model, 1, 16)
    assert [w.shape for w in weights] == [layer.weight_shape for layer in model.weights]
    logits = forward(model, [torch.from_numpy(w) for w in weights], torch.zeros(2, model.features, dtype=torch.float64))
    assert logits.shape == (2 * model.positions, model.classes)
    bounds = [float(np.abs(w).max()) for w in weights]
    assert all(0.0 < b < 1.3 for b in bounds)
    assert all((w[-1] == 0).all() for w in weights)
