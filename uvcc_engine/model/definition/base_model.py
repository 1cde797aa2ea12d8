"""A public base: weights that everybody may know, in a safetensors file, and what of a model around them stays secret.

    base = read_base(Path("base.safetensors"))
    model = adapted(base, Adapters(rank=4))          # secret adapters and a secret head, all else public
    plain, weights = merged(model, opened_weights)   # an ordinary model again, once it was trained

The file holds tensors by name (``weight.0``, ``weight.1``, ... of what our own programs write), and in its metadata the
model that they belong to. A job names it by SHA-256, so every party computes with the same numbers. No torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from uvcc_engine.contract.checkpoints.tensors import check_tensors
from uvcc_engine.contract.errors import ConfigError, UnreadableError, VerificationError
from uvcc_engine.contract.parsing import strict
from uvcc_engine.contract.parsing.canonical import sorted_json
from uvcc_engine.contract.run_files import files
from uvcc_engine.data.named_file import refuse_streams
from uvcc_engine.data.sets import Floats
from uvcc_engine.model.definition.layer_list import model_of_json, model_of_layers, model_to_json
from uvcc_engine.model.layer_spec import LayerSpec, PublicSpec, WeightedSpec, weighted_specs
from uvcc_engine.model.layer_types.adapted import Adapted
from uvcc_engine.model.layer_types.dense import Dense
from uvcc_engine.model.layer_types.public import Public, Started, can_be_public
from uvcc_engine.model.model_spec import ModelSpec

_ABOUT: Final = "uvcc"
MOST_BYTES: Final = 2 << 30
LARGEST_WEIGHT: Final = 1024.0
ADAPTER: Final = "adapter"
TRAINED: Final = "train"
NEW: Final = "new"
KEPT: Final = "public"
HEADS: Final = (TRAINED, ADAPTER, NEW, KEPT)


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A base that was read: its ``model``, ``None`` where the file does not say, its tensors by name, the file's hash,
    and the letters of the text that it was trained on, if any."""

    model: ModelSpec | None
    tensors: Mapping[str, Floats]
    sha256: str
    letters: tuple[str, ...] = ()

    @property
    def weights(self) -> list[Floats]:
        """The tensors of a base that our programs wrote, in the model's order."""
        assert self.model is not None
        return [self.tensors[f"weight.{i}"] for i in range(len(self.model.weights))]


@dataclass(frozen=True, slots=True)
class Adapters:
    """What of a base is trained in secret, as a profile says it.

    ``rank`` of each adapter; ``scale``: what it is multiplied by (alpha / rank); ``layers``: the names of the base's
    tensors that get one (``weight.3``), all dense layers but the last where it is empty. ``head``, the last dense
    layer: ``train`` goes on from the base's weights, ``new`` starts anew for the data's classes, ``adapter`` gives it
    an adapter, ``public`` leaves it as it is. ``rank`` 0: no adapters, the head alone.
    """

    rank: int = 4
    scale: float = 1.0
    layers: tuple[str, ...] = ()
    head: str = TRAINED

    def __post_init__(self) -> None:
        if self.head not in HEADS:
            raise ConfigError(f"job.adapters.head is {self.head!r}", f"one of {', '.join(HEADS)}")
        if not 0 <= self.rank <= 256 or (self.rank == 0 and (self.layers or self.head in (ADAPTER, KEPT))):
            raise ConfigError(
                f"job.adapters.rank is {self.rank} with head {self.head!r}", "1 to 256; 0 trains the head alone"
            )

    @classmethod
    def from_json(cls, found: object) -> Adapters:
        """Read what a profile says. Raises ConfigError naming an unknown key and the nearest known one."""
        return strict.read(cls, found, "job.adapters")


def write_base(path: Path, model: ModelSpec, weights: Sequence[Floats], letters: Sequence[str] = ()) -> str:
    """Write a model's weights as a public base; the file's SHA-256. Raises UvccError where the disk refuses.

    ``weights``: one of each weighted layer, in the shape of its ``weight_shape``.
    """
    from safetensors.numpy import save

    named = {f"weight.{i}": np.ascontiguousarray(w, dtype=np.float32) for i, w in enumerate(weights)}
    about = {"model": model_to_json(model)} | ({"letters": list(letters)} if letters else {})
    content = save(named, {_ABOUT: sorted_json(about)})  # one key: the library writes several in any order
    files.write_atomic(path, content)
    return hashlib.sha256(content).hexdigest()


def read_base(path: Path, sha256: str = "") -> BaseModel:
    """Read a base file, and hold it to a hash where one is given; hostile until read.

    Raises UnreadableError, VerificationError for another hash, ConfigError for numbers that fixed point does not hold.
    """
    refuse_streams(path)
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UnreadableError(f"cannot read the public base {path}: {error.strerror}", "name it in job.base") from error
    if len(raw) > MOST_BYTES:
        raise ConfigError(f"{path.name} is larger than {MOST_BYTES >> 30} GiB", "use a smaller base")
    digest = hashlib.sha256(raw).hexdigest()
    if sha256 and digest != sha256:
        raise VerificationError(
            "base", f"{path.name} has the hash {digest[:12]}, the job names {sha256[:12]}", "give the job's own file"
        )
    check_tensors(path)
    return _read(path, raw, digest)


def _read(path: Path, raw: bytes, digest: str) -> BaseModel:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        found = load(raw)
        metadata = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")]).get("__metadata__", {})
        about = json.loads(metadata.get(_ABOUT, "{}"))
        model = model_of_json(about["model"]) if "model" in about else None
        letters = tuple(str(one) for one in about.get("letters", []))
    except (SafetensorError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        hint = "write it as safetensors of float16, float32 or float64"
        raise UnreadableError(f"{path.name} is no base: {str(error)[:80]}", hint) from error
    tensors = {name: _numbers(path, name, tensor) for name, tensor in found.items()}
    if model is not None:
        wanted = {f"weight.{i}": spec.weight_shape for i, spec in enumerate(model.weights)}
        if {name: tensor.shape for name, tensor in tensors.items()} != wanted:
            raise ConfigError(f"{path.name} holds other tensors than its model has weights", "write the base again")
    return BaseModel(model, tensors, digest, letters)


def _numbers(path: Path, name: str, tensor: np.ndarray[Any, Any]) -> Floats:
    if tensor.dtype.kind != "f":
        raise ConfigError(f"{path.name}: {name[:80]} is of {tensor.dtype}", "a base holds floating-point numbers")
    found: Floats = tensor.astype(np.float64)
    if not np.isfinite(found).all() or np.abs(found).max(initial=0.0) > LARGEST_WEIGHT:
        raise ConfigError(
            f"{path.name}: {name[:80]} has numbers beyond {LARGEST_WEIGHT:g}, or none", "fixed point holds no such base"
        )
    return found


def attached(model: ModelSpec, base: BaseModel) -> ModelSpec:
    """A job's model with the public tensors that its layers name. Raises ConfigError naming one that does not fit."""
    public: dict[str, Floats] = {}
    for spec in model.public_layers:
        name, shape = spec.public_tensor
        if name not in base.tensors or base.tensors[name].shape != shape:
            there = base.tensors[name].shape if name in base.tensors else "none"
            raise ConfigError(f"the base has {name} of shape {there}, the model takes {shape}", "give its own base")
        public[name] = base.tensors[name]
    return replace(model, public=public, base=base.sha256)


def made_up(model: ModelSpec, seed: int = 7) -> ModelSpec:
    """A model with public tensors of the right shapes that nobody trained: costs and forms do not depend on them."""
    rng = np.random.default_rng(seed)
    shapes = dict(spec.public_tensor for spec in model.public_layers)
    return replace(model, public={name: rng.normal(0.0, shape[0] ** -0.5, shape) for name, shape in shapes.items()})


def adapted(base: BaseModel, asked: Adapters, classes: int = 0) -> ModelSpec:
    """The base's model with what is asked for secret and all else public, its public tensors attached.

    ``classes``: those of the data, for a new head. Raises ConfigError naming a layer that there is not, or cannot be.
    """
    if base.model is None:
        raise ConfigError("the base does not say what its model is", "write it with uvcc-engine base")
    dense = [f"weight.{i}" for i, spec in enumerate(base.model.weights) if spec.adaptable]
    if not dense:
        raise ConfigError("the base has no dense layer", "train its model as it is")
    wanted = asked.layers or tuple(dense[:-1] if asked.rank else ())
    if odd := [name for name in wanted if name not in dense or (name == dense[-1] and asked.head != ADAPTER)]:
        hint = f"dense layers are {', '.join(dense[:-1])}; the last one, {dense[-1]}, is the head"
        raise ConfigError(f"job.adapters.layers: {odd[0]!r} gets no adapter", hint)
    turn = _Turn(asked, frozenset(wanted), dense[-1], classes or base.model.classes)
    numbers = iter(range(len(base.model.weights)))
    layers = [turn.layer(spec, numbers) for spec in base.model.layers]
    outputs = turn.classes if asked.head == NEW else base.model.classes
    made = model_of_layers(layers, base.model.features, outputs, base.model.positions)
    return attached(made, base)


@dataclass(frozen=True, slots=True)
class _Turn:
    """Turns the layers of a base into public, adapted and trained ones."""

    asked: Adapters
    wanted: frozenset[str]
    head: str
    classes: int

    def layer(self, spec: LayerSpec, numbers: Iterator[int]) -> LayerSpec:
        if isinstance(spec, WeightedSpec):
            return self._weighted(spec, f"weight.{next(numbers)}")
        found: LayerSpec = _inside(spec, lambda one: self.layer(one, numbers))
        return found

    def _weighted(self, spec: WeightedSpec, name: str) -> LayerSpec:
        if isinstance(spec, PublicSpec):
            raise ConfigError("the base is itself made of public layers", "give a base of ordinary layers")
        size = spec.adaptable
        if size and (name in self.wanted or (name == self.head and self.asked.head == ADAPTER)):
            return Adapted(*size, name, self.asked.rank, self.asked.scale)
        if size and name == self.head and self.asked.head != KEPT:
            return Started(spec, name) if self.asked.head == TRAINED else Dense(size[0], self.classes)
        return Public(spec, name) if can_be_public(spec) else Started(spec, name)


def _inside(spec: Any, turn: Any) -> Any:
    """A block with its layers turned, anything else as it is: layers lie in fields, in tuples and tuples of tuples."""
    changes: dict[str, Any] = {}
    for one in fields(spec):
        value = getattr(spec, one.name)
        if isinstance(value, LayerSpec):
            changes[one.name] = turn(value)
        elif isinstance(value, tuple) and value and isinstance(value[0], LayerSpec | tuple):
            changes[one.name] = tuple(
                tuple(turn(inner) for inner in part) if isinstance(part, tuple) else turn(part) for part in value
            )
    return replace(spec, **changes) if changes else spec


def merged(model: ModelSpec, weights: Sequence[Floats]) -> tuple[ModelSpec, list[Floats]]:
    """An ordinary model that computes the same, without a base, and its weights in order, each in its shape.

    ``weights``: those that were trained, in the shapes of the model's ``weight_shape``.
    """
    trained, whole = iter(weights), []

    def turn(spec: LayerSpec) -> LayerSpec:
        if isinstance(spec, PublicSpec):
            layer, weight = spec.merged(model.public, trained)
            whole.append(weight)
            return layer
        if isinstance(spec, WeightedSpec):
            whole.append(next(trained))
            return spec
        found: LayerSpec = _inside(spec, turn)
        return found

    layers = [turn(spec) for spec in model.layers]
    plain = model_of_layers(layers, model.features, model.classes, model.positions)
    assert [w.shape for w in whole] == [spec.weight_shape for spec in weighted_specs(layers)]
    return plain, whole


__all__ = [
    "Adapters",
    "BaseModel",
    "adapted",
    "attached",
    "made_up",
    "merged",
    "read_base",
    "write_base",
]
