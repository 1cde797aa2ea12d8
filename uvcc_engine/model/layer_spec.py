"""What the specs of layers derive from, and what their fields may hold. No torch."""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Final, get_args, get_origin, get_type_hints

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.data.sets import Floats

_PLAIN: Final = (bool, int, float, str)


class LayerSpec:
    """What a frozen dataclass derives from that describes one layer of a model: its sizes, and nothing secret."""

    __slots__ = ()

    @property
    def inner(self) -> tuple[LayerSpec, ...]:
        """The layers that this one is made of: empty but for blocks, whose weights are those of their layers."""
        return ()

    @property
    def block(self) -> bool:
        """Whether it is made of other layers, if only of none."""
        return bool(self.inner)

    @property
    def side_by_side(self) -> bool:
        """Whether the layers that it is made of are all fed what it is fed, and not one after the other."""
        return False

    @property
    def parted(self) -> bool:
        """Whether its layers may lie in several stages where it is a model's first: what it does behind them is done in
        the last one's, which borrows the first one's weight."""
        return False

    @property
    def grown(self) -> bool:
        """Whether its weight grows from the slopes of the loss, and is not moved by gradients: it stands alone then."""
        return False

    @property
    def unsupervised(self) -> bool:
        """Whether it learns from rows alone, without a target: it stands alone then."""
        return False

    @property
    def values_a_channel(self) -> int:
        """How many numbers of a row each of its statistics over the rows is of; 0 where it takes none."""
        return 0

    @property
    def adaptable(self) -> tuple[int, int] | None:
        """(inputs, outputs) of a layer beside which an adapter of low rank may stand; None where none may."""
        return None


class WeightedSpec(LayerSpec, ABC):
    """The spec of a layer that holds one trained matrix; several parameters lie in it as rows."""

    __slots__ = ()

    @property
    def decays(self) -> bool:
        """Whether weight decay takes of the weight: of what multiplies inputs, not of gains and statistics."""
        return True

    @property
    @abstractmethod
    def weight_shape(self) -> tuple[int, int]:
        """(rows, columns) of the weight, as checkpoints, owners and parties name and share it."""


class PublicSpec(LayerSpec, ABC):
    """The spec of a layer that computes with a public tensor of the job's base, called ``tensor`` in its file."""

    __slots__ = ()

    @property
    @abstractmethod
    def public_tensor(self) -> tuple[str, tuple[int, int]]:
        """Name and (rows, columns) of the public tensor."""

    @abstractmethod
    def merged(self, public: Mapping[str, Floats], trained: Iterator[Floats]) -> tuple[LayerSpec, Floats]:
        """The ordinary layer that computes the same, and its weight, in the shape of that layer.

        ``trained``: of which a layer that holds a secret weight takes the next, in the shape of ``weight_shape``.
        """


def public_specs(layers: Sequence[LayerSpec]) -> list[PublicSpec]:
    """The specs that compute with a public tensor, those inside of blocks in their place."""
    found: list[PublicSpec] = []
    for spec in layers:
        found += [spec] if isinstance(spec, PublicSpec) else public_specs(spec.inner)
    return found


def weighted_specs(layers: Sequence[LayerSpec]) -> list[WeightedSpec]:
    """The specs that have a weight, in the order of the weights' numbers; those inside of blocks in their place."""
    found: list[WeightedSpec] = []
    for spec in layers:
        found += [spec] if isinstance(spec, WeightedSpec) else weighted_specs(spec.inner)
    return found


def check_writable(spec: type) -> None:
    """Refuse (ConfigError) a spec one of whose fields could not be written as JSON and read back."""
    for name, kind in field_kinds(spec).items():
        if not _writable(kind):
            raise ConfigError(f"{spec.__name__}.{name} is of a kind that JSON cannot hold", "use numbers, words, specs")


def field_kinds(spec: type) -> dict[str, Any]:
    """The kind of every field of a dataclass, by name."""
    hints = get_type_hints(spec)
    return {field.name: hints[field.name] for field in fields(spec)}


def _writable(kind: Any) -> bool:
    if get_origin(kind) is tuple:
        inside = get_args(kind)
        return len(inside) == 2 and inside[1] is Ellipsis and _writable(inside[0])
    if not isinstance(kind, type) or isinstance(kind, types.GenericAlias):
        return False
    return (
        kind in _PLAIN or kind is LayerSpec or (is_dataclass(kind) and all(map(_writable, field_kinds(kind).values())))
    )
