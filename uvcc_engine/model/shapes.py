"""The shapes that activations have between layers, of one row of data. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError

WeightShape = tuple[int, int]
"""What one row of data is between two layers: (lines, features).

A table or an image is one line, pixels lying flat; a text is one line per position, once it is embedded.
"""


MOST_SHARED: Final = 2048
"""Numbers among which a softmax may share: classes, letters, or places that attention looks at. Of more, the line
through the inverse of their sum is too flat for the ring."""


@dataclass(frozen=True, slots=True)
class Image:
    """Shape of an image whose pixels lie flat in a row: channel by channel, line by line."""

    channels: int
    height: int
    width: int

    @property
    def size(self) -> int:
        """Numbers of an image: channels times height times width."""
        return self.channels * self.height * self.width


def check_features(spec: object, shape: WeightShape, features: int) -> None:
    """Refuse (ConfigError) a shape whose lines have another number of features than ``features``."""
    if shape[1] != features:
        raise ConfigError(
            f"{spec} takes {features} features, it is fed {shape[1]}", "make the layer below give as many"
        )


def check_positive(spec: Any, *names: str) -> None:
    """Refuse (ConfigError) a layer one of whose named fields is not a number of at least 1."""
    for name in names:
        value = getattr(spec, name)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{type(spec).__name__}.{name} is {value!r}", "it must be at least 1")


def check_shared(what: str, count: int) -> None:
    """Refuse (ConfigError) a softmax among more numbers than the ring holds."""
    if count > MOST_SHARED:
        raise ConfigError(f"{what} is {count}, a softmax among more than {MOST_SHARED} has no fixed point", "use fewer")


def check_image(image: Image) -> None:
    """Refuse (ConfigError) an image without channels, lines or columns."""
    check_positive(image, "channels", "height", "width")
