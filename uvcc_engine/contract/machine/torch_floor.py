"""The oldest torch that the engine runs on, said in this one place, and what brings a newer one: an image, or a wheel.

``scaled_dot_product_attention`` shares keys between heads (``enable_gqa``) since 2.5. FlexAttention is used where its
block masks take sequence lengths (2.6 and newer, see ``uvcc_engine.nsa.flex``); other paths compute the same without.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from uvcc_engine.contract.errors import ConfigError

LEAST: Final = (2, 5)
# wheels of the package index: those built for CUDA 13 start with this version, and want this driver or a newer one
_CUDA_13: Final = (2, 11)
_DRIVER_OF_CUDA_13: Final = 580
_DRIVER_OF_CUDA_12: Final = 525

Version = tuple[int, int]


def text_of(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def version_of(text: str) -> Version | None:
    """``2.13.0+cpu`` is (2, 13); None for what is no version."""
    found = re.match(r"(\d{1,4})\.(\d{1,4})(?!\d)", text)
    return (int(found[1]), int(found[2])) if found else None


def version_of_image(image: str) -> Version | None:
    """The torch that an image's name promises (``cuda_12_4_pytorch_2_4``); None if it names none."""
    found = re.search(r"(?:pytorch|torch)[-_:]?(\d{1,4})[._](\d{1,4})(?!\d)", image)
    return (int(found[1]), int(found[2])) if found else None


def is_old(text: str) -> bool:
    """Whether this is a version, and too old. What names no version (a build of somebody's own) is not judged."""
    found = version_of(text)
    return found is not None and found < LEAST


def image_is_old(image: str) -> bool:
    found = version_of_image(image)
    return found is not None and found < LEAST


def what_is_old(version: str) -> str:
    return f"torch {version} is too old, the engine needs {text_of(LEAST)} or newer"


def wheel_for(driver: str = "") -> str:
    """The requirement that brings a torch which runs here; ``driver``: of the GPUs, empty on a machine without any.

    Raises ConfigError for a driver that no torch of the package index from ``LEAST`` on runs with.
    """
    least = f"torch>={text_of(LEAST)}"
    if not driver:
        return least
    major = int(driver.split(".", 1)[0]) if driver.split(".", 1)[0].isdigit() else 0
    if major >= _DRIVER_OF_CUDA_13:
        return least
    if major >= _DRIVER_OF_CUDA_12:
        return f"{least},<{text_of(_CUDA_13)}"
    raise ConfigError(
        f"the driver {driver[:40]} of the GPUs runs no torch from {text_of(LEAST)} on",
        f"take a pod with driver {_DRIVER_OF_CUDA_12} or newer",
    )


def install_hint(images: Iterable[str] = (), driver: str = "") -> str:
    """What to do about a torch that is too old: the images known to fit, else the wheel."""
    fitting = [i for i in images if (version_of_image(i) or (0, 0)) >= LEAST]
    if fitting:
        return f"name an image with a newer one (fleet.image: {' or '.join(fitting[:3])})"
    try:
        return f"name an image with a newer one, or have it installed (fleet.packages: ['{wheel_for(driver)}'])"
    except ConfigError as error:
        return error.hint


def brings_torch(requirements: Iterable[str]) -> bool:
    """Whether one of the pip requirements is torch itself."""
    return any(re.split(r"[^A-Za-z0-9._-]", r.strip(), maxsplit=1)[0].lower() == "torch" for r in requirements)
