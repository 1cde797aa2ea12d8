"""The registry of layer types: everything that is said about one kind of layer, in one object and one file.

How to add a layer
------------------
Write one file beside those of ``uvcc_engine/model/layer_types/`` (and name it in that package's ``__init__``), or
anywhere outside of the package; ``relu.py`` is the shortest to copy, ``dense.py`` the fullest. It holds, in this order:

1. The *spec*: a frozen dataclass of plain numbers and words that says all about one layer of the model, derived from
   ``LayerSpec``, or from ``WeightedSpec`` (which gives ``weight_shape``) if the layer is trained.
2. The *secret layer*: a class derived from ``secret_layer.Layer`` with a forward pass, an input gradient and, if it has
   a weight, a weight gradient on shares. All are protocol generators written with ``model.ops``: rounds of layers that
   do not wait for each other are shared, and the file can be read where there is no torch. Derive from
   ``ProductLayer`` if the layer is a matrix product: a ReLU behind it then costs fewer rounds.
3. The *plaintext twin*: the same function in float64 with torch's own operations, so that its gradients are autograd's
   and not yours. Every private run is held against it.
4. If the layer shall train on several workers per party, its *tensor-parallel form*, a ``TensorParallel``:
   ``parts.keeps_layout`` for what works entry by entry, ``parts.whole_weight`` for what works line by line, or one of
   its own. Without a form the layer trains on one worker per party, and a plan that asks for more is refused by name.
5. One call ``register(LayerType(...))``, whose fields are described below.

Models are made of specs (``ModelSpec``), given a name with ``specs.register_model``, and written as JSON by
``spec_json``. A layer and its gradients are tested against torch's as in ``tests/engine/private/test_private_deep.py``;
``tests/engine/parallel/test_layer_from_outside.py`` adds a layer from outside of the package and trains it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.parsing.suggest import did_you_mean
from uvcc_engine.data.sets import Floats, public_stream
from uvcc_engine.model.layer_spec import LayerSpec, WeightedSpec, check_writable
from uvcc_engine.model.shapes import WeightShape

if TYPE_CHECKING:
    from torch import Tensor

    from uvcc_engine.model.batch_place import BatchPlace
    from uvcc_engine.model.secret_layer import Layer
    from uvcc_engine.model.tensor_parallel import TensorParallel
    from uvcc_engine.mpc.foundation.share import Share


__all__ = [
    "InitialContext",
    "LayerSpec",
    "LayerType",
    "PlaintextContext",
    "SecretContext",
    "WeightedSpec",
    "layer_type",
    "layer_types",
    "register",
    "type_of",
    "unregister",
]

S = TypeVar("S", bound=LayerSpec)


@dataclass(frozen=True, slots=True)
class InitialContext:
    """What public initial weights may depend on: the job's ``seed``, the weight's number ``index`` in the model,
    whether it is the ``last`` one, and the ``public`` tensors of the job's base by name."""

    seed: int
    index: int
    last: bool
    public: Mapping[str, Floats] = field(default_factory=dict)

    def uniform(self, rows: int, columns: int, bound: float) -> Floats:
        """(rows, columns) of public numbers, uniform in [-bound, bound), another for every seed and index."""
        words = public_stream("init", self.seed, self.index, rows * columns)
        uniform = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return ((2.0 * uniform - 1.0) * bound).reshape(rows, columns)

    def kaiming(self, shape: tuple[int, int]) -> Floats:
        """A weight of inputs and, in its last row, a bias: Kaiming-uniform with gain sqrt(2) before a ReLU and 1 before
        the logits, the bias zero (He et al., 2015)."""
        inputs, outputs = shape[0] - 1, shape[1]
        weight = np.zeros(shape)
        weight[:-1] = self.uniform(inputs, outputs, math.sqrt((3.0 if self.last else 6.0) / inputs))
        return weight


@dataclass(frozen=True, slots=True)
class SecretContext:
    """What a secret layer is built around: the party's share of its weight, the layers of a block, and the ``public``
    tensors of the job's base by name."""

    own: Share | None
    inner: list[Layer]
    public: Mapping[str, Floats] = field(default_factory=dict)

    @property
    def weight(self) -> Share:
        """The weight's share, of the spec's ``weight_shape``; only where the spec has one."""
        assert self.own is not None, "the spec has no weight"
        return self.own


@dataclass(frozen=True, slots=True)
class PlaintextContext:
    """What a plaintext twin computes with: its weight, whether it is ``training``, and ``inner``, a block's layers one
    after the other; ``parts``: each of them alone; ``public``: the tensors of the job's base by name; ``weights``: a
    block's, in order, each of its spec's ``weight_shape``; ``batch``: which rows of a step's batch it trains on."""

    own: Tensor | None
    training: bool
    inner: Callable[[Tensor], Tensor]
    parts: tuple[Callable[[Tensor], Tensor], ...] = ()
    public: Mapping[str, Floats] = field(default_factory=dict)
    weights: tuple[Tensor, ...] = ()
    batch: BatchPlace | None = None

    @property
    def weight(self) -> Tensor:
        """The weight in clear (float64), of the spec's ``weight_shape``; only where the spec has one."""
        assert self.own is not None, "the spec has no weight"
        return self.own


def _no_products(spec: LayerSpec) -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerType(Generic[S]):
    """One kind of layer. All fields but the first five have a default."""

    name: str
    """The kind's name in JSON and in messages: lower-case words with hyphens, unique in the registry."""

    spec: type[S]
    """The frozen dataclass that describes one such layer. Its fields are numbers, words, other such dataclasses, specs
    and tuples of these: what ``spec_json`` can write."""

    output_shape: Callable[[S, WeightShape], WeightShape]
    """(lines, features) of one row of data behind the layer, from those before it. Raises ConfigError naming the field
    or size that does not fit; every spec that was read from JSON comes by here before it is used."""

    secret: Callable[[S, SecretContext], Layer]
    """Build the layer on shares, around ``context.weight`` (a share of the spec's ``weight_shape`` at the job's scale)
    if the spec has one, or around ``context.inner``. It is fed and gives (rows * lines, features); see ``Layer``."""

    plaintext: Callable[[S, PlaintextContext, Tensor], Tensor]
    """The same function of float64 inputs (rows * lines, features) and ``context.weight``; autograd derives it."""

    initial: Callable[[S, InitialContext], Floats] | None = None
    """Public initial weights of the spec's ``weight_shape``; they are rounded to the fixed-point grid afterwards.
    Deterministic: all parties compute the same. Needed where the spec is a ``WeightedSpec``."""

    rounds: int = 0
    """Rounds of messages of one microbatch, forward and backward together: what the stages of a pipeline are balanced
    by. Those of a block's layers count by themselves."""

    products: Callable[[S], int] = _no_products
    """Secure products of one line, forward and backward together, every comparison counting as 64: balances stages."""

    tensor_parallel: TensorParallel[S] | None = None
    """How the layer is split over several workers of a party; without it, a model that has the layer is refused there
    (ConfigError naming the layer)."""


_BY_NAME: dict[str, LayerType[Any]] = {}
_BY_SPEC: dict[type[LayerSpec], LayerType[Any]] = {}


def register(kind: LayerType[S]) -> LayerType[S]:
    """Add a layer type, and give it back. Raises ConfigError if it is incomplete, or if its name or spec is taken."""
    if kind.name != kind.name.lower() or not kind.name.replace("-", "").isalnum():
        raise ConfigError(f"a layer type called {kind.name!r}", "use lower-case words with hyphens between them")
    if not (is_dataclass(kind.spec) and issubclass(kind.spec, LayerSpec)):
        raise ConfigError(f"the spec of layer type {kind.name!r} is no dataclass of LayerSpec", "derive it from there")
    if issubclass(kind.spec, WeightedSpec) and kind.initial is None:
        raise ConfigError(f"layer type {kind.name!r} has a weight and no initial one", "give LayerType.initial")
    if kind.name in _BY_NAME:
        raise ConfigError(f"there is a layer type {kind.name!r} already", "choose another name")
    if kind.spec in _BY_SPEC:
        raise ConfigError(f"{kind.spec.__name__} is the spec of {_BY_SPEC[kind.spec].name!r}", "write one of its own")
    check_writable(kind.spec)
    _BY_NAME[kind.name] = _BY_SPEC[kind.spec] = kind
    return kind


def unregister(name: str) -> None:
    """Take a layer type away again, as a test or a notebook does. Raises ConfigError if there is none of that name."""
    del _BY_SPEC[layer_type(name).spec]
    del _BY_NAME[name]


def layer_type(name: str) -> LayerType[Any]:
    """The layer type called ``name``. Raises ConfigError naming the nearest registered one."""
    if (kind := _BY_NAME.get(name)) is not None:
        return kind
    raise ConfigError(f"unknown layer type {name[:80]!r}", _nearest(name, list(_BY_NAME)))


def type_of(spec: LayerSpec) -> LayerType[Any]:
    """The layer type that a spec belongs to. Raises ConfigError naming the nearest registered spec."""
    if (kind := _BY_SPEC.get(type(spec))) is not None:
        return kind
    name = type(spec).__name__
    raise ConfigError(f"no layer type is registered for {name}", _nearest(name, [s.__name__ for s in _BY_SPEC]))


def layer_types() -> tuple[str, ...]:
    """The names of all registered layer types, sorted."""
    return tuple(sorted(_BY_NAME))


def _nearest(name: str, known: list[str]) -> str:
    return did_you_mean(name, known, "import the module that registers it")
