"""Layers split over two tensor ranks against the same layers on one: equal, but for the unit of each truncation."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from parallel_kit import SocketPlane, run_fleet

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.model.definition.specs import (
    Attention,
    Dense,
    Embedding,
    LayerNorm,
    LayerSpec,
    LeakyRelu,
    ModelSpec,
    Relu,
    RmsNorm,
    Silu,
    Tanh,
    find_model,
    initial_weights,
)
from uvcc_engine.mpc.foundation.local import rehearsal_keys
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.products.arithmetic import public
from uvcc_engine.owner.client import whole_weights
from uvcc_engine.parallel.groups import PartyGroups
from uvcc_engine.sharding.partition import HEADS, join_weight, place_layers, slice_of, stage_bounds, weights_of
from uvcc_engine.sharding.stage import build_stage
from uvcc_engine.sharding.stage_passes import Pass, backward_protocol, forward_protocol

F = 16
UNIT = 2.0**-F
RNG = np.random.default_rng(3)


def grid(*shape: int) -> np.ndarray:
    return np.rint(RNG.uniform(-1, 1, shape) / UNIT) * UNIT


def through(model: ModelSpec, weights: list[np.ndarray], x: np.ndarray, tensor: int) -> tuple[np.ndarray, np.ndarray]:
    """Outputs in clear, put together from the ranks' rows, and the last weight's gradient for a gradient of ones."""

    def work(plane: SocketPlane, groups: PartyGroups, events: Any) -> tuple[Any, Any]:
        c = groups.place.coord
        rt = Runtime(c.party, plane, rehearsal_keys(1)[c.party], hashlib.sha256(str(c.tensor).encode()).digest())
        stage = build_stage(rt, model, weights, F, pp=groups.pp, tp=groups.tp)
        terms: dict[int, torch.Tensor] = {}
        order = {id(part): at for at, (part, _) in enumerate(stage.slots)}
        on = Pass(rt, groups.tp, len(x) * model.positions, lambda part, k, t: terms.__setitem__(order[id(part)], t))
        out = rt.run(forward_protocol(on, stage.parts, public(rt, torch.from_numpy(x), f=F)))
        ones = public(rt, torch.ones(out.shape), f=F)
        rt.run(backward_protocol(on, stage.parts, ones, wanted=False))
        shared = stage.slots[-1][0].shared
        last = groups.tp.sum_(terms[len(order) - 1]) if shared else terms[len(order) - 1]
        return out.first.numpy(), last.numpy()

    found = run_fleet(Topology(1, 1, tensor), work)

    def total(at: int, t: int) -> np.ndarray:
        with np.errstate(over="ignore"):
            return sum(found[Coord(0, p, 0, t)][at] for p in range(3))

    placed = weights_of(place_layers(model, tensor)[0])[-1]
    outs = np.concatenate([total(0, t) for t in range(tensor)]) * UNIT
    return outs, join_weight(placed, [total(1, t) for t in range(tensor)]) * UNIT**2


def model_of(*layers: LayerSpec, features: int, classes: int, positions: int = 1) -> ModelSpec:
    return ModelSpec("small", layers, features, classes, positions)


EXACT = np.vstack([np.eye(6), np.zeros((1, 6))])  # products with it have no bits to round
CASES = {
    "columns": (model_of(Dense(5, 7), features=5, classes=7), [grid(6, 7)], grid(4, 5)),
    "rows": (model_of(Dense(6, 6), Dense(6, 3), features=6, classes=3), [EXACT, grid(7, 3)], grid(5, 6)),
    "vocabulary": (
        model_of(Embedding(5, 3, 4), features=15, classes=4, positions=3),
        [grid(8, 4)],
        np.eye(5)[RNG.integers(0, 5, (2, 3))].reshape(2, 15),
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(value, marks=pytest.mark.ci(__file__) if n % 3 else ()) for n, value in enumerate(CASES)]
)
def test_a_split_product_differs_by_the_one_unit_of_its_truncation(name: str) -> None:
    model, weights, x = CASES[name]
    one, one_grad = through(model, weights, x, 1)
    two, two_grad = through(model, weights, x, 2)
    assert one.shape == two.shape
    assert np.abs(one - two).max() <= UNIT
    assert np.abs(one_grad - two_grad).max() <= 8 * UNIT  # what the layer below has rounded, summed over the rows
    assert np.abs(one_grad).max() > 0.1


def test_attention_by_heads_and_normalisation_by_rows_are_the_whole_layers() -> None:
    width, positions = 4, 3
    layers = (Embedding(5, positions, width), LayerNorm(width), Dense(width, 12), Attention(positions, width, 2))
    model = model_of(*layers, Dense(width, width), LayerNorm(width), features=15, classes=width, positions=positions)
    weights = [grid(8, 4), grid(2, 4), grid(5, 12), grid(5, 4), np.array([[1.0] * 4, [0.5] * 4])]
    x = np.eye(5)[RNG.integers(0, 5, (3, positions))].reshape(3, 15)
    one, one_grad = through(model, weights, x, 1)
    two, two_grad = through(model, weights, x, 2)
    assert np.abs(one - two).max() < 2e-3
    assert np.abs(one_grad - two_grad).max() < 2e-2


@pytest.mark.ci(__file__)
def test_smooth_and_leaky_activations_and_rms_normalisation_are_the_whole_layers() -> None:
    layers = (Dense(5, 6), LeakyRelu(6, 0.25), Dense(6, 4), Tanh(4), RmsNorm(4), Silu(4))
    model, weights, x = model_of(*layers, features=5, classes=4), [grid(6, 6), grid(7, 4), grid(1, 4)], grid(5, 5)
    one, one_grad = through(model, weights, x, 1)
    two, two_grad = through(model, weights, x, 2)
    assert np.abs(one - two).max() < 2e-3
    assert np.abs(one_grad - two_grad).max() < 1e-2
    assert np.abs(one_grad).max() > 0.1


def test_every_entry_of_a_weight_lies_at_one_rank_and_whole_weights_at_all() -> None:
    for name, size in (("gpt-tiny", 2), ("mlp4-digits", 2), ("mlp-digits", 5)):
        for placed in weights_of(place_layers(find_model(name), size)[0]):
            spec: Any = placed.spec
            held = np.zeros(spec.weight_shape, dtype=int)
            for k in range(size):
                held[np.ix_(*slice_of(placed, size, k))] += 1
            assert set(held.reshape(-1)) == ({size} if isinstance(spec, LayerNorm) else {1})


def test_queries_keys_and_values_of_a_head_stay_together() -> None:
    placed = next(p for p in weights_of(place_layers(find_model("gpt-tiny"), 2)[0]) if p.split == HEADS)
    _, second = slice_of(placed, 2, 1)
    assert list(second) == [*range(8, 16), *range(24, 32), *range(40, 48)]


def test_the_owner_puts_the_slices_of_all_stages_and_tensor_ranks_together() -> None:
    model = find_model("gpt-tiny")
    whole = initial_weights(model, 7, F)
    placed = weights_of(place_layers(model, 2)[0])
    slices = {
        (s, t): {f"weight.{n}": whole[n][np.ix_(*slice_of(placed[n], 2, t))] for n in numbers}
        for s, numbers in enumerate([range(4), range(4, 9)])
        for t in range(2)
    }
    found = whole_weights(slices, "gpt-tiny")
    assert all(np.array_equal(found[f"weight.{n}"], weight) for n, weight in enumerate(whole))
    with pytest.raises(ConfigError, match="--model"):
        whole_weights(slices, None)
    with pytest.raises(ConfigError, match="mlp-digits has"):
        whole_weights(slices, "mlp-digits")


@pytest.mark.parametrize(
    ("layers", "tensor", "what"),
    [
        ((Embedding(5, 3, 4), Dense(4, 12), Attention(3, 4, 2)), 3, "2 heads over 3"),
        ((Dense(4, 4), LayerNorm(4)), 2, "LayerNorm .it is fed columns"),
        ((Dense(4, 2), Relu(2), Dense(2, 4)), 3, "2 columns over 3"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(layers: tuple[LayerSpec, ...], tensor: int, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        place_layers(model_of(*layers, features=4, classes=4), tensor)


def test_a_gpt_has_its_blocks_for_stages() -> None:
    model = find_model("gpt-tiny")
    assert stage_bounds(model, 2) == [range(2), range(2, 5)]
    with pytest.raises(ConfigError, match="5 weighted layers or blocks for 6 stages"):
        stage_bounds(model, 6)
