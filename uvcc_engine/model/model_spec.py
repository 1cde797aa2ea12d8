"""A model: a named stack of layers, whether they fit together, and the weights that it starts from. No torch.

Initial weights are a public, deterministic function of the job's seed, rounded to the fixed-point grid: sharing a
public constant is free, and after the first update the weights are secret.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.data.sets import Floats
from uvcc_engine.model.layer_spec import LayerSpec, PublicSpec, WeightedSpec, public_specs, weighted_specs
from uvcc_engine.model.registry import InitialContext, type_of


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A named stack of layers that ends in one logit per class, at each of ``positions`` positions of a row.

    ``frac_bits``: the least number of fractional bits that the model trains with. ``public``: the tensors of the job's
    base that its layers compute with, by name; empty until the base was read (``base_model.attached``). ``base``: the
    SHA-256 of its file then.
    """

    name: str
    layers: tuple[LayerSpec, ...]
    features: int
    classes: int
    positions: int = 1
    frac_bits: int = 8
    public: Mapping[str, Floats] = field(default_factory=dict, compare=False, repr=False)
    base: str = field(default="", compare=False)

    @property
    def public_layers(self) -> tuple[PublicSpec, ...]:
        """The layers that compute with a public tensor, in order."""
        return tuple(public_specs(self.layers))

    @property
    def weights(self) -> tuple[WeightedSpec, ...]:
        """The layers that hold a weight, in order."""
        return tuple(weighted_specs(self.layers))

    @property
    def unsupervised(self) -> bool:
        """Whether it learns from rows alone."""
        return len(self.layers) == 1 and self.layers[0].unsupervised

    @property
    def labels(self) -> int:
        """Outputs that a row's target speaks of, as a schema counts them; 0 where there is no target."""
        return 0 if self.unsupervised else self.classes

    @property
    def targets(self) -> int:
        """Columns of the one-hot labels."""
        return self.labels * self.positions


def check_model(model: ModelSpec) -> None:
    """Refuse (ConfigError naming the layer) a model whose layers do not fit together, or do not give its classes."""
    shape = (1, model.features)
    for at, spec in enumerate(model.layers):
        try:
            shape = type_of(spec).output_shape(spec, shape)
        except ConfigError as error:
            raise ConfigError(f"{model.name}, layer {at}: {error.what}", error.hint) from error
    if shape != (model.positions, model.classes):
        raise ConfigError(
            f"{model.name} gives {shape[0]} lines of {shape[1]} features per row,"
            f" not {model.positions} of {model.classes} classes",
            "end it in a layer of as many outputs as there are classes",
        )
    if not model.weights:
        raise ConfigError(f"{model.name} has no weight", "give it a layer that is trained")


def initial_weights(model: ModelSpec, seed: int, frac_bits: int) -> list[Floats]:
    """Public initial weights on the grid of 2^-frac_bits: per weighted layer an array of its ``weight_shape``."""
    weighted = model.weights
    return [
        np.rint(_initial(spec, InitialContext(seed, index, index == len(weighted) - 1, model.public)) * 2.0**frac_bits)
        / 2.0**frac_bits
        for index, spec in enumerate(weighted)
    ]


def _initial(spec: WeightedSpec, at: InitialContext) -> Floats:
    kind = type_of(spec)
    assert kind.initial is not None  # the registry asked for it
    found = kind.initial(spec, at)
    if found.shape != spec.weight_shape:
        raise ConfigError(
            f"layer type {kind.name!r} starts {spec} with {found.shape}, not {spec.weight_shape}", "mend its initial"
        )
    return found
