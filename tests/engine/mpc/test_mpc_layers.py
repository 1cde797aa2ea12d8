"""Convolutions, pooling, bits, shuffles, normalisation, smooth activations: against torch in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.comparisons import bits, shuffle
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.functions import activations, convolution, normalize
from uvcc_engine.mpc.products import arithmetic

Run = Callable[..., Any]
UNIT = 2.0**-16
F = torch.nn.functional


def normal(gen: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.round(torch.randn(shape, generator=gen, dtype=torch.float64) * scale * 2**16) / 2**16


@pytest.mark.parametrize(
    ("stride", "padding", "size"), [(1, 0, (3, 3)), (2, 1, (3, 3)), (1, 2, (5, 4)), (2, 0, (2, 2))]
)
def test_convolution_and_its_gradients(
    run: Run, gen: torch.Generator, stride: int, padding: int, size: tuple[int, int]
) -> None:
    x, w = normal(gen, 2, 3, 8, 9).requires_grad_(), normal(gen, 4, 3, *size).requires_grad_()
    y = F.conv2d(x, w, stride=stride, padding=padding)
    grad = normal(gen, *y.shape)
    y.backward(grad)
    place = {"stride": stride, "padding": padding}

    def build(rt: Runtime, a: Share, b: Share, g: Share) -> MpcProtocol[list[Share]]:
        return (
            yield from arithmetic.par(
                convolution.conv2d_protocol(rt, a, b, **place),
                convolution.conv2d_weight_gradient_protocol(rt, a, g, size, **place),
                convolution.conv2d_input_gradient_protocol(rt, g, b, a.shape, **place),
            )
        )

    out = run(build, x.detach(), w.detach(), grad)
    for found, expected in zip(out.values, (y.detach(), w.grad, x.grad), strict=True):
        assert found.shape == expected.shape
        assert (found - expected).abs().max() <= UNIT
    assert out.rounds == 2
    assert out.bytes_total == 40 * (y.numel() + w.numel() + x.numel())


def test_a_convolution_that_does_not_fit_is_refused(run: Run, gen: torch.Generator) -> None:
    with pytest.raises(ConfigError, match="3 input channels, a weight for 2"):
        run(convolution.conv2d_protocol, normal(gen, 1, 3, 4, 4), normal(gen, 1, 2, 3, 3))
    with pytest.raises(ConfigError, match="do not fit"):
        run(convolution.conv2d_protocol, normal(gen, 1, 3, 2, 2), normal(gen, 1, 3, 3, 3))


@pytest.mark.parametrize(("size", "stride"), [(2, 0), (3, 2)])
def test_pooling(run: Run, gen: torch.Generator, size: int, stride: int) -> None:
    x = normal(gen, 2, 3, 9, 9, scale=3).requires_grad_()
    average, peak = F.avg_pool2d(x, size, stride or None), F.max_pool2d(x, size, stride or None)
    grad = normal(gen, *average.shape)
    (back_average,) = torch.autograd.grad(average, x, grad)
    (back_peak,) = torch.autograd.grad(peak, x, grad)

    def build(rt: Runtime, a: Share, g: Share) -> MpcProtocol[list[Share]]:
        mean = yield from convolution.avg_pool_protocol(rt, a, size, stride=stride)
        mean_back = yield from convolution.avg_pool_gradient_protocol(rt, g, a.shape, size, stride=stride)
        best, hot = yield from convolution.max_pool_protocol(rt, a, size, stride=stride)
        best_back = yield from convolution.max_pool_gradient_protocol(rt, g, hot, a.shape, size, stride=stride)
        return [mean, mean_back, best, best_back]

    out = run(build, x.detach(), grad)
    assert (out.values[0] - average.detach()).abs().max() <= 8 * UNIT
    assert (out.values[1] - back_average).abs().max() <= 8 * UNIT
    assert torch.equal(out.values[2], peak.detach())
    assert torch.equal(out.values[3], back_peak)
    assert out.rounds == 2 + 2 + 6 + 1


def test_one_hots_select_rows_of_a_table(run: Run, gen: torch.Generator) -> None:
    index = torch.tensor([[0.0, 3.0, 6.0], [2.0, 2.0, 5.0]])
    table = normal(gen, 7, 4)

    def build(rt: Runtime, i: Share, t: Share) -> MpcProtocol[list[Share]]:
        hot = yield from bits.one_hot_protocol(rt, i, 7)
        return [hot, (yield from activations.embedding_protocol(rt, hot, t))]

    out = run(build, index, table)
    assert torch.equal(out.values[0], F.one_hot(index.long(), 7).to(torch.float64))
    assert torch.equal(out.values[1], table[index.long()])
    assert out.rounds == 6


def test_shuffle_is_a_permutation_nobody_can_redo(run: Run, gen: torch.Generator) -> None:
    x, y = normal(gen, 60, 2, 3), torch.arange(60, dtype=torch.float64)[:, None]

    def build(rt: Runtime, a: Share, b: Share) -> MpcProtocol[list[Share]]:
        once = yield from shuffle.shuffle_together_protocol(rt, [a, b])
        return [*once, (yield from shuffle.shuffle_protocol(rt, b))]

    out = run(build, x, y)
    order = out.values[1][:, 0].long()
    assert sorted(order.tolist()) == list(range(60))
    assert not torch.equal(order, torch.arange(60))
    assert torch.equal(out.values[0], x[order])
    assert not torch.equal(out.values[2], out.values[1])
    assert out.rounds == 6
    with pytest.raises(ConfigError, match="60"):
        run(lambda rt, a, b: shuffle.shuffle_together_protocol(rt, [a, b.index(slice(0, 5))]), x, y)


def test_inverse_root(run: Run, gen: torch.Generator) -> None:
    x = torch.exp(torch.rand(300, generator=gen, dtype=torch.float64) * 13 - 6)
    x = torch.round(x * 2**16) / 2**16
    out = run(lambda rt, s: normalize.rsqrt_protocol(rt, s, 2.0**-9, 1200.0), x)
    assert ((out.value - x.rsqrt()).abs() < 2.0**-13 * x.rsqrt() + 2.5 * UNIT).all()
    assert out.rounds == 11


def test_layer_norm_and_its_gradient(run: Run, gen: torch.Generator) -> None:
    x = (normal(gen, 6, 32, scale=2) + 1).requires_grad_()
    w, b = normal(gen, 32) + 1, normal(gen, 32)
    plain = F.layer_norm(x, (32,), None, None, 1e-3)
    grad = normal(gen, 6, 32)
    plain.backward(grad)

    def build(rt: Runtime, a: Share, weight: Share, bias: Share, g: Share) -> MpcProtocol[list[Share]]:
        out, hat, inverse = yield from normalize.layer_norm_protocol(rt, a, weight, bias)
        return [out, (yield from normalize.normalize_gradient_protocol(rt, g, hat, inverse))]

    out = run(build, x.detach(), w, b, grad)
    assert (out.values[0] - (plain.detach() * w + b)).abs().max() < 5e-3
    assert (out.values[1] - x.grad).abs().max() < 5e-3
    assert out.rounds == 19 + 6


def test_batch_norm(run: Run, gen: torch.Generator) -> None:
    x, w, b = normal(gen, 5, 3, 4, 4, scale=3), normal(gen, 3) + 1, normal(gen, 3)

    def build(rt: Runtime, a: Share, weight: Share, bias: Share) -> MpcProtocol[Share]:
        return (yield from normalize.batch_norm_protocol(rt, a, weight, bias))[0]

    expected = F.batch_norm(x, None, None, w, b, training=True, eps=1e-3)
    assert (run(build, x, w, b).value - expected).abs().max() < 5e-3


def test_sigmoid_and_tanh(run: Run, gen: torch.Generator) -> None:
    x = torch.cat([normal(gen, 300, scale=4), torch.tensor([0.0, 30.0, -30.0, 900.0, -900.0], dtype=torch.float64)])

    def build(rt: Runtime, a: Share) -> MpcProtocol[list[Share]]:
        return (yield from arithmetic.par(activations.sigmoid_protocol(rt, a), activations.tanh_protocol(rt, a)))

    out = run(build, x)
    assert (out.values[0] - x.sigmoid()).abs().max() < 8 * UNIT
    assert (out.values[1] - x.tanh()).abs().max() < 16 * UNIT
    assert out.rounds == 19


def test_gelu_and_its_derivative(run: Run, gen: torch.Generator) -> None:
    x = torch.cat(
        [normal(gen, 400, scale=2.5), torch.tensor([0.0, 3.999, -3.999, 4.0, 50.0, -50.0], dtype=torch.float64)]
    )
    x = (torch.round(x * 2**16) / 2**16).requires_grad_()
    y = F.gelu(x)
    y.sum().backward()
    out = run(activations.gelu_protocol, x.detach())
    assert (out.values[0] - y.detach()).abs().max() < 2e-3
    assert (out.values[1] - x.grad).abs().max() < 4e-3
    assert out.rounds == 13
