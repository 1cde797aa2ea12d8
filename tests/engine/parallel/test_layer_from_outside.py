"""Layers that the package does not know: defined here, registered, trained on shares, split, checkpointed, refused.

``Scale`` has a weight and splits it as the layer below leaves its outputs; ``Offset`` lies whole at every rank by the
package's own form; ``Square`` has no weight; ``Unsplit`` has no tensor-parallel form.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from training_kit import Found, check_replicas, shares, train, weights

import uvcc_engine
from uvcc_engine.checkpoint.reshard import cut_state, join_state
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.model import ops
from uvcc_engine.model.definition.spec_json import layer_from_json, layer_to_json
from uvcc_engine.model.definition.specs import (
    MODELS,
    Dense,
    ModelSpec,
    Relu,
    Residual,
    check_model,
    find_model,
    initial_weights,
    register_model,
)
from uvcc_engine.model.learning.plaintext import train_plaintext
from uvcc_engine.model.learning.training import PrivateTrainer
from uvcc_engine.model.parts import Pass, Plain, StagePart, keeps_layout, whole_weight
from uvcc_engine.model.registry import (
    InitialContext,
    LayerSpec,
    LayerType,
    PlaintextContext,
    SecretContext,
    WeightedSpec,
    layer_type,
    layer_types,
    register,
    type_of,
    unregister,
)
from uvcc_engine.model.secret_layer import Layer
from uvcc_engine.model.shapes import WeightShape, check_features, check_positive
from uvcc_engine.model.tensor_parallel import COLUMNS, WHOLE, PartContext, PlaceContext, Placed, TensorParallel
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.owner.client import dataset_for
from uvcc_engine.sharding.partition import place_layers, slice_of, stage_bounds, weights_of
from uvcc_engine.sharding.validation import fit_model

# -- the layer, as one file outside of the package would define it ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scale(WeightedSpec):
    """Every feature times a gain of its own. Its weight is (1, width)."""

    width: int

    @property
    def weight_shape(self) -> tuple[int, int]:
        return 1, self.width


class ScaleLayer(Layer):
    """Forward 2 rounds; input gradient 2 rounds; weight gradient 2 rounds."""

    def __init__(self, weight: Share) -> None:
        self.weight = weight
        self._seen: Share | None = None

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        assert self.weight is not None
        self._seen = x
        return (yield from ops.mul_protocol(rt, x, self.weight))

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        assert self.weight is not None
        return (yield from ops.mul_protocol(rt, grad, self.weight))

    def weight_gradient_protocol(self, rt: Runtime, grad: Share, scale: float) -> MpcProtocol[Share]:
        assert self._seen is not None
        sums = ops.product_with_protocol(rt, grad, self._seen, lambda g, x: (g * x).sum(0, keepdim=True), scale=scale)
        return (yield from sums)


class ScalePart(Plain):
    """A rank's columns of the gains for its columns of the features, or all of them for its own rows."""

    def __init__(self, weight: Share, dealer: int, *, shared: bool) -> None:
        super().__init__(weight, dealer)
        self.shared = shared

    def forward_protocol(self, on: Pass, x: Share) -> MpcProtocol[Share]:
        on.keep(self, x)
        return (yield from ops.mul_protocol(on.rt, x, self.weights[0], dealer=self.dealers[0]))

    def backward_protocol(self, on: Pass, grad: Share, wanted: bool) -> MpcProtocol[Share]:
        role = ops.roles(on.rt, self.dealers[0])
        pairs = zip(ops.terms(role, grad), ops.partners(role, on.take(self)), strict=True)
        on.gradient(self, 0, torch.stack([(g * x).sum(0, keepdim=True) for g, x in pairs]).sum(0))
        if not wanted:
            return grad
        return (yield from ops.mul_protocol(on.rt, grad, self.weights[0], dealer=self.dealers[0]))


def _same_width(spec: Any, shape: WeightShape) -> WeightShape:
    check_positive(spec, "width")
    check_features(spec, shape, spec.width)
    return shape


def _scale_initial(spec: Scale, at: InitialContext) -> Any:
    return 1.0 + at.uniform(1, spec.width, 0.25)


def _scale_plaintext(spec: Scale, at: PlaintextContext, x: Tensor) -> Tensor:
    return x * at.weight


def _scale_place(spec: Scale, at: PlaceContext) -> Placed:
    if at.layout == COLUMNS:
        return at.divided(spec, COLUMNS, COLUMNS, spec.width)
    return at.placed(spec, WHOLE, at.layout)


def _scale_part(spec: Scale, at: PartContext) -> StagePart:
    return ScalePart(at.weight, at.dealer, shared=at.placed.split == WHOLE)


SCALE = LayerType(
    name="scale",
    spec=Scale,
    output_shape=_same_width,
    secret=lambda spec, at: ScaleLayer(at.weight),
    plaintext=_scale_plaintext,
    initial=_scale_initial,
    rounds=4,
    products=lambda spec: spec.width,
    tensor_parallel=TensorParallel(place=_scale_place, part=_scale_part),
)

# -- others, by the package's forms ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Offset(WeightedSpec):
    """Every feature plus a number of its own. Its weight is (1, width)."""

    width: int

    @property
    def weight_shape(self) -> tuple[int, int]:
        return 1, self.width


class OffsetLayer(Layer):
    """Forward and back without a message; weight gradient 2 rounds."""

    def __init__(self, weight: Share) -> None:
        self.weight = weight

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        assert self.weight is not None
        return ops.add(x, self.weight)
        yield  # a generator like its siblings

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        return grad
        yield  # a generator like its siblings

    def weight_gradient_protocol(self, rt: Runtime, grad: Share, scale: float) -> MpcProtocol[Share]:
        return (yield from ops.mul_public_protocol(rt, grad.sum(0, keepdim=True), scale))


def _offset(spec: Offset, at: SecretContext) -> Layer:
    return OffsetLayer(at.weight)


@dataclass(frozen=True, slots=True)
class Square(LayerSpec):
    """x^2 / 2 on ``width`` features."""

    width: int


class SquareLayer(Layer):
    def __init__(self) -> None:
        self._seen: Share | None = None

    def forward_protocol(self, rt: Runtime, x: Share) -> MpcProtocol[Share]:
        self._seen = x
        return (yield from ops.mul_protocol(rt, x, x, scale=0.5))

    def input_gradient_protocol(self, rt: Runtime, grad: Share) -> MpcProtocol[Share]:
        assert self._seen is not None
        return (yield from ops.mul_protocol(rt, grad, self._seen))


def _square(spec: Square, at: SecretContext) -> Layer:
    return SquareLayer()


@dataclass(frozen=True, slots=True)
class Unsplit(LayerSpec):
    """A layer that does nothing, and that cannot be split."""

    width: int


KINDS: list[LayerType[Any]] = [
    SCALE,
    LayerType(
        name="offset",
        spec=Offset,
        output_shape=_same_width,
        secret=_offset,
        plaintext=lambda spec, at, x: x + at.weight,
        initial=lambda spec, at: np.zeros(spec.weight_shape),
        tensor_parallel=whole_weight(_offset),
    ),
    LayerType(
        name="square",
        spec=Square,
        output_shape=_same_width,
        secret=_square,
        plaintext=lambda spec, at, x: x.square() / 2.0,
        rounds=4,
        tensor_parallel=keeps_layout(_square),
    ),
    LayerType(
        name="unsplit",
        spec=Unsplit,
        output_shape=_same_width,
        secret=lambda spec, at: SquareLayer(),
        plaintext=lambda spec, at, x: x,
    ),
]
LAYERS = (
    Dense(64, 12),
    Scale(12),  # fed columns
    Square(12),
    Dense(12, 8),
    Scale(8),  # fed rows
    Offset(8),
    Relu(8),
    Dense(8, 10),
)
MODEL = ModelSpec("scaled-digits", LAYERS, 64, 10)
JOB = PrivateJob(model=MODEL.name, steps=2, batch=16, lr=0.25, schedule="constant", test_rows=20)
NEAR = 64 * 2.0**-16
TOPOLOGIES = [Topology(1, 1, 2, 1), Topology(1, 2, 1, 2)]


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    for kind in KINDS:
        register(kind)
    register_model(MODEL)
    yield
    del MODELS[MODEL.name]
    for kind in KINDS:
        unregister(kind.name)


@pytest.fixture(scope="module")
def fleets(_registered: None) -> dict[Topology, Found]:
    return {size: train(JOB, size) for size in TOPOLOGIES}


# -- training ----------------------------------------------------------------------------------------------------------


def opened(states: list[dict[str, Tensor]], kind: str = "weight") -> list[np.ndarray]:
    names = [f"{kind}.{i}.lo" for i in range(len(MODEL.weights))]
    return [sum(state[name].numpy() for state in states) / 2.0**JOB.frac_bits for name in names]


def far(ours: list[np.ndarray], theirs: Any) -> float:
    assert [w.shape for w in ours] == [w.shape for w in theirs]
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))


def test_three_parties_train_it_as_its_plaintext_twin() -> None:
    inputs = shares(JOB)

    def body(rt: Runtime) -> tuple[list[float | None], int, dict[str, Tensor]]:
        trainer, losses = PrivateTrainer(rt, JOB, find_model(JOB.model), inputs[rt.party]), []
        for step in range(JOB.steps):
            rt.begin_epoch(step)
            losses.append(trainer.step(step).loss)
        return losses, trainer.count_correct(), trainer.state()

    found = LocalPlanes(4).run_three(body)
    clear = train_plaintext(JOB, dataset_for(JOB))
    starts = initial_weights(MODEL, JOB.seed, JOB.frac_bits)
    ours = opened([state for _, _, state in found])
    assert far(ours, clear.weights) < NEAR
    assert all(np.abs(w - s).max() > 4 * NEAR for w, s in zip(ours, starts, strict=True))  # every layer has learnt
    assert np.allclose(found[0][0], clear.losses, atol=1e-3)  # type: ignore[arg-type]
    assert abs(found[0][1] - clear.correct) <= 1


@pytest.mark.parametrize("size", TOPOLOGIES, ids=str)
def test_it_trains_on_tensor_ranks_and_on_stages(fleets: dict[Topology, Found], size: Topology) -> None:
    found, clear = fleets[size], train_plaintext(JOB, dataset_for(JOB))
    check_replicas(found)
    assert far(weights(JOB, found, size), clear.weights) < NEAR
    assert np.allclose(found[Coord(0, 0, 0, 0)]["losses"], clear.losses, atol=1e-3)


def test_columns_are_split_and_rows_are_not() -> None:
    placed = weights_of(place_layers(MODEL, 2)[0])
    assert [p.split for p in placed] == ["columns", "columns", "rows", "whole", "whole", "columns"]
    assert [len(slice_of(placed[1], 2, k)[1]) for k in range(2)] == [6, 6]
    assert [len(slice_of(placed[3], 2, k)[1]) for k in range(2)] == [8, 8]
    assert stage_bounds(MODEL, 2)[1].stop == len(LAYERS)


def halves(found: Found, size: Topology, party: int) -> dict[str, np.ndarray]:
    """The whole state of one party, both components, joined from its workers' checkpoints."""
    whole: dict[str, np.ndarray] = {}
    for half in ("lo", "hi"):
        parts = {
            (s, t): {
                name.removesuffix(f".{half}"): value
                for name, value in found[Coord(0, party, s, t)]["state"].items()
                if name.endswith(f".{half}")
            }
            for s in range(size.stages)
            for t in range(size.tensor)
        }
        whole |= {f"{name}.{half}": value for name, value in join_state(MODEL, size, parts).items()}
    return whole


@pytest.mark.parametrize("size", TOPOLOGIES, ids=str)
def test_a_checkpoint_is_joined_cut_again_and_trained_on(fleets: dict[Topology, Found], size: Topology) -> None:
    job, inputs = replace(JOB, steps=3), shares(JOB)
    states = [halves(fleets[size], size, party) for party in range(3)]
    low = {name.removesuffix(".lo"): value for name, value in states[0].items() if name.endswith(".lo")}
    for other in (Topology(1, 2, 2, 1), Topology(1, 3, 1, 1), Topology(1, 1, 3, 1)):
        cut = {(s, t): cut_state(MODEL, other, s, t, low) for s in range(other.stages) for t in range(other.tensor)}
        again = join_state(MODEL, other, cut)
        assert again.keys() == low.keys()
        assert all(np.array_equal(again[name], value) for name, value in low.items())

    def body(rt: Runtime) -> dict[str, Tensor]:
        trainer = PrivateTrainer(rt, job, find_model(job.model), inputs[rt.party])
        trainer.load_state({name: torch.from_numpy(value) for name, value in states[rt.party].items()})
        rt.begin_epoch(2)
        trainer.step(2)
        return trainer.state()

    ours = opened(LocalPlanes(4).run_three(body))
    assert far(ours, train_plaintext(job, dataset_for(JOB)).weights) < 2 * NEAR


# -- what is written, and what is refused ------------------------------------------------------------------------------


def test_every_layer_is_written_as_json_and_read_back() -> None:
    assert layer_to_json(Scale(12)) == {"type": "scale", "width": 12}
    for model in [MODEL, *MODELS.values()]:
        check_model(model)
        for spec in model.layers:
            written = json.loads(json.dumps(layer_to_json(spec)))
            assert layer_from_json(written) == spec
    block = {"type": "residual", "layers": [{"type": "scale", "width": 3}]}
    assert layer_from_json(block) == Residual((Scale(3),))


@pytest.mark.parametrize(
    ("written", "what"),
    [
        ({"type": "scael", "width": 3}, "layer: unknown layer type 'scael' .did you mean 'scale'"),
        ({"type": "scale", "widht": 3}, "unknown key 'widht' .did you mean 'width'"),
        ({"type": "scale"}, "layer lacks 'width'"),
        ({"type": "scale", "width": "3"}, "layer.width is '3'"),
        ({"type": "scale", "width": True}, "layer.width is True"),
        ({"type": "scale", "width": -1}, "layer.width is -1"),
        ({"type": "scale", "width": 2**40}, "layer.width is"),
        ({"type": "residual", "layers": [{"type": "dnese"}]}, r"layer.layers\[0\]: unknown layer type 'dnese'"),
        ({"type": "residual", "layers": 7}, "layer.layers is 7"),
        ({"type": ["scale"]}, "layer.type is a list"),
        ("scale", "layer is 'scale'"),
        (None, "layer is None"),
    ],
)
def test_a_layer_that_is_not_registered_or_not_whole_is_refused_by_name(written: object, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        layer_from_json(written)


def test_layers_in_layers_without_end_are_refused() -> None:
    written: dict[str, Any] = {"type": "scale", "width": 1}
    for _ in range(40):
        written = {"type": "residual", "layers": [written]}
    with pytest.raises(ConfigError, match="more than 16 blocks"):
        layer_from_json(written)


def test_a_name_or_spec_that_nobody_registered_is_refused_with_the_nearest() -> None:
    @dataclass(frozen=True, slots=True)
    class Scales(LayerSpec):
        width: int

    assert "scale" in layer_types()
    with pytest.raises(ConfigError, match="did you mean 'scale'"):
        layer_type("Scale")
    with pytest.raises(ConfigError, match=r"no layer type is registered for Scales .did you mean 'Scale'"):
        type_of(Scales(3))
    with pytest.raises(ConfigError, match="no layer type is registered for Scales"):
        register_model(ModelSpec("other", (Dense(64, 10), Scales(10)), 64, 10))


def test_without_a_tensor_parallel_form_a_plan_over_workers_is_refused_by_name() -> None:
    model = register_model(ModelSpec("unsplit-digits", (Dense(64, 10), Unsplit(10)), 64, 10))
    try:
        assert fit_model(replace(JOB, model=model.name)) == model
        with pytest.raises(ConfigError, match="cannot be split over workers: Unsplit"):
            fit_model(replace(JOB, model=model.name), workers=2)
    finally:
        del MODELS[model.name]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"name": "dense"}, "there is a layer type 'dense' already"),
        ({"name": "scale2"}, "Scale is the spec of 'scale'"),
        ({"name": "Scale It"}, "lower-case words"),
        ({"name": "other", "spec": dict}, "no dataclass of LayerSpec"),
        ({"name": "other", "initial": None}, "has a weight and no initial one"),
    ],
)
def test_an_incomplete_or_second_type_is_not_registered(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        register(replace(SCALE, **changes))


@dataclass(frozen=True, slots=True)
class _WithFunction(LayerSpec):
    rule: object


def test_a_spec_that_json_cannot_hold_is_not_registered() -> None:
    with pytest.raises(ConfigError, match=r"_WithFunction.rule is of a kind that JSON cannot hold"):
        register(replace(KINDS[2], name="other", spec=_WithFunction))


@pytest.mark.parametrize(
    ("layers", "what"),
    [
        ((Dense(64, 12), Scale(11), Dense(12, 10)), "layer 1: .*takes 11 features, it is fed 12"),
        ((Dense(64, 12),), "gives 1 lines of 12 features per row, not 1 of 10 classes"),
        ((Dense(64, 10), Residual((Dense(10, 9),))), "layer 1: a residual block is fed"),
        ((Dense(64, 0), Dense(0, 10)), "layer 0: Dense.outputs is 0"),
    ],
)
def test_layers_that_do_not_fit_together_are_refused_by_number(layers: tuple[LayerSpec, ...], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        register_model(ModelSpec("other", layers, 64, 10))
    assert "other" not in MODELS


# -- what makes it one file --------------------------------------------------------------------------------------------


def test_no_code_outside_of_a_layers_own_file_asks_for_its_class() -> None:
    specs = {kind.spec.__name__ for kind in map(layer_type, layer_types())}
    root, found = Path(uvcc_engine.__file__).parent, []
    texts = {path: path.read_text() for path in sorted(root.rglob("*.py"))}
    asks = re.compile(rf"\b({'|'.join(specs)})\b")
    for path, text in texts.items():
        for node in ast.walk(ast.parse(text)) if "isinstance(" in text and asks.search(text) else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                named = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
                found += [f"{path.name}: {name}" for name in named & specs]
    assert found == []


def test_layers_are_read_without_torch_and_every_operation_is_there() -> None:
    code = (
        "import sys, uvcc_engine.owner.client, uvcc_engine.checkpoint.reshard\n"
        "from uvcc_engine.model.definition.specs import MODELS, check_model, find_model, initial_weights\n"
        "from uvcc_engine.sharding.partition import place_layers, stage_bounds\n"
        "for model in MODELS.values(): check_model(model)\n"
        "initial_weights(find_model('gpt-tiny'), 7, 16), place_layers(find_model('gpt-tiny'), 2)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert all(getattr(ops, name) is not None for name in ops.OPERATIONS)
    with pytest.raises(AttributeError, match="matmull_protocol"):
        _ = ops.matmull_protocol  # type: ignore[attr-defined]
